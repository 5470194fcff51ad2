"""Schedulers that are killed at random moments, and what another cluster restores.

``python -m tests.cluster.killing_schedulers N SEED`` does so N times under pushes and
saves, and says how much came after the save that was restored, in seconds and pushes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from distributed import Client

import daskps
from tests.support import local_cluster, until

N_ELEMENTS = 64
HERE = ["--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"]


class Pusher(threading.Thread):
    """Pushes one element after the other until there is nobody to push to."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.store, self.n_done = store, 0

    def run(self) -> None:
        try:
            while True:
                values = np.zeros(N_ELEMENTS)
                values[self.n_done % N_ELEMENTS] = 1.0
                self.store.add({"w": values}, timeout=2)
                self.n_done += 1
        except Exception:  # noqa: BLE001 - whatever it is: the cluster is dead
            return


def start(what: str, file: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start a scheduler or a worker as from a terminal."""
    command = [sys.executable, "-m", "dask", what, "--scheduler-file", str(file)]
    quiet = subprocess.DEVNULL
    return subprocess.Popen([*command, *HERE, *options], stdout=quiet, stderr=quiet)


def kill_one(here: Client, folder: Path, rng: random.Random) -> dict[str, Any]:
    """Kill a scheduler, restore here what was saved, and say what of it is missing."""
    file, saves = folder / "scheduler.json", list[tuple[int, float]]()
    scheduler = start("scheduler", file, "--port", "0")
    worker = start("worker", file, "--no-nanny")
    try:
        until(file.exists)
        client = Client(scheduler_file=str(file), set_as_default=False)
        client.wait_for_workers(1)
        store = daskps.create({"w": np.zeros(N_ELEMENTS)}, name="s", client=client)
        pusher = Pusher(store)
        pusher.start()
        killed: list[float] = []

        def kill() -> None:
            scheduler.kill()
            killed.append(time.monotonic())

        # A moment of chance is what is tried: between two saves, or in one.
        timer = threading.Timer(0.5 + rng.random(), kill)
        try:
            while True:
                at = pusher.n_done, time.monotonic()
                store.save(folder / "saved", timeout=3)
                saves.append(at)
                if len(saves) == 1:
                    timer.start()
                threading.Event().wait(0.2)
        except (OSError, daskps.DaskPSError):
            timer.join()
        pusher.join()
        client.close(timeout=2)
    finally:
        for process in (scheduler, worker):
            process.kill()
            process.wait()
    again = daskps.restore(folder / "saved", name="again", client=here)
    counts = again["w"].pull()
    again.delete()
    n_before, began = saves[-1]
    turns, rest = divmod(int(counts.sum()), N_ELEMENTS)
    is_whole = (counts == turns + (np.arange(N_ELEMENTS) < rest)).all()
    # One more may have been applied than was acknowledged.
    is_right = is_whole and n_before <= counts.sum() <= pusher.n_done + 1
    return {
        "saves": len(saves),
        "pushes": pusher.n_done,
        "lost": max(0, pusher.n_done - int(counts.sum())),
        "seconds": round(killed[0] - began, 2),
        "right": bool(is_right),
    }


def main(n: int, seed: int) -> None:
    rng = random.Random(seed)
    found = []
    with ExitStack() as stack:
        here = stack.enter_context(local_cluster(processes=False, protocol="tcp"))
        for _ in range(n):
            with TemporaryDirectory() as folder:
                found.append(kill_one(here, Path(folder), rng))
            sys.stderr.write(f"{found[-1]}\n")
    window = sorted(row["seconds"] for row in found)
    about = {
        "kills": n,
        "saves": sum(row["saves"] for row in found),
        "pushes": sum(row["pushes"] for row in found),
        "came after the save": sum(row["lost"] for row in found),
        "seconds after the save": [float(np.median(window)), window[-1]],
        "wrong": [row for row in found if not row["right"]],
    }
    sys.stdout.write(json.dumps(about) + "\n")
    sys.stdout.flush()
    # Clients of dead schedulers have threads that nobody ends.
    os._exit(bool(about["wrong"]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
