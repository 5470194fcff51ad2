"""Routes over sockets: the template of a route's calls for each host, and their frames.

From call to call the parameters and tables stay the same, ids and the number of words
do not. A template of a read of rows alone names all shards of its host, those without
an id too: else there were as many templates as sets of shards that ids can fall on.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from daskps import codecs
from daskps.cluster.caller.call_template import (
    CallTemplate,
    RowMove,
    SocketFrame,
    SocketSlice,
    WordMove,
    told_once,
)
from daskps.cluster.caller.routes import route_of
from daskps.cluster.caller.shard_map import Prepared
from daskps.cluster.caller.targets import NO_ROWS, NO_SLICES, ReadSlice
from daskps.cluster.protocol.messages import COUNTED
from daskps.cluster.protocol.read_words import words_of
from daskps.cluster.sockets.templates import ID, body_items, most_words
from daskps.limits import MOST_PUSHED_ROWS
from daskps.shards.steps import GRADIENT, NOTHING

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.row_routes import RowBatch, RowSlice
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.caller.targets import ReadSlices, Target
    from daskps.cluster.protocol.messages import Call, Part
    from daskps.typing import Array

#: Tables whose rows a call brings, and whose rows it reads; and whether it asks only
#: which rows these have.
Tables: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], bool]"
_NO_TABLES: Tables = ((), (), False)
_NO_IDS = np.empty(0, ID)
#: Bytes of the arrays of a call to one host.
SMALL_NBYTES = 65_536
#: Number of routes kept ready for sockets: of reads, of pushes, and of both at once.
_MOST_ROUTES = 48


class _CallArrays(NamedTuple):
    """The arrays of one call."""

    #: Those that go, by their names in frames.
    brings: dict[Any, Array]
    #: Those that take the values that come.
    outs: list[Array]


class HostCalls:
    """The calls along a route to one host: their template, and the frame of each.

    Parameters
    ----------
    meta : StoreMap
        The store.
    shards : sequence of int
        Shards of one host.
    request : Request
        A call of this template.
    tables : (sequence of int, sequence of int, bool)
        Numbers of the store's tables that it brings rows of, and that it reads; and
        whether it only asks which rows these have.
    words : list of (str, int)
        Dtype and length of the arrays of the route that words are received in; gets
        those of this host. They come behind all arrays of a call, the first one last:
        so no user of them needs their number.
    checks : bool
        Whether the shard looks for NaN and infinity in the gradients that it gets.
    """

    def __init__(
        self,
        meta: StoreMap,
        shards: Sequence[int],
        request: Request,
        tables: Tables,
        *,
        words: list[tuple[str, int]],
        checks: bool = False,
    ) -> None:
        layout, target = meta.layout, request.target
        plain = None if target is None else target._replace(rows={})
        call = request._replace(rows=(), target=plain).call(meta, shards, 0.0, "")
        call = _to_be_checked(call) if checks else call
        codec = codecs.named(request.codec) if request.codec else None
        #: Whether each frame says how many words there are of each array.
        self._counts = codec is not None and not codec.is_fixed
        owner = meta.where.owners[shards[0]]
        self.template = CallTemplate(owner, call, tables=tables, counted=self._counts)
        pushed, self._read, _ = tables
        self._layout = layout
        #: Position of the first table of each shard.
        self._firsts = [len(layout.pieces[shard]) for shard in shards]
        #: The arrays that follow the ids, and the caller's arrays that they are.
        self._given = body_items(
            [
                [
                    (i.data.dtype.name, COUNTED if self._counts else len(i.data))
                    for i in part.step.items
                ]
                for part in call.parts
            ],
            [layout.tables[k] for k in pushed],
            call.step.kind,
            n_read=len(self._read),
            word=codec.dtype if codec else "",
        )
        self._slices = [
            request.route.slices[shard] if request.arrays else () for shard in shards
        ]
        name = request.read_codec
        self._read_codec = codecs.named(name) if name else None
        self._words = words
        self._moves: list[WordMove] = []
        slices = {} if plain is None else plain.slices
        #: By shard the places of the elements that are read.
        self._reads = [self._places(p, slices.get(p.shard, ())) for p in call.parts]
        self.fixed: SocketFrame | None = None
        if not (pushed or self._read or self._counts):
            self.fixed = self.frame((), {}, shards, _CallArrays({}, []))

    def _places(self, part: Part, slices: Sequence[ReadSlice]) -> list[ReadSlice]:
        """Return the places of arrays that arrive, in words or not."""
        found = []
        for one, how in zip(slices, part.words or [None] * len(slices), strict=True):
            if how is None:
                found.append(one)
                continue
            self._words.append((how.codec.dtype, how.n_words))
            at = -len(self._words)
            self._moves.append(WordMove(at, how, one.number, one.where))
            of = how.codec.dtype, 0, how.n_words
            found.append(ReadSlice(of, at, slice(how.n_words)))
        return found

    def frame(
        self,
        given: Sequence[RowBatch],
        rows: Mapping[int, Sequence[RowSlice]],
        meant: Sequence[int],
        arrays: _CallArrays,
    ) -> SocketFrame:
        """Return the frame of a call, and add its arrays to those of the call.

        Parameters
        ----------
        given : sequence of RowBatch
            The rows that it brings.
        rows : mapping of int to sequence of RowSlice
            The rows that it reads, by shard.
        meant : sequence of int
            The shards of the host that the call is for.
        arrays : _CallArrays
            The arrays of the call.
        """
        # Few comprehensions and generators: each is a call of Python for each frame.
        template, brings = self.template, arrays.brings
        moves, ids = list[WordMove | RowMove](), list["Array"]()
        for shard in template.shards if given else ():
            for one in given:
                ids.append(one.split.ids_of(shard))
        reads: list[Sequence[ReadSlice]] = [*self._reads]
        for i, shard in enumerate(template.shards if self._read else ()):
            asked = rows.get(shard, ()) if shard in meant else ()
            reads[i] = self._asked(i, asked, ids, moves=moves, outs=arrays.outs)
        counts, brought = [*map(len, ids)], list[SocketSlice]()
        nbytes = ids_nbytes = ID.itemsize * sum(counts)
        for some in ids:
            if n := len(some):
                brings["ids", len(brings)] = some
                brought.append((("ids", len(brings) - 1), 0, n))
        nbytes += self._bring(given, brings, brought, counts)
        made = SocketFrame(
            template,
            brought,
            reads,
            nbytes=nbytes,
            # Words before rows: the moves of rows copy from the numbers that they say.
            moves=[*self._moves, *moves],
            counts=counts,
            asked=None if len(meant) == len(template.shards) else tuple(meant),
        )
        made.data_nbytes -= ids_nbytes
        return made

    def _bring(
        self,
        given: Sequence[RowBatch],
        brings: dict[Any, Array],
        brought: list[SocketSlice],
        counts: list[int],
    ) -> int:
        """Have arrays and rows go with a frame; return how many bytes they are."""
        nbytes, n_ids = 0, len(counts)
        for part, slot, dtype, n, counted, row in self._given:
            if row < 0:
                _, name, start, _ = self._slices[part][slot]
                if counted >= 0:
                    n = len(brings[name])
            else:
                of, shard = given[row - part * len(given)], self.template.shards[part]
                data = of.item(self._layout, shard, sent=True).data
                name, start, n = ("rows", len(brings)), 0, len(data)
                brings[name] = data
            if counted >= n_ids:
                counts.append(n)
            if n:
                brought.append((name, start, start + n))
                nbytes += dtype.itemsize * n
        return nbytes

    def _asked(
        self,
        at: int,
        asked: Sequence[RowSlice],
        ids: list[Array],
        *,
        moves: list[WordMove | RowMove],
        outs: list[Array],
    ) -> Sequence[ReadSlice]:
        """Return the places of what a shard answers; add the ids of its rows."""
        found, marks = [*self._reads[at]], list[ReadSlice]()
        for table in self._read:
            position = self._firsts[at] + table
            for one in asked:
                if one.asked.position == position:
                    ids.append(one.asked.ids)
                    found.append(self._take_in(one, moves, outs))
                    if one.marks is not None:
                        n = len(one.asked.ids)
                        marks.append(ReadSlice(("uint8", 0, n), *one.marks))
                    break
            else:
                ids.append(_NO_IDS)
        return (*found, *marks)

    def _take_in(
        self, one: RowSlice, moves: list[WordMove | RowMove], outs: list[Array]
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
            outs.append(rows)
            into = ReadSlice((asked.dtype, 0, n), len(outs) - 1, slice(0, n))
        codec = self._read_codec
        how = None if codec is None else words_of(codec, (), (asked,))[0]
        if how is None:
            return into
        outs.append(np.empty(how.n_words, how.codec.dtype))
        come = ReadSlice(
            (how.codec.dtype, 0, how.n_words), len(outs) - 1, slice(how.n_words)
        )
        moves.insert(0, WordMove(come.number, how, into.number, into.where))
        return come


class SocketRoute:
    """A route over sockets: the frames of its calls, or of one call with rows.

    It holds no arrays but those of such a call: arrays that a loop has let go of must
    not live on here.

    Parameters
    ----------
    run : int
        The run whose trainer calls; 0 outside runs.
    slices : mapping of int to sequence of ReadSlice
        By shard the elements that are read.
    checks : bool
        Whether the shard looks for NaN and infinity in the arrays of its calls.
    """

    __slots__ = (
        "arrays",
        "checks",
        "frames",
        "hosts",
        "is_small",
        "may_wait",
        "of_rows",
        "rest",
        "run",
        "slices",
        "varies",
        "words",
    )

    def __init__(
        self,
        run: int = 0,
        slices: ReadSlices = NO_SLICES,
        *,
        checks: bool = False,
    ) -> None:
        self.run, self.slices, self.checks = run, slices, checks
        #: Whether its calls may have to wait for other trainers.
        self.may_wait = run != 0
        #: The part of it that is read of other shards than those of the call.
        self.rest: ReadSlices = NO_SLICES
        #: Whether it has nothing but rows to read, and whether each call has frames of
        #: its own.
        self.of_rows = self.varies = False
        #: The calls to each host, by its address.
        self.hosts: dict[str, HostCalls] = {}
        #: Dtype and length of the arrays that words are received in.
        self.words: list[tuple[str, int]] = []
        #: The frames of its calls; none where each call has others.
        self.frames: tuple[SocketFrame, ...] = ()
        #: Whether its calls cost their hosts little but the interpreter's lock.
        self.is_small = False
        #: The arrays of the one call whose frames these are.
        self.arrays: _CallArrays | None = None

    def word_arrays(self) -> list[Array]:
        """Return arrays that words are received in, to follow all others of a call."""
        return [np.empty(n, dtype) for dtype, n in reversed(self.words)]

    def reads_as(self, target: Target | None) -> bool:
        """Return whether it reads the elements of a target, to the same places."""
        if target is None:
            return True
        return self.slices is target.slices or self.slices == target.slices

    def fix(self) -> None:
        """Keep the frames of calls that are all alike."""
        fixed = [host.fixed for host in self.hosts.values()]
        self.frames = tuple([frame for frame in fixed if frame is not None])
        self.is_small = all(frame.call_nbytes <= SMALL_NBYTES for frame in self.frames)


class SocketRoutes:
    """The routes of calls from one process to the hosts of a store's shards.

    Parameters
    ----------
    meta : StoreMap
        The store.
    """

    def __init__(self, meta: StoreMap) -> None:
        self._meta = meta
        self._known: Prepared[Hashable, SocketRoute] = Prepared(meta, _MOST_ROUTES)

    def find(
        self, request: Request, shards: Sequence[int], *, checks: bool = False
    ) -> SocketRoute:
        """Return a call's route; with `checks` its shard looks for NaN and infinity."""
        step, target = request.step, request.target
        slices, rows = NO_SLICES, NO_ROWS
        if target is not None:
            slices, rows = target.slices, target.rows
        tables, only_rows = _NO_TABLES, False
        if request.rows or rows:
            tables = _tables_of(self._meta, request)
            only_rows = not (
                slices or request.arrays or step.kind != NOTHING or step.tick
            )
        key = (
            # The shards of such a call differ from call to call.
            None if only_rows else (request.route, *shards),
            *told_once(step),
            request.codec,
            request.read_codec,
            target is None,
            checks,
            tables,
        )
        known = self._known.find(key)
        if known is None or not (only_rows or known.reads_as(target)):
            known = SocketRoute(step.run, slices, checks=checks)
            known.of_rows = only_rows
            known.rest = {s: of for s, of in slices.items() if s not in shards}
            self._find_hosts(known, request, shards, tables)
            if not known.varies:
                known.fix()
            # Not before: other threads use what is kept. Pieces that a caller gives
            # away need a template of their own each time.
            if not request.given:
                self._known.keep(key, known, self._meta.where)
        if known.frames:
            return known
        flats = () if target is None else target.flats
        arrays, frames = _CallArrays(dict(request.arrays), [*flats]), []
        for host, of in self._find_hosts(known, request, shards, tables):
            frames.append(host.frame(request.rows, rows, of, arrays))
        found = SocketRoute(step.run, slices, checks=checks)
        found.rest, found.words = known.rest, known.words
        found.frames, found.arrays = tuple(frames), arrays
        return found

    def _find_hosts(
        self,
        route: SocketRoute,
        request: Request,
        shards: Sequence[int],
        tables: Tables,
    ) -> list[tuple[HostCalls, list[int]]]:
        """Return the calls to each host of a call, and the shards that it is for."""
        meta, found, by_worker = self._meta, [], dict[str, list[int]]()
        owners = meta.where.owners
        for shard in shards:
            by_worker.setdefault(owners[shard], []).append(shard)
        for worker, of in by_worker.items():
            host = route.hosts.get(worker)
            if host is None:
                made, said = request, of
                if route.of_rows:  # see the module's docstring
                    said = [s for s, w in enumerate(owners) if w == worker]
                    made = request._replace(route=route_of(meta, (), None))
                more: Any = {"words": route.words, "checks": route.checks}
                host = HostCalls(meta, said, made, tables, **more)
                route.hosts[worker] = host
                route.varies = host.fixed is None
            found.append((host, of))
        return found


