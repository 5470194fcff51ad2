"""Saving and restoring as a user does it."""

from __future__ import annotations

import json
import os
import shutil
import traceback
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import daskps
from daskps import optim
from daskps.checkpoint import local_files
from daskps.checkpoint.listing import CheckpointTarget, find
from daskps.checkpoint.manifest import MANIFEST, sealed
from daskps.cluster.caller import creation, saving
from daskps.errors import (
    CheckpointError,
    ConsistencyError,
    LayoutError,
    NoOptimizerError,
    StoreExistsError,
    UnknownParameterError,
)
from daskps.store import lifecycle
from tests.checkpoint.disk import Disk
from tests.inprocess import Hub, cluster

#: Hosts write and read files in threads of their own.
pytestmark = pytest.mark.leaky


@pytest.fixture(scope="module", autouse=True)
def here() -> Any:
    with cluster(3) as made:
        yield made


def uids():
    """The stores there are; older ones may go at any time, with their last handles."""
    return {info.uid for info in daskps.list_stores()}


def trained(name=None, **more):
    """A store with all kinds of parameters, after a few pushes."""
    params = {
        "w": np.arange(12.0).reshape(3, 4),
        "b/c": np.zeros(5, "float16"),
        "n": np.arange(4),
        "emb": daskps.TableSpec(7, 2, init=1.0),
        "any": daskps.TableSpec(None, 3, init=daskps.init.normal(0.0, 1.0)),
    }
    rules = {"emb": optim.Adagrad(0.1, rowwise=True), "*": optim.Adam(0.1)}
    store = daskps.create(params, name=name, optimizer=rules, seed=5, **more)
    for i in range(3):
        push(store, i)
    return store


