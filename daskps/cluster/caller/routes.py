"""From arrays and names to one call per host, and back from the answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.upstream import loads
from daskps.cluster.wire.messages import Answer, Call, Part, Range
from daskps.shards.steps import ADD, ASSIGN, BARRIER, GRADIENT, MODEL, READ, Item
from daskps.version import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.layout.arrays import Parameter
    from daskps.optim import Rule
    from daskps.typing import Array

__all__ = [
    "ADD",
    "ASSIGN",
    "GRADIENT",
    "MODEL",
    "Computed",
    "Plan",
    "Target",
    "barrier",
    "push",
    "read",
    "whole",
]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a read goes: for each shard what to ask for and where to put it."""

    ranges: Mapping[int, tuple[Range, ...]]
    outs: Mapping[int, list[Array]]
    #: Makes the caller's result once `outs` are filled.
    finish: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """One call per host, and what its answers mean."""

    calls: Mapping[str, Call]
    outs: Mapping[int, Sequence[Array]]
    finish: Callable[[Mapping[int, Answer]], Any]


@dataclass(frozen=True, slots=True)
class Computed:
    """What a trainer delivers at one synchronisation, and what it says of its batches."""

    #: Flat arrays by parameter index: gradients, or the trainer's own model.
    arrays: Mapping[int, Array]
    kind: str
    rows: int
    #: Sum over the rows of what the user's function returned as the loss.
    loss_sum: float | None


def whole(meta: StoreMap) -> Target:
    """Read every parameter, as views of one buffer per dtype: one copy per shard."""
    layout = meta.layout
    buffers = {d: np.empty(n, d) for d, n in layout.lengths.items()}
    ranges: dict[int, tuple[Range, ...]] = {}
    outs: dict[int, list[Array]] = {}
    for shard in range(layout.n_shards):
        extents = [(d, *layout.extent(shard, d)) for d in layout.lengths]
        ranges[shard] = tuple((d, 0, b - a) for d, a, b in extents if b > a)
        outs[shard] = [buffers[d][a:b] for d, a, b in extents if b > a]
    views = {
        p.name: buffers[p.dtype][p.offset : p.offset + p.size].reshape(p.shape)
        for p in layout.parameters
    }
    return Target(ranges, outs, lambda: views)


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
    ranges: dict[int, list[Range]] = {}
    outs: dict[int, list[Array]] = {}
    for index, (start, stop, flat) in spans.items():
        for piece in meta.layout.pieces_of[index]:
            a, b = max(start, piece.start), min(stop, piece.stop)
            if a < b:
                local = piece.local + a - piece.start
                dtype = piece.parameter.dtype
                ranges.setdefault(piece.shard, []).append((dtype, local, local + b - a))
                outs.setdefault(piece.shard, []).append(flat[a - start : b - start])
    return Target({s: tuple(r) for s, r in ranges.items()}, outs, finish)


def read(meta: StoreMap, target: Target, min_version: int | None, call: Call) -> Plan:
    """Plan a read of `target`, from the shards it touches."""
    parts = {
        shard: Part(shard, ranges=ranges, at_least=at_least(shard, min_version))
        for shard, ranges in target.ranges.items()
    }
    return Plan(by_host(meta, parts, call._replace(wait=READ)), target.outs, _read)


def _read(answers: Mapping[int, Answer]) -> Mapping[int, Answer]:
    return answers


def at_least(shard: int, min_version: int | None) -> int:
    """Return the version a shard must have reached for a pull to proceed."""
    if min_version is None:
        return 0
    if isinstance(min_version, Version):
        return dict(min_version.pairs).get(shard, 0)
    return int(min_version)


def push(
    meta: StoreMap,
    arrays: Mapping[int, Array],
    call: Call,
    *,
    everywhere: bool = False,
    target: Target | None = None,
    starts: Mapping[int, int] | None = None,
) -> Plan:
    """Plan a delivery of whole parameters, and a read in the same messages.

    Parameters
    ----------
    meta : StoreMap
        The store.
    arrays : mapping of int to ndarray, shape (n,)
        Flat arrays by parameter index.
    call : Call
        What all messages have in common.
    everywhere : bool
        Whether shards that get nothing are told as well, as a tick must be.
    target : Target, optional
        What to read afterwards.
    starts : mapping of int to int, optional
        Position of each array's first element in its parameter; 0 by default.

    Returns
    -------
    Plan
        Whose answers carry the versions.
    """
    items = _items(meta, arrays, starts or {})
    shards = set(items) | set(target.ranges if target else ())
    if everywhere:
        shards = set(range(meta.layout.n_shards))
    touched = None if len(shards) == meta.layout.n_shards else _runs(sorted(shards))
    ranges = target.ranges if target else {}
    parts = {
        shard: Part(
            shard, items=tuple(items.get(shard, ())), ranges=ranges.get(shard, ())
        )
        for shard in sorted(shards)
    }
    wait = READ if target else call.wait
    calls = by_host(meta, parts, call._replace(wait=wait, touched=touched))
    return Plan(calls, target.outs if target else {}, version_of)


def _runs(shards: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return sorted numbers as runs [start, stop)."""
    found: list[tuple[int, int]] = []
    for shard in shards:
        if found and found[-1][1] == shard:
            found[-1] = found[-1][0], shard + 1
        else:
            found.append((shard, shard + 1))
    return tuple(found)


def _items(
    meta: StoreMap, arrays: Mapping[int, Array], starts: Mapping[int, int]
) -> dict[int, list[Item]]:
    positions = meta.positions
    items: dict[int, list[Item]] = {}
    for index, flat in arrays.items():
        first = starts.get(index, 0)
        for piece in meta.layout.pieces_of[index]:
            a, b = max(first, piece.start), min(first + len(flat), piece.stop)
            if a < b:
                item = Item(
                    positions[piece.shard, index],
                    a - piece.start,
                    flat[a - first : b - first],
                )
                items.setdefault(piece.shard, []).append(item)
    return items


def barrier(meta: StoreMap, call: Call) -> Plan:
    """Plan to wait, on every shard, until all live trainers are at this clock."""
    parts = {shard: Part(shard) for shard in range(meta.layout.n_shards)}
    calls = by_host(meta, parts, call._replace(wait=BARRIER))
    return Plan(calls, {}, version_of)


def version_of(answers: Mapping[int, Answer]) -> Version:
    """Return the version a delivery has led to."""
    return Version.of((shard, a.version) for shard, a in sorted(answers.items()))


def by_host(meta: StoreMap, parts: Mapping[int, Part], call: Call) -> dict[str, Call]:
    """Return one call for each host that owns one of the parts."""
    grouped: dict[str, list[Part]] = {}
    where = meta.where
    owners, generations = where.owners, where.generations
    for shard, part in parts.items():
        generation = generations[shard]
        if part.generation != generation:
            part = part._replace(generation=generation)
        grouped.setdefault(owners[shard], []).append(part)
    return {w: call._replace(parts=tuple(of)) for w, of in grouped.items()}


def load_rules(meta: StoreMap) -> dict[int, Rule]:
    """Return the update rules of a store by parameter index."""
    rules: dict[int, Rule] = loads(meta.rules)
    return rules


def empty_like(parameter: Parameter) -> Array:
    """Return a flat array for a parameter's values."""
    return np.empty(parameter.size, parameter.dtype)
