"""Files that all simulated processes share: a filesystem of fsspec's, ``simulated://``.

A put is whole, or fails and may have left half of a file or all of it. A process may die
half-way through one.
"""

from __future__ import annotations

import errno
from typing import Any, ClassVar

import fsspec
from fsspec import AbstractFileSystem

from tests.simulator import network
from tests.simulator.ground import CHANCE
from tests.simulator.loop import PROCESS

SCHEME = "simulated"


class SimFiles(AbstractFileSystem):
    """Files of a simulation; it has no folders but those of its files.

    Attributes
    ----------
    files : dict of str to bytes
        By path.
    failing : float
        Share of reads and writes that fail.
    """

    protocol = SCHEME
    cachable = False
    files: ClassVar[dict[str, bytes]] = {}
    failing: ClassVar[float] = 0.0

    def pipe_file(
        self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        """Write a file, or fail."""
        at, process = self._strip_protocol(path), PROCESS.get()
        dies = process is not None and process.dies_at_file
        if not dies and CHANCE.random() >= self.failing:
            self.files[at] = value
            return
        if CHANCE.random() < 0.75:
            self.files[at] = value[: CHANCE.choice((len(value), len(value) // 2))]
        if process is not None and dies:
            network.network().crash(process, 0.0)
            raise network.DeadError
        raise OSError(errno.EIO, "a simulated write has failed")

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """Return what is in a file, or fail."""
        if CHANCE.random() < self.failing:
            raise OSError(errno.EIO, "a simulated read has failed")
        return self._content(path)[start:end]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Return name and size of a file."""
        return _row(self._strip_protocol(path), len(self._content(path)))

    def find(self, path: str, *args: Any, detail: bool = False, **kwargs: Any) -> Any:
        """Return all files below a path."""
        root = f"{self._strip_protocol(path)}/"
        here = {p: of for p, of in self.files.items() if p.startswith(root)}
        found = {p: _row(p, len(of)) for p, of in here.items()}
        return found if detail else [*found]

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """Return files and folders right below a path."""
        root, found = f"{self._strip_protocol(path)}/", dict[str, dict[str, Any]]()
        for at in (p for p in self.files if p.startswith(root)):
            name, _, below = at.removeprefix(root).partition("/")
            kind = "directory" if below else "file"
            found[name] = _row(root + name, len(self.files[at]), kind)
        if not found:
            raise FileNotFoundError(path)
        return [*found.values()] if detail else [root + name for name in found]

    def rm(self, path: str, recursive: bool = False, maxdepth: Any = None) -> None:
        """Remove a file, or all below a path."""
        at = self._strip_protocol(path)
        gone = [p for p in self.files if p == at or p.startswith(f"{at}/")]
        if not gone:
            raise FileNotFoundError(path)
        for p in gone:
            del self.files[p]

    def _content(self, path: str) -> bytes:
        try:
            return self.files[self._strip_protocol(path)]
        except KeyError:
            raise FileNotFoundError(path) from None


def _row(path: str, size: int, kind: str = "file") -> dict[str, Any]:
    return {"name": path, "size": size, "type": kind}


def register() -> None:
    """Make the scheme known to fsspec."""
    fsspec.register_implementation(SCHEME, SimFiles)
