"""Calls by sockets: what they do, and what goes on by message instead."""

from __future__ import annotations

import asyncio
import pickle
import resource
import socket
import sys
import threading
import uuid
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import dask
import numpy as np
import pytest
from dask.utils import parse_timedelta
from distributed import Client
from distributed.security import Security

import daskps
from daskps import optim
from daskps.cluster import connections
from daskps.cluster.caller import (
    call_socket,
    call_template,
    socket_carrier,
    socket_pool,
)
from daskps.cluster.caller.link import _LINKS, link_of
from daskps.cluster.caller.remote import RemoteShards
from daskps.cluster.caller.routes import LOOK_LATER_NBYTES
from daskps.cluster.host.hosted import HostedShard
from daskps.cluster.host.node import HOSTS
from daskps.cluster.host.sockets import most_sockets
from daskps.cluster.protocol.messages import PROTOCOL
from daskps.cluster.sockets.channel import Channel
from daskps.cluster.sockets.frames import CALL, TEMPLATE, Head, pack_head, pack_text
from daskps.cluster.sockets.served import ServedChannel
from daskps.kernels import finite
from daskps.store import values
from tests.seams import session_of, shards_of
from tests.support import cleaned, local_cluster, store, until

SOCKET = {
    "daskps.carriers.process": False,
    "daskps.carriers.machine": False,
    "daskps.carriers.socket": True,
    "distributed.worker.profile.enabled": False,
}
#: Two workers in this process that talk by TCP: both ends of a socket are here.
HERE: dict[str, Any] = {"processes": False, "protocol": "tcp"}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket is opened at the first call, and soon again, after a look at all files."""
    monkeypatch.setattr(socket_pool, "CALLS_BEFORE", 1)
    monkeypatch.setattr(socket_pool, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("daskps.cluster.host.sockets.COUNT_SECONDS", -1.0)


@pytest.fixture(scope="module")
def here() -> Iterator[Client]:
    with dask.config.set(SOCKET), local_cluster(**HERE) as client:
        yield client


@pytest.fixture
def client(here: Client) -> Iterator[Client]:
    with dask.config.set(SOCKET), cleaned(here):
        yield here
    # Else the sockets are those of the next test too: of this client, and of the
    # workers.
    for link in [*_LINKS.values()]:
        of, link.socket_pool = link.socket_pool, None
        if of is not None:
            of.close()
    until(lambda: given() == 0)


def handle(s: Any) -> dict[str, Any]:
    found: dict[str, Any] = s.stats()["handle"]
    return found


def opened(s: Any, n: int | None = None) -> dict[str, Any]:
    """Pull until there are sockets to all hosts; return what the handle counts then."""
    n = len(s.placement) if n is None else n

    def is_open() -> bool:
        s.pull()
        return handle(s)["sockets"] >= n

    until(is_open)
    return handle(s)


def rows_opened(s: Any) -> dict[str, Any]:
    """The same of a store that has a table and no arrays."""

    def is_open() -> bool:
        s["w"].pull([0])
        return handle(s)["sockets"] >= 1

    until(is_open)
    return handle(s)


def given() -> int:
    """Return how many sockets the hosts here have."""
    return sum(host.totals()["sockets"] for host in HOSTS.values())


def test_a_handle_takes_sockets_once_they_are_open(client):
    with store(client, params={"w": np.zeros(10, "f4"), "b": np.float64(0)}) as s:
        before = opened(s)
        assert given() >= 2
        out = s.pull()
        for k in range(1, 4):
            s.push({"w": np.full(10, 10, "f4"), "b": np.float64(10)})
            s.pull(out=out)
            assert out["w"].tolist() == [-k] * 10
            assert out["b"] == -k
        s["w"].add(np.ones(10, "f4"))
        s["b"].assign(np.float64(5))
        back = s.pushpull({"w": np.zeros(10, "f4")})
        assert back["w"].tolist() == [-2] * 10
        assert back["b"] == 5
        after = handle(s)
        assert after["messages"] == before["messages"]
        assert after["socket_calls"] > before["socket_calls"] + 14
        assert after["socket_nbytes"] > before["socket_nbytes"]
        assert (after["retries"], after["fallbacks"]) == (0, {})
        # Every push once on each shard it goes to.
        assert [row["duplicates"] for row in s.stats()["shards"]] == [0, 0]
        assert set(after["carriers"].values()) == {"socket"}


@pytest.mark.parametrize("n", [1, 2])
def test_rows_of_a_read_that_no_socket_answers_come_by_message(client, monkeypatch, n):
    rows, names = np.arange(30, dtype="f4").reshape(10, 3), [*client.nthreads()][:n]
    emb = daskps.TableSpec(10, 3, init=rows)
    with store(client, params={"emb": emb}, servers=names) as s:
        ids, table = np.array([9, 0, 4, 9]), s["emb"]
        until(lambda: table.pull(ids) is not None and handle(s)["sockets"] >= n)
        before = handle(s)
        assert table.pull(ids).tolist() == rows[ids].tolist()
        after = handle(s)
        assert after["socket_calls"] == before["socket_calls"] + n
        assert after["messages"] == before["messages"]
        assert after["rows_pulled"] == before["rows_pulled"] + 4

        with pytest.raises(ValueError, match="rows 0 to 9, found id 10"):
            table.pull([0, 10])

        def refuses(*_: Any) -> Any:
            raise ConnectionResetError("cut")

        monkeypatch.setattr(call_socket.CallSocket, "answer", refuses)
        assert table.pull(ids).tolist() == rows[ids].tolist()
        found = handle(s)
        assert found["messages"] == after["messages"] + n
        assert found["fallbacks"] == {"ConnectionResetError": n}


def test_all_handles_and_trainers_of_a_process_have_its_sockets(client):
    """Also one that is made from another one's bytes and calls only once."""
    with store(client) as s:
        opened(s)
        socket_pool = given()
        other = pickle.loads(pickle.dumps(s))
        other.push({"w": np.ones(10, "f4")})
        assert other.pull()["w"].shape == (10,)
        found = handle(other)
        assert (found["messages"], found["socket_calls"], found["sockets"]) == (0, 4, 2)
        other.close()
        assert given() == socket_pool
    with store(client) as s:
        s.pull()
        assert handle(s)["messages"] == 0
        assert given() == socket_pool


