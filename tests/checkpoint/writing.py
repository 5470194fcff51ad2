"""States of shards in this process, and the files a checkpoint has of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from daskps import optim
from daskps.checkpoint.arrays import Counts, stored_arrays
from daskps.checkpoint.digests import StoredFile, digest
from daskps.checkpoint.manifest import Manifest, StoredParameter, StoredTable
from daskps.checkpoint.plan import chunks_written
from daskps.checkpoint.rules import StoredRule
from daskps.checkpoint.zarr import nodes
from daskps.init import constant
from daskps.kernels import id_hash
from daskps.kernels.id_hash import hashes
from daskps.layout.arrays import Layout, compute_dtype
from daskps.layout.slots import PerRow, width
from daskps.layout.spans import (
    CANDIDATES,
    COUNTS,
    IDS,
    ROWS,
    TOUCHED,
    WEIGHTS,
    slot_area,
)
from daskps.layout.tables import UnboundedIds, UnboundedTable
from tests.kernels.compiling import kept


class State:
    """Values of all parameters, slots and rows; any cut of them is a view."""

    def __init__(self, shapes, tables=None, slots=None, ids=None, candidates=None):
        self.shapes, self.tables = shapes, tables or {}
        rng = np.random.default_rng(1)
        whole = self.layout(1)
        numbers = {name: i for i, name in enumerate(whole.names)}
        self.slots = {numbers[name]: first for name, first in (slots or {}).items()}
        self.values, self.ids, self.candidates = {}, {}, {}
        for p in whole.parameters:
            self._fill(rng, p, WEIGHTS, p.shape, p.dtype)
            for j in range(len(self.slots.get(p.index, ()))):
                self._fill(rng, p, slot_area(j), p.shape, compute_dtype(p.dtype))
        for t in whole.tables:
            n = t.rows
            if not t.is_bounded:
                n = len(ids[t.name])
                self._ids(rng, t, ids[t.name], (candidates or {}).get(t.name, []))
            self._fill(rng, t, ROWS, (n, t.dim), t.dtype)
            for j, first in enumerate(self.slots.get(t.index, ())):
                shape = n, width(first, t.dim)
                self._fill(rng, t, slot_area(j), shape, compute_dtype(t.dtype))

    def _fill(self, rng, of, area, shape, dtype):
        drawn = rng.integers(0, 100, shape)
        self.values[of.index, area] = np.asarray(drawn).astype(dtype)

    def _ids(self, rng, table, ids, candidates):
        for area, given in ((IDS, ids), (CANDIDATES, candidates)):
            found = np.array(given, np.int64)
            order = np.argsort(hashes(found, table.hash_seed))
            self.values[table.index, area] = found[order]
        self._fill(rng, table, TOUCHED, (len(ids),), "int64")
        self._fill(rng, table, COUNTS, (len(candidates),), "int64")

    def layout(self, n_shards):
        return Layout.build(self.shapes, n_shards, self.tables)

    def counts(self, n_shards):
        layout = self.layout(n_shards)
        found = [
            {
                t.index: [
                    np.diff(self.part(layout, t, a, s)).item() for s in range(n_shards)
                ]
                for t in layout.tables
                if not t.is_bounded
            }
            for a in (IDS, CANDIDATES)
        ]
        return Counts(*found)

    def part(self, layout, table, area, shard):
        """From where to where the rows of a shard are, of an unbounded table."""
        ids, n = self.values[table.index, area], table.n_buckets
        found = id_hash.buckets(ids, table.hash_seed, n, cache_dir=kept())
        owner = np.searchsorted(table.edges(layout.n_shards), found, "right") - 1
        assert (np.diff(owner) >= 0).all()
        return np.searchsorted(owner, [shard, shard + 1]).tolist()

    def piece(self, layout, shard, position, area):
        """What a shard has of an area at a position: flat, a view."""
        pieces = layout.pieces[shard]
        if position < len(pieces):
            piece = pieces[position]
            flat = self.values[piece.parameter.index, area].reshape(-1)
            return flat[piece.start : piece.stop]
        piece = layout.table_pieces[shard][position - len(pieces)]
        values = self.values[piece.table.index, area]
        if piece.table.is_bounded:
            at = piece.first_row, piece.first_row + piece.n_rows
        else:
            by = CANDIDATES if area in (CANDIDATES, COUNTS) else IDS
            at = self.part(layout, piece.table, by, shard)
        return values[slice(*at)].reshape(-1)

    def arrays(self):
        return stored_arrays(self.layout(1), self.slots, self.counts(1))

    def files(self, n_shards):
        """Contents of all chunks by path, and of the metadata."""
        layout, counts = self.layout(n_shards), self.counts(n_shards)
        arrays = stored_arrays(layout, self.slots, counts)
        found = nodes(arrays, {"format": 1})
        for chunk in chunks_written(layout, arrays, counts):
            parts = [
                self.piece(layout, shard, span.position, span.area)[
                    span.start : span.stop
                ]
                for shard, span in chunk.parts
            ]
            # Its home has some of it.
            assert all(span.start < span.stop for _, span in chunk.parts)
            whole = np.concatenate([*parts, np.zeros(chunk.pad, chunk.dtype)])
            assert whole.dtype == chunk.dtype
            assert whole.nbytes == chunk.nbytes
            assert chunk.path not in found
            found[chunk.path] = whole.astype(f"<{whole.dtype.str[1:]}").tobytes()
        return found


def write(folder: Path, files: dict[str, bytes]) -> None:
    for path, content in files.items():
        at = folder / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_bytes(content)


def manifest_of(state: State, files: dict[str, bytes], **more: Any) -> Manifest:
    """A manifest of files that a state has."""
    layout = state.layout(1)
    rule = StoredRule.of(optim.Adagrad(0.1), (0.0,))
    rules = {first: replace(rule, first=first) for first in state.slots.values()}
    rules = {
        first: replace(rule, slots=tuple("abcd"[: len(first)])) if first else rule
        for first, rule in rules.items()
    }
    numbers = {first: i for i, first in enumerate(rules)}

    def rule_of(index: int) -> int | None:
        return numbers[state.slots[index]] if index in state.slots else None

    tables = []
    arrays = {(a.members[0].index, a.area): a for a in state.arrays()}
    for t in layout.tables:
        told: dict[str, Any] = {}
        if isinstance(t, UnboundedTable):
            told = {"unbounded": t.of}
            for area, n, name in (
                (IDS, "n_rows", "begins"),
                (CANDIDATES, "n_candidates", "candidate_begins"),
            ):
                told[n] = len(state.values[t.index, area])
                if (array := arrays.get((t.index, area))) is not None:
                    paths = map(array.path_of, array.grid.chunks())
                    firsts = [np.frombuffer(files[p], np.int64)[:1] for p in paths]
                    found = (hashes(first, t.hash_seed)[0] for first in firsts)
                    told[name] = tuple(map(int, found))
        tables.append(
            StoredTable(
                t.name, t.rows, t.dim, t.dtype, rule=rule_of(t.index), clock=3, **told
            )
        )
    parameters = [
        StoredParameter(p.name, p.shape, p.dtype, rule_of(p.index), steps=4)
        for p in layout.parameters
    ]
    listed = (StoredFile(p, len(c), digest(c)) for p, c in files.items())
    given: dict[str, Any] = {"store": "m", "lineage": "l" * 8, "parent": ""}
    given |= {"sequence": 1, "time": 1.5}
    given |= {"seed": 10**30, "version": 12, "daskps": "0.1", **more}
    return Manifest(
        parameters=tuple(parameters),
        tables=tuple(tables),
        rules=tuple(rules.values()),
        files=tuple(listed),
        **given,
    )


NAMES = ["../up", "a/b", "a_b", "W", "w", "x" * 10_000, "zarr.json", "ü", "c"]


def mixed_state(max_rows: int = 0, ttl: int = 0, admit_after: int = 1) -> State:
    """Arrays of all kinds and dtypes, both kinds of tables, all with slots."""
    shapes: dict[str, Any] = {n: ((3, i + 1), "float32") for i, n in enumerate(NAMES)}
    shapes |= {
        "scalar": ((), "float64"),
        "none": ((4, 0), "float32"),
        "flags": ((3, 7), "bool"),
        "bytes": ((50,), "int8"),
        "words": ((5, 3), "uint64"),
        "half": ((6, 11), "float16"),
        "wide": ((2, 3, 41), "float64"),
    }
    unbounded = UnboundedIds(constant(0.0), 7, 0, max_rows, ttl, admit_after)
    tables = {"emb": (13, 3, "float16"), "any": (0, 5, "float32", unbounded)}
    rng = np.random.default_rng(0)
    drawn = rng.choice(2**40, 320, replace=False) - 2**39
    slots = {"wide": (0.0,), "half": (0.0, 1.0), "a/b": (0.0,), "scalar": (0.0,)}
    slots |= {"emb": (0.0,), "any": (0.0, PerRow(0.0))}
    ids, candidates = {"any": drawn[:300]}, {"any": drawn[300:]}
    return State(shapes, tables, slots, ids, candidates)
