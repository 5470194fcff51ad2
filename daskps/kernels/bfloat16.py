"""Rounding to bfloat16 and back: the upper half of a float32, as an unsigned word."""

from __future__ import annotations

from typing import Final

from daskps.kernels.halves import WORD, Half
from daskps.kernels.source import module_source

__all__ = ["HALF", "WORD", "decode", "encode", "warm"]

_LOOPS: Final = """\
U = np.uint32
MAGNITUDE, INFINITY = U(0x7FFFFFFF), U(0x7F800000)
HALF, ONE, SIXTEEN, QUIET = U(0x7FFF), U(1), U(16), U(0x40)
LOW, TIE = U(0xFFFF), U(0x8000)


@njit(nogil=True, cache=CACHE)
def encode(a, numbers, out):
    bad = U(0)
    for i in range(a.size):
        bits = a[i]
        high = U(bits >> SIXTEEN)
        word = U(U(bits + HALF + U(high & ONE)) >> SIXTEEN)
        # Adding would carry a NaN into another number.
        word = U(high | QUIET) if U(bits & MAGNITUDE) > INFINITY else word
        out[i] = word
        bad |= U(U(word & HALF) >= U(INFINITY >> SIXTEEN))
    return bad == 0


@njit(nogil=True, cache=CACHE)
def truncate(a, numbers, out):
    bad = U(0)
    for i in range(a.size):
        bits = a[i]
        word = U(bits >> SIXTEEN)
        # The bits that make it a NaN may all be in the lower half.
        word = U(word | QUIET) if U(bits & MAGNITUDE) > INFINITY else word
        out[i] = word
        bad |= U(U(word & HALF) >= U(INFINITY >> SIXTEEN))
    return bad == 0


@njit(nogil=True, cache=CACHE)
def odd(wide, narrow, bits):
    # Where the float32 next to a float64 lies half-way between two words, but the
    # float64 does not, a neighbour says on which side it is.
    for i in range(wide.size):
        if U(bits[i] & LOW) == TIE and np.float64(narrow[i]) != wide[i]:
            if abs(np.float64(narrow[i])) > abs(wide[i]):
                bits[i] -= ONE
            else:
                bits[i] += ONE


@njit(nogil=True, cache=CACHE)
def decode(words, out, numbers):
    for i in range(words.size):
        out[i] = U(U(words[i]) << SIXTEEN)


SIGNATURES["encode"] = read(types.uint32), read(types.float32), write(types.uint16)
SIGNATURES["truncate"] = SIGNATURES["encode"]
SIGNATURES["odd"] = read(types.float64), read(types.float32), write(types.uint32)
SIGNATURES["decode"] = read(types.uint16), write(types.uint32), write(types.float32)
"""

#: The format, and its loops.
HALF: Final = Half("bfloat16", module_source(_LOOPS))
encode, decode, warm = HALF.encode, HALF.decode, HALF.warm
