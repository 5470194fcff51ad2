"""One call of `train` or `run` on the client: where it begins, and what came out."""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from daskps import config, limits
from daskps.cluster import upstream
from daskps.cluster.caller.owner_steps import lr_factors
from daskps.cluster.caller.routes import ASSIGN, load_rules
from daskps.cluster.caller.scheduler_lost import scheduler_named
from daskps.cluster.caller.user_calls import (
    CLEAN_UP_SECONDS,
    Pump,
    UserCall,
    call_directly,
)
from daskps.cluster.protocol.deadline import Deadline
from daskps.cluster.runs.graph.epochs import Schedule
from daskps.cluster.runs.launch import epochs_of, launch
from daskps.cluster.runs.parts import check_workers, threads_of
from daskps.cluster.runs.spec import Launch
from daskps.combination import find_refusal
from daskps.consistency import BSP
from daskps.epochs import Epochs
from daskps.errors import (
    DaskPSError,
    SchedulerLostError,
    StoreRestoredError,
    UnsavedRunError,
)
from daskps.optim.local import check_rules
from daskps.store.handle import DEFAULT
from daskps.store.store import ParameterStore
from daskps.training.callbacks import ProgressBar, of_kind
from daskps.training.data.parts import (
    computed_parts,
    is_computed_first,
    is_lazy_part,
    parts_of,
)
from daskps.training.early_end import StopNow
from daskps.training.events import RunEvents
from daskps.training.functions import described
from daskps.training.left import LeftValues, combined
from daskps.training.progress import Progress, TrainedBy
from daskps.training.resident import train_part
from daskps.training.result import TrainResult
from daskps.training.row_ids import check_tables
from daskps.training.saves import (
    FINISH_SECONDS,
    Beginning,
    Saves,
    last_round,
)
from daskps.training.steps import GraphStepper

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.link import Link
    from daskps.cluster.runs.parts import DataPart
    from daskps.cluster.runs.spec import Body
    from daskps.training.steps import FitPlan


logger = logging.getLogger(__name__)
T = TypeVar("T")
#: Trainers per thread of the cluster above which "auto" takes to the task graph.
MOST_PER_THREAD = 4


