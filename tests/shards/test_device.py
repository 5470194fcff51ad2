"""A shard on a device has the bits of one in host memory, after each step."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import pytest

from daskps import optim
from daskps.backend import fake, find
from daskps.consistency import ASP, BSP
from daskps.errors import PushRejectedError, StaleGenerationError
from daskps.kernels.device.pieces import elementwise
from daskps.kernels.device.row_loops import row_look_loop
from daskps.layout.arrays import Layout
from daskps.shards.arrays.device import DeviceMemory
from daskps.shards.memory import undo
from daskps.shards.memory.format import ROWS_SEQUENCE
from daskps.shards.reader import RowsRead, ShardReader
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


@pytest.mark.gpu
def test_wrong_address_ends_all_work_of_its_process_on_a_gpu() -> None:
    try:
        find("cuda:0")
    except ValueError as why:
        pytest.skip(str(why))
    other = multiprocessing.get_context("spawn").Process(target=write_nowhere)
    other.start()
    other.join()
    assert other.exitcode == 0


def write_nowhere() -> None:
    """Have a loop copy from one address that is none to another."""
    device = find("cuda:0")
    with device.lend() as stream:
        table = stream.sent(np.array([[1000, 8, 16]]))
        stream.launch(elementwise("a", np.dtype("u8")), (1, 1000), [table])
        for _ in range(2):
            with pytest.raises(StaleGenerationError, match="on cuda:0 no more, until"):
                stream.wait()


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


#: An array, a table with slots, and one of integers.
ROWS = Layout.build(
    {"a": ((100,), "float32")}, 1, {"emb": (9, 4, "float32"), "num": (5, 2, "int64")}
)
RULED = {0: optim.Adam(0.1), 1: optim.Adam(0.1)}


@pytest.fixture
def table() -> Any:
    """A shard with two tables, on the device."""
    fake.device().seed(0)
    return make(ROWS, 0, RULED, "fake")


def rows_of(values: Any, ids: Any = (7, 3), at: Any = None, position: int = 1) -> Item:
    at = None if at is None else np.array(at)
    return Item(position, 0, values.reshape(-1), np.array(ids), at)


def sent(shard: Any, *items: Item, sequence: int, kind: str = GRADIENT) -> Ticket:
    step = Step(kind, items, producer=1, sequence=sequence, check=True)
    ticket = Ticket(step)
    shard.submit([ticket])
    return ticket


def test_push_of_rows_of_the_device_makes_no_copy_of_them_and_waits_once(
    table: Any,
) -> None:
    g = fake.asarray(np.ones((2, 4), "f4"))
    counts(table)
    for sequence in range(3):
        assert done(sent(table, rows_of(g), sequence=sequence)).version == sequence + 1
        found = counts(table)
        # A look and an update, each with the numbers of two rows; the flag comes back.
        assert (found["waits"], found["launches"]) == (1, 2)
        assert (found["copies to device"], found["bytes to device"]) == (2, 2 * 16)
        assert (found["copies to host"], found["bytes to host"]) == (1, 8)


def test_of_rows_in_host_memory_those_of_the_shard_go_to_the_device(table: Any) -> None:
    g = np.ones((500, 4), "f4")
    counts(table)
    assert done(sent(table, rows_of(g, at=[400, 300]), sequence=0)).version == 1
    found = counts(table)
    assert found["bytes to device"] == 2 * 16 + 2 * 16
    assert found["waits"] == 1
    # Rows with one id are added up here.
    assert done(sent(table, rows_of(g, (2,) * 500), sequence=1)).version == 2
    assert counts(table)["bytes to device"] == 8 + 16


@pytest.mark.parametrize("given", [np.array, fake.asarray])
@pytest.mark.parametrize("where", ["rows", "repeats", "array", "sum"])
def test_rows_that_are_not_finite_change_nothing(
    table: Any, where: str, given: Any
) -> None:
    """Rows are put back where an array of the same push is refused after them."""
    sent(
        table,
        Item(0, 0, np.ones(100, "f4")),
        rows_of(np.ones((2, 4), "f4")),
        sequence=0,
    )
    before = bits(table)[0]
    a, g, ids = np.ones(100, "f4"), np.ones((3, 4), "f4"), [7, 3, 4]
    if where == "array":
        a[3] = np.nan
    elif where == "sum":
        g[:], ids = 3e38, [7, 3, 7]
    else:
        g[2, 1], ids[0] = np.inf, 4 if where == "repeats" else 7
    ticket = sent(table, Item(0, 0, given(a)), rows_of(given(g), ids), sequence=1)
    assert isinstance(ticket.outcome, PushRejectedError)
    said = "'a'" if where == "array" else "'emb'"
    how = "overflow float32 together" if where == "sum" else "NaN or Inf"
    assert said in str(ticket.outcome)
    assert how in str(ticket.outcome)
    after = bits(table)[0]
    # But for whose the log of rows is, and the rows before, which it no longer has.
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same[:6] == [True] * 6
    assert all(a == b for a, b in zip(before, after, strict=True) if type(a) is bytes)
    assert table.segment.flip == 1
    assert (
        done(sent(table, rows_of(np.ones((3, 4), "f4"), [7, 3, 4]), sequence=1)).version
        == 2
    )


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_the_first_table_are_put_back_where_the_second_is_refused(
    seed: int,
) -> None:
    fake.device().seed(seed)
    layout = Layout.build({}, 1, {"x": (9, 4, "float32"), "y": (9, 4, "float32")})
    shard = make(layout, 0, {0: optim.Adam(0.1), 1: optim.Adam(0.1)}, "fake")
    g, bad = np.ones((2, 4), "f4"), np.full((2, 4), np.nan, "f4")
    before = [b for b in bits(shard)[0] if type(b) is bytes]
    ticket = sent(shard, rows_of(g, position=0), rows_of(bad), sequence=0)
    assert "'y' have NaN or Inf" in str(ticket.outcome)
    assert [b for b in bits(shard)[0] if type(b) is bytes] == before


def test_rows_are_read_before_and_after_an_update_but_not_meanwhile(table: Any) -> None:
    """The log that makes a copy whole is the device's to write."""
    segment, ids = table.segment, np.array([3, 7, 0])
    sent(table, rows_of(np.full((2, 4), 5, "f4")), sequence=0, kind=ASSIGN)
    launcher, looks = segment.payload.launcher, []

    def look() -> list[Any]:
        out = np.zeros((3, 4), "f4")
        wanted = [RowsRead(1, ids, out.reshape(-1))]
        is_whole = ShardReader(segment).read_at(segment.flip, (), wanted)
        return [is_whole, *out[:, 0].tolist()]

    def wait() -> bool:
        looks.append(look())
        return bool(type(launcher).wait(launcher))

    began = segment.header[ROWS_SEQUENCE]
    plain, segment.payload = segment.payload, segment.payload._replace(wait=wait)
    sent(table, rows_of(np.full((2, 4), 9, "f4")), sequence=1, kind=ASSIGN)
    segment.payload = plain
    assert [whole for whole, *_ in looks] == [False]
    assert look() == [True, 9, 9, 0]
    # As a reader sees it that had begun before.
    out = np.full((3, 4), -1, "f4")
    assert undo.is_logged(began, segment.header[ROWS_SEQUENCE])
    segment.tables[0].put_back(1, ids, out, None, cache_dir=None)
    assert out[:, 0].tolist() == [5, 5, -1]


def test_slots_of_rows_begin_anew(table: Any) -> None:
    sent(table, rows_of(np.ones((2, 4), "f4")), sequence=0)
    held = table.segment.tables[0]
    assert read(table.segment, held.slots[0]).any()
    table.begin_run(5, ASP(), 1, reset=True)
    assert not any(read(table.segment, slot).any() for slot in held.slots)
