"""`train(checkpoint=, resume=)`: a run that goes on in another store, to the last bit."""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import (
    CheckpointError,
    Checkpoints,
    ConsistencyError,
    TableSpec,
    UnsavedRunError,
    optim,
)
from daskps.cluster.caller import recovery, saving
from daskps.cluster.caller.snapshots import drop_cut
from daskps.training import job, saves
from daskps.training.saves import history_of
from tests.support import INSIDE, PATIENCE, until
from tests.training.test_epochs import HOW, X, Y, bits, drawn, gradient, told

ROWS: dict[str, Any] = {"rows": {"emb": drawn}}


def new_store(**kwargs):
    params = {"w": np.arange(3.0), "b": 0.5}
    emb = TableSpec(30, 2, "float64", init=0.25)
    rule = kwargs.pop("optimizer", optim.Adam(0.05))
    return daskps.create({**params, "emb": emb}, optimizer=rule, **kwargs)


def train(store, epochs, function=gradient, **how):
    return daskps.train(store, function, X, Y, epochs=epochs, **HOW | how)


def manifests(path):
    return sorted(Path(path).glob("ckpt-*/manifest.json"))


#: At which call `fails` raises, in this process, once there is another checkpoint.
CALLS: dict[str, Any] = {}


class FailedError(Exception):
    """What a gradient raises."""


def fails(params, X, y):
    """As `gradient`, but one call raises."""
    if next(CALLS["n"]) == CALLS["last"]:
        until(has_come_further)
        raise FailedError
    return gradient(params, X, y)


def has_come_further():
    """Return whether there is another checkpoint.

    It may be of the moment before the first push: while it is written others are left
    out, and once all trainers wait for this one no later one is due.
    """
    return {*manifests(CALLS["path"])} - CALLS["before"]


def version_of(manifest):
    return json.loads(manifest.read_bytes())["version"]


def fails_at_once(params, X, y):
    """Raise before any round is complete."""
    raise FailedError


def fail_at(last, path=""):
    CALLS.update(n=itertools.count(), last=last, path=path)
    CALLS["before"] = set(manifests(path))


@pytest.mark.parametrize("way", INSIDE, indirect=True)
@pytest.mark.parametrize(
    ("execution", "options"),
    [("resident", ROWS), ("graph", ROWS), ("resident", {"sync_every": 3})],
)
def test_another_store_goes_on_to_the_last_bit(way, execution, options, tmp_path):
    """The run fails, its store goes, and the same lines are called again."""
    with new_store() as whole:
        together = train(whole, 4, **options)
        expected = bits(whole)
    where = Checkpoints(tmp_path, every=1)
    how = {"execution": execution, "checkpoint": where, "resume": True, **options}
    for shards, last in ((3, 27), (2, 12), (1, None)):
        with new_store(shards=shards) as store:
            fail_at(last, tmp_path)
            loaded = max(map(version_of, CALLS["before"]), default=0)
            try:
                result = train(store, 4, fails, **how)
            except FailedError:
                continue
            assert bits(store) == expected
    assert len(manifests(tmp_path)) <= where.keep
    # Within its first epoch a run counts on from the round it begins with.
    is_within = any(epoch.since for epoch in result.history)
    assert not loaded or is_within or result.stats.clock < together.stats.clock
    assert result.history[-1].epoch == 3
    for found, entry in zip(result.history[::-1], together.history[::-1], strict=False):
        assert found.epoch == entry.epoch
        # None where an epoch ended while the run failed: nobody has heard of its loss.
        if not found.since and found.loss is not None:
            assert found.loss == entry.loss


