from __future__ import annotations

from concurrent.futures import Future

import dask
import dask.array as da
import numpy as np
import pytest

from daskps import config
from daskps.errors import (
    DaskPSError,
    LayoutError,
    NoOptimizerError,
    PushRejectedError,
    UnknownParameterError,
)
from daskps.layout.arrays import Layout
from daskps.store import values as values_of
from daskps.store.intake import gradients, values
from daskps.store.values import spec_of

LAYOUT = Layout.build(
    {
        "w": ((3, 4), "float32"),
        "d": ((3, 4), "float64"),
        "h": ((3, 4), "float16"),
        "s": ((), "float32"),
        "e": ((0, 4), "float32"),
        "i": ((3,), "int8"),
        "u": ((3,), "uint64"),
        "flag": ((2,), "bool"),
        "a/b": ((2,), "float64"),
    },
    2,
)
OPTIMIZERS = dict.fromkeys(range(9), "*")


def push(given, finite=True, optimizers=OPTIMIZERS):
    found = gradients(LAYOUT, optimizers, given, finite=finite)
    return {LAYOUT.parameters[i].name: array for i, array in found.items()}


def assign(given, finite=True):
    found = values(LAYOUT, given, "value", finite=finite)
    return {LAYOUT.parameters[i].name: array for i, array in found.items()}


def memmap(tmp_path):
    array = np.memmap(tmp_path / "w", "f4", "w+", shape=(3, 4))
    array[:] = np.arange(12).reshape(3, 4)
    return array


def readonly():
    array = np.arange(12, dtype="f4").reshape(3, 4)
    array.flags.writeable = False
    return array


def unaligned():
    raw = np.zeros(49, np.uint8)
    array = raw[1:].view("f4").reshape(3, 4)
    array[:] = np.arange(12).reshape(3, 4)
    assert not array.flags.aligned
    return array


ACCEPTED = {
    "contiguous": lambda _: np.arange(12, dtype="f4").reshape(3, 4),
    "strided": lambda _: np.arange(48, dtype="f4").reshape(6, 8)[::2, ::2],
    "negative strides": lambda _: np.arange(12, dtype="f4").reshape(3, 4)[::-1, ::-1],
    "fortran": lambda _: np.asfortranarray(np.arange(12, dtype="f4").reshape(3, 4)),
    "broadcast view": lambda _: np.broadcast_to(np.arange(4, dtype="f4"), (3, 4)),
    "read-only": lambda _: readonly(),
    "memory-mapped": memmap,
    "big-endian": lambda _: np.arange(12, dtype=">f4").reshape(3, 4),
    "big-endian double": lambda _: np.arange(12, dtype=">f8").reshape(3, 4),
    "unaligned": lambda _: unaligned(),
    "double": lambda _: np.arange(12.0).reshape(3, 4) / 7,
    "half": lambda _: np.arange(12, dtype="f2").reshape(3, 4),
    "int": lambda _: np.arange(12).reshape(3, 4),
    "bool": lambda _: np.eye(3, 4, dtype=bool),
    "list": lambda _: [[1, 2, 3, 4.5]] * 3,
}


@pytest.mark.parametrize("name", ["w", "d", "h"])
@pytest.mark.parametrize("kind", ACCEPTED)
def test_every_kind_of_array_means_what_it_means_to_numpy(kind, name, tmp_path):
    value = ACCEPTED[kind](tmp_path)
    compute = {"w": "f4", "d": "f8", "h": "f4"}[name]
    own = LAYOUT[name].dtype
    wanted = np.array(value)
    for found, dtype in ((push({name: value}), compute), (assign({name: value}), own)):
        flat = found[name]
        assert flat.dtype == np.dtype(dtype)
        assert flat.dtype.isnative
        assert flat.flags.c_contiguous
        np.testing.assert_array_equal(flat, wanted.astype(dtype).ravel())


