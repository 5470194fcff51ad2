"""A run in a simulation: trainers on workers, which may die, and what it must lead to."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.core import Status

import daskps
from daskps import optim
from daskps.cluster import upstream
from daskps.cluster.caller.row_routes import IdSplit, RowBatch
from daskps.cluster.caller.trainer_step import TrainerStep
from daskps.consistency import ASP, BSP, SSP, encoded, measures_delay
from daskps.epochs import Epochs
from daskps.errors import RunCancelledError
from tests.simulator import steps
from tests.simulator.delays import Delays
from tests.simulator.following import Follower, opened
from tests.simulator.ground import CHANCE
from tests.simulator.named_ids import ANY, NamedIds
from tests.simulator.oracles import EXPECTED
from tests.simulator.undisturbed import RULE, undisturbed

if TYPE_CHECKING:
    from collections.abc import Collection

    from distributed import Client

    from daskps.cluster.caller.link import Link
    from daskps.layout.arrays import Layout
    from tests.simulator.loop import Process
    from tests.simulator.oracles import Restored, Watch
    from tests.simulator.steps import AsyncTrainer
    from tests.simulator.world import World

#: Those that are chosen from.
POLICIES = (BSP(), BSP(), SSP(1), ASP(), ASP(damping=1.0), ASP(1, 1.0))
N_RANKS, N_CLOCKS = 3, 5
#: Rounds of an epoch: in the end one is half over.
PER_EPOCH = 2
BEGINNING = Epochs(per_epoch=PER_EPOCH)
#: How many ids a step has for itself: with many of them the index grows in a round.
SIZES = (4, 4, 60, 600)
#: How much later than the last fault a call of a run, or all of it, must have ended.
SECONDS = 30.0
#: The share of runs that their caller cancels.
CANCELLED_SHARE = 0.3
#: The reason of a run whose shards have not all begun it.
NOT_BEGUN = "it could not begin"
#: How often a trainer is looked for on a worker that has died.
LOOK_SECONDS = 0.2


@dataclass(eq=False)
class Training:
    """One run whose gradients are one-hot: an element for each shard, rank and clock.

    And a row of a table, which is named twice, and ids of an unbounded table. In rounds
    an array with a rule of its own, whose slots and steps count, must have the bits
    that it has without a cluster.
    """

    world: World
    watch: Watch
    n_shards: int
    name: str = "trained"
    #: Whether it has come to its end, and why it has not.
    is_complete: bool = False
    why: str = ""
    #: Where in its epochs it begins, and how many rounds there were before.
    epochs: Epochs = BEGINNING
    n_before: int = 0
    #: Whether its caller cancels it.
    is_cancelled: bool = False
    #: Ranks and clocks that were acknowledged.
    acknowledged: set[tuple[int, int]] = field(default_factory=set)
    #: Set when all shards have begun it.
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.sync = CHANCE.choice(POLICIES)
        self.policy, self.staleness, _ = encoded(self.sync)
        #: What is known of delays, where they are measured.
        self._delays = Delays(self.watch, self.staleness) if self._measures else None
        #: Whether each step takes two pushes of half of it.
        self._in_halves = self.policy == "bsp" and CHANCE.random() < 0.5
        self.is_cancelled = CHANCE.random() < CANCELLED_SHARE
        sizes = CHANCE.choices(SIZES, k=N_RANKS * N_CLOCKS)
        self.named = NamedIds(self.watch, self.n_shards, sizes, 1)
        self.followers: list[Follower] = []
        #: By rank the trainer that was started last.
        self._newest: dict[int, object] = {}

    @property
    def is_bsp(self) -> bool:
        """Whether it is in rounds."""
        return self.policy == "bsp"

    @property
    def _measures(self) -> bool:
        return measures_delay(self.sync)

    @property
    def _drops(self) -> bool:
        """Whether steps may be left out."""
        return self._measures and self.staleness >= 0

    def params(self) -> Any:
        """Return the parameters of the store."""
        n = self.n_shards * N_RANKS * N_CLOCKS
        table = daskps.TableSpec(n, 1, "float64")
        # Without rounds each shard must have what counts for itself, and nothing more.
        more = {"m": np.zeros(self.n_shards)} if self.is_bsp else {}
        return {"w": np.zeros(n), **more, "t": table, ANY: self.named.spec()}

    def optimizer(self) -> Any:
        """Return the rules of the store."""
        return ({"m": RULE} if self.is_bsp else {}) | {"*": optim.SGD(lr=1.0)}

    def asked(self) -> Any:
        """Return the rows that a pull of all reads besides the arrays."""
        n = self.n_shards * N_RANKS * N_CLOCKS
        return {"t": np.arange(n), ANY: self.named.ids}

    def counts(self, values: Any) -> Any:
        """Return what was counted, by shard, rank and clock: of array and table alike."""
        shape = self.n_shards, N_RANKS, N_CLOCKS
        found, of_table = (-values[name].reshape(shape) for name in ("w", "t"))
        return np.where(found == of_table, found, np.nan)

    async def follow(self, client: Client) -> None:
        """Keep a copy of a table: nothing is known of it but at the end."""
        store = await opened(self.name, client)
        mine = Follower(self.watch, self.named, store, "the copy of a run")
        self.followers.append(mine)
        await mine.follow(CHANCE.choice((0, 2, 4)), lambda: (), SECONDS)

    # -- the run -------------------------------------------------------------

    @property
    def outcome(self) -> str:
        """What became of it, in words."""
        return "is complete" if self.is_complete else f"ended: {self.why}"

    async def run(self, link: Link) -> None:
        """Open the run, see its trainers to their end, and close it."""
        begin = {
            "policy": encoded(self.sync),
            "n_ranks": N_RANKS,
            "reduce": upstream.dumps("sum"),
            "reset": False,
            "codec": ("", b""),
            "epochs": self.epochs,
        }
        opening = self._open(link, begin)
        try:
            uid, run = await self.watch.call("open_run", opening, SECONDS)
        except EXPECTED as error:
            self.why = f"{NOT_BEGUN}: {error!r}"
            return
        self.has_begun.set()
        ranks = asyncio.gather(*(self._rank(uid, run, rank) for rank in range(N_RANKS)))
        if self.is_cancelled:
            await asyncio.wait({ranks}, timeout=CHANCE.uniform(0.3, 2.0))
            if not ranks.done():
                self.why = "cancelled by its caller"
                await self._fence(link, run, self.why)
        self.is_complete = all(await ranks)
        try:
            await link.directory("close_run", run=run)
        except EXPECTED as error:
            self.why = self.why or f"it could not be closed: {error!r}"

    async def _open(self, link: Link, begin: dict[str, Any]) -> tuple[str, int]:
        uid: str = (await link.directory("find", name=self.name))["uid"]
        run: int = await link.directory(
            "open_run",
            uid=uid,
            begin=begin,
            client=link.client.id,
            size=N_RANKS,
            restartable=True,
            gated=False,
            graph=False,
            described="",
        )
        return uid, run

    async def _rank(self, uid: str, run: int, rank: int) -> bool:
        """Have a rank train to its end, anew where its worker dies."""
        while True:
            process = await self._place()
            given = self.world.state(process)
            work = process.spawn(self._train(process, uid, run, rank))
            while not (await asyncio.wait({work}, timeout=LOOK_SECONDS))[0]:
                if self.world.state(process) is not given:
                    # Where it has not died it goes on, beside the next one. One that has
                    # died may be heard of late: what it sent last comes before the next.
                    break
            else:
                ended: bool = work.result()
                return ended

    async def _place(self) -> Process:
        """Return a worker that Dask would give a task."""
        while True:
            found = [process for process in self.world.live if self._runs(process)]
            if found:
                return CHANCE.choice(found)
            await asyncio.sleep(LOOK_SECONDS)

    def _runs(self, process: Process) -> bool:
        return self.world.status(process) == Status.running

    async def _train(self, process: Process, uid: str, run: int, rank: int) -> bool:
        link = self.world.link(self.world.workers[process.name])
        what = f"{{}} of trainer {rank} on {process.name}"
        try:
            place = steps.SimRank(run, rank, N_RANKS)
            joining = steps.join(link, uid, place, self.sync)
            trainer = await self.watch.call(what.format("register"), joining, SECONDS)
            self._newest[rank] = trainer
            while (clock := self.n_before + trainer.clock) < N_CLOCKS:
                read = trainer.read_async(self.asked())
                values = await self.watch.call(what.format("a read"), read, SECONDS)
                # One that was hung may read beside the next one, which is ahead of it.
                if self._newest[rank] is trainer:
                    self._compare(values, rank, clock)
                await asyncio.sleep(CHANCE.uniform(0.0, 0.3))
                step = self._step(trainer, clock)
                await self.watch.call(what.format("a step"), step, SECONDS)
            finish = trainer.finish_async()
            await self.watch.call(what.format("finish"), finish, SECONDS)
        except EXPECTED as error:
            if not isinstance(error, RunCancelledError):
                reason, worker = f"trainer {rank} raised {error!r}", link.node.address
                await self._fence(link, run, reason, worker=worker)
            if process.is_closing or self.world.status(process) is None:
                # Nobody hears of its end: Dask gives the task to another worker.
                await asyncio.Event().wait()
            self.why = self.why or f"trainer {rank}: {error!r}"
            return False
        return True

    async def _fence(self, link: Link, run: int, reason: str, worker: str = "") -> None:
        # Dask closes the connections of a worker that closes: a RuntimeError.
        with contextlib.suppress(*EXPECTED, RuntimeError):
            await link.directory("fence_run", run=run, reason=reason, worker=worker)

    async def _step(self, trainer: AsyncTrainer, clock: int) -> None:
        counts = np.zeros((self.n_shards, N_RANKS, N_CLOCKS))
        counts[:, trainer.rank, clock] = 1.0
        some = {0: counts.reshape(-1)}
        if self.is_bsp:
            some[1] = np.full(self.n_shards, (trainer.rank + 1.0) * (clock + 1))
        if self._in_halves:
            some = {index: values / 2 for index, values in some.items()}
            await trainer.deliver_async(TrainerStep(some), tick=False)
        step = trainer.rank * N_CLOCKS + clock
        rows = self._rows(trainer.meta.layout, counts, step)
        await trainer.deliver_async(TrainerStep(some, rows=rows))
        self.acknowledged.add((trainer.rank, clock))

    def _rows(self, layout: Layout, counts: Any, step: int) -> list[RowBatch]:
        """Return one row of each shard, in two halves, and unbounded rows."""
        ids = np.tile(np.flatnonzero(counts), 2)
        table, unbounded = layout.tables
        cut = IdSplit.of(table, ids, layout.n_shards)
        named = self.named.given(unbounded, step, -1.0)
        return [RowBatch(cut, np.full(len(ids), 0.5)), named]

    # -- what must hold ------------------------------------------------------

    def _compare(self, values: Any, rank: int, clock: int) -> None:
        """Look at what a trainer reads at a clock."""
        counts = self.counts(values)
        where = f"trainer {rank} at clock {clock} ({self.policy})"
        self._compare_named(counts, values, where)
        counts = self._there(counts, where)
        if self._delays is not None:
            self._delays.note(rank, clock, counts)
        if self.is_bsp:
            self._compare_bits(values, clock, where)
        due = counts[:, :, : max(0, clock - self.staleness)]
        if self.policy != "asp" and not due.all():
            self.watch.wrong(f"{where} lacks {_first(due == 0)}")
        own = counts[:, rank]
        if not own[:, :clock].all() and not self._drops:
            self.watch.wrong(f"{where} lacks its own {_first(own[:, :clock] == 0)}")
        # One who died may have left a step on its way; under BSP it is in no round.
        early = counts[:, :, clock:] if self.is_bsp else own[:, clock + 1 :]
        if early.any():
            self.watch.wrong(f"{where} sees what is not pushed yet: {_first(early)}")

    def _compare_named(self, counts: Any, values: Any, where: str) -> Any:
        """Look at unbounded rows beside what was counted; return what they must read."""
        wanted = self.named.expected(counts.reshape(self.n_shards, -1), ())
        at = np.arange(len(wanted))
        self.named.compare(where, wanted, at, values[ANY])
        return wanted

    def _compare_bits(self, values: Any, n_rounds: int, where: str) -> None:
        """Look at the array whose rule has slots, after so many rounds."""
        wanted, found = _bits()[n_rounds], values["m"].tolist()
        if found != [wanted] * self.n_shards:
            self.watch.wrong(f"{where}: {found} instead of {wanted} by {RULE!r}")

    def _there(self, counts: Any, where: str) -> Any:
        """Return 1 for each step that a shard has, 0 for others; each counts once."""
        if self._delays is not None:
            return self._delays.there(counts, where)
        wrong = (counts != 0) & (counts != 1)
        if wrong.any():
            at = _first(wrong)
            self.watch.wrong(f"{where}: {counts[tuple(at)]:g} at {at} instead of 1")
        return counts

    def check(self, values: Any) -> None:
        """Compare at the end what is there with what the run was."""
        counts, end = self.counts(values), f"the end of the run ({self.policy})"
        wanted = self._compare_named(counts, values, end)
        if self._delays is not None:
            n_made = N_RANKS * N_CLOCKS if self.is_complete else None
            self._delays.check(counts, values["shards"], n_made)
        counts = self._there(counts, end)
        self.named.compare_ids(end, wanted, values["ids"])
        for follower in self.followers:
            follower.compare(wanted, f"{follower.name}, at the end")
        if self.is_complete and not (counts.all() or self._drops):
            self.watch.wrong(f"{end} lacks {_first(counts == 0)}")
        if self.is_bsp:
            self._check_rounds(counts, values, end)
        else:
            self._check_steps(counts, self.acknowledged, end)

    def _check_rounds(self, counts: Any, values: Any, what: str) -> None:
        if (counts != counts[:, :1]).any():
            self.watch.wrong(f"{what}: a part of a round")
        if (counts != counts[:1]).any():
            self.watch.wrong(f"{what}: shards at rounds {counts[:, 0].sum(1)}")
        if (np.diff(counts[:, 0]) > 0).any():
            self.watch.wrong(f"{what}: a round without those before it")
        self._compare_bits(values, int(counts[0, 0].sum()), what)

    def _check_steps(
        self, counts: Any, before: Collection[tuple[int, int]], what: str
    ) -> None:
        for rank, clock in () if self._drops else sorted(before):
            if not counts[:, rank, clock].all():
                self.watch.wrong(f"{what} lacks clock {clock} of trainer {rank}")

    # -- checkpoints -----------------------------------------------------------

    def known(self) -> set[tuple[int, int]]:
        """Return what a checkpoint that begins now must have, where there are no rounds."""
        return {*self.acknowledged}

    def check_restored(self, found: Restored, known: Any, what: str) -> None:
        """Compare what was restored with one moment, and what was known before that."""
        counts, what = self.counts(found.values), f"{what} ({self.policy})"
        wanted = self._compare_named(counts, found.values, what)
        counts = self._there(counts, what)
        self.named.compare_ids(what, wanted, found.values["ids"])
        if self._drops:
            return  # each shard leaves out what is too old for it
        if self.is_bsp:
            self._check_rounds(counts, found.values, what)
        else:
            self._check_steps(counts, known or (), what)
            # Of one that was given up a part may be there.
            whole = np.zeros(counts.shape[1:], bool)
            for step in self.acknowledged:
                whole[step] = True
            if (parts := (counts != counts[:1]) & whole).any():
                self.watch.wrong(f"{what} has a part of {_first(parts)}")
        if (n := int(counts.sum(axis=2).min())) != found.epochs.clock:
            self.watch.wrong(f"{what} has {n} rounds, and counts {found.epochs}")

    def going_on(self, name: str, epochs: Epochs, n_shards: int) -> Training:
        """Return the rest of this run, in a store that was restored at such a place."""
        rest = copy.copy(self)
        rest.name, rest.n_before = name, epochs.clock
        rest.epochs = epochs._replace(per_epoch=PER_EPOCH)
        rest.named = self.named.stored_in(n_shards)
        rest.acknowledged, rest.followers = set(), []
        rest.is_complete, rest.why, rest.is_cancelled = False, "", False
        return rest


@cache
def _bits() -> list[float]:
    """Return what the array is whose rule has slots, after so many rounds."""
    n = sum(rank + 1.0 for rank in range(N_RANKS))
    return undisturbed([n * (clock + 1) for clock in range(N_CLOCKS)])


def _first(where: Any) -> list[int]:
    found: list[int] = np.argwhere(where)[0].tolist()
    return found
