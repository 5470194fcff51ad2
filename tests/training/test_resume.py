"""Runs that go on in the middle of an epoch, to the last bit."""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import CheckpointError, TableSpec, optim
from daskps.combination import Combination
from daskps.consistency import ASP
from daskps.epochs import Epochs
from daskps.training.job import Job
from daskps.training.progress import Progress, TrainedBy
from daskps.training.steps import FitPlan
from tests.seams import bound_link
from tests.support import INSIDE
from tests.training.test_epochs import HOW, X, Y, bits, drawn, gradient

#: At which call `fails` raises, in this process.
CALLS: dict[str, Any] = {"n": itertools.count(), "last": None}


class FailedError(Exception):
    """What a gradient raises."""


def fails(params, X, y):
    """As `gradient`, but one call raises."""
    if next(CALLS["n"]) == CALLS["last"]:
        raise FailedError
    return gradient(params, X, y)


def fail_at(last):
    CALLS.update(n=itertools.count(), last=last)


def resuming(**given):
    """Without checkpoints, which are elsewhere."""
    return Job(**given | {"resume": True})


@pytest.fixture
def resumed(monkeypatch):
    """Call `train` so that it goes on where the run before was ended."""

    def train(store, epochs, function=gradient, data=(X, Y), **how):
        with monkeypatch.context() as patched:
            patched.setattr("daskps.training.fit.Job", resuming)
            return daskps.train(store, function, *data, epochs=epochs, **HOW | how)

    return train


def new_store(**kwargs):
    params = {"w": np.zeros(3), "b": 0.5}
    emb = TableSpec(30, 2, "float64", init=0.25)
    return daskps.create({**params, "emb": emb}, optimizer=optim.Adam(0.05), **kwargs)


def place_of(store):
    """Return where the shards are, which must be all the same."""
    asked = bound_link(store).run(
        lambda: bound_link(store).directory("epochs", uid=store.uid)
    )
    return Epochs(*asked[0])


@pytest.mark.parametrize(
    ("way", "executions", "options"),
    [
        ("inside", ("resident", "graph"), {"rows": {"emb": drawn}}),
        ("queue", ("graph", "resident"), {"rows": {"emb": drawn}}),
        ("inside", ("resident", "resident"), {"sync_every": 3}),
        ("inside", ("graph", "graph"), {"sync_every": 3, "scheme": "random"}),
        ("inside", ("resident", "graph"), {"sync_every": 2, "average": "models"}),
    ],
    indirect=["way"],
)
def test_a_run_that_was_fenced_goes_on_to_the_last_bit(
    way, executions, options, resumed, rng
):
    """It fails twice, wherever that is, and is another execution after the first time."""
    with new_store(shards=3) as store, new_store(shards=2) as whole:
        expected = daskps.train(whole, gradient, X, Y, epochs=4, **HOW | options)
        history, places = [], [Epochs()]
        for execution in (*executions, executions[0]):
            last = None if len(places) == 3 else int(rng.integers(9, 22))
            fail_at(last)
            try:
                how = {"execution": execution, **options}
                result = resumed(store, 4, fails, **how)
            except FailedError:
                places.append(place_of(store))
            else:
                history += result.history
        assert places[0].place < places[1].place < places[2].place < (4, 0)
        assert bits(store) == bits(whole)
        # Epochs that had ended before are those of other calls; of the open one a part.
        for entry, whole_one in zip(
            history[::-1], expected.history[::-1], strict=False
        ):
            assert entry.epoch == whole_one.epoch
            if not entry.since:
                assert entry.loss == whole_one.loss
        assert history[0].since == places[2].within
        if history[0].since:
            assert f"epoch {history[0].epoch}: from round" in repr(result)
        # Moments and steps too.
        for one in (store, whole):
            daskps.train(one, gradient, X, Y, **HOW | options)
        assert bits(store) == bits(whole)


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_another_store_with_the_same_state_goes_on(way, resumed):
    """Memory, and what the directory knows of the run, is all there is to copy."""
    how: dict[str, Any] = {"rows": {"emb": drawn}}
    with new_store(shards=2) as store, new_store(shards=2) as other:
        fail_at(17)
        with pytest.raises(FailedError):
            daskps.train(store, fails, X, Y, epochs=3, **HOW | how)
        assert place_of(store).within
        for host in way.hosts:
            for (uid, index), hosted in list(host.shards.items()):
                if uid == store.uid:
                    copied = host.shards[other.uid, index].shard.segment
                    np.copyto(copied.buffer, hosted.shard.segment.buffer)
        asked = partial(way.link.directory, "trained_by")
        described = way.link.run(lambda: asked(uid=store.uid))
        way.link.run(lambda: asked(uid=other.uid, described=described))
        assert bits(other) == bits(store)
        resumed(other, 3, execution="graph", **how)
        resumed(store, 3, **how)
        with new_store(shards=2) as whole:
            daskps.train(whole, gradient, X, Y, epochs=3, **HOW | how)
            assert bits(other) == bits(store) == bits(whole)


