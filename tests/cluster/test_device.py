"""Stores on a device, through the verbs of their users, on real clusters."""

from __future__ import annotations

import itertools
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

import daskps
from daskps import optim
from daskps.backend import fake
from daskps.checkpoint.manifest import MANIFEST
from tests.support import until

PARAMS = {"w": np.arange(10.0), "b": np.zeros((2, 3), "f4"), "n": np.arange(4)}
N = {"w": 10, "b": 6}


@pytest.fixture(scope="module")
def inside() -> Iterator[Client]:
    """Two workers in this process, which owns all shards then."""
    cluster = LocalCluster(
        n_workers=2, threads_per_worker=2, processes=False, dashboard_address=":0"
    )
    with cluster, Client(cluster) as client:
        yield client


@pytest.fixture(params=["inside", "client"])
def where(request: pytest.FixtureRequest) -> Client:
    """A cluster in this process, and one of others."""
    found: Client = request.getfixturevalue(request.param)
    return found


def make(client: Client, device: str | None, **more: Any) -> Any:
    rule = optim.Adam(0.1)
    of = {"optimizer": {"w": rule, "b": rule}, "device": device, **more}
    return daskps.create(PARAMS, client=client, **of)


def same(store: Any, other: Any) -> bool:
    a, b = store.pull(), other.pull()
    return all(a[n].tobytes() == b[n].tobytes() for n in PARAMS)


def gradients(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"w": rng.normal(size=10), "b": rng.normal(size=(2, 3)).astype("f4")}


def on_device(values: dict[str, Any]) -> dict[str, Any]:
    return {name: fake.asarray(value) for name, value in values.items()}


def work(store: Any) -> dict[str, int]:
    """What the devices of all shards have done."""
    total: dict[str, int] = {}
    for row in store.stats()["shards"]:
        for name, n in row["device_work"].items():
            total[name] = total.get(name, 0) + n
    return total


def test_verbs_have_the_bits_of_a_store_in_host_memory(where: Client) -> None:
    with make(where, "fake") as there, make(where, None) as here:
        assert there.device == "fake:0"
        assert here.device is None
        for seed in range(3):
            values = gradients(seed)
            given = on_device(values)
            there.push(given)
            here.push(values)
            # They were taken: nobody reads them again.
            for array in given.values():
                array[...] = np.nan
            there.push(values, weight=1.5, lr=0.2)
            here.push(values, weight=1.5, lr=0.2)
            there.add(on_device({"n": np.arange(4)}))
            here.add({"n": np.arange(4)})
            assert same(there, here)
        there.assign(on_device({"w": np.ones(10)}))
        here.assign(on_device({"w": np.ones(10)}))
        assert same(there, here)
        assert there["w"].norm() == here["w"].norm()
        cut = there.snapshot()
        w = where.compute(cut["w"]).result()
        np.testing.assert_array_equal(w, there.pull()["w"])
        for store in (there, here):
            store.apply(lambda block, name: block * 2, names="w")
        assert same(there, here)


def test_arrays_of_the_owners_process_are_not_copied_to_the_host(
    inside: Client,
) -> None:
    with make(inside, "fake") as store:
        given, out = on_device(gradients(0)), on_device({"w": np.zeros(10)})
        before = work(store)
        store.push(given)
        assert store.pull("w", out=out)["w"] is out["w"]
        store.pull(device="fake")
        after = work(store)
        assert after.get("copies to host", 0) == before.get("copies to host", 0)
        moved = after["bytes to device"] - before["bytes to device"]
        # On each of two shards tables of launches, of 8 bytes a number: a small shard
        # takes along what is not updated (three dtypes), then updates w, and b.
        assert moved == 2 * 8 * (3 * 3 + 2 * 8)
        np.testing.assert_array_equal(out["w"].get(), store.pull()["w"])


