"""The arrays of an answer that travel in words of a codec, and how many words.

Both ends know that before anything is read, so a socket can say how long an answer is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from daskps import codecs
from daskps.config import cache_dir
from daskps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.protocol.row_messages import RowRequest
    from daskps.codecs import Codec
    from daskps.reduction import Empty
    from daskps.typing import Array

#: Dtypes of weights that a codec may round on their way.
CODED: Final = ("float32", "float64")


class ReadWords(NamedTuple):
    """How one array of an answer travels in words."""

    codec: Codec
    #: Of the numbers, and how many.
    dtype: str
    n: int
    #: How many words they become.
    n_words: int

    @property
    def nbytes(self) -> int:
        """Bytes of the words."""
        return self.n_words * np.dtype(self.codec.dtype).itemsize

    def encoded(self, array: Array, empty: Empty = np.empty) -> Array:
        """Return the words of numbers, which may lie anywhere."""
        given, whole = np.require(array, requirements="A"), [(0, self.n)]
        [words] = self.codec.encode_pieces(
            given, whole, empty=empty, cache_dir=cache_dir()
        ).words
        return words

    def decode(self, words: Array, out: Array) -> None:
        """Put the numbers that words stand for where they belong."""
        self.codec.decode_piece(words, out, cache_dir=cache_dir())


def read_codec_of(name: str) -> Codec:
    """Return the codec of answers that calls name so.

    Raises
    ------
    ProtocolError
        For one whose words weights do not travel in.
    ValueError
        If no run has told of it here.
    """
    codec = codecs.named(name)
    if not codecs.is_plain(codec):
        raise ProtocolError(f"an answer in words of {name!r:.60}")
    return codec


def words_of(
    codec: Codec, ranges: Sequence[tuple[str, int, int]], rows: Sequence[RowRequest]
) -> tuple[ReadWords | None, ...]:
    """Return how each array of a shard's answer travels; None as it is.

    Parameters
    ----------
    codec : Codec
        The codec in whose words weights travel.
    ranges : sequence of Range
        The elements that are read of its arrays.
    rows : sequence of RowRequest
        The rows that are read of its tables.
    """
    asked = [(dtype, stop - start) for dtype, start, stop in ranges]
    asked += [(one.dtype, len(one.ids) * one.dim) for one in rows]
    found = [
        ReadWords(codec, dtype, n, codec.n_words(n)) if dtype in CODED and n else None
        for dtype, n in asked
    ]
    # Marks of rows that may be absent travel as they are.
    return (*found, *(None for one in rows if one.is_marked))


def encoded(
    arrays: Sequence[Array],
    how: Sequence[ReadWords | None],
    empty: Empty = np.empty,
) -> tuple[Array, ...]:
    """Return what travels of the arrays of an answer: none of a shard that waits."""
    return tuple(
        [
            array if words is None else words.encoded(array, empty)
            for array, words in zip(arrays, how, strict=False)
        ]
    )