def test_none_is_saved_into_another_one(tmp_path):
    """Nor by those who save later: before anything is made, copied or trained."""
    store = trained()
    info = store.save(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    X = np.ones((4, 2))

    def gradient(params, X, y):
        raise AssertionError("it was trained")

    for call in (
        lambda: store.save(info.url),
        lambda: store.save(info.url, wait=False),
        lambda: daskps.create({"w": np.zeros(3)}, recover_from=info.url),
        lambda: daskps.restore(info.url, recover_from=info.url),
        lambda: daskps.train(
            store, gradient, X, X[:, 0], checkpoint=daskps.Checkpoints(info.url)
        ),
    ):
        with pytest.raises(CheckpointError, match=rf"give the folder .*{tmp_path}, "):
            call()
    assert sorted(tmp_path.rglob("*")) == before
    assert len(daskps.list_checkpoints(tmp_path)) == 1


def small():
    """One of few files."""
    return daskps.create({"w": np.arange(12.0), "n": np.arange(3)}, shards=3)


def push(store, i):
    store.push(
        {
            "w": np.full((3, 4), i + 1.0),
            "b/c": np.ones(5, "float16"),
            "emb": daskps.RowGrad([i, 6], np.ones((2, 2), "float32")),
            "any": daskps.RowGrad([i * 10**12, -3], np.ones((2, 3), "float32")),
        }
    )


def values(store):
    found = {k: v.tobytes() for k, v in store.pull().items()}
    found["emb"] = store["emb"].pull(np.arange(7)).tobytes()
    ids = np.array([0, 10**12, 2 * 10**12, -3, 17])
    return found | {"any": store["any"].pull(ids).tobytes()}


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_a_store_goes_on_from_its_checkpoint(tmp_path, shards):
    store = trained(shards=2)
    info = store.save(tmp_path)
    again = daskps.restore(tmp_path, name=f"again{shards}", shards=shards)
    assert values(again) == values(store)
    assert again.version == store.version == info.version == 3
    assert again.optimizer == store.optimizer
    assert len(again.placement) == shards
    for i in range(2, 6):  # momentum and step counts too
        push(store, i)
        push(again, i)
    assert values(again) == values(store)
    store.delete()
    again.delete()


def test_what_is_told_of_a_checkpoint(tmp_path):
    store = trained("told")
    info = store.save(str(tmp_path))
    assert info.store == "told"
    assert (info.sequence, info.parameters, info.tables, info.version) == (1, 3, 2, 3)
    assert abs(datetime.now(UTC) - info.time) < timedelta(minutes=10)
    there = [p for p in tmp_path.rglob("*") if p.is_file() and p.name != MANIFEST]
    assert info.files == len(there)
    assert info.nbytes == sum(p.stat().st_size for p in there)
    second = store.save(tmp_path)
    assert (second.sequence, second.parent) == (2, info.url.rpartition("/")[2])
    assert second.lineage == info.lineage
    found = daskps.list_checkpoints(tmp_path)
    assert found == [info, second]
    assert repr(found).splitlines()[0].split()[:3] == ["checkpoint", "store", "version"]
    assert len(repr(found).splitlines()) == 3
    assert "2 checkpoints" in found._repr_html_()
    # The newest is meant, and any other by its own URL.
    push(store, 0)
    store.save(tmp_path)
    assert daskps.restore(tmp_path).version == 4
    assert daskps.restore(info.url).version == 3
    store.delete()


def test_saving_in_the_background(tmp_path):
    store = trained()
    before = values(store)
    writing = store.save(tmp_path, wait=False)
    assert isinstance(writing, Future)
    push(store, 1)
    assert values(store) != before
    info = writing.result(60)
    assert daskps.list_checkpoints(tmp_path) == [info]
    again = daskps.restore(info.url)
    assert values(again) == before


def test_a_save_still_writing_refuses_the_next(tmp_path, monkeypatch):
    store = trained()
    write, held = saving.write, Future[None]()

    async def late(*args: Any, **more: Any) -> Any:
        import asyncio

        await asyncio.wrap_future(held)
        return await write(*args, **more)

    monkeypatch.setattr(saving, "write", late)
    writing = store.save(tmp_path, wait=False)
    with pytest.raises(ConsistencyError, match="sav"):
        store.save(tmp_path)
    held.set_result(None)
    writing.result(60)
    assert len(daskps.list_checkpoints(tmp_path)) == 1
    store.save(tmp_path)


class Mine(optim.Rule):
    @property
    def slots(self):
        return ("seen",)

    def prepare(self, step, lr):
        return (lr,)

    @staticmethod
    def update(w, g, seen, lr):
        return w - lr * g, seen + 1.0


def test_rules_of_ones_own_are_passed(tmp_path):
    store = daskps.create({"w": np.zeros(4), "v": np.zeros(2)}, optimizer=Mine(0.5))
    store.push({"w": np.ones(4)})
    store.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"Mine\(lr=0.5\).*optimizer=") as caught:
        daskps.restore(tmp_path)
    assert caught.value.parameter == "w"
    again = daskps.restore(tmp_path, optimizer=Mine(0.5))
    for one in (store, again):
        one.push({"w": np.ones(4)})
    assert values_of(again) == values_of(store)
    with pytest.raises(CheckpointError, match=r"slots of 'w' are \['seen'\]"):
        daskps.restore(tmp_path, optimizer=optim.SGD(0.1))
    with pytest.raises(LayoutError, match="'x' matches no"):
        daskps.restore(tmp_path, optimizer={"x": Mine(0.1), "*": Mine(0.1)})
    with pytest.raises(CheckpointError, match="'v' was saved with an optimizer"):
        daskps.restore(tmp_path, optimizer={"v": None, "*": Mine(0.1)})


def test_parameters_without_a_rule_come_back_without_one(tmp_path):
    rules = {"v": None, "*": optim.Adam(0.5)}
    store = daskps.create({"w": np.zeros(4), "v": np.ones(2)}, optimizer=rules)
    store.push({"w": np.ones(4)})
    store.save(tmp_path)
    for again in (daskps.restore(tmp_path), daskps.restore(tmp_path, optimizer=rules)):
        with pytest.raises(NoOptimizerError, match="'v'"):
            again.push({"v": np.ones(2)})
        assert values_of(again) == values_of(store)


def values_of(store):
    return {k: v.tobytes() for k, v in store.pull().items()}


def test_a_store_without_an_optimizer_gets_one_without_slots(tmp_path):
    daskps.create({"w": np.zeros(4)}).save(tmp_path)
    with pytest.raises(CheckpointError, match="'w' was saved without an optimizer"):
        daskps.restore(tmp_path, optimizer=optim.Adam(0.1))
    again = daskps.restore(tmp_path, optimizer=optim.SGD(0.5))
    again.push({"w": np.ones(4)})
    assert again["w"].pull().tolist() == [-0.5] * 4


