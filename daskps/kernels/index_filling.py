"""An index of rows filled at once, before anybody reads it: nothing of it is logged."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from daskps.kernels.index_probe import (
    HEAD,
    PROBES,
    SEED,
    SIDE,
    SIDE_0,
    SLOTS_0,
    home,
    probe,
)
from daskps.kernels.row_values import mixed
from daskps.kernels.words import plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.kernels.compiled import Module
    from daskps.kernels.index_memory import IndexMemory
    from daskps.typing import Array


def enter_new(words: Any, places: Any, ids: Any, values: Any) -> Any:
    """Give values to ids that have none; return the first that has one, or no entry, or -1."""
    head = places[2 * HEAD]
    side, seed = words[head + SIDE] & 1, words[head + SEED]
    start, slots = places[2 * (SIDE_0 + side)], words[head + SLOTS_0 + side]
    for k in range(ids.size):
        at = probe(words, start, slots, home(ids[k], seed, slots), ids[k])
        if at >= 0 or at == -1 - slots:
            return k
        at = -1 - at
        words[start + 2 * at], words[start + 2 * at + 1] = ids[k], values[k]
    return -1


_FUNCTIONS: dict[Callable[..., Any], str] = {
    **{function: PROBES[function] for function in (mixed, home, probe)},
    enter_new: "WORDS, IDS, IDS, IDS",
}


@functools.cache
def _module(cache_dir: str | None) -> Module:
    return plain(_FUNCTIONS, cache_dir=cache_dir, alone=True, borrows=True)


def enter_all_new(
    index: IndexMemory, ids: Array, values: Array, *, cache_dir: str | None = None
) -> None:
    """Enter ids that are not there into an index that nobody reads yet.

    Parameters
    ----------
    index : IndexMemory
        The index; its side in force has an entry for each of them.
    ids : ndarray, shape (k,), int64
        Each once; contiguous.
    values : ndarray, shape (k,), int64
        The row of each plus 1, or below 0 how often it has been counted.
    cache_dir : str, optional
        Where the compiled loop is kept, as in `build`.

    Raises
    ------
    ValueError
        If one is there already, or there are too few entries.
    """
    found = _module(cache_dir).function("enter_new")(
        index.words, index.places, ids, values
    )
    if found >= 0:
        raise ValueError(f"id {ids[found]} is there twice, or there is no entry for it")
