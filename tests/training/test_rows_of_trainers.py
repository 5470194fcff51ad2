"""Trainers that read and push rows of tables, as they do arrays."""

from __future__ import annotations

import numpy as np
import pytest

import daskps
from daskps import RowGrad, TableSpec, optim
from daskps.cluster.host.hosted import HostedShard
from daskps.shards.steps import ASK
from tests.seams import session_of
from tests.support import mostly_inside

inside = pytest.mark.parametrize("way", ["inside"], indirect=True)

DIM, LR = 2, 0.5
#: In all shards of three, in no order, with repeats.
IDS = np.array([[8, 0], [3, 8]])
ONES = np.ones((2, 2, DIM), "f4")


def start():
    return np.arange(9 * DIM, dtype="f4").reshape(9, DIM)


def tables(shards=3):
    params = {"w": np.zeros(5), "emb": TableSpec(9, DIM, init=start())}
    return daskps.create(params, optimizer=optim.SGD(LR), shards=shards)


def steps(trainer, part):
    """Every verb that takes rows, and what it should give."""
    rows, expected, grad = {"emb": IDS}, start(), {"emb": RowGrad(IDS, ONES)}

    def stepped(weight):
        np.subtract.at(expected, IDS.ravel(), np.float32(LR * weight))

    def same(found, ids=IDS):
        np.testing.assert_array_equal(found["emb"], expected[ids], strict=True)

    found = trainer.pull(rows=rows)
    assert [*found] == ["w", "emb"]
    same(found)
    trainer.push({**grad, "w": np.ones(5)}, weight=0.5)
    stepped(0.5)
    out = {"emb": np.empty((2, 2, DIM), "f4")}
    assert trainer.pull(rows=rows, out=out)["emb"] is out["emb"]
    same(out)
    trainer.push(grad, tick=False)
    assert trainer.clock == 1
    trainer.tick()
    stepped(1)
    same(trainer.pull((), rows=rows, copy=False))
    found = trainer.pushpull(grad, rows={"emb": [4, 8]})
    stepped(1)
    same(found, [4, 8])
    assert found["w"].tolist() == [-0.25] * 5
    trainer.push(grad, weight=0)
    pushed = trainer.push_async(grad)
    stepped(1)
    same(trainer.pull_async("w", rows=rows).result())
    assert len(pushed.result().pairs) == 3
    return trainer.clock, _ahead(trainer, same)


def _ahead(trainer, same):
    """Return how many reads it took to begin a pull of some ids and to make one."""
    n, read = [0], session_of(trainer).read

    def counted(*args, **how):
        n[0] += 1
        read(*args, **how)

    session_of(trainer).read = counted
    ids, made = IDS.copy(), []
    for asked, out in [(IDS, None), (IDS, np.empty((2, 2, DIM), "f4")), (IDS.T, None)]:
        before = n[0]
        trainer.prefetch((), rows={"emb": ids})
        ids[...] = 0  # the read keeps its own
        into = None if out is None else {"emb": out}
        same(trainer.pull((), rows={"emb": asked}, out=into), asked)
        ids[...] = IDS
        made.append(n[0] - before)
    session_of(trainer).read = read
    return made


@mostly_inside("sync", ["asp"])
def test_trainers_read_and_push_rows(way, sync):
    with tables() as store:
        [(clock, made)] = daskps.run(store, steps, [0], sync=sync)
        assert clock == 5
        # What was read ahead is used for the same ids in the same shape.
        assert made == [1, 1, 2]
        assert [row["pushes"] for row in store.stats()["shards"]] == [4] * 3


@inside
def test_a_step_with_rows_that_one_shard_takes_later_counts_once(way, monkeypatch):
    simply, n = HostedShard.try_step, []

    def try_step(shard, *args, **how):
        n.append(shard.index)
        return ASK if shard.index == 1 else simply(shard, *args, **how)

    monkeypatch.setattr(HostedShard, "try_step", try_step)
    with tables() as store:
        daskps.run(store, steps, [0], sync="asp")
        assert [row["pushes"] for row in store.stats()["shards"]] == [4] * 3
    assert sorted(set(n)) == [0, 1, 2]


