"""A whole cluster by TLS: it serves its own by every way, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, rpc
from distributed.security import Security

import daskps
from daskps import optim
from daskps.cluster import connections
from daskps.cluster.protocol.messages import PROTOCOL
from daskps.testing import kill_owner
from tests.support import CARRIERS, local_cluster, store

STRANGERS = pytest.mark.parametrize(
    "stranger",
    ["another authority", "another certificate", "without TLS"],
    indirect=True,
)


@pytest.fixture(scope="module")
def ours() -> Any:
    """What the servers and their clients have; to make its keys takes a third of a second."""
    return Security.temporary()


@pytest.fixture(scope="module")
def foreign() -> Any:
    """What those of another cluster have."""
    return Security.temporary()


@pytest.fixture
def stranger(request: pytest.FixtureRequest, ours: Any, foreign: Any) -> Any:
    """One who has not what is asked for."""
    # The certificate is signed by another authority, but the cluster's is known.
    signed_elsewhere = Security(
        require_encryption=True,
        tls_ca_file=ours.tls_ca_file,
        tls_client_cert=foreign.tls_client_cert,
        tls_client_key=foreign.tls_client_key,
    )
    found = {"another authority": foreign, "another certificate": signed_elsewhere}
    return found.get(request.param)


@pytest.fixture(scope="module")
def encrypted(ours: Any) -> Iterator[Client]:
    """Two workers that talk by TLS, and to nobody in another way."""
    by: dict[str, Any] = {"protocol": "tls", "security": ours}
    with dask.config.set(CARRIERS["socket"]), local_cluster(**by) as client:
        yield client


def loop(trainer: Any, part: int) -> int:
    for _ in range(part):
        trainer.pushpull({"w": np.ones(6)})
    return int(trainer.clock)


def test_a_store_works_by_encrypted_addresses_alone(encrypted: Client) -> None:
    """So do its second copies, one of which takes over where the owner has died."""
    about: dict[str, Any] = {"optimizer": optim.SGD(1.0), "copies": 2}
    with store(encrypted, params={"w": np.zeros(6)}, **about) as s:
        s.push({"w": np.ones(6)})
        assert daskps.run(s, loop, [4, 4]) == [4, 4]
        np.testing.assert_array_equal(s.snapshot()["w"].compute(), -5.0)
        shards, told = (s.stats()[of] for of in ("shards", "handle"))
        found = [address_of(encrypted), *s.placement, *(row["copy"] for row in shards)]
        assert [address.partition("//")[0] for address in found] == ["tls:"] * 5
        assert not told["local_calls"]
        assert told["messages"] + told["socket_calls"] > 0
        kill_owner(encrypted, s)
        s.push({"w": np.ones(6)})
        np.testing.assert_array_equal(s["w"].pull(), -6.0)
        assert {*s.placement} == {shards[0]["copy"]}


def address_of(client: Client) -> str:
    return str(client.scheduler_info(n_workers=0)["address"])


def arguments(stranger: Security | None) -> Any:
    return {} if stranger is None else stranger.get_connection_args("client")


def as_known(address: str, stranger: Security | None) -> str:
    return address if stranger else address.replace("tls://", "tcp://")


@STRANGERS
def test_no_stranger_is_served(encrypted: Client, stranger: Security | None) -> None:
    """Not by the scheduler, not by a worker, and none is given a socket."""
    with store(encrypted, params={"w": np.zeros(6)}) as s:
        worker = as_known(s.placement[0], stranger)
        scheduler = as_known(address_of(encrypted), stranger)
        socket = {
            "op": "daskps_socket",
            "protocol": PROTOCOL,
            "store": s.uid,
            "token": "t",
        }

        async def ask(address: str, op: str, **message: Any) -> Any:
            async with rpc(address, connection_args=arguments(stranger)) as found:
                return await getattr(found, op)(**message)

        async def ask_for_socket() -> Any:
            pool = SimpleNamespace(connection_args=arguments(stranger))
            return await connections.ask_for_socket(pool, worker, socket, 30)

        for asked in (
            lambda: ask(scheduler, "daskps_directory", method="list"),
            lambda: ask(worker, "daskps_control", method="hello"),
            ask_for_socket,
        ):
            with pytest.raises(OSError):  # noqa: PT011 - the system's own text
                encrypted.sync(asked)
        with pytest.raises(OSError):  # noqa: PT011
            Client(scheduler, security=stranger, timeout=30, set_as_default=False)
        np.testing.assert_array_equal(s["w"].pull(), 0.0)
