"""What shards say back to a call, in numbers or in the words of a codec."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps import errors
from daskps.cluster.wire.packing import (
    pack_array,
    pack_error,
    unpack_array,
    unpack_error,
    unpack_reply,
)
from daskps.cluster.wire.read_words import encoded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.wire.messages import Call, Part
    from daskps.cluster.wire.read_words import ReadWords
    from daskps.reduction import Empty
    from daskps.typing import Array


class Answer(NamedTuple):
    """What one shard says back."""

    shard: int
    error: Exception | None = None
    #: The wait is not over; `applied` says whether the arrays were accepted.
    parked: bool = False
    applied: bool = True
    version: int = 0
    lag: int = 0
    arrays: tuple[Array, ...] = ()


def pack_answers(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the answers of a host as its reply."""
    rows = []
    for shard, error, *said, arrays in answers:
        packed = None if error is None else pack_error(error)
        rows.append([shard, packed, *said, [pack_array(x) for x in arrays]])
    return {"status": "OK", "value": rows}


def unpack_answers(reply: Any, where: str, call: Call) -> list[Answer]:
    """Rebuild the answers to `call`; anything but an acknowledgement raises."""
    found = []
    asked = {p.shard: [*zip_longest(p.answered, p.words)] for p in call.parts}
    for shard, packed, *said, rows in unpack_reply(reply, where):
        error = None if packed is None else unpack_error(packed)
        arrays = tuple(
            unpack_array(data, dtype) if words is None else _unpack_read(data, words)
            for data, ((dtype, _), words) in zip(rows, asked[shard], strict=False)
        )
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


def _unpack_read(data: Any, how: ReadWords) -> Array:
    """Rebuild an array of an answer that has come in words."""
    words, out = unpack_array(data, how.codec.dtype), np.empty(how.n, how.dtype)
    if len(words) != how.n_words:
        raise errors.ProtocolError(
            f"an answer of {len(words):,} words of codec={how.codec.name!r}, which makes "
            f"{how.n_words:,} of {how.n:,} numbers"
        )
    how.decode(words, out)
    return out
