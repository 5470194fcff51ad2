"""Saving a store to a folder and making others from it, without the public surface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import daskps
from daskps import init, optim
from daskps.checkpoint.digests import digest
from daskps.checkpoint.listing import CheckpointTarget, FoundCheckpoint
from daskps.checkpoint.manifest import MANIFEST, Manifest
from daskps.checkpoint.texts import from_bytes
from daskps.cluster.caller import creation, saving
from daskps.cluster.protocol.deadline import Deadline
from tests.seams import handle_of, shards_of

#: An array that all shards have, one with another rule, one without, and both kinds of
#: tables.
RULES = {
    "w": optim.Adam(0.01),
    "b": optim.SGD(0.1),
    "emb": optim.Adagrad(0.1, rowwise=True),
    "any": optim.Adam(0.1),
}


def filled(n_shards: int = 4, **options: Any) -> Any:
    """A store to which eight pushes were made."""
    some = init.normal(0.1)
    params = {
        "w": np.arange(30.0).reshape(10, 3),
        "b": np.zeros(4, np.float32),
        "n": np.arange(4),
        "emb": daskps.TableSpec(50, 4, init=some),
        "any": daskps.TableSpec(None, 3, init=some, max_rows=300, ttl=5, admit_after=2),
        "more": daskps.TableSpec(None, 1, "int64"),
    }
    store = daskps.create(params, optimizer=RULES, shards=n_shards, **options)
    for number in range(8):
        push(store, number)
    return store


def push(store: Any, number: int) -> None:
    """Push something that follows from a number alone."""
    rng = np.random.default_rng(number)
    store.push(
        {
            "w": rng.normal(size=(10, 3)),
            "b": rng.normal(size=4).astype(np.float32),
            "emb": rows(rng, 50, 9, 4),
            "any": rows(rng, 60, 20, 3),
        }
    )
    ids = rng.integers(0, 10**9, 5)
    store["more"].add(ids, np.ones((5, 1), np.int64))
    store.add({"n": np.arange(4)})


def rows(rng: Any, most: int, n: int, dim: int) -> Any:
    values = rng.normal(size=(n, dim)).astype(np.float32)
    return daskps.RowGrad(rng.integers(0, most, n), values)


def link_of(store: Any) -> Any:
    return shards_of(store).link


def save(store: Any, to: Path, **training: Any) -> tuple[Path, Manifest]:
    """Save a store; return the folder of the checkpoint and what its manifest says."""
    of, deadline = saving.TrainingState(**training), Deadline(30, "a save")
    target, shards = CheckpointTarget(str(to)), shards_of(store)
    name, manifest = link_of(store).run(
        lambda: saving.save(shards, target, deadline, of)
    )
    assert from_bytes((to / name / MANIFEST).read_bytes()) == manifest
    return to / name, manifest


def source_of(folder: Path) -> FoundCheckpoint:
    text = (folder / MANIFEST).read_bytes()
    return FoundCheckpoint(str(folder), {}, digest(text), from_bytes(text))


def blueprint(source: FoundCheckpoint, n_shards: int, **other: Any) -> Any:
    of = source.manifest
    every: Any = enumerate((*of.parameters, *of.tables))
    tables: Any = {
        t.name: (t.rows, t.dim, t.dtype, *([t.unbounded] if t.unbounded else []))
        for t in of.tables
    }
    known: dict[str, Any] = {
        "name": None,
        "shapes": {p.name: (p.shape, p.dtype) for p in of.parameters},
        "tables": tables,
        "rules": {
            i: of.rules[one.rule].make(MANIFEST, one.name)
            for i, one in every
            if one.rule is not None
        },
        "arrays": {},
        "collections": {},
        "initializers": {},
        "shards": n_shards,
        "servers": "auto",
        "seed": 0,
        "overwrite": False,
        "source": source,
    }
    return creation.Blueprint(**(known | other))


def restored(link: Any, folder: Path, n_shards: int, **other: Any) -> Any:
    """A new store from a checkpoint."""
    plan = blueprint(source_of(folder), n_shards, **other)
    meta = link.run(lambda: creation.create(link, plan, 30))
    return handle_of(meta, link)


def chunks(folder: Path) -> dict[str, bytes]:
    """All files that have elements, and those that say what they are."""
    paths = (p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    found = {str(p.relative_to(folder)): p.read_bytes() for p in paths}
    del found["zarr.json"]
    return found
