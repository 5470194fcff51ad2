"""Stores that are restored where a shard is lost, as their users see it."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.checkpoint.manifest import MANIFEST
from daskps.checkpoint.storage import Storage
from daskps.cluster.caller import creation
from daskps.cluster.caller.link import using
from daskps.cluster.directory import entry
from daskps.errors import CheckpointError, ShardLostError, StoreRestoredError
from tests.inprocess import Site, WayIn, cluster
from tests.seams import left_behind
from tests.support import until

#: Makes the shards of a store that is restored.
INSTALL = creation.install

#: Hosts write and read files in threads of their own.
pytestmark = pytest.mark.leaky


@pytest.fixture
def here(monkeypatch) -> Any:
    # Who is lost is lost at once where memory is private.
    monkeypatch.setattr(entry, "AGAIN_SECONDS", 0.0)
    with cluster(4) as made:
        yield made
        # What a call has left behind ends before its event loop.
        until(lambda: not left_behind(made.link))


class Halved(optim.Rule):
    """A rule of a user's own."""

    slots = ("m",)

    def __init__(self, lr):
        self.lr = lr

    @staticmethod
    def prepare(step, lr):
        return (lr,)

    @staticmethod
    def update(w, g, m, lr):
        m = m * 0.5 + g
        return w - lr * m, m


def filled(url, **options):
    """A store with all kinds of parameters, on three of four workers."""
    params = {
        "w": np.arange(12.0).reshape(3, 4),
        "emb": daskps.TableSpec(7, 2, init=1.0),
        "any": daskps.TableSpec(None, 3, init=daskps.init.normal(0.0, 1.0)),
    }
    rules = {"w": optim.Adam(0.1), "*": optim.Adagrad(0.1)}
    options = {"optimizer": rules, "shards": 3, **options}
    store = daskps.create(params, recover_from=url, **options)
    for i in range(3):
        push(store, i)
    return store


def push(store, i):
    rng = np.random.default_rng(i)
    ids = rng.integers(-50, 50, 4)
    return store.push(
        {
            "w": rng.normal(size=(3, 4)),
            "emb": daskps.RowGrad([i % 6, 6], np.ones((2, 2), "f4")),
            "any": daskps.RowGrad(ids, np.ones((4, 3), "f4")),
        }
    )


def state(store):
    ids = np.arange(-60, 60)
    dense = {"w": store["w"].pull(), "emb": store["emb"].pull(np.arange(7))}
    found = {**dense, "any": store["any"].pull(ids)}
    return {name: values.tobytes() for name, values in found.items()}


def raises_once(call):
    """The one error that a call ends with, before it is answered."""
    with pytest.raises(StoreRestoredError) as caught:
        call()
    call()
    return caught.value


def test_a_store_whose_two_copies_went_comes_back_with_two(here, tmp_path):
    store = filled(tmp_path, copies=2, shards=1)
    store.save(tmp_path)
    before = state(store)
    (entry,) = here.directory.stores.values()
    here.end(store.placement[0], entry.copies[0].worker)
    raises_once(store.pull)
    assert state(store) == before
    (again,) = here.directory.stores.values()
    until(lambda: 0 in again.copies and again.copies[0].counts)
    here.end(store.placement[0])
    assert state(store) == before


@pytest.mark.parametrize("name", ["model", None])
def test_a_lost_store_goes_on_from_its_last_checkpoint(here, tmp_path, name):
    """With its optimizers and rows to the last bit, under the same name and kind."""
    store = filled(tmp_path, name=name)
    info, before = store.save(tmp_path), state(store)
    view, table = store["w"], store["any"]
    other = pickle.loads(pickle.dumps(store))
    other.pull()
    since = table.pull_changed().since
    for i in range(3, 8):
        push(store, i)
    victim = store.placement[1]
    here.end(victim)
    error = raises_once(lambda: push(store, 3))
    assert (error.store, error.shard, error.worker) == (store.name, 1, victim)
    assert (error.checkpoint, error.version, error.time) == (
        (info.url, 3, info.time.replace(microsecond=0))
    )
    # Of the push that has ended with it the shards that live may know as well.
    assert 5 <= error.lost <= 6
    assert victim not in store.placement
    assert store.version == 4
    twin = daskps.restore(tmp_path)
    assert state(twin) == before
    push(twin, 3)
    assert state(store) == state(twin)
    assert view.pull().tobytes() == twin["w"].pull().tobytes()
    # Of what is changed since then nobody knows: it may have been taken back.
    changes = table.pull_changed(since)
    assert not changes.complete
    assert set(changes.ids) == set(table.ids())
    # Another handle hears of it as well, and both are the same store.
    assert raises_once(other.pull).uid == store.uid == other.uid
    assert store == other
    assert len({store, other}) == 1
    # One that comes here later does not: this process knows it.
    pickle.loads(pickle.dumps(store)).pull()
    if name:
        assert daskps.open(name) == store
        assert [info.name for info in daskps.list_stores()].count(name) == 1
        store.delete()
    else:
        store.close()
    with pytest.raises(daskps.StoreClosedError):
        other.pull()
    twin.close()
    assert not here.directory.stores


