"""Sockets by TLS: whole frames, nothing in the clear, and ends of all kinds."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed.core import Server, Status
from distributed.security import Security

from daskps.cluster import connections
from daskps.cluster.sockets import serving
from daskps.cluster.sockets.channel import BUFFER_NBYTES, Channel
from daskps.cluster.sockets.connection import Connection
from daskps.cluster.sockets.frames import (
    CALL,
    HEAD_NBYTES,
    Head,
    pack_head,
    unpack_head,
)
from daskps.cluster.sockets.served import ServedChannel
from tests.cluster.sockets.relay import DATA, Relay, listening, records, relayed
from tests.cluster.sockets.served import Calls, served
from tests.support import until

#: What nobody else would send.
SECRET = b"a gradient that is nobody else's business"


@pytest.fixture(scope="module")
def security() -> Security:
    return Security.temporary()


class Ends:
    """Both ends of a socket by TLS, and who listens in between."""

    def __init__(
        self,
        here: socket.socket,
        there: socket.socket,
        relay: Relay,
        security: Security,
    ) -> None:
        client = security.get_connection_args("worker")["ssl_context"]
        server = security.get_listen_args("worker")["ssl_context"]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.wrap_socket, there, server_side=True)
            self.here = client.wrap_socket(here)
            self.there = waiting.result()
        self.relay = relay
        self.caller, self.host = Channel(self.here, 30.0), Channel(self.there, 30.0)
        # With the first bytes a host sends what later connections could begin with.
        self.host.send([bytes(HEAD_NBYTES)])
        assert self.caller.receive_bytes(HEAD_NBYTES) == bytes(HEAD_NBYTES)

    def close(self) -> None:
        self.caller.close()
        self.host.close()


@pytest.fixture
def ends(security: Security) -> Iterator[Ends]:
    with relayed() as (here, there, relay):
        made = Ends(here, there, relay, security)
        yield made
        made.close()


def in_thread(function: Callable[..., Any], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


SIZES = [0, 1, 1000, 16_384 - 64, 16_384, BUFFER_NBYTES - 64, BUFFER_NBYTES, 300_001]


@pytest.mark.parametrize("n", SIZES)
def test_frames_arrive_whole(ends, n):
    """Two at once, so that one's end and the other's head are read together."""
    body = np.frombuffer(random.Random(n).randbytes(n), "u1")
    head = pack_head(Head(CALL, n, number=1))
    for sender, receiver in ((ends.caller, ends.host), (ends.host, ends.caller)):

        def twice(sender: Channel = sender) -> None:
            for _ in range(2):
                sender.send([head, body[: n // 2], body[n // 2 :]])

        thread = in_thread(twice)
        for _ in range(2):
            assert receiver.receive_head().nbytes == n
            found = np.empty(n, "u1")
            receiver.receive_into(found)
            assert found.tobytes() == body.tobytes()
        receiver.end_frame()
        thread.join()


def test_a_small_frame_is_one_record(ends):
    before = len(ends.relay.sent)
    ends.caller.send([bytes(HEAD_NBYTES), np.ones(100), np.ones(50)])
    assert len(ends.host.receive_bytes(HEAD_NBYTES + 1200)) == HEAD_NBYTES + 1200
    [(kind, n)] = records(ends.relay.sent[before:])
    assert kind == DATA
    assert HEAD_NBYTES + 1200 < n < HEAD_NBYTES + 1300


def test_nothing_is_in_the_clear(ends):
    array, head = np.frombuffer(1000 * SECRET, "u1"), pack_head(Head(CALL, 7, 8))
    for sender, receiver in ((ends.caller, ends.host), (ends.host, ends.caller)):
        for part in (array[:500], array):
            thread = in_thread(sender.send, [head, part])
            got = receiver.receive_bytes(HEAD_NBYTES + len(part))
            assert got[HEAD_NBYTES:] == part.tobytes()
            thread.join()
    for heard in (ends.relay.sent, ends.relay.answered):
        assert len(heard) > len(array)
        assert SECRET[:8] not in heard
        assert head[:16] not in heard
    with relayed() as (here, there, relay):
        # What listens does hear what is in the clear.
        Channel(here, 30.0).send([array[:500]])
        assert Channel(there, 30.0).receive_bytes(500)
        assert SECRET in relay.sent


def test_what_ends_says_nothing_in_the_clear(ends, monkeypatch):
    """Another thread shuts it: what its own thread still sends goes by no other way."""
    shutdown: Any = socket.socket.shutdown

    def late(end: Any, how: int) -> None:
        if end is ends.here:
            ends.caller.send([np.frombuffer(10 * SECRET, "u1")])
        shutdown(end, how)

    monkeypatch.setattr(socket.socket, "shutdown", late)
    ends.caller.shut()
    monkeypatch.undo()
    assert len(ends.host.receive_bytes(10 * len(SECRET))) == 10 * len(SECRET)
    with pytest.raises(OSError):  # noqa: PT011 - whose text is OpenSSL's
        ends.caller.send([np.frombuffer(1000 * SECRET, "u1")])
    with pytest.raises(ConnectionResetError):
        ends.host.receive_head()
    assert SECRET[:8] not in ends.relay.sent


@pytest.mark.parametrize("how", ["unwrap", "truncate", "reset"])
@pytest.mark.parametrize("within", [False, True], ids=["idle", "frame"])
def test_an_end_is_an_error_whether_it_was_said_or_not(ends, how, within):
    if within:
        ends.caller.send([pack_head(Head(CALL, 500)), bytes(400)])
        assert ends.host.receive_head().nbytes == 500
    if how == "unwrap":

        def goodbye() -> None:
            with contextlib.suppress(OSError):
                ends.here.unwrap()

        thread = in_thread(goodbye)
    else:
        # The other end hears no goodbye of TLS.
        thread = in_thread(ends.relay.cut if how == "truncate" else ends.here.close)
    with pytest.raises(OSError):  # noqa: PT011 - whose text is OpenSSL's
        ends.host.receive_bytes(500) if within else ends.host.receive_head()
    ends.relay.cut()
    thread.join()


def test_garbage_between_records_is_an_error(ends):
    socket.socket.sendall(ends.here, b"GET / HTTP/1.1\r\n\r\n".ljust(100))
    with pytest.raises(ssl.SSLError):
        ends.host.receive_head()


def test_a_changed_byte_is_an_error(ends):
    """Somebody in between cannot change what is sent."""
    ends.relay.change = lambda got: got[:-1] + bytes([got[-1] ^ 1])
    ends.caller.send([pack_head(Head(CALL, 4)), bytes(4)])
    with pytest.raises(ssl.SSLError):
        ends.host.receive_head()


def test_another_thread_wakes_who_waits(ends):
    found: list[Exception] = []

    def wait() -> None:
        try:
            ends.host.receive_head()
        except OSError as error:
            found.append(error)

    thread = in_thread(wait)
    ends.host.shut()
    thread.join()
    assert found
    ends.host.close()


def test_who_stops_within_a_frame_is_given_up(ends):
    ends.caller.send([pack_head(Head(CALL, 7)), b"abc"])
    assert ends.host.receive_head().nbytes == 7
    ends.host.set_limits(0.001, 30.0)
    with pytest.raises(TimeoutError):
        ends.host.receive_bytes(7)


def test_who_does_not_read_is_given_up(ends):
    ends.caller.set_limits(0.05, 30.0)
    with pytest.raises(TimeoutError):
        ends.caller.send([bytes(10**8)])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="it makes new keys")
@pytest.mark.parametrize("most", [0, 8], ids=["set", "thread"])
def test_new_keys_in_between_change_nothing(security, tmp_path, monkeypatch, most):
    """An end of TLS 1.3 may change its keys, and have the other one change its own.

    The host's thread is woken by a record that has nothing for it.
    """
    monkeypatch.setattr(serving, "FEW_SOCKETS", most)
    monkeypatch.setattr(serving, "QUICK_FRAMES", 0)
    for name in ("cert", "key"):
        (tmp_path / name).write_text(getattr(security, f"tls_worker_{name}"))
    command = ["openssl", "s_client", "-tls1_3", "-brief"]
    files = ["-cert", tmp_path / "cert", "-key", tmp_path / "key"]
    context = security.get_listen_args("worker")["ssl_context"]
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        listening(server.getsockname()[1]) as (port, relays),
        subprocess.Popen(
            [*command, *files, "-connect", f"127.0.0.1:{port}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as client,
        served(30.0) as sockets,
    ):
        taken = context.wrap_socket(server.accept()[0], server_side=True)
        connection = Connection(ServedChannel(taken, 30.0), Calls())
        sockets.server.add(connection)
        assert client.stdin is not None
        assert client.stdout is not None
        [relay] = relays
        for number in range(4):
            # Of no letter that is a command to it.
            body = b"0123456789" * 5_000 * number
            head = Head(CALL, len(body), number)
            client.stdin.write(pack_head(head) + body)
            client.stdin.flush()
            assert unpack_head(client.stdout.read(HEAD_NBYTES)).number == number
            assert client.stdout.read(len(body)) == body
            before = len(relay.sent)
            client.stdin.write(b"K\n")  # new keys, and the other end's too
            client.stdin.flush()
            until(partial(longer, relay, before))
        client.stdin.close()


def longer(relay: Relay, before: int) -> bool:
    return len(relay.sent) > before


# -- the whole way -------------------------------------------------------------------


def test_a_socket_that_dask_opened_is_encrypted_as_dask_is(security):
    """The comm's TLS goes on below both ends of a socket that were taken over from it."""
    array = np.frombuffer(2000 * SECRET, "u1")
    threads: list[threading.Thread] = []

    async def call_socket(comm: Any) -> Any:
        taken = await connections.give_socket(comm, {"status": "OK"})
        threads.append(in_thread(echo, Channel(taken, 30.0), len(array)))
        return Status.dont_reply

    def talk(taken: socket.socket) -> bytes:
        channel = Channel(taken, 30.0)
        channel.send([array])
        got = channel.receive_bytes(len(array))
        channel.close()
        return got

    async def heard(scheme: str, arguments: Any, listens: Any) -> bytes:
        server = Server({"daskps_socket": call_socket})
        await server.listen(f"{scheme}://127.0.0.1:0", **listens)
        await server
        with listening(server.port) as (port, relays):
            taken = await connections.ask_for_socket(
                SimpleNamespace(connection_args=arguments),
                f"{scheme}://127.0.0.1:{port}",
                {"op": "daskps_socket"},
                30,
            )
            assert taken[1] is not None
            assert await asyncio.to_thread(talk, taken[1]) == array.tobytes()
            [relay] = relays
        await server.close()
        return bytes(relay.sent + relay.answered)

    ours = security.get_connection_args("worker"), security.get_listen_args("worker")
    encrypted = asyncio.run(heard("tls", *ours))
    assert len(encrypted) > 2 * len(array)
    assert SECRET[:8] not in encrypted
    plain = asyncio.run(heard("tcp", {}, {}))
    assert plain.count(SECRET) >= 2 * 1990
    for thread in threads:
        thread.join()


def echo(channel: Channel, n: int) -> None:
    """Send back what comes, once."""
    channel.send([channel.receive_bytes(n)])
    channel.close()
