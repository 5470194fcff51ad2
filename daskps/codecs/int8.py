"""Gradients in 8 bits, with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from daskps.codecs.base import Encoded, refuse_words
from daskps.codecs.feedback import Feedback, before
from daskps.kernels import quantised
from daskps.limits import MOST_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.typing import Array

#: Bytes of a scale.
_SCALE = 4


@dataclass(frozen=True)
class Int8(Feedback):
    """Send each number as a multiple of its block's scale, from -127 to 127.

    The scale of a block is its largest absolute value / 127, as a float32 (Dettmers, "8-Bit
    Approximations for Parallelism in Deep Learning", ICLR 2016). Blocks are of the
    parameter, so results do not depend on how many shards there are. The rest that
    rounding leaves over is added to the trainer's next gradient. Each row of a table is
    a block, of which nothing is left over.

    Parameters
    ----------
    block : int
        Numbers with one scale.

    Examples
    --------
    >>> codec = daskps.codecs.Int8()
    >>> given = np.array([1.0, -0.5, 0.001], "f4")
    >>> words, out = np.empty(codec.n_words(3), codec.dtype), np.empty(3, "f4")
    >>> codec.encode(given, words)
    True
    >>> codec.decode(words, out)
    >>> out.round(4)
    array([ 1.    , -0.5039,  0.    ], dtype=float32)
    """

    _loops: ClassVar[tuple[str, ...]] = ("int8", "int8_back")

    block: int = 256

    def __post_init__(self) -> None:
        given: object = self.block
        if isinstance(given, bool) or not isinstance(given, (int, np.integer)):
            raise TypeError(f"block is an int, found {given!r:.60}")
        if given < 1:
            raise ValueError(f"block is at least 1, found {given!r:.60}")
        if given > MOST_NBYTES:
            raise ValueError(
                f"block is at most the {MOST_NBYTES:,} bytes that a store may have, found "
                f"{given!r:.60}"
            )
        object.__setattr__(self, "block", int(given))

    @property
    def name(self) -> str:
        """Its name in messages."""
        return "int8"

    def n_words(self, n: int) -> int:
        """Return how many bytes `n` numbers from a block's start on become.

        Parameters
        ----------
        n : int
            How many numbers.

        Returns
        -------
        int
            One for each number, and four for each block.
        """
        return n + _SCALE * -(-n // self.block)

    def fits(self, n_words: int, n: int, start: int = 0) -> bool:
        """Return whether so many bytes are of `n` numbers, the first at `start`."""
        return n_words == n + _SCALE * self._n_blocks(start, start + n)

    @property
    def takes_rows(self) -> bool:
        """Whether gradients of rows go by it: they do, and what is left over is lost."""
        return True

    def of_rows(self, dim: int) -> Int8:
        """Return the codec of rows of so many numbers: each of them is a block."""
        return Int8(dim)

    def encode_pieces(
        self,
        array: Array,
        cuts: Sequence[tuple[int, int]],
        residual: Array | None = None,
        *,
        empty: Callable[..., Array] = np.empty,
        cache_dir: str | None = None,
    ) -> Encoded:
        """Encode all of an array, and give each piece the scales of its blocks."""
        n, block = len(array), self.block
        left, codes = empty(n, array.dtype), empty(n, "int8")
        scales = np.empty(-(-n // block), np.float32)
        one = np.zeros(1, array.dtype)
        finite = quantised.loop("int8", array.dtype, cache_dir)(
            array,
            before(residual, array),
            left,
            quantised.bits_of(left),
            codes,
            scales,
            quantised.bits_of(one),
            one,
            block,
        )
        found = []
        for a, b in cuts:
            mine = scales[a // block : -(-b // block)].view(np.uint8)
            words = empty(b - a + len(mine), self.dtype)
            words[: len(mine)] = mine
            words[len(mine) :] = codes[a:b].view(np.uint8)
            found.append(words)
        return Encoded(found, left, bool(finite))

    def decode_piece(
        self, words: Array, out: Array, start: int = 0, *, cache_dir: str | None = None
    ) -> None:
        """Decode the piece that begins at `start`, maybe within a block."""
        if not self.fits(len(words), len(out), start):
            refuse_words(self, words, out)
        n = _SCALE * self._n_blocks(start, start + len(out))
        back = quantised.loop("int8_back", out.dtype, cache_dir)
        first = self.block - start % self.block
        back(words[n:].view("int8"), words[:n].view("float32"), out, first, self.block)

    def _n_blocks(self, start: int, stop: int) -> int:
        """Return in how many blocks a piece has numbers."""
        return -(-stop // self.block) - start // self.block
