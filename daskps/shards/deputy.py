"""Acting for a shard in a process that does not own it: a *deputy*.

A process that maps a shard's segment and has its lock may advance it: all that a shard
knows lies in there. A deputy cannot answer for what the owner alone keeps (why a run
has ended, what a cut holds back, which steps were not meant for all shards); it hands
the step back untouched (:mod:`daskps.shards.refusals`), and its caller sends it to the
owner.

The owner says in the segment's *gate* how far deputies may go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from daskps.shards.memory.format import GATE

if TYPE_CHECKING:
    from daskps.shards.memory.segment import Segment

#: Deputies may do anything.
OPEN: Final = 0
#: They may only read: a cut or a fence holds steps or rounds back.
READING: Final = 1
#: They may do nothing any more: the shard is being freed. It stays so.
CLOSED: Final = 2
#: They may take no ticket: its owner has let go of it, and the next one has yet to come.
#: Reads that need no lock go on.
RELEASED: Final = 3


class NotHereError(Exception):
    """A step that only the owner of the shard can take; nothing was changed."""


def gate_of(segment: Segment) -> int:
    """Return how far deputies may go."""
    return segment.header[GATE]


def set_gate(segment: Segment, gate: int) -> None:
    """Say how far deputies may go; under the shard's lock, but for the last time."""
    if segment.header[GATE] != CLOSED:
        segment.header[GATE] = gate
