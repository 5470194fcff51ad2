"""Memory that large messages arrive in, used again; one pool for each process.

Dask receives every frame into fresh memory. Zeroing that, page by page, is a sixth of
the CPU time of a push of 16 MiB. Here a frame's memory goes back when nobody holds the
frame any more, see :class:`Scratch`.
"""

from __future__ import annotations

import threading
from typing import Any

from daskps.cluster import upstream
from daskps.cluster.scratch import SHARE, Scratch

#: What is smaller arrives in memory of malloc's.
SMALLEST = 2**20
#: Frames kept at most: as many are looked through for one of the right length.
MOST = 16
#: Most bytes kept where a worker has no memory limit.
NO_LIMIT = 256 * 2**20

_lock = threading.Lock()
_pool = Scratch(0, smallest=SMALLEST, most=MOST)
#: Limits of the workers of this process that have a host.
_limits: dict[str, int] = {}


def join(worker: str, memory_limit: int | None) -> None:
    """Use memory again while a worker of this process has a host.

    Parameters
    ----------
    worker : str
        Its address.
    memory_limit : int or None
        Its own.
    """
    with _lock:
        _limits[worker] = int(SHARE * memory_limit) if memory_limit else NO_LIMIT
        _pool.limit = max(_limits.values())
        upstream.receive_into(_empty)


def leave(worker: str) -> None:
    """Undo :func:`join`."""
    with _lock:
        _limits.pop(worker, None)
        _pool.limit = max(_limits.values(), default=0)
        if not _limits:
            upstream.receive_into(None)
            _pool.clear()


def reuse(again: bool) -> None:
    """Turn it off, or on again where a worker has a host: for comparisons."""
    with _lock:
        upstream.receive_into(_empty if again and _limits else None)


def clear() -> None:
    """Keep nothing: what used to come has ended."""
    _pool.clear()


def _empty(n: int) -> Any:
    return _pool.empty(n, "u1").data
