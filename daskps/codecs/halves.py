"""Gradients of 16 bits a number: bfloat16 has more range, IEEE float16 more precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from daskps.codecs.base import Codec, Encoded
from daskps.kernels.halves import BFLOAT16, FLOAT16, Half

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.typing import Array


class Elementwise(Codec):
    """A codec of 16 bits for each number; nothing is left over for the next gradient."""

    dtype: ClassVar[str] = "uint16"
    _half: ClassVar[Half]

    @property
    def _loop(self) -> str:
        """The loop that rounds."""
        return "encode"

    @property
    def is_fixed(self) -> bool:
        """Whether a piece becomes as many words each time: it does."""
        return True

    def n_words(self, n: int) -> int:
        """Return `n`: one word for each number.

        Parameters
        ----------
        n : int
            How many numbers.

        Returns
        -------
        int
            As many.
        """
        return n

    def encode(
        self, array: Array, words: Array, *, cache_dir: str | None = None
    ) -> bool:
        """Round an array.

        Parameters
        ----------
        array : ndarray, float32 or float64, shape (n,)
            Contiguous.
        words : ndarray, uint16, shape (n,)
            Takes the words. NaN stays NaN; what is too large becomes infinity.
        cache_dir : str, optional
            Where compiled loops are kept; None for in memory.

        Returns
        -------
        bool
            Whether all of them are finite.

        Raises
        ------
        TypeError, ValueError
            For another dtype, for arrays that are no contiguous vectors of the same
            length, and where `words` is read-only. Nothing has been written.
        """
        return self._half.encode(array, words, loop=self._loop, cache_dir=cache_dir)

    def decode(self, words: Array, out: Array, *, cache_dir: str | None = None) -> None:
        """Widen words, which loses nothing.

        Parameters
        ----------
        words : ndarray, uint16, shape (n,)
            Contiguous.
        out : ndarray, float32 or float64, shape (n,)
            Takes the numbers.
        cache_dir : str, optional
            Where compiled loops are kept; None for in memory.

        Raises
        ------
        TypeError, ValueError
            As :meth:`encode`; `out` is what must not be read-only.
        """
        self._half.decode(words, out, cache_dir=cache_dir)

    def fits(self, n_words: int, n: int, start: int = 0) -> bool:
        """Return whether there is one for each."""
        return n_words == n

    def encode_pieces(
        self,
        array: Array,
        cuts: Sequence[tuple[int, int]],
        residual: Array | None = None,
        *,
        empty: Callable[..., Array] = np.empty,
        cache_dir: str | None = None,
    ) -> Encoded:
        """Round all of an array, and cut the words."""
        del residual
        words = empty(len(array), self.dtype)
        finite = self.encode(array, words, cache_dir=cache_dir)
        return Encoded([words[a:b] for a, b in cuts], None, finite)

    def decode_piece(
        self, words: Array, out: Array, start: int = 0, *, cache_dir: str | None = None
    ) -> None:
        """Widen the words of a piece."""
        del start
        self.decode(words, out, cache_dir=cache_dir)

    def warm(self, *, cache_dir: str | None = None) -> None:
        """Compile what there is to compile.

        Parameters
        ----------
        cache_dir : str, optional
            Where compiled loops are kept; None for in memory.
        """
        self._half.warm(loop=self._loop, cache_dir=cache_dir)


@dataclass(frozen=True)
class BFloat16(Elementwise):
    """Round each number to the nearest bfloat16, half-way ones to the even one.

    A bfloat16 is the upper half of a float32: 8 bits of exponent and 8 of precision,
    the hidden one included. The relative error is at most 2**-8, or about 0.4 %.

    Parameters
    ----------
    truncate : bool
        Leave the lower half out instead of rounding, after a float64 was rounded to
        float32: the relative error is below 2**-7, and always towards zero.

    Examples
    --------
    >>> codec = daskps.codecs.BFloat16()
    >>> words = np.empty(3, codec.dtype)
    >>> codec.encode(np.array([1.0, 1.111111, 3.4e38], "f4"), words)
    False
    >>> out = np.empty(3, "f4")
    >>> codec.decode(words, out)
    >>> out
    array([1.      , 1.109375,      inf], dtype=float32)
    """

    _half: ClassVar[Half] = BFLOAT16

    truncate: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.truncate, bool):
            raise TypeError(f"truncate is True or False, found {self.truncate!r:.60}")

    @property
    def name(self) -> str:
        """Its name in messages."""
        return "bf16-truncated" if self.truncate else "bf16"

    @property
    def _loop(self) -> str:
        """The loop that rounds."""
        return "truncate" if self.truncate else "encode"


@dataclass(frozen=True)
class Float16(Elementwise):
    """Round each number to the nearest float16, half-way ones to the even one.

    A float16 has 5 bits of exponent and 11 of precision, the hidden one included. From
    6.1e-5 to 65,504 the relative error is at most 2**-11, or about 0.05 %; smaller
    numbers are multiples of 2**-24. From 65,520 on a gradient is refused.

    Examples
    --------
    >>> codec = daskps.codecs.Float16()
    >>> words = np.empty(3, codec.dtype)
    >>> codec.encode(np.array([1.0, 1.111111, 65520.0], "f4"), words)
    False
    >>> out = np.empty(3, "f4")
    >>> codec.decode(words, out)
    >>> out
    array([1.       , 1.1113281,       inf], dtype=float32)
    """

    _half: ClassVar[Half] = FLOAT16

    @property
    def name(self) -> str:
        """Its name in messages."""
        return "fp16"
