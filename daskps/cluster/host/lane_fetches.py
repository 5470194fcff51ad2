"""What a lane fetches from a host beside calls to shards, and the frames that answer.

Where a module has something that can be fetched, a function of its stands in the table,
as those that serve messages do::

    @FETCHES.handles("name")
    def name(host, *, run): ...

It returns what is said of the arrays, in plain values, and the arrays, which nobody
changes until they are sent. It may take long, and waits for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.cluster.lane.fetches import pack_fetched, unpack_fetch
from daskps.cluster.wire.handlers import FETCHES
from daskps.cluster.wire.wellformed import check
from daskps.errors import ProtocolError

if TYPE_CHECKING:
    from daskps.cluster.host.host import ShardHost


def answer_fetch(host: ShardHost, text: bytes | bytearray, number: int) -> list[Any]:
    """Return the frame that answers one, as buffers.

    Parameters
    ----------
    host : ShardHost
        The host.
    text : bytes-like
        What is asked for.
    number : int
        Number of the frame.

    Raises
    ------
    Exception
        What its function raises, or a ProtocolError for what is no fetch.
    """
    what, about = unpack_fetch(text)
    if (handler := FETCHES.by_name.get(what)) is None:
        raise ProtocolError(f"no lane fetches {what!r:.60}")
    check(handler.function, about, f"a fetch of {what}")
    value, arrays = handler.function(host, **about)
    return pack_fetched(value, arrays, number)
