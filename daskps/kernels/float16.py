"""Rounding to IEEE float16 and back: 5 bits of exponent and 11 of precision.

Numba knows no float16 on CPUs, and NumPy converts one at a time. Here it is done with
the bits of a float32, many at once.
"""

from __future__ import annotations

from typing import Final

from daskps.kernels.halves import WORD, Half
from daskps.kernels.source import module_source

__all__ = ["HALF", "WORD", "decode", "encode", "warm"]

_LOOPS: Final = """\
U, F = np.uint32, np.float32
MAGNITUDE, INFINITY = U(0x7FFFFFFF), U(0x7F800000)
ONE, THIRTEEN, SIXTEEN = U(1), U(13), U(16)
# Of float16: infinity, a NaN, and the bits without the sign.
TOP, NAN, HALF = U(0x7C00), U(0x7E00), U(0x7FFF)
# As float32: the smallest normal float16, what is above all of them, and by how much
# their exponents differ, shifted.
NORMAL, ABOVE, REBASE = U(0x38800000), U(0x47800000), U(0x38000000)
# Adding it leaves no bits behind the point.
WHOLE, LEAST = F(2.0**23), F(2.0**24)
LIMIT, UNIT = F(2.0**-14), F(2.0**-24)
BLOCK = 1024


@njit(nogil=True, cache=CACHE)
def encode(a, numbers, out):
    bad = U(0)
    for i in range(a.size):
        bits = a[i]
        sign = U(U(bits >> SIXTEEN) & U(0x8000))
        size = U(bits & MAGNITUDE)
        word = U(U(size - REBASE + U(0xFFF) + U(U(size >> THIRTEEN) & ONE)) >> THIRTEEN)
        # Below the normal ones all have the same exponent: multiples of 2**-24.
        small = abs(numbers[i])
        small = small if small < LIMIT else LIMIT
        small = F(F(small * LEAST) + WHOLE) - WHOLE
        word = U(np.int32(small)) if size < NORMAL else word
        word = TOP if size >= ABOVE else word
        word = NAN if size > INFINITY else word
        out[i] = U(word | sign)
        bad |= U(word >= TOP)
    return bad == 0


@njit(nogil=True, cache=CACHE)
def odd(wide, narrow, bits):
    # Rounded to odd: the last bit of a float32 says that there was more of a float64.
    # So it is no tie, and rounds as that would.
    for i in range(wide.size):
        near = np.float64(narrow[i])
        if near != wide[i] and near == near:
            if abs(near) > abs(wide[i]):
                bits[i] -= ONE
            bits[i] |= ONE


@njit(nogil=True, cache=CACHE)
def decode(words, out, numbers):
    # Slices: with indices from somewhere on it would be one number at a time.
    for start in range(0, words.size, BLOCK):
        some = words[start : start + BLOCK]
        bits_of, found = out[start : start + BLOCK], numbers[start : start + BLOCK]
        for i in range(some.size):
            word = U(some[i])
            size = U(word & HALF)
            bits = U(U(size << THIRTEEN) + REBASE)
            bits = U(bits + REBASE) if size >= TOP else bits
            bits_of[i] = U(bits | U(U(word & U(0x8000)) << SIXTEEN))
        # Bits cannot say the smallest ones in the same way: without the first one.
        for i in range(some.size):
            word = U(some[i])
            size = U(word & HALF)
            small = F(np.int32(size)) * UNIT
            small = -small if word != size else small
            found[i] = small if size < U(0x400) else found[i]


SIGNATURES["encode"] = read(types.uint32), read(types.float32), write(types.uint16)
SIGNATURES["odd"] = read(types.float64), read(types.float32), write(types.uint32)
SIGNATURES["decode"] = read(types.uint16), write(types.uint32), write(types.float32)
"""

#: The format, and its loops.
HALF: Final = Half("float16", module_source(_LOOPS))
encode, decode, warm = HALF.encode, HALF.decode, HALF.warm
