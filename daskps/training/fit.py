"""`train` and `run`: from a user's function to a trained store."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.cluster import upstream
from daskps.cluster.launch import Launch, launch, workers_for
from daskps.cluster.pump import Pump, UserCall, call_directly
from daskps.consistency import BSP, Policy, policy
from daskps.errors import LayoutError
from daskps.reduction import check_reduce
from daskps.store import ParameterStore
from daskps.training import callbacks as callbacks_module
from daskps.training.data import n_rows, partition, rows
from daskps.training.resident import FitLoop
from daskps.training.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from daskps.cluster.link import Link
    from daskps.cluster.session import Session

Array = np.ndarray[Any, np.dtype[Any]]
EXECUTIONS = ("auto", "resident")
AVERAGES = ("gradients", "models")
#: A shard's record has room for this many ranks.
MOST_TRAINERS = 1024


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of a run.

    `loss` is the mean over the epoch's rows of what `gradient` returned, None where
    it returned none; `seconds` that of the slowest trainer; `staleness` the largest
    number of clocks a live trainer was behind one that pulled.
    """

    epoch: int
    loss: float | None
    metrics: dict[str, float]
    seconds: float
    staleness: int


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run led to.

    Parameters
    ----------
    weights : dict of str to ndarray
        The store's parameters at the end.
    history : list of Epoch
        One entry per epoch: loss, metrics, seconds, staleness.
    version : int
        Smallest version of the shards at the end.
    execution : str
        How it was executed.
    stats : dict
        Counts of lost trainers, of pushes the shards saw twice, and the last clock.
    """

    weights: dict[str, Array]
    history: list[Epoch]
    version: int
    execution: str
    stats: dict[str, Any]


@dataclass
class Progress:
    """What callbacks are called with."""

    store: ParameterStore
    epochs: int
    clock: int = 0
    history: list[Epoch] = field(default_factory=list)


def train(  # noqa: PLR0913 - the public contract
    store: ParameterStore,
    gradient: Callable[..., Any],
    X: Any,
    y: Any = None,
    *,
    epochs: int = 1,
    batch_size: int = 64,
    trainers: int | None = None,
    sync: str | Policy = "bsp",
    reduce: Any = "mean",
    sync_every: str | int = "batch",
    average: str = "gradients",
    scheme: str = "contiguous",
    weights: Sequence[float] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    execution: str = "auto",
    validate: Callable[[dict[str, Array]], Mapping[str, float]] | None = None,
    callbacks: Iterable[object] = (),
    stop: Callable[[list[Epoch]], bool] | None = None,
    reset_optimizer: bool = False,
    on_trainer_lost: str = "restart",
    timeout: Any = None,
) -> Any:
    """Train the parameters of a store on data, with one trainer per worker.

    Parameters
    ----------
    store : ParameterStore
        The store, with an optimizer.
    gradient : callable
        ``gradient(params, X_batch, y_batch)`` returns the mean gradients over the
        batch as a mapping of names to arrays, or ``(loss, gradients)``. `params` is
        a flat dict whose arrays are valid until it returns.
    X : ndarray or dask array, shape (n, ...)
        Training rows.
    y : ndarray or dask array, shape (n, ...), optional
        Labels.
    epochs : int
        Passes over the data.
    batch_size : int
        Rows per batch and trainer; the short last batch is kept.
    trainers : int, optional
        Number of trainers; one per worker by default.
    sync : {"bsp", "ssp", "asp"} or BSP, SSP, ASP
        How trainers are kept together; "ssp" has a staleness of 3 clocks.
    reduce : {"mean", "sum"} or callable
        How the contributions of a BSP round become one gradient: the mean weighs
        them by rows. A callable is ``f(stacked, weights) -> (n,)`` with stacked
        (P, n) in rank order, and acts on each element alone.
    sync_every : {"batch", "epoch"} or int
        Batches between two synchronisations. In between, a trainer updates a copy of
        its own and then delivers the sum of its gradients.
    average : {"gradients", "models"}
        With "models" a round assigns the row-weighted mean of the trainers' copies
        instead; BSP only.
    scheme : {"contiguous", "round_robin", "random", "reshuffle"}
        How rows are dealt out, see :func:`partition`.
    weights : sequence of float, optional
        Relative sizes of the parts.
    shuffle : bool
        Whether each epoch visits a trainer's rows in a new order.
    seed : int
        Seed of `scheme` and `shuffle`.
    execution : {"auto", "resident"}
        One long-running loop per trainer.
    validate : callable, optional
        ``validate(params) -> dict of str to float``, called here after each epoch;
        trainers wait for it.
    callbacks : iterable of object
        Objects with any of ``on_start, on_round, on_epoch, on_failover, on_stop``.
    stop : callable, optional
        ``stop(history) -> bool``, called here after each epoch.
    reset_optimizer : bool
        Begin with fresh optimizer state instead of that of the run before.
    on_trainer_lost : {"restart", "raise"}
        What to do when a trainer's worker dies: go on at its clock on another
        worker, or end the run.
    timeout : float, str or None
        Seconds or a duration such as "1h" for the whole run; None for none.

    Returns
    -------
    TrainResult
        Weights, history and counters; with an asynchronous client an awaitable.

    Raises
    ------
    ValueError, TypeError
        For arguments that cannot be, before anything is started.
    LayoutError
        For more trainers than a shard has room for.
    ConsistencyError
        If the store has a run already.
    NotEnoughWorkersError
        If not all trainers could start.
    Exception
        What `gradient` raised, with the trainer's rank in a note.
    """
    chosen = policy(sync)
    checks = _checked_run(chosen, reduce)
    _choice("execution", execution, EXECUTIONS)
    _choice("average", average, AVERAGES)
    _choice("on_trainer_lost", on_trainer_lost, ("restart", "raise"))
    every = _sync_every(sync_every)
    if average == "models" and not isinstance(chosen, BSP):
        raise ValueError(
            f"average='models' needs sync='bsp', found {chosen.name!r}: outside a "
            f"round there is nothing to average"
        )
    if average == "models" and reduce != "mean":
        raise ValueError("average='models' is a mean; leave reduce at 'mean'")
    if not callable(gradient):
        raise TypeError(f"gradient must be a function, found {gradient!r}")
    job = _Job(
        store=store,
        policy=checks,
        reduce=reduce,
        epochs=_whole("epochs", epochs),
        trainers=None if trainers is None else _trainers(trainers),
        gated=validate is not None or stop is not None,
        validate=validate,
        stop=stop,
        callbacks=callbacks_module.check(callbacks),
        reset=bool(reset_optimizer),
        restartable=on_trainer_lost == "restart",
    )
    loop = {
        "gradient": gradient,
        "epochs": job.epochs,
        "batch_size": _whole("batch_size", batch_size),
        "sync_every": every,
        "average_models": average == "models",
        "shuffle": bool(shuffle),
        "seed": _whole("seed", seed, least=0),
        "bsp": isinstance(chosen, BSP),
        "progress": bool(job.callbacks),
    }
    split: dict[str, Any] = {"scheme": scheme, "weights": weights, "seed": seed}
    # Here, so that bad data is refused before anything is started.
    _check_split(X, y, job.trainers or 1 if weights is None else len(weights), split)
    return job.start(
        lambda work: job.train(work, X, y, loop=loop, split=split), timeout
    )


def run(
    store: ParameterStore,
    loop: Callable[[Trainer, Any], Any],
    parts: Sequence[Any],
    *,
    sync: str | Policy = "bsp",
    reduce: Any = "mean",
    resumable: bool = False,
    timeout: Any = None,
) -> Any:
    """Run a loop of your own in every trainer: one program, many data.

    Parameters
    ----------
    store : ParameterStore
        The store.
    loop : callable
        ``loop(trainer, part)``; what it returns is returned here.
    parts : sequence
        One part of the data per trainer.
    sync, reduce
        As in :func:`train`.
    resumable : bool
        Whether `loop` can be started again on another worker when its own died; it
        must then begin at ``trainer.clock``.
    timeout : float, str or None
        Seconds or a duration such as "1h" for the whole run; None for none.

    Returns
    -------
    list
        What each trainer's loop returned, in rank order; with an asynchronous
        client an awaitable.

    Raises
    ------
    RunCancelledError
        If a trainer was lost and the run is not resumable.
    Exception
        What `loop` raised, with the trainer's rank in a note; else as :func:`train`.
    """
    chosen = policy(sync)
    checks = _checked_run(chosen, reduce)
    if not callable(loop):
        raise TypeError(f"loop must be a function, found {loop!r}")
    given = list(parts)
    if not given:
        raise ValueError("parts is empty; give one part per trainer")
    _trainers(len(given))
    job = _Job(
        store=store,
        policy=checks,
        reduce=reduce,
        epochs=0,
        trainers=len(given),
        gated=False,
        restartable=bool(resumable),
    )
    return job.start(lambda work: job.launch(work, _Loop(loop), given), timeout)


@dataclass(frozen=True)
class _Loop:
    """A user's loop, given a trainer for its session."""

    loop: Callable[[Trainer, Any], Any]

    def __call__(self, session: Session, part: Any) -> Any:
        return self.loop(Trainer(session), part)


