"""A run as its client hears it: epochs, metrics, callbacks, checkpoints and advice."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.cluster.caller import snapshots
from daskps.cluster.caller.owner_steps import Scaled, scale_lr
from daskps.cluster.caller.user_calls import (
    UserCall,
    call_directly,
)
from daskps.cluster.protocol.deadline import Deadline
from daskps.layout.chunks import ARRAYS
from daskps.store.handle import DEFAULT
from daskps.training import advice
from daskps.training.callbacks import ProgressBar, notify, of_kind
from daskps.training.early_end import EarlyEnd, Retries
from daskps.training.functions import metrics_of
from daskps.training.monitoring import Monitor
from daskps.training.plateau import ReduceOnPlateau
from daskps.training.result import Epoch, RunStatus
from daskps.training.stats import StatsOfRun
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from daskps.cluster.caller.client import ShardClient
    from daskps.combination import Combination
    from daskps.consistency import Policy
    from daskps.store.store import ParameterStore
    from daskps.training.saves import Checkpoints, Saves
    from daskps.typing import Array


logger = logging.getLogger(__name__)


#: Names of the counts that grow while a run goes on.
_COUNTED = ("lost_trainers", "retried_rounds", "retried_runs", "moved_parts", "clock")


@dataclass
class RunEvents:
    """A run as its client hears it: epochs, metrics, callbacks, checkpoints, advice."""

    store: ParameterStore
    chosen: Combination
    reduce: Any
    epochs: int
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
    #: The workers its trainers may be on; all, where it names none.
    workers: tuple[str, ...] = ()
    #: Whether it is begun anew after errors of the user's.
    retries: Retries = field(default_factory=Retries)
    #: How far the store was when it was called.
    _began_at: int = 0
    saves: Saves | None = None
    losses: advice.Losses = field(default_factory=advice.Losses)
    #: The chosen one, less what reads ahead take of its staleness.
    policy: Policy = field(init=False)
    #: How many rounds, of what loss, and the history so far.
    status: RunStatus = field(init=False)
    #: Looks whether it ends before its last epoch.
    early: EarlyEnd = field(init=False)
    #: Calls functions of the user's where their code runs.
    _call: UserCall = call_directly
    _validation: asyncio.Task[None] | None = None
    counted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))
    #: Sums of the reports that its trainers have sent about their epochs.
    spent: StatsOfRun = field(default_factory=StatsOfRun)

    def __post_init__(self) -> None:
        self.policy = self.chosen.policy
        self.status = RunStatus(self.store, self.epochs)
        self.early = EarlyEnd(self.stop)

    @property
    def gated(self) -> bool:
        """Whether trainers wait at the end of an epoch for what is decided here."""
        looks = (self.validate, self.stop)
        return any(one is not None for one in looks) or bool(self.plateaus)

    @property
    def plateaus(self) -> tuple[ReduceOnPlateau, ...]:
        """Callbacks that may reduce learning rates at the end of an epoch."""
        return of_kind(self.callbacks, ReduceOnPlateau)

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
        deadline = self.store._deadline(DEFAULT, "the snapshot that is validated")
        taken = await snapshots.take_snapshot(shards, ARRAYS, deadline)
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
        self.spent.add(event["epoch"], reports)
        watching = of_kind(self.callbacks, Monitor)
        for report in reports:
            for number, *record in report.get("records", ()):
                step, name, value = record
                watching[number].records.append((step, name, value))
        entry = self.early.entry(event, metrics)
        status.history.append(entry)
        first = None if event["epoch"] else advice.first_loss(reports)
        if text := self.losses.look(entry.epoch, entry.loss, first):
            await self._call(self._say, text)
        clocks = [r["clock"] for r in reports]
        status.advance(max(clocks), min(clocks))
        status.loss = None
        for plateau in self.plateaus:
            # Before a checkpoint is made of the epoch, and anybody goes on.
            if (by := plateau.reduction(entry)) is not None:
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

    async def _advise_of_names(self, *, everything: bool = False) -> None:
        """Name the parameters that no gradient of the run has named.

        All of them only if `everything`: a loop may do something else than train.
        """
        asked = advice.find_unnamed(self._shards, self.run, everything=everything)
        if text := await asked:
            await self._call(self._say, text)

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
