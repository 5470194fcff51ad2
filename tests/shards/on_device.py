"""Shards on the fake device, and the same ones in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from daskps import optim
from daskps.backend import fake
from daskps.cluster.host.rules import initial_slots
from daskps.layout.arrays import Layout
from daskps.shards.arrays.device import DeviceMemory
from daskps.shards.arrays.payload import NUMPY, Payload
from daskps.shards.memory.format import GENERATION
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard


def payload_of(device: str | None) -> Payload:
    return NUMPY if device is None else DeviceMemory(fake.device()).payload()


def make(
    layout: Layout, index: int, rules: Mapping[int, Any], device: str | None
) -> Shard:
    """A shard whose parameters of some indices have rules."""
    payload = payload_of(device)
    slots = {i: initial_slots(rule) for i, rule in rules.items()}
    segment = Segment(layout, index, slots, payload=payload)
    segment.words[GENERATION] = 1
    bindings = {
        i: optim.bind(r, layout.dtype_of(i), launcher=payload.launcher)
        for i, r in rules.items()
    }
    segment.begin_copies()
    payload.wait()
    return Shard(segment, bindings)


def bits(shard: Shard) -> tuple[Any, ...]:
    """All that a shard holds: weights, slots, record and the counts of its header."""
    segment, found = shard.segment, []
    record = segment.current
    for position in range(len(segment.pieces)):
        weights = segment.weights_of(record, position)
        arrays = weights, *segment.slots_of(record, position)
        found += [read(segment, array).tobytes() for array in arrays]
    return found, record.words.tolist(), segment.header[0:4].tolist()


def read(segment: Segment, array: Any) -> Any:
    """Copy an array of a segment to host memory."""
    out = np.empty(array.shape, array.dtype)
    segment.payload.read([(out, array)])
    return out
