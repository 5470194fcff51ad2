"""Routes of calls to the shards: the part of each shard, worked out once.

From one push to the next only the numbers change. The shards and their elements stay
until a shard moves, and to find them is the cost of a small call: a route is made once
for the same parameters, and all calls of a handle or a trainer with these use it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps import codecs
from daskps.cluster.caller.device_arrays import on_host
from daskps.cluster.caller.targets import ReadSlice, Target, at_least
from daskps.cluster.protocol.encoding import round_read
from daskps.cluster.protocol.messages import Answer, Call, Part
from daskps.cluster.upstream import loads
from daskps.kernels.past import PAST_NBYTES
from daskps.shards.steps import (
    ADD,
    ASSIGN,
    BARRIER,
    GRADIENT,
    MODEL,
    NO_WAIT,
    NOTHING,
    READ,
    REMOVE,
    UNREAD,
    Intervals,
    Item,
    Step,
)
from daskps.version import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from daskps.cluster.caller.producer import Turn
    from daskps.cluster.caller.row_routes import RowBatch
    from daskps.cluster.caller.shard_map import ShardMap, StoreMap
    from daskps.layout.parameters import Parameter
    from daskps.optim import Rule
    from daskps.typing import Array


#: Smaller gradients are looked at before they leave: shards do not write these past the
#: caches.
LOOK_LATER_NBYTES = PAST_NBYTES


#: Names of steps for modules of stores and trainers, which import nothing of `shards`.
__all__ = ["ADD", "ASSIGN", "GRADIENT", "MODEL", "REMOVE", "Step"]
#: The end of a slice that has all words of a piece, however many they are.
_MOST_WORDS = 2**62
#: The step of a read outside runs.
_OUTSIDE = Step()
#: Position of a piece in its shard, name of the array, and start and stop in the array.
PieceSlice = tuple[int, Any, int, int]


@dataclass(slots=True)
class FiniteCheck:
    """A look for NaN and infinity in gradients, still to be done.

    Called, it raises PushRejectedError where there are any.
    """

    function: Callable[[], None]
    done: bool = False

    def __call__(self) -> None:
        """Look, unless a thread has looked already."""
        if not self.done:
            self.function()
            self.done = True


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The shards that a call goes to, and the elements that each of them gets."""

    where: ShardMap
    #: By shard, in order.
    slices: Mapping[int, tuple[PieceSlice, ...]]
    #: The shards as runs, None for all of the store.
    touched: Intervals | None
    #: By shard and position the element of its piece that a slice begins with, where it
    #: is not the first one.
    firsts: Mapping[tuple[int, int], int] = field(default_factory=dict)


class Reply(NamedTuple):
    """The answers of the shards of one call."""

    #: Shard and the version that its step has led to.
    versions: list[tuple[int, int]]
    #: Clocks by which the slowest live trainer was behind.
    lag: int = 0

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Reply:
        """Return one host's answers as a reply, where none of its shards waits."""
        return cls(
            [(a.shard, a.version) for a in answers],
            max(a.lag for a in answers),
        )

    @property
    def version(self) -> Version:
        """The version that the call has led to."""
        self.versions.sort()
        return Version.of(self.versions)


def joined(replies: Iterable[Reply]) -> Reply:
    """Return the replies of several hosts as one."""
    versions: list[tuple[int, int]] = []
    lag = 0
    for reply in replies:
        versions += reply.versions
        lag = max(lag, reply.lag)
    return Reply(versions, lag)


