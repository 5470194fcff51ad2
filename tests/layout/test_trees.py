"""Names of parameters in mappings, lists and tuples, and the way back."""

from __future__ import annotations

from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import pytest

from daskps import ArraySpec, RowGrad, TableSpec, unflatten
from daskps.errors import LayoutError
from daskps.layout.trees import flatten, is_tree

W = np.zeros(2)


class Layer(NamedTuple):
    w: Any
    b: Any


def test_nested_mappings_flatten_with_a_slash():
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e/f": 3}) == {
        "a/b": 1,
        "a/c/d": 2,
        "e/f": 3,
    }


@pytest.mark.parametrize("name", ["a/b", " ", "ünï✓", "x" * 10_000, "/", "."])
def test_any_name_will_do(name):
    assert flatten({name: 1}) == {name: 1}


@pytest.mark.parametrize(
    "params", [{"a": {"b": 1}, "a/b": 2}, {"a/b": 2, "a": {"b": 1}}]
)
def test_a_name_given_nested_and_flat_is_refused(params):
    with pytest.raises(LayoutError, match=r"'a/b' is given twice.*rename"):
        flatten(params)


def test_names_that_are_no_text_or_empty_are_refused():
    with pytest.raises(TypeError, match="names are str, found 3 of type int"):
        flatten({"a": {3: 1}})
    with pytest.raises(LayoutError, match="empty parameter name under 'a/'"):
        flatten({"a": {"": 1}})


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ([W, W], ["0", "1"]),
        ((W, 0.5), ["0", "1"]),
        ([{"w": 1.0}, {"w": 2.0}], ["0/w", "1/w"]),
        ({"net": [(W, W), [1, 2, 3], W]}, ["net/0/0", "net/0/1", "net/1", "net/2"]),
        ({"net": [[1, 2], [3, 4]]}, ["net"]),
        ({"w": [[1.0, [W]]]}, ["w/0/0", "w/0/1/0"]),
        ({"w": [da.zeros(2), da.zeros(3)]}, ["w/0", "w/1"]),
        ([ArraySpec(3), TableSpec(4, 2)], ["0", "1"]),
        ([RowGrad([1], [[2.0]])], ["0"]),
        (Layer(W, [np.float64(1), 2]), ["0", "1"]),
        ({"w": []}, ["w"]),
        ([W] * 12, [str(place) for place in range(12)]),
    ],
)
def test_a_list_with_an_array_in_it_is_a_tree(tree, names):
    """One of numbers alone is an array, as NumPy sees it."""
    assert list(flatten(tree)) == names


def test_lists_that_share_or_repeat_themselves_are_looked_at_once():
    """64 levels of two references each would be 2**64 looks."""
    deep: list[Any] = [1.0]
    for _ in range(64):
        deep = [deep, deep]
    assert not is_tree(deep)
    endless: list[Any] = [1.0]
    endless += [endless, endless]
    assert not is_tree(endless)
    assert is_tree([deep, W])


@pytest.mark.parametrize(
    "given", [W, [1.0, 2.0], 3, "w", None, np.float32(1), [("w", W)], [W, [b"b"]]]
)
def test_what_names_nothing_is_no_tree(given):
    assert not is_tree(given)


@pytest.mark.parametrize(
    "tree",
    [
        {"dense": [{"w": 1, "b": 2}, {"w": 3}], "scale": 4},
        [W, [W, W], {"a": W}],
        {"a": {"1": 1, "2": 2}},
        {"a/b": 1},
    ],
)
def test_there_is_a_way_back(tree):
    """Names are nested again, places become lists; with `like` it is exact."""
    back = unflatten(flatten(tree))
    assert flatten(back).keys() == flatten(tree).keys()
    if tree != {"a/b": 1}:
        assert np.array_equal(str(back), str(tree))
    assert str(unflatten(flatten(tree), like=tree)) == str(tree)


def test_twelve_places_are_in_their_order():
    """By number, not by text, and whatever order they come in."""
    flat = {str(place): place for place in reversed(range(12))}
    assert unflatten(flat) == list(range(12))
    assert unflatten({"0": 1, "2": 3}) == {"0": 1, "2": 3}


def test_like_makes_tuples_and_named_tuples_again():
    like = (W, [Layer(W, 0.5)], {"0": W})
    flat = {"0": 1, "1/0/0": 2, "1/0/1": 3, "2/0": 4}
    assert unflatten(flat, like=like) == (1, [Layer(2, 3)], {"0": 4})


@pytest.mark.parametrize(
    ("flat", "like", "error", "message"),
    [
        ({"a": 1, "a/b": 2}, None, LayoutError, "'a/b' and a name above or below"),
        ({"a/b": 2, "a": 1}, None, LayoutError, "'a' and a name above or below"),
        ([W], None, TypeError, "mapping of flat names.*found list"),
        ({3: W}, None, TypeError, "names are str, found 3"),
        ({"0": 1}, [W, W], LayoutError, r"`like` has \['1'\]"),
        ({"0": 1, "1": 2}, [W], LayoutError, r"params has \['1'\]"),
        ({"0": 1}, W, LayoutError, "like is a mapping, list or tuple"),
    ],
)
def test_what_has_no_way_back_is_refused(flat, like, error, message):
    with pytest.raises(error, match=message):
        unflatten(flat, like=like)
