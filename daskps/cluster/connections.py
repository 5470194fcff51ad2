"""Connections of distributed's that are taken over: their sockets, without their streams.

Beside `upstream` the only module that touches what is private there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from distributed.comm import tcp as _tcp
from distributed.comm.core import connect as _connect
from distributed.core import Status

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

logger = logging.getLogger(__name__)
#: How often to look whether anything of a reply was taken.
LOOK_SECONDS = 0.5


async def ask_for_socket(
    pool: Any, address: str, message: Mapping[str, Any], seconds: float
) -> tuple[Any, socket.socket | None]:
    """Ask a server for a connection of its own, and take that over.

    Parameters
    ----------
    pool : ConnectionPool
        Of a client or worker: it connects as that does, also by TLS.
    address : str
        The server's.
    message : mapping
        The request, as a handler that ends with :func:`give_socket` takes it.
    seconds : float
        How long all of it may take.

    Returns
    -------
    reply : object
        The answer of the server.
    socket : socket.socket or None
        None where it has not agreed.

    Raises
    ------
    OSError
        Where it cannot be reached, or the connection cannot be taken over.
    """
    async with asyncio.timeout(seconds):
        comm = await _connect(address, timeout=seconds, **pool.connection_args)
        try:
            await comm.write({**message, "reply": True})
            reply = await comm.read()
            agreed = isinstance(reply, dict) and reply.get("status") == "OK"
            # Since the reply was read the server is silent: it waits for the first byte.
            return reply, _take_socket(comm) if agreed else None
        finally:
            comm.abort()


async def give_socket(comm: Any, reply: Mapping[str, Any]) -> socket.socket:
    """Agree to a caller's :func:`ask_for_socket` and take its connection over.

    For a handler of messages, which returns `Status.dont_reply` then.

    Raises
    ------
    OSError
        Where the connection cannot be taken over. It is closed, and nobody has agreed.
    """
    _check_takeable(comm)
    # Where this ends without a pause, as it does for a short message, the event loop
    # cannot have read what the caller sends next.
    await comm.write(reply)
    return _take_socket(comm)


async def send_reply(comm: Any, reply: Any, patience: float) -> Status:
    """Send what a handler of messages replies, and wait until the kernel has it.

    Dask keeps what nobody takes for as long as there is a connection. Here it is closed
    where its other end takes nothing for so many seconds.

    Returns
    -------
    Status
        The value that the handler returns in place of the reply.
    """
    with contextlib.suppress(OSError):
        await comm.write(reply)
        # Only TCP and TLS have one.
        stream = getattr(comm, "stream", None)
        if stream is not None and stream.writing():
            await _taken(comm, stream, patience)
    return Status.dont_reply


async def _taken(comm: Any, stream: Any, patience: float) -> None:
    sent, moved, n = stream.write(b""), time.monotonic(), -1
    while not (await asyncio.wait({sent}, timeout=LOOK_SECONDS))[0]:
        if stream._total_write_done_index != n:
            n, moved = stream._total_write_done_index, time.monotonic()
        elif time.monotonic() - moved > patience:
            logger.warning(
                "%s has taken nothing of an answer for %g s; its connection is closed",
                comm.peer_address,
                patience,
            )
            comm.abort()


class _Gone:
    """Stands in a stream for its socket: it takes no descriptor, so never fails."""

    def close(self) -> None:
        """Do nothing: the socket is somebody else's."""


def _take_socket(comm: Any) -> socket.socket:
    """Leave a comm without its socket, and that to the caller, in blocking mode."""
    _check_takeable(comm)
    stream = comm.stream
    taken: socket.socket = stream.socket
    stream.io_loop.remove_handler(taken.fileno())
    # Or closing the stream would close the socket, and end what the loop does with it.
    stream._state = None
    stream.socket = _Gone()
    comm.abort()
    taken.setblocking(True)
    return taken


def _check_takeable(comm: Any) -> None:
    """Close a comm that is no idle connection by TCP or TLS, and refuse it."""
    stream = getattr(comm, "stream", None)
    # A class that derives from these may do something else with the stream.
    if type(comm) not in (_tcp.TCP, _tcp.TLS):
        why = f"a {type(comm).__name__} connection has no socket of its own"
    elif stream is None or stream.closed() or stream.reading():
        why = "the connection is closed or being read"
    elif stream.writing() or stream._read_buffer_size:
        why = "bytes are under way between the connection and Dask"
    else:
        return
    comm.abort()
    raise OSError(f"{why}; it cannot be taken over")
