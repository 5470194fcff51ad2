"""When calls that wait are over, and what is kept of those that are answered."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from daskps.cluster.lane.ends import FEW, Ends


class Call:
    """A call that waits."""

    def __init__(self, end: float) -> None:
        self.end = end


class Lane:
    """A lane whose call waits."""

    def __init__(self) -> None:
        self.waiting: Call | None = None

    def park(self, ends: Any, end: float) -> Call:
        self.waiting = Call(end)
        ends.add(self, self.waiting)
        return self.waiting


def test_calls_end_in_their_order():
    ends: Any = Ends()
    lanes = [Lane() for _ in range(4)]
    calls = [
        lane.park(ends, end)
        for lane, end in zip(lanes, (3.0, 1.0, 2.0, 9.0), strict=True)
    ]
    assert ends.next == 1.0
    lanes[2].waiting = None
    assert list(ends.take(0.5)) == []
    assert list(ends.take(3.0)) == [(lanes[1], calls[1]), (lanes[0], calls[0])]
    assert ends.next == 9.0


def test_a_later_call_of_the_lane_has_an_end_of_its_own():
    ends: Any = Ends()
    lane = Lane()
    lane.park(ends, 1.0)
    second = lane.park(ends, 2.0)
    assert list(ends.take(1.5)) == []
    assert list(ends.take(2.0)) == [(lane, second)]


def test_calls_that_were_answered_are_not_kept():
    """A round of a thousand trainers comes again long before its calls would end."""
    ends: Any = Ends()
    lanes = [Lane() for _ in range(100)]
    first = weakref.ref(lanes[0].park(ends, 20.0))
    most = 0
    for k in range(50):
        for lane in lanes:
            lane.park(ends, 20.0 + k)
        most = max(most, len(ends))
        for lane in lanes[1:]:
            lane.waiting = None
    assert most <= 2 * len(lanes) + FEW
    gc.collect()
    assert first() is None
    # Who has waited all the time is still there.
    assert [lane for lane, _ in ends.take(100.0)] == [lanes[0]]
