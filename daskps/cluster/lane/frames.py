"""What travels on a lane: frames, each a head of 64 bytes and a body of plain bytes.

A caller sends a *form* once: all that stays the same from call to call, as text. Then it
sends calls: the number of their form, what changes, and arrays. A host answers each
frame with one of its own. Nothing here is ever unpickled, and how long a body may be
is known before memory is taken for it.

Pure: bytes in, bytes out.
"""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from daskps.cluster.wire.messages import MOST, Answer
from daskps.cluster.wire.packing import sendable
from daskps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What every frame begins with; two ends that disagree on the format differ here.
MAGIC = 0x31_6C_70_64
HEAD: Final = struct.Struct("<IBBHQqqqddII")
HEAD_NBYTES = HEAD.size
#: Of the head of an answer what says that it is one, how long, and to which frame.
ANSWERED: Final = struct.Struct("<IBxxxQ44xI")
#: Kinds of frames, the callers' first.
FORM: Final = 1
CALL: Final = 2
ANSWER: Final = 3
REFUSAL: Final = 4
FETCH: Final = 5
#: Flags of a call: it has a learning rate; its body begins with versions to wait for.
HAS_LR, HAS_LEAST = 1, 2
#: Forms that a host keeps for one lane, and the longest text: a form, or why not.
MOST_FORMS = 64
MOST_TEXT = 2**20
#: Characters of why a call is refused.
MOST_SAID = 1000

#: What a head ends with.
_NUMBER = struct.Struct("<I")
#: One shard of an answer: shard, version, lag, and what else there is to say.
_ROW = struct.Struct("<qqqq")
ROW_NBYTES = _ROW.size
PARKED: Final = 1
#: What a row says of a shard that is done.
APPLIED: Final = 2
_ALL = 3


class Head(NamedTuple):
    """The head of a frame."""

    kind: int
    #: Bytes of the body.
    nbytes: int = 0
    #: Which frame of its lane it is, or answers.
    number: int = 0
    form: int = 0
    flags: int = 0
    clock: int = 0
    sequence: int = 0
    floor: int = 0
    weight: float = 1.0
    lr: float = 0.0
    #: Longest the caller is kept waiting.
    wait_ms: int = 0


def pack_head(head: Head) -> bytes:
    """Return a head as bytes."""
    kind, nbytes, number, form, flags, clock, sequence, floor, weight, lr, ms = head
    return HEAD.pack(
        MAGIC,
        kind,
        flags,
        form,
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
    """Return the head that 64 bytes are.

    Raises
    ------
    ProtocolError
        For bytes that are none, or a head that no end of a lane sends.
    """
    magic, kind, flags, form, nbytes, clock, sequence, floor, weight, lr, ms, number = (
        HEAD.unpack(data)
    )
    if magic != MAGIC:
        raise ProtocolError(f"bytes that are no frame of a lane: {bytes(data[:8])!r}")
    head = Head(
        kind, nbytes, number, form, flags, clock, sequence, floor, weight, lr, ms
    )
    if (
        not FORM <= kind <= FETCH
        or flags & ~(HAS_LR | HAS_LEAST)
        or form >= MOST_FORMS
        # Compared one by one: this is done for each frame, and calls take longer.
        or not -1 <= clock <= MOST
        or not -1 <= sequence <= MOST
        or not -1 <= floor <= MOST
        or not -math.inf < weight < math.inf
        or (nbytes > MOST_TEXT and kind in (FORM, REFUSAL, FETCH))
    ):
        raise ProtocolError(f"a frame that no end of a lane sends: {head!r:.200}")
    return head


def pack_text(kind: int, value: object, number: int, form: int = 0) -> list[Any]:
    """Return a frame that is a text, as buffers.

    Raises
    ------
    ProtocolError
        For a text that is too long for a lane.
    """
    text = text_of(value)
    return [pack_head(Head(kind, len(text), number, form)), text]


def text_of(value: object) -> bytes:
    """Return plain values as text.

    Raises
    ------
    ProtocolError
        For a text that is too long for a lane.
    """
    text = json.dumps(value, separators=(",", ":")).encode()
    if len(text) > MOST_TEXT:
        raise ProtocolError(f"{len(text):,} bytes of text, more than a lane takes")
    return text


def unpack_text(text: bytes | bytearray | memoryview) -> Any:
    """Return what a text says.

    Raises
    ------
    ProtocolError
        For bytes that are none.
    """
    try:
        return json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{len(text)} bytes that are no text of a lane") from error


def pack_refusal(error: Exception, number: int) -> list[Any]:
    """Return the frame that says why a lane does not answer, as buffers.

    The caller takes a message then, and hears the error itself.
    """
    why = sendable(f"{type(error).__name__}: {error}")
    return pack_text(REFUSAL, why[:MOST_SAID], number)


def pack_answers(answers: Sequence[Answer], number: int) -> list[Any]:
    """Return the frame that answers a call, as buffers.

    Where a shard has an error all of it is a refusal.
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
    """Head and rows of the answers of a form, whose shards are done.

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
        """Return them, with shard, version, lag and code of each row."""
        return self._struct.pack(*self._said, number, *rows)

    def pack_before(self, number: int, rows: Sequence[int], nbytes: int) -> bytes:
        """Return them before so many bytes more."""
        *said, body, a, b, c, weight, lr, ms = self._said
        return self._struct.pack(
            *said, body + nbytes, a, b, c, weight, lr, ms, number, *rows
        )

    def pack_over(self, buffer: Any, number: int, rows: Sequence[int]) -> None:
        """Write what another frame has said differently, over that frame."""
        _NUMBER.pack_into(buffer, HEAD_NBYTES - _NUMBER.size, number)
        self._rows.pack_into(buffer, HEAD_NBYTES, *rows)

    def pack_into(self, buffer: Any, number: int, rows: Sequence[int]) -> None:
        """Write them at the beginning of a buffer."""
        self._struct.pack_into(buffer, 0, *self._said, number, *rows)


def unpack_rows(
    data: bytes | bytearray | memoryview, shards: Sequence[int]
) -> list[Answer]:
    """Return the answers of a frame without their arrays, which come behind them.

    Parameters
    ----------
    data : bytes-like
        The rows.
    shards : sequence of int
        What is answered: a call to these.

    Raises
    ------
    ProtocolError
        For rows that do not answer that call.
    """
    found = []
    for row, asked in zip(_ROW.iter_unpack(data), shards, strict=True):
        shard, version, lag, code = row
        if shard != asked or not 0 <= code <= _ALL:
            raise ProtocolError(f"a row {row} that answers no call to {asked}")
        parked, applied = bool(code & PARKED), bool(code & APPLIED)
        found.append(Answer(shard, None, parked, applied, version, lag))
    return found
