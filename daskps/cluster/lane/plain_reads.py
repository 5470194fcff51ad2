"""Loops that answer the plain reads of lanes by themselves, compiled: without Python.

A thread of Python that is busy keeps the interpreter for 5 ms at a time; whoever needs it to
answer waits so long. These loops do not need it. They look at the frame that comes next and
answer it, where its form is in the lane's table. All else is for Python: a frame of another
kind or form, a read that has to wait, bytes that are no frame, the end of the lane. Nothing
of that was taken from the socket then.

A *lane* and a *desk* are words here, given by their address: what belongs to a socket, and
what the thread has that answers. One thread at a time has a lane, and changes it while the
loop does not run. Who ends a lane shuts its socket, which ends the loop. Who wants the thread
to look at something else stores a word of its lane, or wakes its set of sockets.
"""
# ruff: noqa: PLR0911  (compiled functions return numbers where they are found)

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from daskps.cluster.lane import plain_answers
from daskps.cluster.lane.frames import HEAD_NBYTES
from daskps.cluster.lane.plain_answers import (
    INT,
    find_entry,
    find_straight,
    make_answer,
    push_out,
    send_straight,
    wait,
)
from daskps.cluster.lane.plain_words import (
    ASKED,
    EINTR,
    EPOLL,
    EVENT_NBYTES,
    EVENTS,
    FD,
    GOING,
    LANES,
    LEFT,
    LENGTH,
    LOOK,
    MOST_EVENTS,
    MOST_NBYTES,
    N_LANES,
    N_NBYTES,
    N_READS,
    NBYTES_AT,
    PEEK_FLAGS,
    POLLIN,
    QUIET,
    RECV_FLAGS,
    ROOM,
    ROOM_NBYTES,
    SENT,
    TABLE,
    TORN,
    USED,
    WANTED,
    WHOSE,
    WOKEN,
)
from daskps.kernels import plain
from daskps.kernels.system import (
    copy,
    epoll_wait,
    errno,
    load,
    monotonic,
    recv,
    store,
)
from daskps.shards import addressed

if TYPE_CHECKING:
    from collections.abc import Callable


def answer_next(lane: int, desk: int) -> int:
    """Answer the frame that has come; return GOING, ASKED, UNSENT or TORN."""
    fd, room = load(lane + 8 * FD), load(desk + 8 * ROOM)
    seen = recv(fd, room, ROOM_NBYTES, PEEK_FLAGS)
    if seen < HEAD_NBYTES:
        return ASKED
    entry = find_entry(room, load(lane + 8 * TABLE))
    if entry == 0 or load(entry + 16) > load(desk + 8 * MOST_NBYTES):
        return ASKED
    asked = HEAD_NBYTES + load(room + 8 * NBYTES_AT)
    if seen < asked:
        return ASKED
    n, nbytes = find_straight(desk, entry), load(entry + 16)
    if n == 0:
        nbytes = make_answer(desk, entry)
    if n < 0 or nbytes < 0:
        return ASKED
    # Nobody else receives from it: these are the bytes that were seen.
    if recv(fd, room, asked, RECV_FLAGS) != asked:
        return TORN
    store(lane + 8 * N_READS, load(lane + 8 * N_READS) + 1)
    store(lane + 8 * N_NBYTES, load(lane + 8 * N_NBYTES) + nbytes)
    store(lane + 8 * USED, monotonic())
    if n > 0:
        return send_straight(fd, desk, entry, n)
    store(desk + 8 * LENGTH, nbytes)
    store(desk + 8 * SENT, 0)
    return push_out(fd, desk)


def serve_one(lane: int, desk: int, idle: int) -> int:
    """Answer the reads of one lane until something else is to be done; return what.

    Parameters
    ----------
    lane, desk : int
        Addresses of the lane and the desk.
    idle : int
        Milliseconds for which nothing may come.

    Returns
    -------
    int
        ASKED, UNSENT, QUIET, WOKEN or TORN.
    """
    fd, last = load(lane + 8 * FD), monotonic()
    while load(lane + 8 * WANTED) == 0:
        left = max(0, last + idle - monotonic())
        if wait(fd, desk, POLLIN, min(LOOK, left)):
            why = answer_next(lane, desk)
            if why != GOING:
                return why
            last = load(lane + 8 * USED)
        elif left == 0:
            return QUIET
    return WOKEN


def serve_many(desk: int, idle: int) -> int:
    """Answer the reads of many lanes until something else is to be done.

    Parameters
    ----------
    desk : int
        Address of the desk.
    idle : int
        Milliseconds, -1 for ever, after which there is something else in any case.

    Returns
    -------
    int
        How many events are left for Python; less than 0 where the answer of one lane is,
        or that lane is torn: then nothing is known of the others.
    """
    epoll, events = load(desk + 8 * EPOLL), load(desk + 8 * EVENTS)
    room, end = load(desk + 8 * ROOM), monotonic() + idle
    timeout = idle
    while True:
        n, n_left = epoll_wait(epoll, events, MOST_EVENTS, timeout), 0
        for i in range(n):
            # They lie at any byte; of a word only its half is one.
            copy(room, events + EVENT_NBYTES * i, EVENT_NBYTES)
            event, fd = load(room) & 0xFFFF_FFFF, (load(room) >> 32) & 0xFFFF_FFFF
            lane = 0
            if event == POLLIN and fd < load(desk + 8 * N_LANES):
                lane = load(load(desk + 8 * LANES) + 8 * fd)
            why = ASKED if lane == 0 else answer_next(lane, desk)
            if why == ASKED:
                store(load(desk + 8 * LEFT) + 8 * n_left, event << 32 | fd)
                n_left += 1
            elif why != GOING:
                store(desk + 8 * WHOSE, fd)
                return -why
        if n_left > 0 or n == 0 or (n < 0 and errno() != EINTR):
            return n_left
        if idle >= 0:
            # However many there are to answer: there is something else then.
            timeout = end - monotonic()
            if timeout < 0:
                return 0


_SIGNATURES: dict[Callable[..., Any], str] = {
    answer_next: f"{INT}, {INT}",
    serve_one: ", ".join([INT] * 3),
    serve_many: f"{INT}, {INT}",
}


class Loops(NamedTuple):
    """The two loops, compiled."""

    serve_one: Callable[[int, int, int], int]
    serve_many: Callable[[int, int], int]


@cache
def compiled(cache_dir: str | None = None) -> Loops:
    """Return the loops; once for all lanes of a process."""
    functions = _SIGNATURES | plain_answers.SIGNATURES | addressed.SIGNATURES
    module = plain(functions, cache_dir=cache_dir, alone=True)
    loops = Loops(*map(module.function, Loops._fields))
    _LOADED.append(loops)
    return loops


#: Those that are ready.
_LOADED: list[Loops] = []


def loaded() -> Loops | None:
    """Return the loops where they are ready: no lane waits for a compiler."""
    return _LOADED[0] if _LOADED else None
