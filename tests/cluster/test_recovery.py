"""Stores that are restored where a shard is lost, in real processes that are killed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask
import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.errors import StoreRestoredError
from daskps.testing import kill_worker
from tests.support import PATIENCE, local_cluster, until


@pytest.fixture
def apart():
    """The same as between machines: what a worker held goes with it."""
    with (
        dask.config.set({"daskps.carriers.machine": False}),
        local_cluster(n_workers=3, threads=1) as client,
    ):
        yield client


def made(url: Any, **options: Any) -> Any:
    options = {"optimizer": optim.SGD(0.1), "recover_from": url, **options}
    store = daskps.create({"w": np.zeros(40)}, **options)
    push(store)
    store.save(url)
    return store


def push(store: Any) -> Any:
    return store.push({"w": np.ones(40)})


def pulled(store: Any) -> str:
    """In a task: what a handle that has come there reads, or what it says first."""
    try:
        store.pull()
    except StoreRestoredError as error:
        return error.uid
    return ""


def test_a_task_restores_it_where_no_other_thread_is_free(apart, tmp_path):
    """It steps aside, for what is made anew needs tasks; then all go on."""
    first, second, _ = apart.nthreads()
    store = made(tmp_path, servers=[first, second])
    kill_worker(apart, first)
    others = [w for w in apart.nthreads() if w != first]
    ask = lambda w: apart.submit(pulled, store, workers=[w], pure=False)  # noqa: E731
    found = apart.gather([ask(w) for w in others])
    # All of the same, also those that came when it was restored.
    assert len(set(found)) == 1
    assert "" not in found
    # By now these processes know.
    assert apart.gather([ask(w) for w in others]) == [""] * len(others)
    with pytest.raises(StoreRestoredError) as caught:
        push(store)
    assert caught.value.uid in found
    assert push(store) == 2
    assert apart.gather([ask(w) for w in others]) == [""] * len(others)
    store.close()


def hang() -> None:
    """In a worker: never come to an end with a store that is made of a checkpoint."""
    import asyncio

    from daskps.cluster.caller import creation

    async def install(*_: Any) -> None:
        await asyncio.Event().wait()

    vars(creation)["install"] = install


def test_who_restores_it_is_killed(apart, tmp_path):
    """Whoever waits does it, as soon as the scheduler knows."""
    first, second, third = apart.nthreads()
    store = made(tmp_path, servers=[first], name="model")
    apart.run(hang, workers=[second])
    kill_worker(apart, first)
    task = apart.submit(pulled, store, workers=[second])
    events = lambda: [e["action"] for _, e in apart.get_events("daskps")]  # noqa: E731
    until(lambda: "store-recovering" in events())
    pull = store.pull_async(timeout=PATIENCE)
    kill_worker(apart, second)
    with pytest.raises(StoreRestoredError):
        pull.result()
    task.cancel()
    assert events().count("store-recovering") == 2
    assert push(store) == 2
    assert [info.name for info in daskps.list_stores()] == ["model"]
    assert third in apart.nthreads()
    store.delete()


def gradient(params: Any, X: Any, y: Any) -> Any:
    error = X @ params["v"] - y
    return float(error @ error) / len(y), {"v": X.T @ error / len(y)}


class Killer:
    """Kills an owner at the end of the third epoch, while trainers wait there."""

    def __init__(self, client: Any, folder: Any, store: Any) -> None:
        self.client, self.folder, self.store = client, folder, store
        self.victim = ""

    def stop(self, history: Any) -> bool:
        if len(history) == 3 and not self.victim:
            # The first save may still be under way.
            until(lambda: [*self.folder.glob("*/manifest.json")])
            self.victim = self.store.placement[0]
            kill_worker(self.client, self.victim)
        return False


@pytest.mark.parametrize("execution", ["resident", "graph"])
def test_a_run_goes_on_with_the_same_bits(apart, tmp_path, execution):
    """From its last checkpoint, when it is called again; history and all."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(25, 5))
    y = X @ np.arange(5)
    workers = [*apart.nthreads()]
    about: Any = {"batch_size": 3, "trainers": 3, "execution": execution}

    def create(**options: Any) -> Any:
        start = {"v": np.zeros(5)}
        return daskps.create(start, optimizer=optim.Adam(0.01), **options)

    with create(shards=2) as store:
        expected = daskps.train(store, gradient, X, y, epochs=6, **about)
    store = create(shards=2, servers=workers[:2], recover_from=tmp_path, name="v")
    killer, where = Killer(apart, tmp_path, store), daskps.Checkpoints(tmp_path)
    go_on: Any = {"epochs": 6, "checkpoint": where, "resume": True, **about}
    with pytest.raises(StoreRestoredError) as caught:
        daskps.train(store, gradient, X, y, stop=killer.stop, **go_on)
    assert caught.value.worker == killer.victim
    assert caught.value.version == store.version
    result = daskps.train(store, gradient, X, y, **go_on)
    assert result.weights["v"].tobytes() == expected.weights["v"].tobytes()
    assert result.version == expected.version
    assert [e.epoch for e in result.history] == list(range(6))
    store.delete()


