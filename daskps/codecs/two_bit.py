"""Gradients in 2 bits: up, down, or not yet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from daskps.codecs.base import Encoded, positive, refuse_words
from daskps.codecs.feedback import Feedback, before
from daskps.kernels import quantised

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.typing import Array


@dataclass(frozen=True)
class TwoBit(Feedback):
    """Send `threshold` where a number has reached it, `-threshold`, or nothing.

    The rest is added to the trainer's next gradient, and so is the excess of a number
    over the threshold: this is MXNet's 2-bit compression (after Strom, "Scalable
    Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015).
    Four numbers are a byte.

    Parameters
    ----------
    threshold : float
        The value that is sent; about as large as a typical gradient.

    Examples
    --------
    >>> codec, given = daskps.codecs.TwoBit(0.5), np.array([0.6, -2.0, 0.4])
    >>> words, out = np.empty(codec.n_words(3), codec.dtype), np.empty(3)
    >>> codec.encode(given, words)
    True
    >>> codec.decode(words, out)
    >>> out
    array([ 0.5, -0.5,  0. ])
    """

    _loops: ClassVar[tuple[str, ...]] = ("two_bit", "two_bit_back")

    threshold: float

    def __post_init__(self) -> None:
        positive(self.threshold, "threshold")

    @property
    def name(self) -> str:
        """Its name in messages."""
        return "2bit"

    def n_words(self, n: int) -> int:
        """Return how many bytes `n` numbers become.

        Parameters
        ----------
        n : int
            How many numbers.

        Returns
        -------
        int
            One for four, and for what is left.
        """
        return -(-n // 4)

    def encode_pieces(
        self,
        array: Array,
        cuts: Sequence[tuple[int, int]],
        residual: Array | None = None,
        *,
        empty: Callable[..., Array] = np.empty,
        cache_dir: str | None = None,
    ) -> Encoded:
        """Encode the pieces one after the other."""
        encode = quantised.loop("two_bit", array.dtype, cache_dir)
        kept, left = before(residual, array), empty(len(array), array.dtype)
        step = array.dtype.type(self.threshold)
        found, finite = [], True
        for a, b in cuts:
            words = empty(self.n_words(b - a), self.dtype)
            finite &= bool(encode(array[a:b], kept[a:b], left[a:b], words, step))
            found.append(words)
        return Encoded(found, left, finite)

    def decode_piece(
        self, words: Array, out: Array, start: int = 0, *, cache_dir: str | None = None
    ) -> None:
        """Decode a piece, wherever it begins."""
        if not self.fits(len(words), len(out)):
            refuse_words(self, words, out)
        if len(out):
            back = quantised.loop("two_bit_back", out.dtype, cache_dir)
            back(words, out, _table(self.threshold, out.dtype.name))


@lru_cache(64)
def _table(threshold: float, dtype: str) -> Array:
    """Return the four numbers that each byte stands for."""
    codes = np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3
    table: Array = np.array([0, threshold, -threshold, 0], dtype)[codes].reshape(-1)
    return table