def test_arrays_in_another_order_are_taken_and_filled(where: Client) -> None:
    values = np.arange(12.0).reshape(3, 4)
    for device in ("fake", None):
        with daskps.create({"t": np.zeros((3, 4))}, client=where, device=device) as s:
            s.assign({"t": fake.asarray(values.T.copy()).T})
            s.add({"t": fake.asarray(np.repeat(values, 2, axis=1))[:, ::2]})
            np.testing.assert_array_equal(s.pull()["t"], 2 * values)
            out: Any = fake.asarray(np.zeros((4, 3))).T
            found: Any = s.pull(out={"t": out})["t"]
            assert found is out
            np.testing.assert_array_equal(out.get(), 2 * values)


def test_every_dtype_adds_as_in_host_memory(where: Client) -> None:
    dtypes = [
        "bool",
        "int8",
        "uint8",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
    ]
    params = {d: np.array([0, 1, 1, 0]).astype(d) for d in dtypes}
    deltas = {d: np.array([0, 1, 0, 1]).astype(d) for d in dtypes}
    with (
        daskps.create(params, client=where, device="fake") as there,
        daskps.create(params, client=where) as here,
    ):
        for given in (deltas, on_device(deltas)):
            there.add(given)
            here.add(given)
            found, wanted = there.pull(), here.pull()
            for name in dtypes:
                assert found[name].tobytes() == wanted[name].tobytes(), name


def test_pull_brings_parameters_to_a_device(where: Client) -> None:
    for device in ("fake", None):
        with make(where, device) as store:
            found = store.pull(device="fake")
            out = on_device({"b": np.ones((2, 3), "f4")})
            assert store.pull(out=out)["b"] is out["b"]
            for name, value in PARAMS.items():
                assert found[name].device is fake.device()
                np.testing.assert_array_equal(found[name].get(), value)
            np.testing.assert_array_equal(out["b"].get(), PARAMS["b"])


@pytest.mark.parametrize(
    ("sync", "execution"),
    [("bsp", "resident"), ("asp", "resident"), ("ssp", "resident"), ("bsp", "graph")],
)
def test_training_ends_as_in_host_memory(
    client: Client, sync: str, execution: str
) -> None:
    rng = np.random.default_rng(0)
    X, wanted = rng.normal(size=(60, 10)), rng.normal(size=10)

    def gradient(params: Any, X: Any, y: Any) -> Any:
        error = X @ params["w"] - y
        return float(error @ error) / len(y), {"w": X.T @ error / len(y)}

    how: dict[str, Any] = {"epochs": 2, "batch_size": 10, "sync": sync}
    # Of one trainer the order is the same whatever the policy.
    how |= {"trainers": 2 if sync == "bsp" else 1, "execution": execution}
    with make(client, "fake") as there, make(client, None) as here:
        for store in (there, here):
            result = daskps.train(store, gradient, X, X @ wanted, **how)
            losses: list[Any] = [entry.loss for entry in result.history]
            assert losses[-1] < losses[0]
        assert same(there, here)


def test_checkpoint_is_that_of_host_shards(client: Client, tmp_path: Path) -> None:
    with make(client, "fake") as there, make(client, None) as here:
        for store, name in ((there, "there"), (here, "here")):
            store.push(gradients(0))
            store.save(str(tmp_path / name))
        chunks = [
            {
                path.relative_to(folder).parts[1:]: path.read_bytes()
                for path in folder.rglob("*")
                if path.is_file() and path.name != MANIFEST
            }
            for folder in (tmp_path / "there", tmp_path / "here")
        ]
        assert chunks[0] == chunks[1] != {}
        # Back on a device, on hosts, and on other numbers of shards.
        for device, shards in (("fake", 1), (None, 2), ("fake", 3)):
            url = str(tmp_path / ("here" if device else "there"))
            with daskps.restore(url, device=device, shards=shards) as again:
                assert same(again, here)
                again.push(gradients(1))
                with daskps.restore(url, shards=1) as other:
                    other.push(gradients(1))
                    assert same(again, other)