@pytest.mark.parametrize("rule", [optim.SGD(1e-4), Mine(1e-4)], ids=repr)
def test_masters_come_back_with_all_their_digits(tmp_path, rule):
    """Ten steps of 1e-4, and ten more after the restore, which float16 alone would lose."""
    spec = daskps.ArraySpec(9, "float16", 1.0, master="float32")
    small = {"w": spec, "v": daskps.ArraySpec(4, "float32", 1.0, master="float64")}
    store = daskps.create(small, optimizer=rule, shards=2)
    for _ in range(10):
        store.push({"w": np.ones(9), "v": np.ones(4)})
    store.save(tmp_path)
    given = {} if isinstance(rule, optim.SGD) else {"optimizer": rule}
    again = daskps.restore(tmp_path, shards=3, **given)
    # A rule that is passed gets the masters that were saved.
    third = daskps.restore(tmp_path, shards=1, optimizer=rule)
    for _ in range(10):
        for one in (store, again, third):
            one.push({"w": np.ones(9), "v": np.ones(4)})
    assert again.optimizer == third.optimizer == store.optimizer
    assert values_of(again) == values_of(third) == values_of(store)
    assert store["w"].pull().tolist() == np.full(9, 0.99805, "f2").tolist()
    np.testing.assert_allclose(store["v"].pull(), 0.998, rtol=1e-7)


def test_a_checkpoint_without_masters_restores_without(tmp_path):
    """And is not loaded where there are some: one slot of one is not that of the other."""
    momentum = optim.SGD(1e-4, momentum=0.5)
    plain = daskps.ArraySpec(3, "float16", 1.0)
    store = daskps.create({"w": plain}, optimizer=momentum)
    store.save(tmp_path)
    again = daskps.restore(tmp_path)
    assert again.optimizer == {"w": repr(momentum)}
    spec = daskps.ArraySpec(3, "float16", 1.0, master="float32")
    other = daskps.create({"w": spec}, optimizer=optim.SGD(1e-4))
    with pytest.raises(CheckpointError, match="other optimizers"):
        daskps.train(
            other,
            lambda params, X, y: {"w": np.ones(3)},
            np.zeros((4, 1)),
            checkpoint=daskps.Checkpoints(str(tmp_path)),
            resume=True,
        )
    assert other["w"].pull().tolist() == [1.0] * 3


def test_scaled_rates_come_back(tmp_path):
    """And a run that resumes goes on as if it had not ended, what it had seen included."""

    def gradient(params, X, y):
        return 1.0, {"w": np.ones(3)}

    def plateau():
        return daskps.ReduceOnPlateau(factor=0.5, patience=1, cooldown=1)

    X, how = np.zeros((4, 1)), dict[str, Any](batch_size=2, trainers=2)
    straight = daskps.create({"w": np.zeros(3)}, optimizer=optim.SGD(1.0), shards=2)
    daskps.train(straight, gradient, X, epochs=9, callbacks=[plateau()], **how)
    url = daskps.Checkpoints(str(tmp_path))
    store = daskps.create({"w": np.zeros(3)}, optimizer=optim.SGD(1.0), shards=2)
    daskps.train(
        store, gradient, X, epochs=5, callbacks=[plateau()], checkpoint=url, **how
    )
    again = daskps.restore(tmp_path, shards=1)
    more: dict[str, Any] = {"checkpoint": url, "resume": True, "callbacks": [plateau()]}
    daskps.train(again, gradient, X, epochs=9, **more, **how)
    assert again["w"].pull().tolist() == straight["w"].pull().tolist()
    assert straight["w"].pull()[0] > -9
    again.push({"w": np.ones(3)})
    straight.push({"w": np.ones(3)})
    assert again["w"].pull().tolist() == straight["w"].pull().tolist()


def test_first_rows_may_be_others(tmp_path):
    spec = daskps.TableSpec(None, 2, "float64", init=1.0)
    store = daskps.create({"t": spec})
    store["t"].assign([5], [[7.0, 8.0]])
    store.save(tmp_path)
    again = daskps.restore(tmp_path, init={"t": 3.0})
    assert again["t"].pull([5, 6]).tolist() == [[7.0, 8.0], [3.0, 3.0]]
    with pytest.raises(UnknownParameterError, match="'w', which is no unbounded table"):
        daskps.restore(tmp_path, init={"w": 3.0})
    with pytest.raises(LayoutError, match="unbounded rows"):
        daskps.restore(tmp_path, init={"t": lambda shape, dtype, rng: 0})


