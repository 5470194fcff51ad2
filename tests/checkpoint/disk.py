"""A disk whose every operation may fail, and that knows what a power failure would take.

It stands for `os` in `daskps.checkpoint.local_files`. Nothing is synced in truth, which
takes long: it is only noted.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any


class Disk:
    """Operations of the system on files, counted; all of them one after the other."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.files = dict[int, Path]()
        #: Content and names that are not on the disk.
        self.content = set[Path]()
        self.names = set[Path]()
        self.log = list[str]()
        #: What was at risk whenever a file got its name by a rename.
        self.at_risk = list[set[Path]]()
        self.reset()

    def reset(self, fails_at: int = -1, *, dies: bool = False) -> None:
        """Have one operation fail, or with `dies` all that come after it, too."""
        self.fails_at, self.n, self.dies = fails_at, 0, dies
        self.log.clear()

    def step(self, what: str) -> None:
        """Count an operation; each of them may be the last."""
        at, self.n = self.n, self.n + 1
        self.log.append(what)
        if at == self.fails_at or (self.dies and at > self.fails_at >= 0):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("O_") or name in ("close", "path"):
            return getattr(os, name)
        raise AttributeError(f"an operation that is no kill point: {name}")

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        with self.lock:
            is_new = bool(flags & os.O_CREAT) and not path.exists()
            if flags & os.O_CREAT and path.parent.is_dir():
                self.step("open")
            found = os.open(path, flags, mode)
            self.files[found] = path
            if is_new:
                self.names.add(path)
            return found

    def write(self, file: int, data: memoryview) -> int:
        with self.lock:
            self.content.add(self.files[file])
            if self.n == self.fails_at:
                os.write(file, data[: len(data) // 2])
            self.step("write")
            return os.write(file, data)

    def fsync(self, file: int) -> None:
        with self.lock:
            path = self.files[file]
            self.step("sync folder" if path.is_dir() else "sync")
            self.content.discard(path)
            if path.is_dir():
                self.names = {name for name in self.names if name.parent != path}

    def makedirs(self, folder: Path, *, exist_ok: bool) -> None:
        with self.lock:
            self.step("make")
            self.names |= {p for p in (folder, *folder.parents) if not p.exists()}
            os.makedirs(folder, exist_ok=exist_ok)

    def replace(self, part: Path, path: Path) -> None:
        with self.lock:
            self.step("rename")
            self.at_risk.append((self.content | self.names) - {part})
            os.replace(part, path)
            self.names = (self.names - {part}) | {path}

    def unlink(self, path: Path) -> None:
        with self.lock:
            self.step("unlink")
            os.unlink(path)
            self.names.discard(path)
