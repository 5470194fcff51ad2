"""A session store goes with its last handle, and not before."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref
from functools import partial

import dask
import numpy as np
import pytest
from dask.distributed import Client

import daskps
from daskps import ArraySpec, TableSpec, optim
from tests.support import gen_cluster, until

ONES = {"w": np.ones(4)}


def made(**kwargs):
    params = {"w": np.zeros(4), "e": TableSpec(8, 2)}
    return daskps.create(params, optimizer=optim.SGD(1.0), **kwargs)


def is_there(uid):
    return uid in {info.uid for info in daskps.list_stores()}


def is_freed(uid):
    return until(lambda: not is_there(uid))


def used(store):
    """Call a store in many ways; none of them may keep its handle."""
    store.push(ONES)
    store.pull(out={"w": np.empty(4)})
    store["w"].pull()
    store["e"].push([1], np.ones((1, 2)))
    store["e"].pull([1])
    store.push_async(ONES).result()
    store["w"].norm()
    store.apply(lambda block, name: block)
    store.stats()
    repr(store), store._repr_html_()
    with pytest.raises(daskps.PushRejectedError):
        store.push({"w": np.full(4, np.nan)})
    return store


@pytest.fixture
def no_garbage():
    """Handles go by their references alone."""
    gc.disable()
    yield
    gc.enable()


HANDLES = {
    "store": lambda s: s,
    "array": lambda s: s["w"],
    "region": lambda s: s["w"].region(0, 2),
    "table": lambda s: s["e"],
    "bound": lambda s: s.bound(),
    "replica": lambda s: s.replica(every=2),
    "method": lambda s: s.pull,
    "call": lambda s: s.pull_async(min_version=100),
    "run": lambda s: daskps.run(s, lambda trainer, part: None, [0]) and s["w"],
}


@pytest.mark.parametrize("kind", HANDLES)
def test_a_store_goes_with_its_last_handle(client, no_garbage, kind):
    store = used(made())
    uid, name = store.uid, store.name
    assert repr(store).endswith("; freed with its last handle>")
    handle = HANDLES[kind](store)
    del store
    assert is_there(uid)
    if kind == "call":
        # It waits for what others push.
        assert not handle.done()
        daskps.ParameterStore(uid, name).assign({"w": np.ones(4)})
        handle.cancel()
    del handle
    is_freed(uid)


def test_a_cell_that_runs_again_leaves_one_store(client, no_garbage):
    uids = []
    for _ in range(3):
        store = used(made())
        uids.append(store.uid)
    until(lambda: [is_there(uid) for uid in uids] == [False, False, True])
    assert store.pull("w")["w"].tolist() == [-2.0] * 4


@pytest.mark.parametrize(
    "how",
    [
        pickle.dumps,
        copy.copy,
        lambda s: pickle.dumps({"rows": s["e"]}),
        lambda s: Client.current().submit(lambda h: h.version, s).result(),
        lambda s: Client.current().submit(lambda: s.version).result(),
        lambda s: Client.current().scatter(s),
    ],
    ids=["pickle", "copy", "table", "argument", "closure", "scattered"],
)
def test_a_pickled_handle_keeps_the_store(client, how):
    store = made()
    uid = store.uid
    how(store)
    assert repr(store).endswith("; freed with its client>")
    assert "freed with its client" in store._repr_html_()
    del store
    gc.collect()
    # What would free it is in the same queue before this question.
    assert is_there(uid)
    other = daskps.ParameterStore(uid, "again")
    assert other.add(ONES) == 1
    other.close()
    assert not is_there(uid)


def test_a_kept_store_goes_with_its_client(client):
    with Client(client.scheduler.address, set_as_default=False) as other:
        store = made(client=other)
        uid = store.uid
        pickle.dumps(store)
        del store
        assert is_there(uid)
    is_freed(uid)
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None


def adding_to(other):
    def gradient(params, X, y):
        other.add(ONES)
        return {"w": params["w"] * 0 + 1}

    return gradient


def loop_with(other, trainer, part):
    trainer.push({"w": np.ones(4)})
    return int((part or other).add(ONES))


@pytest.mark.parametrize("execution", ["resident", "graph"])
def test_runs_keep_what_they_use_and_no_longer(client, no_garbage, execution):
    """Also handles that functions and parts of the user's bring to trainers."""
    stores = [made(), made()]
    uids = [store.uid for store in stores]
    gradient = adding_to(stores[1])

    def drop(epoch):
        stores.clear()
        gc.collect()
        assert all(map(is_there, uids))

    result = daskps.train(
        stores[0],
        gradient,
        np.ones((4, 4)),
        np.ones(4),
        batch_size=2,
        trainers=2,
        epochs=2,
        execution=execution,
        callbacks=[],
        stop=lambda history: drop(history[-1]),
    )
    assert result.weights["w"].tolist() == [-2.0] * 4
    is_freed(uids[0])
    assert int(daskps.ParameterStore(uids[1], "other").version) == 4
    del gradient
    gc.collect()
    is_freed(uids[1])


