"""Parts of a checkpoint, under other names and dtypes, in models that have grown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.errors import CheckpointError, LayoutError, UnknownParameterError
from tests import inprocess

SHAPES: dict[str, Any] = {
    "enc/w": (7, 5),
    "enc/b": (5,),
    "head/w": (5, 2),
    "head/b": (2,),
}
RULE = optim.Adam(0.1)
MASTER = daskps.ArraySpec((2,), "float16", 1.0, master="float32")


#: Hosts write and read files in threads of their own.
pytestmark = pytest.mark.leaky


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    with inprocess.cluster() as made:
        yield made


def grads(seed: int, names: Any = SHAPES) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=SHAPES[name]).astype("f4") for name in names}


def trained(folder: Path) -> Any:
    """A store with arrays, tables of both kinds and integers, after three pushes."""
    params: dict[str, Any] = {n: np.zeros(s, "f4") for n, s in SHAPES.items()}
    params["emb"] = daskps.TableSpec(20, 3, init=1.0)
    params["words"] = daskps.TableSpec(None, 3, init=0.5)
    params["n"] = np.arange(3)
    store = daskps.create(params, optimizer=RULE, shards=2)
    for seed in range(3):
        ids = np.array([1, 5, 9 + seed])
        rows = daskps.RowGrad(ids, np.full((3, 3), seed + 1, "f4"))
        store.push({**grads(seed), "emb": rows, "words": rows})
    store.save(folder)
    return store


def values(store: Any) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in store.pull().items()}


def test_part_under_other_names_goes_on_with_its_state(tmp_path: Path) -> None:
    store = trained(tmp_path)
    found = daskps.restore(
        tmp_path,
        names=["enc/*", "emb", "words"],
        rename={"enc/*": "body/*/0", "emb": "rows"},
        shards=3,
    )
    assert [*found.pull()] == ["body/w/0", "body/b/0"]
    assert found.version == 3
    for before, after in (("enc/w", "body/w/0"), ("enc/b", "body/b/0")):
        for one, name in ((store, before), (found, after)):
            one.push({name: grads(7)[before]})
        assert found[after].pull().tobytes() == store[before].pull().tobytes()
    for name, new in (("emb", "rows"), ("words", "words")):
        for one, of in ((store, name), (found, new)):
            one[of].push([1, 5, 17], np.ones((3, 3), "f4"))
        wanted = store[name].pull(np.arange(20)).tobytes()
        assert found[new].pull(np.arange(20)).tobytes() == wanted
    assert found["words"].ids().tolist() == store["words"].ids().tolist()


def test_grown_model_keeps_the_rest(tmp_path: Path) -> None:
    store = trained(tmp_path)
    wide = np.arange(12.0, dtype="f4").reshape(4, 3)
    init = {
        "top/w": daskps.ArraySpec((5, 3), "float32", 2.0),
        "top/b": np.ones(3),
        "more": daskps.TableSpec(4, 3, init=wide),
        "any": daskps.TableSpec(None, 2),
        "words": 0.25,
    }
    rule = {"top/*": optim.SGD(1.0), "*": RULE}
    found = daskps.restore(
        tmp_path, names=["enc/*", "words", "emb"], init=init, optimizer=rule
    )
    assert [*found.pull()] == ["enc/w", "enc/b", "top/w", "top/b"]
    assert found["top/w"].pull().tolist() == [[2.0] * 3] * 5
    assert found["more"].pull([3, 0]).tolist() == wide[[3, 0]].tolist()
    assert found["words"].pull([10**6]).tolist() == [[0.25] * 3]
    for one in (store, found):
        one.push({n: grads(8)[n] for n in ("enc/w", "enc/b")})
        one["emb"].push([5], np.ones((1, 3)))
    for name in ("enc/w", "enc/b"):
        assert found[name].pull().tobytes() == store[name].pull().tobytes()
    assert found["emb"].pull([5]).tobytes() == store["emb"].pull([5]).tobytes()
    found.push({"top/b": np.ones(3)})
    found["any"].push([-4], np.ones((1, 2)))
    assert found["top/b"].pull().tolist() == [0.0] * 3


def test_new_parameters_are_those_that_create_takes(tmp_path: Path) -> None:
    """Nested ones, and a full-precision copy of float16."""
    trained(tmp_path)
    rules = {"new/*": optim.SGD(2.0**-12), "*": RULE}
    found = daskps.restore(tmp_path, init={"new": {"half": MASTER}}, optimizer=rules)
    for _ in range(4):
        found.push({"new/half": np.full(2, -1.0, "f4")})
    # A step is too small for a float16 that is 1.
    assert found["new/half"].pull().tolist() == [1.0 + 2.0**-10] * 2


def test_state_of_other_rules_is_left_behind(tmp_path: Path) -> None:
    store = trained(tmp_path)
    rules = {"enc/*": optim.SGD(0.5, momentum=0.9), "head/*": RULE, "*": None}
    found = daskps.restore(tmp_path, names="*/*", optimizer=rules)
    assert values(found) == {n: v for n, v in values(store).items() if "/" in n}
    fresh = daskps.create({"w": store["enc/b"].pull()}, optimizer=rules["enc/*"])
    for one in (store, found):
        one.push({"head/b": grads(9)["head/b"]})
    for _ in range(2):
        found.push({"enc/b": np.ones(5)})
        fresh.push({"w": np.ones(5)})
    assert found["enc/b"].pull().tobytes() == fresh["w"].pull().tobytes()
    assert found["head/b"].pull().tobytes() == store["head/b"].pull().tobytes()
    # Of all as it was, that is an error.
    with pytest.raises(CheckpointError, match="slots of 'enc/w'"):
        daskps.restore(tmp_path, optimizer={"enc/*": rules["enc/*"], "*": RULE})
    # Of rows of any ids too: their state is not to be taken apart.
    with pytest.raises(CheckpointError, match="slots of 'words'"):
        daskps.restore(tmp_path, names="words", optimizer=rules["enc/*"])


def test_other_dtypes(tmp_path: Path) -> None:
    store = trained(tmp_path)
    dtype = {"enc/*": "float16", "head/*": np.float64, "emb": "f8"}
    found = daskps.restore(tmp_path, dtype=dtype)
    kinds = {n: v.dtype.name for n, v in found.pull().items()}
    assert kinds == {
        "enc/w": "float16",
        "enc/b": "float16",
        "head/w": "float64",
        "head/b": "float64",
        "n": "int64",
    }
    for name, value in found.pull().items():
        wanted = store[name].pull().astype(value.dtype)
        assert value.tobytes() == wanted.tobytes()
    rows = store["emb"].pull(np.arange(20)).astype("f8")
    assert found["emb"].pull(np.arange(20)).tobytes() == rows.tobytes()
    found.push({"head/b": np.ones(2)})
    # One dtype for all is for floats.
    every = daskps.restore(tmp_path, dtype="float64")
    assert {v.dtype.name for v in every.pull().values()} == {"float64", "int64"}
    kinds = {n: every[n].dtype.name for n in ("emb", "words")}
    assert kinds == {"emb": "float64", "words": "float32"}
    with pytest.raises(LayoutError, match="cannot be int32"):
        daskps.restore(tmp_path, dtype="int32")
    for given, said in (
        ({"n": "float32"}, "'n' is int64"),
        ({"enc/*": "int64"}, "cannot be int64"),
        ({"words": "float64"}, "'words' is float32"),
    ):
        with pytest.raises(LayoutError, match=said):
            daskps.restore(tmp_path, dtype=given)


def test_values_too_large_for_a_dtype(tmp_path: Path) -> None:
    daskps.create({"w": np.array([1.0, 1e30])}).save(tmp_path)
    with pytest.raises(CheckpointError, match="too large for float16; use a wider"):
        daskps.restore(tmp_path, dtype="float16")
    assert not [s for s in daskps.list_stores() if s.name == "w16"]
    assert daskps.restore(tmp_path, dtype="float32")["w"].pull().dtype == "float32"


@pytest.mark.parametrize(
    ("rename", "names"),
    [
        ({"[eh]*/w": "*.w"}, ["nc.w", "enc/b", "ead.w", "head/b"]),
        ({"e?c/[!b]": "x", "*": "*"}, ["x", "enc/b", "head/w", "head/b"]),
        ({"*/*": "*"}, None),
        ({"*/?": "*.1"}, None),
        ({"*/*": "*-of-*"}, ["enc-of-w", "enc-of-b", "head-of-w", "head-of-b"]),
    ],
)
def test_stars_stand_for_what_they_matched(
    tmp_path: Path, rename: dict[str, str], names: list[str] | None
) -> None:
    daskps.create({n: np.zeros(2) for n in SHAPES}).save(tmp_path)
    if names is None:
        with pytest.raises(LayoutError, match="would both be"):
            daskps.restore(tmp_path, rename=rename)
    else:
        assert [*daskps.restore(tmp_path, rename=rename).pull()] == names


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"names": "decoder/*"}, UnknownParameterError, r"'decoder/\*'.*'enc/w'"),
        ({"rename": {"x": "y"}}, UnknownParameterError, "rename= 'x' matches nothing"),
        ({"rename": {"enc/*": "same"}}, LayoutError, "would both be 'same'"),
        ({"rename": {"enc/w": "*"}}, LayoutError, r"more stars in '\*'"),
        ({"rename": {"enc/w": "head/w"}}, LayoutError, "would both be 'head/w'"),
        ({"dtype": {"x": "f4"}}, UnknownParameterError, "dtype= 'x' matches"),
        ({"dtype": "text"}, TypeError, "text"),
        ({"init": {"x": 1.0}}, UnknownParameterError, "an ArraySpec or a TableSpec"),
        ({"init": {"n": np.ones(2)}}, UnknownParameterError, "has its saved values"),
        ({"names": 3}, TypeError, "a list of them, found 3"),
        ({"names": [3]}, TypeError, "names= takes patterns, which are str, found 3"),
        ({"names": []}, LayoutError, "at least one parameter"),
        ({"rename": {3: "x"}}, TypeError, "rename= takes patterns, which are str"),
        ({"rename": {"enc/w": 3}}, TypeError, "rename is a mapping of patterns"),
        ({"rename": ["enc/w"]}, TypeError, "rename is a mapping of patterns"),
        ({"rename": {"enc/w": ""}}, LayoutError, "empty parameter name"),
        ({"rename": {"enc/w": "\ud800"}}, LayoutError, "half of a character"),
        ({"dtype": {3: "f4"}}, TypeError, "dtype= takes patterns, which are str"),
        ({"init": {3: np.ones(2)}}, TypeError, "found 3 of type int"),
        ({"init": 3}, TypeError, "mapping of parameter names"),
        ({"init": {"\ud800": daskps.TableSpec(2, 2)}}, LayoutError, "half of a char"),
        ({"init": {"half": MASTER}}, LayoutError, "'half' has a master"),
        ({"names": ["enc/w"], "optimizer": {"y": RULE}}, LayoutError, "'y'"),
    ],
)
def test_refusals(
    tmp_path: Path, given: Any, error: type[Exception], said: str
) -> None:
    trained(tmp_path)
    before = len(daskps.list_stores())
    with pytest.raises(error, match=said):
        daskps.restore(tmp_path, **given)
    assert len(daskps.list_stores()) == before
