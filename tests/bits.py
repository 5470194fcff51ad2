"""Digests of what runs leave in their stores, over every kind of choice that has bits.

Each case is one short run whose arithmetic is elementwise, so that no library's order
of sums enters. A digest is of the weights, the rows and the versions; optimizer state
shows itself in the next step's weights. `python -m tests.bits` writes the table anew.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import dask
import numpy as np

import daskps
from daskps import codecs, optim
from tests import inprocess
from tests.support import CARRIERS

TABLE = Path(__file__).with_name("bits.json")
#: A checkpoint that the commit of the table saved, and the digest of what it holds.
SAVED = Path(__file__).with_name("saved")
CODECS: dict[str, Any] = {
    "": None,
    "bf16": "bf16",
    "fp16": "fp16",
    "int8": "int8",
    "2bit": codecs.TwoBit(threshold=0.25),
    "topk": codecs.TopK(ratio=0.25),
}
RULES: dict[str, Any] = {
    "sgd": lambda: optim.SGD(0.25, momentum=0.5),
    "adam": lambda: optim.Adam(0.01),
    "adagrad": lambda: optim.Adagrad(0.1),
}
N, ROWS = 301, 40


class Case(NamedTuple):
    """One run; its digest holds for every carrier, and for both executions."""

    sync: str
    rule: str
    codec: str
    rows: str
    trainers: int
    shards: int
    average: str = "gradients"
    reduce: str = "mean"

    @property
    def name(self) -> str:
        """The name of the case in the table."""
        return "-".join(map(str, self))

    @property
    def has_graph(self) -> bool:
        """Whether the task graph can run it."""
        return self.sync == "bsp" and not self.rows and self.codec in ("", "bf16")


def cases() -> Iterator[Case]:
    """Give all cases: of policies without rounds one trainer has bits, several none."""
    for codec, shards in itertools.product(CODECS, (1, 3)):
        for trainers in (1, 3, 4):
            yield Case("bsp", "sgd", codec, "", trainers, shards)
        for sync in ("asp", "ssp"):
            yield Case(sync, "sgd", codec, "", 1, shards)
    for rule, shards in itertools.product(("adam", "adagrad"), (1, 3)):
        yield Case("bsp", rule, "", "", 3, shards)
        yield Case("bsp", rule, "", "bounded", 3, shards)
        yield Case("asp", rule, "", "unbounded", 1, shards)
    for rows, shards in itertools.product(("bounded", "unbounded"), (1, 3)):
        for codec in ("", "bf16", "fp16"):
            yield Case("bsp", "sgd", codec, rows, 3, shards)
            yield Case("asp", "sgd", codec, rows, 1, shards)
        yield Case("ssp", "sgd", "", rows, 1, shards)
    for shards in (1, 3):
        yield Case("bsp", "sgd", "", "", 3, shards, "models")
        yield Case("bsp", "sgd", "", "", 3, shards, "gradients", "sum")


#: Exact in binary, of every sign and of many sizes.
STARTS = ((np.arange(N) * 37) % 101 - 50).astype("f4") / 16


def gradient(params: Any, X: Any, y: Any) -> Any:
    """Return a gradient that each batch has of its own, without a sum of many terms."""
    w, x = params["w"], np.float32(X[0, 0])
    return {"w": w * np.float32(0.375) - x * np.float32(0.1), "b": params["b"] - x}


def ids_of(X: Any) -> Any:
    """Return the ids of a batch: some twice, some of other batches too."""
    first = int(X[0, 1])
    return (first * 7 + np.array([0, 3, 1, 3, 5])) % ROWS


def row_gradient(params: Any, X: Any, y: Any) -> Any:
    """As `gradient`, with rows of the table."""
    rows = params["emb"]
    return {**gradient(params, X, y), "emb": rows * np.float32(0.5) - np.float32(0.3)}


def store_of(case: Case) -> Any:
    """Make the store of a case."""
    params: dict[str, Any] = {"w": STARTS, "b": np.zeros(3, "f4")}
    if case.rows:
        n = ROWS if case.rows == "bounded" else None
        params["emb"] = daskps.TableSpec(n, 4, init=daskps.init.normal(0.1))
    return daskps.create(
        params, optimizer=RULES[case.rule](), shards=case.shards, seed=7
    )


def trained(store: Any, case: Case, execution: str) -> None:
    """Train a store as a case says."""
    X = np.stack([np.arange(24), np.arange(24) * 5 % 17], 1).astype("f4")
    how: dict[str, Any] = {}
    if case.rows:
        how["rows"] = {"emb": ids_of}
    if case.average == "models":
        how.update(average="models", sync_every=2)
    daskps.train(
        store,
        row_gradient if case.rows else gradient,
        X,
        np.zeros(24, "f4"),
        epochs=2,
        batch_size=2,
        trainers=case.trainers,
        sync=case.sync,
        reduce=case.reduce,
        codec=CODECS[case.codec],
        execution=execution,
        callbacks=(),
        **how,
    )


def digest(store: Any) -> str:
    """Return the digest of what a store holds."""
    found = hashlib.sha256(repr(store.versions).encode())
    values = store.pull(rows={"emb": np.arange(ROWS)} if "emb" in store.names else None)
    for name in sorted(values):
        found.update(name.encode())
        found.update(np.ascontiguousarray(values[name]).tobytes())
    return found.hexdigest()[:16]


def found(case: Case, execution: str = "resident") -> str:
    """Run a case on the cluster of the moment; return its digest."""
    with store_of(case) as store:
        trained(store, case, execution)
        return digest(store)


#: What the saved checkpoint holds, and how training goes on from it.
OF_CHECKPOINT = Case("bsp", "adam", "", "unbounded", 3, 3)


def restored() -> tuple[str, str]:
    """Return the digest of the saved checkpoint, and of one more run from there."""
    with daskps.restore(SAVED.as_uri(), shards=2) as store:
        before = digest(store)
        trained(store, OF_CHECKPOINT, "resident")
        return before, digest(store)


def main() -> None:
    """Write the table of this checkout; save the checkpoint where there is none."""
    table: dict[str, Any] = {}
    with dask.config.set(CARRIERS["process"]), inprocess.cluster():
        for case in cases():
            table[case.name] = found(case)
        if not SAVED.exists():
            with store_of(OF_CHECKPOINT) as store:
                trained(store, OF_CHECKPOINT, "resident")
                store.save(SAVED.as_uri())
        table["restored"] = restored()
    TABLE.write_text(json.dumps(table, indent=0) + "\n", "utf-8")


if __name__ == "__main__":
    main()
