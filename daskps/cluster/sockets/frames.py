"""Frames of a socket: each has a head of 64 bytes and a body of plain bytes.

A caller sends a *template* once: the part that stays the same from call to call, as
text. Then it sends calls: the number of their template, the changes, and arrays. A host
answers each frame with one frame. This module never unpickles, and its callers know the
length of a body before they take memory for it.

A host cannot take back bytes that it has sent straight from memory that updates
overwrite. But an answer counts only when all of it has come: so the host holds back the
end, a :class:`Tail`, until it knows that the rest was whole.

Pure: bytes in, bytes out.
"""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from daskps.cluster.protocol.messages import MOST, Answer
from daskps.cluster.protocol.packing import sendable
from daskps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.typing import Array


#: First bytes of every frame; they change with the format, so that two ends that
#: disagree on it fail here.
MAGIC = 0x32_6C_70_64
HEAD: Final = struct.Struct("<IBBHQqqqddII")
HEAD_NBYTES = HEAD.size
#: The head of an answer without its unused fields: magic, kind, body bytes, number.
ANSWERED: Final = struct.Struct("<IBxxxQ44xI")
#: Kinds of frames, the callers' first.
TEMPLATE: Final = 1
CALL: Final = 2
ANSWER: Final = 3
REFUSAL: Final = 4
FETCH: Final = 5
#: Flags of a call: it has a learning rate; its body begins with versions to wait for.
HAS_LR, HAS_LEAST = 1, 2
#: Templates that a host keeps for one socket, and bytes of the longest text: a
#: template, or a refusal.
MOST_TEMPLATES = 64
MOST_TEXT = 2**20
#: Characters of the reason in a refusal.
_MOST_SAID = 1000

#: The last field of a head: the number of the frame.
_NUMBER = struct.Struct("<I")
#: One shard of an answer: shard, version, lag, and flags.
_ROW = struct.Struct("<qqqq")
ROW_NBYTES = _ROW.size
PARKED: Final = 1
#: Flag of a row whose shard is done.
APPLIED: Final = 2
_ALL = 3


class Head(NamedTuple):
    """The head of a frame."""

    kind: int
    #: Bytes of the body.
    nbytes: int = 0
    #: Number of the frame on its socket; an answer has that of its call.
    number: int = 0
    template: int = 0
    flags: int = 0
    clock: int = 0
    sequence: int = 0
    floor: int = 0
    weight: float = 1.0
    lr: float = 0.0
    #: Longest time that the caller may be kept waiting.
    wait_ms: int = 0


def pack_head(head: Head) -> bytes:
    """Return a head as bytes."""
    kind, nbytes, number, template, flags, clock, sequence, floor, weight, lr, ms = head
    return HEAD.pack(
        MAGIC,
        kind,
        flags,
        template,
        nbytes,
        clock,
        sequence,
        floor,
        weight,
        lr,
        ms,
        number & 0xFFFF_FFFF,
    )


def unpack_head(data: bytes | bytearray | memoryview) -> Head:
    """Return the head in 64 bytes.

    Raises
    ------
    ProtocolError
        If the bytes are no head, or a head that neither end of a socket sends.
    """
    (
        magic,
        kind,
        flags,
        template,
        nbytes,
        clock,
        sequence,
        floor,
        weight,
        lr,
        ms,
        number,
    ) = HEAD.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(f"bytes that are no frame of a socket: {bytes(data[:8])!r}")
    head = Head(
        kind, nbytes, number, template, flags, clock, sequence, floor, weight, lr, ms
    )
    if (
        not TEMPLATE <= kind <= FETCH
        or flags & ~(HAS_LR | HAS_LEAST)
        or template >= MOST_TEMPLATES
        # Compared one by one: this runs for each frame, and function calls take longer.
        or not -1 <= clock <= MOST
        or not -1 <= sequence <= MOST
        or not -1 <= floor <= MOST
        or not -math.inf < weight < math.inf
        or (nbytes > MOST_TEXT and kind in (TEMPLATE, REFUSAL, FETCH))
    ):
        raise ProtocolError(f"a frame that no end of a socket sends: {head!r:.200}")
    return head


def pack_text(kind: int, value: object, number: int, template: int = 0) -> list[Any]:
    """Return a frame that is a text, as buffers.

    Raises
    ------
    ProtocolError
        If the text is too long for a socket.
    """
    text = text_of(value)
    return [pack_head(Head(kind, len(text), number, template)), text]


def text_of(value: object) -> bytes:
    """Return plain values as text.

    Raises
    ------
    ProtocolError
        If the text is too long for a socket.
    """
    text = json.dumps(value, separators=(",", ":")).encode()
    if len(text) > MOST_TEXT:
        raise ProtocolError(f"{len(text):,} bytes of text, more than a socket takes")
    return text


def unpack_text(text: bytes | bytearray | memoryview) -> Any:
    """Return the value in a text.

    Raises
    ------
    ProtocolError
        If the bytes are no text of a socket.
    """
    try:
        return json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            f"{len(text)} bytes that are no text of a socket"
        ) from error


