"""Where a pull goes: which parameters, and into which arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.caller import routes
from daskps.cluster.caller.targets import find_overlap

if TYPE_CHECKING:
    from collections.abc import Iterable

    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.caller.targets import Target
    from daskps.typing import Array


def sign_of(meta: StoreMap, names: Iterable[str]) -> Target:
    """Return a read of one element of each parameter, to wait as a read of all does."""
    chosen = [meta.layout[name] for name in names]
    spans = {p.index: (0, 1, np.empty(1, p.dtype)) for p in chosen}
    return routes.spanning(meta, spans, lambda: None)


def target_of(
    meta: StoreMap,
    names: str | Iterable[str] | None,
    out: Mapping[str, Array] | None,
) -> Target:
    """Return where a pull goes: new arrays, or those of `out`."""
    if names is None and out is None:
        return routes.whole(meta)
    out = None if out is None else checked_mapping(out)
    chosen = chosen_names(meta, names if names is not None else out)
    if out is not None and (unasked := [n for n in out if n not in chosen]):
        raise ValueError(
            f"out has {unasked[:8]}, which names= does not ask for; name them, or "
            f"leave names= out to pull what out names"
        )
    arrays: dict[str, Array] = {}
    flats: dict[int, Array] = {}
    detours: list[tuple[Array, Array]] = []
    for name in chosen:
        p = meta.layout[name]
        if out is None or name not in out:
            flats[p.index] = routes.empty_like(p)
            arrays[name] = flats[p.index].reshape(p.shape)
            continue
        array = arrays[name] = checked_out(out[name], name, p.shape, p.dtype)
        if array.flags.c_contiguous:
            flats[p.index] = array.reshape(-1)
        else:
            flats[p.index] = routes.empty_like(p)
            detours.append((array, flats[p.index].reshape(p.shape)))

    check_apart((out or {}).items())

    def finish() -> dict[str, Array]:
        for array, values in detours:
            array[...] = values
        return dict(arrays)

    return routes.into(meta, flats, finish)


def checked_mapping(out: Any) -> Mapping[str, Array]:
    """Return a mapping of names to arrays, or refuse what is none."""
    if out is None:
        return {}
    if not isinstance(out, (dict, Mapping)):
        raise TypeError(
            f"out is a mapping of parameter names to arrays, found "
            f"{type(out).__name__}; pass {{'w': array}}"
        )
    return out


def check_apart(outs: Iterable[tuple[Any, Array]]) -> None:
    """Refuse arrays that share memory: one would take what was read for another."""
    if overlap := find_overlap(outs):
        first, second = overlap
        raise ValueError(
            f"out[{first!r}] and out[{second!r}] share memory; give each an array of "
            f"its own"
        )


def chosen_names(meta: StoreMap, names: Any) -> list[str]:
    """Return the parameters that are asked for, each once; all for None."""
    if names is None:
        return list(meta.layout.by_name)
    given = given_names(names)
    for name in given:
        meta.layout[name]
    return list(dict.fromkeys(given))


def given_names(names: Any) -> list[Any]:
    """Return names as a list, whatever they are; one may stand for itself."""
    try:
        return [names] if isinstance(names, str) else list(names)
    except TypeError:
        raise TypeError(
            f"names is the name of a parameter or a list of them, found {names!r:.60}"
        ) from None


def checked_out(
    array: Any,
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    *,
    what: str = "the parameter",
) -> Array:
    """Return an array that `what` can be read into, or refuse it."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"out[{name!r}] is an ndarray, found {type(array).__name__}")
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise ValueError(
            f"out[{name!r}] has shape {array.shape} and dtype {array.dtype}, {what} "
            f"{shape} and {dtype}; they must be equal"
        )
    if not array.flags.writeable:
        raise ValueError(f"out[{name!r}] is read-only")
    return array
