"""Taking over the socket of a Dask comm, by both of its ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.comm.core import connect
from distributed.core import Server, Status
from distributed.security import Security
from tornado.ioloop import IOLoop

from daskps.cluster import connections

#: Sizes of what is sent there and back: within a segment of TCP, and beyond any buffer.
SIZES = (1, 8, 1000, 70_000, 300_000)


class Echo:
    """A server that gives its sockets away; a thread sends back what comes on each."""

    def __init__(self, scheme: str) -> None:
        self.security = Security.temporary() if scheme == "tls" else Security()
        self.scheme = scheme
        self.threads: list[threading.Thread] = []
        self.refused: list[OSError] = []
        self.watched: set[bool] = set()
        self.arguments = self.security.get_connection_args("worker")
        self.pool = SimpleNamespace(connection_args=self.arguments)

    async def __aenter__(self) -> Echo:
        self.server = Server({"daskps_socket": self.call_socket})
        where = {"inproc": "", "ws": "127.0.0.1:0"}.get(self.scheme, "127.0.0.1:0")
        arguments = self.security.get_listen_args("worker")
        await self.server.listen(f"{self.scheme}://{where}", **arguments)
        await self.server
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()
        for thread in self.threads:
            await asyncio.to_thread(thread.join)

    async def call_socket(self, comm: Any, wrong: bool = False) -> Any:
        if wrong:
            return {"status": "refused"}
        try:
            taken = await connections.give_socket(comm, {"status": "OK"})
        except OSError as error:
            self.refused.append(error)
            return Status.dont_reply
        self.watched.add(is_watched(taken))
        self.threads.append(threading.Thread(target=echo, args=(taken,)))
        self.threads[-1].start()
        return Status.dont_reply

    async def ask(self, **message: Any) -> tuple[Any, socket.socket | None]:
        message = {"op": "daskps_socket", **message}
        address = self.server.address
        return await connections.ask_for_socket(self.pool, address, message, 30)


def is_watched(taken: socket.socket) -> bool:
    """Return whether the event loop waits for what comes on a socket."""
    handlers: Any = IOLoop.current().handlers  # type: ignore[attr-defined]  # of asyncio's
    return taken.fileno() in handlers


def echo(taken: socket.socket) -> None:
    """Send everything back that comes, each once it is whole."""
    with taken:
        while head := taken.recv(8):
            head += received(taken, 8 - len(head))
            taken.sendall(received(taken, int.from_bytes(head)))


def received(taken: socket.socket, n: int) -> bytes:
    got = b""
    while len(got) < n:
        more = taken.recv(n - len(got))
        assert more
        got += more
    return got


def talk(taken: socket.socket, seed: int) -> None:
    """Send bytes that have to come back as they are.

    One after the other, as sockets do: a connection by TLS is one thread's at a time.
    """
    with taken:
        rng = random.Random(seed)
        for size in rng.sample(SIZES, len(SIZES)):
            sent = rng.randbytes(size)
            taken.sendall(size.to_bytes(8) + sent)
            assert received(taken, size) == sent


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_no_byte_is_lost_and_dask_has_no_part_in_it(scheme):
    async def test() -> None:
        async with Echo(scheme) as echoing:

            async def one(seed: int) -> None:
                reply, taken = await echoing.ask()
                assert reply == {"status": "OK"}
                assert taken is not None
                echoing.watched.add(is_watched(taken))
                await asyncio.to_thread(talk, taken, seed)

            await asyncio.gather(*map(one, range(8)))
            assert not echoing.refused
            assert echoing.watched == {False}
            assert not echoing.server._comms

    asyncio.run(test())


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_a_handler_that_does_not_agree_keeps_its_connection(scheme):
    async def test() -> None:
        async with Echo(scheme) as echoing:
            assert await echoing.ask(wrong=True) == ({"status": "refused"}, None)
            # As Dask answers where nobody handles the message.
            assert await echoing.ask(op="no_such") == (None, None)
            assert not echoing.threads

    asyncio.run(test())


@pytest.mark.parametrize("scheme", ["inproc", "ws"])
def test_what_has_no_socket_is_refused(scheme):
    async def test() -> None:
        async with Echo(scheme) as echoing:
            with pytest.raises(OSError):  # noqa: PT011 - whose text is Dask's
                await echoing.ask()
            (error,) = echoing.refused
            assert "has no socket of its own" in str(error)

    asyncio.run(test())


def test_a_caller_that_does_not_wait_for_the_answer_is_cut():
    """What it has sent already is with Dask: bytes would be lost."""

    async def test() -> None:
        async with Echo("tcp") as echoing:
            comm: Any = await connect(echoing.server.address)
            begun = asyncio.Event()
            give = connections.give_socket

            async def late(comm: Any, reply: Any) -> Any:
                # As if the loop had gone on between the answer and this.
                await comm.stream.read_bytes(3)
                begun.set()
                return await give(comm, reply)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(connections, "give_socket", late)
                await comm.write({"op": "daskps_socket"})
                await comm.stream.write(b"raw bytes, too early")
                await begun.wait()
                with pytest.raises(OSError):  # noqa: PT011 - whose text is Dask's
                    await comm.read()
            (error,) = echoing.refused
            assert "bytes are under way" in str(error)
            with contextlib.suppress(OSError):
                comm.abort()

    asyncio.run(test())
