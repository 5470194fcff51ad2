"""Snapshots of unbounded tables, that others push to."""

from __future__ import annotations

import threading
from typing import Any

import dask
import numpy as np
from dask.base import compute

import daskps
from daskps import RowGrad, TableSpec
from daskps.cluster.caller import snapshots
from daskps.cluster.protocol.deadline import Deadline
from tests.seams import shards_of
from tests.support import PATIENCE, store, until

DIM, FIRST = 2, 3.0


def rows_of(pair: Any) -> dict[int, Any]:
    """What a pair of arrays has, by id; each id once, ascending in each chunk."""
    ids, rows = pair
    assert ids.dtype == np.int64
    assert ids.chunks == rows.chunks[:1]
    assert ids.shape == rows.shape[:1]
    found_ids, found = compute(ids, rows)
    assert (found_ids.shape, found.shape) == (ids.shape, rows.shape)
    assert found.dtype == rows.dtype
    at = 0
    for n in ids.chunks[0]:
        assert found_ids[at : at + n].tolist() == sorted(found_ids[at : at + n])
        at += n
    by_id = dict(zip(found_ids.tolist(), found.tolist(), strict=True))
    assert len(by_id) == len(found_ids)
    return by_id


def test_a_snapshot_has_ids_and_rows(client):
    """Of arrays, tables of both kinds and one without rows: all of one moment."""
    spec = TableSpec(None, DIM, "float64", FIRST)
    params = {"w": np.zeros(4), "any": spec, "few": TableSpec(3, 1), "any none": spec}
    s = store(client, params=params, shards=5, optimizer=None)
    ids = [2**62, -1, 17, 0, -(2**63), 5, 6]
    s.add({"any": RowGrad(ids, np.ones((7, DIM))), "w": np.ones(4)})
    snapshot, alone = s.snapshot(), s["any"].to_dask_array()
    s["any"].add([17, 99], np.ones((2, DIM)))
    assert list(snapshot) == list(params)
    # Told without asking anybody.
    assert repr(snapshot).endswith(f"3 tables, {4 * 8 + 7 * DIM * 8 + 3 * 4} B>")
    assert f"{7 * DIM * 8} B" in snapshot._repr_html_()
    wanted = {i: [FIRST + 1] * DIM for i in ids}
    for pair in (snapshot["any"], alone):
        assert rows_of(pair) == wanted
    assert snapshot["w"].compute().tolist() == [1] * 4
    none = snapshot["any none"]
    assert [a.shape for a in none] == [(0,), (0, DIM)]
    assert rows_of(none) == rows_of(s["any none"].to_dask_array()) == {}
    # As of arrays: names follow from what is in them, and tasks read it.
    assert [a.name for a in s.snapshot()["any"]] != [a.name for a in snapshot["any"]]
    later = s["any"].to_dask_array()
    assert [a.name for a in s["any"].to_dask_array()] == [a.name for a in later]
    assert dask.base.tokenize(snapshot) != dask.base.tokenize(s.snapshot())
    found = client.submit(lambda x: [a.sum().compute() for a in x["any"]], snapshot)
    assert found.result() == [sum(ids), (FIRST + 1) * DIM * len(ids)]


def test_a_store_of_nothing_but_such_tables(client):
    s = store(client, params={"any": TableSpec(None, DIM)}, optimizer=None, shards=3)
    assert rows_of(s.snapshot()["any"]) == {}
    s["any"].assign([-5], np.ones((1, DIM)))
    snapshot = s.snapshot()
    assert rows_of(snapshot["any"]) == {-5: [1.0] * DIM}
    shards = shards_of(s)

    async def taken() -> Any:
        until_then = Deadline(PATIENCE, "a snapshot")
        found = await snapshots.take_snapshot(shards, None, until_then)
        return await snapshots.values(found, tables=True)

    ids, rows = shards.link.run(taken)["any"]
    assert (ids.tolist(), rows.tolist()) == ([-5], [[1.0] * DIM])


# -- the promise -----------------------------------------------------------------

N_PUSHES = 60


def pushed_by(producer: int, push: int) -> np.ndarray:
    """Ids that one push names: few, some of all producers, more and more of them new."""
    rng = np.random.default_rng([producer, push])
    common = rng.integers(-20, 20, 2)
    return np.concatenate([common, rng.integers(0, 10 * (push + 1), 3) * 7919 + 100])


def push_all(s: Any, producer: int) -> None:
    """Push, one after the other, each with a count of what there is in every shard."""
    for push in range(N_PUSHES):
        ids = pushed_by(producer, push)
        counts = np.zeros((12, 3), "i8")
        counts[:, producer] = 1
        rows = RowGrad(ids, np.ones((len(ids), 1), "i8"))
        s.add({"any": rows, "counts": counts.reshape(-1)})


def counted(pushes: list[int]) -> dict[int, int]:
    """A plain dict of what so many pushes of each producer come to."""
    found: dict[int, int] = {}
    for producer, n in enumerate(pushes):
        for push in range(n):
            for i in pushed_by(producer, push).tolist():
                found[i] = found.get(i, int(FIRST)) + 1
    return found


def test_each_snapshot_has_the_rows_of_some_pushes_of_each_producer(client):
    """Two tasks and a thread push, by every way that there is; a dict says what for."""
    params = {"counts": np.zeros(36, "i8"), "any": TableSpec(None, 1, "int64", 3)}
    s = store(client, params=params, optimizer=None, shards=4, name="rows")
    where = list(client.scheduler_info()["workers"])
    tasks = [client.submit(push_all, s, i, workers=[w]) for i, w in enumerate(where)]
    thread = threading.Thread(target=push_all, args=[s, 2])
    thread.start()
    seen = set[tuple[int, ...]]()

    def look(snapshot: Any) -> tuple[int, ...]:
        pushes = snapshot["counts"].compute().reshape(12, 3)
        assert (pushes == pushes[0]).all()
        found = {i: row for i, [row] in rows_of(snapshot["any"]).items()}
        assert found == counted(pushes[0].tolist())
        seen.add(tuple(pushes[0].tolist()))
        return tuple(pushes[0].tolist())

    until(lambda: look(s.snapshot()) == (N_PUSHES,) * 3)
    thread.join()
    client.gather(tasks)
    assert len(seen) > 3
    ids = list(counted([N_PUSHES] * 3))
    found = daskps.open("rows")["any"].pull(ids).ravel().tolist()
    assert dict(zip(ids, found, strict=True)) == counted([N_PUSHES] * 3)
    s.delete()
