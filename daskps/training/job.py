"""One call of `train` or `run` on the client: what it knows and how it is driven."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps import config, limits
from daskps.cluster import upstream
from daskps.cluster.caller import snapshots
from daskps.cluster.caller.user_calls import Pump, UserCall, call_directly
from daskps.cluster.runs.epochs import epochs_of
from daskps.cluster.runs.graph.windows import Schedule
from daskps.cluster.runs.launch import launch
from daskps.cluster.runs.parts import threads_of
from daskps.cluster.runs.spec import Launch
from daskps.cluster.wire.deadline import Deadline
from daskps.epochs import Epochs
from daskps.errors import DaskPSError
from daskps.layout.chunks import ARRAYS
from daskps.store.store import ParameterStore
from daskps.training import advice
from daskps.training import callbacks as callbacks_module
from daskps.training.data.parts import parts_of
from daskps.training.functions import metrics_of
from daskps.training.graph import GraphStepper
from daskps.training.resident import train_part
from daskps.training.result import Epoch, Progress, TrainResult
from daskps.training.row_ids import check_tables
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from daskps.cluster.caller.link import Link
    from daskps.cluster.runs.spec import Body
    from daskps.codecs import Codec
    from daskps.consistency import Policy
    from daskps.training.steps import FitPlan
    from daskps.typing import Array

logger = logging.getLogger(__name__)

#: Trainers per thread of the cluster above which "auto" takes to the task graph.
MOST_PER_THREAD = 4
#: What is counted while a run goes on.
_COUNTED = ("lost_trainers", "retried_rounds", "moved_parts")
#: How long the end of a run waits for what is to be said of it.
ADVICE_SECONDS = 5.0


@dataclass
class Job:
    """One call of `train` or `run` on the client."""

    store: ParameterStore
    policy: Policy
    reduce: Any
    epochs: int
    trainers: int | None
    restartable: bool
    validate: Callable[[dict[str, Array]], Mapping[str, float]] | None = None
    stop: Callable[[list[Epoch]], bool] | None = None
    callbacks: tuple[object, ...] = ()
    reset: bool = False
    run: int = 0
    #: The epoch of the store that the first one of the run is.
    first: int = 0
    execution: str = "resident"
    codec: Codec | None = None
    losses: advice.Losses = field(default_factory=advice.Losses)
    #: How many rounds, of what loss, and the history so far.
    progress: Progress = field(init=False)
    #: Calls functions of the user's where their code runs.
    _call: UserCall = call_directly
    _validation: asyncio.Task[None] | None = None
    stats: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))

    def __post_init__(self) -> None:
        self.progress = Progress(self.store, self.epochs)

    @property
    def gated(self) -> bool:
        """Whether trainers wait at the end of an epoch for what is decided here."""
        return self.validate is not None or self.stop is not None

    def start(self, work: Callable[[], Awaitable[Any]], timeout: Any) -> Any:
        """Drive the work from here, or return an awaitable of it."""
        seconds = config.deadline(timeout)
        if not isinstance(self.store, ParameterStore):
            raise TypeError(
                f"expected a ParameterStore, found {type(self.store).__name__}; make "
                f"one with daskps.create"
            )
        link = self.store._bind()

        def begin(call: UserCall) -> Awaitable[Any]:
            self._call = call
            return link.within(work, seconds, f"a run on store {self.store.name!r}")

        if link.asynchronous:
            return self._ended(begin(call_directly))
        try:
            # In a task its trainers may need this very thread.
            with upstream.stepped_aside():
                return Pump().drive(link, begin)
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
        body: Body,
        parts: Sequence[Any],
        graph: Schedule | None = None,
        epochs: Epochs | None = None,
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
            epochs=epochs,
        )

        def began(run: int) -> None:
            self.run = run

        return await launch(link, spec, self._hear, began)

    async def run_loops(self, body: Body, parts: Sequence[Any]) -> list[Any]:
        """Run loops of the user's; return what they return."""
        await self._notify("on_start")
        found = await self.launch(body, parts)
        await self._notify("on_stop")
        await self._advise_of_names()
        return found

    async def train(
        self, plan: FitPlan, X: Any, y: Any, split: dict[str, Any]
    ) -> TrainResult:
        """Cut the data, train, read what came out."""
        link: Link = self.store._bind()
        if plan.rows:
            check_tables((await self.store._attach(link)).meta, plan.rows)
        await self._begin_epochs(link)
        parts = await parts_of(link, X, y, trainers=self.trainers, split=split)
        try:
            lengths = [part.rows for part in parts]
            begin = Epochs(self.first, plan.n_groups(max(lengths)))
            plan = replace(plan, first=begin.first, rounds=begin.per_epoch)
            graph = await self._graph(plan, lengths)
            body = partial(train_part if graph is None else GraphStepper, plan)
            self.progress.rounds = plan.epochs * plan.rounds
            self.stats["moved_parts"] = sum(part.moved for part in parts)
            await self._notify("on_start")
            await self.launch(body, parts, graph, begin)
            await self._validated()
        finally:
            if self._validation is not None:
                self._validation.cancel()
            # The traceback of an error must not keep our data on the cluster.
            parts.clear()
        shards = await self.store._attach(link)
        what = f"the stats of store {self.store.name!r}"
        rows = await shards.control("stats", Deadline(config.deadline(), what))
        found = await self.store.pull_async()
        self.stats["duplicates"] = sum(r["duplicates"] for of in rows for r in of)
        self.stats["clock"] = self.progress.clock
        await self._notify("on_stop")
        if self.progress.clock:
            await self._advise_of_names(everything=True)
        version = min(r["version"] for of in rows for r in of)
        execution = "graph" if graph else "resident"
        return TrainResult(found, self.progress.history, version, execution, self.stats)

    async def _begin_epochs(self, link: Link) -> None:
        """Find out with which epoch of the store the run begins."""
        if not self.reset:
            found = await epochs_of(link, self.store.uid, self.store.name)
            self.first = found.following
        progress = self.progress
        progress.first, progress.epochs = self.first, self.first + self.epochs

    async def _graph(self, plan: FitPlan, lengths: Sequence[int]) -> Schedule | None:
        """Return the rounds of graph execution, None for resident trainers."""
        execution = self.execution
        if execution == "auto":
            threads = sum((await threads_of(self.store._bind())).values())
            many = plan.bsp and len(lengths) > MOST_PER_THREAD * threads
            execution = "graph" if many else "resident"
        if execution == "resident":
            limits.check_trainers(len(lengths), graph=False)
            return None
        groups = [plan.n_groups(n) for n in lengths]
        return Schedule(plan.epochs, plan.rounds, groups, self.gated)

    async def _hear(self, event: dict[str, Any]) -> bool:
        """Take in one event of the run; return whether it should stop."""
        if self._validation is not None and self._validation.done():
            await self._validated()
        if "clock" in event:
            # An epoch that ended meanwhile may have said more.
            if self.progress.advance(event["clock"], event["slowest"]):
                if event["loss"] is not None:
                    # Between two epochs nobody has one; the last one stands.
                    self.progress.loss = event["loss"]
                await self._notify("on_round")
        elif "lost" in event:
            self.stats["lost_trainers"] += len(event["lost"])
            await self._notify("on_failover")
        elif "retried" in event:
            self.stats["retried_rounds"] += 1
        elif "moved" in event:
            self.stats["moved_parts"] += event["moved"]
        else:
            return await self._end_epoch(event)
        return False

    async def _end_epoch(self, event: dict[str, Any]) -> bool:
        """Enter an epoch into the history; return whether the run should stop.

        Where nobody may stop it, training goes on while a snapshot is validated.
        """
        await self._validated()
        if self.validate is not None and self.stop is None:
            params = await self._snapshot()
            await self._decide(event["epoch"], stop=False)
            self._validation = asyncio.ensure_future(self._enter(event, params))
            return False
        await self._enter(event, self.store.pull_async)
        stop = False
        if self.stop is not None:
            stopping = user_code("stop")(self.stop)
            stop = bool(await self._call(stopping, list(self.progress.history)))
        await self._decide(event["epoch"], stop=stop)
        return stop

    async def _snapshot(self) -> Callable[[], Awaitable[dict[str, Array]]]:
        """Copy the parameters where they are; return what brings them here."""
        shards = await self.store._attach(self.store._bind())
        what = f"the snapshot that is validated of store {self.store.name!r}"
        taken = await snapshots.take_snapshot(
            shards, ARRAYS, Deadline(config.deadline(), what)
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
        params: Callable[[], Awaitable[dict[str, Array]]],
    ) -> None:
        """Enter an epoch into the history, with the metrics of its parameters."""
        metrics: dict[str, float] = {}
        if self.validate is not None:
            validate = user_code("validate")(self.validate)
            found = await self._call(validate, await params())
            metrics = metrics_of(found)
        reports = sorted(event["reports"], key=lambda r: int(r["rank"]))
        rows = sum(r["rows"] for r in reports)
        losses = [r["loss"] for r in reports if r["loss"] is not None]
        progress = self.progress
        progress.history.append(
            Epoch(
                epoch=self.first + event["epoch"],
                loss=sum(losses) / rows if losses and rows else None,
                metrics=metrics,
                seconds=max(r["seconds"] for r in reports),
                staleness=max(r["lag"] for r in reports),
            )
        )
        first = None if event["epoch"] else advice.first_loss(reports)
        await self._advise_of_loss(progress.history[-1], first)
        clocks = [r["clock"] for r in reports]
        progress.advance(max(clocks), min(clocks))
        progress.loss = None
        await self._notify("on_epoch")

    async def _advise_of_loss(self, entry: Epoch, first: float | None) -> None:
        """Say that the loss has grown out of all bounds, if it has."""
        if entry.loss is None:
            return
        if text := self.losses.look(entry.epoch, entry.loss, first):
            await self._call(self._say, text)

    async def _advise_of_names(self, *, everything: bool = False) -> None:
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
            await self._call(self._say, advice.unnamed_text(meta.name, names))

    def _say(self, text: str) -> None:
        """Log a warning, where no bar is in its way."""
        callbacks_module.step_aside(self.callbacks)
        logger.warning("daskps: %s", text)

    async def _validated(self) -> None:
        """Wait for the validation that is under way, if one is, or raise its error."""
        if self._validation is not None:
            await self._validation
            self._validation = None

    async def _notify(self, event: str) -> None:
        if self.callbacks:
            await self._call(
                callbacks_module.notify, self.callbacks, event, self.progress
            )
