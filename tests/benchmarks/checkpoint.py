"""Saves and restores: bytes a second beside np.save and zarr, and how long pushes wait.

The same array of float32, on one worker and on two, each of which writes its half of
it, with 16 MiB in a file; nothing is compressed. Ours takes a digest of each file, and
has all of them on the disk before the checkpoint counts; so has the peer np.save, which
takes no digest. The peer zarr does neither, as by itself, and does both where its name
says so. Restored arrays are freed after the clock has stopped, ours and theirs.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import daskps
from daskps.checkpoint.digests import digest
from daskps.checkpoint.grid import CHUNK_NBYTES
from tests.benchmarks import clusters
from tests.benchmarks.command import benchmark, number, parts
from tests.benchmarks.samples import Job, seconds
from tests.benchmarks.saves import held, save_into, tables

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from distributed import Client

    from daskps.typing import Array


@cache
def _half(n: int, part: int) -> Array:
    """Return what a worker has; made once."""
    return np.random.default_rng(part).normal(size=n).astype("f4")


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _save_npy(folder: str, n: int, part: int) -> None:
    path = Path(folder) / f"{part}.npy"
    np.save(path, _half(n, part))
    _sync(path)


#: What a worker has restored of a peer's.
_restored: list[Any] = []


def _forget() -> None:
    _restored.clear()


def _load_npy(folder: str, n: int, part: int) -> None:
    _restored.append(np.load(Path(folder) / f"{part}.npy"))
    assert len(_restored[-1]) == n


def _chunks(folder: str, n: int, part: int) -> list[Path]:
    rows = CHUNK_NBYTES // 4
    return [
        Path(folder) / "c" / str(i)
        for i in range(part * n // rows, (part + 1) * n // rows)
    ]


def _save_zarr(folder: str, n: int, part: int, *, sealed: bool = False) -> None:
    import zarr

    zarr.open_array(folder)[part * n : (part + 1) * n] = _half(n, part)
    for path in _chunks(folder, n, part) if sealed else ():
        _sync(path)
        digest(path.read_bytes())


def _load_zarr(folder: str, n: int, part: int, *, sealed: bool = False) -> None:
    import zarr

    for path in _chunks(folder, n, part) if sealed else ():
        digest(path.read_bytes())
    _restored.append(zarr.open_array(folder)[part * n : (part + 1) * n])
    assert _restored[-1].shape == (n,)


def _make_zarr(folder: Path, n: int, workers: int) -> None:
    import zarr

    rows = CHUNK_NBYTES // 4
    zarr.create_array(
        str(folder), shape=n * workers, chunks=(rows,), dtype="f4", compressors=None
    )


def _make_folder(folder: Path, n: int, workers: int) -> None:
    folder.mkdir()


class FilePeer(NamedTuple):
    """A peer: how it prepares a save, and how each worker saves and restores."""

    prepare: Callable[[Path, int, int], None]
    write: Callable[..., None]
    read: Callable[..., None]


PEERS = {
    "np.save, on the disk": FilePeer(_make_folder, _save_npy, _load_npy),
    "zarr": FilePeer(_make_zarr, _save_zarr, _load_zarr),
    "zarr, as safe": FilePeer(
        _make_zarr,
        partial(_save_zarr, sealed=True),
        partial(_load_zarr, sealed=True),
    ),
}


@dataclass(frozen=True)
class ArrayFiles:
    """An array of so many elements a worker, and where its files are."""

    client: Client
    folder: Path
    n: int
    workers: int

    @property
    def size(self) -> int:
        """Elements of all of it."""
        return self.n * self.workers

    def everywhere(self, work: Callable[..., None]) -> None:
        """Have each worker do its part."""
        workers = sorted(self.client.nthreads())[: self.workers]
        part = partial(work, str(self.theirs), self.n)
        clusters.at_once(self.client, workers, part)

    @property
    def theirs(self) -> Path:
        """Where a peer's are."""
        return self.folder / "theirs"

    def save(self, peer: FilePeer) -> None:
        """Have a peer write all of it, anew."""
        shutil.rmtree(self.theirs, ignore_errors=True)
        peer.prepare(self.theirs, self.n, self.workers)
        self.everywhere(peer.write)


def _peers(
    client: Client, workers: int, nbytes: int, folder: Path
) -> Iterator[Job | str]:
    rows = CHUNK_NBYTES // 4
    n = max(1, nbytes // 4 // workers // rows) * rows
    files = ArrayFiles(client, folder, n, workers)

    def restore() -> float:
        [info] = daskps.list_checkpoints(folder / "ours")
        found: list[Any] = []
        again = partial(daskps.restore, info.url, shards=workers)
        taken = seconds(lambda: found.append(again()))
        found.pop().close()
        return taken

    def load(peer: FilePeer) -> float:
        taken = seconds(partial(files.everywhere, peer.read))
        client.run(_forget)
        return taken

    with daskps.create(clusters.vector(files.size), shards=workers) as store:
        save = partial(seconds, partial(save_into, folder, store))
        of = f"of {files.size * 4 / 1e6:.0f} MB, {workers} + {workers}"
        for name, peer in PEERS.items():
            if name.startswith("zarr") and importlib.util.find_spec("zarr") is None:
                yield f"left out {name}: zarr is not installed"
                continue
            theirs = partial(seconds, partial(files.save, peer))
            yield Job(f"save {of}", {"ours": save, name: theirs})
            loading = partial(load, peer)
            yield Job(f"restore {of}", {"ours": restore, name: loading})


@benchmark(
    "checkpoint",
    "saves and restores, beside np.save and zarr",
    parts(("peers", "held", "tables")),
    number("--nbytes", 200_000_000, "of the array"),
)
def checkpoint(options: Namespace) -> Iterator[Job | str]:
    """Yield the parts: beside peers; memory and waits, also of held shards; tables."""
    with tempfile.TemporaryDirectory(prefix="daskps-measured-") as name:
        folder = Path(name)
        for workers in (1, 2) if "peers" in options.only else ():
            with clusters.local(workers) as client:
                yield from _peers(client, workers, options.nbytes, folder)
        for part, measure in (("held", held), ("tables", tables)):
            if part in options.only:
                with clusters.local(2, close=clusters.CARRIERS) as client:
                    yield from measure(client, folder)