class Request(NamedTuple):
    """One call to shards: its route, its step, and the arrays that it brings."""

    route: Route
    #: The step for all shards; each of them gets items and a generation of its own.
    step: Step
    #: Flat arrays, by their names in the route.
    arrays: Mapping[Any, Array]
    target: Target | None = None
    #: The version that a read outside runs waits for.
    min_version: int | None = None
    #: Name of the codec whose words the arrays are; "" where they are numbers.
    codec: str = ""
    #: The same for values read by message; the caller itself rounds values read near.
    read_codec: str = ""
    #: Whether no other process may act for the owners of the shards.
    by_owner: bool = False
    #: Whether the caller has no more use for its arrays.
    given: bool = False
    #: Looks for NaN and infinity in gradients that nobody has looked at.
    check: FiniteCheck | None = None
    #: Version of each shard that the trainer has read last, where its run asks.
    seen: Mapping[int, int] | None = None
    #: Rows of tables; a shard that gets any of them has an item for each table.
    rows: tuple[RowBatch, ...] = ()
    #: Reads to make after this one, of the elements that are too many for one.
    rest: tuple[Request, ...] = ()

    def waiting(self) -> Request:
        """Return the same without its arrays, which shards have accepted: a wait.

        As a read it says how many rounds a shard must have of it: another one may not.
        """
        step = self.step
        clock = step.clock + step.tick
        step = step._replace(kind=NOTHING, clock=clock, tick=False, floor=clock)
        return self._replace(step=step, arrays={}, rows=())

    def checked(self) -> Request:
        """Return itself, once its gradients were looked at.

        Raises
        ------
        PushRejectedError
            Where they are not finite.
        """
        if self.check is not None:
            self.check()
        return self

    def signed(self, producer: int, turn: Turn) -> Request:
        """Return the same with its identity outside runs."""
        number, floor, given_up = turn
        step = self.step._replace(
            producer=producer, sequence=number, floor=floor, given_up=given_up
        )
        return Request(self.route, step, *self[2:-1])  # without the rest

    def bounds(self) -> Iterable[int]:
        """Return the clock or version that each shard must have reached for it."""
        step, target = self.step, self.target
        if step.run or target is None:
            return itertools.repeat(step.clock)
        return [at_least(shard, self.min_version) for shard in target.shards]

    def items(self, shard: int) -> tuple[Item, ...]:
        """Return the elements of the arrays that a shard gets."""
        arrays = self.arrays
        if not arrays:
            return ()
        slices, firsts = self.route.slices[shard], self.route.firsts
        if firsts:
            return tuple(
                Item(p, firsts.get((shard, p), 0), arrays[name][a:b])
                for p, name, a, b in slices
            )
        return tuple([Item(p, 0, arrays[name][a:b]) for p, name, a, b in slices])

    def step_of(
        self,
        shard: int,
        generation: int,
        *,
        check: bool = False,
        rows: tuple[Item, ...] = (),
    ) -> Step:
        """Return the step for one shard, which gets these rows."""
        step, wait = self.step, self.step.wait
        if wait == NO_WAIT and self.target and self.target.reads(shard):
            wait = READ
        least, seen = self.min_version, self.seen
        at = at_least(shard, least) if least else 0
        items = self.items(shard)
        return step._replace(
            items=items + rows if rows else items,
            generation=generation,
            wait=wait,
            at_least=at if seen is None else seen.get(shard, UNREAD),
            check=check,
            owned=self.given,
            touched=self.route.touched,
        )

    def in_codec(self, name: str) -> Request:
        """Return the same where values travel in the words of a codec."""
        rest = tuple([one.in_codec(name) for one in self.rest])
        return self._replace(read_codec=name, rest=rest)

    def round_read(self) -> None:
        """Round the values that were read to what the words of its codec would say."""
        codec = codecs.named(self.read_codec)
        for one in (self, *self.rest):
            if one.target is not None:
                round_read(codec, one.target.flats, np.empty)

    def call(
        self, meta: StoreMap, shards: Iterable[int], wait_seconds: float, token: str
    ) -> Call:
        """Return the message of the call to the shards of one host."""
        if meta.device:
            of_tables = tuple([g.on_host() for g in self.rows])
            self = self._replace(arrays=on_host(self.arrays), rows=of_tables)
        of = meta.where.generations
        codec = codecs.named(self.read_codec) if self.read_codec else None
        parts = []
        for shard in shards:
            rows = tuple([g.item(meta.layout, shard, sent=True) for g in self.rows])
            said = shard, self.step_of(shard, of[shard], rows=rows)
            if (target := self.target) is None:
                parts.append(Part(*said))
            else:
                asked = target.ranges(shard), target.rows_asked(shard)
                part = Part(*said, *asked)
                if codec is not None:
                    part = part.in_words(codec)
                parts.append(part)
        return Call(
            meta.uid, tuple(parts), wait_seconds, token, self.codec, self.read_codec
        )


