"""Gradients of graph rounds; the worker that computes them keeps them until reduced.

They are no Dask results: Dask's memory manager drops the origin copy of a result
within seconds of copying it elsewhere, and would write large ones to disk. A task's
result is a receipt that says where its contribution lies.

A contribution is freed when a later round reaches this worker (no gradient of round
t + 1 is computed before round t is complete on all shards), when the scheduler forgets
the task that made it, and when its run ends.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from daskps.cluster.host.partial_sums import PartialSum, reduced
from daskps.errors import ContributionLostError, RunCancelledError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.cluster.host.partial_sums import KeptRows, NodeSums
    from daskps.codecs import Codec
    from daskps.layout.arrays import Layout
    from daskps.reduction import Empty
    from daskps.typing import Array

#: Number of ended runs that are remembered: their tasks may still be at work.
REMEMBERED = 10_000
_NO_KEPT: Final[Mapping[int, KeptRows]] = MappingProxyType({})


# It is pickled with each task; with slots that would be half as fast.
@dataclass(frozen=True, order=True)
class RoundId:
    """Identifies one round of one run; `attempt` counts restarts of rounds."""

    run: int
    attempt: int
    round: int


class Receipt(NamedTuple):
    """Result of a gradient task: the place of its contribution, and its loss."""

    rank: int
    worker: str
    #: Kind of the contribution, None if the task delivered none.
    kind: str | None
    rows: int
    loss_sum: float | None
    #: Whether the data part was on another worker than the task.
    moved: bool
    #: Bytes of the contribution's table rows, and of their ids.
    row_nbytes: int = 0
    #: Bytes delivered and read, each as numbers and as words of codecs. The next field
    #: has the seconds of computing and reading.
    nbytes: tuple[int, int, int, int] = (0, 0, 0, 0)
    seconds: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Contribution:
    """One rank's part of a round: read-only flat arrays by parameter index.

    For a mean, numbers are already multiplied by `weight`; words of a codec are
    multiplied by `scale` when they are widened.
    """

    layout: Layout
    weight: float
    arrays: Mapping[int, Array]
    codec: Codec | None = None
    scale: float = 1.0
    #: Rows of tables, by table index.
    rows: Mapping[int, KeptRows] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, and of rows."""
        return sum(a.nbytes for a in self.arrays.values()) + self.row_nbytes

    @property
    def row_nbytes(self) -> int:
        """Bytes of rows and their ids."""
        return sum(kept.nbytes for kept in self.rows.values())

    def of_shard(self, shard: int) -> NodeSums:
        """Return views of the elements of a shard, by position of the piece."""
        found = {}
        for position, piece in enumerate(self.layout.pieces[shard]):
            flat = self.arrays.get(piece.parameter.index)
            if flat is not None:
                data, words = flat[piece.start : piece.stop], (self.codec, self.scale)
                found[position] = PartialSum(data, self.weight, None, *words)
        for index, kept in self.rows.items():
            position = self.layout.table_position(shard, index)
            found[position] = kept.of_shard(shard, self.weight)
        return found


@dataclass
class _RunHere:
    """The contributions of one run on one worker."""

    place: RoundId
    by_rank: dict[int, Contribution] = field(default_factory=dict)
    #: Objects shared by the run's tasks, computed once per worker.
    shared: dict[Any, Any] = field(default_factory=dict)


