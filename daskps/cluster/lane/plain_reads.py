"""The loop of a lane that answers plain reads by itself, compiled: without Python.

A thread of Python that is busy keeps the interpreter for 5 ms at a time; whoever needs it to
answer waits so long. This loop does not need it. It receives the heads of frames, answers
those whose form is in its table, and hands all else back: a frame of another kind or form, a
read that has to wait, bytes that are no frame. It has consumed nothing of that then: it lies
in the room, from its first byte on.

One thread has a lane, its state and its table, and changes them while the loop does not run.
Who ends a lane shuts its socket, which ends the loop. Who wants that thread to look at
something else stores a word of the state.
"""

from __future__ import annotations

import errno as errors
import select
import socket
from functools import cache
from typing import TYPE_CHECKING, Any

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
from daskps.kernels.system import copy, errno, load, poll, recv, send
from daskps.shards import addressed
from daskps.shards.addressed import ROW_WORDS, read_part

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array

#: Words of the state: the socket; address and length of the room, and how many bytes of
#: frames it holds; address of the answer, its bytes, and how many of them were sent.
FD, ROOM, ROOM_NBYTES, HELD, ANSWER_AT, LENGTH, SENT = range(7)
#: Milliseconds for which the other end may send nothing inside of a frame, or take
#: nothing; a word for `poll`, and its address; whether the thread is wanted; what is
#: counted: reads that were answered, and their bytes.
PATIENCE, POLLED, POLLED_AT, WANTED, N_READS, N_NBYTES, STATE_WORDS = range(7, 14)
#: Why the loop has ended: what the room holds is for Python; the other end is gone; it is
#: too slow within a frame; it takes no more of the answer for now; the thread is wanted.
GOING, ASKED, ENDED, LATE, UNSENT, WOKEN = range(6)
#: Milliseconds after which an idle loop looks whether its thread is wanted.
LOOK = 250

#: An entry of a table says how many parts follow, whether they are of a run, and for each
#: its words and where it begins. What a table begins with are the entries by form.
ENTRY_WORDS = 2

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
EINTR, EAGAIN = errors.EINTR, errors.EAGAIN


def wait(state: Array, event: int, milliseconds: int) -> int:
    """Wait until the socket is ready, or has ended; return LATE when time is over."""
    while True:
        state[POLLED] = state[FD] | event << 32
        found = poll(state[POLLED_AT], milliseconds)
        if found > 0:
            return GOING
        if found == 0:
            return LATE
        if errno() != EINTR:
            return ENDED


def fill(state: Array, n: int) -> int:
    """Have so many bytes in the room; return GOING, or why that is not so."""
    while state[HELD] < n:
        held = state[HELD]
        if held == 0 and state[WANTED] != 0:
            return WOKEN
        why = wait(state, POLLIN, state[PATIENCE] if held > 0 else LOOK)
        # Between two frames there may be nothing for long.
        if why == LATE and held == 0:
            continue
        if why != GOING:
            return why
        got = recv(state[FD], state[ROOM] + held, state[ROOM_NBYTES] - held, RECV_FLAGS)
        if got > 0:
            state[HELD] = held + got
        elif got == 0:
            return ENDED
        else:
            failed = errno()
            if failed not in (EINTR, EAGAIN):
                return ENDED
    return GOING


def find_entry(head: int, table: Array) -> int:
    """Return the entry of the read that a head asks for, 0 where Python shall look."""
    first, flags = load(head), (load(head) >> FLAGS_SHIFT) & 0xFF
    form = (first >> FORM_SHIFT) & 0xFFFF
    if first & 0xFF_FFFF_FFFF != MAGIC | CALL << KIND_SHIFT or form >= MOST_FORMS:
        return 0
    entry: int = table[form]
    if entry == 0 or (flags != 0 and (flags != HAS_LEAST or table[entry + 1] != 0)):
        return 0
    nbytes = 8 * table[entry] if flags != 0 else 0
    if load(head + 8 * NBYTES_AT) != nbytes:
        return 0
    if min(load(head + 8 * CLOCK_AT), load(head + 8 * SEQUENCE_AT)) < -1:
        return 0
    is_finite = load(head + 8 * WEIGHT_AT) & EXPONENT != EXPONENT
    return entry if is_finite and load(head + 8 * FLOOR_AT) >= -1 else 0


