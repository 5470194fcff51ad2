"""Folders of parameters: one level, short, and different whatever the names."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.checkpoint.arrays import key

SAFE = re.compile(r"(?!__)[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


@pytest.mark.parametrize("name", ["w", "layer1.weight", "a_b-c.0", "_x", "0", "a" * 64])
def test_plain_names_stay(name: str) -> None:
    assert key(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *(".", "..", "../w", "a/b", "/", "\\", "", " ", "zarr.json", "__w", "c."),
        *("W", "x" * 10_000, "ü", "\ud800", "a\0b", "w\n", "~", "a" * 65),
        *(key("a/b"), key("W")),
    ],
)
def test_other_names_are_read_and_hashed(name: str) -> None:
    found = key(name)
    assert found != name
    assert SAFE.fullmatch(found)
    assert found.lower() != key(found.lower()) != found


def test_what_can_be_read_of_a_name() -> None:
    assert re.fullmatch(r"block_0_W\.[0-9a-f]{20}", key("block/0/W"))
    assert re.fullmatch(r"x\.[0-9a-f]{20}", key("///"))


@given(st.lists(st.text(max_size=8), unique=True, min_size=2, max_size=8))
def test_no_two_names_have_one_folder_where_case_is_folded(names: list[str]) -> None:
    assert len({key(name).casefold() for name in names}) == len(names)


@given(st.text())
def test_any_name_is_a_safe_folder(name: str) -> None:
    assert SAFE.fullmatch(key(name))
    assert not key(name).endswith(".")
