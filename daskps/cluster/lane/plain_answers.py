"""What one plain read is answered with, compiled: found, made, and sent.

By copying where it is short; from where it lies where it is long, see
:func:`send_straight`. :mod:`~daskps.cluster.lane.plain_reads` has the loops.
"""
# ruff: noqa: PLR0917  (compiled functions take numbers, and by position)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.cluster.lane.frames import (
    APPLIED,
    CALL,
    HAS_LEAST,
    HEAD_NBYTES,
    MAGIC,
    MOST_FORMS,
    ROW_NBYTES,
)
from daskps.cluster.lane.plain_words import (
    ANSWER_AT,
    ANSWERS,
    CLOCK_AT,
    EAGAIN,
    EINTR,
    ENTRY_WORDS,
    EXPONENT,
    FLAGS,
    FLAGS_SHIFT,
    FLOOR_AT,
    FORM_SHIFT,
    GOING,
    KIND_SHIFT,
    LAST_AT,
    LENGTH,
    MORE,
    MOST_SOURCES,
    NBYTES_AT,
    ONE,
    PATIENCE,
    POLLED,
    POLLED_AT,
    POLLOUT,
    ROOM,
    SEND_FLAGS,
    SENT,
    SEQUENCE_AT,
    SOURCES,
    STRAIGHT_NBYTES,
    TORN,
    UNSENT,
    WEIGHT_AT,
)
from daskps.cluster.lane.tail import TAIL_NBYTES
from daskps.kernels.system import (
    copy,
    errno,
    load,
    monotonic,
    poll,
    send,
    store,
)
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


INT = "types.int64"
#: Of the functions here, as they are compiled.
SIGNATURES: dict[Callable[..., Any], str] = {
    wait: ", ".join([INT] * 4),
    find_entry: f"{INT}, {INT}",
    make_answer: f"{INT}, {INT}",
    find_bound: ", ".join([INT] * 3),
    say_head: f"{INT}, {INT}",
    send_out: ", ".join([INT] * 5),
    push_out: f"{INT}, {INT}",
    find_straight: f"{INT}, {INT}",
    is_unhurt: f"{INT}, {INT}",
    keep_rest: ", ".join([INT] * 4),
    send_straight: ", ".join([INT] * 4),
}
