"""Immediate answers to calls of a lane, with values read without a shard's lock.

Small answers are one buffer. The host sends large ones straight from the weights, but
holds their end back until it knows that no update has overwritten the rest
(:mod:`daskps.cluster.lane.tail`).
"""

from __future__ import annotations

import time
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.lane.frames import APPLIED, AnswerHead
from daskps.cluster.lane.tail import TAIL_NBYTES, Tail
from daskps.cluster.wire.read_words import encoded
from daskps.shards.reader import ShardReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from daskps.cluster.host.copy_budget import CopyBudget
    from daskps.cluster.host.hosted import HostedShard
    from daskps.cluster.wire.messages import Part
    from daskps.reduction import Empty
    from daskps.typing import Array

#: Answers up to this size are one buffer.
SMALL_NBYTES = 65_536
#: Reads up to this size go into a buffer that their form keeps.
NOW_NBYTES = 4096
#: How long answers copy a shard's weights after an update has overwritten weights while
#: they were sent.
COPY_SECONDS = 10.0
#: No flip: used where any flip but the last one seen and its successor is unexpected.
NEVER = -2


class FormAnswers:
    """Makes the answers to calls of a form.

    Parameters
    ----------
    parts : sequence of Part
        The parts of the form, one per shard.
    budget : CopyBudget
        Gives memory for the values.
    """

    def __init__(self, parts: Sequence[Part], budget: CopyBudget) -> None:
        self._parts, self._budget = parts, budget
        self._shards = [part.shard for part in parts]
        self.has_reads = any(part.ranges for part in parts)
        self._nbytes = sum(
            (stop - start) * np.dtype(dtype).itemsize
            for part in parts
            for dtype, start, stop in part.ranges
        )
        #: Whether any values are sent as words of a codec.
        self._is_coded = any(part.words for part in parts)
        self._is_small = self._nbytes <= SMALL_NBYTES and not self._is_coded
        answered = sum(part.answer_nbytes for part in parts)
        self._head = AnswerHead(len(parts), answered)
        #: Bytes of memory for an answer, unless it is sent from the weights.
        self.read_nbytes = sum(part.read_nbytes for part in parts)
        #: The shards that `find` was last called with, and their readers.
        self._hosted: Sequence[HostedShard] = ()
        self._reads: list[ShardReader | None] = []
        #: The flip of each at the last call whose answer might have been the weights.
        self._seen: list[int] = []
        #: Whether `read_now` may answer; then the answer's buffer: head, rows, values.
        self.may_read_now = self._is_small and self._nbytes <= NOW_NBYTES
        nbytes = self._nbytes if self.may_read_now else 0
        self._whole = bytearray(self._head.nbytes + nbytes)
        self._head.pack_into(self._whole, 0, 4 * len(parts) * (0,))
        self._out = np.frombuffer(self._whole, np.uint8)[self._head.nbytes :]

    def find(self, shards: Sequence[HostedShard]) -> None:
        """Make readers of these shards, for the calls from here on."""
        self._hosted, self._reads, at = shards, [], 0
        self._seen = [NEVER] * len(shards)
        for hosted, part in zip(shards, self._parts, strict=True):
            segment, places = hosted.shard.segment, []
            for dtype, start, stop in part.ranges:
                end = at + (stop - start) * np.dtype(dtype).itemsize
                places.append(((dtype, start, stop), 0, slice(at, end)))
                at = end
            who = part.step.run, part.step.rank
            reader = ShardReader(segment, places, *who, in_bytes=True)
            self._reads.append(reader if places else None)

    def read_now(self, number: int, bound: int) -> bytearray | None:
        """Return the small frame that answers a call which only reads.

        The next call overwrites it. None if a shard must be asked.
        """
        rows = self._copy(repeat(bound), repeat(0), self._out)
        if rows is None:
            return None
        self._head.pack_over(self._whole, number, rows)
        return self._whole

    def _copy(
        self, bounds: Iterable[int], versions: Iterable[int], out: Array
    ) -> list[int] | None:
        """Copy the values of all shards; return the rows of the answer's head."""
        rows, outs = list[int](), (out,)
        for shard, read, bound, version in zip(
            self._shards, self._reads, bounds, versions, strict=False
        ):
            lag = 0
            if read is not None:
                version = read.read(bound, outs)
                if version < 0:
                    return None
                lag = read.lag
            rows += (shard, version, lag, APPLIED)
        return rows

    def read(
        self, number: int, bounds: Iterable[int], versions: Iterable[int]
    ) -> list[Any] | None:
        """Return the frame that answers a call, with the values it reads.

        Parameters
        ----------
        number : int
            Number of the frame.
        bounds : iterable of int
            Least version, or clock, of each shard for its reads.
        versions : iterable of int
            Version after its step, for shards of which nothing is read.

        Returns
        -------
        list of buffers or None
            None if a shard must be asked.

        Raises
        ------
        DaskPSError
            If there is no room for an answer.
        """
        head = self._head
        empty: Empty = self._budget.pool.empty
        if not self.has_reads:
            rows = list[int]()
            for shard, version in zip(self._shards, versions, strict=True):
                rows += (shard, version, 0, APPLIED)
            return [head.pack(number, rows)]
        if self._is_small:
            whole = np.empty(head.nbytes + self._nbytes, np.uint8)
            out = whole[head.nbytes :]
        else:
            frame = self._read_straight(number, bounds, versions)
            if frame is not None:
                return frame
            empty = self._budget.answer_now(self.read_nbytes)
            out = empty(self._nbytes, np.uint8)
        copied = self._copy(bounds, versions, out)
        if copied is None:
            return None
        if self._is_small:
            head.pack_into(whole, number, copied)
            return [whole]
        sent = self._in_words(out, empty) if self._is_coded else [out]
        return [head.pack(number, copied), *sent]

    def _in_words(self, read: Array, empty: Empty) -> list[Array]:
        """Return arrays to send: the values in one buffer, encoded as words."""
        found, at = list[Any](), 0
        for part in self._parts:
            arrays = []
            for dtype, n in part.answered:
                end = at + n * np.dtype(dtype).itemsize
                arrays.append(read[at:end].view(dtype))
                at = end
            found += [a for a in encoded(arrays, part.words, empty) if a.nbytes]
        return found

    def _read_straight(
        self, number: int, bounds: Iterable[int], versions: Iterable[int]
    ) -> list[Any] | None:
        """Return the same without a copy: the weights, and an end that is held back.

        None if a copy is better: updates may overwrite the weights while they are sent,
        but seldom while they are copied. None also if the values are sent as words.
        """
        if self._is_coded:
            return None
        rows, weights, shown, copies = list[int](), list["Array"](), [], False
        for i, (hosted, read, bound, version) in enumerate(
            zip(self._hosted, self._reads, bounds, versions, strict=False)
        ):
            lag = 0
            if read is not None:
                flip, version, sources = read.show(bound)
                if flip < 0:
                    return None
                segment, lag = hosted.shard.segment, read.lag
                copies |= flip > self._seen[i] + 1
                copies |= time.monotonic() < segment.copied_until
                self._seen[i] = flip
                weights += sources
                shown.append((read, flip, segment))
            rows += (self._shards[i], version, lag, APPLIED)
        if copies:
            return None

        def is_whole() -> bool:
            for read, flip, segment in shown:
                if not read.holds(flip):
                    # Also for other sockets, for a while.
                    segment.copied_until = time.monotonic() + COPY_SECONDS
                    return False
            return True

        at = max(0, len(weights[-1]) - TAIL_NBYTES)
        *before, last = weights
        tail = Tail(last[at:], is_whole)
        return [self._head.pack(number, rows), *before, last[:at], tail]
