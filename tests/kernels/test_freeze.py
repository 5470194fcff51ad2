"""What becomes of an update function before it is compiled."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from daskps import kernels
from daskps.kernels.update_source import update_source
from tests.kernels.compiling import llvm

F4 = np.dtype("f4")
RATE = 0.1
COUNT = 3
TABLE = {"rate": 0.1}


def literal(w, g):
    return w - 0.1 * g


def ints(w, g):
    return w * 2 - g / 3 + 1


def square(w, g):
    return w**2 + (2 * g) ** 3


def global_number(w, g):
    return w - RATE * g * COUNT


def module_number(w, g):
    return w * np.pi - g * math.e


def branch(w, g):
    """Say something that is not code."""
    return 0.5 if g > 0 else w * 1


def functions(w, g):
    return max(abs(w), np.sqrt(g)) + math.exp(-g) + pow(g, 2)


def with_closure():
    import numpy as xp

    rate, two = 0.1, 2

    def update(w, g):
        return w - rate * g * two + xp.sqrt(g) * xp.e

    return update


FUNCTIONS = [
    literal,
    ints,
    square,
    global_number,
    module_number,
    branch,
    functions,
    with_closure(),
    lambda w, g: (w - 0.1 * g,),
]


@pytest.mark.parametrize("update", FUNCTIONS, ids=lambda f: f.__qualname__)
def test_numbers_take_the_compute_dtype(update):
    """No number of the function may widen float32 arithmetic to float64."""
    kernel = kernels.build(update, 0, 0, "f4")
    for name in ("inplace", "publish"):
        assert "double" not in llvm(kernel.module, name)
    w, g = np.linspace(1, 2, 33), np.linspace(0.1, 3, 33)
    expected = []
    for pair in zip(w, g, strict=True):
        value = update(*pair)
        expected.append(value[0] if isinstance(value, tuple) else value)
    w32, w64 = w.astype("f4"), w.copy()
    kernel.inplace(w32, g.astype("f4"), (), ())
    kernels.build(update, 0, 0, "f8").inplace(w64, g, (), ())
    np.testing.assert_allclose(w32, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(w64, expected, rtol=1e-14)


def test_without_freezing_numba_would_compute_in_double():
    """The reason for all this: if it goes away, freezing can go too."""
    numba = pytest.importorskip("numba")

    @numba.njit
    def loop(w, g):
        for i in range(w.size):
            w[i] = w[i] - 0.1 * g[i]

    loop(np.ones(4, "f4"), np.ones(4, "f4"))
    assert "double" in loop.inspect_llvm(loop.signatures[0])


def test_large_and_tiny_numbers_are_cast_silently():
    kernel = kernels.build(lambda w, g: w + 1e300 * g + 1e-300, 0, 0, "f4")
    w = np.zeros(2, "f4")
    kernel.inplace(w, np.array([1, -1], "f4"), (), ())
    np.testing.assert_array_equal(w, [np.inf, -np.inf])


def test_names_lines_and_docstrings_do_not_matter():
    def one(w, g):
        return w - 0.25 * g

    def two(w, g):
        """Say it again."""

        return w - 0.25 * g

    def other(w, g):
        return w - 0.5 * g

    assert update_source(one, 0, 0, F4) == update_source(two, 0, 0, F4)
    assert update_source(one, 0, 0, F4) != update_source(other, 0, 0, F4)
    assert kernels.build(one, 0, 0, F4) is kernels.build(two, 0, 0, F4)


def test_globals_and_closures_are_part_of_the_name():
    def make(rate):
        return lambda w, g: w - rate * g

    name = {kernels.content_name(update_source(make(r), 0, 0, F4)) for r in (1, 1, 2)}
    assert len(name) == 2


def refers_to_table(w, g):
    return w - TABLE["rate"] * g


def refers_to_function(w, g):
    return literal(w, g)


def casts(w, g):
    return w - np.float64(0.1) * g


def random(w, g):
    return w + np.random.normal()  # noqa: NPY002


def builtin(w, g):
    return float(w) - sum((g, g))


def inner(w, g):
    f = lambda x: x + 1  # noqa: E731
    return f(w) + g


def unknown(w, g):
    return w - nowhere * g  # type: ignore[name-defined]  # noqa: F821


def star(w, *g):
    return w


def generator(w, g):
    yield w - g


def imaginary(w, g):
    return w - 1j * g


@pytest.mark.parametrize(
    ("update", "match"),
    [
        (refers_to_table, "refers to 'TABLE', dict"),
        (refers_to_function, "refers to 'literal'"),
        (casts, "uses 'np.float64'"),
        (random, "uses 'np.random'"),
        (builtin, "refers to 'float'"),
        (inner, "function"),
        (unknown, "refers to 'nowhere'"),
        (star, "positional arguments only"),
        (generator, "positional arguments only"),
        (imaginary, "complex number"),
        (np.add, "plain Python function, not ufunc"),
        (partial(literal), "plain Python function, not partial"),
        (lambda w, g, extra: w, "takes 3 arguments"),
    ],
)
def test_what_cannot_be_a_kernel_is_refused(update, match):
    with pytest.raises(TypeError, match=match):
        kernels.build(update, 0, 0, "f4")


def test_what_numba_refuses_is_a_type_error():
    kernel = kernels.build(lambda w, g: (w, g), 0, 0, "f4")
    with pytest.raises(TypeError, match="does not compile"):
        kernel.warm()
    kernel = kernels.build(lambda w, g, s: (w, s, g), 1, 0, "f4")
    with pytest.raises(TypeError, match="does not compile"):
        kernel.warm()
