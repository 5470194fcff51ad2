"""The thread of a trainer's operations, with a session that waits where it is told."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from daskps.cluster.caller.targets import Target
from daskps.cluster.caller.trainer_step import TrainerStep
from daskps.cluster.protocol.deadline import Deadline
from daskps.errors import RunCancelledError
from daskps.training.overlap.background import Background


class Session:
    """Counts its clock; every message waits until it is let go, or gets an error."""

    rank = 3

    def __init__(self):
        self.clock = 0
        self.log: list[Any] = []
        self.errors: list[Exception] = []
        self.came, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def _message(self, entry):
        self.came.release()
        assert self.go.acquire(timeout=30)
        if self.errors:
            raise self.errors.pop(0)
        self.log.append(entry)

    def read(self, target, seconds):
        self._message(("read", self.clock))

    def read_all(self, targets, seconds):
        for target in targets:
            self.read(target, seconds)

    def deliver(self, given, seconds, *, tick):
        self._message((sorted(given.arrays), given.weight, tick))
        self.clock += tick
        return len(self.log)

    def let(self, n):
        for _ in range(n):
            self.go.release()


def push(background, *names, tick=True, weight=1.0):
    arrays = {name: np.zeros(1) for name in names}
    given = TrainerStep(arrays, weight)
    deliver = partial(background.session.deliver, given, tick=tick)
    passing = None if tick else frozenset(names)
    never = Deadline(None, "a push")
    return background.submit(deliver, never, tick=tick, passing=passing)


def read(background, timeout=None):
    target = Target({}, (), lambda: {"w": 1})
    return background.read([target], Deadline(timeout, "a pull"))


def behind(session: Any) -> Background:
    return Background(session)


def threads():
    return [t for t in threading.enumerate() if t.name == "daskps-trainer-3"]


def test_operations_are_carried_out_in_order_and_the_clock_runs_ahead():
    session = Session()
    with behind(session) as background:
        assert not threads()
        first = push(background, 1)
        second = read(background)
        third = push(background, 2, tick=False)
        fourth = push(background, 3, weight=2.0)
        assert (background.clock, session.clock) == (2, 0)
        assert len(threads()) == 1
        session.let(4)
        assert fourth.result(30) == 4
        assert [first.result(), second.result(), third.result()] == [1, {"w": 1}, 3]
        assert background.settle(None, "x") is None
        assert background.clock == session.clock == 2
    pushed = [([2], 1.0, False), ([3], 2.0, True)]
    assert session.log == [([1], 1.0, True), ("read", 1), *pushed]
    assert not threads()


def test_error_is_raised_by_the_future_and_by_those_behind_it():
    session = Session()
    session.errors = [ValueError("no")]
    with behind(session) as background:
        found = [push(background, 1), read(background)]
        assert background.clock == 1
        session.let(1)
        for operation in found:
            with pytest.raises(ValueError, match="no"):
                operation.result(30)
        # The tick that failed does not count, and the trainer may go on.
        assert background.clock == 0
        session.let(1)
        assert push(background, 1).result(30) == 1
        assert background.clock == 1


@pytest.mark.parametrize("call", ["submit", "settle"])
def test_error_nobody_asked_for_is_raised_by_the_next_call(call):
    session = Session()
    session.errors = [ValueError("no")]
    with behind(session) as background:
        operation = push(background, 1)
        session.let(1)
        if call == "submit":
            ended = threading.Event()
            operation.add_done_callback(lambda _: ended.set())
            assert ended.wait(30)
            with pytest.raises(ValueError, match="no"):
                read(background)
        else:
            with pytest.raises(ValueError, match="no"):
                background.settle(None, "a pull")
        background.settle(None, "a pull")
    assert session.log == []


def test_error_nobody_asked_for_is_raised_at_the_end():
    session = Session()
    session.errors = [ValueError("no")]
    session.let(1)
    with pytest.raises(ValueError, match="no"), behind(session) as background:
        push(background, 1)
    assert not threads()


def test_await_gives_the_result_and_hears_the_error():
    session = Session()
    session.let(2)

    async def both(background):
        assert await push(background, 1) == 1
        session.errors = [ValueError("no")]
        with pytest.raises(ValueError, match="no"):
            await push(background, 1)

    with behind(session) as background:
        asyncio.run(both(background))
        background.settle(None, "a pull")


def test_wait_for_all_has_a_timeout_and_gives_nothing_up():
    session = Session()
    with behind(session) as background:
        operation = push(background, 1)
        match = "operations issued by trainer 3 before a pull"
        with pytest.raises(TimeoutError, match=match):
            background.settle(0.01, "a pull")
        session.let(1)
        left = background.settle(30, "a pull")
        assert left is not None
        assert 0 < left < 30
        assert operation.result(0) == 1


def test_timeout_runs_while_an_operation_waits():
    session = Session()
    with behind(session) as background:
        first = push(background, 1)
        late = read(background, timeout=0)
        session.let(1)
        assert first.result(30) == 1
        with pytest.raises(TimeoutError, match="waiting for a pull"):
            late.result(30)
    assert session.log == [([1], 1.0, True)]


def test_cancelled_run_ends_the_thread_and_everything_later():
    session = Session()
    session.errors = [RunCancelledError("over")]
    background = behind(session)
    found = [push(background, 1), read(background)]
    [thread] = threads()
    session.let(1)
    thread.join(30)
    assert not thread.is_alive()
    for operation in found:
        with pytest.raises(RunCancelledError, match="over"):
            operation.result(0)
    for _ in range(2):
        with pytest.raises(RunCancelledError, match="over"):
            read(background)
        with pytest.raises(RunCancelledError, match="over"):
            background.settle(None, "a pull")
    with pytest.raises(RunCancelledError, match="over"), background:
        pass
    assert not threads()


def test_error_of_the_loop_drops_what_waits():
    session = Session()
    background = behind(session)
    under_way = push(background, 1)
    waiting = push(background, 2)
    [thread] = threads()
    assert session.came.acquire(timeout=30)
    with pytest.raises(ZeroDivisionError), background:
        raise ZeroDivisionError
    with pytest.raises(RunCancelledError, match="loop of trainer 3 failed"):
        waiting.result(0)
    session.let(1)
    assert under_way.result(30) == 1
    thread.join(10)
    assert not thread.is_alive()
    assert session.log == [([1], 1.0, True)]


def test_one_thread_does_it_all_and_ends_with_the_context():
    session = Session()
    session.let(2)
    with behind(session) as background:
        seen = []
        for n in (1, 2):
            assert push(background, 1).result(30) == n
            seen += threads()
        assert len(set(seen)) == 1
    assert not threads()
