"""Views: one copy of a store's arrays on a machine, for all tasks that predict by it."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster, get_worker

import daskps
from daskps import config
from daskps.cluster.caller import views as caller
from daskps.cluster.host.node import HOSTS
from daskps.cluster.machine import views
from daskps.cluster.machine.folder import folder_of
from daskps.cluster.machine.mapping import FILES
from daskps.errors import (
    LayoutError,
    ShardLostError,
    StoreClosedError,
    StoreNotFoundError,
    UnknownParameterError,
)
from tests.support import (
    CARRIERS,
    cleaned,
    gen_cluster,
    local_cluster,
    mostly_inside,
    until,
)

N = 300_000
#: What says where the elements are that a copy of a cut has.
PARTS = "_parts"


@pytest.fixture(scope="module")
def four() -> Iterator[Client]:
    """Four worker processes on this machine."""
    with local_cluster(4) as client:
        yield client


@pytest.fixture
def machine(four: Client) -> Iterator[Client]:
    """The client of these, for handles too that a test unpickles."""
    with cleaned(four):
        yield four


def files(client: Client, uid: str) -> list[str]:
    """Names of the files of a store's views, also of such that are not whole."""
    cluster = client.scheduler_info()["id"]
    folder = Path(folder_of(config.load().shared_memory, cluster))
    digits = views.ViewFiles(uid, None).digits
    return [p.name for p in folder.glob("*-*") if p.name[17:].startswith(digits)]


def held() -> tuple[int, int]:
    """Bytes of files that this process has mapped, and of those that it answers for."""
    return FILES.nbytes(), FILES.nbytes(owned=True)


def keeps(dask_worker: Any, uid: str) -> bool:
    """Whether a worker has a view of a store."""
    return uid in HOSTS[dask_worker.address].views


#: Names of the views that this process has made.
MADE: list[str] = []


def made() -> int:
    """How many views this process has made."""
    return len(MADE)


def count_makings() -> None:
    """Count the views that this process makes."""
    from tests.cluster import test_views

    done: Any = views.Making.done

    def counted(*about: Any) -> views.View:
        view: views.View = done(*about)
        test_views.MADE.append(view.name)
        return view

    if not getattr(done, "counts", False):
        counted.counts = True  # type: ignore[attr-defined]  # a mark
        making_of: Any = views.Making
        making_of.done = counted


def summed(store: Any, i: int = 0, **asked: Any) -> tuple[int, float]:
    """A task: the process it is in, and the sum of a view's array."""
    return os.getpid(), float(store.view(**asked)["w"].sum())


def everywhere(client: Client, function: Any, *args: Any) -> list[Any]:
    """Have a task on each worker call a function."""
    of = client.scheduler_info()["workers"]
    futures = [client.submit(function, *args, workers=[w], pure=False) for w in of]
    found: list[Any] = client.gather(futures)
    return found


def test_a_hundred_tasks_on_four_workers_copy_the_model_once(machine: Client) -> None:
    store = daskps.create({"w": np.ones(N), "b": np.arange(3)}, client=machine)
    machine.run(count_makings)
    before = machine.run(held)
    found = machine.gather(machine.map(summed, [store] * 100, range(100), pure=False))
    assert {total for _, total in found} == {N}
    found = everywhere(machine, summed, store)
    assert len({pid for pid, _ in found}) == 4
    assert sum(machine.run(made).values()) == 1
    assert len(files(machine, store.uid)) == 1
    # Dask counts it for one of them, and the directory for placement.
    nbytes, after = 8 * N, machine.run(held)
    more = [after[w][1] - before[w][1] for w in before]
    assert sorted(more)[:3] == [0, 0, 0]
    assert nbytes <= max(more) < nbytes + 20_000
    with daskps.create({"x": np.zeros(2)}, client=machine):
        cluster: Any = machine.cluster
        directory = cluster.scheduler.extensions["daskps-directory"]
        viewers: Any = directory.stores[store.uid].viewers
        assert sorted(viewers) == sorted(machine.scheduler_info()["workers"])
        assert sorted(viewers.values())[:3] == [0, 0, 0]
        assert nbytes <= max(viewers.values()) < nbytes + 20_000
    # The client too has no copy of its own.
    assert store.view()["w"].sum() == N
    assert len(files(machine, store.uid)) == 1
    store.close()
    assert files(machine, store.uid) == []
    assert not any(machine.run(keeps, uid=store.uid).values())
    until(lambda: all(now <= before[w] for w, now in machine.run(held).items()))