def pack_refusal(error: Exception, number: int) -> list[Any]:
    """Return the frame that refuses a call with the reason, as buffers.

    The caller then sends the call as a message, and gets the error itself.
    """
    why = sendable(f"{type(error).__name__}: {error}")
    return pack_text(REFUSAL, why[:_MOST_SAID], number)


def pack_answers(answers: Sequence[Answer], number: int) -> list[Any]:
    """Return the frame that answers a call, as buffers.

    If a shard has an error, the whole frame is a refusal.
    """
    for answer in answers:
        if answer.error is not None:
            return pack_refusal(answer.error, number)
    rows, arrays = bytearray(), list[Any]()
    for a in answers:
        code = PARKED * a.parked | APPLIED * a.applied
        rows += _ROW.pack(a.shard, a.version, a.lag, code)
        arrays += [array for array in a.arrays if array.nbytes]
    nbytes = len(rows) + sum(array.nbytes for array in arrays)
    return [pack_head(Head(ANSWER, nbytes, number)) + rows, *arrays]


class AnswerHead:
    """Head and rows of the answers of a template, for calls that all shards have done.

    Parameters
    ----------
    n : int
        Number of shards.
    nbytes : int
        Bytes of the arrays that follow.
    """

    def __init__(self, n: int, nbytes: int) -> None:
        self._struct = struct.Struct(HEAD.format + n * _ROW.format[1:])
        self._rows = struct.Struct("<" + n * _ROW.format[1:])
        #: Bytes of head and rows.
        self.nbytes = self._struct.size
        body = self.nbytes - HEAD_NBYTES + nbytes
        self._said = MAGIC, ANSWER, 0, 0, body, 0, 0, 0, 1.0, 0.0, 0

    def pack(self, number: int, rows: Sequence[int]) -> bytes:
        """Return head and rows; `rows` has shard, version, lag and code of each."""
        return self._struct.pack(*self._said, number, *rows)

    def pack_before(self, number: int, rows: Sequence[int], nbytes: int) -> bytes:
        """Return head and rows for a frame with `nbytes` more bytes of body."""
        *said, body, a, b, c, weight, lr, ms = self._said
        return self._struct.pack(
            *said, body + nbytes, a, b, c, weight, lr, ms, number, *rows
        )

    def pack_over(self, buffer: Any, number: int, rows: Sequence[int]) -> None:
        """Write the fields that differ from call to call over an earlier frame."""
        _NUMBER.pack_into(buffer, HEAD_NBYTES - _NUMBER.size, number)
        self._rows.pack_into(buffer, HEAD_NBYTES, *rows)

    def pack_into(self, buffer: Any, number: int, rows: Sequence[int]) -> None:
        """Write head and rows at the beginning of a buffer."""
        self._struct.pack_into(buffer, 0, *self._said, number, *rows)


def unpack_rows(
    data: bytes | bytearray | memoryview, shards: Sequence[int]
) -> list[Answer]:
    """Return the answers of a frame without their arrays, which follow the rows.

    Parameters
    ----------
    data : bytes-like
        The rows.
    shards : sequence of int
        The shards of the call, in order.

    Raises
    ------
    ProtocolError
        If the rows do not answer that call.
    """
    found = []
    for row, asked in zip(_ROW.iter_unpack(data), shards, strict=True):
        shard, version, lag, code = row
        if shard != asked or not 0 <= code <= _ALL:
            raise ProtocolError(f"a row {row} that answers no call to {asked}")
        parked, applied = bool(code & PARKED), bool(code & APPLIED)
        found.append(Answer(shard, None, parked, applied, version, lag))
    return found


#: Bytes of an answer that the host holds back.
TAIL_NBYTES: Final = 4096


class Tail:
    """The last bytes of an answer, in place of a buffer; the host sends them last.

    Parameters
    ----------
    data : ndarray, shape (n,), uint8
        The bytes, if the answer is whole.
    is_whole : callable
        Returns whether no update has overwritten these bytes, nor those sent before.
    """

    def __init__(self, data: Array, is_whole: Callable[[], bool]) -> None:
        self._data, self._is_whole = data, is_whole

    def __len__(self) -> int:
        return len(self._data)

    def made(self) -> memoryview:
        """Return the bytes, once the host has sent all bytes before them.

        Raises
        ------
        OSError
            If the answer must not be completed: updates have overwritten it.
        """
        found = self._data.tobytes()
        if not self._is_whole():
            raise ConnectionAbortedError("updates have run into an answer of a socket")
        return memoryview(found)


def held_back(buffers: Sequence[Any], is_whole: Callable[[], bool]) -> list[Any]:
    """Return the buffers of an answer that ends in an array, with a :class:`Tail`."""
    *before, last = buffers
    data = last.reshape(-1).view("uint8")
    at = max(0, len(data) - TAIL_NBYTES)
    return [*before, data[:at], Tail(data[at:], is_whole)]


class Rest:
    """The last buffers of a body, which the bytes before them tell.

    Parameters
    ----------
    nbytes : int
        Bytes of the body that are left then.
    find : callable
        Returns the buffers, once the bytes before them have come; the last one may be a
        `Rest` again.
    """

    def __init__(self, nbytes: int, find: Callable[[], Sequence[Any]]) -> None:
        self._nbytes, self.find = nbytes, find

    def __len__(self) -> int:
        return self._nbytes