def test_parts_of_a_run_do_not_count(client):
    first, second, third = made(), made(), made()
    uids = [first.uid, second.uid, third.uid]
    loop = partial(loop_with, second)
    assert daskps.run(first, loop, [None, third]) == [1, 1]
    assert "last handle" in repr(second)
    assert "last handle" in repr(third)
    del first, second, third, loop
    gc.collect()
    assert [is_freed(uid) for uid in uids]


def test_a_snapshot_outlives_its_store(client, no_garbage):
    store = made()
    store.add(ONES)
    uid, snap, array = store.uid, store.snapshot(), store["w"].to_dask_array()
    del store
    is_freed(uid)
    assert snap["w"].sum().compute() == 4
    assert array.sum().compute() == 4


def test_a_save_goes_on_without_a_handle(client, tmp_path):
    store = made()
    store.add(ONES)
    uid, saving = store.uid, store.save(str(tmp_path), wait=False)
    del store
    assert saving.result().version == 1
    del saving
    gc.collect()
    is_freed(uid)
    assert daskps.restore(str(tmp_path))["w"].pull().tolist() == [1.0] * 4


def test_other_threads_let_go_too(client, no_garbage):
    stores = [made() for _ in range(8)]
    uids = [store.uid for store in stores]

    def drop():
        while stores:
            stores.pop()

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [is_freed(uid) for uid in uids]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_frees_nothing(client):
    store = made()
    uid = store.uid
    if not (child := os.fork()):
        del store
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert is_there(uid)
    assert store.add(ONES) == 1


def test_a_task_may_make_a_store_and_return_it(client):
    """Its worker's client has made it; who gets it has it as long as that lives."""

    def make():
        kept, gone = made(), made()
        return gone.uid, kept

    gone, kept = client.submit(make).result()
    is_freed(gone)
    gc.collect()
    assert kept.add(ONES) == 1
    kept.close()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_asynchronous_clients(c, s, a):
    store = await made()
    stores = s.extensions["daskps-directory"].stores
    uid, pending = store.uid, store.push(ONES)
    del store
    gc.collect()
    assert await pending == 1
    del pending
    gc.collect()
    while uid in stores:
        await daskps.aio.list_stores()
    async with daskps.aio.create({"w": np.zeros(4)}) as store:
        assert await store.add(ONES) == 1
    assert store.uid not in stores


def test_no_room_collects_garbage_first(client, no_garbage):
    limit = min(w["memory_limit"] for w in client.scheduler_info()["workers"].values())
    big = {"w": ArraySpec((1000,), "f8")}
    with dask.config.set({"daskps.memory-share": 1_000_000 / limit}):
        store = daskps.create(big)
        cycle: list[object] = [store]
        cycle.append(cycle)
        gone, name, uid = weakref.ref(store), store.name, store.uid
        with pytest.raises(daskps.LayoutError) as caught:
            cycle.extend(daskps.create(big) for _ in iter(int, 1))
        said = str(caught.value)
        assert "session stores that this client has made before" in said
        assert f"handles: {name!r} (" in said
        # The traceback has none of them.
        caught.value.__traceback__ = None
        del store, cycle, caught
        # Nobody has looked for the cycle yet.
        assert gone() is not None
        assert is_there(uid)
        store = daskps.create(big)
        assert gone() is None
        assert not is_there(uid)
        assert store.pull("w")["w"].sum() == 0


def test_the_end_of_the_interpreter_says_nothing(tmp_path):
    script = tmp_path / "it.py"
    script.write_text(
        "import numpy as np, daskps\n"
        "from distributed import Client\n"
        "client = Client(processes=False, dashboard_address='127.0.0.1:0')\n"
        "store = daskps.create({'w': np.zeros(2)})\n"
        "cycle = [daskps.create({'w': np.zeros(2)})]\n"
        "cycle.append(cycle)\n"
        "pending = store.pull_async(min_version=9)\n"
    )
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "")
    assert "Traceback" not in ran.stderr