def test_a_view_never_shows_two_versions(machine: Client) -> None:
    store = daskps.create({"w": np.zeros(N), "b": np.zeros(7)}, client=machine)
    over = threading.Event()

    def push() -> None:
        while not over.is_set():
            store.add({"w": np.ones(N), "b": np.ones(7)})

    def look(store: Any, n: int) -> list[float]:
        seen = []
        for _ in range(n):
            view = store.view(max_age=0)
            values = {*np.unique(view["w"]), *np.unique(view["b"])}
            assert len(values) == 1, values
            seen.append(float(values.pop()))
        return seen

    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(push)
        try:
            for seen in everywhere(machine, look, store, 5):
                assert seen == sorted(seen)
        finally:
            over.set()
        pushing.result()
    # Older files go with newer ones.
    assert len(files(machine, store.uid)) == 1
    assert store.view(max_age=0)["w"][0] == store.version
    store.close()


def write(store: Any) -> float:
    """Write into a view as a framework may that shares its memory."""
    w = store.view()["w"]
    with pytest.raises(ValueError, match="read-only"):
        w[0] = 7
    memory = (ctypes.c_double * w.size).from_address(w.ctypes.data)
    alias = np.frombuffer(memory)
    alias[:] = 7
    return float(store.view()["w"].sum())


def test_what_a_process_writes_no_other_one_sees(machine: Client) -> None:
    store = daskps.create({"w": np.ones(N)}, client=machine)
    first, *others = machine.scheduler_info()["workers"]
    assert summed(store)[1] == N
    totals = [machine.submit(summed, store, workers=[w]) for w in others]
    assert {total for _, total in machine.gather(totals)} == {N}
    assert machine.submit(write, store, workers=[first]).result() == 7 * N
    again = machine.gather(
        [machine.submit(summed, store, workers=[w], pure=False) for w in others]
    )
    assert {total for _, total in again} == {N}
    assert summed(store)[1] == store.pull()["w"].sum() == N
    store.close()


@mostly_inside("shards", [1, 3])
def test_a_view_is_a_pull_of_a_quiet_store_by_each_way(way: Any, shards: int) -> None:
    params = {
        "w": np.arange(99.0).reshape(33, 3),
        "h": np.ones(7, "f2"),
        "n": np.eye(2),
    }
    params |= {f"many/{i}": np.full(i % 5, i, "i4") for i in range(200)}
    with daskps.create(params, shards=shards) as s:
        version = s.add({"n": np.eye(2)})
        wanted, found = s.pull(), s.view(min_version=version)
        assert list(found) == list(wanted)
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array, strict=True)
            assert not found[name].flags.writeable
        s.add({"n": np.eye(2)})
        assert s.view()["n"][0, 0] == 2
        assert s.view(max_age=0)["n"][0, 0] == 3


def test_ages(machine: Client) -> None:
    store = daskps.create({"w": np.zeros(3), "b": np.zeros(2)}, client=machine)
    first = store.view()
    assert first["w"] is store.view(max_age="1 hour")["w"] is store.view(max_age=0)["w"]
    store.add({"w": np.ones(3)})
    assert store.view()["w"].tolist() == store.view(max_age=9)["w"].tolist() == [0] * 3
    newest = store.view(max_age=0)
    assert newest["w"].tolist() == [1] * 3
    assert store.view("w").keys() == {"w"}
    assert store.view()["w"] is newest["w"]
    # What somebody holds stays as it is.
    assert first["w"].tolist() == [0] * 3
    # Another process has none: it has the newest first.
    store.add({"w": np.ones(3)})
    worker = next(iter(machine.scheduler_info()["workers"]))
    there = [machine.submit(summed, store, workers=[worker], pure=False) for _ in "ab"]
    assert {total for _, total in machine.gather(there)} == {6}
    for wrong in (-1, True, "soon"):
        with pytest.raises((ValueError, TypeError), match="max_age"):
            store.view(max_age=wrong)
    store.close()


