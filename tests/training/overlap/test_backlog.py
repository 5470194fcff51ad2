"""The order of a trainer's operations, as a queue without threads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.cluster.protocol.deadline import Deadline
from daskps.errors import RunCancelledError
from daskps.training.overlap.background import Backlog, Operation


def push(*names, tick=False, priority=0):
    """Parameters, where it may change places with others, and its priority."""
    return None if tick else frozenset(names), priority


def read():
    return None, 0


def operation_of(request, heard):
    passing, priority = request
    never = Deadline(None, "an exchange")
    return Operation(
        lambda seconds: None, never, heard, passing=passing, priority=priority
    )


def filled(*requests):
    backlog = Backlog()
    for request in requests:
        backlog.put(operation_of(request, backlog.heard))
    return backlog


def order(backlog):
    """Carry everything out; return the requests in their order, as numbers."""
    number = {id(o): i for i, o in enumerate(backlog.waiting)}
    found = []
    while operation := backlog.take():
        assert backlog.running is operation
        found.append(number[id(operation)])
        backlog.done()
    assert not backlog.busy
    return found


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        # Without priorities: as issued.
        ([push(1), read(), push(2, tick=True)], [0, 1, 2]),
        ([push(1), push(2), push(3)], [0, 1, 2]),
        # The highest first, equals as issued.
        ([push(1), push(2, priority=2), push(3, priority=2)], [1, 2, 0]),
        ([push(1, priority=-1), push(2)], [1, 0]),
        # Never across a tick or a read, in either direction.
        ([push(1), push(2, tick=True, priority=9), push(3, priority=9)], [0, 1, 2]),
        ([push(1), read(), push(3, priority=9), push(4, priority=10)], [0, 1, 3, 2]),
        ([read(), push(1, priority=9)], [0, 1]),
        # Pushes of the same parameter keep their order, others pass them.
        ([push(1), push(1, 2, priority=9)], [0, 1]),
        ([push(1), push(1, 2, priority=9), push(3, priority=5)], [2, 0, 1]),
        ([push(1), push(1, 2, priority=9), push(2, priority=8)], [0, 1, 2]),
    ],
)
def test_order(requests, expected):
    assert order(filled(*requests)) == expected


def test_priority_of_what_comes_while_another_is_under_way():
    backlog = filled(push(1), push(2))
    backlog.take()
    backlog.put(operation_of(push(3, priority=1), backlog.heard))
    assert order(backlog) == [1, 0]


@st.composite
def requests(draw):
    kind = draw(st.sampled_from(["push", "push", "push", "tick", "read"]))
    if kind == "read":
        return read()
    names = draw(st.sets(st.integers(0, 3), max_size=2))
    return push(*names, tick=kind == "tick", priority=draw(st.integers(-1, 2)))


@given(st.lists(requests(), max_size=12))
def test_only_pushes_that_commute_change_places(given):
    found = order(filled(*given))
    assert sorted(found) == list(range(len(given)))
    place = {number: at for at, number in enumerate(found)}
    for first, a in enumerate(given):
        for second, b in enumerate(given[first + 1 :], first + 1):
            if place[first] < place[second]:
                continue
            between: Any = given[first : second + 1]
            assert all(passing is not None for passing, _ in between)
            assert a[0].isdisjoint(b[0])


def test_failure_takes_along_what_was_issued_after():
    backlog = filled(push(1), read(), push(2, tick=True))
    first, second, third = backlog.waiting
    assert backlog.take() is first
    error = ValueError("no")
    assert backlog.fail(error) == [first, second, third]
    assert not backlog.busy
    assert not backlog.quiet
    with pytest.raises(ValueError, match="no"):
        backlog.check()
    # It is raised once.
    backlog.check()
    assert backlog.quiet


def test_error_that_was_heard_is_not_raised_again():
    backlog = filled(push(1))
    error, operation = ValueError("no"), backlog.take()
    assert backlog.fail(error) == [operation]
    operation.set_exception(error)
    assert operation.exception() is error
    backlog.check()
    # What somebody heard of before is another matter.
    other = ValueError("no")
    backlog.put(operation_of(push(1), backlog.heard))
    backlog.take()
    backlog.fail(other)
    backlog.heard(error)
    with pytest.raises(ValueError, match="no"):
        backlog.check()


def test_end_of_the_run_is_raised_for_ever():
    backlog = filled(push(1), push(2))
    backlog.take()
    error = RunCancelledError("over")
    for operation in backlog.fail(error):
        operation.set_exception(error)
        assert operation.exception() is error
    for _ in range(2):
        assert not backlog.quiet
        with pytest.raises(RunCancelledError, match="over"):
            backlog.check()


def test_what_is_dropped_is_what_waits():
    backlog = filled(push(1), read())
    first, second = backlog.waiting
    backlog.take()
    assert backlog.drop() == [second]
    assert backlog.running is first
    backlog.done()
    assert backlog.quiet
    assert backlog.take() is None


def test_operation_cannot_be_cancelled():
    operation = operation_of(read(), lambda error: None)
    assert not operation.cancel()
    with pytest.raises(TimeoutError):
        operation.result(timeout=0)
    operation.set_result(3)
    assert operation.result() == 3
    assert operation.exception() is None
