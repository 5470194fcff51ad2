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
# ruff: noqa: PLR0911, PLR0917  (compiled functions take numbers, and by position)

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
from daskps.cluster.lane.tail import TAIL_NBYTES
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
from daskps.shards.addressed import (
    COPIED_AT,
    COPY_MS,
    RECORDS_AT,
    find_flip,
    find_sources,
    is_whole,
    look_straight,
    read_part,
    say_row,
)

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
EPOLL, EVENTS, LEFT, LANES, N_LANES, WHOSE = range(8, 14)
#: Room for where a long answer lies, see MOST_SOURCES; how it is sent, as the system takes
#: it: a thread that may wait does so there.
SOURCES, FLAGS, DESK_WORDS = range(14, 17)
#: Why a loop has ended: there is something that it does not answer; the other end takes
#: no more of the answer for now; nothing came; the thread is wanted; the lane is torn.
GOING, ASKED, UNSENT, QUIET, WOKEN, TORN = range(6)
#: Milliseconds after which an idle loop looks whether its thread is wanted.
LOOK = 250
#: Parts of a call, of which versions may be waited for.
MOST_PARTS = 512
ROOM_NBYTES = HEAD_NBYTES + 8 * MOST_PARTS
#: Pieces of an answer that is sent from where it lies, and parts: their addresses and
#: bytes, then by part the flip that is read.
MOST_SOURCES = 64
SOURCES_WORDS = 3 * MOST_SOURCES
#: Answers of more bytes are sent so, and bytes at the end of one that are held back.
STRAIGHT_NBYTES = 65_536
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
WAITING_FLAGS = int(getattr(socket, "MSG_NOSIGNAL", 0))
SEND_FLAGS = int(socket.MSG_DONTWAIT) | WAITING_FLAGS
MORE = int(getattr(socket, "MSG_MORE", 0))
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
    n_parts, said = load(entry), load(desk + 8 * ANSWER_AT)
    part, row = entry + 8 * ENTRY_WORDS, said + HEAD_NBYTES
    nbytes = HEAD_NBYTES + ROW_NBYTES * n_parts
    for i in range(n_parts):
        bound = find_bound(desk, entry, i)
        copied = read_part(part + 8, bound, row, said + nbytes)
        if copied < 0:
            return -1
        store(row + 24, APPLIED)
        nbytes += copied
        row += ROW_NBYTES
        part += 8 * load(part)
    say_head(desk, nbytes)
    return nbytes


def find_bound(desk: int, entry: int, i: int) -> int:
    """Return how far a shard must be that the read in the room is of."""
    head = load(desk + 8 * ROOM)
    if load(head + 8 * NBYTES_AT) > 0:
        return load(head + HEAD_NBYTES + 8 * i)
    return load(head + 8 * CLOCK_AT) if load(entry + 8) != 0 else 0


def say_head(desk: int, nbytes: int) -> None:
    """Write the head of an answer of so many bytes, itself among them."""
    head, said = load(desk + 8 * ROOM), load(desk + 8 * ANSWER_AT)
    for i in range(CLOCK_AT, LAST_AT):
        store(said + 8 * i, ONE if i == WEIGHT_AT else 0)
    store(said, ANSWERS)
    store(said + 8 * NBYTES_AT, nbytes - HEAD_NBYTES)
    store(said + 8 * LAST_AT, (load(head + 8 * LAST_AT) >> 32) << 32)


def send_out(fd: int, desk: int, at: int, nbytes: int, more: int) -> int:
    """Send bytes; return how many nobody takes for now, -1 where nobody ever will."""
    flags = load(desk + 8 * FLAGS)
    while nbytes > 0:
        done = send(fd, at, nbytes, flags | more)
        if done >= 0:
            at += done
            nbytes -= done
            continue
        failed = errno()
        if failed not in (EINTR, EAGAIN):
            return -1
        if failed == EAGAIN and (
            flags != SEND_FLAGS
            or not wait(fd, desk, POLLOUT, load(desk + 8 * PATIENCE))
        ):
            return nbytes
    return 0


def push_out(fd: int, desk: int) -> int:
    """Send what was not sent of the answer; return GOING, or why that is not all."""
    length, sent = load(desk + 8 * LENGTH), load(desk + 8 * SENT)
    at = load(desk + 8 * ANSWER_AT) + sent
    left = send_out(fd, desk, at, length - sent, 0)
    if left < 0:
        return TORN
    store(desk + 8 * SENT, length - left)
    return GOING if left == 0 else UNSENT