@pytest.mark.parametrize("whole", [False, True])
def test_least_versions_are_waited_for(machine: Client, whole: bool) -> None:
    store = daskps.create({"w": np.zeros(40), "b": np.zeros(2)}, client=machine)
    version = store.add({"w": np.ones(40)})
    assert store.view(min_version=version)["w"].sum() == 40
    asked = daskps.Version.of((shard, 2) for shard, _ in version.pairs)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(store.view, min_version=2 if whole else asked)
        with pytest.raises(TimeoutError):
            store.view(min_version=3, timeout=0.2)
        assert not waits.done()
        assert store.view()["w"].sum() == 40
        store.add({"w": np.ones(40), "b": np.ones(2)})
        assert waits.result()["w"].sum() == 80
    with pytest.raises(ValueError, match="min_version"):
        store.view(min_version=-1)
    store.close()


def error_of(store: Any, **asked: Any) -> str:
    """A task: the error of a view."""
    try:
        store.view(**asked)
    except Exception as error:  # noqa: BLE001 - told by its name
        return type(error).__name__
    return ""


def test_a_store_that_is_gone_has_no_view(machine: Client) -> None:
    store = daskps.create({"w": np.zeros(3)}, client=machine, name="gone")
    copy = pickle.loads(pickle.dumps(store))
    mine = copy.view()
    assert everywhere(machine, error_of, store) == [""] * 4
    store.delete()
    with pytest.raises(StoreClosedError):
        store.view()
    # Another handle hears it from the directory, whatever this process has.
    with pytest.raises(StoreClosedError):
        copy.view()
    assert everywhere(machine, error_of, copy) == ["StoreClosedError"] * 4
    with pytest.raises(StoreNotFoundError):
        daskps.ParameterStore("no-such-uid", "none").view()
    assert mine["w"].tolist() == [0] * 3
    assert files(machine, store.uid) == []


def test_a_lost_shard_is_named_and_what_a_process_has_serves() -> None:
    with dask.config.set(CARRIERS["rpc"]), local_cluster(2) as client:
        owner, other = client.scheduler_info()["workers"]
        store = daskps.create({"w": np.ones(5)}, client=client, servers=[owner])
        has = client.submit(summed, store, workers=[other])
        assert has.result()[1] == 5
        # Each process has a copy where memory is not shared.
        assert store.view()["w"].sum() == 5
        assert files(client, store.uid) == []
        pid = client.submit(os.getpid, workers=[owner]).result()
        os.kill(pid, signal.SIGKILL)
        again = [
            client.submit(error_of, store, workers=[other], pure=False, **asked)
            for asked in ({"max_age": 0, "timeout": 200}, {})
        ]
        assert client.gather(again) == ["ShardLostError", ""]
        fresh = pickle.loads(pickle.dumps(store))
        with pytest.raises(ShardLostError, match="shard 0"):
            fresh.view(max_age=0)


def test_tables_and_names_that_are_none_are_refused(machine: Client) -> None:
    params: Any = {"w": np.ones(3), "e": np.zeros((0, 2)), "s": np.array(2.0)}
    rows = daskps.TableSpec(10, 2)
    with daskps.create({**params, "t": rows}, client=machine) as store:
        found = store.view()
        assert {n: (a.shape, a.dtype) for n, a in found.items()} == {
            n: (a.shape, a.dtype) for n, a in params.items()
        }
        assert list(store.view(["s", "w"])) == ["s", "w"]
        with pytest.raises(UnknownParameterError, match=r"'t' is a table.*pull"):
            store.view("t")
        with pytest.raises(UnknownParameterError, match="no parameter 'v'"):
            store.view(["w", "v"])
    with daskps.create({"t": rows}, client=machine) as store:
        with pytest.raises(LayoutError, match=r"no arrays.*pull"):
            store.view()
        assert files(machine, store.uid) == []


def hang(dask_worker: Any) -> None:
    """Have this process stop for good when it has written a part of a view."""
    making_of: Any = views.Making
    write = making_of.write

    def stop(making: views.Making, parts: Any) -> None:
        write(making, parts)
        Path(f"/tmp/daskps-hangs-{os.getpid()}").touch()
        threading.Event().wait()

    making_of.write = stop


def test_a_worker_killed_while_it_copies_leaves_nothing() -> None:
    with local_cluster(3) as client:
        first, *others = client.scheduler_info()["workers"]
        store = daskps.create({"w": np.ones(N)}, client=client, servers=others)
        pid = client.submit(os.getpid, workers=[first]).result()
        client.run(hang, workers=[first])
        mark = Path(f"/tmp/daskps-hangs-{pid}")
        dies = client.submit(summed, store, workers=[first], pure=False)
        try:
            until(mark.exists)
        finally:
            mark.unlink(missing_ok=True)
        assert len(files(client, store.uid)) == 1
        waits = [client.submit(summed, store, workers=[w], pure=False) for w in others]
        with pytest.raises(TimeoutError, match="another process of this machine"):
            store.view(timeout=0.5)
        assert not any(future.done() for future in waits)
        dies.cancel()
        os.kill(pid, signal.SIGKILL)
        assert {total for _, total in client.gather(waits)} == {N}
        assert len(files(client, store.uid)) == 1
        store.close()
        until(lambda: not files(client, store.uid))


