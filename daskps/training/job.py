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
from daskps.layout.chunks import ARRAYS
from daskps.store.store import ParameterStore
from daskps.training import advice
from daskps.training import callbacks as callbacks_module
from daskps.training.beginning import Beginning, last_round, next_epoch
from daskps.training.data.parts import parts_of
from daskps.training.functions import metrics_of
from daskps.training.graph import GraphStepper
from daskps.training.progress import Progress, TrainedBy
from daskps.training.resident import train_part
from daskps.training.result import Epoch, RunStatus, TrainResult
from daskps.training.row_ids import check_tables
from daskps.training.saves import Saves
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.link import Link
    from daskps.cluster.runs.spec import Body
    from daskps.codecs import Codec
    from daskps.consistency import Policy
    from daskps.training.checkpoints import Checkpoints
    from daskps.training.steps import FitPlan
    from daskps.typing import Array

logger = logging.getLogger(__name__)

#: Trainers per thread of the cluster above which "auto" takes to the task graph.
MOST_PER_THREAD = 4
#: What is counted while a run goes on.
_COUNTED = ("lost_trainers", "retried_rounds", "moved_parts")


@dataclass
class Job:
    """One call of `train` or `run` on the client."""

    store: ParameterStore
    policy: Policy
    reduce: Any
    epochs: int
    #: What the policy was called, before rows read ahead have taken of its staleness.
    sync: str
    trainers: int | None
    restartable: bool
    validate: Callable[[dict[str, Array]], Mapping[str, float]] | None = None
    stop: Callable[[list[Epoch]], bool] | None = None
    callbacks: tuple[object, ...] = ()
    reset: bool = False
    run: int = 0
    #: Whether it goes on where the run before has ended, also within an epoch; then
    #: `epochs` are the store's at its end.
    resume: bool = False
    checkpoint: Checkpoints | None = None
    #: The epoch of the store that the first one of the run is, and how many of its
    #: rounds there were before.
    first: int = 0
    since: int = 0
    execution: str = "resident"
    codec: Codec | None = None
    saves: Saves | None = None
    losses: advice.Losses = field(default_factory=advice.Losses)
    #: How many rounds, of what loss, and the history so far.
    status: RunStatus = field(init=False)
    #: Calls functions of the user's where their code runs.
    _call: UserCall = call_directly
    _validation: asyncio.Task[None] | None = None
    stats: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))

    def __post_init__(self) -> None:
        self.status = RunStatus(self.store, self.epochs)

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
        progress: Progress | None = None,
    ) -> list[Any]:
        """Run the trainers and hear what they say."""
        link, saved = self.store._bind(), self.checkpoint
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
            watched=bool(self.callbacks) or bool(saved and saved.every != "epoch"),
            codec=self.codec,
            graph=graph,
            epochs=progress.epochs if progress else None,
            described=progress.described if progress else "",
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
        before, history, folder = await self._beginning(link)
        self.status.history += history
        if self.resume and before.epochs.ended >= self.epochs:
            await self._load(folder, before)
            return await self._result(link, "resident")
        parts = await parts_of(link, X, y, trainers=self.trainers, split=split)
        try:
            lengths = [part.rows for part in parts]
            plan = replace(plan, rounds=plan.n_groups(max(lengths)))
            plan = self._begun(plan, before)
            run = TrainedBy.of(plan, self.sync, split["scheme"], lengths)
            if before.run is not None:
                before.run.check_goes_on(run)
            await self._load(folder, before)
            graph = await self._graph(plan, lengths)
            body = partial(train_part if graph is None else GraphStepper, plan)
            self.status.rounds = plan.epochs * plan.rounds - plan.start
            self.stats["moved_parts"] = sum(part.moved for part in parts)
            await self._notify("on_start")
            at = Epochs(plan.first, plan.rounds, plan.start)
            await self.launch(body, parts, graph, Progress(at, run))
            await self._validated()
            if self.saves is not None:
                end, _ = await epochs_of(link, self.store.uid, self.store.name)
                await self.saves.finish(self.status, end)
        finally:
            if self.saves is not None:
                await self.saves.abandon()
            if self._validation is not None:
                self._validation.cancel()
            # The traceback of an error must not keep our data on the cluster.
            parts.clear()
        return await self._result(link, "graph" if graph else "resident")

    async def _result(self, link: Link, execution: str) -> TrainResult:
        """Read what came out."""
        shards = await self.store._attach(link)
        what = f"the stats of store {self.store.name!r}"
        rows = await shards.control("stats", Deadline(config.deadline(), what))
        found = await self.store.pull_async()
        self.stats["duplicates"] = sum(r["duplicates"] for of in rows for r in of)
        self.stats["clock"] = self.status.clock
        await self._notify("on_stop")
        if self.status.clock:
            await self._advise_of_names(everything=True)
        version = min(r["version"] for of in rows for r in of)
        return TrainResult(found, self.status.history, version, execution, self.stats)

    async def _beginning(self, link: Link) -> Beginning:
        """Return where the run begins, and take from it how many trainers there are."""
        if self.checkpoint is not None:
            self.saves = Saves(await self.store._attach(link), self.checkpoint)
        if self.reset:
            return Beginning(Progress(Epochs()), [])
        if not self.resume:
            return await next_epoch(link, self.store)
        found = await last_round(link, self.store, self.saves)
        if self.trainers is None:
            self.trainers = found.progress.n_trainers
        return found

    async def _load(self, folder: str, progress: Progress) -> None:
        """Load a checkpoint into the store, where it begins with one."""
        if folder and self.saves is not None:
            await self.saves.load(folder, progress)

    def _begun(self, plan: FitPlan, before: Progress) -> FitPlan:
        """Return a plan with the epochs of the store that it has, and note them."""
        at, passed, status = before.epochs, 0, self.status
        self.first, self.since = at.ended, at.within
        status.first = self.first
        status.epochs = self.epochs if self.resume else self.first + self.epochs
        if before.run is not None:
            passed = before.run.epochs - at.first
        if plan.bsp or not at.within:
            # All trainers are at the same clock of the same epoch, or begin one.
            at = Epochs(at.ended, at.per_epoch, at.within)
        n = status.epochs - at.first
        return replace(plan, first=at.first, start=at.clock, epochs=n, passed=passed)

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
        return Schedule(plan.epochs, plan.rounds, groups, self.gated, plan.start)

    async def _hear(self, event: dict[str, Any]) -> bool:
        """Take in one event of the run; return whether it should stop."""
        if self._validation is not None and self._validation.done():
            await self._validated()
        if "clock" in event:
            # An epoch that ended meanwhile may have said more.
            if self.status.advance(event["clock"], event["slowest"]):
                if event["loss"] is not None:
                    # Between two epochs nobody has one; the last one stands.
                    self.status.loss = event["loss"]
                await self._save()
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
            stop = bool(await self._call(stopping, list(self.status.history)))
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
        status = self.status
        status.history.append(
            Epoch(
                epoch=self.first + event["epoch"],
                loss=sum(losses) / rows if losses and rows else None,
                metrics=metrics,
                seconds=max(r["seconds"] for r in reports),
                staleness=max(r["lag"] for r in reports),
                since=0 if event["epoch"] else self.since,
            )
        )
        first = None if event["epoch"] else advice.first_loss(reports)
        await self._advise_of_loss(status.history[-1], first)
        clocks = [r["clock"] for r in reports]
        status.advance(max(clocks), min(clocks))
        status.loss = None
        await self._save(epoch=True)
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
        if (found := await advice.find_unnamed(self._shards, self.run)) is None:
            return
        meta, names = found
        if names and (everything or len(names) < len(meta.optimizers)):
            await self._call(self._say, advice.unnamed_text(meta.name, names))

    async def _shards(self) -> ShardClient:
        return await self.store._attach(self.store._bind())

    def _say(self, text: str) -> None:
        """Log a warning, where no bar is in its way."""
        callbacks_module.step_aside(self.callbacks)
        logger.warning("daskps: %s", text)

    async def _save(self, *, epoch: bool = False) -> None:
        """Begin a checkpoint, where one is due."""
        if self.saves is not None:
            await self.saves.hear(self.status, epoch=epoch)

    async def _validated(self) -> None:
        """Wait for the validation that is under way, if one is, or raise its error."""
        if self._validation is not None:
            await self._validation
            self._validation = None

    async def _notify(self, event: str) -> None:
        if self.callbacks:
            notify = callbacks_module.notify
            await self._call(notify, self.callbacks, event, self.status)
