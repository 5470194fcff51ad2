"""Sums, copies and roundings by element functions, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from daskps.kernels.device.pieces import elementwise
from daskps.layout.arrays import FLOATS
from daskps.shards.rounds.words import compiled
from tests.kernels.compiling import kept
from tests.kernels.device.assembling import assemble, faults
from tests.kernels.device.launching import Launcher, numbers, same_bits

#: What a node of a round, and a step that adds or assigns, need of each float dtype.
EXPRESSIONS = ("a", "a * s", "a + b", "a / d", "(a * s + b) / d", "s")
INTEGERS = ("int8", "uint16", "int32", "uint64")  # loops know no other sign
LOOPS = [
    *((text, dtype, None) for dtype in FLOATS for text in EXPRESSIONS),
    *((text, dtype, None) for dtype in INTEGERS for text in ("a", "a + b", "s")),
    *(("a", a, b) for a in FLOATS for b in FLOATS if a != b),
    ("a | b", "bool", None),
]


def loop(expression, dtype, to=None):
    return elementwise(
        expression, np.dtype(dtype), None if to is None else np.dtype(to)
    )


def run(expression, dtype, arrays, scalars=(), to=None):
    launcher, out = (
        Launcher(1),
        np.empty(len(arrays[0]) if arrays else 300, to or dtype),
    )
    launcher.update(loop(expression, dtype, to), (out, *arrays), scalars)
    launcher.wait()
    return out


def test_every_operation_says_how_it_rounds(tmp_path):
    texts = [one.ptx(kept()) for one in {loop(*case) for case in LOOPS}]
    assert [fault for text in texts for fault in faults(text)] == []
    assemble(texts, tmp_path)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_have_the_bits_of_numpy(dtype):
    a, b = numbers(np.random.default_rng(0), 300, dtype)
    wide = np.float32 if dtype == "float16" else np.dtype(dtype).type
    s, d = wide(1.7), wide(3.1)
    with np.errstate(all="ignore"):
        expected = {
            "a": a.astype(wide),
            "a * s": a.astype(wide) * s,
            "a + b": a.astype(wide) + b,
            "a / d": a.astype(wide) / d,
            "(a * s + b) / d": (a.astype(wide) * s + b) / d,
            "s": np.full(300, s),
        }
        for expression, found in expected.items():
            arrays = [x for x, name in ((a, "a"), (b, "b")) if name in expression]
            scalars = [
                float(x) for x, name in ((d, "d"), (s, "s")) if name in expression
            ]
            out = run(expression, dtype, arrays, tuple(scalars))
            assert same_bits([out], [found.astype(dtype)]), expression


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_node_of_a_round_has_the_bits_of_hosts(dtype):
    a, b = numbers(np.random.default_rng(1), 300, dtype)
    work, expected = compiled(kept()), np.empty_like(a)
    form = work.form4 if dtype == "float32" else work.form8
    form(expected, a, 0.3, b, 7.0)
    assert same_bits([run("(a * s + b) / d", dtype, (a, b), (7.0, 0.3))], [expected])
    # A step of the sum that does not multiply or divide is the same with 1.
    form(expected, a, 1.0, b, 1.0)
    assert same_bits([run("a + b", dtype, (a, b))], [expected])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap_around(dtype):
    info = np.iinfo(dtype)
    rng = np.random.default_rng(2)
    a, b = rng.integers(info.min, info.max, (2, 100), dtype, endpoint=True)
    with np.errstate(over="ignore"):
        assert same_bits([run("a + b", dtype, (a, b))], [a + b])
    assert same_bits([run("a", dtype, (a,))], [a])
    launcher = Launcher()
    launcher.update(loop("s", dtype), (a,), (int(info.min),))
    launcher.wait()
    assert (a == info.min).all()


def test_bools_are_joined():
    a, b = np.array([[0, 0, 1, 1], [0, 1, 0, 1]], bool)
    assert same_bits([run("a | b", "bool", (a, b))], [a | b])


def halves():
    """Return float64 numbers at, just below and just above the ties of float16."""
    words = np.arange(0x7C00, dtype="u2").view("f2").astype("f8")
    ties = (words[1:] + words[:-1]) / 2
    some = np.concatenate([words, ties, np.nextafter(ties, 0), np.nextafter(ties, 1e9)])
    some = np.concatenate(
        [some, [65520, np.nextafter(65520, 0), 1e9, 1e300, np.inf, np.nan]]
    )
    return np.concatenate([some, -some, [1e-320, 2.0**-25, np.nextafter(2.0**-25, 1)]])


def test_float64_is_rounded_to_float16_once():
    a = halves()
    with np.errstate(over="ignore"):
        assert same_bits([run("a", "float64", (a,), to="float16")], [a.astype("f2")])
        single = a.astype("f4")
        found = run("a", "float32", (single,), to="float16")
        assert same_bits([found], [single.astype("f2")])
    assert same_bits(
        [run("a", "float16", (found,), to="float32")], [found.astype("f4")]
    )
    assert same_bits(
        [run("a", "float16", (found,), to="float64")], [found.astype("f8")]
    )


@pytest.mark.parametrize(
    ("dtype", "to"), [("float32", "float64"), ("float64", "float32")]
)
def test_other_dtypes_are_rounded_to_the_nearest(dtype, to):
    a, _ = numbers(np.random.default_rng(3), 300, dtype)
    with np.errstate(over="ignore", under="ignore"):
        assert same_bits([run("a", dtype, (a,), to=to)], [a.astype(to)])
