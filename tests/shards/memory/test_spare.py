"""Pages that nothing needs before the first publication."""

from __future__ import annotations

import numpy as np

from daskps.layout.arrays import Layout
from daskps.shards.memory.areas import SPARE_NBYTES, without
from daskps.shards.memory.segment import Segment

BIG = SPARE_NBYTES // 4


def test_spare_pages_are_those_of_second_buffers():
    shapes = {"w": ((BIG + 4099,), "float32"), "v": ((BIG // 8,), "float32")}
    layout = Layout.build({**shapes, "b": ((3,), "int8")}, 1, {"t": (10, 4, "float32")})
    slots = {0: (0.0, 1.0), 1: (0.0,), 3: (0.0,)}
    nbytes, parts = Segment.extent(layout, 0, slots)
    spare = Segment.spare(layout, 0, slots)
    # Weights of a dtype together, and two slots of w: v's slot and b are too small.
    assert len(spare) == 3
    assert all(start % 4096 == stop % 4096 == 0 for start, stop in spare)
    nbytes_of = 4 * (3 * (BIG + 4099) + BIG // 8)
    assert 0 <= nbytes_of - sum(b - a for a, b in spare) < 3 * 8192
    needed = without(parts, spare)
    assert sum(b - a for a, b in needed + spare) == sum(b - a for a, b in parts)

    buffer = np.zeros(nbytes, np.uint8)
    segment = Segment(layout, 0, slots, buffer, durable=True)
    for arrays in segment.slots[0]:
        for array in arrays:
            array[:] = 7
    for array in segment.weights[0]:
        array[:] = 7
    for table in segment.tables:
        table.rows[:] = 7
    # All that a new shard has, and all that is put into it.
    assert not any(buffer[start:stop].any() for start, stop in spare)
    assert Segment.spare(layout, 0, {}) == spare[:1]
