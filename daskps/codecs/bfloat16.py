"""Gradients as bfloat16: the range of float32 in half the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from daskps.kernels import bfloat16

if TYPE_CHECKING:
    from daskps.typing import Array


@dataclass(frozen=True)
class BFloat16:
    """Round each element to the nearest bfloat16, half-way ones to the even one.

    A bfloat16 is the upper half of a float32: 8 bits of exponent and 8 of precision,
    the hidden one included. The relative error is at most 2**-8, or about 0.4 %.

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

    #: What `train` and `run` take for it.
    name: ClassVar[str] = "bf16"
    #: Of the words that travel, one for each element.
    dtype: ClassVar[str] = bfloat16.WORD

    def encode(
        self, array: Array, words: Array, *, cache_dir: str | None = None
    ) -> bool:
        """Round an array.

        Parameters
        ----------
        array : ndarray, float32 or float64, shape (n,)
            Contiguous; float64 is rounded once.
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
        return bfloat16.encode(array, words, cache_dir=cache_dir)

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
        bfloat16.decode(words, out, cache_dir=cache_dir)

    def warm(self, *, cache_dir: str | None = None) -> None:
        """Compile what there is to compile.

        Parameters
        ----------
        cache_dir : str, optional
            Where compiled loops are kept; None for in memory.
        """
        bfloat16.warm(cache_dir=cache_dir)
