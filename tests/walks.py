"""Walks of a call through the package: the files, functions and returns that it passes.

Every thread of this process is profiled, so that both ends of a call are seen: the
caller's thread, the event loops, and the threads of sockets. Compiled loops are not
seen. Run as a program it prints one line of JSON, a mapping of trip to counts.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import dask
import numpy as np

import daskps
from daskps import optim
from tests.support import CARRIERS, local_cluster, until

ROOT = Path(daskps.__file__).parent
#: Trips of each kind: the shortest one counts, since now and then something is made
#: anew.
TRIPS = 25
#: The name of each carrier, as settings call it.
SETTINGS = {"near": "process", "socket": "socket", "message": "rpc"}


class Walk(NamedTuple):
    """One trip through the package."""

    #: Files that it passes.
    files: int
    #: Functions that it calls.
    functions: int
    #: Calls into a file that it had been in, and had left.
    returns: int


class Recorder:
    """Notes the calls of all threads that begin after it was installed."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, str]] | None = None

    def install(self) -> None:
        """Profile this thread and all that begin from here on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: Any, event: str, _: Any) -> None:
        calls = self._calls
        if event == "call" and calls is not None:
            calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    def walk(self, call: Callable[[], object]) -> tuple[Walk, list[str]]:
        """Return the shortest of a few trips, and the files that it passes."""
        found = []
        for _ in range(TRIPS):
            calls: list[tuple[str, str]] = []
            self._calls = calls
            call()
            self._calls = None
            found.append(_walk(calls))
        return min(found)


def _walk(calls: list[tuple[str, str]]) -> tuple[Walk, list[str]]:
    seen, last, returns = set[str](), "", 0
    functions = set()
    for path, name in calls:
        if not path.startswith(str(ROOT)):
            continue
        returns += path != last and path in seen
        seen.add(path)
        functions.add((path, name))
        last = path
    files = sorted(str(Path(path).relative_to(ROOT)) for path in seen)
    return Walk(len(files), len(functions), returns), files


RECORDER = Recorder()
#: What the trips of trainers have found.
FOUND: dict[str, tuple[Walk, list[str]]] = {}

N, IDS = 100, np.arange(10)
WEIGHTS, ROWS = np.ones(N), np.ones((10, 4), "f4")
GRADS = {"w": WEIGHTS}
ROW_GRADS = {"emb": daskps.RowGrad(IDS, ROWS)}


def _walked(name: str, call: Callable[[], object]) -> None:
    for _ in range(4):
        call()
    FOUND[name] = RECORDER.walk(call)


def _opened(trainer: Any, carrier: str) -> None:
    """Go on until calls take the way that they are to take."""
    if carrier == "socket":
        with daskps.open("walks") as store:
            until(lambda: trainer.pull() and store.stats()["handle"]["sockets"])


def in_rounds(trainer: Any, carrier: str) -> None:
    """Take the trips of a trainer whose run has rounds."""
    _opened(trainer, carrier)
    out = {"w": np.empty(N)}
    _walked("push, BSP", lambda: trainer.push(GRADS))
    _walked("push, BSP, timeout", lambda: trainer.push(GRADS, timeout=60))
    _walked("push of arrays and rows, BSP", lambda: trainer.push(GRADS | ROW_GRADS))
    _walked("pull into arrays", lambda: trainer.pull(("w",), out=out))
    _walked("pull of rows", lambda: trainer.pull((), rows={"emb": IDS}))


def free(trainer: Any, carrier: str) -> None:
    """Take the trips of a trainer whose run has no rounds."""
    _opened(trainer, carrier)
    _walked("push, ASP", lambda: trainer.push(GRADS))
    _walked("push of rows, ASP", lambda: trainer.push(ROW_GRADS))


def _with_handles(store: Any) -> None:
    emb, words, out = store["emb"], store["words"], np.empty((10, 4), "f4")
    _walked("store.push", lambda: store.push(GRADS))
    _walked("table.push", lambda: emb.push(IDS, ROWS))
    _walked("table.push, unbounded", lambda: words.push(IDS, ROWS))
    _walked("table.pull", lambda: emb.pull(IDS, out=out))
    _walked("table.pull, unbounded", lambda: words.pull(IDS, out=out))


def handles(carrier: str, name: str) -> None:
    """Take the trips of handles, in a task."""
    store = daskps.open(name)
    if carrier == "socket":
        until(lambda: store.pull() and store.stats()["handle"]["sockets"])
    _with_handles(store)


def walks(carrier: str) -> dict[str, tuple[Walk, list[str]]]:
    """Return the trips of one carrier, from one worker to the shard of another."""
    quiet = {"distributed.worker.profile.enabled": False}
    params = {
        "w": np.zeros(N),
        "emb": daskps.TableSpec(50, 4),
        "words": daskps.TableSpec(None, 4),
    }
    with (
        dask.config.set({**CARRIERS[SETTINGS[carrier]], **quiet}),
        local_cluster(processes=False, protocol="tcp") as client,
    ):
        here, there = client.nthreads()
        at = [here if carrier == "near" else there]
        with daskps.create(
            params, name="walks", optimizer=optim.SGD(0.1), shards=1, servers=[here]
        ) as store:
            daskps.run(store, in_rounds, [carrier], sync="bsp", workers=at)
            daskps.run(store, free, [carrier], sync="asp", workers=at)
            client.submit(handles, carrier, "walks", workers=at, pure=False).result()
            store.delete()
    return FOUND


def main(carrier: str) -> None:
    """Print the walks of a carrier."""
    RECORDER.install()
    sys.stdout.write(json.dumps(walks(carrier)))


if __name__ == "__main__":
    # By its own name: tasks find what they are to fill there.
    from tests import walks as named

    named.main(sys.argv[1])
