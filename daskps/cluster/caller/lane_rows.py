"""Calls with rows of tables over lanes: forms by host, and the frames of each call.

The tables stay the same from call to call, the ids do not. A form of a read names all
shards of its host, those without an id too: else there were as many forms as sets of
shards that ids can fall on.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import codecs
from daskps.cluster.caller.lane_form import (
    LaneForm,
    told_once,
)
from daskps.cluster.caller.lane_route import looks_there, unlooked
from daskps.cluster.caller.lane_row_frames import Moves, RowFrame, RowRoute
from daskps.cluster.caller.routes import route_of
from daskps.cluster.caller.shard_map import Prepared
from daskps.cluster.caller.targets import ReadSlice
from daskps.cluster.lane.row_forms import ID, given_in, most_words
from daskps.limits import MOST_PUSHED_ROWS
from daskps.shards.run_record import changes

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from daskps.cluster.caller.lanes import Lanes
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.row_routes import RowCut, RowsGiven, RowSlice
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.wire.messages import Call
    from daskps.typing import Array

#: Number of kinds of calls with rows that are kept ready for lanes.
MOST_KINDS = 24


class HostRows:
    """The form of calls with rows of the same tables to one host.

    Parameters
    ----------
    meta : StoreMap
        The store.
    shards : sequence of int
        Shards of one host.
    request : Request
        A call of this form.
    pushed, read : sequence of int
        Numbers of the store's tables that it brings rows of, and that it reads.
    looks : bool
        Whether the shard looks for NaN and infinity in the rows that it gets.
    finds : bool
        Whether it only asks which rows there are, of the tables that it reads.
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
        finds: bool = False,
    ) -> None:
        layout, target = meta.layout, request.target
        plain = None if target is None else target._replace(rows={})
        call = request._replace(rows=(), target=plain).call(meta, shards, 0.0, "")
        call = unlooked(call) if looks else call
        #: The codec of the words that it brings; each frame says how many words there
        #: are.
        self._codec = codecs.named(request.codec) if request.codec else None
        if self._codec is not None:
            call = _unsized(call)
        tables = [layout.tables[k] for k in pushed]
        arrays = [
            [(item.data.dtype.name, len(item.data)) for item in part.step.items]
            for part in call.parts
        ]
        named = tuple(pushed), tuple(read), finds
        self.form = LaneForm(meta.where.owners[shards[0]], call, tables=named)
        self._layout, self._read = layout, tuple(read)
        #: Position of the first table of each shard.
        self._firsts = [len(layout.pieces[shard]) for shard in shards]
        #: The arrays that follow the ids, and the caller's arrays that they are.
        word = "" if self._codec is None else self._codec.dtype
        self._word_nbytes = np.dtype(word or "uint8").itemsize
        n_read = len(self._read)
        self._given = given_in(arrays, tables, call.step.kind, n_read=n_read, word=word)
        self._slices = [
            request.route.slices[shard] if request.arrays else () for shard in shards
        ]
        self._reads = [() if plain is None else plain.slices.get(s, ()) for s in shards]
        #: By shard the words of the arrays that are read, and the codec of the rows.
        self._words = [part.words for part in call.parts]
        name = request.read_codec
        self._read_codec = codecs.named(name) if name else None

    def frame(
        self,
        given: Sequence[RowsGiven],
        rows: Mapping[int, Sequence[RowSlice]],
        meant: Sequence[int],
        route: RowRoute,
    ) -> RowFrame:
        """Return the frame of a call, and add its arrays to those of the route.

        Parameters
        ----------
        given : sequence of RowsGiven
            The rows that it brings.
        rows : mapping of int to sequence of RowSlice
            The rows that it reads, by shard.
        meant : sequence of int
            The shards of the host that the call is for.
        route : RowRoute
            The call.
        """
        form = self.form
        cuts = [one.cut.ids_of(shard) for shard in form.shards for one in given]
        counts, reads = [len(ids) for ids in cuts], []
        moves: Moves = []
        for shard, slices, first, words in zip(
            form.shards, self._reads, self._firsts, self._words, strict=True
        ):
            of = rows.get(shard, ()) if shard in meant else ()
            found = route.take_all(words, slices, moves) if words else [*slices]
            marks = list[ReadSlice]()
            for table in self._read:
                n = 0
                for one in of:
                    if one.asked.position == first + table:
                        n = len(one.asked.ids)
                        cuts.append(one.asked.ids)
                        found.append(route.take_in(one, moves, self._read_codec))
                        if one.marks is not None:
                            marks.append(ReadSlice(("uint8", 0, n), *one.marks))
                counts.append(n)
            reads.append((*found, *marks))
        brought = [(route.bring(ids), 0, len(ids)) for ids in cuts if len(ids)]
        nbytes = ID.itemsize * sum(counts)
        if self._codec is not None:
            counts += self._bring_words(given, brought, route)
            nbytes += self._word_nbytes * sum(counts[-len(self._given) :])
        for part, slot, dtype, n, k, _ in () if self._codec else self._given:
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

    def _bring_words(
        self,
        given: Sequence[RowsGiven],
        brought: list[tuple[Any, int, int]],
        route: RowRoute,
    ) -> list[int]:
        """Have words go with a frame; return the number of words of each array."""
        found = []
        for part, slot, _, _, _, row in self._given:
            if row < 0:
                name = self._slices[part][slot][1]
                words = route.brings[name]
            else:
                of, shard = given[row - part * len(given)], self.form.shards[part]
                words = of.item(self._layout, shard, sent=True).data
                name = route.bring(words)
            found.append(len(words))
            if len(words):
                brought.append((name, 0, len(words)))
        return found


