"""`workers=` of `train` and `run`: where trainers may be, and what is none of it."""

from __future__ import annotations

import threading

import dask.array as da
import numpy as np
import pytest
from dask.delayed import delayed
from distributed import get_worker

import daskps
from daskps import optim
from daskps.cluster.runs.parts import DataPart, homes
from tests import inprocess
from tests.seams import session_of


def zero():
    return daskps.create({"w": np.zeros(2)}, optimizer=optim.SGD(0.5), shards=2)


def where(trainer, part):
    for _ in range(2):
        trainer.push({"w": np.ones(2)})
    return session_of(trainer).link.node.address


def test_trainers_of_run_are_where_they_may_be():
    """Also more of them than workers; and each is named once, however often it is given."""
    with inprocess.cluster(3) as cluster, zero() as store:
        _, second, third = cluster.doors
        assert daskps.run(store, where, [0] * 3, workers=second) == [second] * 3
        found = daskps.run(store, where, [0], workers=iter([third, third]))
        assert found == [third]


def gradient(params, X, y=None):
    return {"w": params["w"] - X.mean(axis=0)}


@pytest.mark.parametrize("execution", ["resident", "graph"])
def test_as_many_trainers_as_workers(execution):
    """One for each by default, and the same bits as on all workers."""
    X = np.arange(24.0).reshape(12, 2)
    with inprocess.cluster(3) as cluster, zero() as store, zero() as other:
        named = [*cluster.doors][1:]
        options = {"batch_size": 2, "execution": execution}
        found = daskps.train(store, gradient, X, workers=named, **options)
        wanted = daskps.train(other, gradient, X, trainers=2, **options)
        assert found.stats.clock == 3  # of two trainers with 6 rows each
        np.testing.assert_array_equal(found.weights["w"], wanted.weights["w"])


class Part:
    """A future as `homes` sees it."""

    def __init__(self, key):
        self.key = key


def test_data_elsewhere_travels(monkeypatch):
    """Parts go to the worker that has most of it among those named, else in turns."""
    monkeypatch.setattr(DataPart, "futures", property(lambda part: part.X))
    held = {"x": (10, ["a"]), "y": (20, ["b", "c"]), "z": (1, ["c"])}
    parts = [DataPart(1, tuple(map(Part, keys))) for keys in ("x", "xy", "yz", "x")]
    found = homes(parts, held, ["c", "d"])
    assert [(p.worker, p.moved) for p in found] == [
        ("c", 1),
        ("c", 1),
        ("c", 0),
        ("d", 1),
    ]
    assert [p.worker for p in homes(parts, held)] == ["a", "b", "c", "a"]


#: What has been called of `look`, `rows` and `loop`, here: by their names they are not
#: copied on their way.
CALLED: list[str] = []


def look(*args):
    CALLED.append("look")


def rows():
    CALLED.append("rows")
    return np.ones((4, 2))


@pytest.mark.parametrize(
    ("workers", "error", "says"),
    [
        (3, TypeError, "workers is the address of a worker or a list of them, found 3"),
        ([["tcp://a:1"]], TypeError, "workers is the address of a worker or a list"),
        ([3], TypeError, r"found \[3\]"),
        (b"tcp://x", TypeError, "found b'tcp://x'"),
        ({"a": 1}, TypeError, "found {'a': 1}"),
        ([], ValueError, "workers names no worker"),
        (
            "tcp://x:1",
            daskps.NotEnoughWorkersError,
            "workers= names 'tcp://x:1', which",
        ),
    ],
)
def test_what_is_no_worker_is_refused_at_once(workers, error, says):
    """No data is computed, and nothing of the user's is called."""
    CALLED.clear()
    X = da.from_delayed(delayed(rows)(), (4, 2), dtype=float)
    with inprocess.cluster(), zero() as store:
        with pytest.raises(error, match=says):
            daskps.run(store, look, [0], workers=workers)
        with pytest.raises(error, match=says):
            daskps.train(store, look, X, workers=workers)
        assert not CALLED
        assert store.version == 0


AT_WORK, GO_ON = threading.Event(), threading.Event()


def loop(trainer, part):
    trainer.push({"w": np.ones(2)})
    AT_WORK.set()
    assert GO_ON.wait(60)
    trainer.push({"w": np.ones(2)})


def test_run_ends_with_the_last_of_its_workers():
    """Trainers of a worker that died wait for no other one that may have them."""
    with inprocess.cluster() as cluster:
        first, second = cluster.doors

        def kill():
            assert AT_WORK.wait(60)
            cluster.end(second)

        with daskps.create(
            {"w": np.zeros(2)}, optimizer=optim.SGD(1.0), servers=[first]
        ) as store:
            killer = threading.Thread(target=kill)
            killer.start()
            with pytest.raises(daskps.NotEnoughWorkersError, match="is left"):
                daskps.run(store, loop, [0], workers=[second], resumable=True)
            killer.join()
            assert store.version == 1
            # Of a process it would be dead; here it wakes, and its run is over.
            GO_ON.set()


def address_of(params, X, y=None):
    """Mark the row of the worker that computes this."""
    number = list(params).index(get_worker().address)
    return {get_worker().address: np.array(-1.0)} if number >= 0 else {}


@pytest.mark.parametrize("execution", ["resident", "graph"])
def test_on_a_real_cluster(client, execution):
    """Data that Dask has put on both workers is trained on by one of them alone."""
    both = sorted(client.scheduler_info()["workers"])
    X = client.persist(da.ones((40, 2), chunks=(5, 2)))
    params = dict.fromkeys(both, 0.0)
    with daskps.create(params, optimizer=optim.SGD(1.0)) as store:
        result = daskps.train(
            store, address_of, X, workers=both[1:], trainers=4, execution=execution
        )
        assert result.weights[both[0]] == 0.0
        assert result.weights[both[1]] == result.stats.clock == 1
        assert 1 <= result.stats.moved_parts <= 7
