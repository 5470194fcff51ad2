"""The memory and the stalls of saves, and restores of tables into other numbers of shards.

The memory of a save is what its workers' processes hold at most above what they held
before. Where there is no room for a copy, shards are held while their files are
written: that is had by giving workers a memory limit of what they hold.
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
from tests.benchmarks.samples import Job, seconds
from tests.benchmarks.snapshot import big_store, waits

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def held(client: Client, folder: Path) -> Iterator[Job | str]:
    """Yield what saves take of memory, and how long they keep pushes waiting."""
    for rule in (optim.SGD(0.1), optim.Adam(0.01)):
        store = big_store(rule)
        save = partial(save_into, folder, store)
        save()
        for name, limit in (("saves", 0), ("held saves", 1)):
            client.run(_limit, nbytes=limit)
            before = client.run(_forget_peak)
            took = seconds(save)
            peaks = client.run(_peak)
            more = max(peaks[worker] - before[worker] for worker in before)
            yield f"{name}, {rule}: {took:.2f} s, {more / 1e6:.0f} MB more of each worker"
            yield from waits(client, store, name, save)
        client.run(_limit, nbytes=0)
        store.delete()


def tables(client: Client, folder: Path) -> Iterator[Job]:
    """Yield how long a table takes to be saved, and to be restored elsewhere."""
    rng = np.random.default_rng(0)
    for kind, rows in (("numbered rows", ROWS), ("unbounded", None)):
        spec = {"emb": daskps.TableSpec(rows, DIM)}
        with daskps.create(spec, optimizer=optim.Adagrad(0.1), shards=2) as store:
            for first in range(0, ROWS, PUSHED):
                ids = np.arange(first, first + PUSHED)
                values = rng.normal(size=(PUSHED, DIM)).astype("f4")
                store.push({"emb": daskps.RowGrad(ids, values)})
            some = rng.choice(ROWS, 1000, replace=False)
            expected = store["emb"].pull(some)
            save = partial(seconds, partial(save_into, folder, store))
            yield Job(f"{ROWS:,} x {DIM} {kind}, Adagrad", {"save": save}, warm=1)
            [info] = daskps.list_checkpoints(folder / "ours")
            restored = partial(_restored, info.url, some=some, expected=expected)
            sides = {f"into {n}": partial(restored, n) for n in SHARDS}
            yield Job(f"restore {info.nbytes / 1e6:.0f} MB of {kind}", sides)


def _restored(url: str, shards: int, *, some: Any, expected: Any) -> float:
    made = list[Any]()
    took = seconds(lambda: made.append(daskps.restore(url, shards=shards)))
    with made[0] as again:
        assert (again["emb"].pull(some) == expected).all()
    return took
