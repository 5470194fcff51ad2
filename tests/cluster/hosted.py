"""A shard in memory that other processes may map, and a host that needs no worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask

from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.hosted import HostedShard
from daskps.cluster.machine.membership import HERE, Machine, Membership
from daskps.cluster.protocol.handlers import HOST
from daskps.layout.arrays import Layout
from daskps.shards.memory.format import NONCE
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard

LAYOUT = Layout.build({"w": ((1000,), "float64")}, 1)


def shared_shard(base: Path, name: str = "a") -> HostedShard:
    """Return a shard whose memory is in a folder below `base`."""
    block = Membership.join(base, name).make(
        Segment.needed_nbytes(LAYOUT, 0, {}, durable=True)
    )
    segment = Segment(LAYOUT, 0, {}, block.buffer, durable=True)
    segment.words[NONCE] = block.nonce
    return HostedShard("s", LAYOUT, 0, Shard(segment, {}), block=block)


class Nowhere:
    """A node of no cluster: nobody reaches its host, and no directory answers."""

    server, address, memory_limit, pause_share = None, "tcp://nowhere", None, 1.0

    def __init__(self, loop: Any) -> None:
        self.loop = SimpleNamespace(asyncio_loop=loop)

    def is_busy(self) -> bool:
        return False

    def measure(self) -> int:
        return 0

    def is_connected(self) -> bool:
        return False

    def serve(self, name: str, handler: Any) -> None: ...

    def report(self, name: str, metric: Any) -> None: ...

    async def directory(self, method: str, **kwargs: Any) -> Any:
        await asyncio.Event().wait()


@contextmanager
def bare_host(
    loop: Any, *hosted_shards: HostedShard, machine: Machine = HERE, inline: int = 2**20
) -> Iterator[ShardHost]:
    """A host of shards of store "s" that hangs in no worker."""
    with dask.config.set({"daskps.inline-nbytes": inline}):
        node: Any = Nowhere(loop)
        host = ShardHost(node, HOST, machine)
    host.shards.update({("s", hosted.index): hosted for hosted in hosted_shards})
    yield host
    # Not closed: the shards are the test's.
    host.shards.clear()
    host.close("the test is over")