def test_no_store_is_recovered_from_the_memory_of_another_process(client):
    daskps.create({"w": np.zeros(3)}, name="there")
    for again in (False, True):
        with pytest.raises(daskps.CheckpointError, match="does not see there what"):
            daskps.create(
                {"w": np.ones(3)},
                name="there" if again else "new",
                overwrite=again,
                recover_from="memory://here",
            )
    assert [info.name for info in daskps.list_stores()] == ["there"]
    assert daskps.open("there")["w"].pull().tolist() == [0, 0, 0]


class AccidentError(Exception):
    """What a gradient raises."""


class Fails:
    """A gradient that raises once: where a shard was lost, and restored, meanwhile."""

    def __init__(self, folder: Any) -> None:
        self.waits, self.goes_on = folder / "waits", folder / "goes-on"

    def __call__(self, params: Any, X: Any, y: Any) -> Any:
        if self.waits.exists() and not self.goes_on.exists():
            until(self.goes_on.exists)
            raise AccidentError
        return gradient(params, X, y)


@pytest.mark.parametrize("is_told", [False, True])
def test_a_run_is_not_tried_again_on_a_restored_store(apart, tmp_path, is_told):
    """It ends with what was lost, also where its handle was told before: what came after
    the checkpoint would be gone in silence. Called again it goes on to the same
    bits."""
    X = np.random.default_rng(1).normal(size=(25, 5))
    y = X @ np.arange(5)
    first, _, third = apart.nthreads()
    about: Any = {"batch_size": 3, "trainers": 1, "workers": [third]}

    def create(**options: Any) -> Any:
        start = {"v": np.zeros(5)}
        return daskps.create(start, optimizer=optim.Adam(0.01), **options)

    with create() as store:
        expected = daskps.train(store, gradient, X, y, epochs=5, **about)
    saved = tmp_path / "saved"
    store = create(servers=[first], recover_from=saved, name="v")
    where, fails = daskps.Checkpoints(saved), Fails(tmp_path)

    def restored() -> None:
        until(fails.waits.exists)
        kill_worker(apart, first)
        with pytest.raises(StoreRestoredError):
            (store if is_told else daskps.open("v")).pull()
        fails.goes_on.touch()

    def stop(history: Any) -> bool:
        if len(history) == 3:
            until(lambda: [*saved.glob("*/manifest.json")])
            fails.waits.touch()
        return False

    go_on: Any = {
        "retries": 1,
        "epochs": 5,
        "resume": True,
        "checkpoint": where,
        **about,
    }
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(restored)
        with pytest.raises(StoreRestoredError):
            daskps.train(store, fails, X, y, stop=stop, **go_on)
        lost.result()
    store.pull()
    result = daskps.train(store, fails, X, y, **go_on)
    assert result.stats.retried_runs == 0
    assert result.weights["v"].tobytes() == expected.weights["v"].tobytes()
    assert result.version == expected.version
    assert [entry.epoch for entry in result.history] == [0, 1, 2, 3, 4]
    store.delete()
