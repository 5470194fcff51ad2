"""What a thread has that answers plain reads by the compiled loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskps.cluster.lane.plain_words import (
    ANSWER_AT,
    DESK_WORDS,
    EPOLL,
    EVENT_NBYTES,
    EVENTS,
    FLAGS,
    LANES,
    LEFT,
    LENGTH,
    MOST_EVENTS,
    MOST_NBYTES,
    N_LANES,
    PATIENCE,
    POLLED,
    POLLED_AT,
    ROOM,
    ROOM_NBYTES,
    SEND_FLAGS,
    SENT,
    SOURCES,
    SOURCES_WORDS,
    WAITING_FLAGS,
    WHOSE,
)
from daskps.shards.memory.format import integers

if TYPE_CHECKING:
    from daskps.cluster.lane.plain_reads import Loops


class Desk:
    """The memory of one thread that answers plain reads.

    Parameters
    ----------
    loops : Loops
        The compiled loops.
    nbytes : int
        Longest answer that it makes.
    patience : int
        Milliseconds for which the other end may take nothing of one.
    waits : bool
        Whether sockets wait so long by themselves, where they are sent to.
    """

    def __init__(
        self, loops: Loops, nbytes: int, patience: int, *, waits: bool = False
    ) -> None:
        self._loops = loops
        self._answer = np.zeros(-(-nbytes // 8), np.int64)
        self._desk = np.zeros(DESK_WORDS, np.int64)
        self._words = words = integers(self._desk)
        self._room = np.zeros(ROOM_NBYTES // 8, np.int64)
        words[ROOM] = self._room.ctypes.data
        words[ANSWER_AT], words[MOST_NBYTES] = self._answer.ctypes.data, nbytes
        words[PATIENCE], words[FLAGS] = patience, WAITING_FLAGS if waits else SEND_FLAGS
        self._sources = np.zeros(SOURCES_WORDS, np.int64)
        words[SOURCES] = self._sources.ctypes.data
        self._at: int = self._desk.ctypes.data
        words[POLLED_AT] = self._at + 8 * POLLED

    @property
    def unsent(self) -> bytes:
        """What of an answer is to be sent before anything else, after UNSENT."""
        words = self._words
        return bytes(self._answer.data.cast("B")[words[SENT] : words[LENGTH]])

    def serve(self, lane: int, idle: int) -> int:
        """Answer the reads of a lane; see :func:`~plain_reads.serve_one`."""
        return self._loops.serve_one(lane, self._at, idle)


class SharedDesk(Desk):
    """The memory of one thread that answers the plain reads of many lanes.

    Parameters
    ----------
    loops : Loops
        The compiled loops.
    nbytes : int
        Longest answer that it makes.
    epoll : int
        Descriptor of the set of their sockets, which are looked at as often as there is
        something.
    """

    def __init__(self, loops: Loops, nbytes: int, epoll: int) -> None:
        super().__init__(loops, nbytes, 0)
        self._events = np.zeros(EVENT_NBYTES * MOST_EVENTS, np.uint8)
        self._left = np.zeros(MOST_EVENTS, np.int64)
        self._lanes = integers(np.zeros(0, np.int64))
        words = self._words
        words[EPOLL], words[EVENTS] = epoll, self._events.ctypes.data
        words[LEFT] = self._left.ctypes.data

    def put(self, fd: int, lane: int) -> None:
        """Answer what comes from a socket for a lane from now on, for 0 nothing."""
        if fd >= len(self._lanes):
            if not lane:
                return
            lanes = np.zeros(max(64, 2 * fd), np.int64)
            lanes[: len(self._lanes)] = self._lanes
            self._lanes = integers(lanes)
            self._words[LANES], self._words[N_LANES] = lanes.ctypes.data, len(lanes)
        self._lanes[fd] = lane

    def wait(self, idle: int) -> tuple[list[tuple[int, int]], int, int]:
        """Answer reads until something else is to be done.

        Parameters
        ----------
        idle : int
            Milliseconds after which there is something else in any case; -1 for never.

        Returns
        -------
        events : list of (int, int)
            Descriptors, and what is about them, as `select.epoll` says it.
        why, fd : int
            UNSENT or TORN, and of which socket; 0 for none. Nothing is said of others
            then.
        """
        n = self._loops.serve_many(self._at, idle)
        if n < 0:
            return [], -n, self._words[WHOSE]
        return [(e & 0xFFFF_FFFF, e >> 32) for e in self._left[:n].tolist()], 0, 0
