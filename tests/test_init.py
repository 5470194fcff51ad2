from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps import init
from daskps.errors import LayoutError
from daskps.init import check, constant, fan_avg, fan_in, fill, normal, uniform, zeros

RANDOM = [uniform(), normal(), fan_in(), fan_avg()]


def whole(
    initializer: Any,
    shape: tuple[int, ...],
    dtype: Any = "float64",
    name: str = "w",
    seed: int = 0,
) -> Any:
    out = np.empty(math.prod(shape), dtype)
    fill(out, initializer, name=name, shape=shape, seed=seed)
    return out.reshape(shape)


@pytest.mark.parametrize("value", [0.5, 1.5])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_s1_constant_is_exact(value: float, dtype: str) -> None:
    assert (whole(constant(value), (50, 3), dtype) == value).all()
    assert (whole(value, (50, 3), dtype) == value).all()


def test_s2_uniform_is_inside_its_borders() -> None:
    w = whole(uniform(-1, 1), (5000,), "float32")
    assert w.min() >= -1
    assert w.max() <= 1
    assert abs(w.mean()) < 0.1
    assert abs(w.std() - 2 / math.sqrt(12)) < 0.1


def test_s2_normal_has_mean_and_deviation() -> None:
    w = whole(normal(0, 1), (5000,), "float32")
    assert abs(w.mean()) < 0.1
    assert abs(w.std() - 1) < 0.1


@pytest.mark.parametrize("initializer", RANDOM, ids=repr)
@given(data=st.data())
def test_any_split_gives_the_same_numbers(
    initializer: Any, data: st.DataObject
) -> None:
    size = data.draw(st.integers(0, 150_000))
    cuts = data.draw(st.lists(st.integers(0, size), max_size=4))
    borders = sorted([0, size, *cuts])
    out = np.empty(size, "float32")
    for a, b in itertools.pairwise(borders):
        fill(out[a:b], initializer, name="w", shape=(size,), seed=3, start=a)
    np.testing.assert_array_equal(out, whole(initializer, (size,), "float32", seed=3))


@given(st.integers(0, 200_000), st.integers(0, 200_000))
def test_a_custom_callable_is_called_by_blocks(a: int, b: int) -> None:
    def noted(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> Any:
        sizes.append(shape)
        return rng.random(shape)

    sizes: list[tuple[int, ...]] = []
    start, stop = sorted((a, b))
    out = np.empty(stop - start)
    fill(out, noted, name="w", shape=(100, 2000), seed=0, start=start)
    last = 200_000 - 3 * 65_536
    assert set(sizes) <= {(65_536,), (last,)}
    np.testing.assert_array_equal(
        out, whole(noted, (100, 2000)).reshape(-1)[start:stop]
    )


@pytest.mark.parametrize("initializer", RANDOM, ids=repr)
def test_seed_and_name_decide_the_numbers(initializer: Any) -> None:
    base = whole(initializer, (100,))
    np.testing.assert_array_equal(base, whole(initializer, (100,)))
    assert (base != whole(initializer, (100,), seed=1)).any()
    assert (base != whole(initializer, (100,), name="v")).any()


def test_blocks_of_one_parameter_differ() -> None:
    w = whole(uniform(), (2 * 65_536,))
    assert len(np.unique(w)) == len(w)


def test_numbers_are_recorded() -> None:
    """A stable hash: another process, or another day, draws the same."""
    np.testing.assert_allclose(whole(uniform(), (3,), name="ü/w", seed=7), RECORDED)


RECORDED = [-0.5032199882617834, 0.06231284388470848, -0.6942829227627678]


@pytest.mark.parametrize("name", ["w", "a/b", "\udcff", "x" * 10_000, "名"])
def test_any_name_can_be_drawn(name: str) -> None:
    assert np.isfinite(whole(uniform(), (3,), name=name)).all()


def test_fans_follow_torch() -> None:
    assert init.fans((30, 20)) == (20, 30)
    assert init.fans((8, 4, 3, 3)) == (36, 72)
    assert init.fans((7,)) == (7, 7)
    assert init.fans(()) == (1, 1)


def test_fan_in_has_the_variance_of_he() -> None:
    w = whole(fan_in(2.0), (500, 200))
    assert w.std() == pytest.approx(math.sqrt(2 / 200), rel=0.02)


def test_fan_avg_has_the_borders_of_glorot() -> None:
    w = whole(fan_avg(), (500, 200))
    border = math.sqrt(6 / 700)
    assert np.abs(w).max() <= border
    assert np.abs(w).max() == pytest.approx(border, rel=0.01)


@pytest.mark.parametrize("initializer", [*RANDOM, constant(3), zeros()], ids=repr)
def test_initializers_are_values(initializer: Any) -> None:
    assert pickle.loads(pickle.dumps(initializer)) == initializer
    assert hash(initializer) == hash(pickle.loads(pickle.dumps(initializer)))
    with pytest.raises((AttributeError, TypeError)):
        initializer.scale = 2


@pytest.mark.parametrize("initializer", [*RANDOM, zeros(), 1.5], ids=repr)
@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (3, 0)], ids=str)
def test_empty_and_0d_parameters(initializer: Any, shape: tuple[int, ...]) -> None:
    assert whole(initializer, shape, "float32").shape == shape


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (3, "int8"),
        (-3, "int64"),
        (2**63, "uint64"),
        (2**53 + 1, "int64"),
        (1.0, "int32"),
        (True, "bool"),
        (0, "bool"),
        (np.bool_(True), "bool"),
        (True, "float32"),
        (np.float16(0.5), "float64"),
        (np.int8(5), "uint8"),
        (0.1, "float16"),
    ],
)
def test_numbers_that_a_dtype_holds(value: Any, dtype: str) -> None:
    w = whole(value, (3,), dtype)
    assert w.dtype == dtype
    expected = value if np.dtype(dtype).kind != "f" else np.dtype(dtype).type(value)
    assert all(item == expected for item in w.tolist())


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (300, "uint8"),
        (-1, "uint32"),
        (0.5, "int64"),
        (2, "bool"),
        (math.nan, "float32"),
        (math.inf, "float64"),
        (math.nan, "int64"),
        (math.inf, "bool"),
        (1e300, "float32"),
        (1e5, "float16"),
        (10**400, "float64"),
    ],
)
def test_numbers_that_a_dtype_cannot_hold(value: Any, dtype: str) -> None:
    with pytest.raises(LayoutError, match=r"'w' is .* give a finite number"):
        whole(value, (3,), dtype)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
