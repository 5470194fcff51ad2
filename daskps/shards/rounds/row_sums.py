"""The rows of a round: whether there is room for them, where they go, what they come to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskps.kernels.row_merge import warm
from daskps.layout.arrays import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.shards.rounds.arena import Arena, RankRows, RowSpan
    from daskps.shards.rounds.mailbox import MailboxTable
    from daskps.typing import Array


class Arenas:
    """The arenas of a run in one shard, and what its tables say of them.

    Parameters
    ----------
    arenas : sequence of Arena
        By the number of their table.
    cache_dir : str, optional
        Where compiled functions are kept.
    """

    def __init__(self, arenas: Sequence[Arena], cache_dir: str | None) -> None:
        self._arenas, self._cache_dir = arenas, cache_dir
        for dtype in {arena.piece.table.dtype for arena in arenas if arena.room}:
            warm(np.dtype(compute_dtype(dtype)), cache_dir=cache_dir)

    def check(self, table: MailboxTable, rows: Mapping[int, RankRows]) -> None:
        """Refuse rows that do not fit; see :meth:`Arena.check`."""
        for ordinal, came in rows.items():
            taken = table.spans(ordinal).values()
            self._arenas[ordinal].check(taken, len(came.ids))

    def place(
        self, table: MailboxTable, rows: Mapping[int, RankRows], scale: float
    ) -> dict[int, RowSpan]:
        """Write rows where the table in force names none; return where, by table."""
        return {
            ordinal: self._arenas[ordinal].place(
                table.spans(ordinal).values(), came, scale
            )
            for ordinal, came in rows.items()
        }

    def merge(
        self,
        table: MailboxTable,
        rank: int,
        mine: Mapping[int, RowSpan],
        weight: float | None,
    ) -> dict[int, tuple[Array, Array]]:
        """Return ids and sums, by table, of all ranks that are in and of one more.

        With its `weight` sums are divided by that of all ranks that have brought their
        table.
        """
        found = {}
        for ordinal, arena in enumerate(self._arenas):
            spans = table.spans(ordinal)
            if ordinal in mine:
                spans[rank] = mine[ordinal]
            if not spans:
                continue
            weights = None
            if weight is not None:
                weights = {r: weight if r == rank else table.weights[r] for r in spans}
            found[ordinal] = arena.merge(spans, weights, self._cache_dir)
        return found
