"""The loop of a lane that answers plain reads by itself, compiled: without Python.

A thread of Python that is busy keeps the interpreter for 5 ms at a time; whoever needs it to
answer waits so long. This loop does not need it. It looks at the frame that comes next and
answers it, where its form is in the lane's table. All else is for Python: a frame of another
kind or form, a read that has to wait, bytes that are no frame, the end of the lane. Nothing
of that was taken from the socket then.

One thread at a time has a lane, its state and its table, and changes them while the loop does
not run. Who ends a lane shuts its socket, which ends the loop. Who wants its thread to look
at something else stores a word of the state.
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
from daskps.kernels.system import errno, load, poll, recv, send
from daskps.shards import addressed
from daskps.shards.addressed import ROW_WORDS, read_part

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array

#: Words of the state: the socket; the addresses of the table and of room for what is
#: looked at; of the answer its address, its bytes, and how many of them were sent.
FD, TABLE, ROOM, ANSWER_AT, LENGTH, SENT = range(6)
#: Milliseconds for which nothing may come, and for which the other end may take nothing; a
#: word for `poll`, and its address; whether the thread is wanted; what is counted: reads
#: that were answered, and their bytes.
IDLE, PATIENCE, POLLED, POLLED_AT, WANTED, N_READS, N_NBYTES, STATE_WORDS = range(6, 14)
#: Why the loop has ended: there is something that it does not answer; the other end takes
#: no more of the answer for now; nothing came; the thread is wanted; the lane is torn.
GOING, ASKED, UNSENT, QUIET, WOKEN, TORN = range(6)
#: Milliseconds after which an idle loop looks whether its thread is wanted.
LOOK = 250
#: Parts of a call, of which versions may be waited for.
MOST_PARTS = 512
ROOM_NBYTES = HEAD_NBYTES + 8 * MOST_PARTS

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
PEEK_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_PEEK)
EINTR, EAGAIN = errors.EINTR, errors.EAGAIN


def wait(state: Array, event: int, milliseconds: int) -> bool:
    """Wait until the socket is ready, or has ended; return False when time is over."""
    while True:
        state[POLLED] = state[FD] | event << 32
        found = poll(state[POLLED_AT], milliseconds)
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


def make_answer(state: Array, entry: int, said: Array) -> int:
    """Make the answer to the read in the room; return its bytes, -1 for Python to do."""
    head, n_parts = state[ROOM], load(entry)
    has_least = load(head + 8 * NBYTES_AT) > 0
    clock = load(head + 8 * CLOCK_AT) if load(entry + 8) != 0 else 0
    part, row = entry + 8 * ENTRY_WORDS, HEAD_NBYTES // 8
    nbytes = HEAD_NBYTES + ROW_NBYTES * n_parts
    for i in range(n_parts):
        bound = load(head + HEAD_NBYTES + 8 * i) if has_least else clock
        to = state[ANSWER_AT] + nbytes
        copied = read_part(part + 8, bound, said, row, to)
        if copied < 0:
            return -1
        said[row + 3] = APPLIED
        nbytes += copied
        row += ROW_WORDS
        part += 8 * load(part)
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
        if failed not in (EINTR, EAGAIN):
            return TORN
        if failed == EAGAIN and not wait(state, POLLOUT, state[PATIENCE]):
            return UNSENT
    return GOING


def answer_next(state: Array, said: Array) -> int:
    """Answer the frame that has come; return GOING, ASKED, UNSENT or TORN."""
    fd, room = state[FD], state[ROOM]
    seen = recv(fd, room, ROOM_NBYTES, PEEK_FLAGS)
    if seen < HEAD_NBYTES:
        return ASKED
    entry = find_entry(room, state[TABLE])
    if entry == 0:
        return ASKED
    asked = HEAD_NBYTES + load(room + 8 * NBYTES_AT)
    if seen < asked:
        return ASKED
    nbytes = make_answer(state, entry, said)
    if nbytes < 0:
        return ASKED
    # Nobody else receives from it: these are the bytes that were seen.
    if recv(fd, room, asked, RECV_FLAGS) != asked:
        return TORN
    state[LENGTH], state[SENT] = nbytes, 0
    state[N_READS] += 1
    state[N_NBYTES] += nbytes
    return push_out(state)


def serve_reads(state: Array, said: Array) -> int:
    """Answer reads until something else is to be done; return what.

    Parameters
    ----------
    state : ndarray
        The lane.
    said : ndarray
        Words of the answer.

    Returns
    -------
    int
        ASKED, UNSENT, QUIET, WOKEN or TORN.
    """
    quiet = 0
    while state[WANTED] == 0:
        if not wait(state, POLLIN, min(LOOK, state[IDLE] - quiet)):
            quiet += LOOK
            if quiet >= state[IDLE]:
                return QUIET
            continue
        quiet = 0
        why = answer_next(state, said)
        if why != GOING:
            return why
    return WOKEN


_SIGNATURES: dict[Callable[..., Any], str] = {
    wait: "WORDS, types.int64, types.int64",
    find_entry: "types.int64, types.int64",
    make_answer: "WORDS, types.int64, WORDS",
    push_out: "WORDS",
    answer_next: "WORDS, WORDS",
    serve_reads: "WORDS, WORDS",
}


@cache
def compiled(cache_dir: str | None = None) -> Callable[[Array, Array], int]:
    """Return :func:`serve_reads`, compiled; once for all lanes of a process."""
    functions = _SIGNATURES | addressed.SIGNATURES
    module = plain(functions, cache_dir=cache_dir, alone=True)
    return module.function("serve_reads")
