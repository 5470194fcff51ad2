"""How a run ends on all shards with the same round, on shards without a cluster."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.comm.core import CommClosedError

from daskps.cluster.directory.entry import StoreEntry
from daskps.cluster.directory.fencing import (
    END_SECONDS,
    SETTLE_SECONDS,
    Settlement,
    agree,
    goal,
)
from daskps.cluster.directory.run import RunState
from daskps.cluster.directory.runs import OPEN_SECONDS, Runs
from daskps.cluster.host import runs
from daskps.cluster.host.collectives import Collectives
from daskps.cluster.host.host import ShardHost
from daskps.cluster.protocol.handlers import HOST
from daskps.consistency import BSP
from daskps.errors import (
    IllegalStateError,
    NotEnoughWorkersError,
    RunCancelledError,
    ShardLostError,
    StoreClosedError,
)
from daskps.shards.shard import Shard
from daskps.shards.steps import READ, RunPosition, Ticket
from tests.cluster.directory.test_run_start import in_no_time
from tests.invariants import validate
from tests.seams import rules_of
from tests.shards.making import RUN, failed, held, make, step

A, B, NEW = "tcp://a", "tcp://b", "tcp://new"
REASON = RunCancelledError("enough")


class Cluster:
    """Two shards in a run of two trainers, their hosts and their directory."""

    def __init__(self) -> None:
        self.shards = [make(durable=True) for _ in range(2)]
        for shard in self.shards:
            shard.segment.is_alone = False
            shard.begin_run(RUN, BSP(), 2, "mean")
        #: Of which host what it does before it answers a message of a kind.
        self.before: dict[tuple[str, str], Any] = {}
        self.heard: list[tuple[str, str]] = []
        self.tasks: set[asyncio.Future[Any]] = set()
        more: Any = ("w-uid", "w", "C", True, {}, (A, B), {}, 1.0, b"", {})
        self.entry = StoreEntry(*more)
        hosts: Any = self
        self.runs = Runs(hosts, lambda uid: self.entry, itertools.count(99).__next__)
        self.run = RunState(RUN, self.entry, "C", 2, restartable=False, gated=False)
        self.run.began = True
        self.runs.open[RUN] = self.run

    # -- what trainers do ----------------------------------------------------

    def send(self, shard: int, *places: tuple[int, int], **more: Any) -> list[Ticket]:
        """Deliver the steps of ranks at clocks."""
        tickets = [Ticket(step(*place, **more)) for place in places]
        self.shards[shard].submit(tickets)
        return tickets

    def one_ahead(self) -> None:
        """The second round is complete on the first shard alone."""
        for shard in (0, 1):
            self.send(shard, (0, 0), (1, 0), (0, 1))
        self.send(0, (1, 1))

    # -- as the hosts --------------------------------------------------------

    async def control(self, worker: str, method: str, **more: Any) -> Any:
        self.heard.append((worker, method))
        if (before := self.before.get((worker, method))) is not None:
            await before()
        of = [i for i, w in enumerate(self.entry.owners) if w == worker]
        hosted_shards = [
            SimpleNamespace(
                index=i, name="w", shard=self.shards[i], mailboxes_of=lambda run: None
            )
            for i in of
        ]

        async def under(hosted: Any, function: Any) -> Any:
            await asyncio.sleep(0)
            return function(hosted.shard)

        host: Any = SimpleNamespace(
            of=lambda store: hosted_shards,
            under=under,
            collectives=Collectives(),
            worker=SimpleNamespace(address=worker),
        )
        host.each = partial(ShardHost.each, host)
        return await HOST.by_name[method].function(host, **more)

    def has_client(self, client: str) -> bool:
        return True

    def has_worker(self, worker: str) -> bool:
        return True

    def spawn(self, work: Any) -> asyncio.Future[Any]:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        return task

    def tell(self, action: str, entry: StoreEntry, **more: Any) -> None:
        pass

    # -- what a test does and looks at ---------------------------------------

    async def fence(self) -> float:
        """Fence the run; return how long that took who did."""
        began = self.now
        await self.runs.on_fence_run(RUN, "enough")
        return self.now - began

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def over(self) -> None:
        assert self.run.ended is not None
        await self.run.ended

    def ends_with(self, rounds: int, version: int) -> None:
        """All shards have ended after so many rounds, with nothing of a later one."""
        for shard in self.shards:
            validate(shard)
            assert shard.rounds_of(RUN) == -1
            assert shard.segment.current.version == version
            assert shard.segment.current.steps[0] == rounds
            weights = held(shard.segment)[0]
            assert weights.tolist() == [rounds / 2] * 2 + [0] * 3
        assert RUN not in self.runs.open
        assert isinstance(self.runs.why_over(RUN), RunCancelledError)


def cluster_test(check: Any) -> None:
    async def run() -> None:
        await check(Cluster())

    in_no_time(run)


def test_shard_that_is_ahead_for_good_withdraws_its_round():
    """A trainer died between two hosts: what it sent to one will not come."""

    async def check(c: Cluster) -> None:
        c.one_ahead()
        assert SETTLE_SECONDS <= await c.fence() < END_SECONDS
        c.ends_with(1, 3)
        assert c.runs.how_over(RUN) == {"reason": "enough", "rounds": 1, "version": 3}

    cluster_test(check)


def test_shard_that_is_behind_for_a_moment_catches_up():
    async def check(c: Cluster) -> None:
        c.one_ahead()
        loop = asyncio.get_running_loop()
        loop.call_later(0.1, lambda: c.send(1, (1, 1)))
        assert 0.1 <= await c.fence() < SETTLE_SECONDS
        c.ends_with(2, 2)

    cluster_test(check)


def test_shard_that_has_not_heard_of_a_trainers_end_is_told():
    """It is a round behind then, with what it needs for that: no other goes further."""

    async def check(c: Cluster) -> None:
        for shard in (0, 1):
            c.send(shard, (0, 0), (1, 0))
        c.shards[0].finish_rank(RUN, 1)
        c.send(0, (0, 1), (0, 2))
        parked = c.send(1, (0, 1), (0, 2))
        assert [s.rounds_of(RUN) for s in c.shards] == [2, 1]
        assert await c.fence() < SETTLE_SECONDS
        assert not failed(parked, Exception)
        assert [s.segment.current.version for s in c.shards] == [2, 2]
        assert [s.segment.current.steps[0] for s in c.shards] == [2, 2]

    cluster_test(check)


@pytest.mark.parametrize("how", ["fence", "close"])
def test_shard_that_cannot_apply_a_round_is_not_waited_for(how):
    """Also where no trainer has passed on what it was told."""

    async def check(c: Cluster) -> None:
        c.one_ahead()
        c.shards[1].run_state.stop(RUN, ZeroDivisionError("it raises"))
        waiting = c.send(1, (1, 1), wait=READ)
        assert failed(waiting, ZeroDivisionError)
        await (c.fence() if how == "fence" else c.runs.on_close_run(RUN))
        assert c.now < 0.1
        c.ends_with(1, 3)
        assert failed(c.send(1, (1, 1)), ZeroDivisionError)

    cluster_test(check)


def test_run_that_ends_in_order_raises_no_version():
    async def check(c: Cluster) -> None:
        for shard in (0, 1):
            c.send(shard, (0, 0), (1, 0))
        await c.runs.on_close_run(RUN)
        c.ends_with(1, 1)
        assert c.heard == [(w, m) for m in ("hold", "end_run") for w in sorted({A, B})]

    cluster_test(check)


def test_hosts_that_are_slow_are_waited_for():
    """As long as one thing is done after the other: the caller looks at the store."""

    async def check(c: Cluster) -> None:
        c.one_ahead()

        async def slow() -> None:
            await asyncio.sleep(0.9 * END_SECONDS)

        c.before = {(w, m): slow for w in (A, B) for m in ("hold", "end_run")}
        assert await c.fence() > 3 * END_SECONDS
        c.ends_with(1, 3)

    cluster_test(check)


def test_store_with_a_silent_host_stays_held():
    """Its caller and the other trainers are told at once; no other run begins."""

    async def check(c: Cluster) -> None:
        c.one_ahead()
        woken = asyncio.Event()
        c.before[B, "hold"] = woken.wait
        parked = c.send(0, (0, 2), wait=READ)
        assert await c.fence() == pytest.approx(END_SECONDS)
        # A second end of it has waited enough.
        assert await c.fence() == 0
        assert failed(parked, RunCancelledError)
        assert failed(c.send(0, (1, 2)), RunCancelledError)
        assert c.shards[0].rounds_of(RUN) == 2
        began = c.now
        with pytest.raises(
            NotEnoughWorkersError, match=r"over.*tcp://b, which does not"
        ):
            await c.runs.free_entry("w-uid")
        assert c.now - began == pytest.approx(OPEN_SECONDS)
        woken.set()
        await c.over()
        c.ends_with(1, 3)
        assert await c.runs.free_entry("w-uid") is c.entry

    cluster_test(check)


@pytest.mark.parametrize("when", ["hold", "end_run"])
def test_shard_that_is_away_when_the_run_ends(when):
    """Whoever takes it over holds it at the fence's limit, or hears of it first."""

    async def check(c: Cluster) -> None:
        c.one_ahead()

        async def dies() -> None:
            c.entry.set_away([1], "left")
            raise CommClosedError("the other end has gone")

        c.before[B, when] = dies
        caught_up = 0.0 if when == "hold" else SETTLE_SECONDS
        assert await c.fence() == pytest.approx(END_SECONDS + caught_up, abs=0.01)
        assert c.run.waits_for == "shard 1, which has no owner for the moment"
        assert c.runs.how_over(RUN) is None
        # Its mailboxes are in the other process too; the step that it lacks comes.
        old = c.shards[1]
        c.shards[1] = heir = Shard(old.segment, rules_of(old))
        heir.run_state.attached = old.run_state.attached
        heir.take_over()
        c.entry.owners = (A, NEW)
        c.send(1, (1, 1))
        assert heir.rounds_of(RUN) == (2 if when == "hold" else 1)
        c.entry.settle([1])
        await c.over()
        rounds = heir.segment.current.steps[0]
        c.ends_with(rounds, 4 - rounds if when == "hold" else 3)

    cluster_test(check)


