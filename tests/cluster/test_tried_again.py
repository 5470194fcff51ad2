"""Tasks of many pushes that Dask runs again: each push counts once."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest

import daskps
from daskps import PushRejectedError, RowGrad, TableSpec, optim
from daskps.testing import kill_worker
from tests.cluster.killing_copies import has_all
from tests.support import PATIENCE, local_cluster, until

SHARDS = 3


def store_of(n: int, **more: Any) -> Any:
    """A store that has a place of its own for each push of each kind."""
    params = {"w": np.zeros(n), "t": TableSpec(n, 1), "any": TableSpec(None, 1)}
    rule = optim.SGD(1.0)
    return daskps.create(params, optimizer=rule, shards=SHARDS, **more)


def one_hot(n: int, i: int) -> Any:
    delta = np.zeros(n)
    delta[i] = 1
    return delta


def add_to_all(store: Any, n: int, i: int, **how: Any) -> None:
    rows = RowGrad([i], [[1.0]])
    store.add({"w": one_hot(n, i), "t": rows, "any": rows}, **how)


def add_to_one(store: Any, n: int, i: int, **how: Any) -> None:
    """Most pushes go to one shard: the others have gaps."""
    rows = RowGrad([i], [[1.0]])
    store["w"].region(i, i + 1).add([1.0], **how)
    store.add({"t": rows, "any": rows}, **how)


def push_all_at_once(store: Any, n: int) -> None:
    rows = [RowGrad([i], [[-1.0]]) for i in range(n)]
    futures = [
        store.push_async({"w": -one_hot(n, i), "t": rows[i], "any": rows[i]})
        for i in range(n)
    ]
    for future in futures:
        future.result()


def push_all(store: Any, n: int, kind: str) -> None:
    if kind == "async":
        push_all_at_once(store, n)
        return
    add = {"all": add_to_all, "one": add_to_one}[kind]
    for i in range(n):
        add(store, n, i)


def is_first(path: Path) -> bool:
    """Return whether the task has not been here yet."""
    with suppress(FileExistsError):
        path.touch(exist_ok=False)
        return True
    return False


def push_and_raise(store: Any, n: int, kind: str, path: Path) -> None:
    push_all(store, n, kind)
    if is_first(path):
        raise OSError("the first try fails at its end")


def counts(store: Any, n: int) -> set[float]:
    """How often the places of a store were pushed to."""
    found = store.pull(rows={"t": range(n), "any": range(n)})
    return {v for array in found.values() for v in array.ravel().tolist()}


@pytest.mark.parametrize("kind", ["all", "one", "async"])
def test_each_push_of_a_task_that_raises_counts_once(way, tmp_path, kind):
    with store_of(70) as store:
        path = tmp_path / "ran"
        way.submit(push_and_raise, store, 70, kind, path, retries=1).result()
        assert counts(store, 70) == {1.0}


def test_each_of_three_hundred_pushes_counts_once(client, tmp_path):
    with store_of(300) as store:
        path = tmp_path / "ran"
        client.submit(push_and_raise, store, 300, "one", path, retries=1).result()
        assert counts(store, 300) == {1.0}


def push_until_killed(stores: Any, n: int, pid: int, folder: Path) -> None:
    """In the first try the owner of all shards dies, and then this process."""
    for i in range(n):
        for store in stores:
            add_to_all(store, n, i)
        if i == n // 3 and is_first(folder / "owner"):
            os.kill(pid, signal.SIGKILL)
    if is_first(folder / "self"):
        threading.Event().wait(PATIENCE)


def test_each_push_counts_once_where_owner_and_task_die(tmp_path):
    """Another worker adopts the shards of one store, copies take over of the other."""
    with local_cluster(n_workers=3, threads=1) as client:
        a, b, _ = client.nthreads()
        with dask.config.set({"daskps.carriers.machine": False}):
            copied = store_of(100, servers=[a], copies=2)
        with store_of(100, servers=[a]) as store, copied:
            pid = client.run(os.getpid, workers=[a])[a]
            what = push_until_killed, (store, copied), 100, pid, tmp_path
            task = client.submit(*what, workers=[b], allow_other_workers=True)
            until((tmp_path / "self").exists)
            until(partial(has_all, client, copied))
            kill_worker(client, b)
            task.result()
            assert counts(store, 100) == counts(copied, 100) == {1.0}
        events = [event for _, event in client.get_events("daskps")]
        ends = {e["action"] for e in events if e.get("worker") == a}
        assert ends == {"shards-adopted", "shards-promoted"}


def push_impatiently(store: Any, n: int, path: Path) -> int:
    """In the first try give a third of the pushes up, and fail."""
    first, given_up = is_first(path), 0
    for i in range(n):
        try:
            add_to_all(store, n, i, timeout=1e-4 if first and i % 3 == 2 else 60)
        except TimeoutError:
            given_up += 1
    if first:
        raise OSError(f"{given_up} pushes were given up")
    return given_up


def test_what_a_try_gave_up_counts_once(way, tmp_path):
    with store_of(200) as store:
        task = way.submit(push_impatiently, store, 200, tmp_path / "ran", retries=1)
        assert task.result() == 0
        assert counts(store, 200) == {1.0}


def push_with_nan(store: Any, n: int, path: Path) -> list[int]:
    refused = []
    for i in range(n):
        gradient = np.full(store["w"].size, -1, "f4")
        if i % 40 == 3:
            gradient[-1] = np.nan
        try:
            store.push({"w": gradient})
        except PushRejectedError:
            refused.append(i)
    if is_first(path):
        raise OSError("the first try fails at its end")
    return refused


def test_what_was_refused_is_refused_again(way, tmp_path):
    """The shard looks at gradients as large as these; here it is its last element."""
    n, size = 150, 200_000
    rule = optim.SGD(1.0)
    with daskps.create({"w": np.zeros(size, "f4")}, optimizer=rule, shards=2) as store:
        work = way.submit(push_with_nan, store, n, tmp_path / "ran", retries=1)
        assert work.result() == [3, 43, 83, 123]
        assert set(store["w"].pull().tolist()) == {146.0}


def push_beside_a_replica(store: Any, path: Path) -> None:
    with store.replica(every=1) as replica:
        for _ in range(5):
            store.push({"w": np.full(4, -1.0)})
            replica.step({"w": np.full(4, -1000.0)})
    if is_first(path):
        raise OSError("the first try fails at its end")


def test_syncs_of_a_replica_are_others_than_the_pushes_of_its_task(client, tmp_path):
    rule = optim.SGD(1.0)
    with daskps.create({"w": np.zeros(4)}, optimizer=rule, shards=2) as store:
        path = tmp_path / "ran"
        client.submit(push_beside_a_replica, store, path, retries=1).result()
        np.testing.assert_array_equal(store["w"].pull(), 5005.0)


def add_in_parts(store: Any, n: int, path: Path) -> None:
    """The first of two parts of a push is given up in the first try."""
    first, ids = is_first(path), np.arange(140_000)
    ones = np.ones((len(ids), 1), "f4")
    for i in range(n):
        with suppress(TimeoutError):
            store["any"].add(ids, ones, timeout=1e-4 if first and i == 0 else 60)
        store["any"].remove(ids[:2000], timeout=60)
        store.add({"t": RowGrad([i], [[1.0]])})
    if first:
        raise OSError("the first try fails at its end")


def test_parts_of_a_push_have_the_same_numbers_in_each_try(client, tmp_path):
    with store_of(9) as store:
        client.submit(add_in_parts, store, 3, tmp_path / "ran", retries=1).result()
        rows = store["any"].pull([2000, 139_999]).ravel().tolist()
        assert rows == [3.0, 3.0]
        assert store["t"].pull(range(3)).ravel().tolist() == [1.0] * 3
