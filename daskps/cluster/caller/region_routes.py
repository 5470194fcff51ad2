"""Routes of runs of one parameter's elements to the shards that have any of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.cluster.caller.routes import (
    GRADIENT,
    PieceSlice,
    Request,
    Route,
    read,
    runs_of,
)
from daskps.cluster.caller.targets import ReadSlice, Target
from daskps.limits import MOST_RANGES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.shards.steps import Step
    from daskps.typing import Array

#: Number of runs for which a socket may get a template.
_FEW_RANGES = 8


def push_region(
    meta: StoreMap, region: tuple[int, int], flat: Array, step: Step
) -> Request:
    """Return the call that delivers a run of a parameter's elements.

    A gradient goes to all shards that have any of the parameter, also to those that get
    no element of it: so each of them counts the step.

    Parameters
    ----------
    meta : StoreMap
        The store.
    region : (int, int)
        Index of the parameter, and the first of the elements.
    flat : ndarray, shape (n,)
        The values for the elements.
    step : Step
        The step, the same for all shards.

    Returns
    -------
    Request
        Its reply has the versions.
    """
    everywhere = step.kind == GRADIENT
    key = region, len(flat), everywhere
    route: Route | None = meta.routes.find(key)
    if route is None:
        route = _made(meta, *region, len(flat), everywhere=everywhere)
        meta.routes.keep(key, route, route.where)
    return Request(route, step, {region[0]: flat})


def _made(meta: StoreMap, index: int, start: int, n: int, *, everywhere: bool) -> Route:
    where = meta.where
    slices: dict[int, tuple[PieceSlice, ...]] = {}
    firsts: dict[tuple[int, int], int] = {}
    for piece in meta.layout.pieces_of[index]:
        a, b = max(start, piece.start), min(start + n, piece.stop)
        if a < b or everywhere:
            position = meta.layout.positions[piece.shard, index]
            part = (a - start, b - start) if a < b else (0, 0)
            slices[piece.shard] = ((position, index, *part),)
            if piece.start < a < b:
                firsts[piece.shard, position] = a - piece.start
    is_all = len(slices) == meta.layout.n_shards
    return Route(where, slices, None if is_all else runs_of([*slices]), firsts)


def read_runs(
    meta: StoreMap,
    index: int,
    runs: Sequence[tuple[int, int]],
    *,
    flat: Array,
    finish: Callable[[], Any],
) -> Request:
    """Return the call that reads runs of a parameter's elements, in parts if many.

    Parameters
    ----------
    meta : StoreMap
        The store.
    index : int
        Index of the parameter.
    runs : sequence of (int, int)
        Elements [start, stop), ascending and apart from each other.
    flat : ndarray, shape (n,)
        The array that they go to, one run behind the other.
    finish : callable
        Makes the caller's result.
    """
    calls, at = [], 0
    for k in range(0, max(1, len(runs)), MOST_RANGES):
        slices: dict[int, list[ReadSlice]] = {}
        part, pieces, i = runs[k : k + MOST_RANGES], meta.layout.pieces_of[index], 0
        for start, stop in part:
            while i < len(pieces) and pieces[i].stop <= start:
                i += 1
            for piece in pieces[i:]:
                if piece.start >= stop:
                    break
                a, b = max(start, piece.start), min(stop, piece.stop)
                local = piece.local + a - piece.start
                asked = piece.parameter.dtype, local, local + b - a
                where = slice(at + a - start, at + b - start)
                slices.setdefault(piece.shard, []).append(ReadSlice(asked, 0, where))
            at += stop - start
        by_shard = {shard: tuple(of) for shard, of in slices.items()}
        request = read(meta, Target(by_shard, [flat], finish))
        # A read that is made once in this way needs no template of its own on sockets.
        calls.append(request._replace(given=len(part) > _FEW_RANGES))
    first, *rest = calls
    return first._replace(rest=tuple(rest))