def test_shard_that_is_lost_is_not_waited_for():
    async def check(c: Cluster) -> None:
        c.one_ahead()
        c.before[B, "hold"] = asyncio.Event().wait
        await c.fence()
        c.entry.lost[1] = (B, "died")
        c.runs.fence_all(c.entry, ShardLostError("w", 1, B, "died"))
        await c.over()
        assert c.shards[0].segment.current.version == 2
        assert c.shards[0].rounds_of(RUN) == -1
        with pytest.raises(ShardLostError):
            await c.runs.free_entry("w-uid")

    cluster_test(check)


def test_what_a_shard_said_before_it_was_lost_counts_no_more():
    """It is a round behind for good: for its sake alone the other one would go back."""

    async def check(c: Cluster) -> None:
        c.one_ahead()
        c.shards[1].run_state.stop(RUN, ZeroDivisionError("it raises"))
        woken = asyncio.Event()
        c.before[A, "hold"] = woken.wait
        await c.fence()
        assert (B, "hold") in c.heard
        c.entry.lost[1] = (B, "died")
        c.runs.fence_all(c.entry, ShardLostError("w", 1, B, "died"))
        woken.set()
        await c.over()
        assert c.shards[0].segment.current.version == 2

    cluster_test(check)


def test_store_that_is_freed_while_its_run_ends():
    async def check(c: Cluster) -> None:
        c.before[B, "hold"] = asyncio.Event().wait
        await c.fence()
        c.runs.store_gone(c.entry, StoreClosedError("gone"))
        await asyncio.wait(c.tasks)
        assert c.run.ended is not None
        assert c.run.ended.cancelled()
        assert not c.runs.open
        assert str(c.runs.why_over(RUN)) == "enough"

    cluster_test(check)


