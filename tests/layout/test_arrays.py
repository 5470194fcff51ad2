from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.errors import LayoutError, UnknownParameterError
from daskps.layout.arrays import DTYPES, Layout, compute_dtype
from daskps.layout.bounds import bounds

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
parameters = st.dictionaries(
    st.text(min_size=1, max_size=5),
    st.tuples(shapes, st.sampled_from(["float16", "float32", "int8", "bool"])),
    max_size=8,
)


@given(parameters, st.integers(1, 12))
def test_split_then_assemble_is_identity(params, k):
    """Pieces are disjoint, cover every element, and say where in the shard it is."""
    layout = Layout.build(params, k)
    values = {p.name: np.arange(p.size) + 1000 * p.index for p in layout.parameters}
    shards = []
    for i in range(k):
        vectors = {}
        for dtype in layout.lengths:
            start, stop = layout.extent(i, dtype)
            vectors[dtype] = np.full(stop - start, -1)
        for piece in layout.pieces[i]:
            assert piece.shard == i
            assert piece.size > 0
            vector = vectors[piece.parameter.dtype]
            part = values[piece.parameter.name][piece.start : piece.stop]
            vector[piece.local : piece.local + piece.size] = part
        assert all((v >= 0).all() for v in vectors.values())
        shards.append(vectors)
    for p in layout.parameters:
        found = np.full(p.size, -1)
        for piece in layout.pieces_of[p.index]:
            vector = shards[piece.shard][p.dtype]
            found[piece.start : piece.stop] = vector[piece.local :][: piece.size]
        np.testing.assert_array_equal(found, values[p.name])
    assert [x for row in layout.pieces for x in row if x.parameter.size == 0] == []


@given(parameters, st.integers(1, 12))
def test_shards_are_cut_like_array_split(params, k):
    layout = Layout.build(params, k)
    for dtype, n in layout.lengths.items():
        vector = np.concatenate(
            [
                np.arange(p.size) + p.offset
                for p in layout.parameters
                if p.dtype == dtype
            ]
        )
        np.testing.assert_array_equal(vector, np.arange(n))
        for i, part in enumerate(np.array_split(vector, k)):
            start, stop = layout.extent(i, dtype)
            np.testing.assert_array_equal(vector[start:stop], part)


@given(parameters, st.integers(1, 12))
def test_a_parameter_meets_a_shard_once(params, k):
    layout = Layout.build(params, k)
    for row in layout.pieces:
        indices = [piece.parameter.index for piece in row]
        assert indices == sorted(set(indices))


@given(st.integers(0, 100), st.integers(1, 20))
def test_bounds_are_those_of_array_split(n, k):
    lengths = [len(part) for part in np.array_split(np.arange(n), k)]
    borders = [0, *itertools.accumulate(lengths)]
    assert [bounds(n, k, i) for i in range(k)] == [*itertools.pairwise(borders)]
    assert max(lengths) - min(lengths) <= 1


@given(parameters, st.integers(1, 5))
def test_the_wire_form_says_everything(params, k):
    layout = Layout.build(params, k)
    assert Layout.from_wire(layout.to_wire()) == layout


def test_ten_thousand_shards_and_a_thousand_parameters_build_quickly():
    params = {f"p{i}": ((33,), "float32") for i in range(1000)}
    start = time.process_time()
    layout = Layout.build(params, 10_000)
    n = sum(map(len, layout.pieces))
    assert n == sum(map(len, layout.pieces_of.values()))
    assert time.process_time() - start < 2


def test_fewer_elements_than_shards_leaves_the_last_ones_empty():
    layout = Layout.build({"w": ((2,), "float32"), "b": ((), "float32")}, 5)
    assert [len(row) for row in layout.pieces] == [1, 1, 1, 0, 0]


def test_a_huge_shape_does_not_overflow():
    layout = Layout.build({"w": ((2**40, 2**40), "int8")}, 3)
    assert layout.nbytes == 2**80


def test_every_dtype_has_a_place():
    layout = Layout.build({d: ((3, 2), d) for d in DTYPES}, 2)
    assert layout.nbytes == sum(6 * np.dtype(d).itemsize for d in DTYPES)


def test_an_unknown_dtype_or_no_shards_are_refused():
    with pytest.raises(LayoutError, match=r"complex64.*use one of float16"):
        Layout.build({"w": ((1,), "complex64")}, 1)
    with pytest.raises(ValueError, match="at least 1"):
        Layout.build({"w": ((1,), "float32")}, 0)


def test_an_unknown_name_lists_the_known_ones():
    layout = Layout.build({f"p{i}": ((1,), "float32") for i in range(20)}, 1)
    with pytest.raises(UnknownParameterError, match=r"'x'.*'p0'.*and 12 more"):
        layout["x"]


def test_half_precision_is_computed_in_single():
    assert [compute_dtype(d) for d in ("float16", "float32", "float64")] == [
        "float32",
        "float32",
        "float64",
    ]