@pytest.mark.parametrize("way", INSIDE, indirect=True)
def test_a_store_whose_first_run_failed_is_loaded(way, tmp_path):
    """Its first gradient raised before a round was complete: it is at version 0."""
    where = Checkpoints(tmp_path)
    with new_store() as whole:
        train(whole, 2, checkpoint=where, **ROWS)
        saved = bits(whole)
        train(whole, 1, **ROWS)
        expected = bits(whole)
    with new_store(shards=2) as store:
        with pytest.raises(FailedError):
            train(store, 1, fails_at_once, **ROWS)
        assert store.version == 0
        train(store, 2, checkpoint=where, resume=True, **ROWS)
        assert bits(store) == saved
        train(store, 1, **ROWS)
        assert bits(store) == expected


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_a_run_that_has_ended_is_not_run_again(way, tmp_path):
    how: dict[str, Any] = {"checkpoint": Checkpoints(tmp_path), "resume": True, **ROWS}
    with new_store() as store:
        result = train(store, 3, **how)
        expected = bits(store)
        assert [e.epoch for e in result.history] == [0, 1, 2]
        version = store.version
    fail_at(None, tmp_path)
    with new_store(shards=1) as store:
        again = train(store, 3, fails, **how)
        assert bits(store) == expected
        assert told(again.history) == told(result.history)
        assert again.version == version
        # More of them: this store is the one that goes on now.
        more = train(store, 4, **how)
        assert [e.epoch for e in more.history] == [0, 1, 2, 3]
    last = json.loads(manifests(tmp_path)[-1].read_text())
    assert last["epochs"] == [3, 7, 7]


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_saves_after_each_epoch_and_at_the_end(way, tmp_path, monkeypatch):
    """With a stop nobody goes on while that is decided: the cut is at the border."""
    saved: list[int] = []
    take = saving.take

    async def taken(*args):
        found = await take(*args)
        saved.append(len(saved))
        return found

    monkeypatch.setattr(saving, "take", taken)
    with new_store(shards=2) as store:
        train(store, 2, checkpoint=Checkpoints(tmp_path, keep=1), stop=lambda h: False)
    assert 1 <= len(saved) <= 3
    [last] = manifests(tmp_path)
    found = json.loads(last.read_text())
    assert found["epochs"] == [0, 7, 14]
    assert [row["epoch"] for row in found["history"]] == [0, 1]


class Ends:
    """A callback that ends the run after an epoch; it lets saves be written before."""

    def __init__(self, error, taken, *, epochs=2, writes=True):
        self.error, self.taken, self.epochs, self.writes = error, taken, epochs, writes

    def on_epoch(self, run):
        assert len(self.taken) == len(run.history)
        if len(run.history) == self.epochs:
            if self.writes:
                self.taken.written.set()
            raise self.error


class Taken(list[Any]):
    """The cuts that were taken; of the last one nothing is written before it may be."""

    def __init__(self, monkeypatch, *, waits_for=2):
        super().__init__()
        self.written = threading.Event()
        take, write = saving.take, saving.write

        async def taken(*args):
            self.append(await take(*args))
            return self[-1]

        async def slow(*args, **kwargs):
            if len(self) >= waits_for:
                await asyncio.to_thread(self.written.wait, PATIENCE)
            return await write(*args, **kwargs)

        monkeypatch.setattr(saving, "take", taken)
        monkeypatch.setattr(saving, "write", slow)


def saved_first(path):
    """Return a `stop` that waits for the checkpoint of the first epoch."""
    return lambda history: until(lambda: manifests(path)) and False


@pytest.mark.parametrize("way", INSIDE, indirect=True)
@pytest.mark.parametrize("execution", ["resident", "graph"])
@pytest.mark.parametrize("error", [FailedError, KeyboardInterrupt])
def test_what_is_due_is_saved_before_an_error_is_raised(
    way, execution, error, tmp_path, monkeypatch
):
    where, taken = Checkpoints(tmp_path), Taken(monkeypatch)
    how = {"checkpoint": where, "execution": execution, "stop": saved_first(tmp_path)}
    with new_store(shards=2) as store, pytest.raises(error) as caught:
        train(store, 9, callbacks=[Ends(error, taken)], **how)
    newest = json.loads(manifests(tmp_path)[-1].read_text())
    assert newest["epochs"] == [0, 7, 14]
    assert [entry["epoch"] for entry in newest["history"]] == [0, 1]
    [note] = [n for n in caught.value.__notes__ if "checkpoint" in n]
    assert note.startswith("the newest checkpoint has 2 epochs, with which train(")
    with new_store() as store, new_store() as whole:
        result = train(store, 3, checkpoint=where, resume=True, execution=execution)
        assert [entry.epoch for entry in result.history] == [0, 1, 2]
        train(whole, 3)
        assert bits(store) == bits(whole)


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_an_epoch_that_cannot_be_validated_is_saved(way, tmp_path):
    def validate(params):
        raise FailedError

    how: dict[str, Any] = {"validate": validate, "stop": lambda history: False}
    with new_store() as store, pytest.raises(FailedError) as caught:
        train(store, 9, checkpoint=Checkpoints(tmp_path), **how)
    assert "the newest checkpoint has 1 epoch" in caught.value.__notes__[-1]


