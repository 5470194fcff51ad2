"""The base of codecs that leave something over for the next gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from daskps.codecs.base import Codec
from daskps.kernels import quantised

if TYPE_CHECKING:
    from daskps.typing import Array


class Feedback(Codec):
    """A codec with compiled loops whose words do not say all of a gradient.

    The rest is added to the trainer's next gradient (Stich, Cordonnier and Jaggi,
    "Sparsified SGD with Memory", NeurIPS 2018; Karimireddy et al., "Error Feedback
    Fixes SignSGD", ICML 2019).
    """

    feedback: ClassVar[bool] = True
    #: The loops that it uses.
    _loops: ClassVar[tuple[str, ...]] = ()

    @property
    def is_fixed(self) -> bool:
        """Whether a piece becomes as many words each time."""
        return True

    def n_words(self, n: int) -> int:
        """Return how many words `n` numbers become.

        Parameters
        ----------
        n : int
            How many numbers.

        Returns
        -------
        int
            Words.
        """
        raise NotImplementedError

    def encode(self, array: Array, words: Array) -> bool:
        """Make words, without what was left over before.

        Parameters
        ----------
        array : ndarray, float32 or float64, shape (n,)
            The numbers.
        words : ndarray, shape (n_words(n),)
            Takes the words.

        Returns
        -------
        bool
            Whether all that they stand for is finite.
        """
        made = self.encode_pieces(array, [(0, len(array))])
        words[:] = made.words[0]
        return made.finite

    def decode(self, words: Array, out: Array) -> None:
        """Make numbers of words again.

        Parameters
        ----------
        words : ndarray
            The words.
        out : ndarray, float32 or float64, shape (n,)
            Takes the numbers.
        """
        self.decode_piece(words, out)

    def warm(self, *, cache_dir: str | None = None) -> None:
        """Compile what there is to compile.

        Parameters
        ----------
        cache_dir : str, optional
            Where compiled loops are kept; None for in memory.
        """
        for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
            for name in self._loops:
                quantised.loop(name, dtype, cache_dir)


def before(residual: Array | None, array: Array) -> Array:
    """Return what was left over of the gradients before: nothing at first."""
    return np.zeros_like(array) if residual is None else residual
