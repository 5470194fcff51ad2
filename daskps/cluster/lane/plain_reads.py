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

from __future__ import annotations

import errno as errors
import select
import socket
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from daskps.cluster.lane.frames import (
    ANSWER,
    APPLIED,
    CALL,
    HAS_LEAST,
    HEAD_NBYTES,
    MAGIC,
    MOST_FORMS,
    ROW_NBYTES,
)
from daskps.kernels import plain
from daskps.kernels.system import (
    copy,
    epoll_wait,
    errno,
    load,
    monotonic,
    poll,
    recv,
    send,
    store,
)
from daskps.shards import addressed
from daskps.shards.addressed import read_part

if TYPE_CHECKING:
    from collections.abc import Callable

#: Words of a lane: its socket, the address of its table, whether its thread is wanted, and
#: what is counted: reads that were answered, and their bytes; when that was done last.
FD, TABLE, WANTED, N_READS, N_NBYTES, USED, LANE_WORDS = range(7)
#: Words of a desk: room for what is looked at, and for an answer of so many bytes; how long
#: the answer is that was made last, and how much of it was sent.
ROOM, ANSWER_AT, MOST_NBYTES, LENGTH, SENT = range(5)
#: Milliseconds for which the other end may take nothing of an answer; a word for `poll`, and
#: its address.
PATIENCE, POLLED, POLLED_AT = range(5, 8)
#: Of a thread with many lanes: their set, room for events and for those that are left, and
#: by descriptor the addresses of lanes that it answers, how many; the lane at fault.
EPOLL, EVENTS, LEFT, LANES, N_LANES, WHOSE, DESK_WORDS = range(8, 15)
#: Why a loop has ended: there is something that it does not answer; the other end takes
#: no more of the answer for now; nothing came; the thread is wanted; the lane is torn.
GOING, ASKED, UNSENT, QUIET, WOKEN, TORN = range(6)
#: Milliseconds after which an idle loop looks whether its thread is wanted.
LOOK = 250
#: Parts of a call, of which versions may be waited for.
MOST_PARTS = 512
ROOM_NBYTES = HEAD_NBYTES + 8 * MOST_PARTS
#: Events of one look at many lanes, and bytes of one: what it is, and the descriptor.
MOST_EVENTS = 256
EVENT_NBYTES = 12

#: An entry of a table says how many parts follow, their run, and the bytes of the answer;
#: then for each part how many words it has with this one, and these. What a table begins
#: with are the addresses of entries by form.
ENTRY_WORDS = 3

# Where a head has what, as words: the first has magic, kind, flags and form.
KIND_SHIFT, FLAGS_SHIFT, FORM_SHIFT = 32, 40, 48
NBYTES_AT, CLOCK_AT, SEQUENCE_AT, FLOOR_AT, WEIGHT_AT, LR_AT, LAST_AT = range(1, 8)
#: The first word of an answer, the weight that it says, and where numbers that are not
#: finite have all bits.
ANSWERS = MAGIC | ANSWER << KIND_SHIFT
ONE, EXPONENT = 0x3FF0_0000_0000_0000, 0x7FF0_0000_0000_0000
#: What the system calls are given, and say.
POLLIN, POLLOUT = select.POLLIN, select.POLLOUT
SEND_FLAGS = int(socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0))
RECV_FLAGS = int(socket.MSG_DONTWAIT)
PEEK_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_PEEK)
EINTR, EAGAIN = errors.EINTR, errors.EAGAIN


def wait(fd: int, desk: int, event: int, milliseconds: int) -> bool:
    """Wait until a socket is ready, or has ended; return False when time is over."""
    while True:
        store(desk + 8 * POLLED, fd | event << 32)
        found = poll(load(desk + 8 * POLLED_AT), milliseconds)
        if found >= 0 or errno() != EINTR:
            return found != 0


