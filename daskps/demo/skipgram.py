"""Skip-gram with negative sampling: which rows a batch is about, and their gradients.

Mikolov, Sutskever, Chen, Corrado and Dean, "Distributed Representations of Words and
Phrases and their Compositionality", 2013 (arXiv:1310.4546). As in Ji, Satish, Li and Dubey,
"Parallelizing Word2Vec in Shared and Distributed Memory", 2016 (arXiv:1604.04661), all words
of a batch share its negative samples, and the products of vectors are matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from daskps.typing import Array

#: The two tables: the vectors of words, and those of words that are around others.
WORDS, CONTEXTS = "words", "contexts"
#: Negative samples for each true pair; the paper has 2 to 20.
NEGATIVES = 2.0
#: Negative samples that a batch draws, and all of its pairs share.
N_DRAWN = 128


def middle(X: Array) -> Array:
    """Return the word of each window."""
    return X[:, X.shape[1] // 2]


@dataclass(frozen=True)
class Contexts:
    """Gives the ids of the words around those of a batch, and draws negative samples.

    Attributes
    ----------
    ids : ndarray of int64, shape (n_words,)
        The id of each word.
    cumulative : ndarray, shape (n_words,)
        Chances that one of the first words is drawn, the last of them 1.
    """

    ids: Array
    cumulative: Array

    @classmethod
    def of(cls, ids: Array, counts: Array) -> Contexts:
        """Draw words by their counts to the power of 3/4, as the paper does."""
        weights = np.cumsum(counts**0.75)
        return cls(ids, weights / weights[-1])

    def __call__(self, X: Array, rng: np.random.Generator) -> Array:
        """Return ids: the windows' without their middle, one by one, then those drawn."""
        around = np.delete(X, X.shape[1] // 2, axis=1)
        drawn = np.searchsorted(self.cumulative, rng.random(N_DRAWN), side="right")
        return np.concatenate([around.ravel(), self.ids[drawn]])


def gradient(
    params: dict[str, Array], X: Array, y: None
) -> tuple[float, dict[str, Array]]:
    """Return the mean loss of a batch, and its gradients for the rows it is about.

    A word's loss is the sum of ``-log(sigmoid(u @ v))`` over the words around it and, for
    each of these, that of ``-log(sigmoid(-u @ v))`` over `NEGATIVES` negative samples, taken
    as the mean over all that the batch has drawn.

    Parameters
    ----------
    params : dict of str to ndarray
        `WORDS`, shape (n, dim), and `CONTEXTS`, shape (n * n_around + N_DRAWN, dim).
    X : ndarray, shape (n, n_around + 1)
        The windows.
    y : None
        There are no labels.

    Returns
    -------
    float, dict of str to ndarray
        The loss, and the gradients in the shapes of `params`.
    """
    u, v = params[WORDS], params[CONTEXTS]
    n, n_around = len(X), X.shape[1] - 1
    around, drawn = v[: n * n_around].reshape(n, n_around, -1), v[n * n_around :]
    near = np.einsum("nd,nkd->nk", u, around)
    far = u @ drawn.T
    each = NEGATIVES * n_around / len(drawn)
    near_loss, near_slope = _loss_and_slope(-near)
    far_loss, far_slope = _loss_and_slope(far)
    loss = near_loss.sum() + each * far_loss.sum()
    near_slope *= -1.0 / n
    far_slope *= each / n
    of_u = np.einsum("nk,nkd->nd", near_slope, around) + far_slope @ drawn
    of_v = np.empty_like(v)
    of_around = of_v[: n * n_around].reshape(around.shape)
    np.multiply(near_slope[:, :, None], u[:, None], out=of_around)
    of_v[n * n_around :] = far_slope.T @ u
    return float(loss / n), {WORDS: of_u, CONTEXTS: of_v}


def _loss_and_slope(x: Array) -> tuple[Array, Array]:
    """Return ``log(1 + exp(x))`` and its slope, the sigmoid; neither overflows."""
    small = np.exp(-np.abs(x))
    slope = np.where(x < 0, small, 1.0) / (1.0 + small)
    # The logarithm has vector instructions in NumPy; log1p has none, and what it would
    # keep is lost of the printed loss alone.
    return np.maximum(x, 0.0) + np.log(1.0 + small), slope