@dataclass(frozen=True, slots=True)
class Computed:
    """Arrays that a trainer delivers at one synchronisation, and its batches' loss."""

    #: Flat arrays by parameter index: gradients, or the trainer's own model.
    arrays: Mapping[int, Array]
    kind: str
    rows: int
    #: Sum over the rows of the loss that the user's function returned.
    loss_sum: float | None
    #: Gradients of rows of tables.
    of_tables: Sequence[RowBatch] = ()


def whole(meta: StoreMap) -> Target:
    """Read every parameter, as views of one buffer per vector: one copy per shard."""
    layout = meta.layout
    buffers = {v: np.empty(n, v.dtype) for v, n in layout.vectors.items()}
    slices: dict[int, list[ReadSlice]] = {s: [] for s in range(layout.n_shards)}
    for i, (vector, parts) in enumerate(layout.parts.items()):
        for shard, start, stop, at in parts:
            if start < stop:
                asked = vector.dtype, at, at + stop - start
                slices[shard].append(ReadSlice(asked, i, slice(start, stop)))
    views = {
        p.name: buffers[p.vector][p.offset : p.offset + p.size].reshape(p.shape)
        for p in layout.parameters
    }
    # Without this a read would wait for a shard without elements, which nobody updates.
    by_shard = {shard: tuple(of) for shard, of in slices.items() if of or not views}
    return Target(by_shard, [*buffers.values()], lambda: views)


def into(
    meta: StoreMap, flats: Mapping[int, Array], finish: Callable[[], Any]
) -> Target:
    """Read whole parameters into flat arrays, by parameter index."""
    spans = {i: (0, meta.layout.parameters[i].size, flat) for i, flat in flats.items()}
    return spanning(meta, spans, finish)


def spanning(
    meta: StoreMap,
    spans: Mapping[int, tuple[int, int, Array]],
    finish: Callable[[], Any],
) -> Target:
    """Read runs [start, stop) of parameters into flat arrays of that length."""
    slices: dict[int, list[ReadSlice]] = {}
    for number, (index, (start, stop, _)) in enumerate(spans.items()):
        for piece in meta.layout.pieces_of[index]:
            a, b = max(start, piece.start), min(stop, piece.stop)
            if a < b:
                local = piece.local + a - piece.start
                asked = piece.parameter.dtype, local, local + b - a
                one = ReadSlice(asked, number, slice(a - start, b - start))
                slices.setdefault(piece.shard, []).append(one)
    flats = [flat for _, _, flat in spans.values()]
    return Target({s: tuple(of) for s, of in slices.items()}, flats, finish)


def read(
    meta: StoreMap,
    target: Target,
    min_version: int | None = None,
    step: Step = _OUTSIDE,
) -> Request:
    """Return the call that reads `target`, from the shards it touches."""
    route = route_of(meta, (), target.shards)
    return Request(route, step._replace(wait=READ), {}, target, min_version)


