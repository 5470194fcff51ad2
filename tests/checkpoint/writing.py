"""States of shards in this process, and the files a checkpoint has of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from daskps.checkpoint.arrays import Counts, stored_arrays
from daskps.checkpoint.plan import chunks_written, hashes
from daskps.checkpoint.zarr import nodes
from daskps.kernels import id_hash
from daskps.layout.arrays import Layout, compute_dtype
from daskps.layout.slots import width
from daskps.layout.spans import (
    CANDIDATES,
    COUNTS,
    IDS,
    ROWS,
    TOUCHED,
    WEIGHTS,
    slot_area,
)
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
        """From where to where the rows of a shard are, of a table of any ids."""
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
            assert chunk.home == chunk.parts[0][0]
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
