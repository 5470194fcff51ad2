"""Rounding to numbers of 16 bits and back, block by block where they are float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from daskps.kernels.compiled import module_of

if TYPE_CHECKING:
    from daskps.typing import Array

#: The dtype of the word that holds one number.
WORD: Final = "uint16"
#: Elements that float64 is narrowed to or widened from at a time.
_BLOCK = 16_384


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
                odd(wide, found, bits)
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
