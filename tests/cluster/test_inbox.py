"""What arrives together is applied together."""

from __future__ import annotations

import numpy as np

from daskps.cluster.slot import Slot
from daskps.layout import Layout
from daskps.shards.base import GRADIENT, Item, Ready, Step, Ticket
from daskps.shards.dense import Shard
from daskps.shards.segment import Segment
from tests.shards.making import Momentum

LAYOUT = Layout.build({"w": ((7,), "float64")}, 1)
GRADS = [np.linspace(k, 1, 7) for k in range(5)]


class Owner:
    """Counts the tickets that are done."""

    n = 0

    def one_done(self) -> None:
        self.n += 1


def tickets(owner):
    return [
        Ticket(
            Step(GRADIENT, (Item(0, 0, g.copy()),), producer=k + 1, owned=True),
            owner=owner,
        )
        for k, g in enumerate(GRADS)
    ]


def a_slot():
    segment = Segment(LAYOUT, 0, {0: (0.0,)})
    return Slot("s", LAYOUT, 0, Shard(segment, {0: Momentum()})), segment


def test_pushes_that_queue_up_are_one_publication():
    """Each is a step of its own, with its own version, in the order they came."""
    one_by_one, expected = a_slot()
    for ticket in tickets(Owner()):
        one_by_one.put(ticket)
        one_by_one.serve()
    assert expected.flip == len(GRADS)

    slot, segment = a_slot()
    owner = Owner()
    queued = tickets(owner)
    with slot._mutex:
        for ticket in queued:
            slot.put(ticket)
            slot.serve()  # somebody else is at it: nobody waits
        assert owner.n == 0
    slot.serve()
    assert owner.n == len(GRADS)
    assert all(isinstance(t.outcome, Ready) for t in queued)
    assert [t.version for t in queued] == [1, 2, 3, 4, 5]
    assert (segment.flip, segment.current.version) == (1, 5)
    found = segment.weights[segment.flip & 1][0]
    np.testing.assert_array_equal(found, expected.weights[expected.flip & 1][0])
    assert found.any()
