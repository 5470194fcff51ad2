"""What a save costs beside its time, and restores of tables into other numbers of shards.

The memory of a save is what its workers' processes hold at most above what they held
before. Where there is no room for a copy, shards are held while their files are written:
that is had by giving workers a memory limit of what they hold.
"""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps import optim
from tests.benchmarks.pairs import seconds
from tests.benchmarks.snapshot import BIG, SMALL, latency

if TYPE_CHECKING:
    from distributed import Client

#: Of the table that is restored.
ROWS, DIM = 1_000_000, 64
#: Rows of a push to it.
PUSHED = 50_000
SHARDS = (1, 3, 5)


def _status(field: str) -> int:
    """Return a number of bytes that Linux knows of this process."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 0 if found is None else int(found[1]) * 1024


def _forget_peak() -> int:
    """Have the peak begin anew; return what is held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _limit(dask_worker: Any, nbytes: int) -> None:
    dask_worker.memory_manager.memory_limit = nbytes


def save_into(folder: Path, store: Any) -> None:
    """Save a store where nothing is."""
    shutil.rmtree(folder / "ours", ignore_errors=True)
    store.save(folder / "ours")


def memory_and_stall(client: Client, folder: Path, pairs: int) -> None:
    """Print what saves take of memory, and how long they keep pushes waiting."""
    for rule in (optim.SGD(0.1), optim.Adam(0.01)):
        both = {**SMALL.params(), "w": daskps.ArraySpec((2 * BIG,), "float32")}
        store = daskps.create(both, name="big", optimizer=rule, shards=2)
        print(f"two shards of 100 MB with {rule}, one client pushes to both:")
        save = partial(save_into, folder, store)
        save()
        for name, limit in (("saves", 0), ("held saves", 1)):
            client.run(_limit, nbytes=limit)
            before = client.run(_forget_peak)
            took = seconds(save)
            peaks = client.run(_peak)
            more = max(peaks[worker] - before[worker] for worker in before)
            print(f"{name}: {took:.2f} s, {more / 1e6:.0f} MB more of each worker")
            latency(client, store, pairs, (name, save))
        client.run(_limit, nbytes=0)
        store.delete()


def tables(client: Client, folder: Path, pairs: int) -> None:
    """Print how long a table takes to be saved, and to be restored elsewhere."""
    for kind, rows in (("numbered rows", ROWS), ("any ids", None)):
        store = daskps.create(
            {"emb": daskps.TableSpec(rows, DIM)},
            optimizer=optim.Adagrad(0.1),
            shards=2,
        )
        rng = np.random.default_rng(0)
        for first in range(0, ROWS, PUSHED):
            ids = np.arange(first, first + PUSHED)
            values = rng.normal(size=(PUSHED, DIM)).astype("f4")
            store.push({"emb": daskps.RowGrad(ids, values)})
        some = rng.choice(ROWS, 1000, replace=False)
        expected = store["emb"].pull(some)
        save = partial(save_into, folder, store)
        took = min(seconds(save) for _ in range(pairs))
        [info] = daskps.list_checkpoints(folder / "ours")
        size = f"{ROWS:,} x {DIM} {kind} with Adagrad, {info.nbytes / 1e6:.0f} MB"
        print(f"{size}: saved in {took:.2f} s", flush=True)
        for shards in SHARDS:
            took = min(
                _restored(info.url, shards, some, expected) for _ in range(pairs)
            )
            rate = info.nbytes / 1e9 / took
            print(
                f"  restored into {shards}: {took:.2f} s, {rate:.2f} GB/s", flush=True
            )
        store.close()


def _restored(url: str, shards: int, some: Any, expected: Any) -> float:
    made = list[Any]()
    took = seconds(lambda: made.append(daskps.restore(url, shards=shards)))
    with made[0] as again:
        assert (again["emb"].pull(some) == expected).all()
    return took
