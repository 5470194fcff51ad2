"""A shard in memory that other processes may map, and a host that needs no worker."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from daskps.cluster.host import ShardHost
from daskps.cluster.memory import open_memory
from daskps.cluster.slot import Slot
from daskps.layout import Layout
from daskps.shards.dense import Shard
from daskps.shards.segment import NONCE, Segment

LAYOUT = Layout.build({"w": ((1000,), "float64")}, 1)


def shared_slot(base: Path, name: str = "a") -> Slot:
    """Return a shard whose memory is in a folder below `base`."""
    memory = open_memory(base, name)
    block = memory.take(Segment.needed_nbytes(LAYOUT, 0, {}, durable=True))
    segment = Segment(LAYOUT, 0, {}, block.buffer, durable=True)
    segment.words[NONCE] = block.nonce
    return Slot("s", LAYOUT, 0, Shard(segment, {}), block=block)


def bare_host(loop: Any, *slots: Slot) -> ShardHost:
    """Return a host of shards of store "s" that only serves calls."""
    host = object.__new__(ShardHost)
    worker: Any = SimpleNamespace(
        address="tcp://nowhere", loop=SimpleNamespace(asyncio_loop=loop)
    )
    host.worker, host._empty = worker, np.empty
    host.slots = {("s", slot.index): slot for slot in slots}
    host.waiting, host.n_calls, host.inline_nbytes = {}, 0, 2**20
    host._looking, host._leaving, host._loop_thread = None, [], 0
    host._executor = ThreadPoolExecutor(1)
    return host