def test_each_process_hears_it_once_by_handles_that_come_there(here, tmp_path):
    """A handle in a task brings what its sender knew."""
    store = filled(tmp_path)
    store.save(tmp_path)
    sent = pickle.dumps(store)
    here.end(store.placement[0])
    raises_once(store.pull)
    link = here._links[store.placement[0]]
    heard = []
    with using(link):
        for _ in range(3):
            try:
                pickle.loads(sent).pull()
            except StoreRestoredError as error:
                heard.append(error.uid)
        # From somebody who knows.
        pickle.loads(pickle.dumps(store)).pull()
    assert heard == [store.uid]
    store.close()


def test_one_restores_it_for_all_who_wait(here, tmp_path, monkeypatch):
    """Also for those that only read, and for futures."""
    store = filled(tmp_path)
    store.save(tmp_path)
    handles = [store] + [pickle.loads(pickle.dumps(store)) for _ in range(5)]
    for handle in handles:
        handle.pull()
    made, create = [], creation.create

    async def counted(*args):
        made.append(await create(*args))
        return made[-1]

    monkeypatch.setattr(creation, "create", counted)
    here.end(store.placement[2])
    calls: list[Any] = [
        handles[0].snapshot,
        lambda: push(handles[1], 9),
        handles[2].pull,
        lambda: handles[3].pull_async().result(),
        lambda: handles[4].save(tmp_path),
        lambda: handles[5].versions,
    ]
    errors: list[Any] = [None] * len(calls)

    def call(i):
        with using(here.link):
            try:
                calls[i]()
            except StoreRestoredError as error:
                errors[i] = error.uid

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [meta.uid for meta in made] == list(set(errors)) == [store.uid]
    assert {handle.version for handle in handles} == {3}
    store.close()


@pytest.mark.parametrize("silent", [True, False])
def test_lost_again_while_it_is_restored(here, tmp_path, monkeypatch, silent):
    """The next owners are others; then it is lost once more, and restored once more.

    Nobody waits for what a dead worker has to say: Dask tries to reach one for 30 s.
    """
    store = filled(tmp_path, shards=2)
    store.save(tmp_path)
    before, install = state(store), INSTALL
    ended: list[str] = []

    async def dying(link, meta, source, *more):
        if not ended:
            ended.append(meta.owners[0])
            await asyncio.to_thread(here.end, ended[0], silent=silent)
        return await install(link, meta, source, *more)

    monkeypatch.setattr(creation, "install", dying)
    here.end(store.placement[0])
    raises_once(store.pull)
    assert ended
    assert state(store) == before
    here.end(store.placement[0])
    other = raises_once(store.pull)
    assert state(store) == before
    assert other.lost == 0
    store.close()


def test_who_restores_it_dies(here, tmp_path, monkeypatch):
    """Another one does, who has waited for it."""
    store = filled(tmp_path, shards=1)
    store.save(tmp_path)
    install, began, go_on = INSTALL, threading.Event(), asyncio.Event()

    async def slow(link, meta, source, *more):
        if link is not here.link:
            began.set()
            await go_on.wait()
        return await install(link, meta, source, *more)

    monkeypatch.setattr(creation, "install", slow)
    sent, site = pickle.dumps(store), Site(here, "another-client")
    here.scheduler.clients[site.id] = here.scheduler.clients[here.client.id]
    other = WayIn(site, is_worker=False)
    here.end(store.placement[0])
    errors: list[Exception] = []

    def call():
        with using(other):
            try:
                pickle.loads(sent).pull()
            except daskps.DaskPSError as error:
                errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert began.wait(60)
    waiting = store.pull_async()

    async def leave() -> None:
        here.directory.client_left(site.id)
        go_on.set()

    asyncio.run_coroutine_threadsafe(leave(), here.loop.asyncio_loop).result()
    with pytest.raises(StoreRestoredError):
        waiting.result()
    thread.join()
    assert [type(error) for error in errors] == [StoreRestoredError]
    assert store.version == 3
    # What the first one had begun is gone.
    assert [*here.directory.stores] == [store.uid]
    store.close()


