"""Immediate answers to calls of a socket: elements and rows, read without a shard's lock.

Small answers are one buffer. The host sends large ones straight from the weights, but
holds their end back until it knows that no update has overwritten the rest
(:mod:`daskps.cluster.sockets.frames`).
"""

from __future__ import annotations

import time
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.protocol.read_words import encoded
from daskps.cluster.sockets.frames import APPLIED, AnswerHead, held_back
from daskps.shards.reader import RowsRead, ShardReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from daskps.cluster.host.copy_budget import CopyBudget
    from daskps.cluster.host.hosted import HostedShard
    from daskps.cluster.protocol.messages import Part
    from daskps.layout.tables import Table
    from daskps.reduction import Empty
    from daskps.typing import Array

#: Answers up to this size are one buffer.
SMALL_NBYTES = 65_536
#: Reads up to this size go into a buffer that their template keeps.
NOW_NBYTES = 4096
#: How long answers copy a shard's weights after an update has overwritten weights while
#: they were sent.
COPY_SECONDS = 10.0
#: No flip: used where any flip but the last one seen and its successor is unexpected.
NEVER = -2


class TemplateAnswers:
    """Makes the answers to calls of a template.

    Parameters
    ----------
    parts : sequence of Part
        The parts of the template, one per shard.
    budget : CopyBudget
        Gives memory for the values.
    tables : sequence of Table
        The tables of which a call may read rows.
    """

    def __init__(
        self, parts: Sequence[Part], budget: CopyBudget, tables: Sequence[Table] = ()
    ) -> None:
        self._parts, self._budget, self._tables = parts, budget, tables
        self._shards = [part.shard for part in parts]
        self.has_reads = any(part.ranges for part in parts)
        self._nbytes = sum(
            (stop - start) * np.dtype(dtype).itemsize
            for part in parts
            for dtype, start, stop in part.ranges
        )
        #: Whether any values are sent as words of a codec.
        self._is_coded = any(part.words for part in parts)
        answered = sum(part.answer_nbytes for part in parts)
        self._head = AnswerHead(len(parts), answered)
        #: Bytes of memory for an answer, unless it is sent from the weights.
        self.read_nbytes = sum(part.read_nbytes for part in parts)
        #: The shards that `find` was last called with, and their readers.
        self._hosted: Sequence[HostedShard] = ()
        self._reads: list[ShardReader | None] = []
        #: By shard the end of its elements, where no rows come before, and the
        #: positions of the tables.
        self._places: list[tuple[int, list[int]]] = []
        #: The flip of each at the last call whose answer might have been the weights.
        self._seen: list[int] = []
        #: Whether `read_now` may answer; then the answer's buffer: head, rows, values.
        self.may_read_now = self._nbytes <= NOW_NBYTES and not (
            self._is_coded or tables
        )
        nbytes = self._nbytes if self.may_read_now else 0
        self._whole = bytearray(self._head.nbytes + nbytes)
        self._head.pack_into(self._whole, 0, 4 * len(parts) * (0,))
        self._out = np.frombuffer(self._whole, np.uint8)[self._head.nbytes :]

    def find(self, shards: Sequence[HostedShard]) -> None:
        """Make readers of these shards, for the calls from here on."""
        self._hosted, self._reads, self._places, at = shards, [], [], 0
        self._seen = [NEVER] * len(shards)
        for hosted, part in zip(shards, self._parts, strict=True):
            segment, parts = hosted.shard.segment, []
            for dtype, start, stop in part.ranges:
                end = at + (stop - start) * np.dtype(dtype).itemsize
                parts.append(((dtype, start, stop), 0, slice(at, end)))
                at = end
            who = part.step.run, part.step.rank
            reader = ShardReader(segment, parts, *who, in_bytes=True)
            self._reads.append(reader if parts or self._tables else None)
            of, layout = part.shard, hosted.layout
            positions = [layout.table_position(of, t.index) for t in self._tables]
            self._places.append((at, positions))

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
        self,
        bounds: Iterable[int],
        versions: Iterable[int],
        out: Array,
        asked: Sequence[Sequence[Array]] = (),
    ) -> list[int] | None:
        """Copy the values of all shards; return the rows of the answer's head.

        The rows that are `asked` of a shard follow its elements.
        """
        rows, outs, wanted, before = list[int](), (out,), list[RowsRead](), 0
        for i, (shard, read, bound, version) in enumerate(
            zip(self._shards, self._reads, bounds, versions, strict=False)
        ):
            lag = 0
            if asked:
                outs = (out[before:],)
                wanted, before = self._rows_of(i, asked[i], out, before)
            if read is not None and (wanted or self._parts[i].ranges):
                version = read.read(bound, outs, wanted)
                if version < 0:
                    return None
                lag = read.lag
            rows += (shard, max(0, version), lag, APPLIED)
        return rows

    def _rows_of(
        self, i: int, asked: Sequence[Array], out: Array, before: int
    ) -> tuple[list[RowsRead], int]:
        """Return the reads of rows of a shard, and the bytes of rows up to their end."""
        (first, positions), found = self._places[i], []
        at = first + before
        for table, position, ids in zip(self._tables, positions, asked, strict=True):
            end = at + len(ids) * table.row_nbytes
            if len(ids):
                found.append(RowsRead(position, ids, out[at:end].view(table.dtype)))
            at = end
        return found, at - first

    def read(
        self,
        number: int,
        bounds: Iterable[int],
        versions: Iterable[int],
        asked: Sequence[Sequence[Array]] = (),
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
        asked : sequence of sequence of ndarray, shape (k,), int64
            By shard the ids of rows to read, of each table.

        Returns
        -------
        list of buffers or None
            None if a shard must be asked.

        Raises
        ------
        DaskPSError
            If there is no room for an answer.
        """
        head, more = self._head, 0
        empty: Empty = self._budget.pool.empty
        if not (self.has_reads or asked):
            rows = list[int]()
            for shard, version in zip(self._shards, versions, strict=True):
                rows += (shard, version, 0, APPLIED)
            return [head.pack(number, rows)]
        for of in asked:
            for table, ids in zip(self._tables, of, strict=True):
                more += len(ids) * table.row_nbytes
        nbytes = self._nbytes + more
        if is_small := nbytes <= SMALL_NBYTES and not self._is_coded:
            whole = np.empty(head.nbytes + nbytes, np.uint8)
            out = whole[head.nbytes :]
        else:
            frame = None if asked else self._read_straight(number, bounds, versions)
            if frame is not None:
                return frame
            empty = self._budget.answer_now(self.read_nbytes + more)
            out = empty(nbytes, np.uint8)
        copied = self._copy(bounds, versions, out, asked)
        if copied is None:
            return None
        first = head.pack_before(number, copied, more)
        if is_small:
            whole[: head.nbytes] = np.frombuffer(first, np.uint8)
            return [whole]
        return [first, *(self._in_words(out, empty) if self._is_coded else [out])]

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
            if hosted.shard.segment.payload.device is not None:
                return None  # there is nothing that a socket could send
            if read is not None:
                flip, version, sources = read.show(bound)
                if flip < 0:
                    return None
                segment, lag = hosted.shard.segment, read.lag
                copies |= flip > self._seen[i] + 1
                # It would wait for the second copy, and be overwritten meanwhile.
                copies |= hosted.backing is not None and hosted.behind > 0
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

        return held_back([self._head.pack(number, rows), *weights], is_whole)
