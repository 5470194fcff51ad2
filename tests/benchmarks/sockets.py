"""Bare sockets between two workers: what a call between them needs at least.

A request is a head of as many bytes as a socket's, and a gradient or nothing; an answer
is as long as that of one shard, and the weights or nothing. Both ends use their buffers
again. With work the server does with NumPy what a shard does: it copies the weights it
answers with, as an update may come meanwhile, and applies a gradient to other weights.
"""

from __future__ import annotations

import functools
import os
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from daskps.typing import Array

T = TypeVar("T")
#: What is asked: elements that come, and those to answer with.
_HEAD = struct.Struct("<qq48x")
#: A head and the row of a shard.
ANSWER_NBYTES = 96
BUFFER_NBYTES = 65_536
LEARNING_RATE = np.float32(1e-3)


def request(come: int, go: int) -> bytes:
    """Return the head of a request that brings so many elements, and asks for some."""
    return _HEAD.pack(come, go)


class BareWeights:
    """The weights of a server."""

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


def _listening(dask_worker: Any, run: Callable[[socket.socket], None]) -> Any:
    """Have a thread of a worker run with a listener; return where that is."""
    listener = socket.create_server((dask_worker.ip, 0), backlog=4096)
    threading.Thread(target=run, args=(listener,), name="bare", daemon=True).start()
    return listener.getsockname()[:2]


def pinned(core: int | None, act: Callable[[], T]) -> T:
    """Do something in this thread, which stays on a core meanwhile, if one is given."""
    before = os.sched_getaffinity(0)
    try:
        if core is not None:
            os.sched_setaffinity(0, {sorted(before)[core % len(before)]})
        return act()
    finally:
        os.sched_setaffinity(0, before)


def serve(
    n: int, work: bool, tls: bool = False, *, core: int | None = None, dask_worker: Any
) -> Any:
    """Have a thread of a worker serve one connection; return where."""
    context = dask_worker.security.get_listen_args("worker").get("ssl_context")

    def run(listener: socket.socket) -> None:
        with listener:
            here, _ = listener.accept()
        here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls:
            here = context.wrap_socket(here, server_side=True)
        with here:
            pinned(core, lambda: answer(here, BareWeights(n), work))

    return _listening(dask_worker, run)


def answer(here: socket.socket, weights: BareWeights, work: bool) -> None:
    """Answer requests until the caller has gone."""
    buffer = memoryview(bytearray(BUFFER_NBYTES))
    gradient = memoryview(weights.gradient.data).cast("B")
    said = bytes(ANSWER_NBYTES)
    while got := here.recv_into(buffer):
        come, go = _HEAD.unpack_from(buffer)
        if come:
            ready = got - _HEAD.size
            gradient[:ready] = buffer[_HEAD.size : got]
            fill(here, gradient[ready : 4 * come])
            if work:
                weights.apply()
        send(here, said, weights.read() if go else b"")


def send(here: socket.socket, head: bytes, body: Any) -> None:
    """Send a head and a body: small ones together, else without a copy."""
    view = memoryview(body).cast("B")
    if len(view) <= BUFFER_NBYTES:
        here.sendall(head + bytes(view))
    elif isinstance(here, ssl.SSLSocket):
        here.sendall(head)
        here.sendall(view)
    else:
        sent = here.sendmsg([head, view]) - len(head)
        here.sendall(view[sent:])


def fill(here: socket.socket, view: memoryview) -> None:
    """Receive as many bytes as there is room for."""
    while view:
        got = here.recv_into(view)
        if not got:
            raise EOFError("a bare socket was closed")
        view = view[got:]


def connected(where: tuple[str, int], context: Any = None) -> socket.socket:
    """Return the caller's end of a connection."""
    here = socket.create_connection(where)
    here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if context is not None:
        here = context.wrap_socket(here, server_hostname=where[0])
    return here


class BareCaller:
    """Calls of a vector."""

    def __init__(self, n: int, here: socket.socket) -> None:
        self._here, self._gradient = here, np.full(n, 1e-3, np.float32)
        # The answer's head comes before the weights, in the same array.
        self.answer = memoryview(bytearray(ANSWER_NBYTES + 4 * n))
        self._pull, self._push = request(0, n), request(n, 0)

    def get(self) -> None:
        """Read the weights."""
        self._here.sendall(self._pull)
        fill(self._here, self.answer)

    def push(self) -> None:
        """Deliver a gradient that was looked at for NaN, and wait until it is applied."""
        if not np.isfinite(np.add.reduce(self._gradient)):
            raise ValueError("not finite")
        send(self._here, self._push, self._gradient)
        fill(self._here, self.answer[:ANSWER_NBYTES])

    def send(self) -> None:
        """Deliver as many bytes, at which nobody has looked."""
        send(self._here, self._push, self._gradient)
        fill(self._here, self.answer[:ANSWER_NBYTES])

    def both(self) -> None:
        """Do the one, then the other."""
        self.get()
        self.push()


def serve_many(n: int, *, dask_worker: Any) -> Any:
    """Have a thread of a worker serve any number of connections by a selector."""
    return _listening(dask_worker, functools.partial(_select, BareWeights(n)))


def _select(weights: BareWeights, listener: socket.socket) -> None:
    """Apply small gradients as they come, until all callers have gone."""
    poll, known = select.epoll(), {listener.fileno(): listener}
    poll.register(listener, select.EPOLLIN)
    buffer, said = memoryview(bytearray(BUFFER_NBYTES)), bytes(ANSWER_NBYTES)
    gradient = memoryview(weights.gradient.data).cast("B")
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
                    gradient[:] = buffer[_HEAD.size : _HEAD.size + len(gradient)]
                    weights.apply()
                    here.sendall(said)
                else:
                    poll.unregister(here)
                    known.pop(number).close()
                    if len(known) == 1:
                        return