def ones(params, X, y):
    """Count how often each row is trained on."""
    if next(CALLS["n"]) == CALLS["last"]:
        raise FailedError
    return {"n": np.ones((len(X), 1))}


@pytest.mark.parametrize("way", INSIDE, indirect=True)
@pytest.mark.parametrize(("sync", "trainers"), [("asp", 1), (daskps.SSP(1), 3)])
def test_without_rounds_from_the_slowest_trainer(way, sync, trainers, resumed):
    """No row is left out, and few are trained on twice: who was ahead begins there too."""
    how: dict[str, Any] = {
        "rows": {"n": lambda X: X},
        "sync": sync,
        "trainers": trainers,
        "weights": [5, 3, 1][:trainers],
        "batch_size": 2,
    }
    params = {"n": TableSpec(47, 1, "float64")}
    with daskps.create(params, optimizer=optim.SGD(1.0), shards=2) as store:
        fail_at(41)
        with pytest.raises(FailedError):
            daskps.train(store, ones, np.arange(47), epochs=3, **HOW | how)
        fail_at(None)
        at = place_of(store)
        assert at.first == 0 < at.clock
        result = resumed(store, 3, ones, data=(np.arange(47), None), **how)
        seen = -store["n"].pull(range(47))[:, 0]
        # Of an epoch an order: the batch that failed was read and not pushed.
        assert set(seen) <= ({3} if trainers == 1 else {3, 4})
        assert result.history[-1].epoch == 2
        assert place_of(store).following == 3


@pytest.mark.parametrize("way", ["inside"], indirect=True)
@pytest.mark.parametrize("sync", ["asp", "ssp"])
def test_after_a_stop_nobody_leaves_out_an_epoch(way, sync, resumed):
    """Who had few rows was at a lower clock than the others, and at the same epoch."""
    how: dict[str, Any] = {"rows": {"n": lambda X: X}, "sync": sync}
    params = {"n": TableSpec(47, 1, "float64")}
    fail_at(None)
    with daskps.create(params, optimizer=optim.SGD(1.0), shards=2) as store:
        data = (np.arange(47), None)
        stop: Any = {"stop": lambda history: len(history) == 2}
        resumed(store, 10, ones, data=data, **how, **stop)
        assert (store["n"].pull(range(47)) == -2).all()
        result = resumed(store, 4, ones, data=data, **how)
        assert (store["n"].pull(range(47)) == -4).all()
        assert [(e.epoch, e.since) for e in result.history] == [(2, 0), (3, 0)]


class Watches:
    """Notes what callbacks see."""

    def __init__(self):
        self.starts, self.epochs = [], []

    def on_start(self, run):
        self.starts.append((run.first, run.epochs, run.rounds))

    def on_epoch(self, run):
        self.epochs.append((run.history[-1].epoch, run.history[-1].since))


