"""Messages between a caller and a host: frozen values, plain msgpack, arrays.

Every message carries the protocol version and the identity of what it is about:
store, shard, generation, run, rank, clock, producer, sequence, kind. A reply that is
not an explicit acknowledgement is an error.
"""

from __future__ import annotations

import operator
from itertools import zip_longest
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps import codecs, errors
from daskps.cluster.protocol.packing import (
    pack_array,
    pack_error,
    unpack_array,
    unpack_error,
    unpack_reply,
)
from daskps.cluster.protocol.read_words import (
    ReadWords,
    encoded,
    read_codec_of,
    words_of,
)
from daskps.layout.arrays import Layout, compute_dtype
from daskps.limits import MOST_RANGES
from daskps.shards.steps import (
    ADD,
    ASSIGN,
    BARRIER,
    GRADIENT,
    MODEL,
    NO_WAIT,
    NOTHING,
    READ,
    REMOVE,
    Item,
    Step,
)
from daskps.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.protocol.row_messages import RowRequest
    from daskps.codecs import Codec
    from daskps.layout.parameters import Piece
    from daskps.reduction import Empty
    from daskps.typing import Array

#: Raised whenever a message changes its meaning; two ends must agree.
PROTOCOL = 17

#: dtype, start and stop within a shard's vector of that dtype.
Range = tuple[str, int, int]


def identity() -> dict[str, Any]:
    """Return what two ends compare before they talk."""
    return {"protocol": PROTOCOL, "version": VERSION}


class Part(NamedTuple):
    """The part of a message for one shard: a step, and what is read after it."""

    shard: int
    step: Step
    ranges: tuple[Range, ...] = ()
    #: Rows of tables, read with them.
    rows: tuple[RowRequest, ...] = ()
    #: How the arrays that are read travel, where a codec makes words of them.
    words: tuple[ReadWords | None, ...] = ()

    @property
    def answer_nbytes(self) -> int:
        """Bytes of the arrays that are read, as they travel."""
        if self.words:
            return sum(nbytes for _, _, nbytes in self.sent)
        dense = sum((b - a) * np.dtype(dtype).itemsize for dtype, a, b in self.ranges)
        return dense + sum(asked.nbytes for asked in self.rows)

    @property
    def read_nbytes(self) -> int:
        """Bytes that they take at the host: beside their words as numbers as well."""
        if not self.words:
            return self.answer_nbytes
        return self.answer_nbytes + self._replace(words=()).answer_nbytes

    @property
    def answered(self) -> list[tuple[str, int]]:
        """Dtype and length of each array that is read."""
        return [
            *((dtype, b - a) for dtype, a, b in self.ranges),
            *((asked.dtype, len(asked.ids) * asked.dim) for asked in self.rows),
            *(("uint8", len(asked.ids)) for asked in self.rows if asked.is_marked),
        ]

    @property
    def sent(self) -> list[tuple[str, int, int]]:
        """Dtype, length and bytes of each array of the answer, as it travels."""
        return [
            (dtype, n, n * np.dtype(dtype).itemsize)
            if words is None
            else (words.codec.dtype, words.n_words, words.nbytes)
            for (dtype, n), words in zip_longest(self.answered, self.words)
        ]

    @property
    def reads(self) -> bool:
        """Whether anything is read."""
        return bool(self.ranges or self.rows)

    def in_words(self, codec: Codec) -> Part:
        """Return the same, answered in words of a codec."""
        return self._replace(words=words_of(codec, self.ranges, self.rows))