def test_a_taken_name(tmp_path, here):
    store = trained("taken")
    store.save(tmp_path)
    with pytest.raises(StoreExistsError):
        daskps.restore(tmp_path, name="taken")
    again = daskps.restore(tmp_path, name="taken", overwrite=True)
    assert values(again)
    again.delete()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"url": ""}, ValueError),
        ({"url": 7}, TypeError),
        ({"shards": 0}, LayoutError),
        ({"shards": 1.5}, TypeError),
        ({"servers": "some"}, ValueError),
        ({"name": ""}, ValueError),
        ({"overwrite": "yes"}, TypeError),
        ({"optimizer": "adam"}, TypeError),
        ({"init": 3}, TypeError),
    ],
)
def test_arguments_of_restore_that_cannot_be(tmp_path, arguments, error):
    daskps.create({"w": np.zeros(4)}).save(tmp_path)
    before = uids()
    with pytest.raises(error):
        daskps.restore(**({"url": tmp_path} | arguments))
    assert uids() <= before


def test_urls_and_options_that_cannot_be_saved_to(tmp_path):
    store = daskps.create({"w": np.zeros(4)})
    (tmp_path / "file").write_text("")
    for url, error in (
        ("", ValueError),
        (3, TypeError),
        (tmp_path / "file", CheckpointError),
        ("nosuch://x", CheckpointError),
        ("s3://bucket/x", CheckpointError),
    ):
        with pytest.raises(error):
            store.save(url)
    with pytest.raises(TypeError, match="storage_options"):
        store.save(tmp_path, storage_options={"key": object()})
    store.save(tmp_path / "well")  # nothing is held any more


def test_a_save_sweeps_what_nobody_has_finished(tmp_path):
    store = daskps.create({"w": np.zeros(4)})
    first = store.save(tmp_path)
    left = tmp_path / f"ckpt-{7:012d}-0123abcd"
    left.mkdir()
    (left / "zarr.json").write_text("{}")
    os.utime(left / "zarr.json", (0, 0))
    second = store.save(tmp_path)
    assert not left.exists()
    assert [first.sequence, second.sequence] == [1, 8]
    assert daskps.list_checkpoints(tmp_path) == [first, second]


# -- files that are not what was written ---------------------------------------


def changed(path, position, bits=0xFF):
    content = bytearray(path.read_bytes())
    content[position] ^= bits
    path.write_bytes(content)


def test_every_file_flipped_torn_or_missing_is_found(tmp_path):
    """Named with its parameter, and nothing of a store stays."""
    store = trained()
    info = store.save(tmp_path)
    folder = tmp_path / info.url.rpartition("/")[2]
    whole = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    before = uids()
    for path, content in whole.items():
        name = str(path.relative_to(folder))
        for damaged in (
            content[:-1] + bytes([content[-1] ^ 1]),
            content[: len(content) // 2],
            None,
        ):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=path.name) as caught:
                daskps.restore(info.url)
            assert caught.value.file.endswith(name)
            if path.name not in {MANIFEST, "zarr.json"}:
                assert caught.value.parameter in {"w", "b/c", "n", "emb", "any"}
            path.write_bytes(content)
    assert uids() <= before
    assert values(daskps.restore(info.url)) == values(store)


def test_a_checkpoint_deleted_under_a_restore(tmp_path, monkeypatch):
    store = trained()
    info = store.save(tmp_path)
    folder = tmp_path / info.url.rpartition("/")[2]
    create = creation.create

    async def later(*args: Any) -> Any:
        (folder / "weights/w/c/0/0").unlink()
        return await create(*args)

    monkeypatch.setattr(creation, "create", later)
    with pytest.raises(CheckpointError, match=r"weights/w/c/0/0 .*deleted") as caught:
        daskps.restore(info.url)
    assert caught.value.file.endswith("weights/w/c/0/0")