class Job(RunEvents):
    """One call of `train` or `run` on the client."""

    def start(self, work: Callable[[], Awaitable[T]], timeout: Any) -> T:
        """Drive the work from here, or return an awaitable of it."""
        seconds = config.deadline(timeout)
        if not isinstance(self.store, ParameterStore):
            raise TypeError(
                f"expected a ParameterStore, found {type(self.store).__name__}; make "
                f"one with daskps.create"
            )
        link, what = self.store._bind(), f"a run on store {self.store.name!r}"
        deadline = Deadline(seconds, what)

        async def guarded() -> T:
            async def meet(shards: ShardClient, _: Deadline) -> None:
                await link.directory("locate", uid=shards.meta.uid)

            async with scheduler_named(link, what):
                # The shards that the store has now: it gets no others in a run.
                await self.store._on_loop(link, meet, deadline)
                return await self.store._guarded(link, work, deadline)

        async def begin(call: UserCall) -> T:
            self._call = call
            try:
                return await link.within(guarded, seconds, what)
            except BaseException as error:
                await self._conclude(link, error, deadline)
                raise

        if link.asynchronous:
            # That is what `daskps.aio` says.
            return self._ended(begin(call_directly))  # type: ignore[return-value]
        patience = CLEAN_UP_SECONDS + (FINISH_SECONDS if self.checkpoint else 0)
        # In a task its trainers may need this very thread.
        with self._ending(), upstream.stepped_aside():
            return Pump().drive(link, begin, patience)

    async def _ended(self, work: Awaitable[T]) -> T:
        with self._ending():
            return await work

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Note at what ends a run how far it is saved, and end the lines of bars."""
        try:
            yield
        except BaseException as error:
            if self.run and self.saves and not isinstance(error, UnsavedRunError):
                more = ", with which train(..., resume=True) of a new store goes on"
                error.add_note(f"{self.saves.newest}{more if self.saves.saved else ''}")
            raise
        finally:
            # Here: output from now on belongs to the caller.
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
        if any(map(is_lazy_part, parts)):
            # Data may take long: a store that takes no run says so before.
            await epochs_of(link, self.store.uid, self.store.name)
            await self._notify("on_data")
            parts = await computed_parts(link, parts)
        await self._notify("on_start")
        found = await self.launch(body, parts)
        if left := combined(one for one in found if isinstance(one, LeftValues)):
            make = self.store._placing(ASSIGN, left, "value")
            deadline = Deadline(config.deadline(), "the values that trainers have left")
            source = self.store._producer_here(link)
            await self.store._do_async(link, make, deadline, source)
        await self._notify("on_stop")
        await self._advise_of_names()
        return [one.result if isinstance(one, LeftValues) else one for one in found]

    async def train(
        self, plan: FitPlan, X: Any, y: Any, split: dict[str, Any]
    ) -> TrainResult:
        """Cut the data, train, read what came out."""
        link: Link = self.store._bind()
        await check_workers(link, self.workers)
        await self._check(link, plan)
        begin = await self._beginning(link)
        self.status.history += begin.history
        if self.resume and begin.progress.epochs.ended >= self.epochs:
            await self._load(begin)
            return await self._result(link, "resident")
        parts = await self._parts(link, X, y, split)
        try:
            lengths = [part.rows for part in parts]
            plan = replace(plan, rounds=plan.n_groups(max(lengths)))
            self.counted["moved_parts"] = sum(part.moved for part in parts)
            data = parts, split["scheme"]
            if plan.bsp:  # also of a checkpoint that is yet to be loaded
                at = begin.progress.epochs
                self._began_at = at.first * plan.rounds + at.clock
            elif self.retries.most:
                self._began_at = await self._progress(link)
            while True:
                try:
                    execution = await self._attempt(link, plan, begin, data)
                    break
                except Exception as error:
                    if not (self.retries.fail(error) and await self._has_ticked(link)):
                        raise
                    begin = await self._again(link, error)
            unsaved = await self._save_end(link)
        finally:
            if self._validation is not None:
                self._validation.cancel()
            # The traceback of an error must not keep our data on the cluster.
            parts.clear()
        result = await self._result(link, execution)
        if unsaved is not None and self.saves is not None:
            raise UnsavedRunError(
                f"the run on store {self.store.name!r} has ended, and its end could not be "
                f"saved: {unsaved}. The result of train is `result` of this "
                f"error; {self.saves.newest}; while this cluster lives, store.save(url) "
                f"saves the end elsewhere",
                result,
            ) from unsaved
        return result

    async def _save_end(self, link: Link) -> Exception | None:
        """Save the end of the run, where it is saved at all; return why it could not be."""
        if self.saves is not None and self.run:
            try:
                await self.saves.finish(self.status, await self._place(link))
            except SchedulerLostError:
                raise
            except (DaskPSError, OSError) as error:
                return error
        return None

    async def _parts(
        self, link: Link, X: Any, y: Any, split: dict[str, Any]
    ) -> list[DataPart]:
        """Cut the data; say so before where that waits for Dask."""
        if is_computed_first(X, y):
            await self._notify("on_data")
        about: dict[str, Any] = {"split": split, "only": self.workers}
        return await parts_of(link, X, y, trainers=self.trainers, **about)

    async def _attempt(
        self,
        link: Link,
        plan: FitPlan,
        begin: Beginning,
        data: tuple[Sequence[DataPart], str],
    ) -> str:
        """Train from a place to the end; return how it was executed."""
        (parts, scheme), before = data, begin.progress
        lengths = [part.rows for part in parts]
        plan = self._begun(plan, before)
        run = TrainedBy.of(plan, described(self.chosen.policy), scheme, lengths)
        if before.run is not None:
            before.run.check_goes_on(run)
        await self._load(begin)
        if plan.most == 0:
            return "resident"
        graph = await self._graph(plan, lengths)
        body = partial(train_part if graph is None else GraphStepper, plan)
        await self._begin_plateaus(link)
        await self._notify(
            "on_failover" if self.counted["retried_runs"] else "on_start"
        )
        at = Epochs(plan.first, plan.rounds, plan.start)
        await self._follow(link, body, parts, graph, Progress(at, run))
        return "graph" if graph else "resident"

    async def _place(self, link: Link) -> Epochs:
        """Return how far the store is."""
        end, _ = await epochs_of(link, self.store.uid, self.store.name)
        return end

    async def _has_ticked(self, link: Link) -> bool:
        """Return whether there was a round since the call; without rounds, an update."""
        try:
            return await self._progress(link) > self._began_at
        except StoreRestoredError:
            raise  # what is lost nobody else would tell
        except (OSError, DaskPSError):
            return False  # what was raised says more

    async def _progress(self, link: Link) -> int:
        """Return a number that rises with each tick that changes something."""
        if isinstance(self.policy, BSP):
            # A round that is taken back raises versions too.
            return (await self._place(link)).rounds
        shards = await self.store._attach(link)
        rows = await shards.control("versions")
        return sum(version for of in rows for _, version in of)

    async def _again(self, link: Link, error: Exception) -> Beginning:
        """Return where the run goes on that has failed: after its last complete round."""
        found, status = await last_round(link, self.store, None), self.status
        end = await self._place(link)
        await self._validated()
        # Without rounds one may have ended for all, and is begun again where the
        # slowest trainer of the shards is.
        status.history[:] = status.history_at(end)
        place = end.ended, end.within
        logger.warning(
            "daskps: a run on store %r goes on at epoch %d, round %d, after %r",
            self.store.name,
            *place,
            error,
        )
        self.counted["retried_runs"] += 1
        self.counted["clock"] += end.rounds - self.early.before
        status.clock, status.slowest, status.loss = 0, 0, None
        self.reset = False
        if self.saves is not None:
            self.saves.begin_anew()
        return found

    async def _result(self, link: Link, execution: str) -> TrainResult:
        """Read what came out."""
        shards = await self.store._attach(link)
        asked = self.store._deadline(DEFAULT, "the stats")
        rows = await shards.control("stats", asked)
        found = await self.store.pull_async()
        counted = dict(self.counted)
        counted["clock"] += self.status.clock
        if self.saves is not None:
            counted["skipped_saves"] = self.saves.n_skipped
        stats = self.spent.total(counted, [row for of in rows for row in of])
        await self._notify("on_stop")
        if self.status.clock:
            await self._advise_of_names(everything=True)
        version = min(r["version"] for of in rows for r in of)
        return TrainResult(found, self.status.history, version, execution, stats)

    async def _beginning(self, link: Link) -> Beginning:
        """Return where the run begins, and take from it how many trainers there are."""
        if self.checkpoint is not None:
            self.saves = Saves(await self.store._attach(link), self.checkpoint)
        if self.reset:
            return Beginning(Progress(Epochs()), [])
        if not self.resume:
            end = await self._place(link)
            return Beginning(Progress(Epochs(end.following)), [])
        found = await last_round(link, self.store, self.saves)
        if self.trainers is None:
            self.trainers = found.progress.n_trainers
        return found

    async def _load(self, begin: Beginning) -> None:
        """Load a checkpoint into the store, where it begins with one."""
        if begin.folder and self.saves is not None:
            await self.saves.load(begin)

    def _begun(self, plan: FitPlan, before: Progress) -> FitPlan:
        """Return a plan with the epochs of the store that it has, and note them."""
        at, passed, status = before.epochs, 0, self.status
        if not self.counted["retried_runs"]:
            status.first = at.ended
            status.epochs = self.epochs if self.resume else at.ended + self.epochs
        if before.run is not None:
            passed = before.run.epochs - at.first
        if plan.bsp or not at.within:
            # All trainers are at the same clock of the same epoch, or begin one.
            at = Epochs(at.ended, at.per_epoch, at.within)
        n = status.epochs - at.first
        plan = replace(plan, first=at.first, start=at.clock, epochs=n, passed=passed)
        most = self.early.begin(at, plan.rounds)
        rounds = n * plan.rounds - at.clock
        status.rounds = rounds if most is None else min(rounds, most)
        return replace(plan, most=most)

    async def _graph(self, plan: FitPlan, lengths: Sequence[int]) -> Schedule | None:
        """Return the rounds of graph execution, None for resident trainers."""
        execution = self.chosen.execution
        if execution == "auto":
            found = await threads_of(self.store._bind(), self.workers)
            threads = sum(found.values())
            many = plan.bsp and len(lengths) > MOST_PER_THREAD * threads
            if many:
                meta = (await self.store._attach(self.store._bind())).meta
                asked = replace(self.chosen, execution="graph")
                many = find_refusal(asked) is None
                if meta.layout.tables and self.chosen.takes_rows:
                    # Any gradient may have rows.
                    many = asked.takes_rows
            execution = "graph" if many else "resident"
        if execution == "resident":
            limits.check_trainers(len(lengths), graph=False)
            return None
        groups = [plan.n_groups(n) for n in lengths]
        gated, start, most = self.gated, plan.start, plan.most
        return Schedule(plan.epochs, plan.rounds, groups, gated, start, most)

    async def _check(self, link: Link, plan: FitPlan) -> None:
        """Refuse what the parameters, tables and rules of the store do not take."""
        shards, models = await self.store._attach(link), plan.average_models
        meta = shards.meta
        check_tables(meta, plan.rows)
        if models or plan.sync_every != 1:
            what = "average='models'" if models else "sync_every"
            check_rules(load_rules(meta), meta.layout.names, what, rounds=models)
            factors = set((await self._factors(shards)).values()) - {1.0}
            if self.plateaus:
                raise ValueError(
                    f"{what} does not take {self.plateaus[0]!r}: trainers make own steps "
                    f"by the rates of the optimizers; leave one of them out"
                )
            if factors and not self.reset:
                raise ValueError(
                    f"{what} does not take store {meta.name!r}, whose learning rates are "
                    f"scaled by {min(factors):g}: trainers make own steps by those of the "
                    f"optimizers; leave it out, or begin with reset_optimizer=True"
                )

    async def _begin_plateaus(self, link: Link) -> None:
        """Tell those that reduce learning rates what these are."""
        if not self.plateaus:
            return
        shards = await self.store._attach(link)
        rules = load_rules(shards.meta)
        factors = {} if self.reset else await self._factors(shards)
        rated = [(rule, factors.get(index, 1.0)) for index, rule in rules.items()]
        for plateau in self.plateaus:
            # Those of a run that is tried again it has seen.
            again = self.counted["retried_runs"]
            plateau.begin(rated, () if again else self.status.history)

    async def _factors(self, shards: ShardClient) -> dict[int, float]:
        asked = Deadline(config.deadline(), "the factors of its learning rates")
        return await lr_factors(shards, asked)

    async def _follow(self, link: Link, *launched: Any) -> None:
        """Run the trainers to the end of the run, or to where it is stopped."""
        try:
            await self.launch(*launched)
            await self._validated()
        except StopNow:
            await self._enter_open(link)

    async def _enter_open(self, link: Link) -> None:
        """Enter the epoch within which the run was stopped into the history."""
        status = self.status
        end = await self._place(link)
        if isinstance(self.policy, BSP):
            # A trainer may have told of a clock whose round came to nothing.
            status.clock = end.rounds - self.early.before
        if end.following > status.following:
            metrics = await self._metrics(self.store.pull_async)
            entry = self.early.open_entry(status, end, metrics)
            status.history.append(entry)
            clock = entry.step - self.early.before
            status.advance(clock, clock)
            await self._notify("on_epoch")