@pytest.mark.parametrize("initializer", RANDOM, ids=repr)
def test_random_integers_are_refused_with_the_fix(initializer: Any, dtype: str) -> None:
    with pytest.raises(LayoutError, match="give it a float dtype"):
        whole(initializer, (3,), dtype)


def test_a_custom_callable_may_draw_integers() -> None:
    w = whole(lambda s, d, rng: rng.integers(0, 9, s, dtype=d), (9, 9), "int16")
    assert w.dtype == "int16"
    assert w.max() <= 8


@pytest.mark.parametrize(
    ("result", "dtype"),
    [
        (np.zeros(3), "float64"),
        (0.0, "float64"),
        (np.zeros((4, 1)), "float64"),
        (np.zeros(4, complex), "float64"),
        (np.zeros(4), "int64"),
        (np.array(list("abcd")), "float32"),
        (np.array([None] * 4), "float32"),
    ],
)
def test_a_custom_result_that_does_not_fit(result: Any, dtype: str) -> None:
    with pytest.raises(LayoutError, match=r"'w' returned shape"):
        whole(lambda s, d, rng: result, (2, 2), dtype)


@pytest.mark.parametrize("bad", [math.nan, -math.inf, 1e300])
def test_a_custom_result_that_is_not_finite(bad: float) -> None:
    with pytest.raises(LayoutError, match="NaN or Inf in float32"):
        whole(lambda s, d, rng: np.full(s, bad), (2, 2), "float32")


def test_an_error_of_a_custom_callable_names_the_parameter() -> None:
    def broken(shape: Any, dtype: Any, rng: Any) -> Any:
        return 1 / 0

    with pytest.raises(ZeroDivisionError) as caught:
        whole(broken, (2,))
    assert caught.value.__notes__ == ["raised by the initializer of parameter 'w'"]


@pytest.mark.parametrize(
    "bad", ["zeros", None, [1], np.zeros(3), 1j, zeros, uniform, constant]
)
def test_what_is_no_initializer(bad: Any) -> None:
    with pytest.raises(TypeError, match="parameter 'w'"):
        check(bad, name="w", dtype="float32")


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (uniform, (1, 0)),
        (uniform, (0, math.inf)),
        (uniform, (math.nan, 1)),
        (normal, (0, -1)),
        (normal, (math.nan, 1)),
        (fan_in, (0,)),
        (fan_avg, (math.inf,)),
    ],
)
def test_bad_settings(kind: Any, arguments: Any) -> None:
    with pytest.raises(ValueError, match="needs"):
        kind(*arguments)


@pytest.mark.parametrize(("start", "n"), [(-1, 2), (3, 2), (0, 5)])
def test_elements_outside_are_refused(start: int, n: int) -> None:
    with pytest.raises(ValueError, match="of 4"):
        fill(np.empty(n), 0, name="w", shape=(4,), seed=0, start=start)