class Contributions:
    """The contributions on one worker; safe for threads.

    Parameters
    ----------
    worker : str
        Its address.
    empty : callable, optional
        Makes the arrays of sums.
    """

    def __init__(self, worker: str, empty: Empty = np.empty) -> None:
        self._worker, self._empty = worker, empty
        self._lock = threading.Lock()
        self._runs: dict[int, _RunHere] = {}
        #: Ended runs, oldest first; every gradient task looks here.
        self._ended: dict[int, None] = {}

    def begin(self, place: RoundId) -> None:
        """Drop the contributions of earlier rounds: they are complete.

        Raises the errors of :meth:`leave`.
        """
        with self._lock:
            self._here(place)

    def leave(self, place: RoundId, rank: int, contribution: Contribution) -> None:
        """Keep a contribution; drop those of earlier rounds.

        Raises
        ------
        RunCancelledError
            If the run is over.
        ContributionLostError
            If the run went on without the task that brings this.
        """
        with self._lock:
            self._here(place).by_rank[rank] = contribution

    def _here(self, place: RoundId) -> _RunHere:
        here = self._known(place.run)
        if place < here.place:
            raise ContributionLostError(
                f"run {place.run} is at {here.place} on worker {self._worker}, {place} "
                f"came too late"
            )
        if here.place != place:
            here.place = place
            here.by_rank.clear()
        return here

    def shared(self, run: int, key: Any, make: Callable[[], Any]) -> Any:
        """Return an object that a run's tasks share here; the first task makes it."""
        with self._lock:
            known = self._known(run).shared
        # Outside the lock: two tasks may both make it; the dict keeps one.
        if key not in known:
            known.setdefault(key, make())
        return known[key]

    def _known(self, run: int) -> _RunHere:
        if run in self._ended:
            raise RunCancelledError(f"run {run} is over")
        return self._runs.setdefault(run, _RunHere(RoundId(run, 0, 0)))

    def sums(
        self,
        place: RoundId,
        shards: Sequence[int],
        ranks: Sequence[int],
        nodes: Sequence[tuple[int, int]],
    ) -> list[list[NodeSums]]:
        """Return, for each shard, the sums over nodes of the rank tree.

        Words of a codec stay words if a node has one rank's words only: they may
        travel. Sums are numbers.

        Parameters
        ----------
        place : RoundId
            The round.
        shards : sequence of int
            Shards whose elements are summed.
        ranks : sequence of int
            Ranks whose contributions must be on this worker.
        nodes : sequence of (int, int)
            Nodes [lo, hi); no other rank in them delivers.

        Returns
        -------
        list of list of NodeSums
            By shard, then by node.

        Raises
        ------
        ContributionLostError
            If this worker has no contribution of one of the ranks.
        """
        with self._lock:
            here = self._runs.get(place.run)
            kept = dict(here.by_rank) if here and here.place == place else {}
        lost = [rank for rank in ranks if rank not in kept]
        if lost:
            raise ContributionLostError(
                f"worker {self._worker} no longer holds what ranks {lost[:8]} computed "
                f"for {place}; the round is begun anew"
            )
        of = {rank: kept[rank] for rank in ranks}
        return [[_sum(of, span, s, self._empty) for span in nodes] for s in shards]

    def free(self, run: int, attempt: int, last: int) -> None:
        """Drop the contributions of an attempt up to a round."""
        with self._lock:
            here = self._runs.get(run)
            if here and here.place <= RoundId(run, attempt, last):
                here.by_rank.clear()

    def end(self, run: int) -> None:
        """Drop all contributions of a run, and refuse later ones."""
        with self._lock:
            self._ended[run] = None
            if len(self._ended) > REMEMBERED:
                del self._ended[next(iter(self._ended))]
            self._runs.pop(run, None)

    @property
    def n(self) -> int:
        """Number of contributions held."""
        with self._lock:
            return sum(len(here.by_rank) for here in self._runs.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the contributions held."""
        with self._lock:
            kept = [c for here in self._runs.values() for c in here.by_rank.values()]
        return sum(c.nbytes for c in kept)


def _sum(
    kept: Mapping[int, Contribution], span: tuple[int, int], shard: int, empty: Empty
) -> NodeSums:
    lo, hi = span
    of = {r: kept[r].of_shard(shard) for r in range(lo, hi) if r in kept}
    if len(of) < 2:
        return next(iter(of.values()), {})
    pieces = kept[min(of)].layout.pieces[shard]
    nodes = {(r - lo, r - lo + 1): node for r, node in of.items()}
    return reduced(nodes, pieces, hi - lo, empty=empty)


def contribution(
    layout: Layout,
    arrays: Mapping[int, Array],
    weight: float,
    scale: float,
    *,
    rows: Mapping[int, KeptRows] = _NO_KEPT,
    empty: Empty = np.empty,
) -> Contribution:
    """Make a contribution of a rank's arrays times `scale`, copied, and of rows."""
    kept = {}
    for index, array in arrays.items():
        own = empty(len(array), array.dtype)
        if scale != 1.0:
            with np.errstate(all="ignore"):  # the shard checks what it applies
                np.multiply(array, scale, out=own)
        else:
            np.copyto(own, array)
        own.flags.writeable = False
        kept[index] = own
    return Contribution(layout, weight, kept, rows=rows)
