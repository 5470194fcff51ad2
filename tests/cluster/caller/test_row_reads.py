"""Reads of rows from shards that this process reaches: made ready once, and one try."""

from __future__ import annotations

from itertools import count, repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskps.cluster.caller import reads
from daskps.cluster.caller.reads import PreparedRead
from daskps.cluster.caller.row_reads import RowReads
from daskps.cluster.counters import Counters
from daskps.cluster.host.hosted import HostedShard
from daskps.cluster.machine import locks
from daskps.consistency import BSP, SSP
from daskps.kernels.row_index import RowIndex
from daskps.kernels.row_moves import FixedGather
from daskps.shards.arrays.row_operations import RowUpdate
from daskps.shards.arrays.unbounded_rows import FEWEST_LOOKED
from daskps.shards.deputy import CLOSED, set_gate
from daskps.shards.memory import undo
from daskps.shards.memory.format import ROWS_SEQUENCE, VERSION
from daskps.shards.memory.publication import Withdrawal
from daskps.shards.reader import BUSY, NOT_YET, REFER, RowsRead
from daskps.shards.steps import ADD, ASSIGN, REMOVE, Step, Ticket
from tests.cluster.callers import Carriers, counted
from tests.shards import unbounded_rowing
from tests.shards.rowing import EMB, LAYOUT, make, rows, send

RUN, CALLS = 7, 16


class Here:
    """A shard with tables, and the reads of a handle or a trainer."""

    def __init__(self, run: int = 0, shard: Any = None, layout: Any = LAYOUT) -> None:
        self.hosted = HostedShard("s", layout, 0, shard or make())
        self.shard, self.counters = self.hosted.shard, Counters()
        self.carriers = Carriers(self.hosted, run)
        carriers: Any = self.carriers
        remote: Any = SimpleNamespace(counters=self.counters, sockets=None)
        self.reads = RowReads(carriers.meta, carriers, remote)

    def pull(self, *args: Any) -> Any:
        table = self.hosted.layout.table_by_name["emb"]
        return self.reads.pull_table(table, *args)


def at_first(ids: Any) -> Any:
    return 100.0 * np.asarray(ids)[..., None] + np.arange(3)


def test_rows_are_read_into_new_arrays_and_given_ones() -> None:
    here, ids = Here(), np.array([[5, 0], [39, 5]])
    np.testing.assert_array_equal(here.pull(ids), at_first(ids))
    out = np.zeros((2, 2, 3), "f4")
    assert here.pull(ids, out) is out
    np.testing.assert_array_equal(out, at_first(ids))
    for given in ([7], 7, [], np.array([7], "u1"), ids[:, 0]):
        np.testing.assert_array_equal(here.pull(given), at_first(np.array(given, int)))
    found = here.reads.pull({"emb": [3], "num": [1, 2]})
    assert found is not None
    assert [*found] == ["emb", "num"]
    np.testing.assert_array_equal(found["emb"], at_first([3]))
    assert here.counters.local_calls == 8
    assert here.counters.rows_pulled == 8 + 1 + 1 + 0 + 1 + 2 + 3