def test_a_peer_that_does_not_read_is_cut(client):
    """By the kernel, after what Dask gives all its connections: both ends keep that."""
    after = parse_timedelta(dask.config.get("distributed.comm.timeouts.tcp"))
    with store(client) as s:
        opened(s)
        idle = [
            call_socket
            for of in link_of(client).socket_pool._idle.values()
            for call_socket in of
        ]
        ends = [call_socket._socket for call_socket in idle]
        of_hosts: list[Any] = [host.sockets for host in HOSTS.values()]
        ends += [
            one.channel._socket for of_host in of_hosts for one in of_host._sockets
        ]
        assert len(ends) == 4
        for end in ends:
            found = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert found == 1000 * after


def test_a_call_to_a_store_that_is_gone_leaves_the_socket_to_others(client):
    with store(client) as s, store(client, name="gone") as gone:
        opened(s)
        gone.pull()
        assert handle(gone)["messages"] == 0
        other = daskps.open("gone")
        other.pull()
        gone.delete()
        with pytest.raises(daskps.errors.DaskPSError):
            other.pull()
        before = handle(s)
        s.pull()
        assert handle(s)["messages"] == before["messages"]


@pytest.mark.parametrize("n", [0, 1, 20_000, 3_000_000])
def test_arrays_of_all_sizes_and_dtypes(client, n):
    values = {
        d: (np.arange(n) % 100).astype(d)
        for d in ("float32", "float64", "int64", "float16")
    }
    with store(client, params=values, optimizer=None) as s:
        # Shards without elements are not asked.
        before = opened(s, min(n, len(s.placement)))
        found = s.pull()
        for name, value in values.items():
            assert found[name].dtype == value.dtype
            assert (found[name] == value).all()
            s[name].assign(value[::-1].copy())
        found = s.pull()
        for name, value in values.items():
            assert (found[name] == value[::-1]).all()
        assert handle(s)["messages"] == before["messages"]


