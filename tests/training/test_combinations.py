"""What goes with what: every combination without a cluster, forty of them on one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import daskps
from daskps.codecs import TopK
from daskps.combination import GRADIENTS, Combination, check_rows, find_refusal
from daskps.training import job
from tests.training.cells import Cell, attempt, every_cell, expected, store_of

PAGE = Path(__file__).parents[2].joinpath("docs", "combinations.md")

Choice = Callable[[Combination], bool]


def codec_is(*names: str) -> Choice:
    return lambda of: of.codec is not None and of.codec.name in names


#: What the page calls a choice, and which combinations have it.
CHOICES: dict[str, Choice] = {
    '`sync="ssp"`, `"asp"`': lambda of: of.policy.name != "bsp",
    "a `reduce=` function": lambda of: of.reduce == "function",
    '`reduce="sum"`, or a function': lambda of: of.reduce != "mean",
    '`execution="graph"`': lambda of: of.execution == "graph",
    '`average="models"`': lambda of: of.average == "models",
    "any `codec=`": lambda of: of.codec is not None,
    "any `pull_codec=`": lambda of: of.pull_codec is not None,
    "a `codec=` not of 16 bits": lambda of: (
        of.codec is not None and of.codec.name not in ("bf16", "fp16")
    ),
    "`pull_codec=` not of 16 bits": lambda of: (
        of.pull_codec is not None and of.pull_codec.name not in ("bf16", "fp16")
    ),
    "`Trainer.assign`": lambda of: of.verb == "assign",
    "`aggregate`": lambda of: of.verb == "aggregate",
    "`TwoBit`, `TopK`, one of your own with `feedback`": codec_is(
        "2bit", "topk", "Quarters"
    ),
    '`sync_every=` not `"batch"`': lambda of: of.sync_every != 1,
    "rows": lambda of: bool(of.table),
    "rows that are sent": lambda of: bool(of.table) and of.verb != "pull",
    "gradients of rows": lambda of: bool(of.table) and of.verb in GRADIENTS,
    'gradients of rows, `execution="graph"`': lambda of: (
        bool(of.table) and of.execution == "graph"
    ),
    "anything": lambda of: True,
}


def lines() -> list[tuple[str, str]]:
    """Return the pairs that the page says are refused."""
    found = []
    for line in PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] in CHOICES:
            found.append((cells[0], cells[1]))
    return found


def test_every_combination_is_as_the_page_says():
    """Refused where two choices are on a line of the page, and nowhere else."""
    pairs = lines()
    assert len(pairs) == 16
    used, n, refused = set(), 0, 0
    for cell in every_cell():
        said = [pair for pair in pairs if all(CHOICES[c](cell.of) for c in pair)]
        error = find_refusal(cell.of)
        assert (error is not None) == bool(said), (str(cell), error, said)
        used |= {*said}
        n, refused = n + 1, refused + bool(said)
    assert used == {*pairs}
    assert (n, refused) == (15_938, 13_646)


def test_rows_that_are_refused_are_refused_as_a_push_is():
    """By the name of the first table; where they go none is named."""
    refused = Combination("train", reduce="function")
    with pytest.raises(daskps.PushRejectedError, match="rows of table 'emb' do not go"):
        check_rows(refused, ["emb", "other"])
    check_rows(refused, [])
    check_rows(Combination("train"), ["emb"])


def test_what_cannot_be_asked_for_is_no_argument():
    """A loop of one's own is resident; its trainer has views, and `train` none."""
    of_run = inspect.signature(daskps.run).parameters
    of_train = inspect.signature(daskps.train).parameters
    assert not {"execution", "sync_every", "average", "pull_codec"} & {*of_run}
    assert "copy" not in of_train


@pytest.mark.parametrize("way", ["inside"], indirect=True)
@pytest.mark.parametrize(
    ("codec", "table", "how", "execution"),
    [
        (None, "", {}, "graph"),
        ("bf16", "", {}, "graph"),
        (TopK(ratio=0.5), "", {}, "resident"),
        (None, "emb", {}, "graph"),
        # A gradient may have rows, and is not refused for what nobody asked for.
        ("bf16", "emb", {}, "resident"),
        ("bf16", "emb", {"sync_every": 2}, "graph"),
        (None, "", {"sync": "asp"}, "resident"),
        (None, "", {"average": "models"}, "graph"),
    ],
)
def test_auto_is_the_graph_only_where_that_is_not_refused(
    way, monkeypatch, codec, table, how, execution
):
    """Five trainers on one thread are more than four."""

    async def one(*_):
        return {"worker": 1}

    monkeypatch.setattr(job, "threads_of", one)
    with store_of(Cell(Combination("train", table=table))) as store:
        result = daskps.train(
            store, no_gradient, np.zeros((5, 1)), trainers=5, codec=codec, **how
        )
    assert result.execution == execution


def no_gradient(params, X, y):
    return {"w": np.zeros(7, "f4"), "b": np.zeros(3)}


# -- forty of them ------------------------------------------------------------------------


@cache
def forty() -> list[Cell]:
    """Every choice in one that goes and in one that does not, the rest by chance."""
    cells = [*every_cell()]
    order = np.random.default_rng(40).permutation(len(cells))
    goes: list[Cell] = []
    refused: dict[str, Cell] = {}
    seen: set[Any] = set()
    rest = []
    for cell in (cells[i] for i in order):
        error = find_refusal(cell.of)
        if error is not None:
            refused.setdefault(re.sub("'.*?'", "", str(error)), cell)
            continue
        choices = {*str(cell).split(","), cell.views}
        if choices <= seen:
            rest.append(cell)
        else:
            goes.append(cell)
        seen |= choices
    return [*refused.values(), *(goes + rest)[: 40 - len(refused)]]


def test_forty_have_each_choice_and_each_refusal():
    cells = forty()
    assert len({*map(str, cells)}) == 40
    goes = [cell for cell in cells if find_refusal(cell.of) is None]
    assert len(goes) == 24
    every = {choice for cell in every_cell() for choice in str(cell).split(",")}
    # A line of the page each.
    assert len(cells) - len(goes) == len(lines())
    tried = {choice for cell in goes for choice in str(cell).split(",")}
    # That is refused whatever it goes with.
    assert every - tried == {"pull_codec=int8", "pull_codec=Halved"}


@pytest.mark.parametrize("way", ["inside", "process"], indirect=True)
@pytest.mark.parametrize("number", range(40))
def test_what_goes_does_what_it_says_and_the_rest_changes_nothing(way, number):
    tried(forty()[number])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["inside"], indirect=True)
@pytest.mark.parametrize("number", range(20))
def test_so_does_every_one(way, number):
    """All that go, and one in ten of those that do not."""
    cells = [*every_cell()]
    goes = [cell for cell in cells if find_refusal(cell.of) is None]
    for cell in (goes + cells[::10])[number::20]:
        tried(cell)


def tried(cell: Cell) -> None:
    """Try a combination, and compare what the parameters are after it."""
    with store_of(cell) as store:
        error = find_refusal(cell.of)
        if error is None:
            attempt(store, cell)
        else:
            with pytest.raises(type(error), match=re.escape(str(error))):
                attempt(store, cell)
            assert store.version == 0
        found = store.pull(rows={"emb": range(6)} if cell.of.table else None)
        for name, array in expected(cell, goes=error is None).items():
            np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5)