def test_what_is_not_as_simple_is_left_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They say what is wrong, and nothing was written."""
    monkeypatch.setattr(reads, "LOOK_SECONDS", -1)  # each read looks at owners
    here, ids = Here(), np.array([1, 40])
    out = np.zeros((2, 3), "f4")
    assert here.pull(ids, out) is None
    assert not out.any()
    ids[1] = -1
    assert here.pull(ids, out) is None
    assert not out.any()
    ids[1] = 2
    for other in (out.astype("f8"), out[:1], np.zeros((2, 6), "f4")[:, ::2]):
        assert here.pull(ids, other) is None
    out.flags.writeable = False
    assert here.pull(ids, out) is None
    assert here.reads.pull({"emb": ids}, {}) is None
    assert here.reads.pull({"w": ids}) is None
    here.carriers.serving.lives = False
    assert here.pull(ids) is None
    set_gate(here.shard.segment, CLOSED)
    here.carriers.serving.lives = True
    assert here.pull(ids) is None
    with pytest.raises(ValueError, match="floats"):
        here.pull(np.ones(2))


@pytest.mark.parametrize(
    ("disturbed", "slow", "is_read"),
    [
        (0, False, True),
        (3, False, True),
        (0, True, True),
        (1, True, True),
        (2, True, False),
    ],
)
def test_a_copy_that_an_update_runs_into_is_made_again(
    monkeypatch: pytest.MonkeyPatch, disturbed: int, slow: bool, is_read: bool
) -> None:
    """For a moment, but once at least, also by a thread that is slow between two lines."""
    seconds = count().__next__ if slow else lambda: 0.0
    clock = SimpleNamespace(perf_counter=seconds, sleep=lambda _: None)
    monkeypatch.setattr(locks, "time", clock)
    here, updates = Here(), iter(range(disturbed))
    here.pull([1])
    really = FixedGather.__call__

    def gather(self: Any, *args: Any) -> bool:
        for i in updates:
            done = really(self, *args)
            for sequence in (2 * i, 2 * i + 1):  # the log has the second one's rows
                item = rows(here.shard, EMB, [2], 1)
                step = Step(ADD, [item], producer=9, sequence=sequence)
                here.shard.submit([Ticket(step)])
            return done
        return really(self, *args)

    monkeypatch.setattr(FixedGather, "__call__", gather)
    found = here.pull([2])
    assert (found is not None) == is_read
    if is_read:
        np.testing.assert_array_equal(found, at_first([2]) + 2 * disturbed)


@pytest.mark.parametrize("under_way", [False, True])
def test_what_one_update_has_changed_meanwhile_comes_from_its_log(
    monkeypatch: pytest.MonkeyPatch, under_way: bool
) -> None:
    """The copy is of the version that was in force when it began."""
    here, flip = Here(), 0
    segment = here.shard.segment
    here.pull([1])
    really = FixedGather.__call__

    def gather(self: Any, *args: Any) -> bool:
        undo.begin(segment, flip + 1, [0])
        update = RowUpdate(np.array([2, 5]), np.ones((2, 3), "f4"))
        assert update.apply(segment.tables[0].buffers, flip + 1, None)
        done = really(self, *args)
        if not under_way:
            segment.flip = flip + 1
            undo.roll_back(segment)
        return done

    with monkeypatch.context() as patched:
        patched.setattr(FixedGather, "__call__", gather)
        np.testing.assert_array_equal(here.pull([4, 2, 2]), at_first([4, 2, 2]))
    # One that begins now is of the version that is in force now.
    np.testing.assert_array_equal(here.pull([2]), at_first([2]) + (not under_way))


def test_while_an_update_is_taken_back_the_read_waits_a_moment() -> None:
    here = Here()
    here.shard.segment.header[ROWS_SEQUENCE] |= undo.UNTOLD
    assert here.pull([1]) is None


def test_a_trainer_reads_what_its_policy_lets_it_see() -> None:
    ids, out = np.array([1]), np.empty((1, 3), "f4")
    for policy in (BSP(), SSP(1)):
        here = Here(RUN)
        carriers: Any = here.carriers
        made = PreparedRead.of(carriers, {}, [0])
        assert made is not None
        wanted = {0: [RowsRead(len(LAYOUT.pieces[0]), ids, out)]}
        assert made.read([0], (), wanted) is None  # of no run yet
        here.shard.begin_run(RUN, policy, 1)
        assert made.read([0], (), wanted) == 0
        np.testing.assert_array_equal(out, at_first(ids))
        # Not complete; or it does not wait for the last clock.
        assert made.read([1], (), wanted) == (None if policy == BSP() else 1)


class Reader:
    """A reader that notes when it is asked, and has some answers before a version."""

    lag = 0

    def __init__(self, asked: list[int], shard: int, answers: list[int]) -> None:
        self._asked, self._shard, self._answers = asked, shard, answers

    def read(self, *_: Any) -> int:
        """Answer."""
        self._asked.append(self._shard)
        return self._answers.pop(0) if self._answers else 1


def test_trainers_begin_with_different_shards_and_come_back_to_busy_ones() -> None:
    """Rank r at shard r; who has run into an update reads the others before it."""

    def asked(rank: int, answers: list[int]) -> tuple[list[int], int | None]:
        here, found = Here(RUN), list[int]()
        here.carriers.rank = rank
        carriers: Any = here.carriers
        read = PreparedRead.of(carriers, {}, range(3))
        assert read is not None
        for source in read.sources:
            says = answers if source.shard == 1 else []
            reader: Any = Reader(found, source.shard, says)
            source.reader = reader
        lag = read.read(repeat(0), ())
        return found, lag

    for answer in (BUSY, NOT_YET):
        assert asked(1, [answer]) == ([1, 2, 0, 1], 0)
        assert asked(2, [answer]) == ([2, 0, 1, 1], 0)
        assert asked(-1, []) == ([0, 1, 2], 0)
        assert asked(0, [answer] * 1000_000)[1] is None
    assert asked(0, [REFER]) == ([0, 1], None)


def test_a_read_of_rows_takes_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    # A slow machine may be due to look at owners within the read that is counted.
    monkeypatch.setattr(reads, "LOOK_SECONDS", 1000)
    here, ids, out = Here(), np.arange(8), np.empty((8, 3), "f4")
    here.pull(ids, out)
    calls = counted(lambda: here.pull(ids, out))
    assert len(calls) <= CALLS, calls
    send(here.shard, ADD, rows(here.shard, EMB, [2], 1))
    calls = counted(lambda: here.pull(ids, out))
    assert len(calls) <= CALLS, calls


@pytest.mark.parametrize("ttl", [0, 2])
def test_unbounded_rows_are_read_as_others_are(
    monkeypatch: pytest.MonkeyPatch, ttl: int
) -> None:
    """Without tickets; those that are absent have their first values, here 3."""
    layout = unbounded_rowing.layout_of(ttl=ttl)
    shard = unbounded_rowing.made(layout)
    here, sent = Here(0, shard, layout), iter(range(9))

    def push(*pairs: tuple[int, int]) -> None:
        step = unbounded_rowing.step(shard, ASSIGN, {EMB: pairs}, next(sent))
        shard.submit([Ticket(step)])

    ids = np.array([[-4, 7], [2**62, -4]])
    np.testing.assert_array_equal(here.pull(ids), np.full((2, 2, 2), 3.0))
    push((-4, 5), (2**62, 6))
    out = np.zeros((2, 2, 2), "f4")
    assert here.pull(ids, out) is out
    assert out.tolist() == [[[5, 5], [3, 3]], [[6, 6], [5, 5]]]
    assert here.pull(np.array([2**62, -4])).tolist() == [[6, 6], [5, 5]]
    assert here.pull([]).shape == (0, 2)
    assert here.counters.local_calls == 4
    really = FixedGather.__call__

    def gather(self: Any, *args: Any) -> bool:
        monkeypatch.setattr(FixedGather, "__call__", really)
        done = really(self, *args)
        push((7, 8))  # runs into the copy, which has found that 7 is absent
        return done

    monkeypatch.setattr(FixedGather, "__call__", gather)
    assert here.pull([7, 1]).tolist() == [[8, 8], [3, 3]]
    push((7, 9))
    # With ttl=2 the first rows were not named by the last two pushes.
    first = 3 if ttl else 5
    assert here.pull([-4, 7]).tolist() == [[first] * 2, [9, 9]]
    table, asked = layout.table_by_name["emb"], np.array([7, -4, 1])
    found = here.reads.contains(table, asked)
    assert found is not None
    assert found.tolist() == [True, not ttl, False]
    here.shard.segment.header[ROWS_SEQUENCE] += 1  # an update is at them
    assert here.reads.contains(table, asked) is None


@pytest.mark.parametrize("between", ["nothing", "push", "withdrawn", "ids", "order"])
def test_a_push_of_the_ids_of_a_read_knows_where_their_rows_are(
    monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    """Only as long as nothing has changed, and of just these ids."""
    layout = unbounded_rowing.layout_of(room=4096)
    shard = unbounded_rowing.made(layout)
    here, sent = Here(0, shard, layout), iter(range(9))
    ids = np.arange(FEWEST_LOOKED) * 7919

    def push(kind: str, ids: Any, value: int) -> None:
        pairs = [(i, value) for i in ids.tolist()]
        step = unbounded_rowing.step(shard, kind, {EMB: pairs}, next(sent))
        ticket = Ticket(step)
        shard.submit([ticket])
        assert ticket.version

    push(ASSIGN, ids[1:], 5)
    given = ids.copy()
    here.pull(given)
    expected = dict.fromkeys(ids.tolist(), 6.0)
    expected[0] = 4.0  # was absent: 3, and 1 is added
    if between == "push":
        # The rows of two ids change places.
        push(REMOVE, ids[1:3], 0)
        push(ASSIGN, ids[2:3], 8)
        push(ASSIGN, ids[1:2], 7)
        expected |= {int(ids[2]): 9.0, int(ids[1]): 8.0}
    elif between == "withdrawn":
        push(REMOVE, ids[1:3], 0)
        here.pull(given)
        withdrawal = Withdrawal(shard.segment)
        withdrawal.record.plain[VERSION] = 9
        withdrawal.commit()
    elif between == "ids":
        given[:] = ids[::-1]  # the caller's array, written to
    looks: list[int] = []
    look_up = RowIndex.look_up

    def counted_look(self: Any, ids: Any, *args: Any, **more: Any) -> int:
        looks.append(len(ids))
        return look_up(self, ids, *args, **more)

    monkeypatch.setattr(RowIndex, "look_up", counted_look)
    pushed = ids[::-1] if between in {"ids", "order"} else ids
    push(ADD, pushed, 1)
    assert looks == ([] if between == "nothing" else [len(ids)])
    push(ADD, ids, 1)  # what was found is used once
    assert looks[-1:] == [len(ids)]
    found = unbounded_rowing.read(shard, EMB, ids.tolist())
    assert found == {i: [value + 1] * 2 for i, value in expected.items()}
