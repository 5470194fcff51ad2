"""The update rules of a store, and their kernels, made for the first update."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from daskps import config
from daskps.cluster.upstream import loads
from daskps.kernels import past, row_merge, row_writes
from daskps.kernels.past import PAST_NBYTES
from daskps.layout.arrays import compute_dtype
from daskps.layout.slots import Master, OfWeights, PerRow
from daskps.optim import BoundFunction, Rule, WithMaster, bind
from daskps.shards.rounds import words
from daskps.usercode import user_code

if TYPE_CHECKING:
    from daskps.kernels.device import Launcher
    from daskps.layout.arrays import Layout
    from daskps.optim.binding import Bound


class Rules:
    """The rules of one store in one process.

    A caller that only reads needs neither rules nor a compiler: both are loaded on
    demand.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    pickled : bytes
        The rules by parameter index.
    launcher : Launcher, optional
        The device that one shard is on: its rules are for that shard alone.
    """

    def __init__(
        self, layout: Layout, pickled: bytes, launcher: Launcher | None = None
    ) -> None:
        self.layout, self._pickled, self._launcher = layout, pickled, launcher
        self._bound: dict[int, Bound | None] = {}
        #: Parameters that share a rule share its kernels and scalars.
        self._shared: dict[tuple[int, str], Bound] = {}

    @cached_property
    def by_index(self) -> dict[int, Rule]:
        """Rules by parameter index."""
        found: dict[int, Rule] = loads(self._pickled)
        return found

    @property
    def slots(self) -> dict[int, tuple[float, ...]]:
        """Initial values of the optimizer slots by parameter index."""
        return {i: initial_slots(rule) for i, rule in self.by_index.items()}

    @cached_property
    def cache_dir(self) -> str:
        """Folder of compiled functions."""
        return str(config.load().cache)

    def get(self, index: int) -> Bound | None:
        """Return the rule of a parameter, ready to apply; None if it has none."""
        if index not in self._bound:
            rule = self.by_index.get(index)
            self._bound[index] = None if rule is None else self._bind(index, rule)
        return self._bound[index]

    def _bind(self, index: int, rule: Rule) -> Bound:
        dtype = self.layout.dtype_of(index)
        key = id(rule), dtype
        if key not in self._shared:
            where, at = self.cache_dir, self._launcher
            self._shared[key] = bind(rule, dtype, cache_dir=where, launcher=at)
        return self._shared[key]

    def warm(self, *, durable: bool) -> None:
        """Compile all kernels, so that the first push finds them ready."""
        if self.layout.nbytes >= past.LARGE_NBYTES:
            past.warm(cache_dir=self.cache_dir)
        words.compiled(self.cache_dir)
        nbytes = -(-self.layout.nbytes // self.layout.n_shards)
        tables = {table.index: table.dtype for table in self.layout.tables}
        if tables:
            row_writes.warm(tables.values(), cache_dir=self.cache_dir)
        for index in self.by_index:
            bound = self.get(index)
            if bound is not None and index in tables:
                bound.kernel.warm_rows()
                # For rounds, which begin in the turn of their shards.
                computed = np.dtype(compute_dtype(tables[index]))
                row_merge.warm(computed, cache_dir=self.cache_dir)
            elif bound is not None and not isinstance(bound, BoundFunction):
                is_large = nbytes >= PAST_NBYTES
                if not durable:
                    bound.kernel.warm(past=is_large)
                # Slots in private memory have two buffers during a run in rounds.
                bound.kernel.warm(durable=True, past=is_large)


def initial_slots(rule: Rule) -> tuple[float, ...]:
    """Return a rule's initial slot values; the type of each tells the slot's width."""
    with user_code(f"the optimizer {type(rule).__name__}"):
        first = [float(rule.slot_init.get(name, 0.0)) for name in rule.slots]
        of_rows = [name in rule.row_slots for name in rule.slots]
        first[: len(rule.rank_slots)] = [OfWeights() for _ in rule.rank_slots]
    if isinstance(rule, WithMaster):
        return Master(), *initial_slots(rule.rule)
    return tuple(
        PerRow(v) if of_row else v for v, of_row in zip(first, of_rows, strict=True)
    )