class RowRoutes:
    """The routes of calls with rows over lanes, from one process to a store's shards.

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
        """Return a call's route over lanes; None where it brings too much for them."""
        meta, step, target = self._meta, request.step, request.target
        if request.codec and not _may_say(meta, request):
            return None
        for one in request.rows:
            if len(one.cut.ids) > MOST_PUSHED_ROWS and not _may_go(one.cut):
                return None
        first = len(meta.layout.parameters)
        pushed = tuple([one.cut.table.index - first for one in request.rows])
        read = _tables_of(meta, target.rows) if target else ()
        finds = bool(read) and target is not None and _finds(target.rows)
        slices = {} if target is None else target.slices
        looks = request.check is not None and looks_there(request, shards)
        # The shards of such a call differ from call to call: see the module's
        # docstring.
        only_rows = not (changes(step) or slices or request.arrays)
        key = (
            None if only_rows else (request.route, *shards),
            *told_once(step),
            request.codec,
            request.read_codec,
            pushed,
            read,
            looks,
            finds,
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
                named = {"pushed": pushed, "read": read}
                form = HostRows(meta, said, made, **named, looks=looks, finds=finds)
                kind.forms[worker] = form
            frames.append(form.frame(request.rows, rows, of, route))
        route.forms, route.looks = tuple(frames), looks
        return route


class _Kind:
    """The forms of calls with rows that differ in their ids alone, by host."""

    def __init__(self, slices: Mapping[int, tuple[ReadSlice, ...]]) -> None:
        self.slices = slices
        self.forms: dict[str, HostRows] = {}


def _unsized(call: Call) -> Call:
    """Return the call without its numbers of words, which the form does not say."""
    parts = []
    for part in call.parts:
        items = [one._replace(data=one.data[:0]) for one in part.step.items]
        step = part.step._replace(items=tuple(items))
        parts.append(part._replace(step=step))
    return call._replace(parts=tuple(parts))


def _may_say(meta: StoreMap, request: Request) -> bool:
    """Return whether a lane takes all words: a user's codec may make any number."""
    layout, word = meta.layout, codecs.named(request.codec).dtype
    sizes = [
        (len(words), layout.pieces[shard][position].size)
        for (shard, position), words in request.arrays.items()
    ]
    for one in request.rows:
        most = MOST_PUSHED_ROWS * one.cut.table.dim
        sizes += [(len(words), most) for words in one.words or ()]
    return all(n <= most_words(size, word) for n, size in sizes)


def _may_go(cut: RowCut) -> bool:
    """Return whether each shard gets no more rows than a lane takes."""
    return max(b - a for a, b in pairwise(cut.starts)) <= MOST_PUSHED_ROWS


def _finds(rows: Mapping[int, Sequence[RowSlice]]) -> bool:
    """Return whether a read asks only which rows there are."""
    return not any(one.asked.dim for of in rows.values() for one in of)


def _tables_of(
    meta: StoreMap, rows: Mapping[int, Sequence[RowSlice]]
) -> tuple[int, ...]:
    """Return the numbers of the store's tables that are read."""
    pieces = meta.layout.pieces
    found = {
        one.asked.position - len(pieces[shard])
        for shard, of in rows.items()
        for one in of
    }
    return tuple(sorted(found))