def test_a_store_that_is_deleted_meanwhile_stays_deleted(here, tmp_path, monkeypatch):
    store = filled(tmp_path, name="gone")
    store.save(tmp_path)
    install = INSTALL
    other = pickle.loads(pickle.dumps(store))

    async def deleting(link, meta, source, *more):
        await asyncio.to_thread(lambda: using_link(other.delete))
        return await install(link, meta, source, *more)

    def using_link(call):
        with using(here.link):
            call()

    monkeypatch.setattr(creation, "install", deleting)
    here.end(store.placement[0])
    with pytest.raises(daskps.StoreClosedError, match="was deleted"):
        store.pull()
    assert not here.directory.stores
    assert not any(host.shards for host in here.hosts)


def test_a_call_whose_time_is_over_leaves_it_to_go_on(here, tmp_path, monkeypatch):
    store = filled(tmp_path)
    store.save(tmp_path)
    install, go_on = INSTALL, asyncio.Event()

    async def slow(*args):
        await go_on.wait()
        return await install(*args)

    monkeypatch.setattr(creation, "install", slow)
    here.end(store.placement[0])
    with pytest.raises(TimeoutError, match="restored from its last checkpoint"):
        store.pull(timeout=0.2)
    here.loop.add_callback(go_on.set)
    raises_once(store.pull)
    store.close()


def test_without_a_checkpoint_it_stays_lost_and_says_why(here, tmp_path):
    """What is left of it can be read, and one may be saved elsewhere."""
    store = filled(tmp_path, optimizer={"w": optim.SGD(0.1), "*": optim.SGD(0.1)})
    other = daskps.create({"w": np.zeros(3)}, name="other")
    other.save(tmp_path)
    victim = store.placement[0]
    here.end(victim)
    for _ in range(2):
        with pytest.raises(ShardLostError, match="never saved there") as caught:
            store.pull()
        assert type(caught.value) is ShardLostError
        assert (caught.value.shard, caught.value.worker) == (0, victim)
    store.close()
    other.delete()


@pytest.mark.parametrize("path", [MANIFEST, "weights/w/c/0/0"])
def test_a_damaged_checkpoint_is_named_and_no_older_one_taken(here, tmp_path, path):
    store = filled(tmp_path)
    store.save(tmp_path)
    push(store, 3)
    newest = tmp_path / store.save(tmp_path).url.rpartition("/")[2] / path
    whole = newest.read_bytes()
    newest.write_bytes(whole[:9] + bytes([whole[9] ^ 1]) + whole[10:])
    here.end(store.placement[1])
    with pytest.raises(ShardLostError, match=path.rpartition("/")[2]) as caught:
        store.pull()
    assert type(caught.value) is ShardLostError
    assert "failed: CheckpointError" in str(caught.value)
    assert [*here.directory.stores] == [store.uid]
    # Mended, it is loaded.
    newest.write_bytes(whole)
    assert raises_once(store.pull).version == 4
    store.close()


def test_a_rule_of_ones_own_is_known_to_who_restores_it(here, tmp_path):
    store = filled(tmp_path, optimizer=Halved(0.1), name="own")
    store.save(tmp_path)
    before = state(store)
    here.end(store.placement[0])
    raises_once(store.pull)
    assert state(store) == before
    assert "Halved" in store.optimizer["w"]
    push(store, 3)
    store.delete()


def test_what_is_placed_stays_so_where_its_workers_live(here, tmp_path):
    a, b, c, _ = here.scheduler.workers
    on = {"w": a, "emb": [a, b], "any": [c]}
    store = filled(tmp_path, shards=4, placement=on)
    store.save(tmp_path)
    before = state(store)
    here.end(a)
    raises_once(store.pull)
    assert state(store) == before
    owners, layout = store.placement, store.layout
    names = [p.name for p in layout.parameters] + [t.name for t in layout.tables]
    placed = {
        names[index]: {owners[shard] for shard in shards}
        for shards, indices in layout.to_wire()["placed"]
        for index in indices
    }
    assert placed == {"emb": {b}, "any": {c}}
    # Those that are gone may come back another time.
    [(first, _), *_] = here.directory.stores[store.uid].asked_placement
    assert first == (a,) or first == [a]
    store.close()