def test_what_a_host_refuses_is_heard_by_message_and_keeps_the_socket(client):
    with store(client, params={"w": np.zeros(4, "i8")}, optimizer=None) as s:
        opened(s)
        s.pull()
        [host, *_] = [HOSTS[w] for w in s.placement]

        def refuse(*_: Any) -> None:
            raise daskps.errors.LayoutError("the reason itself")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host, "get_shard", refuse)
            # Else the host does not look for the shards that it knows.
            patch.setattr(HostedShard, "is_released", property(lambda _: True))
            with pytest.raises(daskps.errors.LayoutError, match="the reason itself"):
                # A plain read may be answered without any of this.
                s["w"].assign(np.zeros(4, "i8"))
        after = handle(s)
        assert after["fallbacks"] == {"refused: LayoutError": 1}
        assert after["sockets"] == 2
        assert s.pull()["w"].tolist() == [0] * 4
        assert handle(s)["messages"] == after["messages"]


@pytest.mark.parametrize("what", ["array", "rows"])
def test_what_one_shard_gets_is_looked_at_there(client, monkeypatch, what):
    n, looked = LOOK_LATER_NBYTES // 4, list[int]()

    def counted(array: Any, **kwargs: Any) -> bool:
        looked.append(array.size)
        return finite(array, **kwargs)

    params: Any = {"w": np.zeros(n, "f4")}
    if what == "rows":
        n, params = 40, {"w": daskps.TableSpec(rows=30, dim=4)}

    def push(s: Any, value: float) -> None:
        given = np.ones(n, "f4")
        given[n // 2] = value
        if what == "rows":
            s.push({"w": daskps.RowGrad(np.arange(10), given.reshape(10, 4))})
        else:
            s.push({"w": given})

    with store(client, params=params, shards=1) as s:
        before = opened(s) if what == "array" else rows_opened(s)
        monkeypatch.setattr(values, "finite_of", counted)
        push(s, 1.0)
        assert handle(s)["socket_calls"] == before["socket_calls"] + 1
        assert not looked
        with pytest.raises(daskps.PushRejectedError, match="'w' has NaN or Inf"):
            push(s, np.nan)
        assert looked == [n]
        after = handle(s)
        assert after["fallbacks"] == {"refused: PushRejectedError": 1}
        assert after["messages"] == before["messages"]
        assert s.version == 1
        push(s, 1.0)
        assert s.version == 2


def test_what_has_to_be_waited_for_goes_on_by_message(client, monkeypatch):
    monkeypatch.setattr(socket_carrier, "WAIT_SECONDS", 0.01)
    with store(client, params={"w": np.zeros(4)}) as s:
        before = opened(s)
        with pytest.raises(TimeoutError, match=r"shards? 0"):
            s.pull(min_version=s.version + 5, timeout=0.5)
        seen: list[Any] = []
        wanted = s.version + 1
        reader = threading.Thread(
            target=lambda: seen.append(s.pull(min_version=wanted)["w"])
        )
        reader.start()
        until(lambda: handle(s)["messages"] > before["messages"])
        s.push({"w": np.ones(4)})
        reader.join()
        assert (seen[0] < 0).all()
        # Of two sockets; on a busy machine one may have answered after the timeout.
        assert handle(s)["fallbacks"]["it has to be waited for"] >= 1
        assert handle(s)["sockets"] >= 2


def test_a_wait_that_is_long_stays_on_its_socket(client, monkeypatch):
    monkeypatch.setattr(call_template, "PATIENCE_SECONDS", 0.01)
    with store(client, params={"w": np.zeros(4)}) as s:
        opened(s)
        silent, watch = threading.Event(), RemoteShards.watch

        def watched(*args: Any) -> Any:
            silent.set()
            return watch(*args)

        monkeypatch.setattr(RemoteShards, "watch", watched)
        wanted, seen = s.version + 1, list[Any]()
        other = pickle.loads(pickle.dumps(s))
        shards_of(other)
        reader = threading.Thread(
            target=lambda: seen.append(s.pull(min_version=wanted, timeout=None)["w"])
        )
        before = handle(s)
        reader.start()
        assert silent.wait(60)
        monkeypatch.setattr(call_template, "PATIENCE_SECONDS", 60.0)
        other.push({"w": np.ones(4)})
        reader.join()
        assert (seen[0] < 0).all()
        after = handle(s)
        assert (after["messages"], after["fallbacks"]) == (before["messages"], {})
        assert after["socket_calls"] == before["socket_calls"] + 2


def test_calls_at_the_same_time_take_a_socket_each(client):
    with store(client, params={"w": np.zeros(1000)}, optimizer=optim.SGD(1.0)) as s:
        opened(s)

        def push() -> None:
            for _ in range(50):
                s.push({"w": np.ones(1000)})

        threads = [threading.Thread(target=push) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (s.pull()["w"] == -300).all()
        assert 2 <= handle(s)["sockets"] <= 2 * socket_pool.MOST_SOCKETS
        assert [row["pushes"] for row in s.stats()["shards"]] == [300, 300]


def test_nothing_on_a_socket_is_unpickled(client, monkeypatch):
    """Neither by the threads of hosts, nor by those that call."""
    seen: set[str] = set()
    serialize = sys.modules["distributed.protocol.serialize"]

    def watched(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.add(threading.current_thread().name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(pickle, "loads", watched(pickle.loads))
    for name in ("deserialize", "pickle_loads"):
        monkeypatch.setattr(serialize, name, watched(getattr(serialize, name)))
    with store(client, params={"w": np.zeros(50_000)}) as s:
        before = opened(s)
        seen.clear()

        def use() -> None:
            s.push({"w": np.ones(50_000)})
            s.pull()

        caller = threading.Thread(target=use, name="caller")
        caller.start()
        caller.join()
        assert handle(s)["socket_calls"] == before["socket_calls"] + 4
        assert not [
            name for name in seen if name.startswith(("daskps-socket", "caller"))
        ]
        pickle.loads(pickle.dumps(1))
        assert seen & {threading.current_thread().name}


def loop(trainer: Any, part: int) -> Any:
    out = trainer.pull()
    for k in range(20):
        trainer.push({"w": np.sin(np.arange(len(out["w"])) + part + k).astype("f4")})
        trainer.pull(out=out)
    last = trainer.pushpull({"w": np.ones(len(out["w"]), "f4")})
    return last["w"], session_of(trainer).shards.counters


def at_hosts(s: Any) -> int:
    """Return how many calls by socket the hosts of a store have served."""
    calls = {row["worker"]: row["socket_calls"] for row in s.stats()["shards"]}
    return sum(calls.values())


@pytest.mark.parametrize("sync", ["bsp", "ssp", "asp"])
@pytest.mark.parametrize("codec", [None, "bf16"])
def test_a_run_by_sockets_has_the_bits_of_one_by_message(client, sync, codec):
    results = []
    for is_socket in (True, False):
        with (
            dask.config.set({"daskps.carriers.socket": is_socket}),
            store(client, params={"w": np.zeros(600, "f4")}) as s,
        ):
            before = at_hosts(s)
            rows = daskps.run(s, loop, [0, 1], sync=sync, codec=codec)
            results.append(s.pull()["w"].tobytes())
            assert s.version == (21 if sync == "bsp" else 42)
            taken = [counters.socket_calls for _, counters in rows]
            assert all(taken) if is_socket else not any(taken)
            # Where anybody sees what trainers do.
            assert at_hosts(s) - before >= sum(taken)
    if sync == "bsp":
        assert results[0] == results[1]


def test_sockets_by_tls():
    security = Security.temporary()
    tls: dict[str, Any] = {"security": security, **HERE, "protocol": "tls"}
    with (
        dask.config.set(SOCKET),
        local_cluster(**tls) as client,
        store(client, params={"w": np.zeros(500_000)}, optimizer=optim.SGD(1.0)) as s,
    ):
        before = opened(s)
        for _ in range(3):
            s.push({"w": np.ones(500_000)})
        assert (s.pull()["w"] == -3).all()
        after = handle(s)
        assert after["messages"] == before["messages"]
        assert after["socket_calls"] == before["socket_calls"] + 8


# -- ends, and what is no socket -------------------------------------------------------


class Cut:
    """Cuts a socket after so many bytes that one of its ends sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, by_host: bool) -> None:
        self.left: int | None = None
        self.sent = 0
        kind, name = (ServedChannel, "send_some") if by_host else (Channel, "send")
        whole = getattr(kind, name)

        def send(channel: Channel, buffers: Any, **how: Any) -> Any:
            data = b"".join(bytes(memoryview(b).cast("B")) for b in buffers)
            self.sent = len(data)
            if self.left is None:
                return whole(channel, [data], **how)
            whole(channel, [data[: self.left]], **how)
            self.left = None
            channel.shut()
            return None

        monkeypatch.setattr(kind, name, send)
        # Or the caller's frames take no step in Python.
        monkeypatch.setattr(call_socket, "MOST_BUFFERS", 0)

    def begin(self, position: int) -> None:
        self.left = position

    @property
    def is_on(self) -> bool:
        return self.left is not None


@pytest.mark.parametrize("by_host", [True, False], ids=["answer", "push"])
def test_a_socket_that_is_cut_anywhere_applies_each_push_once(
    client, monkeypatch, by_host
):
    cut = Cut(monkeypatch, by_host=by_host)
    sgd = optim.SGD(1.0)
    with store(client, params={"w": np.zeros(4)}, optimizer=sgd, shards=1) as s:
        opened(s)
        s.push({"w": np.ones(4)})  # its template is known from here on
        # Head, and 32 bytes: a row of one answer, or four numbers.
        n, pushes = cut.sent, 1
        assert n == 96
        # At every byte a model of both ends is cut: test_cuts.
        for position in range(0, n, 19):
            opened(s)
            s.push({"w": np.ones(4)})
            cut.begin(position)
            s.push({"w": np.ones(4)})
            assert not cut.is_on
            pushes += 2
            assert s.pull()["w"].tolist() == [-pushes] * 4
        [row] = s.stats()["shards"]
        assert row["pushes"] == pushes


def ask(client: Client, **message: Any) -> Any:
    """Ask the first worker for a socket, as any process of the cluster can."""
    address = next(iter(client.nthreads()))
    token = message.pop("token", uuid.uuid4().hex)
    message = {"op": "daskps_socket", "protocol": PROTOCOL, "token": token, **message}
    work = connections.ask_for_socket(client.rpc, address, message, 30)
    loop: Any = client.loop
    return asyncio.run_coroutine_threadsafe(work, loop.asyncio_loop).result()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"protocol": 1}, "protocol 1 was asked for"),
        ({"protocol": None}, "protocol None"),
        ({"store": "other"}, "holds no shard of store"),
        ({"store": 7}, "a socket to store 7"),
        ({"token": "x" * 65}, "a socket to store"),
        ({"token": None}, "a socket to store"),
    ],
)
def test_a_socket_that_nobody_can_have_is_refused_as_a_message(client, wrong, why):
    with store(client) as s:
        reply, taken = ask(client, **{"store": s.uid, **wrong})
        if taken is not None:
            taken.close()  # or what follows would wait for its end
        assert taken is None
        assert reply["status"] == "refused"
        assert why in str(reply["error"])
        assert given() == 0


def test_a_host_without_descriptors_gives_no_sockets(client, monkeypatch):
    monkeypatch.setattr("daskps.cluster.host.sockets.most_sockets", lambda _: 0)
    with store(client) as s:
        reply, _ = ask(client, store=s.uid)
        assert "has 0 sockets already" in str(reply["error"])
        s.pull()
        until(lambda: s.pull() and any(handle(s)["fallbacks"]))
        assert handle(s)["sockets"] == 0


def test_a_host_that_can_have_no_thread_gives_no_sockets(client, monkeypatch):
    """It says so while it can: who is told that it has a socket would wait for answers."""

    def fail(*_: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("daskps.cluster.host.sockets.SocketServer", fail)
    for host in HOSTS.values():
        monkeypatch.setattr(host.sockets, "_server", None)
    with store(client) as s:
        reply, taken = ask(client, store=s.uid)
        assert taken is None
        assert "gives no sockets" in str(reply["error"])
        assert "Too many open files" in str(reply["error"])
        assert given() == 0


def test_the_socket_that_was_idle_longest_goes_for_another(client, monkeypatch):
    monkeypatch.setattr("daskps.cluster.host.sockets.most_sockets", lambda _: 2)
    monkeypatch.setattr("daskps.cluster.sockets.connection.IDLE_SECONDS", 0.0)
    with store(client) as s:
        taken = [ask(client, store=s.uid)[1] for _ in range(2)]
        until(lambda: given() == 2)
        for there in (taken[0], taken[1], taken[0]):
            there.sendall(b"".join(TEMPLATE_OF_NOTHING))
            there.recv(10_000)
        taken.append(ask(client, store=s.uid)[1])
        assert taken[1].recv(10) == b""
        monkeypatch.setattr("daskps.cluster.sockets.connection.IDLE_SECONDS", 1e9)
        reply, _ = ask(client, store=s.uid)
        assert "all of them busy" in str(reply["error"])
        for there in taken:
            there.close()


def test_each_process_has_a_socket_before_any_has_a_second(client, monkeypatch):
    """Also those that come last: half of the sockets are kept for them."""
    monkeypatch.setattr("daskps.cluster.host.sockets.most_sockets", lambda _: 6)
    with store(client) as s:
        taken = []

        def opens(token: str) -> bool:
            reply, there = ask(client, store=s.uid, token=token)
            if there is None:
                assert "keeps half of its 6 sockets" in str(reply["error"])
                return False
            taken.append(there)
            until(lambda: given() == len(taken))
            return True

        assert [opens("a") for _ in range(4)] == [True, True, True, False]
        assert [opens(token) for token in "bcd"] == [True] * 3
        # What was used within a second is nobody else's.
        reply, there = ask(client, store=s.uid, token="e")
        assert there is None
        assert "all of them busy" in str(reply["error"])
        for there in taken:
            there.close()


def test_sockets_of_a_process_say_whose_they_are():
    ours, theirs = socket_pool.SocketPool(Mock()), socket_pool.SocketPool(Mock())
    assert ours._token != theirs._token


def test_sockets_take_half_of_the_descriptors_that_are_left():
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = most_sockets(0)
    assert 0 < 2 * now < soft
    ends = [socket.socketpair() for _ in range(10)]
    assert most_sockets(0) in (now - 10, now - 11)
    assert most_sockets(20) in (now, now - 1)
    for here, there in ends:
        here.close()
        there.close()


def test_open_files_are_not_counted_for_each_socket(client, monkeypatch):
    """A thousand of them took 0.6 ms of the event loop."""
    counted: list[int] = []

    def count(n: int) -> int:
        counted.append(n)
        return 3

    monkeypatch.setattr("daskps.cluster.host.sockets.most_sockets", count)
    monkeypatch.setattr("daskps.cluster.host.sockets.COUNT_SECONDS", 1e9)
    # What is counted here holds for no other test.
    asked = HOSTS[next(iter(client.nthreads()))].sockets
    monkeypatch.setattr(asked, "_count_after", 0.0)
    with store(client) as s:
        taken = [ask(client, store=s.uid)[1] for _ in range(3)]
        assert counted == [0]
        until(lambda: given() == 3)
        # Where there may be no more, it is looked at again.
        reply, _ = ask(client, store=s.uid)
        assert counted == [0, 3]
        assert "has 3 sockets already" in str(reply["error"])
        for there in taken:
            there.close()


def test_where_none_is_left_to_count_them_there_is_room_for_no_socket(monkeypatch):
    def fail(_: str) -> list[str]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("daskps.cluster.host.sockets.os.listdir", fail)
    assert most_sockets(3) == 0


TEMPLATE_OF_NOTHING = pack_text(TEMPLATE, {"protocol": PROTOCOL}, 1)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: worker\r\nAccept: */*\r\n\r\n".ljust(64),
        bytes(64),
        pack_head(Head(CALL, 2**63, template=1)),
        pack_head(Head(CALL, 0, template=63)),
        pack_head(Head(TEMPLATE, 2**40)),
        pack_head(Head(3)),
        pack_head(Head(CALL))[:63],
        pack_head(Head(TEMPLATE, 100)) + b"{",
    ],
    ids=["http", "zeros", "huge", "unknown template", "long", "answer", "cut", "half"],
)
def test_garbage_ends_that_socket_and_no_other(client, data):
    with store(client) as s:
        opened(s)
        before = given()
        _, taken = ask(client, store=s.uid)
        assert given() == before + 1
        with taken:
            taken.sendall(data)
            if len(data) % 64:
                taken.shutdown(1)
            assert taken.recv(1000) == b""
        until(lambda: given() == before)
        assert s.pull()["w"].shape == (10,)
        assert handle(s)["sockets"] == 2


def test_a_stranger_at_the_port_of_a_worker_harms_nobody(client):
    """Dask's handshake gives it no socket: it has to be a peer to ask for one."""
    with store(client) as s:
        before = opened(s)
        for worker in s.placement:
            place, _, port = worker.removeprefix("tcp://").rpartition(":")
            for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 64):
                with socket.create_connection((place, int(port))) as there:
                    there.sendall(data)
                    # Dask's own greeting, and nothing of ours.
                    assert b"daskps" not in there.recv(1000)
        s.push({"w": np.ones(10, "f4")})
        assert s.version == 1
        assert handle(s)["messages"] == before["messages"]


def test_a_template_of_nothing_is_refused_and_the_socket_goes_on(client):
    with store(client) as s:
        _, taken = ask(client, store=s.uid)
        with taken:
            for _ in range(3):
                taken.sendall(b"".join(TEMPLATE_OF_NOTHING))
                assert b"KeyError" in taken.recv(10_000)


def test_sockets_end_with_their_client():
    with dask.config.set(SOCKET), local_cluster(**HERE) as client:
        address = client.scheduler_info()["address"]
        with Client(address, set_as_default=False) as other:
            x = daskps.create({"w": np.zeros(4)}, name="kept", client=other)
            opened(x)
            assert given() == 2
        until(lambda: given() == 0)
        daskps.open("kept", client=client).delete()


def threads_of_sockets() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("daskps-socket")}


def test_sockets_end_with_their_worker():
    before = threads_of_sockets()
    with dask.config.set(SOCKET), local_cluster(**HERE) as client:
        s = store(client, name="kept")
        opened(s)
        assert threads_of_sockets() > before
        client.retire_workers(list(client.nthreads())[:1])
        until(lambda: given() == 1)
    # Whatever those of other clusters do meanwhile.
    until(lambda: not threads_of_sockets() - before)
