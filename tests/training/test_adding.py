"""`Trainer.add` and `Trainer.assign`: what is no gradient, under every policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import daskps
from daskps import RowGrad, TableSpec, optim
from daskps.reduction import fold
from tests.support import mostly_inside

SYNCS = ("bsp", "ssp", "asp")
inside = pytest.mark.parametrize("way", ["inside"], indirect=True)
PARAMS = {
    "w": np.full(7, 1.0, "f4"),
    "h": np.full(3, 2.0, "f2"),
    "n": np.full(5, 10, "int64"),
    "emb": TableSpec(20, 2, "float32"),
    "half": TableSpec(9, 1, "float16"),
    "any": TableSpec(None, 2, "float64"),
}


def store_of(shards=3, params: Any = None):
    params = PARAMS if params is None else params
    return daskps.create(params, optimizer=optim.Adam(0.1), shards=shards)


def rows_of(rank):
    """Ids that ranks share and repeat, and rows for them."""
    ids = np.array([rank, 3, 3, 7])
    return ids, np.arange(8, dtype="f4").reshape(4, 2) + rank


def adds(trainer, part):
    ids, rows = rows_of(trainer.rank)
    for _ in range(2):
        version = trainer.add(
            {
                "w": np.full(7, 1.0 + trainer.rank, "f4"),
                "h": np.full(3, 0.5, "f2"),
                "n": np.full(5, trainer.rank),
                "emb": RowGrad(ids, rows),
                "half": RowGrad([trainer.rank, 8], np.ones((2, 1), "f2")),
                "any": RowGrad([10**12, trainer.rank], np.ones((2, 2))),
            }
            if trainer.rank != 2 or part != "sparse"
            else {"w": np.full(7, 3.0, "f4")}
        )
    return trainer.clock, int(version)


def without_integer_tables():
    expected = np.zeros((20, 2))
    for rank in range(3):
        ids, rows = rows_of(rank)
        np.add.at(expected, ids, 2.0 * rows)
    return expected


@mostly_inside("sync", SYNCS)
def test_add_is_a_sum_over_trainers_past_the_optimizer(way, sync):
    with store_of() as store:
        found = daskps.run(store, adds, [None] * 3, sync=sync)
        assert [clock for clock, _ in found] == [2] * 3
        now = store.pull()
        assert (now["w"] == 1 + 2 * 6).all()
        assert (now["h"] == 2 + 2 * 1.5).all()
        assert (now["n"] == 10 + 2 * 3).all()
        np.testing.assert_array_equal(
            store["emb"].pull(np.arange(20)), without_integer_tables()
        )
        half = store["half"].pull(np.arange(9))[:, 0]
        assert half.tolist() == [2, 2, 2, 0, 0, 0, 0, 0, 6]
        assert (store["any"].pull([10**12, 1]) == [[6, 6], [2, 2]]).all()
        # One update per round, and one per call where each is applied on arrival.
        assert store.version == (2 if sync == "bsp" else 6)
        # Adam has counted no step: its first one is of the learning rate.
        store.push({"w": np.ones(7, "f4")})
        np.testing.assert_allclose(store["w"].pull(), 13 - 0.1, rtol=1e-5)


@inside
def test_sums_follow_the_tree_over_ranks(way):
    rng = np.random.default_rng(2)
    deltas = [
        (rng.standard_normal(101) * 10.0 ** rng.integers(-5, 5, 101)).astype("f4")
        for _ in range(5)
    ]
    total = fold(
        {(r, r + 1): ({0: d.copy()}, {0: 1.0}) for r, d in enumerate(deltas)}, 0, 5
    )
    assert total is not None
    for shards, reduce in ((1, "mean"), (4, "sum"), (2, lambda g, w: g.max(0))):
        with store_of(shards, {"w": np.zeros(101, "f4")}) as store:
            daskps.run(store, lambda t, d: t.add({"w": d}), deltas, reduce=reduce)
            assert store["w"].pull().tobytes() == total[0][0].tobytes()


def assigns(trainer, part):
    values = {"w": np.full(7, 10.0 * trainer.rank, "f4")}
    if trainer.rank:
        values["h"] = np.full(3, trainer.rank, "f2")
    trainer.assign(values, weight=[1.0, 3.0, 0.0, 4.0][trainer.rank])
    return trainer.clock, trainer.pull(["w", "h"])


@mostly_inside("reduce", ("mean", "sum", max))
def test_assign_is_the_mean_of_who_names_it(way, reduce):
    with store_of() as store:
        for clock, found in daskps.run(store, assigns, [None] * 4, reduce=reduce):
            assert clock == 1
            # (0 + 30 + 120) / 8 and (3 + 12) / 7.
            assert (found["w"] == 18.75).all()
            assert (found["h"] == np.float16(15 / 7)).all()
        assert store.version == 1
        assert (store["n"].pull() == 10).all()
        store.push({"w": np.ones(7, "f4")})
        np.testing.assert_allclose(store["w"].pull(), 18.75 - 0.1, rtol=1e-5)


@inside
def test_models_of_train_and_assign_are_one(way):
    """What `average="models"` sends is what assign sends."""

    def loop(trainer, part):
        trainer.assign({"w": part}, weight=2.0)
        trainer.assign({"w": part + 1})

    with store_of(2, {"w": np.zeros(3)}) as store:
        daskps.run(store, loop, [np.arange(3.0), np.arange(3.0) + 2])
        assert store["w"].pull().tolist() == [2.0, 3.0, 4.0]


@inside
def test_one_trainer_may_send_one_kind_after_the_other(way):
    def loop(trainer, part):
        trainer.push({"w": np.ones(2)})
        trainer.add({"w": np.full(2, 5.0)})
        trainer.assign({"w": trainer.pull()["w"] * 2})
        trainer.tick()
        trainer.push({"w": np.ones(2)})

    params = {"w": np.zeros(2)}
    with daskps.create(params, optimizer=optim.SGD(1.0), shards=2) as store:
        daskps.run(store, loop, [None] * 2)
        # ((0 - 1) + 10) * 2 - 1, for the tick brings nothing.
        assert store["w"].pull().tolist() == [17.0, 17.0]
        assert store.version == 5


@inside
def test_a_trainer_may_not_mix_them_in_one_step(way):
    def loop(trainer, part):
        trainer.push({"w": np.ones(2)}, tick=False)
        for verb in (trainer.add, trainer.assign):
            with pytest.raises(daskps.ConsistencyError, match=r"call tick\(\) before"):
                verb({"w": np.ones(2)})
        trainer.tick()
        trainer.add({"w": np.ones(2)})
        return trainer.clock

    params = {"w": np.zeros(2)}
    with daskps.create(params, optimizer=optim.SGD(1.0), shards=2) as store:
        assert daskps.run(store, loop, [None]) == [2]
        assert store["w"].pull().tolist() == [0.0, 0.0]


@inside
def test_trainers_that_mix_them_end_the_run_and_change_nothing(way):
    def loop(trainer, part):
        trainer.add({"w": np.ones(2)})
        verb = trainer.push if trainer.rank else trainer.add
        try:
            verb({"w": np.ones(2)})
        except daskps.ConsistencyError:
            trainer.tick()
            raise
        trainer.pull()

    with store_of(2, {"w": np.zeros(2)}) as store:
        with pytest.raises(daskps.ConsistencyError, match="a round has one kind"):
            daskps.run(store, loop, [None] * 3)
        assert store["w"].pull().tolist() == [3.0, 3.0]
        assert len(set(store.versions)) == 1
        daskps.run(store, lambda t, _: t.add({"w": np.ones(2)}), [None])
        assert store["w"].pull().tolist() == [4.0, 4.0]


@inside
@pytest.mark.parametrize("sync", ["ssp", "asp"])
def test_without_rounds_there_is_no_assign(way, sync):
    def loop(trainer, part):
        with pytest.raises(ValueError, match=r"Trainer.assign needs sync='bsp'"):
            trainer.assign({"w": np.ones(7, "f4")})
        return trainer.clock

    with store_of() as store:
        assert daskps.run(store, loop, [None], sync=sync) == [0]


@inside
@pytest.mark.parametrize(
    ("verb", "given", "error", "says"),
    [
        ("add", {"w": np.ones(6)}, daskps.PushRejectedError, "has shape"),
        ("add", {"n": np.ones(5)}, daskps.PushRejectedError, "same_kind"),
        ("add", {"w": np.full(7, np.nan)}, daskps.PushRejectedError, "NaN"),
        ("add", {"x": 1}, daskps.UnknownParameterError, "x"),
        ("add", {"ids": RowGrad([1], [[1]])}, daskps.PushRejectedError, "floats alone"),
        ("add", {"emb": RowGrad([20], [[1, 1]])}, daskps.PushRejectedError, "20"),
        ("assign", {"n": np.ones(5, int)}, daskps.PushRejectedError, "need not be"),
        ("assign", {"emb": RowGrad([1], [[1, 1]])}, daskps.PushRejectedError, "assign"),
        ("assign", {"w": np.full(7, np.inf)}, daskps.PushRejectedError, "Inf"),
    ],
)
def test_what_does_not_fit_changes_nothing(way, verb, given, error, says):
    def loop(trainer, part):
        with pytest.raises(error, match=says):
            getattr(trainer, verb)(given)
        trainer.finish()
        with pytest.raises(daskps.errors.ClockError):
            getattr(trainer, verb)({})
        return trainer.clock

    params = {**PARAMS, "ids": TableSpec(4, 1, "int32")}
    with store_of(2, params) as store:
        assert daskps.run(store, loop, [None]) == [0]
        assert store.version == 0


@inside
def test_codecs_leave_deltas_and_values_as_they_are(way):
    def loop(trainer, part):
        trainer.add({"w": np.full(3, 0.1)})
        trainer.assign({"w": trainer.pull()["w"] + 0.1})

    with store_of(2, {"w": np.zeros(3)}) as store:
        daskps.run(store, loop, [None], codec="bf16")
        assert store["w"].pull().tolist() == [0.2] * 3