@dataclass
class _Job:
    """One call of `train` or `run` on the client."""

    store: ParameterStore
    policy: Policy
    reduce: Any
    epochs: int
    trainers: int | None
    gated: bool
    restartable: bool
    validate: Callable[[dict[str, Array]], Mapping[str, float]] | None = None
    stop: Callable[[list[Epoch]], bool] | None = None
    callbacks: tuple[object, ...] = ()
    reset: bool = False
    run: int = 0
    stats: dict[str, Any] = field(default_factory=lambda: {"lost_trainers": 0})

    def start(self, work: Callable[[UserCall], Any], timeout: Any) -> Any:
        """Drive the work from here, or return an awaitable of it."""
        seconds = config.deadline(timeout)
        if not isinstance(self.store, ParameterStore):
            raise TypeError(
                f"expected a ParameterStore, found {type(self.store).__name__}; make "
                f"one with daskps.create"
            )
        link = self.store.bind()
        what = f"a run on store {self.store.name!r}"
        if link.asynchronous:
            return link.within(work(call_directly), seconds, what)
        return Pump().drive(link, lambda call: link.within(work(call), seconds, what))

    async def launch(
        self,
        call: UserCall,
        body: Callable[[Session, Any], Any],
        parts: Sequence[Any],
        progress: Progress | None = None,
    ) -> list[Any]:
        """Run the trainers and hear what they say."""
        link: Link = self.store.bind()
        spec = Launch(
            uid=self.store.uid,
            policy=self.policy,
            reduce=self.reduce,
            reset=self.reset,
            restartable=self.restartable,
            gated=self.gated,
            body=body,
            parts=parts,
            name=self.store.name,
        )

        async def listen(event: dict[str, Any]) -> None:
            await self._hear(event, call, progress)

        def began(run: int) -> None:
            self.run = run

        return await launch(link, spec, listen, began)

    async def train(
        self,
        call: UserCall,
        X: Any,
        y: Any,
        *,
        loop: dict[str, Any],
        split: dict[str, Any],
    ) -> TrainResult:
        """Cut the data, train, read what came out."""
        link: Link = self.store.bind()
        size = self.trainers or _trainers(len(await workers_for(link, None)))
        # In a thread: with a scheme that shuffles this copies all rows.
        parts = await asyncio.to_thread(partition, X, y, size, **split)
        lengths = [n_rows(part) for part, _ in parts]
        body = FitLoop(rounds=_rounds(lengths, loop), **loop)
        progress = Progress(self.store, self.epochs)
        await self._notify(call, "on_start", progress)
        computed = [_computed(link, part) for part in parts]
        await self.launch(call, body, computed, progress)
        shards = await self.store.attach(link)
        rows = await shards.control("stats")
        found = await self._pull()
        self.stats["duplicates"] = sum(r["duplicates"] for of in rows for r in of)
        self.stats["clock"] = progress.clock
        await self._notify(call, "on_stop", progress)
        version = min(r["version"] for of in rows for r in of)
        return TrainResult(found, progress.history, version, "resident", self.stats)

    async def _pull(self) -> dict[str, Array]:
        found: dict[str, Array] = await self.store.pull_async()
        return found

    async def _hear(
        self, event: dict[str, Any], call: UserCall, progress: Progress | None
    ) -> None:
        if progress is None:
            return
        if "clock" in event:
            # An epoch that ended meanwhile may have said more.
            if event["clock"] > progress.clock:
                progress.clock = event["clock"]
                await self._notify(call, "on_round", progress)
        elif "lost" in event:
            self.stats["lost_trainers"] += 1
            await self._notify(call, "on_failover", progress)
        else:
            await self._end_epoch(event, call, progress)

    async def _end_epoch(
        self, event: dict[str, Any], call: UserCall, progress: Progress
    ) -> None:
        metrics: dict[str, float] = {}
        if self.validate is not None:
            found = await call(self.validate, await self._pull())
            metrics = {str(k): float(v) for k, v in dict(found).items()}
        reports = event["reports"]
        rows = sum(r["rows"] for r in reports)
        losses = [r["loss"] for r in reports if r["loss"] is not None]
        progress.history.append(
            Epoch(
                epoch=event["epoch"],
                loss=sum(losses) / rows if losses and rows else None,
                metrics=metrics,
                seconds=max(r["seconds"] for r in reports),
                staleness=max(r["lag"] for r in reports),
            )
        )
        progress.clock = max(progress.clock, *(r["clock"] for r in reports))
        await self._notify(call, "on_epoch", progress)
        if self.gated:
            stop = False
            if self.stop is not None:
                stop = bool(await call(self.stop, list(progress.history)))
            await self.store.bind().directory(
                "verdict", run=self.run, epoch=event["epoch"], stop=stop
            )

    async def _notify(self, call: UserCall, event: str, progress: Progress) -> None:
        if self.callbacks:
            await call(callbacks_module.notify, self.callbacks, event, progress)


