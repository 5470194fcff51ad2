"""How a run begins where hosts fail and clients leave, with hosts of the test's own."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from distributed.comm.core import CommClosedError

from daskps.cluster.directory.entry import StoreEntry
from daskps.cluster.directory.run import RunState, rounds_error
from daskps.cluster.directory.runs import OPEN_SECONDS, Runs
from daskps.cluster.directory.trainers import TrainerMessages
from daskps.errors import (
    NotEnoughWorkersError,
    RunCancelledError,
    StaleGenerationError,
)

BEGIN = {
    "policy": ("bsp", 0, 0.0),
    "n_ranks": 1,
    "reduce": b"",
    "reset": False,
    "codec": ("", b""),
    "epochs": None,
}
WHO = {
    "client": "C",
    "size": 1,
    "restartable": False,
    "gated": False,
    "graph": False,
    "described": "",
}


class FakeHosts:
    """One host, whose answers to `begin_run` are the test's to give, in order."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.clients = {"C", "D"}
        self.workers = {"tcp://a", "tcp://b"}
        self.heard: list[tuple[str, int]] = []
        #: So often the connection breaks before a host hears of an end.
        self.n_broken = 0
        #: Who was told of one.
        self.told: list[str] = []
        self.tasks: set[asyncio.Future] = set()
        self.ended = asyncio.Event()
        self.is_silent = False

    def has_client(self, client):
        return client in self.clients

    def has_worker(self, worker):
        return worker in self.workers

    async def control(self, worker, method, **kwargs):
        if method == "begin_run":
            self.heard.append((method, kwargs["run"]))
            return await self.answers.pop(0)()
        if method == "hello":
            await asyncio.sleep(10**6 if self.is_silent else 0)
        if method == "end_run":
            if self.n_broken:
                self.n_broken -= 1
                await gone()
            self.told.append(worker)
            self.heard.append((method, kwargs["run"]))
            self.ended.set()
        return [-1]

    async def everywhere(self, entry, method, **kwargs):
        return [await self.control(entry.owners[0], method, **kwargs)]

    def spawn(self, work):
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        return task

    def tell(self, action, entry, **more):
        pass


def in_no_time(check):
    """Run a coroutine function on a loop whose clock jumps to what is due next."""
    loop: Any = asyncio.new_event_loop()
    now = 0.0
    selector = loop._selector
    select = selector.select

    def jump(timeout):
        nonlocal now
        assert timeout is not None, "it waits for ever"
        now += timeout
        return select(0)

    selector.select, loop.time = jump, lambda: now
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(check())


def runs_on(hosts):
    entry = StoreEntry("w-uid", "w", "C", True, {}, ("tcp://a",), {}, 1.0, b"", {})
    return Runs(hosts, lambda uid: entry, itertools.count(1).__next__), entry


def messages_of(hosts: Any, runs: Runs) -> TrainerMessages:
    """Return what trainers of these runs send to."""
    return TrainerMessages(hosts, runs)


async def fine():
    return []


async def gone():
    raise CommClosedError("the other end has gone")


async def stale():
    raise StaleGenerationError("no shard of it here")


async def opened(runs, client="C"):
    return await runs.on_open_run("w-uid", BEGIN, **{**WHO, "client": client})


@pytest.mark.parametrize("answer", [gone, fine])
def test_client_that_leaves_while_its_run_begins_leaves_no_run(answer):
    """Whether its host then fails or answers: the next client can train."""

    async def check():
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def late():
            asked.set()
            await go_on.wait()
            return await answer()

        hosts = FakeHosts(late, fine)
        runs, _ = runs_on(hosts)
        opening = asyncio.ensure_future(opened(runs))
        await asked.wait()
        hosts.clients.discard("C")
        before = set(hosts.tasks)
        runs.client_left("C")
        await asyncio.gather(*hosts.tasks - before)
        # What its host may yet begin is ended after that.
        assert hosts.heard == [("begin_run", 1)]
        go_on.set()
        with pytest.raises(RunCancelledError, match="client C left"):
            await opening
        assert hosts.heard[-1] == ("end_run", 1)
        assert await opened(runs, "D") == 2

    in_no_time(check)


def test_who_has_adopted_a_shard_hears_that_its_run_could_not_begin():
    """Else the shard would be in that run until another one begins."""

    async def check():
        async def dies():
            entry.owners = ("tcp://b",)
            return await gone()

        hosts = FakeHosts(dies, fine)
        runs, entry = runs_on(hosts)
        assert await opened(runs) == 2
        assert hosts.told == ["tcp://b", "tcp://a"]
        assert hosts.heard[:3] == [("begin_run", 1), ("end_run", 1), ("end_run", 1)]

    in_no_time(check)


def test_host_that_could_not_be_told_of_an_end_is_told_again():
    async def check():
        hosts = FakeHosts(stale, fine)
        hosts.n_broken = 3
        runs, _ = runs_on(hosts)
        assert await opened(runs) == 2
        await asyncio.wait(hosts.tasks)
        assert hosts.told == ["tcp://a"]

    in_no_time(check)


def test_trainer_of_a_worker_that_has_left_takes_no_place():
    """Its worker was stopped: it registers when another one has its task."""

    async def check():
        hosts = FakeHosts(fine)
        runs, _ = runs_on(hosts)
        run = await runs.on_open_run("w-uid", BEGIN, **{**WHO, "restartable": True})

        async def attempt(worker):
            found = await messages_of(hosts, runs).on_register(run, 0, worker, 1.0)
            return found["attempt"]

        hosts.workers.discard("tcp://b")
        with pytest.raises(RunCancelledError, match="worker tcp://b"):
            await attempt("tcp://b")
        assert await attempt("tcp://a") == 1
        with pytest.raises(RunCancelledError):
            await attempt("tcp://b")
        hosts.workers.add("tcp://b")
        assert await attempt("tcp://b") == 2

    in_no_time(check)


