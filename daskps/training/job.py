"""One call of `train` or `run` on the client: what it knows and how it is driven."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.cluster import upstream
from daskps.cluster.caller import snapshots
from daskps.cluster.caller.owner_steps import Scaled, scale_lr
from daskps.cluster.caller.scheduler_lost import scheduler_named
from daskps.cluster.caller.user_calls import (
    CLEAN_UP_SECONDS,
    Pump,
    UserCall,
    call_directly,
)
from daskps.cluster.runs.epochs import epochs_of
from daskps.cluster.runs.launch import launch
from daskps.cluster.runs.parts import check_workers
from daskps.cluster.runs.spec import Launch
from daskps.cluster.wire.deadline import Deadline
from daskps.errors import SchedulerLostError, UnsavedRunError
from daskps.layout.chunks import ARRAYS
from daskps.store.store import ParameterStore
from daskps.training import advice
from daskps.training.callbacks import ProgressBar, notify, of_kind
from daskps.training.data.lazy import computed_parts, is_lazy
from daskps.training.ending import EarlyEnd
from daskps.training.functions import metrics_of
from daskps.training.monitoring import Monitor
from daskps.training.plateau import ReduceOnPlateau
from daskps.training.result import Epoch, RunStatus
from daskps.training.retrying import Retries
from daskps.training.saves import FINISH_SECONDS, Saves
from daskps.training.stats import StatsOfRun
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.link import Link
    from daskps.cluster.runs.graph.windows import Schedule
    from daskps.cluster.runs.spec import Body
    from daskps.combination import Combination
    from daskps.consistency import Policy
    from daskps.training.checkpoints import Checkpoints
    from daskps.training.progress import Progress
    from daskps.typing import Array

logger = logging.getLogger(__name__)


#: What is counted while a run goes on.
_COUNTED = ("lost_trainers", "retried_rounds", "retried_runs", "moved_parts", "clock")


@dataclass
class Job:
    """One call of `train` or `run` on the client."""

    store: ParameterStore
    chosen: Combination
    #: With what is left of a staleness of which rows that are read ahead take some.
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
    #: The workers its trainers may be on; all, where it names none.
    workers: tuple[str, ...] = ()
    #: Whether it is begun anew after errors of the user's.
    retries: Retries = field(default_factory=Retries)
    #: How far the store was when it was called.
    _began_at: int = 0
    saves: Saves | None = None
    losses: advice.Losses = field(default_factory=advice.Losses)
    #: How many rounds, of what loss, and the history so far.
    status: RunStatus = field(init=False)
    #: Looks whether it ends before its last epoch.
    early: EarlyEnd = field(init=False)
    #: Calls functions of the user's where their code runs.
    _call: UserCall = call_directly
    _validation: asyncio.Task[None] | None = None
    counted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))
    #: What its trainers have told of their epochs.
    spent: StatsOfRun = field(default_factory=StatsOfRun)

    def __post_init__(self) -> None:
        self.status = RunStatus(self.store, self.epochs)
        self.early = EarlyEnd(self.stop)

    @property
    def gated(self) -> bool:
        """Whether trainers wait at the end of an epoch for what is decided here."""
        looks = (self.validate, self.stop)
        return any(one is not None for one in looks) or bool(self.plateaus)

    @property
    def plateaus(self) -> tuple[ReduceOnPlateau, ...]:
        """What may reduce learning rates at the end of an epoch."""
        return of_kind(self.callbacks, ReduceOnPlateau)

    def start(self, work: Callable[[], Awaitable[Any]], timeout: Any) -> Any:
        """Drive the work from here, or return an awaitable of it."""
        seconds = config.deadline(timeout)
        if not isinstance(self.store, ParameterStore):
            raise TypeError(
                f"expected a ParameterStore, found {type(self.store).__name__}; make "
                f"one with daskps.create"
            )
        link, what = self.store._bind(), f"a run on store {self.store.name!r}"
        deadline = Deadline(seconds, what)

        async def guarded() -> Any:
            async with scheduler_named(link, what):
                return await self.store._guarded(link, work, deadline)

        async def begin(call: UserCall) -> Any:
            self._call = call
            try:
                return await link.within(guarded, seconds, what)
            except BaseException as error:
                await self._conclude(link, error, deadline)
                raise

        if link.asynchronous:
            return self._ended(begin(call_directly))
        patience = CLEAN_UP_SECONDS + (FINISH_SECONDS if self.checkpoint else 0)
        try:
            # In a task its trainers may need this very thread.
            with upstream.stepped_aside():
                return Pump().drive(link, begin, patience)
        except BaseException as error:
            self._note_saved(error)
            raise
        finally:
            # Here: what is drawn from now on belongs to the caller.
            self._end_bars()

    async def _ended(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except BaseException as error:
            self._note_saved(error)
            raise
        finally:
            self._end_bars()

    def _end_bars(self) -> None:
        for bar in of_kind(self.callbacks, ProgressBar):
            bar.close()

    async def _conclude(
        self, link: Link, error: BaseException, deadline: Deadline
    ) -> None:
        """Finish the checkpoint that is being written of a run that has failed."""
        if self.saves is None:
            return
        is_late = deadline.is_over or isinstance(error, SchedulerLostError)
        seconds = 0.0 if is_late else min(deadline.left(), FINISH_SECONDS)
        with suppress(SchedulerLostError):
            async with scheduler_named(link, deadline.what):
                await self.saves.conclude(seconds)

    def _note_saved(self, error: BaseException) -> None:
        """Note at what ends a run how far it is saved."""
        if not self.run or self.saves is None or isinstance(error, UnsavedRunError):
            return
        more = ", with which train(..., resume=True) of a new store goes on"
        error.add_note(f"{self.saves.newest}{more if self.saves.saved else ''}")

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
            watched=bool(self.callbacks)
            or self.early.is_sudden
            or bool(saved and saved.every != "epoch"),
            codec=self.chosen.codec,
            read_codec=self.chosen.pull_codec,
            graph=graph,
            epochs=progress.epochs if progress else None,
            described=progress.described if progress else "",
            workers=self.workers,
        )

        def began(run: int) -> None:
            self.run = run

        return await launch(link, spec, self._hear, began)

    async def run_loops(self, body: Body, parts: Sequence[Any]) -> list[Any]:
        """Run loops of the user's; return what they return."""
        if self.plateaus:
            raise ValueError(
                f"{self.plateaus[0]!r} is for train: loops of run have no epochs; call "
                f"store.scale_lr(factor) where the run is over"
            )
        link = self.store._bind()
        await check_workers(link, self.workers)
        if any(map(is_lazy, parts)):
            # Data may take long: a store that takes no run says so before.
            await epochs_of(link, self.store.uid, self.store.name)
            await self._notify("on_data")
            parts = await computed_parts(link, parts)
        await self._notify("on_start")
        found = await self.launch(body, parts)
        await self._notify("on_stop")
        await self._advise_of_names()
        return found

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
                self.early.look(self.status)
        elif "lost" in event:
            self.counted["lost_trainers"] += len(event["lost"])
            await self._notify("on_failover")
        elif "retried" in event:
            self.counted["retried_rounds"] += 1
        elif "moved" in event:
            self.counted["moved_parts"] += event["moved"]
        else:
            return await self._end_epoch(event)
        return False

    async def _end_epoch(self, event: dict[str, Any]) -> bool:
        """Enter an epoch into the history; return whether the run should stop.

        Where nobody may stop it, training goes on while a snapshot is validated.
        """
        await self._validated()
        waits = self.stop is not None or self.plateaus
        if self.validate is not None and not waits:
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
        status, reports = self.status, event["reports"]
        try:
            metrics = await self._metrics(params)
        except Exception:
            await self._save(epoch=True)  # which is due of an epoch that has ended
            raise
        self.spent.add(reports)
        watching = of_kind(self.callbacks, Monitor)
        for report in reports:
            for number, *record in report.get("records", ()):
                step, name, value = record
                watching[number].records.append((step, name, value))
        status.history.append(self.early.entry(event, metrics, self.first, self.since))
        first = None if event["epoch"] else advice.first_loss(reports)
        await self._advise_of_loss(status.history[-1], first)
        clocks = [r["clock"] for r in reports]
        status.advance(max(clocks), min(clocks))
        status.loss = None
        for plateau in self.plateaus:
            # Before a checkpoint is made of the epoch, and anybody goes on.
            if (by := plateau.reduction(status.history[-1])) is not None:
                await self._scale(by)
        await self._save(epoch=True)
        await self._notify("on_epoch")

    async def _metrics(
        self, params: Callable[[], Awaitable[dict[str, Array]]]
    ) -> dict[str, float]:
        """Return what `validate` says of parameters."""
        if self.validate is None:
            return {}
        validate = user_code("validate")(self.validate)
        return metrics_of(await self._call(validate, await params()))

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
        for bar in of_kind(self.callbacks, ProgressBar):
            bar.clear()
        logger.warning("daskps: %s", text)

    async def _save(self, *, epoch: bool = False) -> None:
        """Begin a checkpoint, where one is due."""
        if self.saves is not None:
            await self.saves.hear(self.status, epoch=epoch)

    async def _scale(self, by: float) -> None:
        """Multiply the learning rates, while trainers wait at the end of an epoch."""
        source = self.store._producer_here(self.store._bind())
        what = f"the learning rates of store {self.store.name!r} to be reduced"
        deadline = Deadline(config.deadline(), what)
        shards = await self._shards()
        await scale_lr(shards, source, Scaled(by), deadline=deadline, run=self.run)

    async def _validated(self) -> None:
        """Wait for the validation that is under way, if one is, or raise its error."""
        if self._validation is not None:
            await self._validation
            self._validation = None

    async def _notify(self, event: str) -> None:
        if self.callbacks:
            await self._call(notify, self.callbacks, event, self.status)