def find_entry(head: int, table: int) -> int:
    """Return where the entry of the read is that a head asks for, 0 for Python."""
    first, flags = load(head), (load(head) >> FLAGS_SHIFT) & 0xFF
    form = (first >> FORM_SHIFT) & 0xFFFF
    if first & 0xFF_FFFF_FFFF != MAGIC | CALL << KIND_SHIFT or form >= MOST_FORMS:
        return 0
    entry = load(table + 8 * form)
    if entry == 0 or (flags != 0 and (flags != HAS_LEAST or load(entry + 8) != 0)):
        return 0
    nbytes = 8 * load(entry) if flags != 0 else 0
    if load(head + 8 * NBYTES_AT) != nbytes:
        return 0
    if min(load(head + 8 * CLOCK_AT), load(head + 8 * SEQUENCE_AT)) < -1:
        return 0
    is_finite = load(head + 8 * WEIGHT_AT) & EXPONENT != EXPONENT
    return entry if is_finite and load(head + 8 * FLOOR_AT) >= -1 else 0


def make_answer(desk: int, entry: int) -> int:
    """Make the answer to the read in the room; return its bytes, -1 for Python to do."""
    head, n_parts, said = load(desk + 8 * ROOM), load(entry), load(desk + 8 * ANSWER_AT)
    has_least = load(head + 8 * NBYTES_AT) > 0
    clock = load(head + 8 * CLOCK_AT) if load(entry + 8) != 0 else 0
    part, row = entry + 8 * ENTRY_WORDS, said + HEAD_NBYTES
    nbytes = HEAD_NBYTES + ROW_NBYTES * n_parts
    for i in range(n_parts):
        bound = load(head + HEAD_NBYTES + 8 * i) if has_least else clock
        copied = read_part(part + 8, bound, row, said + nbytes)
        if copied < 0:
            return -1
        store(row + 24, APPLIED)
        nbytes += copied
        row += ROW_NBYTES
        part += 8 * load(part)
    for i in range(CLOCK_AT, LAST_AT):
        store(said + 8 * i, ONE if i == WEIGHT_AT else 0)
    store(said, ANSWERS)
    store(said + 8 * NBYTES_AT, nbytes - HEAD_NBYTES)
    store(said + 8 * LAST_AT, (load(head + 8 * LAST_AT) >> 32) << 32)
    return nbytes


def push_out(fd: int, desk: int) -> int:
    """Send what was not sent of the answer; return GOING, or why that is not all."""
    left = load(desk + 8 * LENGTH) - load(desk + 8 * SENT)
    while left > 0:
        sent = load(desk + 8 * SENT)
        done = send(fd, load(desk + 8 * ANSWER_AT) + sent, left, SEND_FLAGS)
        if done >= 0:
            store(desk + 8 * SENT, sent + done)
            left -= done
            continue
        failed = errno()
        if failed not in (EINTR, EAGAIN):
            return TORN
        if failed == EAGAIN and not wait(fd, desk, POLLOUT, load(desk + 8 * PATIENCE)):
            return UNSENT
    return GOING


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
    nbytes = make_answer(desk, entry)
    if nbytes < 0:
        return ASKED
    # Nobody else receives from it: these are the bytes that were seen.
    if recv(fd, room, asked, RECV_FLAGS) != asked:
        return TORN
    store(desk + 8 * LENGTH, nbytes)
    store(desk + 8 * SENT, 0)
    store(lane + 8 * N_READS, load(lane + 8 * N_READS) + 1)
    store(lane + 8 * N_NBYTES, load(lane + 8 * N_NBYTES) + nbytes)
    store(lane + 8 * USED, monotonic())
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


_INT = "types.int64"
_SIGNATURES: dict[Callable[..., Any], str] = {
    wait: ", ".join([_INT] * 4),
    find_entry: f"{_INT}, {_INT}",
    make_answer: f"{_INT}, {_INT}",
    push_out: f"{_INT}, {_INT}",
    answer_next: f"{_INT}, {_INT}",
    serve_one: ", ".join([_INT] * 3),
    serve_many: f"{_INT}, {_INT}",
}


class Loops(NamedTuple):
    """The two loops, compiled."""

    serve_one: Callable[[int, int, int], int]
    serve_many: Callable[[int, int], int]


@cache
def compiled(cache_dir: str | None = None) -> Loops:
    """Return the loops; once for all lanes of a process."""
    functions = _SIGNATURES | addressed.SIGNATURES
    module = plain(functions, cache_dir=cache_dir, alone=True)
    loops = Loops(*map(module.function, Loops._fields))
    _LOADED.append(loops)
    return loops


#: Those that are ready.
_LOADED: list[Loops] = []


def loaded() -> Loops | None:
    """Return the loops where they are ready: no lane waits for a compiler."""
    return _LOADED[0] if _LOADED else None