def test_what_cannot_be_is_refused_and_changes_nothing(inside: Client) -> None:
    with make(inside, "fake") as store:
        bad = {
            "has NaN or Inf": fake.asarray(np.full(10, np.nan)),
            "on fake:1, and not on fake:0": fake.asarray(np.ones(10), 1),
            r"shape \(9,\)": fake.asarray(np.ones(9)),
        }
        for said, array in bad.items():
            with pytest.raises(daskps.PushRejectedError, match=said):
                store.push({"w": array})
        with pytest.raises(ValueError, match="pass one of the two"):
            store.pull(out={"w": np.empty(10)}, device="fake")
        with pytest.raises(ValueError, match="no cuda:7"):
            store.pull(device="cuda:7")
        with pytest.raises(ValueError, match="float32"):
            store.pull(out={"b": fake.asarray(np.zeros((2, 3)))})
        assert store.version == 0
        with pytest.raises(TypeError, match=r"np\.median of memory"):
            daskps.train(store, of_columns, np.ones((8, 10)), reduce=np.median)
        with pytest.raises(daskps.PushRejectedError, match="returned ndarray for"):
            store.apply(lambda block, name: block.get(), names="w")
    with pytest.raises(ValueError, match="'tpu'"):
        make(inside, "tpu")
    with pytest.raises(TypeError, match="int"):
        make(inside, 1)  # type: ignore[arg-type]
    with pytest.raises(daskps.NotEnoughWorkersError, match="no cuda:7"):
        make(inside, "cuda:7")
    with pytest.raises(daskps.LayoutError, match=r"'e' of any ids .* a second store"):
        daskps.create({"e": daskps.TableSpec(None, 2)}, device="fake", client=inside)
    big = daskps.ArraySpec((2**31,), "float32", 0.0)
    with pytest.raises(daskps.LayoutError, match=r"need 17,179,869,\d+ .* fill 80%"):
        daskps.create({"w": big}, device="fake", client=inside, shards=1)
    function = optim.Function(lambda name, w, g, step: w.get())
    rules = {"w": function, "b": optim.SGD(0.1)}
    one: dict[str, Any] = {"device": "fake", "client": inside, "shards": 1}
    with daskps.create(PARAMS, optimizer=rules, **one) as store:
        with pytest.raises(TypeError, match="returned ndarray for"):
            store.push({"w": np.ones(10)})
        np.testing.assert_array_equal(store.pull("w")["w"], PARAMS["w"])


def of_columns(params: Any, X: Any, y: Any) -> Any:
    return {"w": X.mean(axis=0)}


def test_shards_are_lost_with_their_process(tmp_path: Path) -> None:
    """Both what nobody saved, and what comes back from the last checkpoint."""
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    with cluster, Client(cluster) as client:
        lost = make(client, "fake", name="lost")
        kept = make(client, "fake", name="kept", recover_from=str(tmp_path))
        kept.push(gradients(0))
        kept.save(str(tmp_path))
        wanted = kept.pull()["w"]
        os.kill(client.run(os.getpid)[lost.placement[0]], signal.SIGKILL)
        with pytest.raises(daskps.ShardLostError, match="memory was that of a device"):
            until(lambda: lost.push(gradients(1)) is None)
        with pytest.raises(daskps.StoreRestoredError):
            until(lambda: kept.push(gradients(1)) is None)
        np.testing.assert_array_equal(kept.pull()["w"], wanted)
        assert kept.device == "fake:0"


def fail_device(number: int) -> None:
    fake.device(number).fail("an illegal memory access")


CALLS: dict[str, Callable[[Any], object]] = {
    # Less than a cut is kept whose directory has forgotten it.
    "push": lambda store: store.push(gradients(0), timeout=5),
    "rows": lambda store: store.push({"e": daskps.RowGrad([1, 3], np.ones((2, 2)))}),
    "pull": lambda store: store.pull(),
    "save": lambda store: store.save("memory://of-a-device-that-fails"),
    "run": lambda store: daskps.run(store, until_it_fails, [0, 0]),
}