def test_scalars_and_empty_arrays():
    found = push({"s": 2.5, "e": np.zeros((0, 4))})
    assert found["s"].tolist() == [2.5]
    assert found["e"].shape == (0,)
    assert push({"s": np.float16(2.5)})["s"].tolist() == [2.5]
    assert push({"s": np.array(3)})["s"].tolist() == [3.0]


def test_nested_names_are_joined():
    np.testing.assert_array_equal(push({"a": {"b": [1.0, 2.0]}})["a/b"], [1.0, 2.0])


def test_integers_take_integers_that_fit():
    assert assign({"i": [1, -2, 127]})["i"].dtype == np.int8
    assert assign({"i": np.array([1, 2, 3], np.int64)})["i"].tolist() == [1, 2, 3]
    assert assign({"i": np.array([True, False, True])})["i"].tolist() == [1, 0, 1]
    large = np.array([2**64 - 1, 0, 1], np.uint64)
    assert assign({"u": large})["u"].tolist() == large.tolist()
    assert assign({"u": [1, 2, 3]})["u"].dtype == np.uint64
    assert assign({"flag": [True, False]})["flag"].tolist() == [True, False]


def test_what_was_given_is_not_changed():
    value = np.arange(12.0).reshape(3, 4)
    push({"w": value, "d": value})
    np.testing.assert_array_equal(value, np.arange(12.0).reshape(3, 4))


SHAPE = (3, 4)
REFUSED = {
    "masked": (
        np.ma.masked_array(np.ones(SHAPE), np.eye(3, 4, dtype=bool)),
        r"\.filled\(0\)",
    ),
    "object": (np.full(SHAPE, None), "dtype object.*convert it to one of float16"),
    "text": (np.full(SHAPE, "a"), "dtype <U1.*convert it"),
    "bytes": (np.full(SHAPE, b"a"), r"dtype \|S1.*convert it"),
    "structured": (np.zeros(SHAPE, "f4,f4"), "convert it"),
    "complex": (np.ones(SHAPE, complex), "dtype complex128.*convert it"),
    "big-endian complex": (np.ones(SHAPE, ">c8"), "dtype complex64.*convert it"),
    "dates": (np.zeros(SHAPE, "M8[s]"), "convert it"),
    "long double": (np.ones(SHAPE, np.longdouble), "convert it"),
    "ragged": ([[1.0], [1.0, 2.0]], "cannot be made a NumPy array"),
    "none": (None, "dtype object"),
    "future": (
        Future(),
        r"is a Future; give what .*client.gather\(...\) or .result\(\)",
    ),
    "dask": (da.ones(SHAPE), r"\.compute\(\)"),
    "a row": (np.ones(4), r"shape \(4,\).*\(3, 4\).*nothing is broadcast"),
    "a column": (np.ones((3, 1)), "nothing is broadcast"),
    "a number": (1.0, r"shape \(\)"),
    "rank": (np.ones((1, 3, 4)), "shapes must be equal"),
    "flat": (np.ones(12), "shapes must be equal"),
    "transposed": (np.ones((4, 3)), "shapes must be equal"),
    "nan": (np.full(SHAPE, np.nan), "NaN or Inf.*clip it.*daskps.finite"),
    "inf": (np.full(SHAPE, -np.inf), "NaN or Inf"),
    "too large": (np.full(SHAPE, 1e300), r"NaN or Inf \(as float32\)"),
}


@pytest.mark.parametrize("verb", [push, assign])
@pytest.mark.parametrize("kind", REFUSED)
def test_everything_else_is_refused_with_the_fix(kind, verb):
    value, message = REFUSED[kind]
    with pytest.raises(PushRejectedError, match=message) as caught:
        verb({"w": value})
    assert "'w'" in str(caught.value)


