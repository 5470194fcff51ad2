"""Progress of a run for those that have not begun it: a bar, or nothing to wait for."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.cluster.seeing.overview import EXTENSION
from daskps.training import watching
from tests import inprocess
from tests.inprocess import Cluster
from tests.support import gen_cluster, until


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(watching, "PAUSE_SECONDS", 0.01)
    with inprocess.cluster(2) as made:
        yield made


RULE = optim.SGD(0.1)


class Gate:
    """Lets trainers go on to a clock, and no further."""

    def __init__(self) -> None:
        self._changed, self._most = threading.Condition(), 0.0

    def open_to(self, clock: float) -> None:
        with self._changed:
            self._most = clock
            self._changed.notify_all()

    def wait(self, clock: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: clock < self._most, 60)


GATE = Gate()


def gradient(params: Any, X: Any, y: Any) -> Any:
    GATE.wait(int(X.max()))
    return 0.5, {"w": params["w"]}


def loop(trainer: Any, part: Any) -> None:
    for clock in range(part):
        GATE.wait(clock)
        trainer.push({"w": np.ones(2)})


def begin(cluster: Cluster, work: Any, *args: Any, **options: Any) -> threading.Thread:
    """Begin a run, whose trainers wait at their first clock."""
    GATE.open_to(0)
    thread = threading.Thread(target=work, args=args, kwargs=options)
    thread.start()
    until(lambda: any(run.began for run in cluster.directory.runs.open.values()))
    return thread


def watched(store: Any) -> tuple[threading.Thread, io.StringIO]:
    file = io.StringIO()
    thread = threading.Thread(
        target=daskps.progress, args=[store], kwargs={"file": file}
    )
    thread.start()
    return thread, file


def test_epochs_and_rounds_of_a_run_are_shown(two: Cluster) -> None:
    """The run is one that nobody watches: its trainers tell of no round."""
    with daskps.create({"w": np.ones(2)}, optimizer=optim.SGD(0.1)) as store:
        X = np.arange(8.0)[:, None]
        about: Any = {"epochs": 1, "batch_size": 1, "trainers": 1, "shuffle": False}
        run = begin(two, daskps.train, store, gradient, X, callbacks=(), **about)
        thread, file = watched(store)
        until(lambda: "0/8" in file.getvalue())
        GATE.open_to(3)
        until(lambda: "3/8" in file.getvalue())
        assert "epoch 1/1" in file.getvalue()
        GATE.open_to(np.inf)
        run.join()
        thread.join()
        assert file.getvalue().endswith("\n")
        # The next one is the store's second epoch.
        run = begin(two, daskps.train, store, gradient, X, callbacks=(), **about)
        thread, file = watched(store)
        until(lambda: "epoch 2/2" in file.getvalue())
        GATE.open_to(np.inf)
        run.join()
        thread.join()


class Slow(io.StringIO):
    """Where the first bar is drawn for as long as a run takes."""

    def __init__(self) -> None:
        super().__init__()
        self.begins, self.ends = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        if "0/8" in text:
            self.begins.set()
            assert self.ends.wait(60)
        return super().write(text)


def test_what_came_after_the_last_look_is_shown(two: Cluster) -> None:
    with daskps.create({"w": np.ones(2)}, optimizer=RULE) as store:
        X = np.arange(8.0)[:, None]
        about: Any = {"epochs": 1, "batch_size": 1, "trainers": 1, "shuffle": False}
        run = begin(two, daskps.train, store, gradient, X, callbacks=(), **about)
        file = Slow()
        thread = threading.Thread(
            target=daskps.progress, args=[store], kwargs={"file": file}
        )
        thread.start()
        assert file.begins.wait(60)
        GATE.open_to(np.inf)
        run.join()
        file.ends.set()
        thread.join()
        assert "8/8" in file.getvalue().rpartition("\r")[2]


def test_loops_are_counted_in_versions(two: Cluster) -> None:
    with daskps.create({"w": np.ones(2)}, optimizer=optim.SGD(0.1)) as store:
        store.push({"w": np.ones(2)})
        run = begin(two, daskps.run, store, loop, [5, 5], callbacks=())
        thread, file = watched(store)
        until(lambda: "0 rounds" in file.getvalue())
        GATE.open_to(4)
        until(lambda: "4 rounds" in file.getvalue())
        GATE.open_to(np.inf)
        run.join()
        thread.join()


def test_where_nothing_runs_nothing_is_waited_for(two: Cluster) -> None:
    with daskps.create({"w": np.ones(2)}, name="idle") as store:
        daskps.progress(store)
        daskps.progress("idle")
    with pytest.raises(TypeError, match="or one by its name, found 42"):
        daskps.progress(42)  # type: ignore[arg-type]
    with pytest.raises(daskps.StoreNotFoundError):
        daskps.progress("nothing")
    with pytest.raises(daskps.StoreClosedError):
        daskps.progress(store)


def test_a_limit_ends_the_bar_and_not_the_run(two: Cluster) -> None:
    with daskps.create({"w": np.ones(2)}, optimizer=optim.SGD(0.1)) as store:
        run = begin(two, daskps.run, store, loop, [3], callbacks=())
        with pytest.raises(TimeoutError, match="the progress of store"):
            daskps.progress(store, timeout=0.2)
        GATE.open_to(np.inf)
        run.join()
        assert store.version == 3


@gen_cluster(client=True)
async def test_the_line_of_an_asynchronous_bar_ends_too(c, s, a, b):
    GATE.open_to(0)
    async with daskps.aio.create({"w": np.ones(2)}, optimizer=RULE, client=c) as store:
        run = asyncio.ensure_future(daskps.aio.run(store, loop, [3], callbacks=()))
        runs, file = s.extensions[EXTENSION].runs.open, io.StringIO()
        await asyncio.to_thread(until, lambda: [of for of in runs.values() if of.began])
        bar = asyncio.ensure_future(daskps.aio.progress(store, file=file))
        await asyncio.to_thread(until, file.getvalue)
        bar.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bar
        assert file.getvalue().endswith("\n")
        GATE.open_to(np.inf)
        await run


@gen_cluster(client=True)
async def test_an_asynchronous_client_awaits_it(c, s, a, b):
    async with daskps.aio.create({"w": np.ones(2)}, name="here", client=c) as store:
        await daskps.aio.progress(store)
        await daskps.aio.progress("here", client=c)
        await store.delete()
