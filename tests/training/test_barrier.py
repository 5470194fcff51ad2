"""`Trainer.barrier`: counted, whatever the policy is and whoever has ticked."""

from __future__ import annotations

import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.cluster.caller.allreduce import CallCount
from daskps.cluster.directory.run import CountedCalls
from tests.seams import session_of
from tests.support import mostly_inside, until

SYNCS = ("bsp", "ssp", "asp")
inside = pytest.mark.parametrize("way", ["inside"], indirect=True)


def store_of(**kwargs):
    params = {"w": np.zeros(1), "calls": np.zeros(3)}
    return daskps.create(params, optimizer=optim.SGD(1.0), shards=2, **kwargs)


def reads_what_was_added(trainer, part):
    """Rank 0 adds once it is known that the other one waits for it."""
    other, flag = part
    seen = []
    for k in range(2):
        trainer.barrier()
        if trainer.rank == 0:
            until((flag / str(k)).exists)
            other["w"].add(np.ones(1))
        else:
            with pytest.raises(TimeoutError, match=r": trainer 0 has not called it;"):
                trainer.barrier(timeout=0.05)
            (flag / str(k)).touch()
        trainer.barrier()
        seen.append(float(other["w"].pull()[0]))
        trainer.barrier()
    return seen, trainer.clock


@mostly_inside("sync", SYNCS)
def test_all_read_what_was_added_before_a_barrier(way, sync, tmp_path):
    """At clock 0, where nobody ever ticks."""
    with store_of() as store, store_of() as other:
        part = other, tmp_path
        found = daskps.run(store, reads_what_was_added, [part] * 2, sync=sync)
    assert found == [([1.0, 2.0], 0)] * 2


def at_other_clocks(trainer, part):
    """Rank r takes r steps before each barrier, one of them without waiting."""
    seen = []
    for k in range(3):
        for _ in range(trainer.rank):
            trainer.push_async({"w": np.ones(1)})
        trainer.barrier()
        seen.append(float(part["w"].pull()[0]))
        trainer.barrier()
        assert trainer.clock == (k + 1) * trainer.rank
    return seen


@inside
@pytest.mark.parametrize("sync", ["ssp", "asp"])
def test_pushes_under_way_are_there_whatever_the_clocks(way, sync):
    with store_of() as store:
        policy = daskps.SSP(10) if sync == "ssp" else sync
        found = daskps.run(store, at_other_clocks, [store] * 3, sync=policy)
    assert found == [[-3.0, -6.0, -9.0]] * 3


def in_rounds(trainer, part):
    seen = []
    for _ in range(4):
        trainer.push_async({"w": np.ones(1)})
        trainer.barrier()
        seen.append(float(part["w"].pull()[0]))
        trainer.barrier()
    return seen


@mostly_inside()
def test_rounds_are_there_for_all_handles(way):
    with store_of() as store:
        found = daskps.run(store, in_rounds, [store] * 3)
    assert found == [[-1.0, -2.0, -3.0, -4.0]] * 3


def held_back(trainer, part):
    """A cut holds the round back that both deliver."""
    trainer.barrier()
    control, run = session_of(trainer).shards.control, session_of(trainer).link.run
    if trainer.rank == 0:
        of = {"cut": "one", "attempt": 1}
        run(lambda: control("begin_cut", **of, index=None, lease_seconds=60.0))
    trainer.barrier()
    trainer.push({"w": np.ones(1)})
    if trainer.rank == 0:

        def is_held():
            with pytest.raises(TimeoutError, match="a barrier of trainer 0 at") as late:
                trainer.barrier(timeout="50ms")
            return "trainer 1" not in str(late.value)

        until(is_held)
        assert part["w"].pull() == 0
        run(lambda: control("drop_cut", **of))
    trainer.barrier()
    return float(part["w"].pull()[0])


@inside
def test_a_round_that_a_cut_holds_back_is_waited_for(way):
    with store_of() as store:
        assert daskps.run(store, held_back, [store] * 2) == [-1.0, -1.0]


