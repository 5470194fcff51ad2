"""Gradients as bfloat16: the range of float32 in half the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from daskps.codecs.elementwise import Elementwise
from daskps.kernels.halves import BFLOAT16, Half


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
