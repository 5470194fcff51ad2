"""How long the route of a step is: Python calls, and files of the cluster and of shards.

A call of Python takes about as long as a line of code that does something. These bounds
are what holds today: whoever makes the route shorter lowers them.
"""

from __future__ import annotations

import contextvars
import gc
import sys
import threading
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest

import daskps
from daskps import optim
from tests import inprocess
from tests.support import CARRIERS

ROOT = Path(daskps.__file__).parent
#: To be lowered: 18 files by message were meant.
PUSH_CALLS, PUSH_FILES = 62, 9
PULL_CALLS = 10
#: Of a push in a run without rounds.
FREE_CALLS = 76
#: A message passes the files of the frame that it carries, those of sockets too.
FAR_FILES = 30
#: Of a handle: a push of rows and one of arrays, and a pull of rows.
ROW_PUSH_CALLS, HANDLE_PUSH_CALLS, ROW_PULL_CALLS = 130, 98, 19
#: Of a trainer's push of rows in a run without rounds.
FREE_ROW_CALLS = 84


class Counted:
    """The Python calls of some threads while they do something."""

    def __init__(self, loop: Any = None) -> None:
        self._loop, self.calls = loop, list[tuple[str, str]]()

    def _note(self, frame: Any, event: str, _: Any) -> None:
        if event == "call":
            self.calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    def _on_loop(self, note: Any) -> None:
        if self._loop is not None:
            done = threading.Event()
            self._loop.add_callback(sys.setprofile, note)
            self._loop.add_callback(done.set)
            assert done.wait(30)

    def __enter__(self) -> Counted:
        # Libraries have the collector call functions of theirs.
        gc.disable()
        self._on_loop(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self._on_loop(None)
        gc.enable()
        self.calls = [c for c in self.calls if not c[1].startswith("Counted")]

    @property
    def files(self) -> list[str]:
        """Files of the cluster's and the shards' rooms that were passed."""
        paths = (Path(name) for name, _ in self.calls)
        found = {p.relative_to(ROOT) for p in paths if p.is_relative_to(ROOT)}
        rooms = ("cluster", "shards")
        return sorted(str(p) for p in found if p.parts[0] in rooms)


#: The event loop that counts too, and where what was counted goes.
HERE: list[Any] = []


def steps(trainer: Any, part: Any) -> None:
    """Count what a push and a pull into the same arrays call, when both are known."""
    loop, found = HERE
    grads = {"w": np.ones(100), "b": np.ones(4)}
    out = {"w": np.empty(100), "b": np.empty(4)}
    for _ in range(3):
        trainer.push(grads)
        trainer.pull(out=out)
    with Counted(loop) as push:
        trainer.push(grads)
    with Counted(loop) as pull:
        trainer.pull(out=out)
    found += push, pull


def counted(way: str, sync: str = "bsp") -> tuple[Counted, Counted]:
    """Return what the one trainer of a run calls at one shard."""
    params = {"w": np.zeros(100), "b": np.zeros(4)}
    with dask.config.set(CARRIERS[way]), inprocess.cluster(1) as made:
        daskps.create(params, name="w", optimizer=optim.SGD(0.1), shards=1)
        loop = made.loop if way == "rpc" else None
        store = daskps.open("w")
        found: list[Any] = []
        # The task gets a copy of the function.
        HERE[:] = [loop, found]
        daskps.run(store, steps, [None], sync=sync)
    return found[0], found[1]


@pytest.fixture(scope="module")
def local() -> tuple[Counted, Counted]:
    return counted("process")


def test_a_push_near_the_shard_takes_few_calls(local: Any) -> None:
    push, _ = local
    assert len(push.calls) <= PUSH_CALLS, [name for _, name in push.calls]


def test_a_push_near_the_shard_passes_few_files(local: Any) -> None:
    push, _ = local
    assert len(push.files) <= PUSH_FILES, push.files


def test_a_repeated_pull_near_the_shard_takes_few_calls(local: Any) -> None:
    _, pull = local
    assert len(pull.calls) <= PULL_CALLS, [name for _, name in pull.calls]


@pytest.mark.parametrize("sync", ["asp", "ssp"])
def test_a_push_without_rounds_takes_as_few_calls(sync: str) -> None:
    push, _ = counted("process", sync)
    assert len(push.calls) <= FREE_CALLS, [name for _, name in push.calls]


def row_steps(trainer: Any, part: Any) -> None:
    """Count what a push of rows calls, when its way is known."""
    grads = {"emb": daskps.RowGrad(np.arange(10), np.ones((10, 4), "f4"))}
    trainer.push(grads)
    with Counted() as push:
        trainer.push(grads)
    HERE.append(push)


def test_calls_with_rows_near_the_shard_are_few() -> None:
    found: list[int] = []

    def count() -> None:
        store = daskps.open("w")
        emb, ids, out = store["emb"], np.arange(10), np.ones((10, 4), "f4")
        acts = (
            lambda: emb.push(ids, out),
            lambda: store.push({"w": np.ones(100)}),
            lambda: emb.pull(ids, out=out),
        )
        for act in acts:
            act()
            act()
            with Counted() as made:
                act()
            found.append(len(made.calls))

    params = {"w": np.zeros(100), "emb": daskps.TableSpec(50, 4)}
    with dask.config.set(CARRIERS["process"]), inprocess.cluster(1):
        store = daskps.create(params, name="w", optimizer=optim.SGD(0.1), shards=1)
        HERE.clear()
        daskps.run(store, row_steps, [None], sync="asp")
        # Of the main thread signals are held meanwhile.
        thread = threading.Thread(target=contextvars.copy_context().run, args=(count,))
        thread.start()
        thread.join()
    [push] = HERE
    assert len(push.calls) <= FREE_ROW_CALLS, [name for _, name in push.calls]
    bounds = [ROW_PUSH_CALLS, HANDLE_PUSH_CALLS, ROW_PULL_CALLS]
    assert all(n <= most for n, most in zip(found, bounds, strict=True)), found


def test_a_push_by_message_passes_few_files() -> None:
    push, _ = counted("rpc")
    assert len(push.files) <= FAR_FILES, push.files