def test_shard_that_cannot_go_back_ends_as_it_is(monkeypatch):
    """A store that nobody can use would not be better; the log says so."""
    said: list[Exception] = []
    monkeypatch.setattr(runs.logger, "error", lambda *args: said.append(args[-1]))

    async def check(c: Cluster) -> None:
        c.one_ahead()

        async def broken() -> None:
            c.shards[0].segment.writing += 1

        c.before[A, "end_run"] = broken
        await c.fence()
        assert [s.segment.current.steps[0] for s in c.shards] == [2, 1]
        [error] = said
        assert "cannot go back" in str(error)

    cluster_test(check)


def test_what_shards_agree_on():
    behind, ahead = RunPosition(2, 7), RunPosition(3, 8, has_last=True)
    assert agree([behind, ahead]) == Settlement(2, 9)
    assert agree([ahead, ahead]) == Settlement(3, 0)
    # One that never began it, or has ended it, has no say but in the version.
    assert agree([ahead, behind, RunPosition(-1, 12)]) == Settlement(2, 13)
    assert agree([]) == agree([RunPosition(-1, 3)]) == Settlement()
    assert goal([behind, ahead]) == 3
    assert goal([RunPosition(2, 7, is_stuck=True), ahead, RunPosition(1, 6)]) == 2
    with pytest.raises(IllegalStateError):
        make().end_run(0, "no run", rounds=5)