GIVEN_UP = [
    ("after a while", FailedError),
    ("at its timeout", TimeoutError),
    ("by Ctrl-C again", KeyboardInterrupt),
]


@pytest.fixture
def heard() -> Iterator[None]:
    """Ctrl-C is heard, also where the tests were started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("way", ["inside"], indirect=True)
@pytest.mark.parametrize(("ends", "error"), GIVEN_UP)
def test_a_save_of_a_run_that_has_ended_is_given_up(
    way, ends, error, tmp_path, monkeypatch
):
    taken, conclude = Taken(monkeypatch, waits_for=1), saves.Saves.conclude
    carriers: list[str] = []

    async def watched(self, seconds):
        if ends == "by Ctrl-C again":
            # Of this thread: it wakes no wait of the main one, as a signal that comes
            # just before one does not.
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        try:
            await conclude(self, seconds)
        except asyncio.CancelledError:
            carriers.append("by Ctrl-C again")
            raise

    monkeypatch.setattr(saves.Saves, "conclude", watched)
    if ends == "after a while":
        monkeypatch.setattr(job, "FINISH_SECONDS", 0.05)
    called = [Ends(error, taken, epochs=1, writes=False)] * (error is not TimeoutError)
    how: dict[str, Any] = {"checkpoint": Checkpoints(tmp_path), "callbacks": called}
    how["timeout"] = 1.0 if error is TimeoutError else PATIENCE
    with new_store() as store, pytest.raises(error) as caught:
        train(store, 10**6, **how)
    if ends == "by Ctrl-C again":
        # The caller goes on at once; the event loop hears of it a moment later.
        until(lambda: carriers == [ends])
    taken.written.set()
    assert carriers == [ends] * (ends == "by Ctrl-C again")
    assert len(taken) == 1
    assert manifests(tmp_path) == []
    assert caught.value.__notes__ == ["there is no checkpoint of this run"]


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_a_live_store_goes_on_from_where_it_is(way, tmp_path):
    where = Checkpoints(tmp_path)
    with new_store() as store, new_store() as whole:
        train(store, 1, checkpoint=where, **ROWS)
        train(store, 1, **ROWS)
        result = train(store, 3, checkpoint=where, resume=True, **ROWS)
        # Of the epoch in between nothing was saved.
        assert [e.epoch for e in result.history] == [0, 2]
        train(whole, 3, **ROWS)
        assert bits(store) == bits(whole)


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_a_store_with_a_push_is_loaded_from_none(way, tmp_path):
    """It would begin with epoch 0, and nobody might see that."""
    how: dict[str, Any] = {"checkpoint": Checkpoints(tmp_path), "resume": True, **ROWS}
    with new_store() as store:
        train(store, 2, **how)
    with new_store() as store:
        store.assign({"b": 1.0})
        with pytest.raises(CheckpointError, match=r"further \(epoch 2\)"):
            train(store, 3, **how)
        assert max(store.versions) == 1
        # What is further goes on.
        train(store, 3, **ROWS)
        assert train(store, 4, **how).history[-1].epoch == 3


@pytest.mark.parametrize("way", ["process"], indirect=True)
@pytest.mark.parametrize("execution", ["resident", "graph"])
def test_processes_go_on_where_a_checkpoint_was_saved(way, execution, tmp_path):
    """The caller ends the run after an epoch; its store goes, and with it its memory."""

    class Strike:
        def on_epoch(self, run):
            until(lambda: manifests(tmp_path))
            raise FailedError

    where = Checkpoints(tmp_path, every=2)
    how = {"execution": execution, "checkpoint": where, "resume": True, **ROWS}
    with new_store(shards=2) as whole, new_store(shards=2) as store:
        train(whole, 3, **ROWS)
        with pytest.raises(FailedError):
            train(store, 3, callbacks=[Strike()], **how)
        store.close()
        with new_store(shards=3) as other:
            result = train(other, 3, **how)
            assert bits(other) == bits(whole)
            assert result.stats.clock < 21


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_without_rounds(way, tmp_path, caplog):
    """One trainer: nobody is ahead of it, and the bits are the same."""
    caplog.set_level("INFO", "daskps.training.saves")
    how: dict[str, Any] = {"sync": "asp", "trainers": 1, "weights": None, **ROWS}
    where = {"checkpoint": Checkpoints(tmp_path, every=1), "resume": True}
    with new_store() as whole, new_store() as store, new_store(shards=1) as other:
        train(whole, 3, **how)
        fail_at(17, tmp_path)
        with pytest.raises(FailedError):
            train(store, 3, fails, **how, **where)
        folder = manifests(tmp_path)[-1].parent.name
        result = train(other, 3, **how, **where)
        assert bits(other) == bits(whole)
        assert result.stats.clock < 36
    since = {entry.since for entry in result.history} - {0}
    [said] = [text for text in caplog.messages if "goes on from" in text]
    assert f"{other.name!r} goes on from its checkpoint {folder}: after " in said
    [rounds] = re.findall(r" epochs? and (\d+) rounds?$", said)
    assert {int(rounds)} == (since or {0})


@pytest.mark.parametrize("rows", [[{}], [{"epoch": "x"}], [[1]], [{"epoch": 1}]])
def test_a_history_that_is_none(rows):
    with pytest.raises(CheckpointError, match="a-folder"):
        history_of(rows, "a-folder")


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_nothing_is_loaded_of_what_does_not_fit(way, tmp_path):
    how: dict[str, Any] = {"checkpoint": Checkpoints(tmp_path), "resume": True, **ROWS}
    with new_store() as store:
        train(store, 1, **how)
    for options, error, words in (
        ({"optimizer": optim.SGD(0.1)}, CheckpointError, "other optimizers"),
        ({"batch_size": 5}, ValueError, r"batch_size=5 \(it had 4\)"),
        ({"trainers": 2, "weights": None}, ValueError, r"trainers=2 \(it had 3\)"),
    ):
        of = {k: v for k, v in options.items() if k == "optimizer"}
        with new_store(**of) as store:
            before = bits(store)
            changed = {k: v for k, v in options.items() if k != "optimizer"}
            with pytest.raises(error, match=words):
                train(store, 2, **how, **changed)
            assert bits(store) == before
            assert store.version == 0
    with daskps.create({"w": np.zeros(3)}, optimizer=optim.Adam(0.05)) as store:
        with pytest.raises(CheckpointError, match="other parameters"):
            train(store, 2, **{**how, "rows": None})
        assert store.version == 0
    newest = manifests(tmp_path)[-1].parent
    damaged = next(f for f in sorted(newest.glob("weights/**/c/*")) if f.is_file())
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with new_store() as store:
        before = bits(store)
        with pytest.raises(CheckpointError):
            train(store, 2, **how)
        assert bits(store) == before
        assert store.version == 0


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_an_older_checkpoint_is_not_taken_in_silence(way, tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(
        recovery.logger, "warning", lambda text, *of: said.append(text % of)
    )
    how: dict[str, Any] = {"checkpoint": Checkpoints(tmp_path), "resume": True}
    with new_store() as store:
        train(store, 1, **how)
        train(store, 2, **how)
        expected = bits(store)
    assert said == []
    newest = manifests(tmp_path)[-1]
    newest.write_text("{}")
    with new_store() as store:
        train(store, 2, **how)
        assert bits(store) == expected
    assert len(said) == 1
    assert f"without a checkpoint: {newest.parent.name}/manifest.json is no" in said[0]


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_a_url_that_cannot_be_written_is_heard_of(way, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with new_store() as store, pytest.raises((CheckpointError, OSError)):
        train(store, 50, checkpoint=Checkpoints(tmp_path / "file" / "below"))


def full_at(monkeypatch, *wrong):
    """Have those saves of a run fail that have these numbers."""
    write, tried = saving.write, list[int]()

    async def full(*args, **kwargs):
        tried.append(len(tried))
        if tried[-1] in wrong:
            await drop_cut(args[0], args[1].name)
            raise CheckpointError("no space is left")
        return await write(*args, **kwargs)

    monkeypatch.setattr(saving, "write", full)
    return tried


@pytest.fixture
def said(monkeypatch):
    found: list[str] = []
    monkeypatch.setattr(
        saves.logger, "warning", lambda text, *of: found.append(text % of)
    )
    return found


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_a_later_save_that_fails_is_logged(way, tmp_path, monkeypatch, said):
    """And the end is saved."""
    tried = full_at(monkeypatch, 1)

    def stop(history):
        return len(tried) > 1

    with new_store() as store:
        result = train(store, 5000, checkpoint=Checkpoints(tmp_path), stop=stop)
    assert len(tried) == 3
    [*_, last] = manifests(tmp_path)
    assert json.loads(last.read_text())["epochs"] == [0, 7, 7 * len(result.history)]
    assert said == ["daskps: a checkpoint could not be written: no space is left"]


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_an_end_that_is_not_saved_is_told(way, tmp_path, monkeypatch, said):
    """With the result, and the store as the run has left it."""
    full_at(monkeypatch, *range(1, 9))

    def stop(history):
        until(lambda: manifests(tmp_path))

    with new_store() as store, new_store() as whole:
        expected = train(whole, 3, **ROWS)
        with pytest.raises(UnsavedRunError, match="no space is left") as caught:
            train(store, 3, checkpoint=Checkpoints(tmp_path), stop=stop, **ROWS)
        error = caught.value
        assert "the newest checkpoint has 1 epoch;" in str(error)
        assert isinstance(error.__cause__, CheckpointError)
        assert told(error.result.history) == told(expected.history)
        assert error.result.version == store.version == whole.version
        assert bits(store) == bits(whole)
        monkeypatch.undo()
        info = store.save(tmp_path / "elsewhere")
        assert info.version == store.version
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.result.version) == (str(error), error.result.version)
    assert "\n" not in repr(error)


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_the_end_waits_for_a_save_of_somebody_else(way, tmp_path, monkeypatch):
    take, calls = saving.take, itertools.count()

    async def taken(*args):
        if next(calls) < 2:
            raise ConsistencyError("another save of it is still being written")
        return await take(*args)

    monkeypatch.setattr(saving, "take", taken)
    monkeypatch.setattr(saves, "LOOK_SECONDS", 0.01)
    how = {"checkpoint": Checkpoints(tmp_path, every=1000)}
    with new_store() as store:
        train(store, 1, **how)
        assert len(manifests(tmp_path)) == 1
        calls = itertools.count(-1000)
        monkeypatch.setattr(saves, "OTHERS_SECONDS", 0.05)
        with pytest.raises(UnsavedRunError, match="another save of it"):
            train(store, 1, **how)


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_what_a_save_lets_out_is_counted(way, tmp_path, monkeypatch, said):
    """It is said where it is of a save that takes long."""
    write, ended = saving.write, threading.Event()

    async def slow(*args, **kwargs):
        await asyncio.to_thread(ended.wait, PATIENCE)
        return await write(*args, **kwargs)

    monkeypatch.setattr(saving, "write", slow)
    for seconds in (1000.0, 0.0):
        ended.clear()
        monkeypatch.setattr(saves, "SLOW_SECONDS", seconds)

        def stop(history):
            if len(history) == 4:
                ended.set()

        with new_store() as store:
            result = train(store, 4, checkpoint=Checkpoints(tmp_path), stop=stop)
        assert result.stats.skipped_saves == 3
        assert "skipped_saves 3" in repr(result)
        assert len(said) == (seconds == 0.0)
    assert "is left out; save less often" in said[0]


def test_what_checkpoints_takes(tmp_path):
    assert Checkpoints(tmp_path).url == str(tmp_path)
    secret = Checkpoints("s3://who:pass@b/x?t=1", storage_options={"key": "hidden"})
    for text in (repr(secret), str(secret)):
        assert "pass" not in text
        assert "hidden" not in text
    for given, error, words in (
        ({"url": 5}, TypeError, "URL"),
        ({"url": ""}, ValueError, "URL"),
        ({"every": 0}, ValueError, "every must be at least 1"),
        ({"every": "round"}, ValueError, "'epoch' or a number"),
        ({"every": 1.5}, TypeError, "every"),
        ({"keep": 0}, ValueError, "keep"),
    ):
        with pytest.raises(error, match=words):
            Checkpoints(**{"url": tmp_path, **given})


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_arguments_that_do_not_go_together(way, tmp_path):
    where = Checkpoints(tmp_path)
    with new_store() as store:
        for given, error, words in (
            ({"resume": True}, ValueError, "resume=True needs checkpoint="),
            ({"checkpoint": tmp_path}, TypeError, r"daskps.Checkpoints\(url\)"),
            ({"checkpoint": where, "resume": 1}, TypeError, "resume"),
            (
                {"checkpoint": where, "resume": True, "reset_optimizer": True},
                ValueError,
                "reset_optimizer=True",
            ),
        ):
            with pytest.raises(error, match=words):
                train(store, 1, **given)
        assert not manifests(tmp_path)
