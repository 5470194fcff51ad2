"""Rounding to numbers of 16 bits and back, block by block where they are float64.

bfloat16 is the upper half of a float32. IEEE float16 has 5 bits of exponent and 11 of
precision: Numba knows none on CPUs, and NumPy converts one at a time. Here both are done with
the bits of a float32, many at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from daskps.kernels.compiled import module_of, module_source

if TYPE_CHECKING:
    from daskps.typing import Array

#: The dtype of the word that holds one number.
WORD: Final = "uint16"
#: Elements that float64 is narrowed to or widened from at a time.
_BLOCK = 16_384


#: The loops that both formats share.
_LOOPS: Final = """\
U, F = np.uint32, np.float32
MAGNITUDE, INFINITY = U(0x7FFFFFFF), U(0x7F800000)
ONE, THIRTEEN, SIXTEEN, HALF = U(1), U(13), U(16), U(0x7FFF)
READ, BITS, NUMBERS = read(types.uint32), write(types.uint32), write(types.float32)


@loop
def odd(wide: read(types.float64), bits: BITS):
    # Rounded to odd: the last bit of a float32 says that there was more of a float64.
    # So it is no tie, and rounds as that would.
    narrow = bits.view(np.float32)
    for i in range(wide.size):
        near, size = np.float64(narrow[i]), bits[i]
        less = U(size - ONE) if abs(near) > abs(wide[i]) else size
        bits[i] = U(less | ONE) if near != wide[i] and near == near else size
"""

_BFLOAT16: Final = """
QUIET = U(0x40)


@loop
def decode(words: read(types.uint16), out: BITS, numbers: NUMBERS):
    for i in range(words.size):
        out[i] = U(U(words[i]) << SIXTEEN)
"""
#: Of bfloat16, with the number whose upper half it is.
_ROUND: Final = """

@loop
def {name}(a: READ, numbers: read(types.float32), out: write(types.uint16)):
    bad = U(0)
    for i in range(a.size):
        bits = a[i]
        high = U(bits >> SIXTEEN)
        word = U({rounded} >> SIXTEEN)
        # Adding would carry a NaN into another number, and the bits that make it a NaN may
        # all be in the lower half.
        word = U(high | QUIET) if U(bits & MAGNITUDE) > INFINITY else word
        out[i] = word
        bad |= U(U(word & HALF) >= U(INFINITY >> SIXTEEN))
    return bad == 0
"""

_FLOAT16: Final = """
# Of float16: infinity and a NaN.
TOP, NAN = U(0x7C00), U(0x7E00)
# As float32: the smallest normal float16, what is above all of them, and by how much
# their exponents differ, shifted.
NORMAL, ABOVE, REBASE = U(0x38800000), U(0x47800000), U(0x38000000)
# Adding it leaves no bits behind the point.
WHOLE, LEAST = F(2.0**23), F(2.0**24)
LIMIT, UNIT = F(2.0**-14), F(2.0**-24)
BLOCK = 1024


@loop
def encode(a: READ, numbers: read(types.float32), out: write(types.uint16)):
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


