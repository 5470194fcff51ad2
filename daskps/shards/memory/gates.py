"""How far processes that do not own a shard may go: a word of its segment's header."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from daskps.shards.memory.format import GATE

if TYPE_CHECKING:
    from daskps.shards.memory.segment import Segment

#: Deputies may do anything, may only read, may do nothing any more: the shard is being
#: freed, or its owner has let go of it and the next one has yet to come.
OPEN: Final = 0
READING: Final = 1
CLOSED: Final = 2
RELEASED: Final = 3
N_GATES: Final = 4


def gate_of(segment: Segment) -> int:
    """Return how far deputies may go."""
    return segment.header[GATE]


def set_gate(segment: Segment, gate: int) -> None:
    """Say how far deputies may go; under the shard's lock, but for the last time."""
    if segment.words[GATE] != CLOSED:
        segment.words[GATE] = gate
