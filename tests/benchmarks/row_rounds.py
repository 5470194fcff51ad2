"""A round of rows in a shard, beside the sum of its parts: loops that nothing surrounds."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import optim
from daskps.consistency import BSP
from daskps.kernels.row_log import UndoLog
from daskps.kernels.row_merge import Brought, merge_rows
from daskps.kernels.row_repeats import are_distinct
from daskps.layout.arrays import Layout
from daskps.shards.memory.format import GENERATION
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard
from daskps.shards.steps import GRADIENT, Item, Step, Ticket

if TYPE_CHECKING:
    from daskps.typing import Array

_RUN, _RANKS, _WEIGHT = 1, 2, 32.0


class RoundOfRows:
    """A shard of one table in a run of two ranks, and memory for the parts alone.

    Parameters
    ----------
    rows, named, dim : int
        Rows of the table, those that a rank brings, and their length.
    cache_dir : str or None
        Of compiled kernels.
    """

    def __init__(self, rows: int, named: int, dim: int, cache_dir: str | None) -> None:
        layout = Layout.build({}, 1, {"table": (rows, dim, "float32")})
        segment = Segment(layout, 0, {0: ()}, durable=True)
        segment.words[GENERATION] = 1
        self._rule = optim.bind(optim.SGD(1e-3), np.float32, cache_dir=cache_dir)
        self._shard = Shard(segment, {0: self._rule}, cache_dir=cache_dir)
        self._shard.begin_run(_RUN, BSP(), _RANKS)
        rng, self._cache_dir = np.random.default_rng(2), cache_dir
        sets = [rng.choice(rows, named, replace=False) for _ in range(31)]
        #: Both sides take them in turn: else one would find the other's in a cache.
        self._ids = itertools.cycle(sets)
        self._g = rng.standard_normal((named, dim), np.float32)
        self._clock = itertools.count()
        self._places = np.empty(_RANKS * named, np.int64)
        self._arena, self._sums = np.zeros((2, _RANKS * named, dim), np.float32)

    def whole(self) -> None:
        """Have both ranks bring their rows, the second of which completes the round."""
        clock = next(self._clock)
        for rank in range(_RANKS):
            item = Item(0, 0, self._g.reshape(-1), next(self._ids))
            said: Any = {"clock": clock, "sequence": clock, "weight": _WEIGHT}
            step = Step(GRADIENT, (item,), run=_RUN, rank=rank, tick=True, **said)
            ticket = Ticket(step)
            self._shard.submit([ticket])
            if isinstance(ticket.outcome, Exception):
                raise ticket.outcome

    def parts(self) -> None:
        """Look at the ids, weigh the rows, add them up by id, update under the log."""
        n, cache_dir = len(self._g), self._cache_dir
        (table,) = self._shard.segment.tables
        brought = [Brought(rank * n, n, rank) for rank in range(_RANKS)]
        for start, _, _ in brought:
            ids = next(self._ids)
            are_distinct(ids, 0, len(table.rows), cache_dir=cache_dir)
            self._places[start : start + n] = ids
            np.multiply(self._g, _WEIGHT, out=self._arena[start : start + n])
        merged, sums = merge_rows(
            brought,
            self._places,
            self._arena,
            _RANKS,
            _RANKS * _WEIGHT,
            out=self._make,
            cache_dir=cache_dir,
        )
        log = table.buffers.log
        # Words of its own: what the shard's say must stay true.
        log = UndoLog(log.rows, log.w, log.slots, np.zeros(1, np.int64), 0)
        scalars = self._rule.scalars(1, None)
        self._rule.rows(table.buffers.table, merged, None, sums, scalars, log)

    def _make(self, n: int) -> Array:
        return self._sums[:n]