@loop
def decode(words: read(types.uint16), out: BITS, numbers: NUMBERS):
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
"""


@dataclass(frozen=True)
class Half:
    """A format of 16 bits, and the module with its loops.

    Its `decode` widens words to float32, its `odd` makes of a float32 that was rounded
    from a float64 one that rounds as the float64 would.
    """

    #: In messages: bfloat16 or float16.
    name: str
    source: str

    def encode(
        self,
        a: Array,
        out: Array,
        *,
        loop: str = "encode",
        cache_dir: str | None = None,
    ) -> bool:
        """Round numbers.

        Parameters
        ----------
        a : ndarray, float32 or float64, shape (n,)
            Contiguous. float64 is rounded once, not by way of a rounded float32.
        out : ndarray, uint16, shape (n,)
            Takes the words. NaN stays NaN; what is too large becomes infinity.
        loop : str
            The loop of the module that rounds: "encode" to the nearest, of two equally
            near ones to the even one. Another one gets what is next to a float64.
        cache_dir : str, optional
            Where the compiled loops are kept, as in `build`.

        Returns
        -------
        bool
            True iff every word stands for a finite number.

        Raises
        ------
        TypeError
            For another dtype.
        ValueError
            Where they are no contiguous vectors of the same length, or `out` is
            read-only.
        """
        self._check(a, out, out)
        module = module_of(self.source, cache_dir)
        rounds = module.function(loop)
        if a.dtype == np.float32:
            return bool(rounds(a.view(np.uint32), a, out))
        odd = module.function("odd") if loop == "encode" else None
        finite = True
        narrow = np.empty(min(len(a), _BLOCK), np.float32)
        for start in range(0, len(a), _BLOCK):
            wide = a[start : start + _BLOCK]
            found = narrow[: len(wide)]
            bits = found.view(np.uint32)
            with np.errstate(over="ignore", invalid="ignore"):
                found[:] = wide
            if odd is not None:
                odd(wide, bits)
            finite &= bool(rounds(bits, found, out[start : start + _BLOCK]))
        return finite

    def decode(self, words: Array, out: Array, *, cache_dir: str | None = None) -> None:
        """Widen words to floats, which loses nothing.

        Parameters
        ----------
        words : ndarray, uint16, shape (n,)
            Contiguous; what :meth:`encode` made.
        out : ndarray, float32 or float64, shape (n,)
            Takes the numbers.
        cache_dir : str, optional
            Where the compiled loops are kept, as in `build`.

        Raises
        ------
        TypeError
            For another dtype.
        ValueError
            Where they are no contiguous vectors of the same length, or `out` is
            read-only.
        """
        self._check(out, words, out)
        widens = module_of(self.source, cache_dir).function("decode")
        if out.dtype == np.float32:
            widens(words, out.view(np.uint32), out)
            return
        narrow = np.empty(min(len(words), _BLOCK), np.float32)
        for start in range(0, len(words), _BLOCK):
            part = words[start : start + _BLOCK]
            found = narrow[: len(part)]
            widens(part, found.view(np.uint32), found)
            with np.errstate(invalid="ignore"):
                out[start : start + _BLOCK] = found

    def warm(self, *, loop: str = "encode", cache_dir: str | None = None) -> None:
        """Compile the loops, so that their first use finds them ready.

        Parameters
        ----------
        loop : str
            The loop that rounds.
        cache_dir : str, optional
            Where they are kept, as in `build`.
        """
        for name in {loop, "odd", "decode"}:
            module_of(self.source, cache_dir).function(name)

    def _check(self, numbers: Array, words: Array, out: Array) -> None:
        """Refuse what the loops, which look at no length, would run out of."""
        if numbers.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise TypeError(
                f"no {self.name} for {numbers.dtype}: use float32 or float64"
            )
        if words.dtype != np.dtype(WORD):
            raise TypeError(f"words of {self.name} are {WORD}, found {words.dtype}")
        if numbers.ndim != 1 or numbers.shape != words.shape:
            raise ValueError(
                f"{self.name} goes between vectors of one length, found numbers of "
                f"shape {numbers.shape} and words of shape {words.shape}; use "
                f"reshape(-1), and np.empty(len(numbers), {WORD!r})"
            )
        if not (numbers.flags.c_contiguous and words.flags.c_contiguous):
            raise ValueError(
                f"{self.name} needs contiguous arrays; use np.ascontiguousarray"
            )
        if not out.flags.writeable:
            raise ValueError(
                f"{self.name} cannot write to a read-only array; use np.empty"
            )


#: The formats.
BFLOAT16: Final = Half(
    "bfloat16",
    module_source(
        _LOOPS
        + _BFLOAT16
        + _ROUND.format(name="truncate", rounded="bits")
        + _ROUND.format(name="encode", rounded="U(bits + HALF + U(high & ONE))")
    ),
)
FLOAT16: Final = Half("float16", module_source(_LOOPS + _FLOAT16))