def ranks_count(trainer, part):
    """Count one's own row up; return how far behind the others' were found."""
    ids, behind = np.arange(2), 0.0
    for _ in range(12):
        seen = trainer.pull((), rows={"emb": ids})["emb"][1 - trainer.rank, 0]
        behind = max(behind, trainer.clock + seen)
        trainer.push({"emb": RowGrad([trainer.rank], np.ones((1, 1)))})
    return behind


@inside
@pytest.mark.parametrize("staleness", [0, 2])
def test_rows_are_no_staler_than_the_run_allows(way, staleness):
    params = {"emb": TableSpec(2, 1, "float64")}
    rule, sync = optim.SGD(1.0), daskps.SSP(staleness)
    with daskps.create(params, optimizer=rule, shards=2) as store:
        for behind in daskps.run(store, ranks_count, [0, 0], sync=sync):
            assert behind <= staleness
        assert store["emb"].pull([0, 1]).tolist() == [[-12], [-12]]


def refused(trainer, part):
    """Nothing that is refused reaches a shard or moves the clock."""
    good = RowGrad([1], np.ones((1, DIM)))
    for grads, said in [
        ({"emb": RowGrad([9], np.ones((1, DIM)))}, "found id 9"),
        ({"emb": RowGrad([1], np.full((1, DIM), np.nan))}, "NaN or Inf"),
        ({"emb": np.ones((9, DIM))}, r"RowGrad\(ids, values\)"),
        ({"w": good}, "'w', which is an array"),
        ({"emb": good, "w": np.ones(4)}, r"'w' has shape \(4,\)"),
    ]:
        for verb in (trainer.push, trainer.pushpull, trainer.push_async):
            with pytest.raises(daskps.PushRejectedError, match=said):
                verb(grads)
    for verb in (trainer.pull, trainer.pull_async, trainer.prefetch):
        with pytest.raises(ValueError, match="'w', which is an array"):
            verb(rows={"w": [1]})
        with pytest.raises(ValueError, match="found id -1"):
            verb(rows={"emb": [-1]})
        with pytest.raises(TypeError, match="rows is a mapping"):
            verb(rows=[1])
        with pytest.raises(daskps.UnknownParameterError, match="is a table"):
            verb("emb")
    assert trainer.clock == 0


@inside
def test_what_is_refused_changes_nothing(way):
    with tables() as store:
        daskps.run(store, refused, [0], sync="asp")
        assert store.version == 0


def many(trainer, part):
    ids = np.arange(70_000)[::-1]
    trainer.push({"big": RowGrad(ids, np.ones((70_000, 1)))})
    found = trainer.pushpull({}, rows={"big": ids})["big"]
    return (found == 2 * ids[:, None] - 1).all() and len(
        trainer.pull(rows={"big": ids})
    )


@inside
def test_more_rows_than_one_call_reads(way):
    values = 2.0 * np.arange(70_000)[:, None]
    params = {"big": TableSpec(70_000, 1, "float64", init=values)}
    with daskps.create(params, optimizer=optim.SGD(1.0)) as store:
        assert daskps.run(store, many, [0], sync="asp") == [1]


def rounds(trainer, part):
    """Deliver rows with a tick and before one; see exactly the last round each time."""
    mine, shared = np.array([trainer.rank, 5]), np.array([5])
    for step in range(3):
        seen = trainer.pull((), rows={"emb": np.arange(9)})["emb"]
        assert (seen[5] == -2.0 * step).all()
        grads = {"emb": RowGrad(mine, np.ones((2, DIM)))}
        trainer.push(grads, tick=False)
        both = {"w": np.ones(5), "emb": RowGrad(shared, np.ones((1, DIM)))}
        found = trainer.pushpull(both, rows={"emb": shared})
        assert (found["emb"] == -2.0 * (step + 1)).all()


def test_a_round_has_the_rows_of_all_trainers(client):
    params = {"w": np.zeros(5), "emb": TableSpec(9, DIM, "float64")}
    rule = optim.SGD(1.0)
    with daskps.create(params, optimizer=rule, shards=3, client=client) as store:
        daskps.run(store, rounds, [0, 0])
        rows = store["emb"].pull([0, 1, 2, 5])
        assert rows[:, 0].tolist() == [-1.5, -1.5, 0, -6]
        assert store.version == 3
