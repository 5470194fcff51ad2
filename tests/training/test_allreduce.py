"""`Trainer.allreduce`: arrays of any kind over the trainers of a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.reduction import fold
from tests.support import mostly_inside

SYNCS = ("bsp", "ssp", "asp")
inside = pytest.mark.parametrize("way", ["inside"], indirect=True)


def store_of(shards=3):
    return daskps.create(
        {"w": np.full(9, 10.0)}, optimizer=optim.SGD(0.1), shards=shards
    )


def noise(rank, n=200_000):
    """Numbers whose sum depends on the order of addition."""
    rng = np.random.default_rng(rank)
    return (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 6, n)).astype("f4")


def all_of_it(trainer, part):
    rank = trainer.rank
    found: dict[str, Any] = {"ones": trainer.allreduce(1)}
    found |= trainer.allreduce({"a": noise(rank), "b": {"c": np.float16(rank)}})
    found["mean"] = trainer.allreduce([rank, 2 * rank], "mean")
    found["max"] = trainer.allreduce(np.array([rank, -rank], "i2"), op="max")
    found["min"] = trainer.allreduce({"x": rank % 2 == 0}, "min")["x"]
    found["none"] = trainer.allreduce(np.empty((0, 3)))
    return found, trainer.clock


@mostly_inside("sync", SYNCS)
def test_v10_all_reduce_of_one_is_the_number_of_trainers(way, sync):
    with store_of() as store:
        found = daskps.run(store, all_of_it, [None] * 5, sync=sync)
        assert store.version == 0
    nodes = {(r, r + 1): ({0: noise(r)}, {0: 1.0}) for r in range(5)}
    total = fold(nodes, 0, 5)
    assert total is not None
    for of, clock in found:
        assert of["ones"] == 5
        assert of["ones"].dtype == int
        assert clock == 0
        assert of["a"].tobytes() == total[0][0].tobytes()
        assert of["b/c"] == 10
        assert of["b/c"].dtype == np.float16
        assert of["mean"].tolist() == [2.0, 4.0]
        assert of["max"].tolist() == [4, 0]
        assert of["max"].dtype == np.int16
        assert of["min"] == np.False_
        assert of["none"].shape == (0, 3)


@inside
def test_bits_do_not_depend_on_the_shards(way):
    found = []
    for shards in (1, 2, 7):
        with store_of(shards) as store:
            found.append(
                daskps.run(
                    store, lambda t, _: t.allreduce(noise(t.rank)).tobytes(), [0] * 3
                )
            )
    assert len({one for of in found for one in of}) == 1


@inside
def test_s10_steps_by_an_all_reduce_alone(way):
    """Parameter 10, gradient 1 everywhere, rate 0.1: 9.9."""

    def loop(trainer, part):
        w = trainer.pull()["w"]
        return w - 0.1 * trainer.allreduce(np.ones(9), "mean")

    with store_of() as store:
        for found in daskps.run(store, loop, [None] * 3):
            np.testing.assert_allclose(found, 9.9, rtol=1e-12)


def some_finish(trainer, part):
    if trainer.rank == 1:
        return None
    if trainer.rank == 2:
        trainer.finish()
        with pytest.raises(daskps.errors.ClockError, match="has finished"):
            trainer.allreduce(1)
        return None
    return [int(trainer.allreduce(trainer.rank)) for _ in range(2)]


@inside
@pytest.mark.parametrize("sync", SYNCS)
def test_who_has_finished_is_not_waited_for(way, sync):
    with store_of() as store:
        found = daskps.run(store, some_finish, [None] * 4, sync=sync)
    assert found == [[3, 3], None, None, [3, 3]]


def odd_shape(trainer, part):
    said = ""
    # One is by one shard's host, the other by all of them.
    try:
        trainer.allreduce(np.zeros(3 if trainer.rank else 300_000))
    except ValueError as error:
        said = str(error)
    return said, int(trainer.allreduce(1))


@inside
def test_what_does_not_fit_is_told_to_all_trainers(way):
    with store_of() as store:
        found = daskps.run(store, odd_shape, [None] * 3)
    for said, after in found:
        assert "brings to an allreduce" in said
        assert after == 3
        assert "(300000,) float64" in said
        assert "(3,) float64" in said
        assert "trainer 0 " in said


@pytest.mark.parametrize(
    ("arrays", "op", "says"),
    [
        (1.0, "product", "choose one of"),
        (1.0, ["sum"], "choose one of"),
        ({}, "sum", "allreduce of 0 arrays"),
        ({"a": "text"}, "sum", "array 'a' has dtype"),
        (True, "sum", r"pass .astype\(int\) to count"),
        (np.ma.masked_array([1.0], [True]), "max", "masked"),
    ],
)
@inside
def test_what_has_no_sum_is_refused_at_once(way, arrays, op, says):
    def loop(trainer, part):
        with pytest.raises(ValueError, match=says):
            trainer.allreduce(arrays, op)
        return int(trainer.allreduce(1))

    with store_of() as store:
        assert daskps.run(store, loop, [None] * 2) == [2, 2]


@inside
def test_asked_again_after_a_timeout_it_is_the_same(way):
    def loop(trainer, part):
        if trainer.rank == 0:
            with pytest.raises(TimeoutError, match="an allreduce of trainer 0"):
                trainer.allreduce(np.ones(2), timeout=0.05)
            trainer.barrier()
            return trainer.allreduce(np.full(2, 5.0)).tolist()
        trainer.barrier()  # the other one has given up by then
        return trainer.allreduce(np.ones(2)).tolist()

    with store_of() as store:
        # What had arrived counts, and not what was given the second time.
        assert daskps.run(store, loop, [None] * 2) == [[2.0, 2.0]] * 2


def leaves_one_out(trainer, part):
    trainer.push({"w": np.ones(9)})
    if trainer.rank == 0:
        trainer.allreduce(1)
    trainer.push({"w": np.ones(9)})
    return trainer.allreduce(1)


@inside
def test_a_call_left_out_ends_a_resumable_run(way):
    """As where a trainer is started again behind a call that it had made: no hang."""
    with store_of() as store:
        with pytest.raises(ValueError, match=r"an allreduce clock \d, and not \d"):
            daskps.run(store, leaves_one_out, [None] * 2, resumable=True, timeout=60)
        assert store.version == 1


@inside
def test_an_error_of_one_trainer_ends_the_call_of_the_others(way):
    def loop(trainer, part):
        if trainer.rank == 1:
            raise RuntimeError("mine")
        trainer.allreduce(1)

    with store_of() as store, pytest.raises(RuntimeError, match="mine"):
        daskps.run(store, loop, [None] * 3)


@inside
def test_what_is_given_stays_and_what_comes_back_is_ones_own(way):
    def loop(trainer, part):
        mine = np.ones(4)
        found = trainer.allreduce(mine, "max")
        found += 7
        again = trainer.allreduce(mine, "max")
        return mine.tolist(), again.tolist()

    with store_of() as store:
        assert daskps.run(store, loop, [None]) == [([1.0] * 4, [1.0] * 4)]
