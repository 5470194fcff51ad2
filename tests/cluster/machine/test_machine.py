"""A process reaches its machine by one interface, of which there may be other forms."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daskps.cluster.caller.mapped import MappedShards
from daskps.cluster.machine.folder import CarrierClosed
from daskps.cluster.machine.membership import HERE, Machine, Membership
from tests.cluster.hosted import LAYOUT, bare_host, shared_shard


class Closed(Machine):
    """A machine without shared memory; notes which clusters were asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def join(self, cluster: str) -> None:
        self.asked.append(cluster)

    def visit(self, cluster: str) -> Membership:
        self.asked.append(cluster)
        raise CarrierClosed("this machine shares nothing")


def test_a_host_takes_memory_from_the_machine_it_was_given() -> None:
    closed = Closed()
    with bare_host(None, machine=closed) as host:
        assert host.members("a") is None
        assert host.members("a") is None
    assert closed.asked == ["a"]


def test_a_socket_looks_for_shards_on_the_machine_it_was_given() -> None:
    where = SimpleNamespace(hosts={"w": [0]}, segments={0: None})
    meta: Any = SimpleNamespace(where=where, cluster="a")
    closed = Closed()
    with pytest.raises(CarrierClosed, match="shares nothing"):
        MappedShards(meta, "w", None, machine=closed)
    assert closed.asked == ["a"]


def test_this_machine_has_no_visitors_where_nobody_is() -> None:
    with pytest.raises(CarrierClosed):
        HERE.visit("of no cluster at all")


def test_whoever_has_left_cannot_tell_that_an_owner_lives(tmp_path: Path) -> None:
    """As a thread that pushes while its process ends."""

    visitor: list[Membership] = []

    class Visited(Machine):
        def visit(self, cluster: str) -> Membership:
            visitor.append(Membership.visit(tmp_path, cluster))
            return visitor[0]

    block = shared_shard(tmp_path).block
    assert block is not None
    where = SimpleNamespace(hosts={"w": [0]}, segments={0: block.address})
    about: dict[str, Any] = {"layout": LAYOUT, "rules": pickle.dumps({})}
    meta: Any = SimpleNamespace(where=where, cluster="a", uid="u", name="s", **about)
    shards = MappedShards(meta, "w", None, machine=Visited())
    assert shards.is_live()
    visitor[0].leave()
    assert not shards.is_live()
