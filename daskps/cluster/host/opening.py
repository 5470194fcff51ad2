"""A host is asked for a socket: by a process that calls its shards, and by a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.cluster import connections
from daskps.cluster.protocol.messages import PROTOCOL
from daskps.cluster.protocol.packing import unpack_reply

if TYPE_CHECKING:
    from socket import socket


async def open_socket(
    pool: Any, worker: str, store: str, *, token: str, seconds: float
) -> socket | None:
    """Ask a host with shards of a store for a socket.

    Parameters
    ----------
    pool : ConnectionPool
        Of this client or worker.
    worker : str
        The host's.
    store : str
        The store.
    token : str
        Name of the caller: a host keeps room for callers that have no socket.
    seconds : float
        How long that may take.

    Raises
    ------
    DaskPSError
        Where the host gives none.
    OSError
        Where it cannot be reached.
    """
    # It is `HostSockets.handle` (`cluster/host/sockets.py`) that serves it there.
    message = {
        "op": "daskps_socket",
        "protocol": PROTOCOL,
        "store": store,
        "token": token,
    }
    reply, taken = await connections.ask_for_socket(pool, worker, message, seconds)
    unpack_reply(reply, f"worker {worker}")
    return taken
