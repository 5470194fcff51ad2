"""`Trainer.pull(copy=False)`: what is a view, and until when it stays as it is."""

from __future__ import annotations

import os

import numpy as np
import pytest

import daskps
from daskps import optim
from tests.seams import session_of
from tests.support import until


def one_shard(client):
    a, _ = client.nthreads()
    params = {"w": np.arange(8.0, dtype="f4"), "b": np.float64(1)}
    return daskps.create(params, servers=[a], optimizer=optim.SGD(1.0))


def sees(trainer, part):
    seen = []
    for _ in range(4):
        found = trainer.pull(copy=False)
        again = trainer.pull("w", copy=False)["w"]
        w = found["w"]
        before = w.copy()
        facts = [np.shares_memory(w, again), w.flags.writeable]
        trainer.push({"w": np.full(8, part, "f4")})
        # A round later it is as it was.
        seen.append([before.tolist(), *facts, np.array_equal(w, before)])
    trainer.barrier()
    rows = seen
    return rows, float(found["b"]), found["b"].shape


def test_views_stay_for_a_round_and_copy_nothing(way):
    s = one_shard(way)
    in_memory = way.scheduler_info()  # for the failure's report
    for rows, b, shape in daskps.run(s, sees, [1.0, 3.0]):
        expected = [(np.arange(8.0) - 2 * n).tolist() for n in range(4)]
        assert [row[0] for row in rows] == expected, in_memory
        assert all(row[3] for row in rows)
        assert (b, shape) == (1.0, ())
        # By message everything is copied.
        views = {row[1] for row in rows}
        assert views == {not rows[0][2]}
    s.close()


def test_views_are_of_shared_memory(machine_cluster):
    with machine_cluster.as_current():
        s = one_shard(machine_cluster)
        found = daskps.run(s, sees, [1.0, 3.0])
        assert all(row[1] and not row[2] for rows, _, _ in found for row in rows)
        s.close()


def test_parameter_of_two_shards_and_other_policies_are_copied(machine_cluster):
    def loop(trainer, part):
        w = trainer.pull("w", copy=False)["w"]
        w += 1.0
        return trainer.pull("w")["w"].sum()

    with machine_cluster.as_current():
        s = daskps.create({"w": np.zeros(8, "f4")})
        assert daskps.run(s, loop, [0]) == [0.0]
        s.close()
        s = one_shard(machine_cluster)
        assert daskps.run(s, loop, [0], sync="asp") == [28.0]
        s.close()


def waits(trainer, part):
    """Rank 1 delivers once rank 0 waits; rank 0 counts what it reads meanwhile."""
    waiting, n = part
    read, elements = session_of(trainer).read, []

    def counted(target, timeout, **how):
        elements.append(sum(out.size for out in target.flats))
        open(waiting, "w").close()
        read(target, timeout, **how)

    session_of(trainer).read = counted
    if trainer.rank == 1:
        until(lambda: os.path.exists(waiting))
    trainer.push({"w": np.ones(n, "f4")})
    w = trainer.pull(copy=False)["w"]
    assert (w == -1.0).all()
    return w.flags.writeable, elements


def test_waiting_for_a_view_copies_nothing(machine_cluster, tmp_path):
    """Or a worker that has no room for the model is paused because another is slow."""
    n = 10_000
    with machine_cluster.as_current():
        a, _ = machine_cluster.nthreads()
        params = {"w": np.zeros(n, "f4"), "b": np.zeros(n)}
        s = daskps.create(params, servers=[a], optimizer=optim.SGD(1.0))
        part = str(tmp_path / "waiting"), n
        (writeable, elements), _ = daskps.run(s, waits, [part, part])
        assert (writeable, elements) == (False, [2])
        s.close()


def test_view_and_out_exclude_each_other_and_copy_is_a_bool(client):
    def loop(trainer, part):
        with pytest.raises(ValueError, match="give one of the two"):
            trainer.pull(out={"w": np.empty(8, "f4")}, copy=False)
        for value in ("no", None, 0):
            with pytest.raises(TypeError, match="copy is True or False, found"):
                trainer.pull(copy=value)
        return trainer.clock

    s = one_shard(client)
    assert daskps.run(s, loop, [0]) == [0]
    s.close()
