"""What Dask keeps in sets by its address, brought into an order that a seed repeats.

The addresses follow from whatever was in memory before: the length of the path that the
code lies at is enough. Tasks, futures and connections have numbers of their own (see
:mod:`tests.simulator.loop` and :mod:`tests.simulator.network`); the rest is here.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from functools import wraps
from typing import Any

from distributed.client import FutureState
from distributed.core import ConnectionPool
from distributed.worker_state_machine import TaskState

from tests.simulator.ground import put

#: Sizes of what is taken to scatter the rest: those that Python keeps lists of.
_SIZES = range(16, 512, 16)
_scattered: list[bytes] = []


class InOrder(dict[Any, None]):
    """A set that is in the order in which it was filled, as far as Dask uses one."""

    def add(self, element: object) -> None:
        """Have an element in it."""
        self[element] = None

    def discard(self, element: object) -> None:
        """Have an element in it no more."""
        self.pop(element, None)


def settle() -> None:
    """Have no order follow from addresses; before any server."""
    begin_pool = ConnectionPool.__init__

    @wraps(begin_pool)
    def begin_in_order(pool: ConnectionPool, *args: Any, **kwargs: Any) -> None:
        begin_pool(pool, *args, **kwargs)
        # Functions that give up attempts to connect.
        put(pool, _connecting=defaultdict(InOrder))

    put(ConnectionPool, __init__=begin_in_order)
    # As equal as ever: this is where they are in a set, and no more.
    put(TaskState, __hash__=lambda state: hash(state.key))
    # A client waits for coroutines, which have no number; tasks have.
    wait = FutureState.wait

    def begin(state: FutureState, *args: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(wait(state, *args))

    put(FutureState, wait=begin)


def scatter(number: int) -> None:
    """Have what is made from here on elsewhere in memory, in an order of its own.

    Parameters
    ----------
    number : int
        Decides where; 0 leaves it as it is.
    """
    if not number:
        return
    chance = random.Random(number)
    taken = [bytes(size) for size in _SIZES for _ in range(1000)]
    chance.shuffle(taken)
    _scattered.extend(taken[::2])
    del taken[::2]
    while taken:
        taken.pop()