def make_answer(state: Array, table: Array, entry: int, said: Array) -> int:
    """Make the answer to the read in the room; return its bytes, -1 for Python to do."""
    head, n_parts = state[ROOM], int(table[entry])
    has_least = load(head + 8 * NBYTES_AT) > 0
    clock = load(head + 8 * CLOCK_AT) if table[entry + 1] != 0 else 0
    part, row = entry + ENTRY_WORDS, HEAD_NBYTES // 8
    nbytes = HEAD_NBYTES + ROW_NBYTES * n_parts
    for i in range(n_parts):
        bound = load(head + HEAD_NBYTES + 8 * i) if has_least else clock
        to = state[ANSWER_AT] + nbytes
        copied = read_part(table, part + 1, bound, said, row, to)
        if copied < 0:
            return -1
        said[row + 3] = APPLIED
        nbytes += copied
        row += ROW_WORDS
        part += table[part]
    said[0], said[NBYTES_AT] = ANSWERS, nbytes - HEAD_NBYTES
    for i in range(CLOCK_AT, WEIGHT_AT):
        said[i] = 0
    said[WEIGHT_AT], said[LR_AT] = ONE, 0
    said[LAST_AT] = (load(head + 8 * LAST_AT) >> 32) << 32
    return nbytes


def push_out(state: Array) -> int:
    """Send what was not sent of the answer; return GOING, or why that is not all."""
    while state[SENT] < state[LENGTH]:
        at, left = state[ANSWER_AT] + state[SENT], state[LENGTH] - state[SENT]
        done = send(state[FD], at, left, SEND_FLAGS)
        if done >= 0:
            state[SENT] += done
            continue
        failed = errno()
        if failed == EAGAIN:
            why = wait(state, POLLOUT, state[PATIENCE])
            if why != GOING:
                return UNSENT if why == LATE else why
        elif failed != EINTR:
            return ENDED
    return GOING


def serve_reads(state: Array, table: Array, said: Array) -> int:
    """Answer reads until something else is to be done; return what.

    Parameters
    ----------
    state : ndarray
        The lane.
    table : ndarray
        What it may answer.
    said : ndarray
        Words of the answer.

    Returns
    -------
    int
        ASKED, ENDED, LATE, UNSENT or WOKEN.
    """
    while True:
        why = fill(state, HEAD_NBYTES)
        if why != GOING:
            return why
        entry = find_entry(state[ROOM], table)
        if entry == 0:
            return ASKED
        asked = HEAD_NBYTES + load(state[ROOM] + 8 * NBYTES_AT)
        why = fill(state, asked)
        if why != GOING:
            return why
        nbytes = make_answer(state, table, entry, said)
        if nbytes < 0:
            return ASKED
        state[HELD] -= asked
        if state[HELD] > 0:
            copy(state[ROOM], state[ROOM] + asked, state[HELD])
        state[LENGTH], state[SENT] = nbytes, 0
        state[N_READS] += 1
        state[N_NBYTES] += nbytes
        why = push_out(state)
        if why != GOING:
            return why


_SIGNATURES: dict[Callable[..., Any], str] = {
    wait: "WORDS, types.int64, types.int64",
    fill: "WORDS, types.int64",
    find_entry: "types.int64, WORDS",
    make_answer: "WORDS, WORDS, types.int64, WORDS",
    push_out: "WORDS",
    serve_reads: "WORDS, WORDS, WORDS",
}


@cache
def compiled(cache_dir: str | None = None) -> Callable[[Array, Array, Array], int]:
    """Return :func:`serve_reads`, compiled; once for all lanes of a process."""
    functions = _SIGNATURES | addressed.SIGNATURES
    module = plain(functions, cache_dir=cache_dir, alone=True)
    return module.function("serve_reads")
