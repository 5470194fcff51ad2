"""How calls with rows of tables take lanes: forms by host, and each call's own frames.

Which tables a call names stays from call to call, its ids do not. A form of a read names
all shards of its host, those without an id too: else there were as many forms as sets of
shards that ids can fall on.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.caller.lane_form import (
    PATIENCE_SECONDS,
    SLOW_NBYTES,
    LaneForm,
    RowMove,
    told_once,
)
from daskps.cluster.caller.lane_route import LaneRoute, looks_there, unlooked
from daskps.cluster.caller.routes import route_of
from daskps.cluster.caller.shard_map import Prepared
from daskps.cluster.caller.targets import ReadSlice
from daskps.cluster.lane.frames import HEAD_NBYTES
from daskps.cluster.lane.row_forms import ID, given_in
from daskps.limits import MOST_PUSHED_ROWS
from daskps.shards.run_record import changes

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from daskps.cluster.caller.lanes import Lanes
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.row_routes import RowCut, RowsGiven, RowSlice
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.typing import Array

#: How many kinds of calls with rows are ready for lanes.
MOST_KINDS = 24


class HostRows:
    """What one host is told once of calls with rows of the same tables.

    Parameters
    ----------
    meta : StoreMap
        The store.
    shards : sequence of int
        Shards of one host.
    request : Request
        A call of this form.
    pushed, read : sequence of int
        Which of the store's tables it brings rows of, and reads.
    looks : bool
        Whether the shard looks for NaN and infinity in the rows that it gets.
    """

    def __init__(
        self,
        meta: StoreMap,
        shards: Sequence[int],
        request: Request,
        *,
        pushed: Sequence[int],
        read: Sequence[int],
        looks: bool = False,
    ) -> None:
        layout, target = meta.layout, request.target
        plain = None if target is None else target._replace(rows={})
        call = request._replace(rows=(), target=plain).call(meta, shards, 0.0, "")
        call = unlooked(call) if looks else call
        tables = [layout.tables[k] for k in pushed]
        arrays = [
            [(item.data.dtype.name, len(item.data)) for item in part.step.items]
            for part in call.parts
        ]
        self.form = LaneForm(
            meta.where.owners[shards[0]], call, tables=(tuple(pushed), tuple(read))
        )
        self._layout, self._read = layout, tuple(read)
        #: Position of the first table of each shard.
        self._firsts = [len(layout.pieces[shard]) for shard in shards]
        #: What comes after the ids, and which of the caller's arrays those are.
        self._given = given_in(arrays, tables, call.step.kind)
        self._slices = [
            request.route.slices[shard] if request.arrays else () for shard in shards
        ]
        self._reads = [() if plain is None else plain.slices.get(s, ()) for s in shards]

    def frame(
        self,
        given: Sequence[RowsGiven],
        rows: Mapping[int, Sequence[RowSlice]],
        meant: Sequence[int],
        route: RowRoute,
    ) -> RowFrame:
        """Return the frame of a call; its arrays go into those of the route.

        Parameters
        ----------
        given : sequence of RowsGiven
            The rows that it brings.
        rows : mapping of int to sequence of RowSlice
            Those that it reads, by shard.
        meant : sequence of int
            The shards of it that are meant.
        route : RowRoute
            The call.
        """
        form = self.form
        cuts = [one.cut.ids_of(shard) for shard in form.shards for one in given]
        counts, reads = [len(ids) for ids in cuts], []
        moves: list[RowMove] = []
        for shard, slices, first in zip(
            form.shards, self._reads, self._firsts, strict=True
        ):
            of = rows.get(shard, ()) if shard in meant else ()
            found, marks = [*slices], list[ReadSlice]()
            for table in self._read:
                n = 0
                for one in of:
                    if one.asked.position == first + table:
                        n = len(one.asked.ids)
                        cuts.append(one.asked.ids)
                        found.append(route.take_in(one, moves))
                        if one.marks is not None:
                            marks.append(ReadSlice(("uint8", 0, n), *one.marks))
                counts.append(n)
            reads.append((*found, *marks))
        brought = [(route.bring(ids), 0, len(ids)) for ids in cuts if len(ids)]
        nbytes = ID.itemsize * sum(counts)
        for part, slot, dtype, n, k in self._given:
            if k < 0:
                _, name, start, stop = self._slices[part][slot]
            elif n and counts[k]:
                item = given[k - part * len(given)].item(
                    self._layout, form.shards[part], sent=True
                )
                name, start, stop = route.bring(item.data), 0, counts[k] * n
            else:
                continue
            brought.append((name, start, stop))
            nbytes += dtype.itemsize * (stop - start)
        asked = form.shards if len(meant) == len(form.shards) else tuple(meant)
        return RowFrame(
            form,
            counts,
            brought=brought,
            nbytes=nbytes,
            reads=reads,
            moves=moves,
            asked=asked,
        )


class RowFrame(LaneForm):
    """One frame of a call with rows: its form, and what is this call's alone.

    Parameters
    ----------
    form : LaneForm
        What the host is told once.
    counts : sequence of int
        How many ids there are, for each shard and table.
    brought : sequence of (name, start, stop)
        Which elements of the call's arrays go, in their order.
    nbytes : int
        Bytes of these.
    reads : sequence of sequence of ReadSlice
        What comes of each shard, and where it goes.
    moves : sequence of RowMove
        Rows that come one after the other, and belong elsewhere.
    asked : tuple of int
        The shards that the call means.
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
        moves: Sequence[RowMove],
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
    """One call with rows as lanes take it: its frames, and the arrays of these.

    Parameters
    ----------
    lanes : Lanes
        The lanes of this process.
    arrays : mapping of name to ndarray
        Arrays that it brings beside rows.
    flats : sequence of ndarray
        Where goes what it reads.
    run : int
        The run of who calls; 0 outside runs.
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
        #: What goes, by what frames call it, and where goes what comes.
        self.brings: dict[Any, Array] = dict(arrays)
        self.outs: list[Array] = [*flats]

    def bring(self, array: Array) -> Hashable:
        """Return what an array is called that goes with the frames."""
        name = "rows", len(self.brings)
        self.brings[name] = array
        return name

    def take_in(self, one: RowSlice, moves: list[RowMove]) -> ReadSlice:
        """Return where rows are received that one shard is asked for."""
        asked, at = one.asked, one.at
        n, number = len(asked.ids) * asked.dim, one.number
        if isinstance(at, slice):
            where = slice(at.start * asked.dim, at.stop * asked.dim)
            return ReadSlice((asked.dtype, 0, n), number, where)
        rows = np.empty(n, asked.dtype)
        moves.append(RowMove(number, at, rows.reshape(-1, asked.dim)))
        self.outs.append(rows)
        return ReadSlice((asked.dtype, 0, n), len(self.outs) - 1, slice(0, n))


class RowRoutes:
    """The ways of calls with rows by lanes, from one process to the shards of a store.

    Parameters
    ----------
    lanes : Lanes
        The lanes of this process.
    meta : StoreMap
        The store.
    """

    def __init__(self, lanes: Lanes, meta: StoreMap) -> None:
        self._lanes, self._meta = lanes, meta
        self._kinds: Prepared[Hashable, _Kind] = Prepared(meta, MOST_KINDS)

    def find(self, request: Request, shards: Sequence[int]) -> RowRoute | None:
        """Return how a call takes lanes; None where it brings too many rows for them."""
        meta, step, target = self._meta, request.step, request.target
        for one in request.rows:
            if len(one.cut.ids) > MOST_PUSHED_ROWS and not _may_go(one.cut):
                return None
        first = len(meta.layout.parameters)
        pushed = tuple([one.cut.table.index - first for one in request.rows])
        read = _tables_of(meta, target.rows) if target else ()
        slices = {} if target is None else target.slices
        looks = request.check is not None and looks_there(request, shards)
        # Its shards differ from call to call; see above.
        only_rows = not (changes(step) or slices or request.arrays)
        key = (
            None if only_rows else (request.route, *shards),
            *told_once(step),
            request.codec,
            pushed,
            read,
            looks,
        )
        kind, where = self._kinds.find(key), meta.where
        if kind is None or not (kind.slices is slices or kind.slices == slices):
            kind = _Kind(slices)
            self._kinds.keep(key, kind, where)
        hosts: dict[str, list[int]] = {}
        for shard in shards:
            hosts.setdefault(where.owners[shard], []).append(shard)
        flats: Sequence[Array] = ()
        rows: Mapping[int, Sequence[RowSlice]] = {}
        if target is not None:
            flats, rows = target.flats, target.rows
        route, frames = RowRoute(self._lanes, request.arrays, flats, step.run), []
        for worker, of in hosts.items():
            form = kind.forms.get(worker)
            if form is None:
                made, said = request, of
                if only_rows:
                    said = [s for s, w in enumerate(where.owners) if w == worker]
                    made = request._replace(route=route_of(meta, (), None))
                form = HostRows(meta, said, made, pushed=pushed, read=read, looks=looks)
                kind.forms[worker] = form
            frames.append(form.frame(request.rows, rows, of, route))
        route.forms, route.looks = tuple(frames), looks
        return route


class _Kind:
    """The forms of calls with rows that differ in their ids alone, by host."""

    def __init__(self, slices: Mapping[int, tuple[ReadSlice, ...]]) -> None:
        self.slices = slices
        self.forms: dict[str, HostRows] = {}


def _may_go(cut: RowCut) -> bool:
    """Return whether each shard gets no more rows than a lane takes."""
    return max(b - a for a, b in pairwise(cut.starts)) <= MOST_PUSHED_ROWS


def _tables_of(
    meta: StoreMap, rows: Mapping[int, Sequence[RowSlice]]
) -> tuple[int, ...]:
    """Return which of the store's tables are read."""
    pieces = meta.layout.pieces
    found = {
        one.asked.position - len(pieces[shard])
        for shard, of in rows.items()
        for one in of
    }
    return tuple(sorted(found))
