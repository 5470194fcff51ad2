"""Parts of equal size."""

from __future__ import annotations

import numpy as np
import pytest

from daskps import partition

X = np.arange(23) * 10
#: 11, 8 and 4 of 23 rows.
WEIGHTS = [3, 2, 1]


def _parts(balance: str, **of: object) -> list[np.ndarray]:
    given = {"weights": WEIGHTS, "seed": 3, **of}
    found = partition(X, X + 1, 3, balance=balance, **given)  # type: ignore[arg-type]  # any of them
    assert all((y == x + 1).all() for x, y in found)
    return [x for x, _ in found]


@pytest.mark.parametrize("scheme", ["contiguous", "random"])
def test_replicate_gives_all_as_many_as_the_largest_has(scheme):
    """Sizes 11, 8, 4 (weights 3, 2, 1) become 11: each row once or twice, or 2 or 3 times."""
    alone = [x for x, _ in partition(X, X, 3, scheme=scheme, weights=WEIGHTS, seed=3)]
    assert [len(part) for part in alone] == [11, 8, 4]
    found = _parts("replicate", scheme=scheme)
    assert [len(part) for part in found] == [11, 11, 11]
    for part, of in zip(found, alone, strict=True):
        assert (part[: len(of)] == of).all(), "its own rows come first"
        counts = np.unique(part, return_counts=True)[1]
        assert len(counts) == len(of)
        assert counts.max() - counts.min() <= 1


def test_subsample_leaves_as_many_as_the_smallest_has():
    """Four of each part, in their order, none twice."""
    found = _parts("subsample")
    assert [len(part) for part in found] == [4, 4, 4]
    for part, (low, high) in zip(found, [(0, 11), (11, 19), (19, 23)], strict=True):
        assert (np.diff(part) > 0).all()
        assert low * 10 <= part[0]
        assert part[-1] < high * 10


@pytest.mark.parametrize(("n", "mean"), [(23, 8), (22, 7), (9, 3), (5, 2)])
def test_average_is_rounded_to_the_nearest(n, mean):
    """23 / 3 is nearest 8, 22 / 3 nearest 7, 5 / 3 nearest 2."""
    x = np.arange(n)
    found = partition(x, None, 3, weights=[3, 1, 1], seed=0, balance="average")
    assert [len(part) for part, _ in found] == [mean] * 3


def test_halves_are_rounded_up():
    """Of 5 rows in two parts each has 3."""
    found = partition(np.arange(5), None, 2, seed=0, balance="average")
    assert [len(part) for part, _ in found] == [3, 3]


def test_a_seed_decides_what_is_drawn():
    """The same seed draws the same rows, another one others; so does each rank."""
    one, same, other = (_parts("subsample", seed=seed) for seed in (3, 3, 4))
    assert all((a == b).all() for a, b in zip(one, same, strict=True))
    assert any((a != b).any() for a, b in zip(one, other, strict=True))
    left, right = partition(
        np.arange(40), None, 2, weights=[1, 1], seed=0, balance="replicate"
    )
    assert (left[0] + 20 == right[0]).all(), "equal parts stay as they are"


def test_parts_of_equal_size_stay_views():
    """Nothing is drawn where nothing has to be."""
    (x, _), _ = partition(X[:20], None, 2, balance="average", seed=0)
    assert np.shares_memory(x, X)


def test_what_cannot_be_balanced_is_refused():
    """An unknown balance, and an empty part beside others."""
    with pytest.raises(ValueError, match="replicate, subsample, average"):
        partition(X, None, 2, balance="max")
    for balance in ("replicate", "subsample", "average"):
        with pytest.raises(ValueError, match="part 2 of 4 has no rows"):
            partition(X[:2], None, 4, balance=balance)
    assert [len(x) for x, _ in partition(X[:0], None, 2, balance="average")] == [0, 0]
