"""New shards of a host, in memory that other processes can map where there is such."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

from daskps.cluster.host.hosted import HostedShard
from daskps.shards.memory.format import GENERATION, NONCE
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.rules import Rules
    from daskps.cluster.machine.blocks import Block
    from daskps.cluster.machine.membership import Membership
    from daskps.layout.arrays import Layout


def make_shards(
    members: Membership | None,
    rules: Rules,
    *,
    name: str,
    layout: Layout,
    shards: Sequence[int],
) -> list[HostedShard]:
    """Make shards in memory that other processes can map, where there is such."""
    slots = rules.slots
    blocks: list[Block] = []
    if members is not None:
        need = partial(Segment.needed_nbytes, layout, slots=slots, durable=True)
        blocks = members.make_all([need(shard) for shard in shards])
    made = []
    for shard, block in itertools.zip_longest(shards, blocks):
        buffer = None if block is None else block.buffer
        segment = Segment(layout, shard, slots, buffer, durable=block is not None)
        segment.words[GENERATION] = 1
        segment.words[NONCE] = 0 if block is None else block.nonce
        machine = Shard(segment, rules, cache_dir=rules.cache_dir)
        made.append(HostedShard(name, layout, shard, machine, block=block))
    return made