def until_it_fails(trainer: Any, number: int) -> None:
    """Make rounds without end; in the third one the device fails, if there is one."""
    for step in itertools.count():
        if number and step == 3:
            fail_device(number)
        trainer.push(gradients(0))


@pytest.mark.parametrize("sync", ["bsp", "ssp", "asp"])
def test_run_ends_where_its_device_does_no_more_work(where: Client, sync: str) -> None:
    number = 20 + ["bsp", "ssp", "asp"].index(sync)
    one, *_ = where.nthreads()
    rules = {name: optim.SGD(0.1) for name in "wb"}
    more: dict[str, Any] = {"device": f"fake:{number}", "servers": [one], "shards": 1}
    with daskps.create(PARAMS, optimizer=rules, client=where, **more) as store:
        with pytest.raises(daskps.ShardLostError, match="an illegal memory access"):
            daskps.run(store, until_it_fails, [0, number], workers=[one], sync=sync)
        with pytest.raises(daskps.ShardLostError, match="an illegal memory access"):
            store.pull()


@pytest.mark.parametrize("how", CALLS)
def test_shards_are_lost_once_a_device_does_no_more_work(
    where: Client, how: str
) -> None:
    """An error that ends CUDA's context does so; other shards of the process live on."""
    number = 10 + [*CALLS].index(how)
    one, *_ = where.nthreads()
    params = {**PARAMS, "e": daskps.TableSpec(9, 2)}
    there: dict[str, Any] = {"device": f"fake:{number}", "shards": 1, "client": where}
    rule = {name: optim.SGD(0.1) for name in "wbe"}

    def made(on: str, **more: Any) -> Any:
        return daskps.create(params, optimizer=rule, servers=[on], **there, **more)

    with make(where, None) as here, made(one) as store, made(one) as other:
        waiting = store.pull_async(min_version=10**6)
        where.run(fail_device, number, workers=[one])
        said = rf"{one} can work on fake:{number} no more.*: an illegal memory access"
        for call in (CALLS[how], *CALLS.values(), lambda _: waiting.result()):
            with pytest.raises(daskps.ShardLostError, match=said):
                call(store)
        with pytest.raises(daskps.ShardLostError, match=said):
            other.pull()
        here.push(gradients(0))
        with pytest.raises(daskps.NotEnoughWorkersError, match="illegal memory access"):
            made(one)


@pytest.mark.parametrize("rule", [optim.SGD(0.1), optim.Adam(0.1)])
def test_update_that_stops_midway_loses_the_slots_of_its_shard(
    inside: Client, monkeypatch: pytest.MonkeyPatch, rule: Any
) -> None:
    """Without slots nothing has changed: weights have two buffers."""
    of: dict[str, Any] = {"optimizer": {"w": rule, "b": optim.SGD(1.0)}}
    of |= {"device": "fake:30", "shards": 1, "client": inside}
    with daskps.create(PARAMS, **of) as store, daskps.create(PARAMS, **of) as other:
        real, numbers, fails = fake.FakeStream.launch, itertools.count(), [True]
        before = work(other)["launches"]
        other.push(gradients(0))
        last = work(other)["launches"] - before - 1

        def launch(*args: Any, **more: Any) -> None:
            if next(numbers) >= last and fails[0]:
                raise MemoryError("for a table of 64 bytes")
            real(*args, **more)

        monkeypatch.setattr(fake.FakeStream, "launch", launch)
        if type(rule) is optim.SGD:
            with pytest.raises(MemoryError, match="a table of 64 bytes"):
                store.push(gradients(0))
            assert store.pull()["w"].tobytes() == PARAMS["w"].tobytes()
            fails[0] = False
            store.push(gradients(0))
            assert same(store, other)
        else:
            for _ in range(2):
                with pytest.raises(
                    daskps.ShardLostError, match="half-way: for a table"
                ):
                    store.push(gradients(0))
            fails[0] = False
        other.push(gradients(0))


