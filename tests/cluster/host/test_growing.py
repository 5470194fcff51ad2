"""Segments that are longer than their memory: sparse files and private mappings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from daskps.cluster.host.growth import Growing, PrivateMemory, grow_by, new_segment
from daskps.cluster.machine.mapping import FILES
from daskps.cluster.machine.membership import Membership
from daskps.errors import LayoutError, PushRejectedError
from daskps.init import constant
from daskps.layout.arrays import Layout
from daskps.layout.tables import UnboundedIds
from daskps.shards.memory.format import NONCE
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, Item, Step, Ticket
from tests.kernels.compiling import kept

LAYOUT = Layout.build(
    {}, 1, {"emb": (0, 64, "float32", UnboundedIds(constant(3.0), 5))}
)
MIB = 2**20


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Membership]:
    """Shared memory below a folder of the test's."""
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    with TemporaryDirectory(dir=place) as folder:
        found = Membership.join(Path(folder), "a")
        yield found
        found.leave()


def asks(most: int) -> Any:
    taken = [0]

    def ask(nbytes: int) -> None:
        if taken[0] + nbytes > most:
            raise LayoutError(f"{most} bytes are all there is")
        taken[0] += nbytes

    return ask


def push(shard: Shard, ids: Any, sequence: int) -> Ticket:
    data = np.ones(64 * len(ids), "f4")
    item = Item(0, 0, data, np.asarray(ids, np.int64))
    ticket = Ticket(Step(ADD, [item], producer=1, sequence=sequence))
    shard.submit([ticket])
    return ticket


def fill(shard: Shard, n: int) -> None:
    for k in range(n):
        ticket = push(shard, np.arange(1000 * k, 1000 * k + 1000), k)
        assert not isinstance(ticket.outcome, Exception), ticket.outcome


def test_a_block_has_memory_as_rows_come(memory):
    length, parts = Segment.extent(LAYOUT, 0, {})
    (block,) = memory.make_all([(length, parts)])
    before = os.fstat(block.file.fd).st_blocks * 512
    assert before < 2 * MIB < 2**36 < length
    shard = Shard(
        new_segment((LAYOUT, 0, {}), block, asks(2**40)), {}, cache_dir=kept()
    )
    assert abs(shard.segment.held_nbytes - before) < 2**17
    shard.segment.words[NONCE] = block.nonce
    other = memory.attach(block.address)
    deputy = Shard.as_deputy(Segment(LAYOUT, 0, {}, other.buffer, durable=True), {})
    fill(shard, 20)
    # As others see it, without mapping anything again.
    assert deputy.segment.tables[0].n_rows == 20_000
    held = os.fstat(block.file.fd).st_blocks * 512
    assert 5 * MIB < held < 20 * MIB
    assert abs(shard.segment.held_nbytes - held) < MIB
    assert held <= FILES.nbytes() < held + MIB
    block.free()


def test_what_a_host_may_not_take_is_refused_and_changes_nothing(memory):
    (block,) = memory.make_all([Segment.extent(LAYOUT, 0, {})])
    segment = Segment(LAYOUT, 0, {}, block.buffer, durable=True)
    grow_by(segment, block, asks(2 * MIB))
    shard = Shard(segment, {}, cache_dir=kept())
    fill(shard, 1)
    n, flip = segment.tables[0].n_rows, segment.flip
    ticket = push(shard, np.arange(10**6, 10**6 + 20_000), 50)
    assert isinstance(ticket.outcome, PushRejectedError)
    assert "are all there is" in str(ticket.outcome)
    assert (segment.tables[0].n_rows, segment.flip) == (n, flip)
    block.free()


def test_private_memory_grows():
    segment = new_segment((LAYOUT, 0, {}), None, asks(2**40))
    shard = Shard(segment, {}, cache_dir=kept())
    fill(shard, 12)
    assert segment.tables[0].n_rows == 12_000
    assert segment.held_nbytes < 20 * MIB
    with pytest.raises(LayoutError, match="all there is"):
        Growing(PrivateMemory(4096), np.empty(8), asks(0)).take([np.empty(8)])


def test_a_process_without_addresses_says_what_takes_them():
    with pytest.raises(LayoutError, match="none left") as found:
        PrivateMemory(2**47)
    for advice in ("fewer shards", "max_rows=", "ulimit -v", "vm.overcommit_memory=2"):
        assert advice in str(found.value)


def test_memory_that_was_given_back_is_zeros_when_it_is_taken_again():
    memory = PrivateMemory(8 * 4096)
    buffer = np.frombuffer(memory.memory, np.uint8)
    growing = Growing(memory, buffer, asks(2**40))
    for part in (buffer[100:20_000], buffer[100:200]):
        buffer[:] = 7
        growing.give(part)
        assert not part.any()
        assert (buffer == 7).sum() == len(buffer) - len(part)
