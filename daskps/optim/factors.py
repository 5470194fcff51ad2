"""The factor of all learning rates of a store, as a word of its records."""

from __future__ import annotations

import struct


def to_word(factor: float) -> int:
    """Return the word of a factor: the bits of a float64, so turned that 1.0 is 0."""
    return _bits(factor) ^ _bits(1.0)


def of_word(word: int) -> float:
    """Return the factor of a word."""
    (found,) = struct.unpack("<d", struct.pack("<q", word ^ _bits(1.0)))
    return float(found)


def _bits(number: float) -> int:
    (found,) = struct.unpack("<q", struct.pack("<d", number))
    return int(found)