def find_straight(desk: int, entry: int) -> int:
    """Find where a long answer lies, and write what comes before it.

    Returns how many pieces it is sent in, 0 where it is to be copied, -1 for Python to do.
    """
    n_parts, said = load(entry), load(desk + 8 * ANSWER_AT)
    sources, now, n = load(desk + 8 * SOURCES), monotonic(), 0
    if load(entry + 16) <= STRAIGHT_NBYTES or n_parts > MOST_SOURCES:
        return 0
    part, row = entry + 8 * ENTRY_WORDS, said + HEAD_NBYTES
    may = True
    for i in range(n_parts):
        bound = find_bound(desk, entry, i)
        flip = find_flip(part + 8, bound)
        if flip < 0:
            return -1
        # Of each of them, also where one of them does not let it.
        may = look_straight(part + 8, flip, now) and may
        found = -1
        if may:
            to = sources + 16 * n
            found = find_sources(part + 8, flip, to, MOST_SOURCES - n)
        if found >= 0:
            n += found
        else:
            may = False
        say_row(part + 8, load(part + 8 * (1 + RECORDS_AT + (flip & 1))), bound, row)
        store(row + 24, APPLIED)
        store(sources + 8 * (2 * MOST_SOURCES + i), flip)
        row += ROW_NBYTES
        part += 8 * load(part)
    say_head(desk, load(entry + 16))
    return n if may else 0


def is_unhurt(desk: int, entry: int) -> bool:
    """Return whether no update has run into what was sent; else copy for a while."""
    flips = load(desk + 8 * SOURCES) + 16 * MOST_SOURCES
    part, unhurt = entry + 8 * ENTRY_WORDS, True
    for i in range(load(entry)):
        if not is_whole(part + 8, load(flips + 8 * i)):
            store(load(part + 8 * (1 + COPIED_AT)), monotonic() + COPY_MS)
            unhurt = False
        part += 8 * load(part)
    return unhurt


def keep_rest(desk: int, i: int, n: int, left: int) -> None:
    """Copy what is left of an answer behind what is kept: of piece i so many bytes."""
    sources, said = load(desk + 8 * SOURCES), load(desk + 8 * ANSWER_AT)
    to = said + load(desk + 8 * LENGTH)
    while i < n:
        at, nbytes = load(sources + 16 * i), load(sources + 16 * i + 8)
        copy(to, at + nbytes - left, left)
        to += left
        i += 1
        left = load(sources + 16 * i + 8) if i < n else 0
    store(desk + 8 * LENGTH, to - said)


def send_straight(fd: int, desk: int, entry: int, n: int) -> int:
    """Send an answer from where it lies; return GOING, UNSENT or TORN.

    Its last bytes are held back until all others are with the kernel, are copied then, and
    are sent only if no update has run into any of it: else the lane is torn.
    """
    sources, said = load(desk + 8 * SOURCES), load(desk + 8 * ANSWER_AT)
    before = HEAD_NBYTES + ROW_NBYTES * load(entry)
    left = send_out(fd, desk, said, before, MORE)
    if left < 0:
        return TORN
    store(desk + 8 * SENT, before - left)
    store(desk + 8 * LENGTH, before if left > 0 else 0)
    store(desk + 8 * SENT, before - left if left > 0 else 0)
    # The piece that not all of is with the kernel, and how much at its end.
    i, unsent = 0, load(sources + 8)
    while left == 0:
        nbytes, is_last = load(sources + 16 * i + 8), i == n - 1
        held = min(TAIL_NBYTES, nbytes) if is_last else 0
        left = send_out(fd, desk, load(sources + 16 * i), nbytes - held, MORE)
        if left < 0:
            return TORN
        unsent = left + held
        if left > 0 or is_last:
            break
        i += 1
    keep_rest(desk, i, n, unsent)
    return push_out(fd, desk) if is_unhurt(desk, entry) else TORN


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


_INT = "types.int64"
_SIGNATURES: dict[Callable[..., Any], str] = {
    wait: ", ".join([_INT] * 4),
    find_entry: f"{_INT}, {_INT}",
    make_answer: f"{_INT}, {_INT}",
    find_bound: ", ".join([_INT] * 3),
    say_head: f"{_INT}, {_INT}",
    send_out: ", ".join([_INT] * 5),
    push_out: f"{_INT}, {_INT}",
    find_straight: f"{_INT}, {_INT}",
    is_unhurt: f"{_INT}, {_INT}",
    keep_rest: ", ".join([_INT] * 4),
    send_straight: ", ".join([_INT] * 4),
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
