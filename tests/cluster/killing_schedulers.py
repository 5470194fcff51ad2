"""Schedulers that are killed at random moments, and what another cluster restores.

``python -m tests.cluster.killing_schedulers N SEED`` does so N times under pushes and
saves, and says how much came after the save that was restored, in seconds and pushes.
With ``train`` behind it the store is trained and saved every few rounds, by `train`, and
the run that another cluster goes on with has to end with the bits of an undisturbed one.
"""

from __future__ import annotations

import functools
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
from daskps import Checkpoints
from tests.support import local_cluster, until
from tests.training.test_epochs import bits, drawn, new_store, train

N_ELEMENTS = 64
HERE = ["--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"]
#: Of a run, and after how many rounds it is saved.
EPOCHS, EVERY = 150, 25
ROWS: dict[str, Any] = {"rows": {"emb": drawn}}


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


class Rounds:
    """How far a run has come, as its client hears of it."""

    last = 0

    def on_round(self, status: Any) -> None:
        """Note the round that the slowest trainer has come to."""
        self.last = status.slowest


@functools.cache
def undisturbed(here: Client) -> dict[str, bytes]:
    """Return the bits of a run that nobody ends."""
    with new_store(client=here, name="whole") as store:
        train(store, EPOCHS, **ROWS)
        return bits(store)


def kill_in_train(here: Client, folder: Path, rng: random.Random) -> dict[str, Any]:
    """Kill the scheduler of a run, go on here, and compare with an undisturbed run."""
    file, saved = folder / "scheduler.json", folder / "saved"
    scheduler = start("scheduler", file, "--port", "0")
    workers = [start("worker", file, "--no-nanny", "--nthreads", "2") for _ in "ab"]
    rounds, killed = Rounds(), list[float]()
    how: dict[str, Any] = {"checkpoint": Checkpoints(saved, every=EVERY), **ROWS}

    def kill() -> None:
        until(lambda: any(saved.glob("ckpt-*/manifest.json")))
        # A moment of chance is what is tried.
        threading.Event().wait(2 * rng.random())
        scheduler.kill()
        killed.append(time.time())

    thread = threading.Thread(target=kill)
    try:
        until(file.exists)
        client = Client(scheduler_file=str(file))
        client.wait_for_workers(2)
        store = new_store(client=client, name="s")
        thread.start()
        has_ended = False
        try:
            train(store, EPOCHS, resume=True, **how | {"callbacks": [rounds]})
            has_ended = True
        except (OSError, RuntimeError):
            thread.join()
        thread.join()
        client.close(timeout=2)
    finally:
        for process in (scheduler, *workers):
            process.kill()
            process.wait()
    last = daskps.list_checkpoints(saved)[-1]
    with new_store(client=here, name="s", overwrite=True) as again:
        result = train(again, EPOCHS, resume=True, **how)
        found = bits(again)
    begun = result.history[0].epoch if result.history else EPOCHS
    return {
        "ended": has_ended,
        "rounds": rounds.last,
        "lost": max(0, rounds.last - last.version),
        "seconds": round(max(0.0, killed[0] - last.time.timestamp()), 2),
        "from": begun,
        "right": found == undisturbed(here),
    }


def main(n: int, seed: int, what: str) -> None:
    rng, kill = random.Random(seed), kill_in_train if what == "train" else kill_one
    found = []
    with ExitStack() as stack:
        here = stack.enter_context(local_cluster(processes=False, protocol="tcp"))
        # What only the first ones wait for is no part of a window.
        with TemporaryDirectory() as folder, new_store(client=here) as store:
            store.save(folder)
        for _ in range(n):
            with TemporaryDirectory() as folder:
                found.append(kill(here, Path(folder), rng))
            sys.stderr.write(f"{found[-1]}\n")
    window = sorted(row["seconds"] for row in found if not row.get("ended"))
    lost = sorted(row["lost"] for row in found if not row.get("ended"))
    unit = "rounds" if what == "train" else "pushes"
    about = {
        "kills": n,
        "ended before": sum(row.get("ended", False) for row in found),
        unit: sum(row[unit] for row in found),
        f"{unit} after the save": [float(np.median(lost)), lost[-1]],
        "seconds after the save": [float(np.median(window)), window[-1]],
        "wrong": [row for row in found if not row["right"]],
    }
    sys.stdout.write(json.dumps(about) + "\n")
    sys.stdout.flush()
    # Clients of dead schedulers have threads that nobody ends.
    os._exit(bool(about["wrong"]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *(sys.argv[3:] or ["pushes"]))
