"""Fetches of a socket at a host, beside calls to shards, and the frames that answer.

A module that offers something to fetch puts a function of its own into a table, as
handlers of messages do::

    @FETCHES.handles("name")
    def name(host, *, run): ...

The function returns a description of the arrays, in plain values, and the arrays; no
thread may change them until they are sent. It may take long, but must not wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.cluster.protocol.handlers import FETCHES
from daskps.cluster.protocol.wellformed import check
from daskps.cluster.sockets.fetches import pack_fetched, unpack_fetch
from daskps.errors import ProtocolError

if TYPE_CHECKING:
    from daskps.cluster.host.host import ShardHost


def answer_fetch(host: ShardHost, text: bytes | bytearray, number: int) -> list[Any]:
    """Return the frame that answers a fetch, as buffers.

    Parameters
    ----------
    host : ShardHost
        The host.
    text : bytes-like
        Text of the fetch.
    number : int
        Number of the frame.

    Raises
    ------
    Exception
        Any error of the function, or a ProtocolError if the text is no fetch.
    """
    what, about = unpack_fetch(text)
    if (handler := FETCHES.by_name.get(what)) is None:
        raise ProtocolError(f"no socket fetches {what!r:.60}")
    check(handler.function, about, f"a fetch of {what}")
    value, arrays = handler.function(host, **about)
    return pack_fetched(value, arrays, number)
