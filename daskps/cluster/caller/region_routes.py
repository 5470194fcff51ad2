"""How a run of one parameter's elements reaches the shards that have some of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.cluster.caller.routes import GRADIENT, PieceSlice, Request, Route, runs_of

if TYPE_CHECKING:
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.shards.steps import Step
    from daskps.typing import Array


def push_region(
    meta: StoreMap, region: tuple[int, int], flat: Array, step: Step
) -> Request:
    """Return the call that delivers a run of a parameter's elements.

    Of a gradient all shards that have any of the parameter are told, also those that get
    nothing of it: so each of them counts the step.

    Parameters
    ----------
    meta : StoreMap
        The store.
    region : (int, int)
        Index of the parameter, and the first of the elements.
    flat : ndarray, shape (n,)
        What they get.
    step : Step
        What is said to all shards.

    Returns
    -------
    Request
        Whose reply has the versions.
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