def steps(trainer: Any, device: Any) -> float:
    """Three rounds of a trainer whose arrays are on a device, or all in host memory."""
    total = 0.0
    for _ in range(3):
        w: Any = trainer.pull(["w"], device=device)["w"]
        gradient, weight = w - 1.0, 1.0 + trainer.rank
        trainer.push({"w": gradient}, weight=weight, tick=False)
        gradient[...] = 0.5
        trainer.push({"w": gradient}, weight=weight)
        total += float(np.add.reduce(w))
    return total


def test_trainers_of_the_owners_process_work_on_the_device(inside: Client) -> None:
    with make(inside, "fake") as there, make(inside, None) as here:
        before = work(there)
        found = daskps.run(there, steps, ["fake", "fake"])
        after = work(there)
        assert found == daskps.run(here, steps, [None, None])
        assert same(there, here)
        # Nothing but flags of looks.
        assert after.get("bytes to host", 0) - before.get("bytes to host", 0) <= 8 * 100


def test_trainer_says_what_cannot_be(inside: Client) -> None:
    def loop(trainer: Any, part: Any) -> None:
        with pytest.raises(ValueError, match="leave copy= out"):
            trainer.pull(device="fake", copy=False)
        with pytest.raises(daskps.PushRejectedError, match="NaN"):
            trainer.push({"w": fake.asarray(np.full(10, np.nan))})
        trainer.push({"w": fake.asarray(np.ones(10))})

    with make(inside, "fake") as store:
        daskps.run(store, loop, [None])
        assert store.version == 1


TABLES = {
    "w": np.arange(10.0, dtype="f4"),
    "emb": daskps.TableSpec(40, 3, init=daskps.init.normal(0.1)),
    "half": daskps.TableSpec(30, 4, dtype="float16", init=1.0),
    "num": daskps.TableSpec(7, 2, dtype="int64"),
}


def tabled(client: Client, device: str | None, **more: Any) -> Any:
    rules = {
        "w": optim.SGD(0.1),
        "emb": optim.Adagrad(0.1, rowwise=True),
        "half": optim.Adam(0.1),
    }
    of = {"optimizer": rules, "device": device, "seed": 3, **more}
    return daskps.create(TABLES, client=client, **of)


def rows_in(store: Any) -> list[Any]:
    """All that a store holds, and how often its shards were changed."""
    tables = [
        store[name].pull(np.arange(len(store[name]))) for name in TABLES if name != "w"
    ]
    return [store.pull("w")["w"].tobytes(), *(rows.tobytes() for rows in tables)]


def test_tables_have_the_bits_of_a_store_in_host_memory(where: Client) -> None:
    with tabled(where, "fake") as there, tabled(where, None) as here:
        assert rows_in(there) == rows_in(here)
        rng = np.random.default_rng(0)
        for i in range(3):
            ids = rng.integers(0, 40, 50)
            values = rng.normal(size=(50, 3)).astype("f4")
            half = rng.normal(size=(2, 3, 4)).astype("f4")
            for store, on in ((there, fake.asarray), (here, np.array)):
                given = on(values)
                emb = daskps.RowGrad(ids, given)
                store.push({"w": on(np.ones(10)), "emb": emb}, weight=1.0 + i % 2)
                given[...] = np.nan
                named = np.array([[1, 2, 29], [0, 1, 4]])
                store["half"].push(named, on(half))
                store["half"].add([5, 5], on(np.ones((2, 4), "f2")))
                store["num"].add([6, 2, 6], on(np.arange(6).reshape(3, 2)))
                store["num"].assign([1], on(np.array([[8, 9]])))
            assert rows_in(there) == rows_in(here)
        bad = np.ones((2, 3), "f4")
        bad[1, 2] = np.inf
        for on in (fake.asarray, np.array):
            with pytest.raises(daskps.PushRejectedError, match="'emb'"):
                there["emb"].push([3, 39], on(bad))
        assert rows_in(there) == rows_in(here)
        cut = there.snapshot()
        emb = where.compute(cut["emb"]).result()
        np.testing.assert_array_equal(emb, here["emb"].pull(range(40)))


