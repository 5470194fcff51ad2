"""One call of `train` or `run` on the client: what it knows and how it is driven."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config, limits
from daskps.cluster import upstream
from daskps.cluster.caller import snapshots
from daskps.cluster.caller.user_calls import Pump, UserCall, call_directly
from daskps.cluster.runs.graph.windows import Schedule
from daskps.cluster.runs.launch import launch
from daskps.cluster.runs.spec import Launch, threads_of
from daskps.cluster.wire.deadline import Deadline
from daskps.errors import DaskPSError
from daskps.store.store import ParameterStore
from daskps.training import advice
from daskps.training import callbacks as callbacks_module
from daskps.training.data.parts import parts_of
from daskps.training.functions import metrics_of
from daskps.training.graph import GraphBody
from daskps.training.resident import FitLoop
from daskps.training.result import Epoch, TrainResult
from daskps.training.steps import FitPlan
from daskps.usercode import guarded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from daskps.cluster.caller.link import Link
    from daskps.cluster.runs.spec import Body
    from daskps.codecs import Codec
    from daskps.consistency import Policy
    from daskps.typing import Array

logger = logging.getLogger(__name__)

#: Trainers per thread of the cluster above which "auto" takes to the task graph.
MOST_PER_THREAD = 4
#: How long the end of a run waits for what is to be said of it.
ADVICE_SECONDS = 5.0


@dataclass
class Progress:
    """What callbacks are called with.

    `rounds` is how many rounds there will be, 0 where nobody knows; `clock` that of
    the trainer that is furthest, `slowest` that of the one furthest behind; `loss` the
    mean over the epoch so far, None where it is not known.
    """

    store: ParameterStore
    epochs: int
    rounds: int = 0
    clock: int = 0
    slowest: int = 0
    loss: float | None = None
    history: list[Epoch] = field(default_factory=list)

    def advance(self, clock: int, slowest: int) -> bool:
        """Note how far the trainers are; return whether that is news."""
        news = clock > self.clock or slowest > self.slowest
        self.clock = max(self.clock, clock)
        self.slowest = max(self.slowest, slowest)
        return news


@dataclass
class Job:
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
    execution: str = "resident"
    codec: Codec | None = None
    losses: advice.Losses = field(default_factory=advice.Losses)
    _validation: asyncio.Task[None] | None = None
    stats: dict[str, Any] = field(
        default_factory=lambda: {
            "lost_trainers": 0,
            "retried_rounds": 0,
            "moved_parts": 0,
        }
    )

    def start(self, work: Callable[[UserCall], Any], timeout: Any) -> Any:
        """Drive the work from here, or return an awaitable of it."""
        seconds = config.deadline(timeout)
        if not isinstance(self.store, ParameterStore):
            raise TypeError(
                f"expected a ParameterStore, found {type(self.store).__name__}; make "
                f"one with daskps.create"
            )
        link = self.store._bind()
        what = f"a run on store {self.store.name!r}"
        if link.asynchronous:
            return self._ended(link.within(work(call_directly), seconds, what))
        try:
            # In a task its trainers may need this very thread.
            with upstream.stepped_aside():
                return Pump().drive(
                    link, lambda call: link.within(work(call), seconds, what)
                )
        finally:
            # Here: what is drawn from now on belongs to the caller.
            callbacks_module.end(self.callbacks)

    async def _ended(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        finally:
            callbacks_module.end(self.callbacks)

    async def launch(
        self,
        call: UserCall,
        body: Body,
        parts: Sequence[Any],
        *,
        progress: Progress,
        graph: Schedule | None = None,
    ) -> list[Any]:
        """Run the trainers and hear what they say."""
        link: Link = self.store._bind()
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
            watched=bool(self.callbacks),
            codec=self.codec,
            graph=graph,
        )

        async def listen(event: dict[str, Any]) -> bool:
            return await self._hear(event, call, progress)

        def began(run: int) -> None:
            self.run = run

        return await launch(link, spec, listen, began)

    async def run_loops(
        self, call: UserCall, body: Body, parts: Sequence[Any]
    ) -> list[Any]:
        """Run loops of the user's; return what they return."""
        progress = Progress(self.store, self.epochs)
        await self._notify(call, "on_start", progress)
        found = await self.launch(call, body, parts, progress=progress)
        await self._notify(call, "on_stop", progress)
        await self._advise_of_names(call)
        return found

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
        link: Link = self.store._bind()
        parts = await parts_of(link, X, y, trainers=self.trainers, split=split)
        try:
            lengths = [part.rows for part in parts]
            plan = FitPlan(rounds=0, **loop)
            plan = replace(plan, rounds=plan.n_groups(max(lengths)))
            graph = await self._graph(plan, lengths)
            body = FitLoop(plan) if graph is None else GraphBody(plan)
            progress = Progress(self.store, self.epochs, plan.epochs * plan.rounds)
            self.stats["moved_parts"] = sum(part.moved for part in parts)
            await self._notify(call, "on_start", progress)
            await self.launch(call, body, parts, progress=progress, graph=graph)
            await self._validated()
        finally:
            if self._validation is not None:
                self._validation.cancel()
            # The traceback of an error must not keep our data on the cluster.
            parts.clear()
        shards = await self.store._attach(link)
        what = f"the stats of store {self.store.name!r}"
        rows = await shards.control("stats", Deadline(config.deadline(), what))
        found = await self._pull()
        self.stats["duplicates"] = sum(r["duplicates"] for of in rows for r in of)
        self.stats["clock"] = progress.clock
        await self._notify(call, "on_stop", progress)
        if progress.clock:
            await self._advise_of_names(call, everything=True)
        version = min(r["version"] for of in rows for r in of)
        execution = "graph" if graph else "resident"
        return TrainResult(found, progress.history, version, execution, self.stats)

    async def _graph(self, plan: FitPlan, lengths: Sequence[int]) -> Schedule | None:
        """Return the rounds of graph execution, None for resident trainers."""
        execution = self.execution
        if execution == "auto":
            threads = sum((await threads_of(self.store._bind())).values())
            many = plan.bsp and len(lengths) > MOST_PER_THREAD * threads
            execution = "graph" if many else "resident"
        if execution == "resident":
            check_trainers(len(lengths))
            return None
        groups = [plan.n_groups(n) for n in lengths]
        return Schedule(plan.epochs, plan.rounds, groups, self.gated)

    async def _pull(self) -> dict[str, Array]:
        found: dict[str, Array] = await self.store.pull_async()
        return found

    async def _hear(
        self, event: dict[str, Any], call: UserCall, progress: Progress
    ) -> bool:
        """Take in one event of the run; return whether it should stop."""
        if self._validation is not None and self._validation.done():
            await self._validated()
        if "clock" in event:
            # An epoch that ended meanwhile may have said more.
            if progress.advance(event["clock"], event["slowest"]):
                if event["loss"] is not None:
                    # Between two epochs nobody has one; the last one stands.
                    progress.loss = event["loss"]
                await self._notify(call, "on_round", progress)
        elif "lost" in event:
            self.stats["lost_trainers"] += len(event["lost"])
            await self._notify(call, "on_failover", progress)
        elif "retried" in event:
            self.stats["retried_rounds"] += 1
        elif "moved" in event:
            self.stats["moved_parts"] += event["moved"]
        else:
            return await self._end_epoch(event, call, progress)
        return False

    async def _end_epoch(
        self, event: dict[str, Any], call: UserCall, progress: Progress
    ) -> bool:
        """Enter an epoch into the history; return whether the run should stop.

        Where nobody may stop it, training goes on while a snapshot is validated.
        """
        await self._validated()
        if self.validate is not None and self.stop is None:
            params = await self._snapshot()
            await self._decide(event["epoch"], stop=False)
            validation = self._enter(event, call, progress, params)
            self._validation = asyncio.ensure_future(validation)
            return False
        await self._enter(event, call, progress, self._pull)
        stop = False
        if self.stop is not None:
            stopping = guarded(self.stop, "stop")
            stop = bool(await call(stopping, list(progress.history)))
        await self._decide(event["epoch"], stop=stop)
        return stop

    async def _snapshot(self) -> Callable[[], Awaitable[dict[str, Array]]]:
        """Copy the parameters where they are; return what brings them here."""
        shards = await self.store._attach(self.store._bind())
        what = f"the snapshot that is validated of store {self.store.name!r}"
        taken = await snapshots.take_snapshot(
            shards, None, Deadline(config.deadline(), what)
        )
        return lambda: snapshots.values(taken)

    async def _decide(self, epoch: int, *, stop: bool) -> None:
        if self.gated:
            await self.store._bind().directory(
                "verdict", run=self.run, epoch=epoch, stop=stop
            )

    async def _enter(
        self,
        event: dict[str, Any],
        call: UserCall,
        progress: Progress,
        params: Callable[[], Awaitable[dict[str, Array]]],
    ) -> None:
        metrics: dict[str, float] = {}
        if self.validate is not None:
            found = await call(guarded(self.validate, "validate"), await params())
            metrics = metrics_of(found)
        reports = sorted(event["reports"], key=lambda r: int(r["rank"]))
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
        await self._advise_of_loss(call, progress.history[-1], reports)
        clocks = [r["clock"] for r in reports]
        progress.advance(max(clocks), min(clocks))
        progress.loss = None
        await self._notify(call, "on_epoch", progress)

    async def _advise_of_loss(
        self, call: UserCall, entry: Epoch, reports: Sequence[Mapping[str, Any]]
    ) -> None:
        """Say that the loss has grown out of all bounds, if it has."""
        if entry.loss is None:
            return
        first = None if entry.epoch else advice.first_loss(reports)
        if text := self.losses.look(entry.epoch, entry.loss, first):
            await call(self._say, text)

    async def _advise_of_names(
        self, call: UserCall, *, everything: bool = False
    ) -> None:
        """Name the parameters that no gradient of the run has named.

        All of them only if `everything`: a loop may do something else than train.
        """
        what = f"what a run has changed in store {self.store.name!r}"
        deadline = Deadline(ADVICE_SECONDS, what)
        try:
            shards = await self.store._attach(self.store._bind())
            rows = await shards.control("changed", deadline, run=self.run)
        except (DaskPSError, OSError) as error:
            # The run has ended well, whatever became of its store since.
            logger.info("could not ask %s: %r", what, error)
            return
        meta = shards.meta
        names = advice.unnamed(meta, [found for of in rows for found in of])
        if names and (everything or len(names) < len(meta.optimizers)):
            await call(self._say, advice.unnamed_text(meta.name, names))

    def _say(self, text: str) -> None:
        """Log a warning, where no bar is in its way."""
        callbacks_module.step_aside(self.callbacks)
        logger.warning("daskps: %s", text)

    async def _validated(self) -> None:
        """Wait for the validation that is under way, if one is, or raise its error."""
        if self._validation is not None:
            await self._validation
            self._validation = None

    async def _notify(self, call: UserCall, event: str, progress: Progress) -> None:
        if self.callbacks:
            await call(callbacks_module.notify, self.callbacks, event, progress)


def check_trainers(value: Any, execution: str = "resident") -> int:
    """Return a number of trainers, or refuse what an execution has no room for."""
    size = whole("trainers", value)
    limits.check_trainers(size, graph=execution in ("auto", "graph"))
    return size


def whole(what: str, value: Any, least: int = 1) -> int:
    """Return a whole number, or refuse what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{what} is an int, found {value!r}")
    if value < least:
        raise ValueError(f"{what} must be at least {least}, found {value}")
    return int(value)
