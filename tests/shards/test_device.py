"""A shard on a device has the bits of one in host memory, after each step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps import optim
from daskps.backend import fake
from daskps.consistency import ASP, BSP
from daskps.errors import PushRejectedError
from daskps.layout.arrays import Layout
from daskps.shards.steps import ADD, ASSIGN, GRADIENT, Item, Step, Ticket
from tests.shards.making import done
from tests.shards.on_device import bits, make, read

SHAPES = {
    "a": ((7, 11), "float32"),
    "b": ((), "float32"),
    "c": ((40,), "float64"),
    "d": ((13,), "float32"),
    "e": ((9,), "float16"),
    "f": ((5,), "int64"),
}
LAYOUT = Layout.build(SHAPES, 2)
SMALL = Layout.build({"a": ((100,), "float32"), "b": ((7,), "float32")}, 1)
RULES = {
    0: optim.Adam(0.01),
    1: optim.SGD(0.1, momentum=0.9),
    2: optim.RMSprop(0.01, centered=True, momentum=0.5),
    3: optim.Adam(0.01),
    4: optim.SGD(0.5, momentum=0.5),
}


class Program:
    """The same random events for shards of either memory; all bits after each."""

    def __init__(self, seed: int, device: str | None) -> None:
        self.rng, self.device = np.random.default_rng(seed), device
        if device:
            fake.device().seed(seed)
        self.shards = [make(LAYOUT, i, RULES, device) for i in range(2)]
        self.given: list[Any] = []
        self.seen = [self.bits()]
        self.sequence = 0

    def bits(self) -> list[Any]:
        return [bits(shard) for shard in self.shards]

    def values(self, *, ruled: bool) -> dict[int, Any]:
        found = {}
        for index, (shape, dtype) in enumerate(SHAPES.values()):
            value = 10 * self.rng.normal(size=shape)
            if ruled and index in RULES:
                found[index] = value.astype("f8" if dtype == "float64" else "f4")
            elif not ruled:
                found[index] = value.astype(dtype)
        return found

    def items(self, shard: Any, values: dict[int, Any]) -> tuple[Item, ...]:
        """Parts of arrays, on the device every second time."""
        found = []
        for position, piece in enumerate(shard.segment.pieces):
            if piece.parameter.index in values:
                flat = values[piece.parameter.index].reshape(-1)
                mine: Any = np.array(flat[piece.start : piece.stop])
                is_there = self.rng.random() < 0.5  # drawn for both memories
                if self.device and is_there:
                    mine = fake.asarray(mine)
                self.given.append(mine)
                found.append(Item(position, 0, mine))
        return tuple(found)

    def take(self) -> None:
        """Overwrite what was given: it was taken."""
        for mine in self.given:
            mine[...] = -77
        self.given.clear()

    def send(self, shard: Any, step: Step) -> None:
        ticket = Ticket(step)
        shard.submit([ticket])
        assert not isinstance(ticket.outcome, Exception), ticket.outcome
        self.take()

    def push(self, kind: str, weight: float = 1.0, *, check: bool = False) -> None:
        values = self.values(ruled=kind == GRADIENT)
        for shard in self.shards:
            self.send(
                shard,
                Step(
                    kind,
                    self.items(shard, values),
                    producer=1,
                    sequence=self.sequence,
                    weight=weight,
                    check=check,
                ),
            )
        self.sequence += 1
        self.seen.append(self.bits())

    def rounds(self, run: int, reduce: str, n: int, *, kind: str = GRADIENT) -> None:
        for shard in self.shards:
            shard.begin_run(run, BSP(), 3, reduce)
        for clock in range(n):
            grads = [self.values(ruled=kind == GRADIENT) for _ in range(3)]
            weights = self.rng.uniform(0.5, 2, 3)
            leaves_out, early = self.rng.random(2) < 0.3
            if leaves_out:
                grads[1].pop(0)
            for shard in self.shards:
                for rank in self.rng.permutation(3).tolist():
                    of = {
                        "run": run,
                        "rank": rank,
                        "clock": clock,
                        "weight": float(weights[rank]),
                    }
                    if early and rank == 2:
                        items = self.items(shard, grads[0])
                        self.send(shard, Step(kind, items, sequence=2 * clock, **of))
                    items = self.items(shard, grads[rank])
                    step = Step(kind, items, sequence=2 * clock + 1, tick=True, **of)
                    if shard.step(step) < 0:
                        self.send(shard, step)
                    self.take()
            self.seen.append(self.bits())
        for shard in self.shards:
            # As a fence does where another shard does not have the last round.
            shard.hold_run(run)
            shard.end_run(run, "over", rounds=n - 1, version=1000 * run)
        self.seen.append(self.bits())


def program(seed: int, device: str | None) -> list[Any]:
    run = Program(seed, device)
    run.push(ASSIGN)
    run.push(GRADIENT, check=True)
    run.push(ADD, check=True)
    run.push(GRADIENT, 0.5)
    run.push(GRADIENT, 3.0, check=True)
    run.rounds(7, "mean", 4)
    run.rounds(8, "sum", 3)
    run.rounds(9, "sum", 2, kind=ADD)
    for shard in run.shards:
        shard.begin_run(10, ASP(), 2)
    run.push(GRADIENT)
    return run.seen


@pytest.mark.parametrize("seed", range(4))
def test_states_have_the_same_bits_as_in_host_memory(seed: int) -> None:
    here, there = program(seed, None), program(seed, "fake")
    assert len(here) == len(there) == 19
    assert [a == b for a, b in zip(here, there, strict=True)] == [True] * 19


@pytest.fixture
def shard() -> Any:
    """A shard of two parameters with an optimizer that has a slot, on the device."""
    fake.device().seed(0)
    return make(SMALL, 0, dict.fromkeys(range(2), optim.Adam(0.1)), "fake")


def counts(shard: Any) -> dict[str, int]:
    """What was copied, launched and waited for since this was called last."""
    found = dict(shard.segment.payload.launcher.stream.counts)
    shard.segment.payload.launcher.stream.counts.clear()
    return found


def pushed(shard: Any, *arrays: Any, sequence: int, check: bool = True) -> Ticket:
    items = tuple(Item(p, 0, a) for p, a in enumerate(arrays))
    step = Step(GRADIENT, items, producer=1, sequence=sequence, check=check)
    ticket = Ticket(step)
    shard.submit([ticket])
    return ticket


def test_push_of_device_arrays_makes_no_copy_of_them_and_waits_once(shard: Any) -> None:
    arrays = fake.asarray(np.ones(100, "f4")), fake.asarray(np.ones(7, "f4"))
    counts(shard)
    for sequence in range(3):
        ticket = pushed(shard, *arrays, sequence=sequence)
        assert done(ticket).version == sequence + 1
        found = counts(shard)
        assert found["waits"] == 1
        # A look at both, and an update of both, each with its table; the flag comes back.
        assert found["launches"] == 2
        assert found["copies to device"] == 2
        assert found["bytes to device"] == 8 * 2 * (2 + 8)
        assert (found["copies to host"], found["bytes to host"]) == (1, 8)


def test_push_of_host_arrays_makes_one_copy_of_each(shard: Any) -> None:
    arrays = np.ones(100, "f4"), np.ones(7, "f4")
    counts(shard)
    pushed(shard, *arrays, sequence=0)
    found = counts(shard)
    assert found["waits"] == 1
    assert found["copies to device"] == 2 + 2
    assert found["bytes to device"] == 4 * 107 + 8 * 2 * (2 + 8)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_gradient_that_is_not_finite_changes_nothing(
    shard: Any, where: int, bad: float
) -> None:
    """Slots have one buffer here: the look comes before the first update."""
    pushed(shard, np.ones(100, "f4"), np.ones(7, "f4"), sequence=0)
    before = bits(shard)
    arrays = [np.ones(100, "f4"), np.ones(7, "f4")]
    arrays[where][3] = bad
    ticket = pushed(shard, *arrays, sequence=1)
    assert isinstance(ticket.outcome, PushRejectedError)
    assert f"{'ab'[where]!r} has NaN or Inf" in str(ticket.outcome)
    assert bits(shard)[0] == before[0]
    assert shard.segment.flip == 1
    # The flag is down again.
    ticket = pushed(shard, np.ones(100, "f4"), np.ones(7, "f4"), sequence=1)
    assert done(ticket).version == 2
    assert bits(shard)[0] != before[0]


def test_sum_that_overflows_changes_nothing(shard: Any) -> None:
    shard.begin_run(5, BSP(), 2, "sum")
    before = bits(shard)[0]
    for rank in range(2):
        items = (Item(0, 0, np.full(100, 3e38, "f4")),)
        step = Step(GRADIENT, items, run=5, rank=rank, clock=0, tick=True, sequence=0)
        shard.submit([Ticket(step)])
    assert bits(shard)[0] == before
    assert "overflow float32 together" in str(shard.run_state.why_stopped)


def test_array_of_another_device_is_refused(shard: Any) -> None:
    arrays = fake.asarray(np.ones(100, "f4"), 1), np.ones(7, "f4")
    ticket = pushed(shard, *arrays, sequence=0)
    assert isinstance(ticket.outcome, PushRejectedError)
    assert "fake:1" in str(ticket.outcome)
    assert "fake:0" in str(ticket.outcome)
    assert shard.segment.flip == 0


def test_large_arrays_go_through_pinned_memory_in_parts() -> None:
    """20 MiB by halves of 8 MiB, each used again once the device is done with it."""
    layout = Layout.build({"a": ((5 * 2**20,), "float32")}, 1)
    shard = make(layout, 0, {}, "fake")
    value = np.arange(5 * 2**20, dtype="f4")
    items = (Item(0, 0, value),)
    ticket = Ticket(Step(ASSIGN, items, producer=1, sequence=0))
    shard.submit([ticket])
    assert done(ticket).version == 1
    out = read(shard.segment, shard.segment.weights_of(shard.segment.current, 0))
    np.testing.assert_array_equal(out, value)


def test_programs_own_work_comes_before_that_of_the_shard(shard: Any) -> None:
    gradient = fake.asarray(np.ones(100, "f4"))
    twice = gradient + gradient
    twice *= 2.0
    same = make(SMALL, 0, dict.fromkeys(range(2), optim.Adam(0.1)), None)
    pushed(shard, twice, np.ones(7, "f4"), sequence=0)
    pushed(same, np.full(100, 4, "f4"), np.ones(7, "f4"), sequence=0)
    assert bits(shard)[0] == bits(same)[0]