def test_rows_go_to_a_device(where: Client) -> None:
    ids = np.array([[39, 0], [7, 39]])
    for device in ("fake", None):
        with tabled(where, device) as store:
            wanted = store["emb"].pull(ids)
            out = fake.asarray(np.zeros((2, 2, 3), "f4"))
            assert store["emb"].pull(ids, out=out) is out
            found = [out, store["emb"].pull(ids, device="fake")]
            both = store.pull("w", rows={"emb": ids}, device="fake")
            found.append(both["emb"])
            found.append(store.pull("w", rows={"emb": ids}, out={"emb": out})["emb"])
            for rows in found:
                np.testing.assert_array_equal(rows.get(), wanted)
            np.testing.assert_array_equal(both["w"].get(), TABLES["w"])
            w: Any = store["w"]
            part: Any = w.region(2, 5).pull(device="fake")
            np.testing.assert_array_equal(part.get(), [2, 3, 4])
            pushed: Any = store.pushpull({"w": np.zeros(10)}, device="fake")
            np.testing.assert_array_equal(pushed["w"].get(), TABLES["w"])
            np.testing.assert_array_equal(w.pull(device="fake").get(), TABLES["w"])
            with pytest.raises(ValueError, match="pass one of the two"):
                store["emb"].pull(ids, out=out, device="fake")
            other: Any = store["emb"].pull(ids, device="fake:7")
            np.testing.assert_array_equal(other.get(), wanted)
            both = {"emb": out[0], "w": out.reshape(-1)[2:12]}
            with pytest.raises(ValueError, match="share memory"):
                store.pull("w", rows={"emb": ids[0]}, out=both)


def test_rows_of_the_owners_process_are_not_copied_to_the_host(inside: Client) -> None:
    with tabled(inside, "fake") as store:
        ids, g = np.arange(0, 40, 3), fake.asarray(np.ones((14, 3), "f4"))
        emb, out = store["emb"], fake.asarray(np.zeros((14, 3), "f4"))
        before = work(store)
        emb.push(ids, g)
        emb.pull(ids, out=out)
        emb.pull(ids, device="fake")
        after = work(store)
        moved = after["bytes to device"] - before.get("bytes to device", 0)
        # Numbers of rows and where those of two shards are, for an update and two reads.
        assert moved == 3 * 8 * 14 * 2
        assert after.get("copies to host", 0) - before.get("copies to host", 0) <= 2
        np.testing.assert_array_equal(out.get(), emb.pull(ids))


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_trainers_push_rows_as_in_host_memory(where: Client, sync: str) -> None:
    ends = []
    for device in ("fake", None):
        with tabled(where, device) as store:
            parts = [device] * (2 if sync == "bsp" else 1)
            found = daskps.run(store, row_steps, parts, sync=sync)
            ends.append((found, rows_in(store)))
    assert ends[0] == ends[1]


def row_steps(trainer: Any, device: Any) -> list[float]:
    """Steps with rows of the device and of the host, read ahead and with the push."""
    ids, found = np.array([1, 5, 5, 39 - trainer.rank]), []
    for i in range(3):
        got: Any = trainer.pull("w", rows={"emb": ids}, device=device)
        g = got["emb"] * np.float32(0.5) + np.float32(1)
        half = daskps.RowGrad([3, trainer.rank], np.full((2, 4), 1 + i, "f4"))
        given = {"w": got["w"], "emb": daskps.RowGrad(ids, g), "half": half}
        got = trainer.pushpull(given, rows={"emb": ids}, device=device)
        trainer.prefetch(device=device)
        ahead: Any = trainer.pull(device=device)
        later: Any = trainer.pull_async("w", device=device).result()
        found += [float(np.add.reduce(a["w"])) for a in (got, ahead, later)]
        found.append(float(np.add.reduce(got["emb"].reshape(-1))))
    return found


