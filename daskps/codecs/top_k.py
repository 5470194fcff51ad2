"""The largest numbers of a gradient, and where they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from daskps.codecs.base import Encoded, positive, refuse_words
from daskps.codecs.feedback import Feedback
from daskps.kernels import quantised
from daskps.kernels.finite import finite as is_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.typing import Array


@dataclass(frozen=True)
class TopK(Feedback):
    """Send those numbers of a parameter that are furthest from 0, as they are.

    The rest is added to the trainer's next gradient (Aji and Heafield, "Sparse
    Communication for Distributed Gradient Descent", EMNLP 2017). Each number that is
    sent takes its own bytes and 4 for its place. Of equal ones the first go, and 0
    never does.

    Parameters
    ----------
    ratio : float, optional
        The share of the numbers of each parameter that goes, above 0 and at most 1; at
        least one number does.
    threshold : float, optional
        From which absolute value on they go. Give one of the two.

    Examples
    --------
    >>> codec, given = daskps.codecs.TopK(ratio=0.5), np.array([1.0, -3.0, 0.0, 2.0])
    >>> [words], left, _ = codec.encode_pieces(given, [(0, 4)])
    >>> out = np.empty(4)
    >>> codec.decode(words, out)
    >>> out, left
    (array([ 0., -3.,  0.,  2.]), array([1., 0., 0., 0.]))
    """

    dtype: ClassVar[str] = "uint32"
    _loops: ClassVar[tuple[str, ...]] = ("select", "count")

    ratio: float | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        if (self.ratio is None) is (self.threshold is None):
            raise ValueError(
                f"TopK takes ratio= or threshold=, found ratio={self.ratio!r:.60} and "
                f"threshold={self.threshold!r:.60}"
            )
        if self.threshold is not None:
            positive(self.threshold, "threshold")
        elif positive(self.ratio, "ratio") > 1:
            raise ValueError(f"ratio is above 0 and at most 1, found {self.ratio}")

    @property
    def name(self) -> str:
        """Its name in messages."""
        return "topk"

    @property
    def is_fixed(self) -> bool:
        """Whether a piece becomes as many words each time: it does not."""
        return False

    def fits(self, n_words: int, n: int, start: int = 0) -> bool:
        """Return whether `n` numbers may be so many words."""
        return n_words <= 3 * n

    def encode_pieces(
        self,
        array: Array,
        cuts: Sequence[tuple[int, int]],
        residual: Array | None = None,
        *,
        empty: Callable[..., Array] = np.empty,
        cache_dir: str | None = None,
    ) -> Encoded:
        """Choose among all numbers of an array, and give each piece its own."""
        left = empty(len(array), array.dtype)
        np.add(array, 0 if residual is None else residual, out=left)
        if not is_finite(left, cache_dir=cache_dir):
            return Encoded([np.empty(0, self.dtype)] * len(cuts), left, finite=False)
        n, bound, ties = self._bound(left, cache_dir)
        indices, values = np.empty(n, np.int64), np.empty(n, array.dtype)
        select = quantised.loop("select", array.dtype, cache_dir)
        n = select(left, bound, ties, indices, values)
        indices, values = indices[:n], values[:n]
        found = []
        for (a, _), first, last in zip(
            cuts,
            *np.searchsorted(indices, np.array(cuts).reshape(-1, 2).T),
            strict=True,
        ):
            places = (indices[first:last] - a).astype(self.dtype)
            found.append(np.concatenate([places, values[first:last].view(self.dtype)]))
        return Encoded(found, left)

    def _bound(self, total: Array, cache_dir: str | None) -> tuple[int, float, int]:
        """Return how many go at most, the least of them, and how many equal to it."""
        if self.threshold is not None:
            least = total.dtype.type(self.threshold)
            n = quantised.loop("count", total.dtype, cache_dir)(total, least)
            return n, least, n
        assert self.ratio is not None
        n = max(1, math.ceil(self.ratio * len(total)))
        sizes = np.abs(total)
        sizes.partition(len(sizes) - n)
        largest = sizes[len(sizes) - n :]
        least = largest[0]
        ties = n - int(np.count_nonzero(largest > least)) if least else 0
        return n, least, ties

    def decode_piece(
        self, words: Array, out: Array, start: int = 0, *, cache_dir: str | None = None
    ) -> None:
        """Decode a piece: 0 where nothing was sent."""
        n, rest = divmod(len(words), 1 + out.dtype.itemsize // words.dtype.itemsize)
        places = words[:n]
        if rest or (n and places.max() >= len(out)):
            refuse_words(self, words, out)
        out[:] = 0
        out[places] = words[n:].view(out.dtype)
