"""Every combination of choices that can be asked for, and how one is tried.

A try is a small run of two trainers, or an aggregate; `expected` is the same in NumPy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import daskps
from daskps import RowGrad, TableSpec, codecs, optim
from daskps.codecs import BFloat16, Float16, Int8, TopK, TwoBit
from daskps.combination import Combination
from daskps.consistency import ASP, BSP, SSP, Policy
from daskps.training.functions import described

RATE = 0.5
RANKS, BATCHES, EPOCHS, ROWS = 2, 3, 2, 4
#: Of how much of what was read a gradient consists, where all ranks read the same.
READ = 0.25
IDS = np.array([1, 5, 1, 0])


class Halved(codecs.Codec):
    """One of a user's own that leaves nothing over."""

    dtype = "uint16"

    def n_words(self, n):
        return n

    def encode(self, array, words):
        words.view("f2")[:] = array

    def decode(self, words, out):
        out[:] = words.view("f2")


class Quarters(codecs.Codec):
    """One of a user's own that leaves something over."""

    dtype = "int8"
    feedback = True

    def n_words(self, n):
        return n

    def encode(self, array, words):
        words[:] = np.clip(np.trunc(array * 4), -127, 127)

    def decode(self, words, out):
        out[:] = words / 4


CODECS = (
    None,
    BFloat16(),
    Float16(),
    Int8(4),
    TwoBit(0.5),
    TopK(ratio=0.3),
    Halved(),
    Quarters(),
)
VERBS = ("push", "pushpull", "add", "assign", "pull", "allreduce")
#: The last one has a bound that nothing comes to.
POLICIES: tuple[Policy, ...] = (BSP(), SSP(), ASP(), ASP(max_staleness=999))
REDUCES = ("mean", "sum", "function")
TABLES = ("", "emb")


class Cell(NamedTuple):
    """A combination, and whether what is pulled is seen as it is."""

    of: Combination
    views: bool = False

    def __str__(self) -> str:
        said = [f"policy={described(self.of.policy)}"]
        said += [
            f"{f.name}={getattr(value, 'name', value)}"
            for f in fields(self.of)
            if f.name != "policy"
            and (value := getattr(self.of, f.name)) not in ("", None)
        ]
        return ",".join(said + ["views"] * self.views)


def every_cell() -> Iterator[Cell]:
    """Yield all there are: what `train`, `run` and `aggregate` have arguments for."""
    for choices in itertools.product(
        POLICIES,
        ("auto", "resident", "graph"),
        REDUCES,
        CODECS,
        (None, BFloat16(), Int8(), Halved()),
        (1, 2, 0),
        ("gradients", "models"),
        TABLES,
    ):
        yield Cell(Combination("train", *choices))
    for verb, policy, reduce, codec, table, views in itertools.product(
        VERBS, POLICIES, REDUCES, CODECS, TABLES, (False, True)
    ):
        if verb == "allreduce" and table:
            continue  # its arrays are any
        of = Combination(verb, policy, reduce=reduce, codec=codec, table=table)
        yield Cell(of, views)
    for table in TABLES:
        yield Cell(Combination("aggregate", table=table))


# -- a try --------------------------------------------------------------------------------


def given(tag: int) -> dict[str, Any]:
    """What one step brings, before what was read is added."""
    rng = np.random.default_rng(tag)
    found = {"w": rng.normal(size=7).astype("f4"), "b": rng.normal(size=3)}
    return found | {"emb": rng.normal(size=(4, 2)).astype("f4")}


def brought(tag: int, params: Any, *, reads: bool) -> dict[str, Any]:
    """What one step brings, of all that is in `params`; rows as these are."""
    share = READ if reads else 0.0
    return {
        n: given(tag)[n] + (share * params[n]).astype(params[n].dtype) for n in params
    }


def largest(stacked, weights):
    return np.max(stacked, axis=0)


def store_of(cell: Cell) -> Any:
    params: dict[str, Any] = {"w": np.zeros(7, "f4"), "b": np.zeros(3)}
    if cell.of.table:
        params["emb"] = TableSpec(6, 2)
    return daskps.create(
        params, optimizer=optim.SGD(RATE), shards=1 if cell.views else 3
    )


def attempt(store: Any, cell: Cell) -> None:
    """Ask for a combination, and look at what comes back."""
    of = cell.of
    if of.verb == "aggregate":
        contributions = [given(tag) for tag in range(RANKS)]
        for one in contributions:
            rows = one.pop("emb")
            if of.table:
                one["emb"] = RowGrad(IDS, rows)
        found = store.aggregate(contributions)
        for name, array in found.items():
            np.testing.assert_allclose(
                array, (given(0)[name] + given(1)[name]) / 2, 1e-6
            )
        return
    how: dict[str, Any] = {
        "sync": of.policy,
        "reduce": largest if of.reduce == "function" else of.reduce,
        "codec": of.codec,
        "callbacks": (),
    }
    reads = of.has_rounds
    if of.verb != "train":
        loop = partial(step_by_step, of.verb, bool(of.table), cell.views, reads)
        found = daskps.run(store, loop, [*range(RANKS)], **how)
        assert found == [BATCHES] * RANKS
        return
    if of.table:
        how["rows"] = {"emb": ids_of}
    X = np.repeat(np.arange(float(RANKS * BATCHES)), ROWS)[:, None]
    daskps.train(
        store,
        partial(gradient, reads, of.pull_codec),
        X,
        trainers=RANKS,
        epochs=EPOCHS,
        batch_size=ROWS,
        shuffle=False,
        execution=of.execution,
        pull_codec=of.pull_codec,
        sync_every=of.sync_every or "epoch",
        average=of.average,
        **how,
    )


def ids_of(X):
    return IDS


