"""The other side of an index of rows, built beside the one in force, compiled.

Nobody reads it before it is in force, so nothing of it is logged; changes of the side in
force go to it too, as far as it has been built (:mod:`daskps.kernels.index_probe`).
"""

from __future__ import annotations

from typing import Any

from daskps.kernels.index_probe import (
    BUILT,
    HEAD,
    SEED,
    SIDE,
    SIDE_0,
    SLOTS_0,
    home,
    probe,
)
from daskps.kernels.system import hold, store


def copy_entries(words: Any, places: Any, at_most: Any) -> Any:
    """Copy entries of the side in force to the other one, which is not in force.

    Those whose home is among the next `at_most`. Returns 1 when it has all, 0 when there
    are more, -1 if it was cut off before and has to begin anew.
    """
    head = places[2 * HEAD]
    side, seed = words[head + SIDE] & 1, words[head + SEED]
    slots, its_slots = words[head + SLOTS_0 + side], words[head + SLOTS_0 + 1 - side]
    start, to = places[2 * (SIDE_0 + side)], places[2 * (SIDE_0 + 1 - side)]
    built = words[head + BUILT]
    if built & 1:
        return -1
    low = built >> 1
    high, address = min(slots, low + at_most), words.ctypes.data + 8 * (head + BUILT)
    store(address, built | 1)
    hold()
    at = low
    # Behind `high` up to the first that is empty: some of them have their home before it.
    for seen in range(slots):
        value, row = words[start + 2 * at + 1], words[start + 2 * at]
        if value == 0 and seen >= high - low:
            break
        if value != 0 and low <= home(row, seed, slots) < high:
            where = probe(words, to, its_slots, home(row, seed, its_slots), row)
            where = where if where >= 0 else -1 - where
            words[to + 2 * where], words[to + 2 * where + 1] = row, value
        at = at + 1 if at + 1 < slots else 0
    store(address, 2 * high)
    return high == slots
