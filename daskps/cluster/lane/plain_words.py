"""Words of the loops that answer plain reads by themselves.

A *lane* and a *desk* are words here, given by their address: what belongs to a socket, and
what the thread has that answers.
"""

from __future__ import annotations

import errno as errors
import select
import socket

from daskps.cluster.lane.frames import ANSWER, HEAD_NBYTES, MAGIC

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