def test_a_tensor_with_grad_is_refused_and_one_without_is_fine():
    torch = pytest.importorskip("torch")
    with pytest.raises(PushRejectedError, match=r"\.detach\(\)\.numpy\(\)"):
        push({"w": torch.ones(3, 4, requires_grad=True)})
    np.testing.assert_array_equal(push({"w": torch.ones(3, 4)})["w"], np.ones(12))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"i": np.ones(3)}, r"float64.*int8.*same_kind.*\.astype\('int8'\)"),
        ({"i": [300, 0, 0]}, "values that int8 cannot hold"),
        ({"i": np.array([0, 0, -129])}, "values that int8 cannot hold"),
        ({"u": [-1, 0, 0]}, "values that uint64 cannot hold"),
        ({"u": np.array([1, 2, 3])}, "same_kind"),
        ({"flag": [1, 0]}, "same_kind"),
        ({"flag": [1.0, 0.0]}, "same_kind"),
        ({"h": np.full(SHAPE, 1e6)}, r"NaN or Inf \(as float16\)"),
    ],
)
def test_casts_that_lose_the_meaning_are_refused(given, message):
    with pytest.raises(PushRejectedError, match=message):
        assign(given)


def test_a_half_precision_gradient_keeps_single_precision():
    assert push({"h": np.full(SHAPE, 1e6)})["h"].tolist() == [1e6] * 12


@pytest.mark.parametrize("name", ["i", "u", "flag"])
def test_integers_take_no_gradient(name):
    value = np.zeros(LAYOUT[name].shape, LAYOUT[name].dtype)
    with pytest.raises(PushRejectedError, match="takes no gradient; use add or assign"):
        push({name: value})


def test_a_parameter_without_an_optimizer_takes_no_gradient():
    with pytest.raises(NoOptimizerError, match=r"create\(\.\.\., optimizer=.*use add"):
        push({"w": np.ones(SHAPE)}, optimizers={})
    gradients(LAYOUT, {}, {"w": np.ones(SHAPE)}, finite=True, model=True)


@pytest.mark.parametrize("verb", [push, assign])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"x": 1.0}, UnknownParameterError, r"no parameter 'x'.*'w'"),
        ({"a": {"x": 1.0}}, UnknownParameterError, "no parameter 'a/x'"),
        ({3: 1.0}, TypeError, "names are str.*str"),
        ({"": 1.0}, LayoutError, "empty parameter name"),
        ({"a": {"b": [1.0, 2.0]}, "a/b": [1.0, 2.0]}, LayoutError, "given twice"),
        ([1.0], TypeError, "expected a mapping"),
        (np.ones(3), TypeError, "expected a mapping"),
        (None, TypeError, "expected a mapping"),
    ],
)
def test_wrong_names_are_refused(verb, given, error, message):
    with pytest.raises(error, match=message):
        verb(given)


def test_one_bad_array_refuses_them_all():
    with pytest.raises(DaskPSError):
        push({"w": np.ones(SHAPE), "d": np.full(SHAPE, np.nan)})


def test_nan_passes_where_it_is_allowed():
    found = push(
        {"w": np.full(SHAPE, np.nan), "d": np.full(SHAPE, np.inf)}, finite=False
    )
    assert np.isnan(found["w"]).all()
    assert np.isinf(assign({"w": np.full(SHAPE, 1e300)}, finite=False)["w"]).all()


def test_initial_values_are_refused_as_such():
    assert spec_of([1, 2], "w").tolist() == [1, 2]
    assert spec_of(np.arange(3, dtype=">i4"), "w").dtype.isnative
    for value, message in (
        ([np.nan], "NaN or Inf; start from finite values"),
        ([None], "parameter 'w' has dtype object"),
        (np.ma.masked_array([1.0], [True]), "masked"),
    ):
        with pytest.raises(LayoutError, match=message):
            spec_of(value, "w")


def test_the_check_of_large_arrays_is_kept_for_other_processes(tmp_path):
    forget = config.cache_dir.cache_clear
    forget()
    try:
        with dask.config.set({"daskps.cache-directory": str(tmp_path)}):
            assert values_of.is_finite(np.ones(2**15, "f4"))
        assert list(tmp_path.glob("daskps_*.py"))
    finally:
        forget()
