"""Codecs that make one word of each number, whatever the others are."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from daskps.codecs.base import Codec, Encoded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.kernels.halves import Half
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
