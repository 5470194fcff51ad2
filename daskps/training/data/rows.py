"""Rows that a trainer sees, and their order: pure arithmetic over row numbers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from fractions import Fraction
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from daskps.limits import MOST_PARTS
from daskps.store.arguments import as_float32, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["SCHEMES", "batches", "partition", "rows", "split_batch"]

_Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]
#: Row numbers: a slice where they are regular, else an array.
Rows: TypeAlias = slice | _Numbers
_BALANCES = ("replicate", "subsample", "average")
#: Keeps these draws apart from the order of rows of the same rank.
_DRAW = 1
SCHEMES = ("contiguous", "round_robin", "random", "reshuffle")


def split_batch(n: int, weights: Sequence[float]) -> list[slice]:
    """Cut `n` rows into contiguous parts in proportion to weights.

    Part i gets ``n * weights[i] / sum(weights)`` rows rounded down; rows that are left
    go one each to the largest remainders, the lowest rank first among equals. The
    arithmetic is exact.

    Parameters
    ----------
    n : int
        Number of rows, at least 0.
    weights : sequence of float
        One finite number per part, at least 0, not all 0.

    Returns
    -------
    list of slice
        One slice per part, in order; together they cover all rows once. With fewer
        rows than parts some are empty.

    Raises
    ------
    ValueError
        If `n` or a weight is negative, no weight is above 0, or one is not finite.
    TypeError
        If `n` is no integer or a weight no number.

    Examples
    --------
    >>> split_batch(10, [1, 1, 2])
    [slice(0, 3, None), slice(3, 5, None), slice(5, 10, None)]
    """
    n = whole(n, "n", least=0)
    exact = [_weight(weight) for weight in weights]
    total = sum(exact)
    if total == 0:
        raise ValueError(f"{weights=}: at least one must be above 0")
    shares = [n * weight / total for weight in exact]
    counts = [share.numerator // share.denominator for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for i in order[: n - sum(counts)]:
        counts[i] += 1
    borders = itertools.accumulate(counts, initial=0)
    return [slice(a, b) for a, b in itertools.pairwise(borders)]


def rows(
    n: int,
    k: int,
    scheme: str = "contiguous",
    *,
    weights: Sequence[float] | None = None,
    seed: Any = None,
) -> list[Rows]:
    """Return which of `n` rows each of `k` parts gets; see `partition`."""
    n, k = whole(n, "n", least=0), whole(k, "k", least=1)
    if k > MOST_PARTS:
        raise ValueError(
            f"k must be at most {MOST_PARTS:,}, as many as a run may have parts, found "
            f"{k:,}"
        )
    if scheme not in SCHEMES:
        raise ValueError(f"{scheme=} is unknown; choose one of {', '.join(SCHEMES)}")
    if weights is not None and scheme in ("round_robin", "reshuffle"):
        raise ValueError(
            f"{weights=} have no meaning for {scheme=}; leave them out, or choose "
            f"contiguous or random"
        )
    if weights is not None and len(weights) != k:
        raise ValueError(f"{len(weights)} weights for {k} parts; give one per part")
    if scheme == "round_robin":
        return [slice(rank, n, k) for rank in range(k)]
    entropy = np.random.SeedSequence(seed).entropy
    if scheme == "reshuffle":
        return [_permutation(n, entropy, rank) for rank in range(k)]
    parts = split_batch(n, [1] * k if weights is None else weights)
    if scheme == "contiguous":
        return list(parts)
    order = _permutation(n, entropy)
    return [order[part] for part in parts]


def partition(
    X: Any,
    y: Any,
    k: int,
    *,
    scheme: str = "contiguous",
    weights: Sequence[float] | None = None,
    seed: int | None = None,
    balance: str | None = None,
) -> list[tuple[Any, Any]]:
    """Cut features and labels into `k` parts along their first axis.

    No row is lost, unless `balance` says so, and features stay beside their labels.
    Parts may be empty.

    Parameters
    ----------
    X : array_like, shape (n, ...)
        Features: an array, a data frame, a sparse matrix, a list of rows.
    y : array_like, shape (n, ...), or None
        Labels.
    k : int
        Number of parts, at least 1.
    scheme : {"contiguous", "round_robin", "random", "reshuffle"}
        Runs of rows; row i to part i mod k; runs of one permutation of the rows; or
        all rows to every part, each in its own order.
    weights : sequence of float, optional
        Relative sizes of the parts, see `split_batch`; by default they differ by one
        row at most. Only with "contiguous" and "random".
    seed : int, optional
        Seed of "random" and "reshuffle" (there of all parts' orders), and of `balance`,
        at least 0. By default another one at each call. Nothing else is random.
    balance : {"replicate", "subsample", "average"}, optional
        Gives all parts as many rows as the largest has, by repeats; as the smallest, by
        leaving some out; or as they have on average. Repeats follow the rows of the
        part, and each row is there as often as the others but for one.

    Returns
    -------
    list of tuple
        ``(X_i, y_i)`` for each part; `y_i` is None where `y` is. Where NumPy can give
        a view, it is one.

    Raises
    ------
    ValueError
        If `X` and `y` differ in length or, as tables of pandas, in their index, `k` is
        below 1 or `seed` below 0, scheme or balance are unknown, weights do not fit, or
        a part that is to be balanced is empty.
    TypeError
        If `X` or `y` has no rows, or `seed` is no int.

    Examples
    --------
    >>> import numpy as np
    >>> parts = partition(np.arange(5), np.arange(5) * 10, 2)
    >>> [(X.tolist(), y.tolist()) for X, y in parts]
    [([0, 1, 2], [0, 10, 20]), ([3, 4], [30, 40])]
    """
    n = check_lengths(X, y)
    if seed is not None:
        seed = whole(seed, "seed", least=0)
    entropy = np.random.SeedSequence(seed).entropy
    parts = rows(n, k, scheme, weights=weights, seed=entropy)
    if balance is not None:
        parts = _balanced(parts, n, balance, entropy)
    return [
        (take_rows(X, part), None if y is None else take_rows(y, part))
        for part in parts
    ]


def _balanced(parts: Sequence[Rows], n: int, balance: str, seed: Any) -> list[Rows]:
    """Give all parts the same number of rows.

    Parameters
    ----------
    parts : sequence of slice or ndarray
        Row numbers of each part.
    n : int
        Number of rows that slices are of.
    balance : {"replicate", "subsample", "average"}
        As many as the largest part has, the smallest, or their mean, rounded to the
        nearest and halves up.
    seed : int
        Seed of the draws, which depend on it and on the rank alone.

    Returns
    -------
    list of slice or ndarray
        A part that is too small has all its rows, each as often as the others but for
        one: its own rows come first. Of one that is too large some are left, in their
        order.

    Raises
    ------
    ValueError
        If the balance is unknown, or a part is empty and another one is not.
    """
    if balance not in _BALANCES:
        raise ValueError(f"{balance=} is unknown; choose one of {', '.join(_BALANCES)}")
    numbers = [row_numbers(part, n) for part in parts]
    sizes = [len(of) for of in numbers]
    k, total = len(sizes), sum(sizes)
    if total and 0 in sizes:
        raise ValueError(
            f"part {sizes.index(0)} of {k} has no rows: {balance=} can repeat none, and "
            f"must not leave out all of the others; use fewer parts or other weights"
        )
    mean = (2 * total + k) // (2 * k)
    size = {"replicate": max(sizes), "subsample": min(sizes), "average": mean}[balance]
    keys = [np.random.SeedSequence(seed, spawn_key=(rank, _DRAW)) for rank in range(k)]
    # A slice stays one where nothing is drawn: NumPy then gives a view.
    return [
        part if len(of) == size else _drawn(of, size, np.random.default_rng(key))
        for part, of, key in zip(parts, numbers, keys, strict=True)
    ]


def row_numbers(rows: Rows, n: int) -> _Numbers:
    """Return the rows of a part, of `n` in all, as numbers."""
    return np.arange(*rows.indices(n)) if isinstance(rows, slice) else rows


def _drawn(numbers: _Numbers, size: int, rng: np.random.Generator) -> _Numbers:
    """Return `size` rows of a part that has another number of them."""
    order = rng.permutation(len(numbers))
    if size < len(numbers):
        return numbers[np.sort(order[:size])]
    often, rest = divmod(size, len(numbers))
    return np.concatenate([*[numbers] * often, numbers[order[:rest]]])


def batches(
    n: int, batch_size: int, *, seed: int, epoch: int, rank: int, shuffle: bool = True
) -> Iterator[Rows]:
    """Return the row numbers of each batch of one epoch.

    Parameters
    ----------
    n : int
        Rows of this rank.
    batch_size : int
        Rows per batch, at least 1. The last batch may be shorter.
    seed : int
        Seed of the run, at least 0.
    epoch : int
        Number of the epoch, from 0.
    rank : int
        Rank of the trainer.
    shuffle : bool
        Whether the order is a permutation that depends on `seed`, `epoch` and `rank`
        alone; else rows come in order, as slices.

    Returns
    -------
    iterator of ndarray or slice
        ``ceil(n / batch_size)`` batches; every row is in one of them.

    Raises
    ------
    ValueError
        If a number is too small.

    Examples
    --------
    >>> list(batches(5, 2, seed=0, epoch=0, rank=0, shuffle=False))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    n, size = whole(n, "n", least=0), whole(batch_size, "batch_size", least=1)
    parts = (slice(a, min(a + size, n)) for a in range(0, n, size))
    if not shuffle:
        return parts
    order = _permutation(n, seed, epoch, rank)
    return (order[part] for part in parts)


def n_rows(X: Any) -> int:
    """Return the length of the first axis."""
    shape = getattr(X, "shape", None)
    try:
        n = len(X) if shape is None else shape[0]
    except (TypeError, IndexError):
        raise TypeError(f"{type(X).__name__} has no rows; give an array") from None
    if not isinstance(n, Integral):  # NaN: a dask array of unknown chunks
        raise ValueError("the number of rows is unknown; call X.compute_chunk_sizes()")
    return int(n)


def check_lengths(X: Any, y: Any) -> int:
    """Return the rows of features, and refuse labels that are not theirs."""
    n = n_rows(X)
    if y is not None and n_rows(y) != n:
        raise ValueError(f"X has {n} rows and y {n_rows(y)}; they must be as many")
    check_index(X, y)
    return n


def check_index(X: Any, y: Any) -> None:
    """Refuse labels in a table of pandas whose rows are named otherwise than those of X."""
    tables = all(
        hasattr(t, "iloc") and not hasattr(t, "__dask_graph__") for t in (X, y)
    )
    if tables and not X.index.equals(y.index):
        raise ValueError(f"y {NOT_ALIKE}")


#: Formats of sparse matrices that cannot be indexed, or slowly, and kinds of dtypes:
#: objects, text, dates and spans of time, named fields.
_WITHOUT_ROWS, _NO_NUMBERS = ("bsr", "coo", "dia", "dok"), {*"OSUMmV"}
NOT_ALIKE = (
    "has another index than X, and rows are paired by position; bring it into the order "
    "of X with .loc[X.index], or, if its row i belongs to row i of X, pass .to_numpy() of "
    "it, or .to_dask_array(lengths=True) of a dask table"
)


def check_some(n: int) -> None:
    """Refuse data without a row: nothing can be learned from it."""
    if not n:
        raise ValueError(
            "X has no rows in any part, so there is nothing to train on; look at what "
            "selects them"
        )


def is_column(y: Any) -> bool:
    """Return whether labels are of shape (n, 1)."""
    if isinstance(y, (list, tuple)):
        return bool(y) and np.shape(y[0]) == (1,)
    shape: tuple[int, ...] = getattr(y, "shape", ())
    return len(shape) == 2 and shape[1] == 1


def no_column(name: str) -> ValueError:
    """Return why labels of shape (n, 1) are refused."""
    return ValueError(
        f"{name} has the shape (n, 1): minus predictions of shape (n,) it would be "
        f"(n, n), without an error. Pass labels of shape (n,), such as y[:, 0] or "
        f"frame['label']; a gradient that needs (n, 1) takes y[:, None]"
    )


def why_unusable(data: Any) -> str:
    """Return why nobody can train on rows of this, in words that end with a way; or ""."""
    kind = type(data).__name__
    # Before mappings: a dok_matrix is one, of its elements.
    if getattr(data, "format", None) in _WITHOUT_ROWS and hasattr(data, "tocsr"):
        return f"is a {kind}, which has no rows to take out; pass .tocsr()"
    if isinstance(data, Mapping):
        return (
            f"is a {kind} of columns; pass numpy.column_stack([*columns.values()]), or a "
            f"pandas DataFrame of it"
        )
    if isinstance(data, list):
        try:
            data = np.asarray(data)
        except ValueError:
            return (
                "is a list of rows of unequal shapes; pad them, or pass arrays of one"
            )
    dtype = getattr(data, "dtype", None)
    if "bfloat16" in str(dtype):
        return f"is a {kind} of bfloat16, which cannot be sent to trainers; {as_float32(data)}"
    if getattr(dtype, "kind", "") in _NO_NUMBERS:
        return (
            f"has dtype {dtype}, which holds no numbers; encode it first, give objects "
            f"that are numbers one of NumPy's dtypes with .astype(float), or make columns "
            f"of fields with numpy.lib.recfunctions.structured_to_unstructured"
        )
    return ""


def take_rows(X: Any, part: Rows) -> Any:
    """Return some rows of anything that has rows."""
    if hasattr(X, "iloc"):  # a data frame's [] means columns
        return X.iloc[part]
    return X[part] if hasattr(X, "shape") else np.asarray(X)[part]


def _permutation(n: int, seed: Any, *key: int) -> _Numbers:
    """Return a permutation that depends on its arguments alone."""
    sequence = np.random.SeedSequence(seed, spawn_key=key)
    return np.random.default_rng(sequence).permutation(n)


def _weight(value: object) -> Fraction:
    if not isinstance(value, Real):
        raise TypeError(f"weight {value!r} is no number")
    try:
        # int and float first: NumPy's own would overflow inside the fraction.
        exact = Fraction(int(value) if isinstance(value, Integral) else float(value))
    except (OverflowError, ValueError):
        raise ValueError(f"weight {value!r} is not finite") from None
    if exact < 0:
        raise ValueError(f"weight {value!r} is negative")
    return exact
