"""What a host does that is to take over shards of a worker that died."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskps.cluster.host import adoption
from daskps.cluster.host.adoption import _Adopter
from daskps.cluster.host.hosted import HostedShard
from daskps.cluster.machine.membership import Membership
from daskps.errors import StoreClosedError
from daskps.shards.deputy import CLOSED, OPEN, RELEASED, NotHereError, gate_of, set_gate
from daskps.shards.memory.format import GENERATION
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, READ, Item, Ready, Step, Ticket
from tests.cluster.hosted import LAYOUT, shared_shard

#: A process that does not live.
DEAD = 5 << 22 | 1
ABOUT = {
    "cluster": "a",
    "name": "s",
    "rules": pickle.dumps({}),
    "layout": LAYOUT.to_wire(),
}


class Host:
    """An heir; it may begin to close while it takes shards over."""

    def __init__(self, members: Membership) -> None:
        self.members = lambda cluster: members
        self.worker = SimpleNamespace(address="tcp://heir")
        self.shards: dict[tuple[str, int], HostedShard] = {}
        self.dropped: list[str] = []
        self.has_copies = False
        #: What it says when it is asked whether it closes.
        self.closes = [False, False]

    async def in_thread(self, function: Any) -> Any:
        return function()

    def leaves(self) -> bool:
        return self.closes.pop(0)


@pytest.fixture
def heir(tmp_path: Path) -> Iterator[Host]:
    members = Membership.join(tmp_path, "a")
    yield Host(members)
    members.leave()


@pytest.fixture
def left(tmp_path: Path) -> HostedShard:
    """A shard of a worker that died after one push."""
    hosted = shared_shard(tmp_path)
    hosted.shard.segment.words[GENERATION] = 1
    items = (Item(0, 0, np.ones(1000)),)
    hosted.shard.submit([Ticket(Step(ADD, items, producer=1, sequence=0))])
    assert hosted.block is not None
    name = f"{DEAD:016x}-{7:016x}"
    members = Membership.join(tmp_path, "a")
    os.rename(f"{members.path}/{hosted.block.name}", f"{members.path}/{name}")
    hosted.block.name = name
    members.leave()
    return hosted


def rows(hosted: HostedShard) -> list[Any]:
    block: Any = hosted.block
    return [(0, block.name, block.nbytes, block.nonce, 2)]


def take(heir: Any, hosted: HostedShard) -> tuple[list[HostedShard], Any]:
    adopter = _Adopter(heir.members("a"), "tcp://heir", ABOUT, None)
    hosted_shards = adopter.take_all(heir, "s", rows(hosted))
    [found] = adopter.found
    return hosted_shards, found


def adopt(heir: Any, hosted: HostedShard) -> list[dict[str, Any]]:
    about: Any = {"store": "s", "about": ABOUT, "rows": rows(hosted), "rounds": None}
    about["codecs"] = ()
    return asyncio.run(adoption.adopt(heir, **about))


def test_a_shard_that_is_taken_over_is_of_the_next_generation(
    heir: Host, left: HostedShard
) -> None:
    """Who shares its memory with the dead hears of it by that."""
    segment = left.shard.segment
    deputy = Shard.as_deputy(Segment(LAYOUT, 0, {}, segment.buffer, durable=True), {})
    [taken], found = take(heir, left)
    assert found["generation"] == taken.shard.generation == 2
    assert segment.words[GENERATION] == 2
    assert segment.current.version == 1
    ticket = Ticket(Step(wait=READ))
    deputy.submit([ticket])
    assert isinstance(ticket.outcome, NotHereError)
    ticket = Ticket(Step(wait=READ, generation=2))
    taken.shard.submit([ticket])
    assert isinstance(ticket.outcome, Ready)
    taken.close()
    assert gate_of(segment) == CLOSED


def test_a_shard_that_is_about_to_be_freed_is_left_alone(
    heir: Host, left: HostedShard
) -> None:
    set_gate(left.shard.segment, CLOSED)
    hosted_shards, found = take(heir, left)
    assert hosted_shards == []
    assert found["why"] == "its owner was about to free it"
    assert left.shard.segment.words[GENERATION] == 1


def test_a_shard_of_an_owner_that_lives_is_left_alone(
    heir: Host, tmp_path: Path
) -> None:
    hosted = shared_shard(tmp_path)
    hosted_shards, found = take(heir, hosted)
    assert hosted_shards == []
    assert found["sight"] == "found"
    assert "lives" in found["why"]
    assert gate_of(hosted.shard.segment) == OPEN
    hosted.close()


def test_a_shard_is_there_though_no_more_files_can_be_opened(
    heir: Any, left: HostedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a worker with a thousand shards: somebody else may adopt it, or it later."""
    [row] = rows(left)
    name, path = f"{DEAD:016x}-{8:016x}", Path(heir.members("a").path)
    # This process has the other file open already.
    shutil.copy(path / row[1], path / name)
    monkeypatch.setattr("daskps.cluster.machine.blocks.SPARED_DESCRIPTORS", 2**40)
    adopter = _Adopter(heir.members("a"), "tcp://heir", ABOUT, None)
    assert adopter.take_all(heir, "s", [(0, name, *row[2:])]) == []
    [found] = adopter.found
    assert found["sight"] == "found"
    assert "Too many open files" in found["why"]
    asked: Any = {"cluster": "a", "rows": [(0, name, *row[2:4])]}
    [seen] = asyncio.run(adoption.look(heir, **asked))
    assert (seen["sight"], seen["why"]) == ("found", found["why"])


def test_who_closes_meanwhile_lets_go_of_what_it_has_taken(
    heir: Host, left: HostedShard
) -> None:
    heir.closes = [False, True]
    [found] = adopt(heir, left)
    assert found["why"] == "worker tcp://heir is leaving too"
    assert heir.shards == {}
    assert gate_of(left.shard.segment) == RELEASED


def test_what_was_freed_meanwhile_is_freed(heir: Host, left: HostedShard) -> None:
    heir.dropped = ["s"]
    with pytest.raises(StoreClosedError, match="freed while it was adopted"):
        adopt(heir, left)
    assert heir.shards == {}
    assert gate_of(left.shard.segment) == CLOSED