def test_a_restored_store_keeps_to_it(here, tmp_path):
    first = filled(tmp_path / "one")
    first.save(tmp_path / "one")
    store = daskps.restore(tmp_path / "one", recover_from=tmp_path / "two")
    push(store, 3)
    store.save(tmp_path / "two")
    push(store, 4)
    here.end(store.placement[0])
    assert raises_once(store.pull).version == 4
    store.close()


def test_secrets_are_shown_to_nobody(here, caplog):
    """Neither those of the URL nor options, in errors, events, logs and reprs."""
    url, options = "memory://recovering?token=hush", {"secret": "hush"}
    caplog.set_level("DEBUG", "daskps")
    store = filled(url, storage_options=options, name="secret")
    told = []
    here.end(store.placement[0])
    with pytest.raises(ShardLostError, match="never saved there") as caught:
        store.pull()
    told.append(str(caught.value))
    store.delete()
    store = filled(url, storage_options=options, name="secret")
    store.save(url, storage_options=options)
    here.end(store.placement[0])
    told.append(str(raises_once(store.pull)))
    told += [repr(here.directory.stores[store.uid]), str(here.scheduler.events)]
    assert "hush" not in " ".join([*told, caplog.text])
    assert all("memory://recovering" in error for error in told[:2])
    # The next one to restore it is told.
    assert "hush" in here.directory.stores[store.uid].recover_from[1]
    store.delete()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"recover_from": 7}, TypeError, "a URL is a str or a path"),
        ({"recover_from": ""}, ValueError, "expected a URL"),
        ({"recover_from": "s3x://bucket"}, CheckpointError, "cannot reach s3x"),
        ({"recover_from": "/dev/null/here"}, CheckpointError, "cannot write"),
        ({"storage_options": {"key": "x"}}, ValueError, "recover_from"),
        (
            {"recover_from": "memory://x", "storage_options": {"key": object()}},
            TypeError,
            "cannot be sent",
        ),
    ],
)
def test_where_nothing_can_be_saved_no_store_is_made(here, options, error, says):
    with pytest.raises(error, match=says):
        daskps.create({"w": np.zeros(3)}, name="none", **options)
    assert not here.directory.stores


def test_a_folder_that_not_all_workers_share(here, tmp_path, monkeypatch):
    """One that does not see what the caller has written there is found at once."""
    has, asked = Storage.has, list[str]()

    def elsewhere(storage, path):
        asked.append(path)
        return len(asked) != 2 and has(storage, path)

    monkeypatch.setattr(Storage, "has", elsewhere)
    old = daskps.create({"w": np.zeros(3)}, name="old")
    over: dict[str, Any] = {"name": "old", "overwrite": True}
    for options in ({}, over):
        asked.clear()
        with pytest.raises(CheckpointError, match=rf"go to {tmp_path}: worker .* see"):
            daskps.create({"w": np.ones(9)}, recover_from=tmp_path, shards=3, **options)
        assert len(asked) == 3
        assert not [*tmp_path.iterdir()]
        assert [*here.directory.stores] == [old.uid]
    assert old["w"].pull().tolist() == [0, 0, 0]
    asked[:] = ["of a fourth one"] * 3
    daskps.create({"w": np.ones(9)}, recover_from=tmp_path, shards=3).delete()
    old.delete()


def test_a_folder_that_cannot_be_written(here, tmp_path):
    """Nothing is left of the look at one that can."""
    daskps.create({"w": np.zeros(3)}, recover_from=tmp_path / "new").close()
    assert not [*(tmp_path / "new").iterdir()]
    if os.geteuid():
        (tmp_path / "new").chmod(0o500)
        with pytest.raises(CheckpointError, match="cannot write"):
            daskps.create({"w": np.zeros(3)}, recover_from=tmp_path / "new")


def test_a_replica_goes_on_with_what_has_the_place_of_its_store(here, tmp_path):
    """What it had synced after the checkpoint is gone, what it had not goes on."""
    store = daskps.create(
        {"w": np.zeros(9)},
        recover_from=str(tmp_path),
        optimizer=optim.SGD(1.0),
        shards=3,
    )
    replica = store.replica(every=100)
    replica.step({"w": np.full(9, 1.0)})
    replica.sync()
    store.save(str(tmp_path))
    replica.step({"w": np.full(9, 2.0)})
    replica.sync()
    replica.step({"w": np.full(9, 4.0)})
    here.end(store.placement[1])
    raises_once(replica.sync)
    replica.step({"w": np.full(9, 8.0)})
    replica.sync()
    assert store.pull()["w"].tolist() == [-13.0] * 9
    assert replica.params["w"].tolist() == [-13.0] * 9
