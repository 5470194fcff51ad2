"""The rounds of a run as task graphs, a window of them at a time.

Inside a window the rounds are chained; the first tasks of a window depend on no round
before it, and go out when the window before is done. One long chain would keep every
ancestor alive on the scheduler, four tasks a round for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from daskps.cluster import upstream
from daskps.cluster.keys import gradient_key, reduction_key
from daskps.cluster.runs.graph.tasks import Duty, compute_gradient, reduce_round

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distributed import Client, Future

    from daskps.cluster.host.contributions import RoundId
    from daskps.cluster.runs.graph.context import GraphWork

#: Rounds submitted together.
WINDOW = 16
#: So many shards of one worker have a reduction each; more of them have one together.
MOST_REDUCTIONS = 8


@dataclass(frozen=True, slots=True)
class Schedule:
    """The ranks that deliver in each round.

    Parameters
    ----------
    epochs : int
        Number of epochs.
    per_epoch : int
        Rounds of an epoch: those of the rank with the most.
    groups : sequence of int
        For each rank the rounds of an epoch in which it delivers, from the first on.
    gated : bool
        Whether somebody decides after each epoch if there is another.
    start : int
        Rounds of the first epoch that there were before.
    most : int, optional
        After how many rounds the run ends, if before its last epoch.
    """

    epochs: int
    per_epoch: int
    groups: Sequence[int]
    gated: bool
    start: int = 0
    most: int | None = None

    @property
    def n_rounds(self) -> int:
        """Rounds of the whole run."""
        n = self.epochs * self.per_epoch - self.start
        return n if self.most is None else min(n, self.most)

    def place(self, number: int) -> tuple[int, int]:
        """Return the epoch of a round, from 0, and which of its rounds it is."""
        return divmod(self.start + number, self.per_epoch)

    def ranks(self, number: int) -> list[int]:
        """Return the ranks that deliver in a round."""
        _, within = self.place(number)
        return [rank for rank, n in enumerate(self.groups) if within < n]

    def window(self, start: int) -> range:
        """Return the rounds to submit together from `start` on."""
        stop = min(start + WINDOW, self.n_rounds)
        if self.gated:
            _, within = self.place(start)
            stop = min(stop, start - within + self.per_epoch)
        return range(start, stop)


@dataclass(frozen=True, slots=True)
class WindowGraph:
    """The graph of one window.

    Parameters
    ----------
    work : Future
        Of the run's `GraphWork`.
    label : str
        The name of the store in keys.
    hosts : mapping of str to list of int
        Shards of each host.
    anchors : sequence of Future
        Anchor of each shard.
    parts : sequence
        Data of each rank: a future, or something made of futures.
    homes : sequence of str
        Worker of each rank's data, "" for any.
    only : sequence of str
        The workers that ranks may be on; all, where it names none.
    """

    work: Future[GraphWork]
    label: str
    hosts: Mapping[str, Sequence[int]]
    anchors: Sequence[Future[Any]]
    parts: Sequence[Any]
    homes: Sequence[str]
    only: Sequence[str] = ()
    layers: dict[str, MaterializedLayer] = field(default_factory=dict)
    #: Keys of each round's reductions.
    tokens: list[list[Any]] = field(default_factory=list)

    def add(self, place: RoundId, ranks: Sequence[int]) -> None:
        """Chain a round to those before it; another may follow, now or later."""
        after = self.tokens[-1] if self.tokens else []
        by_home: dict[str, dict[Any, Any]] = {}
        keys = []
        for rank in ranks:
            home = self.homes[rank]
            key = gradient_key(self.label, _numbers(place), rank)
            args = (self.work, Duty(place, rank, home), self.parts[rank], after)
            by_home.setdefault(home, {})[key] = (compute_gradient, *args)
            keys.append(key)
        for home, tasks in by_home.items():
            self._layer(f"gradient-{place.round}-{home}", tasks, home, only=self.only)
        tokens: list[Any] = []
        for host, shards in self.hosts.items():
            each = [[i] for i in shards]
            reductions = {}
            for together in each if len(each) <= MOST_REDUCTIONS else [shards]:
                key = reduction_key(self.label, _numbers(place), together[0])
                anchors = [self.anchors[i] for i in together]
                reductions[key] = (reduce_round, self.work, place, anchors, keys)
            self._layer(f"reduce-{place.round}-{host}", reductions, host, priority=1)
            tokens += reductions
        self.tokens.append(tokens)

    def _layer(
        self,
        name: str,
        tasks: Any,
        worker: str,
        only: Sequence[str] = (),
        **annotations: Any,
    ) -> None:
        if only:
            annotations |= {"workers": [*only], "allow_other_workers": False}
        elif worker:
            # Loose: a task for one worker only waits for ever once that has left.
            annotations |= {"workers": [worker], "allow_other_workers": True}
        self.layers[name] = MaterializedLayer(tasks, annotations=annotations)

    def submit(self, client: Client) -> list[list[Future[Any]]]:
        """Submit the window; return the futures of its reductions, round by round.

        One for each round, for its progress, and of the last round all.
        """
        graph = HighLevelGraph(self.layers, {name: set() for name in self.layers})
        wanted = [tokens[:1] for tokens in self.tokens[:-1]] + [self.tokens[-1]]
        found: list[list[Future[Any]]] = upstream.submit_graph(client, graph, wanted)
        return found


def _numbers(place: RoundId) -> tuple[int, int, int]:
    return place.run, place.attempt, place.round
