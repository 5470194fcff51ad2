"""A shard on a device has the bits of one in host memory, after each step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps import optim
from daskps.backend import fake, find
from daskps.consistency import BSP
from daskps.errors import PushRejectedError
from daskps.kernels.device.row_loops import row_look_loop
from daskps.layout.arrays import Layout
from daskps.shards.arrays.device import DeviceMemory
from daskps.shards.steps import ASSIGN, GRADIENT, Item, Step, Ticket
from tests.shards.making import done
from tests.shards.on_device import bits, make, program, read

SMALL = Layout.build({"a": ((100,), "float32"), "b": ((7,), "float32")}, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_states_have_the_same_bits_on_a_gpu(seed: int) -> None:
    try:
        find("cuda:0")
    except ValueError as why:
        pytest.skip(str(why))
    assert program(seed, "cuda:0") == program(seed, None)


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
    shard.end_run(5, "over")
    ticket = pushed(shard, np.ones(100, "f4"), np.ones(7, "f4"), sequence=0)
    assert done(ticket).version == 1


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


def test_wait_tells_of_what_came_for_rows() -> None:
    memory = DeviceMemory(fake.device())
    g = memory.bring(np.array([[1, 2], [3, np.nan]], "f4"))
    look = row_look_loop(np.dtype("f4"))
    where = np.arange(2), memory.flag, True, 2
    memory.launch(look, 1, 2, (memory.flag, *where, g))
    assert memory.wait()
    g = memory.bring(np.array([[1, 2], [3, np.nan]], "f4"))
    memory.launch(look, 2, 2, (memory.flag, *where, g))
    assert not memory.wait()
    assert memory.wait()
