"""What a host is told on lanes along a route, made ready once.

From one call to the next only numbers and the contents of arrays change. How long the
arrays are, where in the caller's they begin, what the answer looks like and where its
arrays go: all of that stays while the shards are where they are.
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

#: What of a step makes a form another one.
told_once = attrgetter("kind", "run", "rank", "tick", "producer", "wait", "whole")
#: Without a byte for so long, a lane is given up.
PATIENCE_SECONDS = 1.5
#: What a host takes in and applies in a second at least: that adds to the patience.
SLOW_NBYTES = 100_000_000

#: Which array of a target, which of its elements, dtype and number of these, and where
#: they are in a frame that is received at once.
LanePlace = tuple[int, slice, Any, int, int]
#: Which array of a request, and its elements from where to where.
LaneSlice = tuple[Any, int, int]


class RowMove(NamedTuple):
    """Rows that come one after the other, and belong elsewhere."""

    #: To which array of a target, and to which of its rows.
    number: int
    at: Array
    #: What has come, by row.
    rows: Array

    def put(self, outs: Sequence[Array]) -> None:
        """Put rows where they belong, all of which have come."""
        out = outs[self.number].reshape(-1, self.rows.shape[1])
        scatter(out, self.at, self.rows, cache_dir=cache_dir())


class WordMove(NamedTuple):
    """Words that come, and the numbers that they stand for."""

    #: Which of the arrays of a call they come to.
    come: int
    how: ReadWords
    #: To which array of a target the numbers go, and to which of its elements.
    number: int
    where: slice

    def put(self, outs: Sequence[Array]) -> None:
        """Put the numbers where they belong, all of whose words have come."""
        self.how.decode(outs[self.come], outs[self.number][self.where])


class LaneForm:
    """What one host is told: all but the numbers of a call, and its arrays.

    Parameters
    ----------
    worker : str
        The host's.
    call : Call
        A call of this form.
    slices : sequence of (name, start, stop)
        Which elements of the caller's arrays its arrays are, in their order.
    reads : mapping of int to sequence of ReadSlice, optional
        What it reads of a shard and where that goes.
    moves : sequence of WordMove
        Words among what is read.
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
        #: What the host is told once for each lane, and what that is known by.
        self.said = (
            say_form(call) if tables is None else {**say_form(call), "tables": tables}
        )
        text = json.dumps(self.said, separators=(",", ":")).encode()
        self.key = hashlib.blake2b(text, digest_size=16).digest()
        self.slices = tuple((n, a, b) for n, a, b in slices if b > a)
        #: Bytes of the arrays that go, and with those that come.
        self.nbytes = sum(part.step.nbytes for part in call.parts)
        self.call_nbytes = call.nbytes
        self.patience = PATIENCE_SECONDS + self.call_nbytes / SLOW_NBYTES
        self.shards = self.asked = tuple(part.shard for part in call.parts)
        #: Of frames with rows how many there are of each shard and table, and what has
        #: come that belongs elsewhere: words, and rows one after the other.
        self.counts = b""
        self.moves: Sequence[RowMove | WordMove] = moves
        n_shards = len(self.shards)
        #: The rows of an answer, and what they say where nothing is waited for.
        self.rows = struct.Struct(f"<{4 * n_shards}q")
        self.applied = (APPLIED,) * n_shards
        #: What is read of each of them, and where that goes.
        self.reads = tuple([tuple((reads or {}).get(s, ())) for s in self.shards])
        self._place()

    def _place(self) -> None:
        """Work out where in an answer what lies that is read."""
        at = rows_end = HEAD_NBYTES + self.rows.size
        places: list[LanePlace] = []
        for (dtype, start, stop), number, where in chain.from_iterable(self.reads):
            if n := stop - start:
                places.append((number, where, np.dtype(dtype), n, at))
                at += n * np.dtype(dtype).itemsize
        self.places = tuple(places)
        self.answer_nbytes = at
        #: What is received at first: all of it, or what comes before large arrays.
        self.first_nbytes = at if at < BUFFER_NBYTES else rows_end


def seen_of(form: LaneForm, seen: Mapping[int, int]) -> bytes:
    """Return which versions of the shards of a form were read last, in the same place."""
    return np.array([seen.get(shard, UNREAD) for shard in form.shards], LEAST).tobytes()


def least_of(form: LaneForm, min_version: int) -> bytes:
    """Return the versions that the shards of a form are waited for, as a body has them."""
    found = [at_least(shard, min_version) for shard in form.shards]
    return np.array(found, LEAST).tobytes() if any(found) else b""
