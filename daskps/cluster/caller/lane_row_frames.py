"""Frames and arrays of one call over lanes with rows, or with any number of words.

The module :mod:`daskps.cluster.caller.lane_rows` has the forms that a host is told
once, and fills the frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from daskps.cluster.caller.lane_form import (
    PATIENCE_SECONDS,
    SLOW_NBYTES,
    LaneForm,
    RowMove,
    WordMove,
)
from daskps.cluster.caller.lane_route import LaneRoute
from daskps.cluster.caller.targets import ReadSlice
from daskps.cluster.lane.frames import HEAD_NBYTES
from daskps.cluster.lane.row_forms import ID
from daskps.cluster.wire.read_words import words_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from daskps.cluster.caller.lanes import Lanes
    from daskps.cluster.caller.row_routes import RowSlice
    from daskps.cluster.wire.read_words import ReadWords
    from daskps.codecs import Codec
    from daskps.typing import Array


#: Copies and decodings to do once a frame has come, words before rows.
Moves: TypeAlias = "list[WordMove | RowMove]"


class RowFrame(LaneForm):
    """One frame of a call with rows: its form, and the parts of this call alone.

    Parameters
    ----------
    form : LaneForm
        The form that the host is told once.
    counts : sequence of int
        The number of ids for each shard and table.
    brought : sequence of (name, start, stop)
        The elements of the call's arrays that go, in their order.
    nbytes : int
        Bytes of these.
    reads : sequence of sequence of ReadSlice
        By shard the elements that come, and the places that they go to.
    moves : list of WordMove and RowMove
        Words that come, then rows that come one after the other, and belong to other
        places.
    asked : tuple of int
        The shards that the call is for.
    """

    __slots__ = ()

    def __init__(
        self,
        form: LaneForm,
        counts: Sequence[int],
        *,
        brought: Sequence[tuple[Any, int, int]],
        nbytes: int,
        reads: Sequence[tuple[ReadSlice, ...]],
        moves: Moves,
        asked: tuple[int, ...],
    ) -> None:
        self.worker, self.store, self.asked = form.worker, form.store, asked
        self.said, self.key, self.shards = form.said, form.key, form.shards
        self.rows, self.applied = form.rows, form.applied
        self.counts = np.array(counts, ID).tobytes()
        self.nbytes = len(self.counts) + nbytes
        self.slices, self.reads, self.moves = tuple(brought), tuple(reads), moves
        self._place()
        self.call_nbytes = nbytes + self.answer_nbytes - HEAD_NBYTES - self.rows.size
        self.patience = PATIENCE_SECONDS + self.call_nbytes / SLOW_NBYTES


class RowRoute(LaneRoute):
    """One call with rows over lanes: its frames, and the arrays of these.

    Parameters
    ----------
    lanes : Lanes
        The lanes of this process.
    arrays : mapping of name to ndarray
        Arrays that it brings beside rows.
    flats : sequence of ndarray
        The arrays that take the values it reads.
    run : int
        The run whose trainer calls; 0 outside runs.
    """

    __slots__ = ("brings", "outs")

    def __init__(
        self,
        lanes: Lanes,
        arrays: Mapping[Any, Array],
        flats: Sequence[Array],
        run: int = 0,
    ) -> None:
        self.lanes, self.run, self.looks = lanes, run, False
        self.may_wait, self.is_small = run != 0, False
        self.slices, self.rest, self.words = {}, {}, ()
        self.forms: tuple[LaneForm, ...] = ()
        #: The arrays that go, by their names in frames, and the arrays for those that
        #: come.
        self.brings: dict[Any, Array] = dict(arrays)
        self.outs: list[Array] = [*flats]

    def bring(self, array: Array) -> Hashable:
        """Add an array that goes with the frames; return its name in these."""
        name = "rows", len(self.brings)
        self.brings[name] = array
        return name

    def take_in(
        self, one: RowSlice, moves: Moves, codec: Codec | None = None
    ) -> ReadSlice:
        """Return the place where the rows of one shard are received."""
        asked, at = one.asked, one.at
        n, number = len(asked.ids) * asked.dim, one.number
        if isinstance(at, slice):
            where = slice(at.start * asked.dim, at.stop * asked.dim)
            into = ReadSlice((asked.dtype, 0, n), number, where)
        else:
            rows = np.empty(n, asked.dtype)
            moves.append(RowMove(number, at, rows.reshape(-1, asked.dim)))
            self.outs.append(rows)
            into = ReadSlice((asked.dtype, 0, n), len(self.outs) - 1, slice(0, n))
        if codec is None:
            return into
        how, *_ = words_of(codec, (), (asked,))
        return into if how is None else self.take_words(how, into, moves)

    def take_all(
        self,
        words: Sequence[ReadWords | None],
        slices: Sequence[ReadSlice],
        moves: Moves,
    ) -> list[ReadSlice]:
        """Return the places where arrays are received, some of them in words."""
        return [
            one if how is None else self.take_words(how, one, moves)
            for one, how in zip(slices, words, strict=True)
        ]

    def take_words(self, how: ReadWords, into: ReadSlice, moves: Moves) -> ReadSlice:
        """Return the place where words are received; their numbers go to `into`."""
        dtype, n, come = how.codec.dtype, how.n_words, len(self.outs)
        self.outs.append(np.empty(n, dtype))
        # Words first: the moves of rows after them copy from the numbers that they say.
        moves.insert(0, WordMove(come, how, into.number, into.where))
        return ReadSlice((dtype, 0, n), come, slice(0, n))
