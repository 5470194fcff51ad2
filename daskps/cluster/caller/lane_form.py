"""Forms: the part that all calls along a route share, sent once over each lane.

From one call to the next only numbers and the contents of arrays change. The lengths of
the arrays, their places in the caller's, the layout of the answer and the places of its
arrays stay while the shards are where they are.
"""

from __future__ import annotations

import hashlib
import json
import struct
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.cluster.caller.routes import at_least
from daskps.cluster.lane.channel import BUFFER_NBYTES
from daskps.cluster.lane.forms import LEAST, say_form
from daskps.cluster.lane.frames import APPLIED, HEAD_NBYTES
from daskps.config import cache_dir
from daskps.kernels.row_moves import scatter
from daskps.shards.steps import UNREAD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.targets import ReadSlice
    from daskps.cluster.wire.messages import Call
    from daskps.cluster.wire.read_words import ReadWords
    from daskps.typing import Array

#: Fields of a step that a form has: steps that differ in these need different forms.
told_once = attrgetter("kind", "run", "rank", "tick", "producer", "wait", "whole")
#: A caller gives a lane up that brings no byte for so long.
PATIENCE_SECONDS = 1.5
#: Bytes that a host takes in and applies in a second at least; they add to the
#: patience.
SLOW_NBYTES = 100_000_000

#: Number of an array of a target, elements of it, their dtype and number, and their
#: place in a frame that is received at once.
LanePlace = tuple[int, slice, Any, int, int]
#: Name of an array of a request, and start and stop of elements of it.
LaneSlice = tuple[Any, int, int]


class RowMove(NamedTuple):
    """Rows that arrive one after the other, and belong to other places."""

    #: Number of the array of a target that they go to, and the rows of it.
    number: int
    at: Array
    #: The rows that have come.
    rows: Array

    def put(self, outs: Sequence[Array]) -> None:
        """Put the rows where they belong, once all have come."""
        out = outs[self.number].reshape(-1, self.rows.shape[1])
        scatter(out, self.at, self.rows, cache_dir=cache_dir())


class WordMove(NamedTuple):
    """Words that arrive, and the places of the numbers that they stand for."""

    #: Number of the array of a call that they are received in.
    come: int
    how: ReadWords
    #: Number of the array of a target that the numbers go to, and the elements of it.
    number: int
    where: slice

    def put(self, outs: Sequence[Array]) -> None:
        """Put the numbers where they belong, once all of their words have come."""
        self.how.decode(outs[self.come], outs[self.number][self.where])


class LaneForm:
    """The form of calls to one host: all but the numbers of a call, and its arrays.

    Parameters
    ----------
    worker : str
        Address of the host.
    call : Call
        A call of this form.
    slices : sequence of (name, start, stop)
        The elements of the caller's arrays that a call sends, in their order.
    reads : mapping of int to sequence of ReadSlice, optional
        By shard the elements that it reads, and the places that they go to.
    moves : sequence of WordMove
        The words among the values that it reads.
    tables : (sequence of int, sequence of int), optional
        Tables of which its frames bring rows, and of which they read some; see
        :mod:`daskps.cluster.caller.lane_rows`.
    """

    __slots__ = (
        "answer_nbytes",
        "applied",
        "asked",
        "call_nbytes",
        "counts",
        "first_nbytes",
        "key",
        "moves",
        "nbytes",
        "patience",
        "places",
        "reads",
        "rows",
        "said",
        "shards",
        "slices",
        "store",
        "worker",
    )

    def __init__(
        self,
        worker: str,
        call: Call,
        slices: Sequence[LaneSlice] = (),
        reads: Mapping[int, Sequence[ReadSlice]] | None = None,
        *,
        moves: Sequence[WordMove] = (),
        tables: tuple[Sequence[int], Sequence[int], bool] | None = None,
    ) -> None:
        self.worker, self.store = worker, call.store
        #: The text of the form, sent once for each lane, and the key that it is known
        #: by.
        self.said = (
            say_form(call) if tables is None else {**say_form(call), "tables": tables}
        )
        text = json.dumps(self.said, separators=(",", ":")).encode()
        self.key = hashlib.blake2b(text, digest_size=16).digest()
        self.slices = tuple((n, a, b) for n, a, b in slices if b > a)
        #: Bytes of the arrays that go, and of these and the arrays that come.
        self.nbytes = sum(part.step.nbytes for part in call.parts)
        self.call_nbytes = call.nbytes
        self.patience = PATIENCE_SECONDS + self.call_nbytes / SLOW_NBYTES
        self.shards = self.asked = tuple(part.shard for part in call.parts)
        #: For frames with rows: the number of rows of each shard and table, and the
        #: words and rows that arrive one after the other and belong to other places.
        self.counts = b""
        self.moves: Sequence[RowMove | WordMove] = moves
        n_shards = len(self.shards)
        #: The layout of an answer's rows, and their codes where no shard waits for
        #: anything.
        self.rows = struct.Struct(f"<{4 * n_shards}q")
        self.applied = (APPLIED,) * n_shards
        #: By shard the elements that are read, and the places that they go to.
        self.reads = tuple([tuple((reads or {}).get(s, ())) for s in self.shards])
        self._place()

    def _place(self) -> None:
        """Work out where in an answer the values lie that are read."""
        at = rows_end = HEAD_NBYTES + self.rows.size
        places: list[LanePlace] = []
        for (dtype, start, stop), number, where in chain.from_iterable(self.reads):
            if n := stop - start:
                places.append((number, where, np.dtype(dtype), n, at))
                at += n * np.dtype(dtype).itemsize
        self.places = tuple(places)
        self.answer_nbytes = at
        #: Bytes that are received first: the whole answer, or the part before large
        #: arrays.
        self.first_nbytes = at if at < BUFFER_NBYTES else rows_end


def seen_of(form: LaneForm, seen: Mapping[int, int]) -> bytes:
    """Return the versions that were last read of a form's shards, packed for a body."""
    return np.array([seen.get(shard, UNREAD) for shard in form.shards], LEAST).tobytes()


def least_of(form: LaneForm, min_version: int) -> bytes:
    """Return the versions a call waits for at a form's shards, packed for a body."""
    found = [at_least(shard, min_version) for shard in form.shards]
    return np.array(found, LEAST).tobytes() if any(found) else b""