def gradient(reads, pull_codec, params, X, y):
    return brought(int(X[0, 0]), params, reads=reads)


def pulled(params: Any, codec: Any) -> dict[str, Any]:
    """What trainers see of parameters, which a codec may have rounded."""
    if codec is None:
        return {name: array.copy() for name, array in params.items()}
    return {name: in_words(codec, array)[0] for name, array in params.items()}


def in_words(codec: Any, array: Any, left: Any = None) -> tuple[Any, Any]:
    """What arrives of an array by a codec, and what is left over."""
    flat = np.ascontiguousarray(array).reshape(-1)
    made = codec.encode_pieces(flat, [(0, len(flat))], left)
    out = np.empty_like(flat)
    codec.decode_piece(made.words[0], out)
    return out.reshape(array.shape), made.residual


def step_by_step(verb, has_rows, views, reads, trainer, part):
    """Pull, do what the verb says, again and again."""
    rows = {"emb": IDS} if has_rows else None
    for clock, tag in enumerate(range(part * BATCHES, (part + 1) * BATCHES)):
        params = trainer.pull(rows=rows, copy=not views)
        before = params["w"].copy()
        brings = brought(tag, params, reads=reads and verb != "add")
        if has_rows:
            brings["emb"] = RowGrad(IDS, brings["emb"])
        if verb == "pull":
            trainer.tick()
        elif verb == "allreduce":
            found = trainer.allreduce(brings["w"])
            other = given((tag + BATCHES) % (RANKS * BATCHES))["w"]
            np.testing.assert_allclose(found, brings["w"] + other, 1e-5)
            trainer.tick()
        elif verb == "pushpull":
            assert {*trainer.pushpull(brings)} == {"w", "b"}
        else:
            getattr(trainer, verb)(brings)
        # Also what is seen, until the next tick.
        np.testing.assert_array_equal(params["w"], before)
        assert trainer.clock == clock + 1
    return trainer.clock


# -- the same in NumPy --------------------------------------------------------------------


class Model:
    """The store of a try, and its trainers."""

    def __init__(self, cell: Cell) -> None:
        self.of = cell.of
        self.params: dict[str, Any] = {"w": np.zeros(7, "f4"), "b": np.zeros(3)}
        if cell.of.table:
            self.params["emb"] = np.zeros((6, 2), "f4")
        self.left: list[dict[str, Any]] = [{} for _ in range(RANKS)]
        self.reads = cell.of.has_rounds

    def seen(self) -> dict[str, Any]:
        """What a trainer pulls."""
        named = dict(self.params)
        if "emb" in named:
            named["emb"] = named["emb"][IDS]
        return pulled(named, self.of.pull_codec)

    def summed(self, tags: list[int]) -> dict[str, Any]:
        """What a trainer has to say after some batches: gradients, or its copy."""
        params, total = self.seen(), dict[str, Any]()
        for tag in tags:
            for name, grad in brought(tag, params, reads=self.reads).items():
                total[name] = total[name] + grad if name in total else grad
                params[name] = params[name] - np.float32(RATE) * grad
        return params if self.of.average == "models" else total

    def arriving(self, rank: int, step: dict[str, Any]) -> dict[str, Any]:
        """What arrives of a trainer's gradients by the codec; rows added up by id."""
        codec, left = self.of.codec, self.left[rank]
        step = dict(step)
        rows = step.pop("emb", None)
        if codec is not None and self.of.verb in ("train", "push", "pushpull"):
            for name, array in step.items():
                step[name], left[name] = in_words(codec, array, left.get(name))
            if rows is not None:
                of = codec.of_rows(2)
                rows = np.stack([in_words(of, row)[0] for row in rows])
        if rows is not None:
            step["emb"] = np.zeros((6, 2), "f4")
            np.add.at(step["emb"], IDS, rows)
        return step

    def take(self, name: str, arrays: list[Any]) -> None:
        """Take what all ranks say in a round of one parameter."""
        kind = "sum" if self.of.verb == "add" else self.of.reduce
        if self.of.verb == "assign":
            kind = "mean"
        stacked = np.stack(arrays)
        of_kind: Any = {"sum": np.sum, "mean": np.mean, "function": np.max}
        found = of_kind[kind](stacked, axis=0).astype(stacked.dtype)
        if self.of.verb == "add":
            self.params[name] = self.params[name] + found
        elif self.of.verb == "assign" or self.of.average == "models":
            self.params[name] = found
        else:
            self.params[name] = self.params[name] - np.float32(RATE) * found


def groups_of(of: Combination) -> list[list[list[int]]]:
    """The batches of each synchronisation of each rank."""
    found = []
    for rank in range(RANKS):
        own, size = [*range(rank * BATCHES, (rank + 1) * BATCHES)], 1
        if of.verb == "train":
            size = of.sync_every or BATCHES
        groups = [own[at : at + size] for at in range(0, BATCHES, size)]
        found.append(groups * (EPOCHS if of.verb == "train" else 1))
    return found


def expected(cell: Cell, *, goes: bool) -> dict[str, Any]:
    """What the parameters are after a try, the rows of a table by their ids."""
    model = Model(cell)
    if not goes or cell.of.verb in ("pull", "allreduce", "aggregate"):
        return model.params
    if cell.of.verb == "add":
        model.reads = False
    by_rank = groups_of(cell.of)
    if cell.of.has_rounds:
        for row in zip(*by_rank, strict=True):
            steps = [
                model.arriving(rank, model.summed(tags))
                for rank, tags in enumerate(row)
            ]
            for name in model.params:
                model.take(name, [step[name] for step in steps])
        return model.params
    for rank, groups in enumerate(by_rank):
        for tags in groups:
            step = model.arriving(rank, model.summed(tags))
            for name, array in step.items():
                model.take(name, [array])
    return model.params