@pytest.mark.parametrize("way", ["inside"], indirect=True)
@pytest.mark.parametrize("execution", ["resident", "graph"])
def test_epochs_are_those_of_the_store_at_the_end(way, execution, resumed):
    watch, stops = Watches(), []

    def stop(history):
        stops.append(history[-1].epoch)
        return len(stops) == 2

    with new_store(shards=2) as store:
        fail_at(18)
        with pytest.raises(FailedError):
            daskps.train(store, fails, X, Y, epochs=5, **HOW, execution=execution)
        at = place_of(store)
        assert (at.per_epoch, at.ended) == (7, 1)
        assert at.within
        how: dict[str, Any] = {"execution": execution}
        result = resumed(store, 5, stop=stop, callbacks=[watch], **how)
        assert stops == [1, 2]
        assert watch.epochs == [(1, at.within), (2, 0)]
        assert watch.starts == [(1, 5, 4 * 7 - at.within)]
        assert [(e.epoch, e.since) for e in result.history] == watch.epochs
        version = store.version
        # Reached: nothing is done.
        for epochs in (1, 3):
            again = resumed(store, epochs, callbacks=[watch], **how)
            assert again.history == []
            assert again.version == version == store.version
            assert again.weights.keys() == {"w", "b"}
        assert [e.epoch for e in resumed(store, 4, **how).history] == [3]
        # A plain call afterwards does the next one, as ever.
        assert daskps.train(store, gradient, X, Y, **HOW).history[0].epoch == 4


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_what_differs_is_refused_by_name(way, resumed):
    with new_store(shards=2) as store:
        daskps.train(store, gradient, X, Y, **HOW)
        before = bits(store)
        for changed, words in (
            ({"batch_size": 5}, r"batch_size=5 \(it had 4\)"),
            ({"seed": 4}, r"seed=4 \(it had 3\)"),
            ({"shuffle": False}, r"shuffle=False \(it had True\)"),
            ({"sync_every": 2}, r"sync_every=2 \(it had 1\)"),
            ({"average": "models"}, r"average='models'"),
            ({"sync": "asp"}, r"sync='asp' \(it had 'bsp'\)"),
            ({"sync": "ssp"}, r"sync='ssp\(3\)' \(it had 'bsp'\)"),
            ({"scheme": "random"}, r"scheme='random' \(it had 'contiguous'\)"),
            ({"trainers": 2, "weights": None}, r"trainers=2 \(it had 3\)"),
            ({"weights": [4, 4, 1]}, r"rows for trainer 0 \(it had 26\)"),
            ({"seed": 7, "batch_size": 9}, r"seed=7.*batch_size=9"),
        ):
            with pytest.raises(ValueError, match=words):
                resumed(store, 2, **changed)
        assert bits(store) == before
        # How many trainers there are is the run's before.
        resumed(store, 2, trainers=None)
        with new_store() as whole:
            daskps.train(whole, gradient, X, Y, epochs=2, **HOW)
            assert bits(store) == bits(whole)


RUN = TrainedBy("ssp(3)", "random", 10**30, 4, True, 0, "gradients", (26, 16, 5), 9)


def test_progress_travels_as_plain_values():
    for progress in (Progress(Epochs(3, 7, 12), RUN), Progress(Epochs(2, 0, 0))):
        text = json.dumps(progress.to_json())
        assert Progress.from_json(json.loads(text)) == progress
    values = Progress(Epochs(3, 7, 12), RUN).to_json()
    bad: tuple[Any, ...] = (
        {"epochs": [1, 2]},
        {"epochs": [1, 2, -3]},
        {"epochs": [1, 2, 0.5]},
        {"epochs": None},
        {"run": [1]},
        {"run": {}},
        *({"run": {**values["run"], name: None}} for name in values["run"]),
        {"run": {**values["run"], "rows": [1, -1]}},
        {"run": {**values["run"], "batch_size": 0}},
        {"run": {**values["run"], "seed": -1}},
        {"run": {**values["run"], "seed": True}},
    )
    for changed in bad:
        with pytest.raises(CheckpointError, match="a-file"):
            Progress.from_json({**values, **changed}, "a-file")


def test_who_had_few_rows_had_ended_their_epochs():
    """Of three epochs with 7, 4 and 2 rounds each, at clock 9; then there are to be five."""
    plan = FitPlan(
        gradient, Combination("train", ASP()), 5, 4, shuffle=True, seed=3,
        rounds=7, first=2, start=9, passed=3,
    )  # fmt: skip
    assert plan.ended == 1
    assert [plan.place(0, n) for n in (7, 4, 2, 1)] == [(1, 2), (2, 1), (3, 0), (3, 0)]
    assert plan.place(3, 2) == (4, 1)
    assert plan.key(3, 2, rank=1) == (3, 6, 1, 13)
