"""Workers that a new store is given, when one of them is not what it was."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.comm.core import CommClosedError

from daskps.cluster.directory.placement import check_hosts
from daskps.cluster.protocol.messages import PROTOCOL, identity
from daskps.errors import ProtocolError, ShardLostError
from tests import virtual

OWNERS = ("tcp://a:1", "tcp://a:2")


def checked(answer: Any) -> None:
    """Look at two workers, of which the second one gives this answer."""

    async def control(worker: str, method: str) -> Any:
        assert method == "hello"
        if worker == OWNERS[0]:
            return identity()
        if isinstance(answer, BaseException):
            raise answer
        if answer is None:
            await asyncio.sleep(30)
        return answer

    entry: Any = SimpleNamespace(
        name="m", owners=OWNERS, nbytes=dict.fromkeys(OWNERS, 8), memories={}
    )
    here = OWNERS[0].__eq__
    hosts: Any = SimpleNamespace(control=control, has_worker=here, foreign=set())
    try:
        virtual.run(check_hosts(hosts, entry))
    except ProtocolError:
        assert hosts.foreign == {OWNERS[1]}
        raise


def test_a_worker_that_died_unheard_is_named():
    with pytest.raises(ShardLostError, match=r"tcp://a:2 died while .* was made") as e:
        checked(CommClosedError("Connection reset by peer"))
    assert (e.value.store, e.value.shard, e.value.worker) == ("m", 1, OWNERS[1])


def test_nobody_waits_for_a_worker_that_has_left():
    """Dask would try to reach it for 30 s."""
    with pytest.raises(ShardLostError, match="it has left"):
        checked(None)


def test_a_worker_of_another_protocol_is_refused():
    with pytest.raises(ProtocolError, match="tcp://a:2 speaks protocol 0"):
        checked({"protocol": 0, "version": "0.0"})


def test_a_worker_of_another_version_is_refused():
    """Also where its protocol is the same."""
    with pytest.raises(ProtocolError, match=r"tcp://a:2 .* \(daskps 0.0\)"):
        checked({"protocol": PROTOCOL, "version": "0.0"})