def looks_there(request: Request, shards: Sequence[int]) -> bool:
    """Return whether a call's shard is to look for NaN and infinity in its gradients.

    Only where nobody has looked yet and one shard gets all gradients: of several shards
    some would have applied their part when another one finds any.
    """
    check = request.check
    return (
        check is not None
        and not check.done
        and len(shards) == 1
        and request.step.kind == GRADIENT
        and not (request.codec or (request.rows and request.arrays))
    )


def _to_be_checked(call: Call) -> Call:
    """Return a call with `check` set: nobody has looked at its gradients."""
    parts = [part._replace(step=part.step._replace(check=True)) for part in call.parts]
    return call._replace(parts=tuple(parts))


def may_go(meta: StoreMap, request: Request) -> bool:
    """Return whether sockets take all rows and words of a call.

    A user's codec may make any number of words.
    """
    for one in request.rows:
        starts = one.split.starts
        if (
            len(one.split.ids)
            > MOST_PUSHED_ROWS
            < max(b - a for a, b in pairwise(starts))
        ):
            return False
    codec = codecs.named(request.codec) if request.codec else None
    if codec is None or (codec.is_fixed and not request.rows):
        return True
    layout, sizes = meta.layout, list[tuple[int, int]]()
    if not codec.is_fixed:
        sizes += [
            (len(words), layout.pieces[shard][position].size)
            for (shard, position), words in request.arrays.items()
        ]
    for one in request.rows:
        most = MOST_PUSHED_ROWS * one.split.table.dim
        sizes += [(len(words), most) for words in one.words or ()]
    return all(n <= most_words(size, codec.dtype) for n, size in sizes)


def _tables_of(meta: StoreMap, request: Request) -> Tables:
    """Return the tables of a call."""
    layout, target = meta.layout, request.target
    pushed, read, finds = list[int](), set[int](), False
    for one in request.rows:
        pushed.append(one.split.table.index - len(layout.parameters))
    for shard, of in target.rows.items() if target is not None else ():
        for asked, *_ in of:
            read.add(asked.position - len(layout.pieces[shard]))
            finds = not asked.dim
    return tuple(pushed), tuple(sorted(read)), finds
