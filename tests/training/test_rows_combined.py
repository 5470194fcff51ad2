"""What rows of tables go with, and all ways to give them that are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import RowGrad, TableSpec, optim
from daskps.codecs import BFloat16, TopK, TwoBit
from daskps.combination import Combination, find_refusal

X, IDS = np.zeros((16, 1)), [1, 5, 1]
ROWS = RowGrad(IDS, np.ones((3, 2)))


@pytest.fixture
def store(way):
    params = {"w": np.zeros(2), "emb": TableSpec(6, 2, "float64", init=1.0)}
    with daskps.create(params, optimizer=optim.SGD(0.5)) as s:
        yield s


def both(params, X, y):
    return {"w": np.ones(2), "emb": ROWS}


def of_batch(params, X, y):
    return {"w": np.ones(2), "emb": np.ones_like(params["emb"])}


def ids_of(X):
    return IDS


def train(store, gradient=both, **how):
    return daskps.train(store, gradient, X, trainers=1, callbacks=(), **how)


def first(stacked, weights):
    return stacked[0]


#: What takes arrays alone, and what asks for it: of `train`, and of `run`.
ASKED: dict[str, tuple[list[dict[str, Any]], dict[str, Any] | None]] = {
    "reduce": (
        [{"reduce": first}, {"reduce": first, "execution": "graph"}],
        {"reduce": first},
    ),
    "codec": (
        [{"codec": TwoBit(1.0), "sync": "asp"}, {"codec": TopK(ratio=0.5)}],
        {"codec": TopK(threshold=1.0), "sync": "ssp"},
    ),
    "graph": ([{"codec": "bf16", "execution": "graph"}], None),
    "sync_every": ([{"sync_every": 2}, {"sync_every": "epoch", "sync": "asp"}], None),
    "average": ([{"average": "models"}], None),
    "assign": ([], None),
    "aggregate": ([], None),
}
#: That with rows.
REFUSED = {
    "reduce": Combination("train", reduce="function", table="emb"),
    "codec": Combination("train", codec=TwoBit(1.0), table="emb"),
    "graph": Combination("train", execution="graph", codec=BFloat16(), table="emb"),
    "sync_every": Combination("train", sync_every=2, table="emb"),
    "average": Combination("train", average="models", table="emb"),
    "assign": Combination("assign", table="emb"),
    "aggregate": Combination("aggregate", table="emb"),
}


def push(trainer, part):
    trainer.push({"emb": ROWS})


def assign(trainer, part):
    trainer.assign({"emb": ROWS})


def refused(store, what):
    """All ways to give rows are refused, and say what to do instead."""
    said = f"^{re.escape(str(find_refusal(REFUSED[what])))}"
    tries: list[Callable[[], Any]] = []
    if what == "aggregate":
        tries.append(lambda: store.aggregate([{"emb": ROWS}]))
    elif what == "assign":
        tries.append(partial(daskps.run, store, assign, [0]))
    else:
        of_train, of_run = ASKED[what]
        tries += [partial(train, store, **how) for how in of_train]
        also: Any = {"gradient": of_batch, "rows": {"emb": ids_of}}
        tries += [partial(train, store, **also, **how) for how in of_train]
        if of_run is not None:
            tries.append(partial(daskps.run, store, push, [0], **of_run))
    for act in tries:
        with pytest.raises(daskps.PushRejectedError, match=said):
            act()
    assert store.version == 0


def plain(store):
    train(store, both, reduce="sum")
    train(store, of_batch, rows={"emb": ids_of}, sync="asp")
    assert store["emb"].pull([1, 5, 0]).tolist() == [[-1, -1], [0, 0], [1, 1]]


def in_graph(store):
    train(store, both, execution="graph")
    train(store, of_batch, rows={"emb": ids_of}, execution="graph")
    assert store["emb"].pull([1, 5, 0]).tolist() == [[-1, -1], [0, 0], [1, 1]]


def views(trainer, part):
    found = trainer.pull(rows={"emb": IDS}, copy=False)
    found["emb"] += 7  # a copy
    return found["w"].flags.writeable, trainer.pull((), rows={"emb": IDS}, copy=False)


def copies(store):
    [(_, found)] = daskps.run(store, views, [0])
    assert found["emb"].tolist() == [[1, 1]] * 3


def validated(store):
    seen = []

    def validate(params):
        seen.append([*params])
        return {"n": 1.0}

    how: dict[str, Any] = {"validate": validate, "stop": lambda history: True}
    train(store, of_batch, rows={"emb": ids_of}, epochs=3, **how)
    assert seen == [["w"]]


def as_dask_array(store):
    expected = np.array([1, 0, 1, 1, 1, 0.5])
    train(store)
    assert (store["emb"].to_dask_array().compute() == expected[:, None]).all()


def in_words(store):
    train(store, both, codec="bf16")
    train(store, of_batch, rows={"emb": ids_of}, codec="int8", execution="auto")
    found = store["emb"].pull([1, 5, 0])
    np.testing.assert_allclose(found, [[-1, -1], [0, 0], [1, 1]], atol=1e-7)


#: What goes with rows: by what the docs call it.
GOES: Mapping[str, Callable[[Any], None]] = {
    '`reduce="mean"`, `"sum"`': plain,
    '`execution="graph"`': in_graph,
    '`codec=` of 16 bits, `"int8"`, one of your own that leaves nothing over': in_words,
    "`copy=False`": copies,
    "`validate`, `stop`": validated,
    "`to_dask_array()`": as_dask_array,
}


@pytest.mark.parametrize("way", ["inside"], indirect=True)
@pytest.mark.parametrize("what", [*ASKED])
def test_what_takes_arrays_alone_refuses_rows(store, what):
    refused(store, what)


@pytest.mark.parametrize(
    ("way", "what"),
    # Dask's arrays are of its own clusters.
    [("process" if "dask" in what else "inside", what) for what in GOES],
    indirect=["way"],
)
def test_what_goes_with_rows(store, what):
    GOES[what](store)


def test_the_docs_have_a_line_for_each():
    text = Path(__file__).parents[2].joinpath("docs", "tables.md").read_text("utf-8")
    _, _, section = text.partition("## What goes with rows")
    lines = [line.split(" | ") for line in section.splitlines()]
    goes = [line[0].removeprefix("| ") for line in lines if line[0].startswith("| `")]
    assert goes == [*GOES]
