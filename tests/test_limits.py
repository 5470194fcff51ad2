"""Requests of absurd sizes, refused by arithmetic: at the client, and once more."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import LayoutError, limits
from daskps.cluster.directory.placement import StoreRequest, reserve
from daskps.store.blueprints import Wanted, blueprint

OPTIONS: dict[str, Any] = {"optimizer": None, "seed": 0}
MANY = limits.MOST_PARAMETERS + 1


class Named(dict):
    """A mapping that says how many it has and cannot be walked through."""

    def __init__(self, n, name):
        super().__init__()
        self.n, self.name = n, name

    def items(self):
        return ((self.name.format(i), np.float32(0)) for i in range(self.n))


def absurd():
    """What is too large, and the words that say so."""
    spec = daskps.ArraySpec
    yield {"shards": 10**9}, {"w": 0.0}, "at most 16,384, found 1,000,000,000"
    yield {"shards": 16_385}, {"w": 0.0}, "at most 16,384, found 16,385"
    yield {}, Named(MANY, "w{}"), "32,769 parameters are more than the 32,768"
    dtypes = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2")
    wide = {d: spec((1,), d) for d in dtypes}
    yield {"shards": 16_384}, wide, "come to 147,465 pieces"
    yield {}, {"w" * (2**24 + 1): 0.0}, "16,777,217 bytes of names, more than"
    yield {}, {"w": spec((2**45 + 1,))}, "140,737,488,355,332 bytes of values"
    yield {}, {"w": spec((10**9,) * 40)}, "bytes of values"
    yield {}, {"w": spec((1,) * 65)}, "'w' has 65 axes, more than the 64"


def request(params, shards):
    return StoreRequest(
        uid="u",
        name="n",
        client="c",
        session=True,
        params=params,
        tables=[],
        unbounded=[],
        shards=shards,
        servers="auto",
        rules=b"",
        optimizers=[],
        slots=[],
        overwrite=False,
        memory_share=0.5,
        machine=True,
        wait_seconds=1.0,
    )


@pytest.mark.parametrize(("options", "params", "said"), [*absurd()])
def test_an_absurd_store_is_refused_at_the_client(options, params, said):
    with pytest.raises(LayoutError, match=said):
        blueprint(params, where=Wanted(options.get("shards"), "auto", None), **OPTIONS)


@pytest.mark.parametrize(("options", "params", "said"), [*absurd()])
def test_an_absurd_store_is_refused_by_the_directory(options, params, said):
    scheduler: Any = SimpleNamespace(workers={}, id="s")
    rows = [
        (name, list(getattr(value, "shape", ())), str(getattr(value, "dtype", "f8")))
        for name, value in params.items()
    ]
    with pytest.raises(LayoutError, match=said):
        reserve(scheduler, request(rows, options.get("shards")), ["a"], {})


def test_parameters_that_are_placed_in_too_many_ways_are_refused():
    scheduler: Any = SimpleNamespace(workers={}, id="s")
    rows = [(f"w{i}", [1], "float32") for i in range(4_000)]
    wanted = replace(
        request(rows, 64),
        placement=[(["a", "b"][: 1 + i % 2], [i]) for i in range(4_000)],
    )
    with pytest.raises(LayoutError, match=r"come to 138,000 pieces.*fewer servers"):
        reserve(scheduler, wanted, ["a", "b"], {})


@pytest.mark.parametrize("shape", [[-1], [1.5], ["x"], [True], [None]])
def test_the_directory_refuses_shapes_that_are_none(shape):
    scheduler: Any = SimpleNamespace(workers={}, id="s")
    with pytest.raises(LayoutError, match="a shape has whole numbers"):
        reserve(scheduler, request([("w", shape, "f4")], 1), ["a"], {})


def test_the_largest_of_each_is_taken():
    scheduler: Any = SimpleNamespace(
        workers={"a": SimpleNamespace(memory_limit=0)}, id="s"
    )
    entry = reserve(scheduler, request([("w", [2**20], "float32")], 16_384), ["a"], {})
    assert len(entry.owners) == 16_384
    limits.check_parameters([("w", [1], "f4")], limits.MOST_PARAMETERS, 1)
    limits.check_trainers(limits.MOST_TRAINERS, graph=False)
    limits.check_trainers(limits.MOST_PARTS, graph=True)


@pytest.mark.parametrize(("size", "graph"), [(0, True), (1025, False), (16_385, True)])
def test_trainers_that_are_too_many_are_refused(size, graph):
    with pytest.raises(LayoutError, match=f"trainers={size:,} is not possible"):
        limits.check_trainers(size, graph=graph)


def test_parts_may_go_on_for_ever():
    store: Any = None
    parts: Any = itertools.count()
    with pytest.raises(LayoutError, match="trainers=1,025 is not possible"):
        daskps.run(store, print, parts)
    with pytest.raises(ValueError, match="k must be at most 16,384"):
        daskps.partition(np.zeros(3), None, 10**9)


def test_the_reference_has_every_limit():
    page = Path(__file__).parents[1] / "docs" / "reference.md"
    table = page.read_text().partition("## Limits")[2]
    for name in vars(limits):
        if name.isupper():
            assert f"{getattr(limits, name):,}" in table, name