def push(
    meta: StoreMap,
    arrays: Mapping[int, Array],
    step: Step,
    *,
    everywhere: bool = False,
    target: Target | None = None,
    rows: Sequence[RowBatch] = (),
    words: Mapping[tuple[int, int], Array] | None = None,
) -> Request:
    """Return the call that delivers whole parameters, and a read in the same messages.

    Parameters
    ----------
    meta : StoreMap
        The store.
    arrays : mapping of int to ndarray, shape (n,)
        Flat arrays by parameter index.
    step : Step
        The step, the same for all shards.
    everywhere : bool
        Whether shards that get no element hear of the step as well, as of any tick.
    target : Target, optional
        The read that is made afterwards.
    rows : sequence of RowBatch
        Rows of tables. All shards hear of them, also those that get none: so each shard
        counts the steps of the tables.
    words : mapping of (int, int) to ndarray, optional
        The words that go in place of the arrays, by shard and position of the piece.

    Returns
    -------
    Request
        Its reply has the versions.
    """
    everywhere = everywhere or bool(rows)
    shards = () if everywhere or target is None else target.shards
    told = None if everywhere else shards
    if words is None:
        route = route_of(meta, tuple(arrays), told)
        return Request(route, step, arrays, target, rows=tuple(rows))
    route = route_of(meta, tuple(arrays), told, in_words=True)
    return Request(route, step, words, target, rows=tuple(rows))


def pieces(
    meta: StoreMap, arrays: Mapping[int, Mapping[int, Array]], step: Step
) -> Request:
    """Return the call that delivers pieces by shard and position, and may keep them."""
    slices = {
        shard: tuple((p, (shard, p), 0, len(array)) for p, array in of.items())
        for shard, of in sorted(arrays.items())
    }
    named = {(s, p): array for s, of in arrays.items() for p, array in of.items()}
    return Request(Route(meta.where, slices, None), step, named, given=True)


def barrier(meta: StoreMap, step: Step) -> Request:
    """Return the call that waits on each shard for all live trainers at this clock."""
    return Request(route_of(meta, (), None), step._replace(wait=BARRIER), {})


def route_of(
    meta: StoreMap,
    indices: tuple[int, ...],
    shards: tuple[int, ...] | None,
    *,
    in_words: bool = False,
) -> Route:
    """Return the route of whole parameters, and to these shards too; None for all.

    The arrays of one `in_words` are of pieces, by shard and position.
    """
    key = indices, shards, in_words
    found: Route | None = meta.routes.find(key)
    if found is None:
        found = _made(meta, indices, shards)
        if in_words:
            found = _in_words(found)
        meta.routes.keep(key, found, found.where)
    return found


def _in_words(route: Route) -> Route:
    """Return a route whose arrays are a codec's words of pieces, of any length."""
    slices = {
        shard: tuple((p, (shard, p), 0, _MOST_WORDS) for p, *_ in of)
        for shard, of in route.slices.items()
    }
    return Route(route.where, slices, route.touched)


def _made(
    meta: StoreMap, indices: Iterable[int], shards: Iterable[int] | None
) -> Route:
    where, n = meta.where, meta.layout.n_shards
    slices: dict[int, list[PieceSlice]] = {}
    for shard in range(n) if shards is None else shards:
        slices[shard] = []
    for index in indices:
        for piece in meta.layout.pieces_of[index]:
            if piece.start < piece.stop:
                position = meta.layout.positions[piece.shard, index]
                one = position, index, piece.start, piece.stop
                slices.setdefault(piece.shard, []).append(one)
    touched = None if len(slices) == n else runs_of(sorted(slices))
    return Route(where, {s: tuple(slices[s]) for s in sorted(slices)}, touched)


def runs_of(shards: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return sorted numbers as runs [start, stop)."""
    found: list[tuple[int, int]] = []
    for shard in shards:
        if found and found[-1][1] == shard:
            found[-1] = found[-1][0], shard + 1
        else:
            found.append((shard, shard + 1))
    return tuple(found)


def load_rules(meta: StoreMap) -> dict[int, Rule]:
    """Return the update rules of a store by parameter index."""
    rules: dict[int, Rule] = loads(meta.rules)
    return rules


def empty_like(parameter: Parameter) -> Array:
    """Return a flat array for a parameter's values."""
    return np.empty(parameter.size, parameter.dtype)