def test_a_large_restore_has_more_time(tmp_path, monkeypatch):
    info = daskps.create({"w": np.zeros(1000)}).save(tmp_path)
    given, create = [], creation.create

    async def noted(link: Any, plan: Any, seconds: float) -> Any:
        given.append(seconds)
        return await create(link, plan, seconds)

    monkeypatch.setattr(creation, "create", noted)
    monkeypatch.setattr(lifecycle, "SAVED_NBYTES_A_SECOND", 1.0)
    daskps.restore(tmp_path)
    daskps.restore(tmp_path, timeout=70)
    assert given == [60 + info.nbytes, 70]


def test_a_newer_format(tmp_path):
    info = daskps.create({"w": np.zeros(4)}).save(tmp_path)
    at = tmp_path / info.url.rpartition("/")[2] / MANIFEST
    said = json.loads(b"{" + at.read_bytes().split(b"\n", 1)[1])
    at.write_bytes(sealed(said | {"format": 99}))
    with pytest.raises(CheckpointError, match=r"format 99.*upgrade"):
        daskps.restore(tmp_path)
    assert daskps.list_checkpoints(tmp_path) == []


# -- filesystems that fail -----------------------------------------------------

SECRET = "hunter2-very-secret"


class Faulty(MemoryFileSystem):
    """One in memory, of which one operation fails, and says its secrets."""

    protocol = "fault"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    #: The number of the operation that fails, and of all that there were; whether all
    #: that come after it fail too, as of a process that is no more.
    fails_at = -1
    n = 0
    dies = False

    def __init__(self, token: str = "", **more: Any) -> None:
        super().__init__(**more)
        self.token = token

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("fault://", "memory://")))

    @classmethod
    def reset(cls, fails_at: int = -1, *, dies: bool = False) -> None:
        cls.fails_at, cls.n, cls.dies = fails_at, 0, dies

    @classmethod
    def files_there(cls) -> dict[str, bytes]:
        return {path: file.getvalue() for path, file in cls.store.items()}

    @classmethod
    def clear(cls) -> None:
        cls.store.clear()

    def count(self, what: str) -> None:
        cls = type(self)
        at, cls.n = cls.n, cls.n + 1
        if at == cls.fails_at or (cls.dies and at > cls.fails_at):
            raise RuntimeError(f"{what} by {self.token} failed")

    def pipe_file(self, path, value, mode="overwrite", **more):
        if type(self).n == type(self).fails_at:  # half of it is there
            super().pipe_file(path, value[: len(value) // 2], mode=mode, **more)
        self.count(f"pipe of {path}")
        super().pipe_file(path, value, mode=mode, **more)

    def cat_file(self, path, start=None, end=None, **more):
        self.count(f"cat of {path}")
        return super().cat_file(path, start, end, **more)

    def find(self, path, maxdepth=None, withdirs=False, detail=False, **more):
        self.count(f"find of {path}")
        return super().find(path, maxdepth, withdirs, detail, **more)

    def rm(self, path, recursive=False, maxdepth=None):
        self.count(f"rm of {path}")
        super().rm(path, recursive=recursive, maxdepth=maxdepth)

    def ls(self, path, detail=True, **more):
        if self.dies:
            self.count(f"ls of {path}")
        return super().ls(path, detail=detail, **more)


fsspec.register_implementation("fault", Faulty, clobber=True)


@pytest.fixture
def faulty():
    Faulty.clear()
    Faulty.pseudo_dirs[:] = [""]
    Faulty.reset()
    yield Faulty
    Faulty.reset()


OPTIONS = {"token": SECRET}


class LocalDisk(Disk):
    """Files of this machine, with what `Faulty` has."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def files_there(self) -> dict[str, bytes]:
        found = [path for path in self.folder.rglob("*") if path.is_file()]
        return {str(path): path.read_bytes() for path in found}

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def local_disk(tmp_path, monkeypatch):
    disk, remove = LocalDisk(tmp_path / "ckpts"), LocalFileSystem.rm

    def counted(fs, path, *args, **more):
        with disk.lock:
            disk.step("remove")
        remove(fs, path, *args, **more)

    monkeypatch.setattr(LocalFileSystem, "rm", counted)
    monkeypatch.setattr(local_files, "os", disk)
    return disk


@pytest.fixture(params=["fault", "local"])
def fallible(request):
    """A filesystem whose operations may fail, the URL, options, whether it renames."""
    if request.param == "fault":
        return request.getfixturevalue("faulty"), "fault://ckpts", OPTIONS, False
    disk = request.getfixturevalue("local_disk")
    return disk, str(disk.folder), None, True


def test_all_is_on_the_disk_before_the_manifest(local_disk):
    """Of all hosts: the content of files, their names, and those of their folders."""
    store = trained(shards=3)
    for n in (1, 2):
        store.save(local_disk.folder)
        assert local_disk.at_risk == [set()] * n
    assert not local_disk.names | local_disk.content
    assert local_disk.log.count("rename") == 2


def test_every_operation_of_a_save_may_fail(fallible):
    """Then there is an error without secrets, the checkpoint before is the newest, and
    the next save is as if nothing had been."""
    files, url, options, is_local = fallible
    store = small() if is_local else trained()
    first = store.save(url, storage_options=options)
    files.reset()
    store.save(url, storage_options=options)
    n_operations = files.n
    assert n_operations > 30
    failed = 0
    for at in range(n_operations):
        known = len(daskps.list_checkpoints(url, storage_options=options))
        assert known == 2 + at - failed
        files.reset(at)
        told = ""
        try:
            store.save(url, storage_options=options)
        except CheckpointError as error:
            failed, told = failed + 1, "".join(traceback.format_exception(error))
        files.reset()
        assert SECRET not in told
        assert not told or ("OSError" if is_local else "RuntimeError") in told
    # Whether others' remains can be swept makes no difference.
    assert failed >= n_operations - 6
    assert values_of(daskps.restore(url, storage_options=options)) == values_of(store)
    last = store.save(url, storage_options=options)
    assert last.sequence > first.sequence
    assert last.nbytes == first.nbytes


def test_a_save_may_be_killed_at_every_operation(fallible):
    """Nothing of its process goes on, and half of the file that it wrote is there."""
    files, url, options, is_local = fallible
    store = small()
    at, torn = 0, 0
    while True:
        files.clear()
        first = store.save(url, storage_options=options)
        before = files.files_there()
        files.reset(at, dies=True)
        try:
            store.save(url, storage_options=options)
            saved = 1
        except CheckpointError:
            saved = 0
        was_killed = files.n > at
        files.reset()
        after = files.files_there()
        assert {path: after[path] for path in before} == before
        has_manifest = any(path.endswith(MANIFEST) for path in after.keys() - before)
        torn += not saved and has_manifest
        there = daskps.list_checkpoints(url, storage_options=options)
        assert find(url, options).url == there[-1].url
        assert there[0] == first
        # What was renamed is whole, though nobody lives to tell.
        assert len(there) == 1 + (has_manifest if is_local else saved)
        again = daskps.restore(there[-1].url, storage_options=options)
        assert values_of(again) == values_of(store)
        again.delete()
        third = store.save(url, storage_options=options)
        assert third.sequence > there[-1].sequence
        listed = daskps.list_checkpoints(url, storage_options=options)
        assert listed == [*there, third]
        if not was_killed:
            break
        at += 1
    assert at > 10
    # In the middle of the manifest, which is then none; or between its name and the
    # end.
    assert torn == 1


def test_every_operation_of_a_restore_may_fail(faulty):
    store = trained()
    url = "fault://ckpts"
    store.save(url, storage_options=OPTIONS)
    before = uids()
    faulty.reset()
    daskps.restore(url, storage_options=OPTIONS).delete()
    n_operations = faulty.n
    assert n_operations > 10
    for at in range(n_operations):
        faulty.reset(at)
        with pytest.raises(CheckpointError, match="RuntimeError") as caught:
            daskps.restore(url, storage_options=OPTIONS)
        assert SECRET not in "".join(traceback.format_exception(caught.value))
        assert uids() <= before


def test_secrets_are_in_no_event(faulty, monkeypatch):
    events: list[Any] = []
    monkeypatch.setattr(Hub, "log_event", lambda *event: events.append(event))
    store = trained()
    store.save("fault://ckpts", storage_options=OPTIONS)
    daskps.restore("fault://ckpts", storage_options=OPTIONS)
    faulty.reset(5)
    with pytest.raises(CheckpointError):
        store.save("fault://ckpts", storage_options=OPTIONS)
    assert [of for _, _, of in events if of.get("action") == "store-saved"] or events
    assert SECRET not in repr(events)
    assert SECRET not in repr(CheckpointTarget("fault://x", OPTIONS))