def test_checkpoint_with_tables_is_that_of_host_shards(
    client: Client, tmp_path: Path
) -> None:
    with tabled(client, "fake") as there, tabled(client, None) as here:
        for store, name in ((there, "there"), (here, "here")):
            store["emb"].push([1, 2, 39], np.ones((3, 3), "f4"))
            store.save(str(tmp_path / name))
        for device, shards in (("fake", 3), (None, 1)):
            url = str(tmp_path / ("here" if device else "there"))
            with daskps.restore(url, device=device, shards=shards) as again:
                assert again.device == (device and "fake:0")
                assert rows_in(again) == rows_in(here)
                with daskps.restore(url, shards=1) as other:
                    for store in (again, other):
                        store["emb"].push([1, 38], np.ones((2, 3), "f4"))
                    assert rows_in(again) == rows_in(other) != rows_in(here)


def of_the_device(params: Any, X: Any, y: Any) -> Any:
    """Squares and their gradient; parameters are where the batch is."""
    assert type(params["w"]) is type(params["emb"]) is type(X)
    error = np.add.reduce(X * params["w"], axis=1) - y
    g = np.add.reduce(X * error.reshape(-1, 1), axis=0) / len(X)
    return float(np.add.reduce(error * error)), {"w": g, "emb": params["emb"]}


@pytest.mark.parametrize("execution", ["resident", "graph"])
def test_parameters_are_on_the_device_of_the_batch(
    inside: Client, execution: str
) -> None:
    rng = np.random.default_rng(0)
    X, ends = rng.normal(size=(40, 10)), []
    y = X @ np.arange(10.0)
    how: dict[str, Any] = {"batch_size": 10, "execution": execution}
    how["rows"] = {"emb": lambda X: np.array([3, 4, 39])}
    for device, on in (("fake", fake.asarray), (None, fake.asarray), (None, np.array)):
        with tabled(inside, device) as store:
            parts = [[inside.scatter(on(a[i::2])) for i in (0, 1)] for a in (X, y)]
            run = daskps.train(store, of_the_device, *parts, epochs=2, **how)
            ends.append(([e.loss for e in run.history], rows_in(store)))
    assert ends[0] == ends[1] == ends[2]


def halved(name: str, w: Any, g: Any, step: int) -> Any:
    return (w - 0.5 * g) / np.float64(step)


def largest(stacked: Any, weights: Any) -> Any:
    """In place too: these are copies."""
    stacked *= 2.0
    return np.maximum.reduce(stacked, axis=0)


def deltas(trainer: Any, part: Any) -> None:
    for i in range(2):
        trainer.push({"w": part * (i + 1), "b": part[:6].reshape(2, 3).astype("f4")})
        trainer.add({"n": np.arange(4) + trainer.rank})


def test_functions_of_users_get_arrays_of_the_device(where: Client) -> None:
    rules = {"w": optim.Function(halved), "b": optim.SGD(0.1)}
    ends = []
    for device in ("fake", None):
        with daskps.create(
            PARAMS, optimizer=rules, device=device, shards=1, client=where
        ) as store:
            for i in range(3):
                store.push(gradients(i))
            nan = np.full(10, np.nan)
            with pytest.raises(daskps.PushRejectedError, match="'w' has NaN"):
                store.push({"w": nan})
            store.apply(lambda block, name: block * 0.5 + 1.0, names=["w", "b"])
            parts = [np.arange(10.0), 9 - np.arange(10.0)]
            daskps.run(store, deltas, parts, reduce=largest)
            ends.append([array.tobytes() for array in store.pull().values()])
    assert ends[0] == ends[1]


class Gamma(optim.Rule):
    """A rule that a GPU has no loop for."""

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        return (lr,)

    @staticmethod
    def update(w: Any, g: Any, lr: Any) -> Any:
        return w - lr * math.gamma(abs(g) + 1)


def test_rule_that_devices_have_no_loop_for_is_refused(inside: Client) -> None:
    with pytest.raises(TypeError, match="gamma', which has no loop on a device"):
        daskps.create(
            {"w": np.ones(3)}, optimizer=Gamma(0.1), device="fake", client=inside
        )
    assert not daskps.list_stores(client=inside)
