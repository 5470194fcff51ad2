"""Counts of calls: of each handle, and of all handles of a client or worker together."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import MutableMapping

#: Users that are gone before their counts are added up.
_MOST_ENDED = 256


@dataclass(slots=True)
class Counters:
    """Counts of a handle: messages, calls without one, their bytes, retries."""

    messages: int = 0
    local_calls: int = 0
    nbytes: int = 0
    retries: int = 0
    #: Calls that sockets took, and the bytes of their arrays.
    socket_calls: int = 0
    socket_nbytes: int = 0
    #: Rows of tables that were asked for and that were brought, repeats among them.
    rows_pulled: int = 0
    rows_pushed: int = 0
    #: By reason how often a call that had a socket went on by message.
    fallbacks: dict[str, int] = field(default_factory=dict)

    def fell_back(self, why: str) -> None:
        """Count a call that a socket leaves to messages."""
        # A new dict: another thread may be looking through the old one.
        self.fallbacks = {**self.fallbacks, why: self.fallbacks.get(why, 0) + 1}

    def add(self, other: Counters) -> None:
        """Add the counts of another one."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for why, n in other.fallbacks.items():
            self.fallbacks[why] = self.fallbacks.get(why, 0) + n


_NUMBERS = tuple(name for name in Counters.__slots__ if name != "fallbacks")


class CallerCounters:
    """The counts of all handles of one client or worker, also of those that are gone."""

    def __init__(self) -> None:
        self._live: dict[int, Counters] = {}
        self._gone = Counters()
        #: Keys of those whose users are gone; finalizers may take no lock.
        self._ended: deque[int] = deque()
        self._lock = threading.Lock()

    def new(self, user: Any) -> Counters:
        """Return counters that `user` counts with, for as long as it is there."""
        made = Counters()
        self._live[id(made)] = made
        weakref.finalize(user, self._ended.append, id(made)).atexit = False
        if len(self._ended) > _MOST_ENDED:
            self.total()
        return made

    def total(self) -> Counters:
        """Return the sums."""
        found = Counters()
        with self._lock:
            while self._ended:
                self._gone.add(self._live.pop(self._ended.popleft()))
            for one in [self._gone, *self._live.values()]:
                found.add(one)
        return found


_OF: MutableMapping[Any, CallerCounters] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def counters_of(node: Any) -> CallerCounters:
    """Return the counts of a client or worker.

    Parameters
    ----------
    node : Client or Worker
        It, or what stands for it.

    Returns
    -------
    CallerCounters
        One for each.
    """
    with _LOCK:
        if node not in _OF:
            _OF[node] = CallerCounters()
        return _OF[node]