def test_trainer_of_a_worker_that_has_left_ends_no_run():
    """It goes on where another one has its place, and may well fail there."""

    async def check():
        hosts = FakeHosts(fine)
        runs, _ = runs_on(hosts)
        run = await runs.on_open_run("w-uid", BEGIN, **{**WHO, "restartable": True})
        hosts.workers.discard("tcp://b")
        await runs.on_fence_run(run, "the round has gone", worker="tcp://b")
        assert runs.why_over(run) is None
        await runs.on_fence_run(run, "it diverged", worker="tcp://a")
        assert "it diverged" in str(runs.why_over(run))

    in_no_time(check)


def test_trainer_that_was_replaced_does_not_end_its_rank():
    """Its loop may end all the same: its time is over, or it catches the error."""

    async def check():
        hosts = FakeHosts(fine)
        runs, _ = runs_on(hosts)
        run = await runs.on_open_run("w-uid", BEGIN, **{**WHO, "restartable": True})
        await messages_of(hosts, runs).on_register(run, 0, "tcp://b", 1.0)
        messages_of(hosts, runs).on_finishes(run, 0, "tcp://b")
        hosts.workers.discard("tcp://b")
        with pytest.raises(RunCancelledError, match="tcp://b ends nothing"):
            messages_of(hosts, runs).on_finishes(run, 0, "tcp://b")
        await messages_of(hosts, runs).on_register(run, 0, "tcp://a", 1.0)
        hosts.workers.add("tcp://b")
        with pytest.raises(RunCancelledError, match="another one goes on"):
            messages_of(hosts, runs).on_finishes(run, 0, "tcp://b")
        messages_of(hosts, runs).on_finishes(run, 0, "tcp://a")

    in_no_time(check)


def test_client_that_leaves_between_two_tries_leaves_no_run():
    """Then no run is known that could be fenced."""

    async def check():
        hosts = FakeHosts()

        async def fails():
            hosts.tasks.add(asyncio.ensure_future(leave()))
            return await gone()

        async def leave():
            await hosts.ended.wait()
            hosts.clients.discard("C")
            runs.client_left("C")

        hosts.answers = [fails, fine, fine]
        runs, _ = runs_on(hosts)
        with pytest.raises(RunCancelledError, match="client C left"):
            await opened(runs)
        assert await opened(runs, "D") == 2

    in_no_time(check)


def test_run_whose_shards_move_while_it_begins_begins_again():
    """Its first try ends with that; who started it does not hear of it."""

    async def check():
        async def moving():
            runs.fence_all(entry, rounds_error("tcp://a"))
            return []

        hosts = FakeHosts(moving, fine)
        runs, entry = runs_on(hosts)
        assert await opened(runs) == 2
        assert runs.why_over(2) is None
        assert hosts.heard == [
            ("begin_run", 1),
            *[("end_run", 1)] * 2,
            ("begin_run", 2),
        ]

    in_no_time(check)


def test_shard_that_leaves_while_the_run_before_ends_is_waited_for():
    """Else the run would begin without it."""

    async def check():
        hosts = FakeHosts(fine)
        runs, entry = runs_on(hosts)
        before = RunState(9, entry, "C", 1, restartable=False, gated=False)
        before.fenced = RunCancelledError("enough")
        before.ended = asyncio.get_running_loop().create_future()
        runs.open[9] = before
        opening = asyncio.ensure_future(opened(runs))
        await asyncio.sleep(1)
        entry.set_away([0], "left")
        del runs.open[9]
        before.ended.set_result(None)
        await asyncio.sleep(1)
        assert hosts.heard == []
        entry.settle([0])
        assert await opening == 1

    in_no_time(check)


def test_host_that_never_answers_is_waited_for_so_long():
    """When it wakes, what it begins late is ended after that."""

    async def check():
        woken = asyncio.Event()

        async def stopped():
            await woken.wait()
            hosts.heard.append(("woken", 1))
            return []

        hosts = FakeHosts(stopped, fine)
        hosts.is_silent = True
        runs, _ = runs_on(hosts)
        clock = asyncio.get_running_loop().time
        with pytest.raises(NotEnoughWorkersError, match=r"within 10 s.*not answer"):
            await opened(runs)
        assert clock() <= OPEN_SECONDS + 1
        assert await opened(runs, "D") == 2
        woken.set()
        await asyncio.gather(*hosts.tasks)
        assert hosts.heard[-2:] == [("woken", 1), ("end_run", 1)]

    in_no_time(check)


def test_host_that_is_slow_to_begin_is_waited_for_as_long_as_it_answers():
    """There may be code to compile, or much memory to take."""

    async def check():
        async def slow():
            await asyncio.sleep(100 * OPEN_SECONDS)
            return []

        hosts = FakeHosts(slow)
        runs, _ = runs_on(hosts)
        assert await opened(runs) == 1

    in_no_time(check)


def test_host_without_the_shards_is_not_called_silent():
    """What lasts reaches the caller as it is."""

    async def check():
        runs, _ = runs_on(FakeHosts(*[stale] * 100))
        with pytest.raises(StaleGenerationError, match="no shard of it here"):
            await opened(runs)

    in_no_time(check)
