"""The plain reads of one lane that are answered without the interpreter's lock.

A read is plain whose shards are read without a lock, and which says nothing else. What it
reads is looked up once, when its form is said; then :mod:`daskps.cluster.lane.plain_reads`
answers it. A shard that is freed, moved or adopted says so in words of its memory. That
stays where it is as long as it is known here; a host that frees it has its lanes look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskps.cluster.lane.frames import HEAD_NBYTES, MOST_FORMS, ROW_NBYTES
from daskps.cluster.lane.plain_words import (
    FD,
    LANE_WORDS,
    MOST_PARTS,
    N_NBYTES,
    N_READS,
    TABLE,
    USED,
    WANTED,
)
from daskps.shards.addressed import part_of
from daskps.shards.memory.format import MAX_RANKS, integers
from daskps.shards.steps import NOTHING, READ

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.host.hosted import HostedShard
    from daskps.cluster.wire.messages import Call, Part

#: An answer that is longer is for Python: what it waits for the interpreter is little then.
#: Of 1 MiB with what is said of its shards.
MOST_NBYTES = 2**20 + 2**12


class CompiledReads:
    """What one lane answers without the interpreter.

    One thread at a time has it; others may wake that one, and read what was counted.

    Parameters
    ----------
    fd : int
        The lane's socket, over TCP and without TLS.
    """

    def __init__(self, fd: int) -> None:
        self._table = np.zeros(0, np.int64)
        #: By form: its entry, and whose memory that is about.
        self._known: dict[int, tuple[list[int], Sequence[HostedShard]]] = {}
        self._lane = np.zeros(LANE_WORDS, np.int64)
        self._words = integers(self._lane)
        self._words[FD] = fd
        #: Where the loops find it.
        self.address: int = self._lane.ctypes.data
        self._lay_out()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def counted(self) -> tuple[int, int]:
        """Reads that were answered here, and the bytes of the answers."""
        return self._words[N_READS], self._words[N_NBYTES]

    @property
    def used(self) -> float:
        """When one was answered last, in the time of `time.monotonic`."""
        return self._words[USED] / 1000

    def learn(
        self, form: int, template: Call, hosted_shards: Sequence[HostedShard]
    ) -> bool:
        """Take a form that was said, in place of an earlier one; return whether it can.

        Parameters
        ----------
        form : int
            Its number.
        template : Call
            A call of it.
        hosted_shards : sequence of HostedShard
            The shards of its parts.
        """
        self.forget(form)
        parts = [*zip(template.parts, hosted_shards, strict=True)]
        in_words = template.codec or template.read_codec
        if in_words or not all(_is_plain(*pair) for pair in parts):
            return False
        step = template.step
        entry, nbytes = [len(parts), step.run, 0], HEAD_NBYTES + ROW_NBYTES * len(parts)
        for part, hosted in parts:
            segment, reader = hosted.shard.segment, (step.run, step.rank)
            shard = part.shard, part.step.generation
            words = part_of(segment, shard, reader, part.ranges)
            entry += [1 + len(words), *words]
            nbytes += sum(
                (b - a) * np.dtype(dtype).itemsize for dtype, a, b in part.ranges
            )
        if nbytes > MOST_NBYTES or len(parts) > MOST_PARTS:
            return False
        entry[2] = nbytes
        self._known[form] = entry, hosted_shards
        self._lay_out()
        return True

    def forget(self, form: int) -> None:
        """Let go of a form, and of the memory that it reads."""
        if self._known.pop(form, None) is not None:
            self._lay_out()

    def wake(self) -> None:
        """Have its thread come back soon, as WOKEN; from any thread."""
        self._words[WANTED] = 1

    @property
    def is_wanted(self) -> bool:
        """Whether its thread was to come back."""
        return bool(self._words[WANTED])

    def keep(self, is_there: Callable[[HostedShard], bool]) -> None:
        """Let go of the forms of shards that are there no more, having been woken."""
        # First: what goes from here on is to be looked for again.
        self._words[WANTED] = 0
        for form, (_, hosted_shards) in list(self._known.items()):
            if not all(map(is_there, hosted_shards)):
                self.forget(form)

    def _lay_out(self) -> None:
        """Make the table anew."""
        words = [0] * MOST_FORMS
        for form, (entry, _) in self._known.items():
            words[form] = len(words)
            words += entry
        self._table = np.array(words, np.int64)
        address = self._table.ctypes.data
        for form in self._known:
            self._table[form] = address + 8 * words[form]
        self._words[TABLE] = address


def _is_plain(part: Part, hosted: HostedShard) -> bool:
    """Return whether a part of a call does nothing but read."""
    step = part.step
    return (
        step.kind == NOTHING
        and step.wait == READ
        and not (step.items or step.tick or step.producer)
        and (0 <= step.rank < MAX_RANKS if step.run else step.rank == -1)
        and step.generation == hosted.shard.generation
        and not hosted.locks_reads
    )
