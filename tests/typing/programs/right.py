"""A program for a synchronous client, as a user writes it."""

from concurrent.futures import Future
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import daskps

Params = dict[str, NDArray[Any]]


def gradient(
    params: Params, X: NDArray[Any], y: NDArray[Any]
) -> tuple[float, dict[str, NDArray[Any]]]:
    error = X @ params["w"] - y
    return float(error @ error) / len(y), {"w": X.T @ error / len(y)}


def loop(trainer: daskps.Trainer, part: float) -> int:
    w = trainer.pull("w")["w"]
    assert_type(trainer.push({"w": w - part}), daskps.Version)
    assert_type(trainer.clock, int)
    assert_type(trainer.pushpull({"w": w - part})["w"].size, int)
    trainer.barrier()
    return trainer.rank


def verbs(store: daskps.ParameterStore) -> None:
    version = store.push({"w": np.ones(3)}, lr=0.5, timeout="30s")
    assert_type(version, daskps.Version)
    assert_type(version.pairs, tuple[tuple[int, int], ...])
    assert_type(store.pull(min_version=version)["w"].size, int)
    assert_type(store.pull_async().result()["w"].ndim, int)
    assert_type(store.push_async({"w": np.ones(3)}).result(), daskps.Version)
    assert_type(store.add({"w": np.ones(3)}), daskps.Version)
    assert_type(store.assign({"w": np.ones(3)}), daskps.Version)
    assert_type(store.pushpull({"w": np.ones(3)})["w"].nbytes, int)
    assert_type(store.apply(lambda block, name: block * 0), daskps.Version)
    assert_type(store.scale_lr(0.5), daskps.Version)
    assert_type(store.version, int)
    assert_type(store.versions, tuple[int, ...])
    assert_type(store.view()["w"].size, int)
    assert_type(store.stats(), dict[str, Any])
    assert_type(store.optimizer["w"], str)
    assert_type(store.aggregate([{"w": np.ones(3)}])["w"].size, int)
    assert_type(store.aggregate([{"w": np.ones(3)}], into=store), daskps.Version)
    snapshot = store.snapshot()
    assert_type(snapshot, daskps.Snapshot)
    assert_type(snapshot.version, daskps.Version)
    assert_type(store.reshard(2), None)
    with store.replica(every=2) as replica:
        assert_type(replica.step({"w": np.ones(3)}), None)
        assert_type(replica.sync(), None)


def parameters(store: daskps.ParameterStore) -> None:
    w: daskps.ParameterArray = store["w"]
    emb: daskps.ParameterTable = store["emb"]
    assert_type(store["w"].pull().size, int)
    assert_type(store["w"].push(np.ones(3)), daskps.Version)
    assert_type(store["w"].add(np.ones(3)), daskps.Version)
    assert_type(store["w"].assign(np.ones(3)), daskps.Version)
    assert_type(store["w"].shape, tuple[int, ...])
    assert_type(w.region(0, 2).pull(out=np.zeros(2)).size, int)
    assert_type(np.asarray(w).size, int)
    assert_type(store["emb"].pull([1, 2]).size, int)
    assert_type(store["emb"].push([1], np.ones((1, 2))), daskps.Version)
    assert_type(store["emb"].n_rows, int)
    assert_type(emb.rows, int | None)
    assert_type(emb.pull([[1], [2]], timeout=5).ndim, int)
    assert_type(emb.assign([1], np.ones((1, 2))), daskps.Version)
    assert_type(emb.ids().size, int)
    assert_type(emb.contains([1]).size, int)
    changes = emb.pull_changed()
    assert_type(changes, daskps.Changes)
    assert_type(changes.complete, bool)


def main(folder: str) -> None:
    params = {"w": np.zeros(3), "emb": daskps.TableSpec(9, 2)}
    with daskps.create(params, name="typed", optimizer=daskps.optim.SGD(0.1)) as store:
        assert_type(store, daskps.ParameterStore)
        verbs(store)
        parameters(store)
        result = daskps.train(store, gradient, np.eye(3), np.ones(3), epochs=2)
        assert_type(result, daskps.TrainResult)
        assert_type(result.history[-1].loss, float | None)
        assert_type(result.weights["w"].size, int)
        assert_type(result.stats.lost_trainers, int)
        assert_type(daskps.run(store, loop, [1.0, 2.0]), list[int])
        info = store.save(folder)
        assert_type(info, daskps.CheckpointInfo)
        later: Future[daskps.CheckpointInfo] = store.save(folder, wait=False)
        assert_type(later.result().nbytes, int)
        assert_type([one.name for one in daskps.list_stores()], list[str])
        assert_type(daskps.open("typed"), daskps.ParameterStore)
        assert_type(daskps.restore(info.url), daskps.ParameterStore)
        assert_type(store.drain(store.placement[0]), list[int])
    assert_type(daskps.delete("typed"), None)