class Call(NamedTuple):
    """One message to one host: one step, cut into parts for those of its shards.

    The steps of its parts differ in their arrays, in the shard's generation, and in
    what they wait for.
    """

    store: str
    parts: tuple[Part, ...]
    #: Longest the host may keep the caller waiting before it says "parked".
    wait_seconds: float = 30.0
    #: Names a call that may wait, so that its caller can give it up.
    token: str = ""
    #: Name of the codec whose words the arrays are; "" where they are numbers.
    codec: str = ""
    #: The same of the arrays of the answer, where they are float32 or float64.
    read_codec: str = ""

    @property
    def step(self) -> Step:
        """The step for all of its shards, which says more to the first."""
        return self.parts[0].step

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that come and go."""
        return sum(part.step.nbytes + part.answer_nbytes for part in self.parts)

    @property
    def read_nbytes(self) -> int:
        """Bytes that its answer takes at its host."""
        return sum(part.read_nbytes for part in self.parts)


class Answer(NamedTuple):
    """The answer of one shard."""

    shard: int
    error: Exception | None = None
    #: The wait is not over; `applied` says whether the arrays were accepted.
    parked: bool = False
    applied: bool = True
    version: int = 0
    lag: int = 0
    arrays: tuple[Array, ...] = ()


_KINDS = (NOTHING, GRADIENT, MODEL, ADD, ASSIGN, REMOVE)
_WAITS = (NO_WAIT, READ, BARRIER)
#: Fields of a step that a template has, for all parts, and their types.
_STEP: dict[str, tuple[type, ...]] = {
    "kind": (str,),
    "run": (int,),
    "rank": (int,),
    "tick": (bool,),
    "producer": (int,),
    "touched": (tuple, list, NoneType),
    "whole": (bool,),
    "check": (bool,),
}
#: Fields of a template beside its parts.
_HEAD: dict[str, tuple[type, ...]] = {
    "store": (str,),
    **_STEP,
    "codec": (str,),
    "read_codec": (str,),
}
_said = operator.attrgetter(*_STEP)
#: Stands for the length of an array of words that each frame says.
COUNTED = -1
_NO_ELEMENTS = np.empty(0, np.uint8)
#: Numbers of a call, of which none is below -1: a word of a segment holds them, and
#: what is added to them.
MOST = 2**62


def check_protocol(
    protocol: int, version: str | None = None, who: str = "its sender"
) -> None:
    """Refuse another protocol, and another daskps where its version is said."""
    if protocol != PROTOCOL or version not in (None, VERSION):
        its = f"{protocol} (daskps {version})" if version is not None else protocol
        raise errors.ProtocolError(
            f"{who} speaks protocol {its}, this end {PROTOCOL} (daskps {VERSION}); "
            f"install the same daskps on client, scheduler and workers"
        )


def pack_parts(call: Call, *, counted: bool = False) -> dict[str, Any]:
    """Return what all calls of a kind share, without numbers, arrays and rows.

    With `counted` each frame says how many words there are of each array.
    """
    parts = [
        [
            p.shard,
            p.step.generation,
            [
                (i.position, i.start, COUNTED if counted else len(i.data))
                for i in p.step.items
            ],
            p.ranges,
            p.step.wait,
        ]
        for p in call.parts
    ]
    head = [call.store, *_said(call.step), call.codec, call.read_codec]
    return {"protocol": PROTOCOL, "head": head, "parts": parts}


def unpack_parts(
    protocol: int, head: Sequence[Any], parts: Any, layout: Layout, *, owned: bool
) -> tuple[Call, list[list[tuple[str, int]]]]:
    """Return a call without numbers, arrays and rows, and what arrays its frames have.

    These are, for each part, dtype and length. Shards may keep and change arrays where
    they are `owned`.

    Raises
    ------
    ProtocolError, PushRejectedError
        For another protocol, or an array that does not fit its piece.
    """
    check_protocol(protocol)
    _check_head(head)
    store, *said, codec, read_codec = head
    common = Step(**dict(zip(_STEP, said, strict=True)), owned=owned)
    if common.touched is not None:
        common = common._replace(touched=tuple((a, b) for a, b in common.touched))
    known = codec_of(codec, common.kind)
    read_in = read_codec_of(read_codec) if read_codec else None
    _check_parts(parts, layout)
    # The first shard would have applied its part before the second one finds an error.
    if common.check and (len(parts) > 1 or codec or common.kind != GRADIENT):
        raise errors.ProtocolError(
            f"a template of a {common.kind!r} that is to be looked at"
        )
    unpacked, arrays = [], []
    for shard, generation, sizes, ranges, wait in parts:
        items = tuple(
            Item(position, start, _NO_ELEMENTS) for position, start, _ in sizes
        )
        step = common._replace(items=items, generation=generation, wait=wait)
        arrays.append(
            [
                (_dtype_sent(layout, shard, row, kind=common.kind, codec=known), row[2])
                for row in sizes
            ]
        )
        part = Part(shard, step, tuple(_range(layout, shard, r) for r in ranges))
        unpacked.append(part.in_words(read_in) if read_in else part)
    call = Call(store, tuple(unpacked), codec=codec, read_codec=read_codec)
    return call, arrays


def unpack_identity(
    identity: Sequence[Any], touched: Sequence[tuple[int, int]] | None
) -> dict[str, Any]:
    """Return what a step outside runs says of itself, by the names of its fields.

    `identity` are producer, sequence number, floor and the pushes that were given up.

    Raises
    ------
    ProtocolError
        For what no caller says.
    """
    *numbers, given_up = identity
    if {*map(type, numbers)} != {int}:
        raise errors.ProtocolError(f"a push of identity {identity!r:.60}")
    producer, sequence, floor = numbers
    if not 0 < producer <= MOST or not 0 <= floor <= sequence <= MOST:
        raise errors.ProtocolError(f"a push of identity {identity!r:.60}")
    return {
        "producer": producer,
        "sequence": sequence,
        "floor": floor,
        "given_up": unpack_given_up(given_up),
        "touched": None if touched is None else tuple((a, b) for a, b in touched),
    }


def unpack_given_up(numbers: Sequence[Any]) -> tuple[int, ...]:
    """Return the pushes that were given up, or refuse what are none."""
    found = tuple(numbers)
    if not all(type(n) is int and 0 <= n <= MOST for n in found):
        raise errors.ProtocolError(f"pushes {found!r:.60} that were given up")
    return found


def _check_head(head: Sequence[Any]) -> None:
    """Refuse a header that says what no caller means."""
    for (name, types), value in zip(_HEAD.items(), head, strict=True):
        if type(value) not in types or (types == (int,) and not -1 <= value <= MOST):
            raise errors.ProtocolError(f"a call with {name}={value!r:.60}")
    if (kind := head[1]) not in _KINDS:
        raise errors.ProtocolError(f"a call of kind {kind!r:.60}")


def _check_parts(parts: Sequence[Any], layout: Layout) -> None:
    """Refuse a message that says more than there is to say of a store's shards.

    A host would send twice what is read twice: a short message could ask for an
    answer that no host has the memory for.
    """
    shards = [part[0] for part in parts]
    if len(set(shards)) < len(shards):
        raise errors.ProtocolError("a message that names a shard twice")
    for shard, generation, items, ranges, wait in parts:
        if not type(shard) is type(generation) is int:
            raise errors.ProtocolError(f"a call to shard {shard!r:.60}")
        if wait not in _WAITS:
            raise errors.ProtocolError(f"a call that waits for {wait!r:.60}")
        if not 0 <= shard < layout.n_shards:
            raise errors.ProtocolError(
                f"a call to shard {shard} of {layout.n_shards} of a store"
            )
        pieces = layout.pieces[shard]
        if len({item[0] for item in items}) < len(items):
            raise errors.ProtocolError(f"a message that names a piece of {shard} twice")
        if not ranges:
            continue
        asked = sum((b - a) * np.dtype(dtype).itemsize for dtype, a, b in ranges)
        most = max(MOST_RANGES, len(pieces) + len(layout.lengths))
        if len(ranges) > most or asked > layout.shard_nbytes(shard):
            raise errors.ProtocolError(
                f"a read of {len(ranges):,} ranges with {asked:,} bytes of shard "
                f"{shard}, which has {layout.shard_nbytes(shard):,} bytes in "
                f"{len(pieces):,} pieces"
            )


def codec_of(name: str, kind: str) -> Codec | None:
    """Return the codec that calls of a kind name; None for "".

    Raises
    ------
    ProtocolError
        For a kind that no codec is for.
    ValueError
        If no run has told of it here.
    """
    if not name:
        return None
    if kind not in (NOTHING, GRADIENT):
        raise errors.ProtocolError(f"a {kind} in words of a codec")
    return codecs.named(name)


def dtype_of_item(piece: Piece, kind: str) -> str:
    """Return of which dtype the numbers are that go to a piece."""
    dtype = piece.parameter.dtype
    return compute_dtype(dtype) if kind in (GRADIENT, MODEL) else dtype


def piece_at(layout: Layout, shard: int, position: Any) -> Piece:
    """Return a piece of a shard, or refuse a position that has none."""
    pieces = layout.pieces[shard]
    if type(position) is not int or not 0 <= position < len(pieces):
        raise errors.PushRejectedError(
            f"piece {position!r:.60} of the {len(pieces)} pieces of shard {shard}"
        )
    return pieces[position]


def _dtype_sent(
    layout: Layout, shard: int, row: Sequence[Any], *, kind: str, codec: Codec | None
) -> str:
    """Return the dtype in which an array travels to a piece.

    Raises
    ------
    PushRejectedError
        For an array that does not fit its piece.
    """
    position, start, n = row
    piece = piece_at(layout, shard, position)
    fits = type(start) is type(n) is int
    if codec:
        fits = fits and start == 0
        fits = fits and (
            n == COUNTED or (n >= 0 and codec.fits(n, piece.size, piece.start))
        )
    else:
        fits = fits and 0 <= start <= start + n <= piece.size
    if not fits:
        raise errors.PushRejectedError(
            f"{n!r:.60} elements or words at {start!r:.60} do not fit the {piece.size} "
            f"elements of parameter {piece.parameter.name!r} in shard {shard}"
        )
    return codec.dtype if codec else dtype_of_item(piece, kind)


def _range(layout: Layout, shard: int, packed: Range) -> Range:
    dtype, start, stop = packed
    if dtype in layout.lengths and type(start) is type(stop) is int:
        n = layout.n_elements[shard][dtype]
        if 0 <= start <= stop <= n:
            return dtype, start, stop
    raise errors.ProtocolError(
        f"a read of elements {start} to {stop} of the {dtype} values of shard {shard}, "
        f"which it does not hold"
    )


def pack_answers(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the answers of a host as its reply."""
    rows = []
    for shard, error, *said, arrays in answers:
        packed = None if error is None else pack_error(error)
        rows.append([shard, packed, *said, [pack_array(x) for x in arrays if x.size]])
    return {"status": "OK", "value": rows}


def unpack_answers(
    reply: Any, where: str, dtypes: Mapping[int, Sequence[str]]
) -> list[Answer]:
    """Rebuild the answers of shards; anything but an acknowledgement raises.

    Parameters
    ----------
    reply : object
        The reply of the host.
    where : str
        The host, for errors.
    dtypes : mapping of int to sequence of str
        By shard the dtypes of the arrays that are read, but for those without elements.
    """
    found = []
    for shard, packed, *said, rows in unpack_reply(reply, where):
        error = None if packed is None else unpack_error(packed)
        arrays = tuple(map(unpack_array, rows, dtypes[shard]))
        found.append(Answer._make((shard, error, *said, arrays)))
    return found


def in_words(
    answers: Sequence[Answer], parts: Sequence[Part], empty: Empty = np.empty
) -> list[Answer]:
    """Return answers to parts with words for what travels in words."""
    asked = {part.shard: part.words for part in parts}
    return [
        answer._replace(arrays=encoded(answer.arrays, asked[answer.shard], empty))
        for answer in answers
    ]
