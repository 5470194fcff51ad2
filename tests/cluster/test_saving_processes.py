"""Checkpoints of stores in real processes, while others push or train, or die."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from distributed.utils import get_mp_context

import daskps
from daskps import optim
from daskps.checkpoint.listing import CheckpointTarget
from daskps.checkpoint.manifest import MANIFEST, Manifest
from daskps.cluster.caller import creation, saving
from daskps.cluster.machine import blocks
from daskps.cluster.machine.mapping import FILES
from daskps.cluster.protocol.deadline import Deadline
from daskps.errors import LayoutError
from daskps.testing import PushOracle
from tests.cluster.saved import filled, link_of, push, restored, save
from tests.seams import shards_of
from tests.snapshot_oracle import check
from tests.support import PATIENCE, cleaned, local_cluster, store, until


def read(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The arrays of a checkpoint, as any program may read them that knows Zarr."""
    found = {}
    for p in manifest.parameters:
        chunks = sorted((folder / "weights" / p.name / "c").rglob("*"))
        parts = [np.fromfile(c, p.dtype) for c in chunks if c.is_file()]
        size = int(np.prod(p.shape))
        found[p.name] = np.concatenate(parts)[:size].reshape(p.shape)
    return found


def ones(params, X, y):
    return {name: np.ones_like(value) for name, value in params.items()}


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_saves_during_a_run_are_whole(client, sync, tmp_path):
    """Every step adds one everywhere, so all elements, and steps, are equal at a cut."""
    s = store(client, params={"w": np.zeros(1000)}, optimizer=optim.SGD(1.0), shards=3)
    found, done = [], threading.Event()

    def look() -> None:
        while not done.is_set():
            found.append(save(s, tmp_path))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        X = np.zeros((200, 1))
        daskps.train(s, ones, X, sync=sync, batch_size=1, epochs=2, trainers=2)
    finally:
        done.set()
        thread.join()
    assert len({manifest.version for _, manifest in found}) > 2
    for folder, manifest in found:
        values = read(folder, manifest)["w"]
        assert len(set(values.tolist())) == 1
        assert -values[0] == manifest.version == manifest.parameters[0].steps
    folder, manifest = found[len(found) // 2]
    other = restored(link_of(s), folder, 2)
    assert set(other.pull("w")["w"].tolist()) == {-manifest.version}
    other.close()


def test_every_shard_contains_the_same_pushes_of_every_producer(
    client, monkeypatch, tmp_path
):
    """Four processes push, some of it to two of three shards; bits tell who is in."""
    # As workers: who is spawned imports everything.
    ready = SimpleNamespace(get_context=lambda spawn: get_mp_context())
    monkeypatch.setattr("tests.snapshot_oracle.multiprocessing", ready)
    oracle = PushOracle(shards=3, producers=4, pushes=150)
    s = daskps.create(
        oracle.params(), name="oracle", optimizer=optim.SGD(1.0), shards=3
    )
    n, faults, _ = check(client, oracle, s, lambda _, of: read(*save(of, tmp_path)))
    assert faults == []
    assert n >= 2
    assert oracle.total(read(*save(s, tmp_path))) == 600
    s.delete()


def replaced(client: Any, worker: str) -> None:
    """Wait until a worker is gone and another one there in its place."""
    until(lambda: worker not in client.scheduler_info()["workers"])
    client.wait_for_workers(2, timeout=PATIENCE)


def test_a_restored_store_has_all_of_its_memory(machine_cluster, tmp_path):
    """Which its first publications write: second buffers of weights and slots."""
    params = {"w": np.arange(2**20, dtype="f4"), "b": np.zeros(10)}
    gradient = {"w": np.ones(2**20, "f4")}
    with cleaned(client := machine_cluster):
        s = store(client, params=params, optimizer=optim.Adam(0.1), shards=2)
        folder, _ = save(s, tmp_path)
        before = sum(client.run(held_nbytes).values())
        with restored(link_of(s), folder, 2) as other:
            # Two shards of three arrays of 2 MiB, each in two buffers.
            more = sum(client.run(held_nbytes).values()) - before
            assert 24 <= more / 2**20 < 25
            for _ in range(3):
                s.push(gradient)
                other.push(gradient)
            assert other["w"].pull().tobytes() == s["w"].pull().tobytes()
        until(lambda: sum(client.run(held_nbytes).values()) == before)
        # Somebody else takes what there was meanwhile.
        client.run(lack, True)
        try:
            with pytest.raises(LayoutError, match=r"no .* bytes of shared memory more"):
                restored(link_of(s), folder, 2)
        finally:
            client.run(lack, False)
        # The other host may still be at its part when the error has come.
        until(lambda: sum(client.run(held_nbytes).values()) == before)


PIECES: Any = blocks._pieces


def lack(lacks: bool) -> None:
    """Have blocks find no memory for their second buffers."""
    mock.patch.object(blocks, "_pieces", beyond if lacks else PIECES).start()


def beyond(parts: Any) -> Any:
    return [(at, 2**62) for at, _ in PIECES(parts)]


def held_nbytes() -> int:
    """What the files have that this process answers for."""
    return FILES.nbytes(owned=True)


def test_a_stopped_owner_is_named_and_the_next_save_works(tmp_path):
    """Stopped before the cut, and between the cut and the files; pushes go on."""
    with local_cluster(n_workers=2, threads=1) as client:
        s = filled(2)
        link, target = link_of(s), CheckpointTarget(str(tmp_path))
        how: Any = {"training": saving.TrainingState()}
        victim = s.placement[1]
        pid = client.run(os.getpid, workers=[victim])[victim]

        def take(seconds: float) -> Any:
            return link.run(
                lambda: saving.take(shards_of(s), Deadline(seconds, "a save"))
            )

        cut = take(PATIENCE)
        os.kill(pid, signal.SIGSTOP)
        try:
            how["deadline"] = Deadline(1.0, "a save")
            with pytest.raises(TimeoutError, match="stopped, or busy") as caught:
                link.run(lambda: saving.write(shards_of(s), cut, target, **how))
            assert victim in str(caught.value)
            with pytest.raises(TimeoutError, match="no shard is held") as caught:
                take(1.0)
            assert f"waited for {victim} to answer" in str(caught.value)
            assert "timed out after 1 s waiting" in str(caught.value)
            push(s, 50)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert [*tmp_path.rglob(MANIFEST)] == []
        folder, _ = save(s, tmp_path)
        assert [p.parent for p in tmp_path.rglob(MANIFEST)] == [folder]
        with restored(link, folder, 1) as other:
            assert other["w"].pull().tobytes() == s["w"].pull().tobytes()


def test_a_worker_that_dies_fails_the_save_and_pushes_go_on(tmp_path, monkeypatch):
    with local_cluster(n_workers=2, threads=1) as client:
        s = filled(3)
        before, _ = save(s, tmp_path)
        link, deadline = link_of(s), Deadline(PATIENCE, "a save")
        cut = link.run(lambda: saving.take(shards_of(s), deadline))
        victim = s.placement[2]
        os.kill(client.run(os.getpid, workers=[victim])[victim], signal.SIGKILL)
        about: Any = {"deadline": deadline, "training": saving.TrainingState()}
        target = CheckpointTarget(str(tmp_path))
        said = f"no checkpoint .* worker {victim}, .* shard [23], .*; save again"
        with pytest.raises(daskps.CheckpointError, match=said):
            link.run(lambda: saving.write(shards_of(s), cut, target, **about))
        assert [p.parent for p in tmp_path.rglob(MANIFEST)] == [before]
        # Its shards are adopted, and saved by whoever has them now.
        push(s, 99)
        folder, manifest = save(s, tmp_path)
        assert manifest.parameters[0].steps == 9
        other = restored(link, folder, 2)
        assert other["w"].pull().tobytes() == s["w"].pull().tobytes()
        # One that dies while a store is made of it leaves nothing of that store.
        other.close()
        replaced(client, victim)
        names = {info.uid for info in daskps.list_stores()}
        install = creation.install

        async def dying(link: Any, meta: Any, source: Any, *more: Any) -> None:
            gone.append(meta.owners[-1])
            os.kill(pids[gone[0]], signal.SIGKILL)
            await install(link, meta, source, *more)

        pids, gone = client.run(os.getpid), list[str]()
        monkeypatch.setattr(creation, "install", dying)
        with pytest.raises(daskps.ShardLostError, match="while the store was made"):
            restored(link, folder, 2)
        assert {info.uid for info in daskps.list_stores()} == names
        monkeypatch.undo()
        replaced(client, gone[0])
        with restored(link, folder, 2) as again:
            assert again["w"].pull().shape == (10, 3)