def test_an_owner_killed_while_it_is_read_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its shards are adopted, and the view is made of another cut."""
    with local_cluster(2) as client:
        owner = next(iter(client.scheduler_info()["workers"]))
        store = daskps.create({"w": np.ones(N)}, client=client, servers=[owner])
        pid = client.submit(os.getpid, workers=[owner]).result()
        left, parts = [pid], getattr(caller, PARTS)

        def kill(*about: Any) -> Any:
            if left:
                os.kill(left.pop(), signal.SIGKILL)
            return parts(*about)

        monkeypatch.setattr(caller, PARTS, kill)
        assert store.view()["w"].sum() == N
        assert not left
        assert len(files(client, store.uid)) == 1
        store.close()


def test_workers_without_shards_let_go_of_views() -> None:
    """A worker that a store has no shard on hears of its end from the directory."""
    with local_cluster(2) as client:
        first, other = client.scheduler_info()["workers"]
        store = daskps.create({"w": np.ones(N)}, client=client, servers=[other])
        assert client.submit(summed, store, workers=[first]).result()[1] == N
        assert client.run(held, workers=[first])[first][1] >= 8 * N
        assert client.run(keeps, uid=store.uid) == {first: True, other: False}
        store.close()
        until(lambda: not any(client.run(keeps, uid=store.uid).values()), 60)
        until(lambda: client.run(held, workers=[first])[first] == (0, 0))
        assert files(client, store.uid) == []


def test_files_of_a_killed_worker_are_removed() -> None:
    """Also of a view that is whole: what others have mapped of it stays theirs."""
    with local_cluster(2) as client:
        first, other = client.scheduler_info()["workers"]
        store = daskps.create({"w": np.ones(N)}, client=client, servers=[other])
        pid, _ = client.submit(summed, store, workers=[first]).result()
        mine = store.view()
        assert len(files(client, store.uid)) == 1
        os.kill(pid, signal.SIGKILL)
        until(lambda: not files(client, store.uid))
        assert mine["w"].sum() == N
        assert store.view()["w"] is mine["w"]
        assert client.submit(summed, store, workers=[other]).result()[1] == N
        assert len(files(client, store.uid)) == 1
        store.close()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_asynchronous_clients_await_views(c: Any, *_: Any) -> None:
    store = await daskps.aio.create({"w": np.zeros(5)}, client=c)
    found = await store.view("w")
    assert found["w"].tolist() == [0] * 5
    await store.add({"w": np.ones(5)})
    assert (await store.view())["w"] is found["w"]
    assert (await store.view(max_age=0))["w"].tolist() == [1] * 5
    assert (await c.submit(summed, store))[1] == 5
    await store.close()
    with pytest.raises(StoreClosedError):
        await store.view()


def test_workers_in_one_process_have_one_copy() -> None:
    options: Any = {"processes": False, "dashboard_address": ":0", "n_workers": 2}
    with LocalCluster(threads_per_worker=1, **options) as of, Client(of) as client:
        store = daskps.create({"w": np.ones(N)}, client=client)

        def place(store: Any) -> tuple[str, int]:
            return get_worker().address, store.view()["w"].ctypes.data

        found = everywhere(client, place, store)
        assert len({worker for worker, _ in found}) == 2
        assert {at for _, at in found} == {store.view()["w"].ctypes.data}
        store.close()
        assert store.uid not in views.VIEWS


def test_a_view_of_a_device_store_is_in_host_memory(machine: Client) -> None:
    w = np.arange(10.0)
    with daskps.create({"w": w}, client=machine, device="fake") as store:
        found = everywhere(machine, lambda s: s.view()["w"], store)
        for array in found:
            assert type(array) is np.ndarray
            assert array.tolist() == w.tolist()
        assert len(files(machine, store.uid)) == 1


def test_no_room_is_said_before_anything_is_copied() -> None:
    with (
        dask.config.set({"daskps.memory-share": 1.0}),
        # The store takes about 520 MB of it, and 660 for a moment while it is made: the
        # worker is paused at 80% of its limit, and ended at 95%.
        local_cluster(1, memory_limit="780 MB") as client,
    ):
        store = daskps.create({"w": np.zeros(40_000_000, "f4")}, client=client)
        with pytest.raises(LayoutError, match=r"view .* needs 16\d,\d+,\d+ bytes"):
            client.submit(summed, store, timeout=100).result()
        assert files(client, store.uid) == []
        store.close()


W = np.arange(6.0).reshape(2, 3)


@pytest.fixture
def model(machine: Client) -> Any:
    with daskps.create({"w": W, "b": np.ones(3)}, client=machine) as store:
        yield store


def affine(params: Any, block: Any) -> Any:
    return np.asarray(block) @ params["w"] + params["b"]


def test_predictions_of_arrays(machine: Client, model: Any) -> None:
    data = np.random.default_rng(0).random((100, 2))
    X = da.from_array(data, chunks=(30, 1))
    with machine.as_current():
        y = daskps.predict(model, affine, X, max_age=0)
        assert (y.shape, y.dtype, y.chunks[0]) == ((100, 3), "f8", (30, 30, 30, 10))
        np.testing.assert_allclose(y.compute(), data @ W + 1)
        assert X.compute().shape == (100, 2)
        labels = daskps.predict(model, lambda p, x: affine(p, x).argmax(1), X)
        assert labels.shape == (100,)
        assert labels.compute().tolist() == (data @ W + 1).argmax(1).tolist()
        # Another prediction by newer weights is another one.
        model.assign({"b": np.zeros(3)})
        y = daskps.predict(model, affine, X, max_age=0)
        np.testing.assert_allclose(y.compute(), data @ W)
        picky = daskps.predict(
            model, lambda p, x: [[float(len(x))]] * len(x), X, meta=np.empty((0, 1))
        )
        assert picky.compute()[[0, -1]].tolist() == [[30], [10]]
        assert len(daskps.predict(model, affine, X[:0]).compute()) == 0


def test_predictions_of_frames_and_bags(machine: Client, model: Any) -> None:
    data = pd.DataFrame({"a": np.arange(10.0), "b": 1.0}, index=range(5, 15))
    X = dd.from_pandas(data, npartitions=3)
    wanted = data.to_numpy() @ W + 1
    with machine.as_current():
        found = daskps.predict(model, affine, X).compute()
        pd.testing.assert_frame_equal(found, pd.DataFrame(wanted, index=data.index))
        first = daskps.predict(model, lambda p, x: affine(p, x)[:, 0], X).compute()
        pd.testing.assert_series_equal(first, pd.Series(wanted[:, 0], index=data.index))
        of = daskps.predict(model, lambda p, x: x * p["w"][0, 2], X["a"]).compute()
        pd.testing.assert_series_equal(of, data["a"] * 2)
        told = daskps.predict(model, affine, X, meta=np.empty((0, 3)))
        assert told.columns.tolist() == [0, 1, 2]
        pd.testing.assert_frame_equal(told.compute(), found)
        bag = db.from_sequence(range(10), npartitions=3)
        items = daskps.predict(model, lambda p, x: [i * p["w"][1, 2] for i in x], bag)
        assert items.compute() == [5.0 * i for i in range(10)]


def test_functions_that_do_not_fit_are_refused(machine: Client, model: Any) -> None:
    X = da.ones((4, 2), chunks=2)
    for wrong, why in (
        (lambda p, x: x.sum(), "no rows for 1"),
        (lambda p, x: x[:0], "0 rows for 1"),
        (lambda p, x: p["v"], "KeyError"),
    ):
        with pytest.raises(ValueError, match=why) as raised:
            daskps.predict(model, wrong, X)
        assert "meta=" in str(raised.value)
    with pytest.raises(TypeError, match=r"function\(store.view\(\), X\)"):
        daskps.predict(model, affine, np.ones((4, 2)))
    with pytest.raises(UnknownParameterError, match="no parameter 'v'"):
        daskps.predict(model, affine, X, names="v", meta=np.empty(0))
    with pytest.raises(ValueError, match="max_age"):
        daskps.predict(model, affine, X, max_age=-1, meta=np.empty(0))
    with machine.as_current():
        late = daskps.predict(model, lambda p, x: x[:1, 0], X)
        with pytest.raises(ValueError, match="1 row for 2"):
            late.compute()
