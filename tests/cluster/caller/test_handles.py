"""Handles travel: how large they are, what they equal, how often their tasks run."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from dask.delayed import delayed
from distributed.protocol import pickle as dask_pickle

import daskps
from daskps import optim


@pytest.fixture
def counted(client):
    """A store whose value counts additions."""
    with daskps.create({"w": np.zeros(4)}, optimizer=optim.SGD(1.0)) as s:
        yield s


def add_one(store):
    store.add({"w": np.ones(4)})


@pytest.mark.parametrize("pickler", [pickle, dask_pickle])
def test_pickle_is_light(client, pickler):
    """Below 1 kB, also with many parameters of long names, used or not."""
    params = {f"{'n' * 10_000}{i}": np.zeros(2, "f4") for i in range(1000)}
    with daskps.create(params, name="é" * 100, overwrite=True) as s:
        s.pull()
        s.add({n: np.ones(2, "f4") for n in params})
        assert len(pickler.dumps(s)) < 1000
        again = pickle.loads(pickler.dumps(s))
        assert len(again) == 1000
        assert len(pickler.dumps(again)) < 1000
        s.delete()


def test_parameter_travels(counted, client):
    """A parameter is as usable in a task as its store."""
    found = client.submit(lambda p: (p.pull(), p[1:3], p.shape), counted["w"]).result()
    np.testing.assert_array_equal(found[0], np.zeros(4))
    assert found[1].shape == (2,)
    assert found[2] == (4,)


def test_equality_is_of_the_store(counted):
    same = pickle.loads(pickle.dumps(counted))
    with daskps.create({"w": np.zeros(4)}) as other:
        assert counted == same == counted.bound()
        assert counted != other
        assert counted != counted.uid
        assert len({counted, same, other}) == 2


def closure(store):
    def task():
        add_one(store)

    return task


def by_argument(client, store):
    return client.submit(add_one, store)


def by_keyword(client, store):
    return client.submit(add_one, store=store)


def in_a_list(client, store):
    return client.submit(lambda stores: add_one(stores[0]), [store])


def by_closure(client, store):
    return client.submit(closure(store))


def by_method(client, store):
    return client.submit(store.add, {"w": np.ones(4)})


def by_method_of_parameter(client, store):
    return client.submit(store["w"].add, np.ones(4))


def by_parameter(client, store):
    return client.submit(lambda p: p.add(np.ones(4)), store["w"])


def by_map(client, store):
    return client.map(add_one, [store])[0]


def by_delayed(client, store):
    return client.compute(delayed(add_one)(store))


def by_delayed_pure(client, store):
    return client.compute(delayed(add_one, pure=True)(store))


CARRIERS = [
    by_argument,
    by_keyword,
    in_a_list,
    by_closure,
    by_method,
    by_method_of_parameter,
    by_parameter,
    by_map,
    by_delayed,
    by_delayed_pure,
]


@pytest.mark.parametrize("submit", CARRIERS)
def test_two_equal_submits_run_twice(counted, client, submit):
    futures = [submit(client, counted) for _ in range(2)]
    client.gather(futures)
    assert futures[0].key != futures[1].key
    np.testing.assert_array_equal(counted["w"].pull(), 2.0)


def test_one_closure_submitted_twice_runs_twice(counted, client):
    """Also the very same function object."""
    task = closure(counted)
    futures = [client.submit(task) for _ in range(2)]
    client.gather(futures)
    np.testing.assert_array_equal(counted["w"].pull(), 2.0)


def test_handle_in_a_graph(counted, client):
    """In a dask array's and a delayed graph, as a constant of many tasks."""
    import dask.array as da

    x = da.arange(8, chunks=2).map_blocks(add_block, counted, dtype="f8")
    assert x.compute().shape == (8,)
    np.testing.assert_array_equal(counted["w"].pull(), np.full(4, 28.0))


def add_block(block, store):
    if block.size:
        store.add({"w": np.full(4, float(block.sum()))})
    return block.astype("f8")


def test_scattered_handle(counted, client):
    future = client.scatter(counted)
    client.gather([client.submit(add_one, future, pure=False) for _ in range(3)])
    np.testing.assert_array_equal(counted["w"].pull(), 3.0)


def test_handle_returned_by_a_task(counted, client):
    """It comes back equal, and binds to this process."""
    back = client.submit(lambda s: s, counted).result()
    assert back == counted
    assert back.name == counted.name
    np.testing.assert_array_equal(back["w"].pull(), 0.0)


def create_inside():
    s = daskps.create({"w": np.arange(3.0)}, name="made inside", overwrite=True)
    s.add({"w": np.ones(3)})
    return s


def test_store_created_inside_a_task(client):
    s = client.submit(create_inside).result()
    np.testing.assert_array_equal(s["w"].pull(), [1, 2, 3])
    np.testing.assert_array_equal(daskps.open("made inside")["w"].pull(), [1, 2, 3])
    s.delete()


def unbound_thread(store):
    """Use a handle from a thread that Dask knows nothing of."""
    import threading

    thread = threading.Thread(target=add_one, args=(store,))
    thread.start()
    thread.join()


def test_unbound_handle_in_a_thread_of_a_task(counted, client):
    client.submit(unbound_thread, counted).result()
    np.testing.assert_array_equal(counted["w"].pull(), 1.0)


def push_by_bound(store):
    """Push as this task, from two threads and the task itself, through one identity."""
    import threading

    bound = store.bound()
    threads = [threading.Thread(target=add_one, args=(bound,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    add_one(bound)
    for thread in threads:
        thread.join()
    add_one(store)


def test_bound_handle_pushes_as_its_task(counted, client):
    client.submit(push_by_bound, counted).result()
    np.testing.assert_array_equal(counted["w"].pull(), 4.0)
    found = client.run(producers_of, counted.uid)
    assert set(itertools.chain(*found.values())) == {1}


def producers_of(uid, dask_worker):
    from daskps.cluster.host.node import HOSTS
    from daskps.shards.memory.format import N_PRODUCERS

    hosted_shards = HOSTS[dask_worker.address].shards.items()
    found = [hosted for (store, _), hosted in hosted_shards if store == uid]
    return [int(s.shard.segment.current.fixed[N_PRODUCERS]) for s in found]
