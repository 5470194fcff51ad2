"""Unbounded rows that steps of a simulation make, and what must be there of them.

Each step has random ids of its own, few or many, and all of them name some common ones;
each time one is added to a row. So what the shards hold of an array says how often each
row must have been changed, and which ids there are.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np

import daskps
from daskps.cluster.caller.row_routes import IdSplit, RowBatch
from tests.simulator.delays import CLOSE
from tests.simulator.ground import CHANCE

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from daskps.layout.arrays import Layout
    from daskps.layout.tables import Table
    from daskps.typing import Array
    from tests.simulator.oracles import Watch

#: The name of the table.
ANY = "any"
#: How many ids all steps name.
N_COMMON = 8
#: In place of a step, of an id that all of them name.
_ALL = -1


class NamedIds:
    """Which ids each step names in an unbounded table.

    Parameters
    ----------
    watch : Watch
        Hears of what is wrong.
    n_shards : int
        Shards of the store.
    sizes : sequence of int
        How many ids each step has for itself.
    dim : int
        Length of a row, all of whose elements are the same.

    Attributes
    ----------
    ids : ndarray, shape (n,), int64
        All ids.
    steps : ndarray, shape (n,), int64
        The step that has each for itself, -1 for those that all name.
    """

    def __init__(
        self, watch: Watch, n_shards: int, sizes: Sequence[int], dim: int
    ) -> None:
        self._watch, self._dim, self._n_shards = watch, dim, n_shards
        rng = np.random.default_rng(CHANCE.getrandbits(64))
        n = [N_COMMON, *sizes]
        self.steps = np.repeat(np.arange(_ALL, len(sizes)), n)
        self.ids = rng.integers(-(2**63), 2**63, sum(n), dtype=np.int64)
        self._order = np.argsort(self.ids)
        #: Which shard has each of them.
        self._shards = np.zeros(len(self.ids), np.int64)
        #: Steps whose own ids somebody begins to remove, and those of which that is
        #: done.
        self.removing: set[int] = set()
        self.removed: set[int] = set()

    def spec(self) -> daskps.TableSpec:
        """Return what the table is created with."""
        return daskps.TableSpec(None, self._dim, "float64")

    def know(self, layout: Layout) -> None:
        """Look at where a store has them."""
        cut = IdSplit.of(layout.table_by_name[ANY], self.ids, self._n_shards)
        for shard in cut.shards():
            at = cut.at_of(shard)
            self._shards[slice(cut.starts[shard], None) if at is None else at] = shard

    def stored_in(self, n_shards: int) -> NamedIds:
        """Return the same for a copy of the store in another number of shards.

        What is counted stays by shards of the first one.
        """
        found = copy.copy(self)
        found._n_shards = n_shards
        return found

    def own(self, step: int) -> Array:
        """Return the ids that a step has for itself."""
        found: Array = self.ids[self.steps == step]
        return found

    def named(self, step: int) -> Array:
        """Return what a step names: its own, and the common ones twice."""
        common = self.own(_ALL)
        return np.concatenate([common, self.own(step), common])

    def values(self, step: int, number: float) -> Array:
        """Return a row for each of these, so that each id gets the number once."""
        n = [N_COMMON, len(self.own(step)), N_COMMON]
        shares = np.repeat([number / 2, number, number / 2], n)
        return np.repeat(shares[:, None], self._dim, axis=1)

    def grad(self, step: int, number: float) -> daskps.RowGrad:
        """Return what a step pushes or adds."""
        return daskps.RowGrad(self.named(step), self.values(step, number))

    def given(self, table: Table, step: int, number: float) -> RowBatch:
        """Return the same as a trainer sends it."""
        cut = IdSplit.of(table, self.named(step), self._n_shards)
        return RowBatch(cut, self.values(step, number).reshape(-1))

    def places(self, steps: Collection[int]) -> Array:
        """Return where the ids of some steps and the common ones are among all."""
        return np.flatnonzero(np.isin(self.steps, [_ALL, *steps]))

    def places_of(self, ids: Array) -> Array:
        """Return where some ids are among all, -1 for one that nobody names."""
        at = np.searchsorted(self.ids, ids, sorter=self._order)
        at = self._order[np.minimum(at, len(self.ids) - 1)]
        return np.where(self.ids[at] == ids, at, -1)

    # -- what must hold ------------------------------------------------------

    def expected(self, counts: Array, removed: Collection[int]) -> Array:
        """Return what each id must read; NaN where that is not known.

        Parameters
        ----------
        counts : ndarray, shape (n_shards, n_steps)
            How often each step is in each shard.
        removed : collection of int
            Steps whose own ids had been removed before it was read.
        """
        common = counts.sum(axis=1)[self._shards]
        found = np.where(self.steps == _ALL, common, counts[self._shards, self.steps])
        found[np.isin(self.steps, [*self.removing])] = np.nan
        found[np.isin(self.steps, [*removed])] = 0.0
        return found

    def compare(self, what: str, wanted: Array, at: Array, rows: Array) -> None:
        """Find rows, of the ids at some places, that do not read what they must."""
        watch, rows = self._watch, rows.reshape(len(at), self._dim)
        is_close = abs(rows - wanted[at][:, None]) <= CLOSE
        differ = ~is_close.all(axis=1) & ~np.isnan(wanted[at])
        if differ.any():
            i = int(np.flatnonzero(differ)[0])
            watch.wrong(
                f"{what}: {self.told(at[i])} reads {rows[i].tolist()} instead of "
                f"{wanted[at[i]]:g}"
            )

    def compare_ids(self, what: str, wanted: Array, ids: Array) -> None:
        """Find ids that are there, or not, against what they must read: none is 0."""
        watch, at = self._watch, self.places_of(ids)
        if (at < 0).any() or len(np.unique(ids)) != len(ids):
            watch.wrong(f"{what} has an id that nobody has named, or one twice")
            return
        there = np.zeros(len(self.ids), bool)
        there[at] = True
        differ = (there != (wanted > 0)) & ~np.isnan(wanted)
        if differ.any():
            i = int(np.flatnonzero(differ)[0])
            word = "has" if there[i] else "lacks"
            watch.wrong(f"{what} {word} {self.told(i)}, which reads {wanted[i]:g}")

    def told(self, at: int) -> str:
        """Say which of all ids that is."""
        whose = "all steps" if self.steps[at] == _ALL else f"step {self.steps[at]}"
        return f"id {self.ids[at]} of {whose} in shard {self._shards[at]}"