def _check_split(X: Any, y: Any, size: int, split: Mapping[str, Any]) -> None:
    """Refuse what `partition` would, without cutting anything."""
    n = n_rows(X)
    if y is not None and n_rows(y) != n:
        raise ValueError(f"X has {n} rows and y {n_rows(y)}; they must be as many")
    rows(n, size, **split)


def _computed(link: Link, part: tuple[Any, Any]) -> Any:
    """Return a part as it is, or a future of it where it is a dask collection."""
    if not any(hasattr(array, "__dask_graph__") for array in part):
        return part
    lazy = [a.rechunk(-1) if hasattr(a, "rechunk") else a for a in part]
    client = link.client
    futures = [
        upstream.compute(client, a) if hasattr(a, "__dask_graph__") else a for a in lazy
    ]
    return client.submit(_pair, *futures, pure=False)


def _pair(X: Any, y: Any) -> tuple[Any, Any]:
    return X, y


def _rounds(lengths: Sequence[int], loop: Mapping[str, Any]) -> int:
    """Return the rounds of one BSP epoch: those of the rank with the most."""
    most = -(-max(lengths) // loop["batch_size"])
    every: int = loop["sync_every"] or max(most, 1)
    return int(-(-most // every))


def _checked_run(chosen: Policy, reduce: Any) -> Policy:
    check_reduce(reduce)
    if callable(reduce) and not isinstance(chosen, BSP):
        raise ValueError(
            f"a reduce function needs sync='bsp', found {chosen.name!r}: elsewhere "
            f"every push is a step of its own"
        )
    return chosen


def _choice(what: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{what}={value!r} is not known; choose one of {choices}")


def _sync_every(value: Any) -> int:
    if value == "batch":
        return 1
    if value == "epoch":
        return 0
    if isinstance(value, str):
        raise ValueError(
            f"sync_every={value!r} is not known; choose 'batch', 'epoch' or a number "
            f"of batches"
        )
    return _whole("sync_every", value)


def _trainers(value: Any) -> int:
    size = _whole("trainers", value)
    if size > MOST_TRAINERS:
        raise LayoutError(
            f"a shard has room for {MOST_TRAINERS} trainers, found trainers={size}; "
            f"give each more of the data"
        )
    return size


def _whole(what: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{what} is an int, found {value!r}")
    if value < least:
        raise ValueError(f"{what} must be at least {least}, found {value}")
    return int(value)
