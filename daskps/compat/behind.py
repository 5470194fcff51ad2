"""Calls that a program does not wait for: one thread makes them one after the other."""

from __future__ import annotations

import contextvars
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: How many things may be under way: each keeps a copy of what it sends.
MOST_BEHIND = 16


class Behind:
    """Calls that are carried out in order, while the program goes on.

    Parameters
    ----------
    pool : ThreadPoolExecutor
        Of one thread.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._issued: deque[Future[Any]] = deque()

    def do(self, act: Callable[[], Any], *, wait: bool = False) -> Future[Any]:
        """Call something after all that was issued before; return what it comes to."""
        issued = self._pool.submit(contextvars.copy_context().run, act)
        self._issued.append(issued)
        while self._issued and (wait or len(self._issued) > MOST_BEHIND):
            self._issued.popleft().result()
        return issued

    def settle(self) -> None:
        """Wait until all of it is done; raise what went wrong."""
        while self._issued:
            self._issued.popleft().result()


@contextmanager
def behind(name: str) -> Iterator[Behind]:
    """Have a thread for the length of a program, and wait for what it was given.

    Where the program fails, nothing is waited for: what is under way may wait for other
    trainers, which wait for this one, until its error ends them all.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    is_done = False
    try:
        made = Behind(pool)
        yield made
        made.settle()
        is_done = True
    finally:
        pool.shutdown(wait=is_done, cancel_futures=True)
