"""Gradients as IEEE float16: more precision than bfloat16, and less range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from daskps.codecs.elementwise import Elementwise
from daskps.kernels.halves import FLOAT16, Half


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
