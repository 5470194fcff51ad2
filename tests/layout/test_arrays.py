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


@st.composite
def layouts(draw):
    """Layouts of which any parameters are placed on any shards."""
    params, k = draw(parameters), draw(st.integers(1, 12))
    sets = st.sets(st.integers(0, k - 1), min_size=1).map(sorted)
    indices = draw(st.permutations(range(len(params))))
    placed = []
    for shards in draw(st.lists(sets, max_size=4)):
        n = draw(st.integers(0, len(indices)))
        placed.append((shards, sorted(indices[:n])))
        indices = indices[n:]
    return Layout.build(params, k, placed=placed)


@given(layouts())
def test_split_then_assemble_is_identity(layout):
    """Pieces are disjoint, cover every element, and say where in the shard it is."""
    values = {p.name: np.arange(p.size) + 1000 * p.index for p in layout.parameters}
    shards = []
    for i in range(layout.n_shards):
        vectors = {d: np.full(n, -1) for d, n in layout.n_elements[i].items()}
        for piece in layout.pieces[i]:
            assert piece.shard == i
            assert piece.parameter.shards is None or i in piece.parameter.shards
            assert piece.size > 0
            vector = vectors[piece.parameter.dtype]
            part = values[piece.parameter.name][piece.start : piece.stop]
            vector[piece.local : piece.local + piece.size] = part
        assert all((v >= 0).all() for v in vectors.values())
        assert layout.dense_nbytes(i) == sum(
            np.dtype(d).itemsize * len(v) for d, v in vectors.items()
        )
        shards.append(vectors)
    for p in layout.parameters:
        found = np.full(p.size, -1)
        at = 0
        for piece in layout.pieces_of[p.index]:
            vector = shards[piece.shard][p.dtype]
            found[piece.start : piece.stop] = vector[piece.local :][: piece.size]
            assert piece.start == at
            at = piece.stop
        np.testing.assert_array_equal(found, values[p.name])
    assert [x for row in layout.pieces for x in row if x.parameter.size == 0] == []


@given(layouts())
def test_vectors_are_cut_like_array_split(layout):
    """Over the shards they are placed on, and one behind the other in each shard."""
    ends = [dict.fromkeys(layout.lengths, 0) for _ in range(layout.n_shards)]
    for vector, n in layout.vectors.items():
        of = [
            np.arange(p.size) + p.offset
            for p in layout.parameters
            if p.vector == vector
        ]
        np.testing.assert_array_equal(np.concatenate(of), np.arange(n))
        over = range(layout.n_shards) if vector.shards is None else vector.shards
        parts = layout.parts[vector]
        assert [part.shard for part in parts] == [*over]
        for part, split in zip(
            parts, np.array_split(np.arange(n), len(over)), strict=True
        ):
            np.testing.assert_array_equal(np.arange(part.start, part.stop), split)
            assert part.local == ends[part.shard][vector.dtype]
            ends[part.shard][vector.dtype] += part.size
    assert tuple(ends) == layout.n_elements


@given(layouts())
def test_a_parameter_meets_a_shard_once(layout):
    for row in layout.pieces:
        indices = [piece.parameter.index for piece in row]
        assert indices == sorted(set(indices))


@given(st.integers(0, 100), st.integers(1, 20))
def test_bounds_are_those_of_array_split(n, k):
    lengths = [len(part) for part in np.array_split(np.arange(n), k)]
    borders = [0, *itertools.accumulate(lengths)]
    assert [bounds(n, k, i) for i in range(k)] == [*itertools.pairwise(borders)]
    assert max(lengths) - min(lengths) <= 1


@given(layouts())
def test_the_wire_form_says_everything(layout):
    assert Layout.from_wire(layout.to_wire()) == layout


def test_ten_thousand_shards_and_a_thousand_parameters_build_quickly():
    params = {f"p{i}": ((33,), "float32") for i in range(1000)}
    start = time.process_time()
    layout = Layout.build(params, 10_000)
    n = sum(map(len, layout.pieces))
    assert n == sum(map(len, layout.pieces_of.values()))
    assert time.process_time() - start < 2


def test_what_is_placed_goes_to_its_shards_and_the_rest_to_all():
    shapes = dict.fromkeys(("a", "b", "c"), ((6,), "float32"))
    layout = Layout.build(shapes, 3, placed=[([1], [0]), ([0, 2], [2])])
    found = [
        [(p.parameter.name, p.start, p.stop, p.local) for p in row]
        for row in layout.pieces
    ]
    assert found == [
        [("b", 0, 2, 0), ("c", 0, 3, 2)],
        [("a", 0, 6, 0), ("b", 2, 4, 6)],
        [("b", 4, 6, 0), ("c", 3, 6, 2)],
    ]


@pytest.mark.parametrize(
    ("placed", "said"),
    [
        ([([], [0])], "name some of them, in ascending order"),
        ([([2, 1], [0])], "ascending order"),
        ([([1, 1], [0])], "ascending order"),
        ([([3], [0])], r"shards \[3\] of 3"),
        ([([-1], [0])], r"shards \[-1\] of 3"),
        ([([1], [2])], "number 2 of 2 parameters"),
        ([([1], [-1])], "number -1 of 2"),
        ([([1], [0]), ([2], [0])], "or twice"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(placed, said):
    with pytest.raises(LayoutError, match=said):
        Layout.build({"w": ((6,), "int8"), "v": ((6,), "int8")}, 3, placed=placed)


def test_the_slices_of_a_net_are_balanced_and_in_order():
    """S7, S8: loads differ by at most one, a parameter's pieces are in order."""
    sizes = 2400, 32, 25600, 32, 51200, 64, 57600, 10
    shapes = {f"p{i}": ((n,), "float32") for i, n in enumerate(sizes)}
    one = Layout.build(shapes, 1)
    assert [p.size for p in one.pieces[0]] == [*sizes]
    four = Layout.build(shapes, 4)
    loads = [four.n_elements[i]["float32"] for i in range(4)]
    assert loads == [34235, 34235, 34234, 34234]
    assert [[p.size for p in four.pieces_of[i]] for i in range(8)] == [
        [2400],
        [32],
        [25600],
        [32],
        [6171, 34235, 10794],
        [64],
        [23376, 34224],
        [10],
    ]


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
