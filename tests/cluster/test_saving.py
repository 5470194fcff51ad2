"""Checkpoints: what owners write, and stores that are made from it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.checkpoint import local_files, storage
from daskps.checkpoint.arrays import stored_arrays
from daskps.checkpoint.listing import CheckpointTarget, FoundCheckpoint
from daskps.checkpoint.manifest import MANIFEST
from daskps.checkpoint.rules import StoredRule
from daskps.cluster.caller import creation, link, saving
from daskps.cluster.directory import cuts
from daskps.cluster.host import installation, store_messages
from daskps.cluster.protocol.deadline import Deadline
from daskps.epochs import Epochs
from daskps.errors import (
    CheckpointError,
    ConsistencyError,
    LayoutError,
)
from daskps.shards.frozen import BegunCopy, HeldShard
from daskps.shards.steps import GRADIENT, Item, Ready, Step, Ticket
from tests.cluster.saved import (
    blueprint,
    chunks,
    filled,
    link_of,
    push,
    restored,
    save,
    source_of,
)
from tests.inprocess import Cluster, cluster
from tests.seams import handle_of, shards_of
from tests.support import until


@pytest.fixture(scope="module")
def here() -> Any:
    with cluster(3) as made:
        yield made


def free(made: Cluster) -> bool:
    """Whether no host has a copy of anything."""
    return not any(host.snapshots.nbytes for host in made.hosts)


def test_a_state_is_the_same_files_on_any_number_of_shards(here, tmp_path):
    store = filled(4)
    folder, manifest = save(store, tmp_path)
    assert (manifest.version, manifest.sequence, manifest.parent) == (24, 1, "")
    assert [t.clock for t in manifest.tables] == [8, 8, 8]
    assert [p.steps for p in manifest.parameters] == [8, 8, 0]
    of = manifest.tables[1]
    assert (of.n_rows > 20, of.n_candidates > 5, of.admitted > 20) == (True,) * 3
    written = chunks(folder)
    weights = written["weights/w/c/0/0"]
    assert weights == store["w"].pull().tobytes()
    others = [restored(link_of(store), folder, n) for n in (1, 2, 5)]
    for n, other in enumerate(others, 2):
        again, said = save(other, tmp_path)
        assert chunks(again) == written
        same = replace(
            said,
            sequence=1,
            parent="",
            time=manifest.time,
            files=manifest.files,
        )
        assert replace(same, version=24) == replace(manifest, version=24)
        assert (said.sequence, said.lineage) == (n, store.uid)
        assert said.parent != folder.name or n == 2
    for number in range(8, 12):
        for one in (store, *others):
            push(one, number)
    later = chunks(save(store, tmp_path)[0])
    assert later != written
    for other in others:
        assert chunks(save(other, tmp_path)[0]) == later
    assert free(here)


def test_many_parameters_are_described_once(here, tmp_path):
    """The rule that all have, and by the caller which arrays there are."""
    params = {f"p{i}": np.zeros(3) for i in range(100)}
    count = partial(mock.patch, side_effect=stored_arrays)
    with daskps.create(params, optimizer=optim.Adam(0.1), shards=2) as store:
        with (
            count("daskps.cluster.caller.saving.stored_arrays") as asked,
            count("daskps.checkpoint.manifest.stored_arrays") as arrays,
            mock.patch.object(StoredRule, "of", wraps=StoredRule.of) as rules,
        ):
            folder = Path(store.save(tmp_path).url)
        assert (asked.call_count, arrays.call_count, rules.call_count) == (0, 1, 1)
        with restored(link_of(store), folder, 1) as other:
            assert other["p99"].pull().tobytes() == store["p99"].pull().tobytes()


def test_a_push_that_has_reached_some_shards_only_is_no_obstacle(here, tmp_path):
    """As of a task that was killed when it had sent the first of its messages."""
    store = filled(3)
    at = store.uid, 1
    (one,) = [h.shards[at] for h in here.hosts if at in h.shards]
    gone = Step(GRADIENT, (Item(0, 0, np.ones(10)),), producer=77, sequence=1)
    ticket = Ticket(gone)
    one.enqueue(lambda shard: shard.submit([ticket]) and None)
    one.serve()
    assert isinstance(ticket.outcome, Ready)
    folder, manifest = save(store, tmp_path)
    assert [p.steps for p in manifest.parameters] == [9, 8, 0]
    other = restored(link_of(store), folder, 2)
    for of in (store, other):
        push(of, 9)
    assert [p.steps for p in save(other, tmp_path)[1].parameters] == [10, 9, 0]


def test_the_copies_of_another_cut_are_not_its_own(here, tmp_path, monkeypatch):
    store = filled(3)
    with monkeypatch.context() as patch:
        for host in here.hosts:
            patch.setattr(host.snapshots, "drop", lambda *args: None)
        save(store, tmp_path)
    # As of a cut of the same version before a run of another number of epochs.
    for host in here.hosts:
        for key, copy in host.snapshots._claims.items():
            for of in copy.copies.values() if key[0] == store.uid else ():
                of.counted = replace(of.counted, epochs=Epochs(7, 3, 2))
    assert save(store, tmp_path)[1].epochs == (0, 0, 0)
    for host in here.hosts:
        host.snapshots.drop(store.uid)


def test_a_host_that_has_not_heard_that_a_cut_is_over_is_told_again(
    here, tmp_path, monkeypatch
):
    store, lost, told = filled(3), list[str](), asyncio.Event()
    control = type(here.directory.hosts).control

    async def lose(hosts: Any, worker: str, method: str, **about: Any) -> Any:
        if method == "drop_cut" and len(lost) < 4:
            lost.append(worker)
            raise OSError("the connection is gone")
        reply = await control(hosts, worker, method, **about)
        if free(here):
            told.set()
        return reply

    monkeypatch.setattr(type(here.directory.hosts), "control", lose)
    monkeypatch.setattr(cuts, "DROP_SECONDS", 0.0)
    save(store, tmp_path)
    link_of(store).run(lambda: asyncio.wait_for(told.wait(), 20))
    assert (len(lost), free(here)) == (4, True)


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_counts_as_what_it_was_though_that_is_heard_late(
    here, tmp_path, monkeypatch, fails
):
    """A scheduler that is busy answers after the caller has gone on."""
    store, late, asked = filled(3), asyncio.Event(), list[str]()
    entry = here.directory.stores[store.uid]
    handlers = here.hub.handlers
    handle = handlers["daskps_directory"]

    async def busy(**message: Any) -> Any:
        asked.append(message["method"])
        if len(asked) == 2:
            await late.wait()
        return await handle(**message)

    monkeypatch.setitem(handlers, "daskps_directory", busy)
    monkeypatch.setattr(link, "GRACE_SECONDS", 0.05)
    if fails:
        monkeypatch.setattr(saving, "_seal", fail)
        with pytest.raises(OSError, match="No space"):
            save(store, tmp_path)
    else:
        save(store, tmp_path)
    assert (asked[0], entry.saved, entry.failed_saves) == ("cut", (0.0, 0), 0)
    here.loop.add_callback(late.set)
    until(lambda: entry.saved[1] or entry.failed_saves)
    assert (entry.saved[1] > 0, entry.failed_saves) == (not fails, fails)
    assert ("store-saved" in told(here, store)) == (not fails)
    until(lambda: free(here))


def fail(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def told(made: Cluster, store: Any) -> list[str]:
    """Which events there were of a store."""
    return [of["action"] for _, of in made.scheduler.events if of["uid"] == store.uid]


def test_a_restored_store_reads_as_the_one_that_was_saved(here, tmp_path):
    store = filled(2)
    folder, _ = save(store, tmp_path)
    other = restored(link_of(store), folder, 3)
    there, here_ = other.pull(), store.pull()
    assert {k: v.tobytes() for k, v in there.items()} == {
        k: v.tobytes() for k, v in here_.items()
    }
    every = np.arange(60)
    assert (other["emb"].pull(every[:50]) == store["emb"].pull(every[:50])).all()
    assert (other["any"].pull(every) == store["any"].pull(every)).all()
    assert sorted(other["any"].ids()) == sorted(store["any"].ids())
    assert other["more"].n_rows == store["more"].n_rows == 40
    # Nothing of what others have read before is told of: it was another store.
    assert not other["any"].pull_changed().complete
    assert other.version == store.version


def squares(params: Any, X: Any, y: Any) -> Any:
    error = X @ params["w"] - y
    return float(error @ error), {"w": X.T @ error / len(y)}


def test_training_goes_on_with_the_same_bits(here, tmp_path):
    X = np.random.default_rng(3).normal(size=(50, 6))
    given = X, X @ np.arange(6.0)
    options: Any = {"batch_size": 4, "trainers": 3, "callbacks": ()}
    with daskps.create({"w": np.zeros(6)}, optimizer=optim.Adam(0.1), shards=2) as one:
        daskps.train(one, squares, *given, epochs=2, **options)
        folder, manifest = save(one, tmp_path)
        first, per_epoch, clock = manifest.epochs
        assert first + clock // per_epoch == 2
        assert manifest.progress["run"]["seed"] == 0
        with restored(link_of(one), folder, 3) as other:
            results = [
                daskps.train(of, squares, *given, epochs=2, **options)
                for of in (one, other)
            ]
            assert one.pull()["w"].tobytes() == other.pull()["w"].tobytes()
            said = [[e.epoch for e in result.history] for result in results]
            assert said == [[2, 3], [2, 3]]
            losses = [[e.loss for e in result.history] for result in results]
            assert losses[0] == losses[1]
            again, later = save(other, tmp_path)
            assert chunks(again) == chunks(save(one, tmp_path)[0])
            assert later.epochs[0] == 2
            assert later.progress["run"]["batch_size"] == 4


def test_what_is_pushed_meanwhile_is_not_in_it(here, tmp_path, monkeypatch):
    store = filled(3)
    before = chunks(save(store, tmp_path / "a")[0])
    pushed, write = [], saving.write

    async def late(*args: Any, **more: Any) -> Any:
        await asyncio.to_thread(push, store, 99)
        pushed.append(99)
        return await write(*args, **more)

    monkeypatch.setattr(saving, "write", late)
    assert chunks(save(store, tmp_path / "b")[0]) == before
    assert pushed == [99]


def test_a_second_save_is_refused_while_one_writes(here, tmp_path, monkeypatch):
    store = filled(2)
    write = saving.write

    async def twice(*args: Any, **more: Any) -> Any:
        monkeypatch.setattr(saving, "write", write)
        with pytest.raises(ConsistencyError, match="is being saved by client"):
            await saving.take(shards_of(store), Deadline(5, "a save"))
        return await write(*args, **more)

    monkeypatch.setattr(saving, "write", twice)
    save(store, tmp_path)
    save(store, tmp_path)
    assert len([*tmp_path.iterdir()]) == 2
    assert free(here)


def no_room(made: Cluster, monkeypatch: Any) -> list[str]:
    """Have two hosts without room for a copy of their shards; return which."""
    hosts = made.hosts[:2]
    for host in hosts:
        held = sum(one.nbytes for one in host.shards.values())
        monkeypatch.setattr(host.worker, "memory_limit", held + 1000)
    return [host.worker.address for host in hosts]


def test_where_no_copy_fits_pushes_wait_until_all_is_written(
    here, tmp_path, monkeypatch
):
    store = filled(5)
    before = chunks(save(store, tmp_path)[0])
    addresses, pushes, write = no_room(here, monkeypatch), [], saving.write

    async def late(*args: Any, **more: Any) -> Any:
        monkeypatch.undo()
        zeros = {"w": np.zeros((10, 3)), "b": np.ones(4, np.float32)}
        pushes.append(store.push_async(zeros))
        done, _ = await asyncio.wait(map(asyncio.wrap_future, pushes), timeout=0.1)
        assert not done
        return await write(*args, **more)

    monkeypatch.setattr(saving, "write", late)
    folder, _ = save(store, tmp_path)
    assert chunks(folder) == before
    assert pushes[0].result(20) > 0
    events = [event for _, event in here.scheduler.events]
    saved = [
        e for e in events if e["action"] == "store-saved" and e["uid"] == store.uid
    ]
    assert [e["held"] for e in saved] == [[], addresses]
    assert saved[1]["checkpoint"] == folder.name
    assert saved[1]["nbytes"] > sum(map(len, before.values()))
    assert free(here)
    push(store, 9)


@pytest.mark.parametrize("holds", [False, True])
def test_a_save_that_is_late_as_its_cut_is_made_frees_it(
    here, tmp_path, monkeypatch, holds
):
    """Else pushes would wait for as long as the client stays."""
    store, take = filled(5), saving.take
    if holds:
        no_room(here, monkeypatch)

    async def late(shards: Any, deadline: Deadline) -> Any:
        cut = await take(shards, deadline)
        deadline.end = time.monotonic() - 1.0
        return cut

    monkeypatch.setattr(saving, "take", late)
    with pytest.raises(TimeoutError, match="after 60 s waiting for a save"):
        store.save(tmp_path, timeout=60)
    until(lambda: free(here))
    push(store, 9)
    assert not [*tmp_path.rglob("*")]


def test_a_held_shard_that_goes_on_fails_the_save(here, tmp_path, monkeypatch):
    store = filled(5)
    no_room(here, monkeypatch)
    write = saving.write

    async def late(*args: Any, **more: Any) -> Any:
        monkeypatch.undo()
        # As a run that begins does, or another snapshot.
        for host in here.hosts:
            shards = [s for (uid, _), s in host.shards.items() if uid == store.uid]
            await host.each(
                shards, lambda one: one.shard.release_cut("a run has begun")
            )
        await asyncio.to_thread(push, store, 9)
        return await write(*args, **more)

    monkeypatch.setattr(saving, "write", late)
    with pytest.raises(ConsistencyError, match="went on while a save"):
        save(store, tmp_path)
    assert not [*tmp_path.rglob(MANIFEST)]
    assert free(here)


@pytest.mark.parametrize("holds", [False, True])
def test_a_cut_that_begins_again_is_saved_once(here, tmp_path, monkeypatch, holds):
    store = filled(4)
    before = chunks(save(store, tmp_path)[0])
    tries = []
    if holds:
        no_room(here, monkeypatch)
    kind, name = (HeldShard, "check") if holds else (BegunCopy, "read")
    real = getattr(kind, name)

    def late(*args: Any) -> Any:
        tries.append(1)
        if len(tries) > 2:
            return real(*args)
        if holds:
            raise ConsistencyError("a run has begun")
        return None

    monkeypatch.setattr(kind, name, late)
    assert chunks(save(store, tmp_path)[0]) == before
    assert len(tries) > 4
    assert free(here)
    monkeypatch.undo()
    push(store, 9)


def test_a_url_that_is_not_shared_is_found_out(here, tmp_path, monkeypatch):
    store = filled(2)
    sizes = storage.Storage.sizes

    def elsewhere(self: Any, *args: Any) -> Any:
        return {k: v for k, v in sizes(self, *args).items() if "emb" not in k}

    monkeypatch.setattr(storage.Storage, "sizes", elsewhere)
    with pytest.raises(CheckpointError, match="not shared by all machines") as caught:
        save(store, tmp_path)
    assert "tables/emb" in str(caught.value)
    assert not [*tmp_path.rglob(MANIFEST)]
    monkeypatch.undo()
    push(store, 9)
    save(store, tmp_path)
    assert free(here)


def test_a_save_that_fails_leaves_nothing(here, tmp_path, monkeypatch):
    store = filled(2)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(local_files, "write", full)
        with pytest.raises(CheckpointError, match="No space left"):
            save(store, tmp_path)
    assert not [*tmp_path.rglob("*.json")]
    assert free(here)
    push(store, 9)
    save(store, tmp_path)


def test_a_copy_that_is_gone_fails_the_save(here, tmp_path, monkeypatch):
    store = filled(3)
    write = saving.write

    async def gone(shards: Any, cut: Any, *args: Any, **more: Any) -> Any:
        here.hosts[1].snapshots.drop(store.uid, cut.name)
        return await write(shards, cut, *args, **more)

    monkeypatch.setattr(saving, "write", gone)
    with pytest.raises(CheckpointError, match=r"no longer has the copy\..*save again"):
        save(store, tmp_path)
    monkeypatch.undo()
    assert not [*tmp_path.rglob(MANIFEST)]
    assert free(here)
    push(store, 9)


def test_a_save_that_is_cancelled_frees_its_copies(here, tmp_path, monkeypatch):
    store = filled(3)
    begun, link = asyncio.Event(), link_of(store)

    async def stuck(*_: Any, **__: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(saving, "_by_owners", stuck)

    async def cancelled() -> Any:
        args = (
            CheckpointTarget(str(tmp_path)),
            Deadline(None, "a save"),
            saving.TrainingState(),
        )
        task = asyncio.ensure_future(saving.save(shards_of(store), *args))
        await begun.wait()
        assert not free(here)
        task.cancel()
        return await asyncio.gather(task, return_exceptions=True)

    (error,) = link.run(cancelled)
    assert isinstance(error, asyncio.CancelledError)
    link.run(lambda: asyncio.sleep(0))
    assert free(here)
    push(store, 9)


@pytest.mark.parametrize(
    "name", ["weights/w", "slots/w.1", "any.ids", "any.rows", "more.ids"]
)
def test_a_damaged_file_makes_no_store(here, tmp_path, name):
    store = filled(2)
    folder, _ = save(store, tmp_path)
    before = [{*host.shards} for host in here.hosts]
    [path] = [p for p in folder.rglob("*/c/**/*") if name in str(p) and p.is_file()]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="damaged") as caught:
        restored(link_of(store), folder, 3)
    assert str(path.relative_to(folder)) in str(caught.value)
    path.unlink()
    with pytest.raises(CheckpointError):
        restored(link_of(store), folder, 3)
    # Stores of other tests may be freed meanwhile.
    for host, known in zip(here.hosts, before, strict=True):
        assert {*host.shards} <= known
    path.write_bytes(content)
    restored(link_of(store), folder, 1).close()


def test_a_manifest_that_was_replaced_is_refused(here, tmp_path):
    store = filled(2)
    folder, _ = save(store, tmp_path)
    source = replace(source_of(folder), digest="0" * 32)
    link = link_of(store)
    with pytest.raises(CheckpointError, match="another one"):
        link.run(lambda: creation.create(link, blueprint(source, 2), 10))


def test_a_store_of_other_parameters_is_refused(here, tmp_path):
    store = filled(2)
    folder, _ = save(store, tmp_path)
    link, plan = link_of(store), blueprint(source_of(folder), 2)
    plan = replace(plan, shapes={**plan.shapes, "b": ((5,), "float32")})
    with pytest.raises(CheckpointError, match="other parameters"):
        link.run(lambda: creation.create(link, plan, 10))


def test_too_little_memory_is_found_out_beforehand(here, tmp_path, monkeypatch):
    """By arithmetic: unbounded rows, of which a new store has none, count too."""
    with daskps.create({"t": daskps.TableSpec(None, 64)}, shards=2) as store:
        ids = np.arange(20_000)
        store["t"].assign(ids, np.ones((20_000, 64), np.float32))
        folder, manifest = save(store, tmp_path)
    for worker in here.scheduler.workers.values():
        monkeypatch.setattr(worker, "memory_limit", 8 * 2**20)
    link = here.link
    asked = []
    monkeypatch.setattr(creation, "install", lambda *_: asked.append(1))
    with pytest.raises(LayoutError, match="memory limit of 8,388,608"):
        restored(link, folder, 2)
    assert not asked
    assert manifest.tables[0].n_rows == 20_000


def test_nobody_sees_a_store_that_lacks_memory(here, tmp_path, monkeypatch):
    """Its second buffers get theirs while files are read; where there is none, no store."""
    store = filled(2)
    folder, _ = save(store, tmp_path)
    link, n = link_of(store), [len(host.shards) for host in here.hosts]
    taken: list[asyncio.Future[None]] = []
    begun = asyncio.Event()

    def begin(hosted_shards: Any) -> None:
        for hosted in hosted_shards:
            hosted.has_memory = asyncio.get_running_loop().create_future()
            taken.append(hosted.has_memory)
        if len(taken) == 2:
            begun.set()

    monkeypatch.setattr(store_messages, "_begin_taking", begin)
    counted: list[None] = []
    made = installation._Installing
    count = made.count
    monkeypatch.setattr(made, "count", lambda of: counted.append(count(of)))

    async def make(error: Exception | None) -> Any:
        making = asyncio.ensure_future(
            creation.create(link, blueprint(source_of(folder), 2), 10)
        )
        await begun.wait()
        begun.clear()
        taken.pop(0).set_result(None)
        assert (len(counted), making.done()) == (0, False) or error is None
        one = taken.pop()
        one.set_result(None) if error is None else one.set_exception(error)
        return await making

    with pytest.raises(LayoutError, match="no bytes"):
        link.run(lambda: make(LayoutError("there are no bytes")))
    assert [len(host.shards) for host in here.hosts] == n
    counted.clear()
    meta = link.run(lambda: make(None))
    with handle_of(meta, link) as other:
        assert len(counted) == 2
        assert other["w"].pull().tobytes() == store["w"].pull().tobytes()


def test_options_are_told_to_nobody(here, tmp_path):
    target = CheckpointTarget("memory://x", {"key": "S3CRET"})
    source = FoundCheckpoint("memory://x", {"key": "S3CRET"}, "", None)  # type: ignore[arg-type]  # its repr is all
    assert "S3CRET" not in repr(target) + repr(source)
    assert Path(tmp_path).exists()