def one_of_them(trainer, part):
    if trainer.rank == 2:
        return trainer.clock
    if trainer.rank == 0:

        def names_the_others():
            with pytest.raises(TimeoutError, match="a barrier of trainer 0 at") as late:
                trainer.barrier(timeout="50ms")
            return ": trainers 1, 3 have not called it;" in str(late.value)

        until(names_the_others)
        (part / "late").touch()
    else:
        until((part / "late").exists)
    trainer.barrier()
    trainer.finish()
    with pytest.raises(daskps.ClockError, match=f"trainer {trainer.rank} has finished"):
        trainer.barrier()
    return trainer.clock


@inside
@pytest.mark.parametrize("sync", SYNCS)
def test_a_timeout_names_those_that_are_missing_and_have_not_ended(way, sync, tmp_path):
    with store_of() as store:
        found = daskps.run(store, one_of_them, [tmp_path] * 4, sync=sync)
    assert found == [0] * 4


def ends_meanwhile(trainer, part):
    """Rank 1 ends while rank 0 waits."""
    if trainer.rank == 0:
        with pytest.raises(TimeoutError, match="trainer 1 has not called it"):
            trainer.barrier(timeout=0.05)
        part.touch()
        trainer.barrier()
    else:
        until(part.exists)
    return trainer.clock


@inside
@pytest.mark.parametrize("sync", SYNCS)
def test_the_last_one_that_ends_lets_the_others_go_on(way, sync, tmp_path):
    with store_of() as store:
        part = tmp_path / "late"
        assert daskps.run(store, ends_meanwhile, [part] * 2, sync=sync) == [0, 0]


def raises(trainer, part):
    if trainer.rank == 1:
        raise RuntimeError("mine")
    trainer.barrier()


@inside
def test_an_error_of_one_trainer_ends_the_wait_of_the_others(way):
    with store_of() as store, pytest.raises(RuntimeError, match="mine"):
        daskps.run(store, raises, [None] * 3)


def leaves_one_out(trainer, part):
    trainer.push({"w": np.ones(1)})
    if trainer.rank == 0:
        trainer.barrier()
    trainer.push({"w": np.ones(1)})
    trainer.barrier()


@inside
def test_a_call_left_out_ends_a_resumable_run(way):
    """As where a trainer is started again behind a call that it has to make."""
    with store_of() as store:
        with pytest.raises(
            ValueError, match=r"barrier at clock \d .* waits at clock \d"
        ):
            daskps.run(store, leaves_one_out, [None] * 2, resumable=True, timeout=60)
        assert store.version == 1


class Rank:
    """The calls of one rank, and what the directory hears of them."""

    def __init__(self):
        self.heard, self.calls = CountedCalls(), CallCount()

    def call(self, clock):
        number = self.calls.at(clock)
        self.heard.note(0, clock, number)
        self.calls.number += 1
        return number

    def starts_again(self, clock):
        self.calls = CallCount()
        self.calls.resume(self.heard.places.get(0), clock)


def test_who_starts_again_makes_the_calls_of_its_clock_again():
    rank = Rank()
    assert [rank.call(clock) for clock in (0, 1, 1, 1)] == [0, 1, 2, 3]
    rank.starts_again(1)
    assert [rank.call(1) for _ in range(2)] == [1, 2]
    rank.starts_again(1)
    # Calls behind the push that ended the last step are not made again.
    assert [rank.call(clock) for clock in (2, 2, 3)] == [4, 5, 6]
    rank.starts_again(4)
    assert rank.call(4) == 7


@pytest.mark.parametrize(
    ("clocks", "back", "again", "numbers"),
    [
        # Twice a step, before the push and after it; after each second step.
        ([0, 0, 1, 1, 2, 2], 1, [1, 1, 2, 2, 3], [2, 3, 4, 5, 6]),
        ([1, 1, 2, 2, 3, 3], 2, [3, 3, 4], [4, 5, 6]),
        ([2, 2, 4, 4], 3, [4, 4, 6], [2, 3, 4]),
    ],
)
def test_a_trainer_that_makes_a_step_again_repeats_its_calls(
    clocks, back, again, numbers
):
    """The step went with the owner of a shard, after calls at the next clock."""
    rank = Rank()
    for clock in clocks:
        rank.call(clock)
    rank.starts_again(back)
    assert [rank.call(clock) for clock in again] == numbers


def test_who_starts_again_before_any_call_begins_with_the_first():
    rank = Rank()
    rank.starts_again(5)
    assert [rank.call(clock) for clock in (5, 6)] == [0, 1]
