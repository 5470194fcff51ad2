"""Bare sockets between two workers: what a call between them needs at least.

A request is a head of as many bytes as a lane's, and a gradient or nothing; an answer is
as long as that of one shard, and the weights or nothing. Both ends use their buffers
again. With work the server does with NumPy what a shard does: it copies the weights it
answers with, as an update may come meanwhile, and applies a gradient to other weights.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from daskps.typing import Array

#: What is asked: bytes that follow, and bytes of weights to answer with.
_HEAD = struct.Struct("<qq48x")
#: A head and the row of a shard.
ANSWER_NBYTES = 96
BUFFER_NBYTES = 65_536
LEARNING_RATE = np.float32(1e-3)


def request(come: int, go: int) -> bytes:
    """Return the head of a request, that so many bytes follow and answer."""
    return _HEAD.pack(come, go)


class BareWeights:
    """What a server answers from."""

    def __init__(self, n: int) -> None:
        self._sides = np.zeros((2, n), np.float32)
        self._flip = 0
        self.gradient = np.empty(n, np.float32)
        self._scaled, self._copy = np.empty_like(self.gradient), self.gradient.copy()

    def apply(self) -> None:
        """Apply the gradient that came."""
        now, then = self._sides[self._flip], self._sides[1 - self._flip]
        np.multiply(self.gradient, LEARNING_RATE, out=self._scaled)
        np.subtract(now, self._scaled, out=then)
        self._flip = 1 - self._flip

    def read(self) -> Array:
        """Return a copy."""
        np.copyto(self._copy, self._sides[self._flip])
        return self._copy


def serve(
    n: int, work: bool, tls: bool = False, *, dask_worker: Any
) -> tuple[str, int]:
    """Have a thread of a worker serve one connection; return where."""
    listener = socket.create_server((dask_worker.ip, 0))
    context = dask_worker.security.get_listen_args("worker").get("ssl_context")

    def run() -> None:
        with listener:
            here, _ = listener.accept()
        here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls:
            here = context.wrap_socket(here, server_side=True)
        with here:
            _answer(here, BareWeights(n), work)

    threading.Thread(target=run, name="bare-socket", daemon=True).start()
    host, port = listener.getsockname()[:2]
    return host, port


def _answer(here: socket.socket, weights: BareWeights, work: bool) -> None:
    """Answer requests until the caller has gone."""
    buffer = memoryview(bytearray(BUFFER_NBYTES))
    gradient = memoryview(weights.gradient.data).cast("B")
    said = bytes(ANSWER_NBYTES)
    while got := here.recv_into(buffer):
        come, go = _HEAD.unpack_from(buffer)
        if come:
            ready = got - _HEAD.size
            gradient[:ready] = buffer[_HEAD.size : got]
            fill(here, gradient[ready:come])
            if work:
                weights.apply()
        send(here, said, weights.read() if go else b"")


def send(here: socket.socket, head: bytes, body: Any) -> None:
    """Send a head and a body: small ones together, else without a copy."""
    view = memoryview(body).cast("B")
    if isinstance(here, ssl.SSLSocket) or not view:
        if len(view) <= BUFFER_NBYTES:
            here.sendall(head + bytes(view))
            return
        here.sendall(head)
        here.sendall(view)
        return
    sent = here.sendmsg([head, view]) - len(head)
    while sent < len(view):
        sent += here.send(view[sent:])


def fill(here: socket.socket, view: memoryview) -> None:
    """Receive as many bytes as there is room for."""
    while view:
        got = here.recv_into(view)
        if not got:
            raise EOFError("a bare socket was closed")
        view = view[got:]


class BareCaller:
    """The caller's end of such a connection."""

    def __init__(self, where: tuple[str, int], n: int, context: Any = None) -> None:
        here = socket.create_connection(where)
        here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            here = context.wrap_socket(here, server_hostname=where[0])
        self._here = here
        self._gradient = np.full(n, 1e-3, np.float32)
        # The answer's head comes before the weights, in the same array.
        self._answer = memoryview(bytearray(ANSWER_NBYTES + 4 * n))
        self._pull = request(0, 4 * n)
        self._push = request(4 * n, 0)

    def get(self) -> None:
        """Read the weights."""
        self._here.sendall(self._pull)
        fill(self._here, self._answer)

    def push(self) -> None:
        """Deliver a gradient that was looked at for NaN, and wait until it is applied."""
        if not np.isfinite(np.add.reduce(self._gradient)):
            raise ValueError("not finite")
        send(self._here, self._push, self._gradient)
        fill(self._here, self._answer[:ANSWER_NBYTES])

    def both(self) -> None:
        """Do the one, then the other."""
        self.get()
        self.push()

    def close(self) -> None:
        """End it, and the thread that serves it."""
        self._here.close()


def serve_many(n: int, *, dask_worker: Any) -> tuple[str, int]:
    """Have a thread of a worker serve any number of connections by a selector."""
    listener = socket.create_server((dask_worker.ip, 0), backlog=4096)
    threading.Thread(
        target=_select,
        args=(listener, BareWeights(n)),
        name="bare-selector",
        daemon=True,
    ).start()
    host, port = listener.getsockname()[:2]
    return host, port


def _select(listener: socket.socket, weights: BareWeights) -> None:
    """Apply small gradients as they come, until all callers have gone."""
    poll, known = select.epoll(), {listener.fileno(): listener}
    poll.register(listener, select.EPOLLIN)
    buffer, said = memoryview(bytearray(BUFFER_NBYTES)), bytes(ANSWER_NBYTES)
    gradient, nbytes = (
        memoryview(weights.gradient.data).cast("B"),
        weights.gradient.nbytes,
    )
    with listener, poll:
        while True:
            for number, _ in poll.poll():
                here = known[number]
                if here is listener:
                    here, _ = listener.accept()
                    here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    known[here.fileno()] = here
                    poll.register(here, select.EPOLLIN)
                elif here.recv_into(buffer):
                    gradient[:] = buffer[_HEAD.size : _HEAD.size + nbytes]
                    weights.apply()
                    here.sendall(said)
                else:
                    poll.unregister(here)
                    known.pop(number).close()
                    if len(known) == 1:
                        return
