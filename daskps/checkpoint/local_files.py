"""Files of this machine that are on the disk, as they are even if power fails after that.

Of many files that count for nothing yet, each is written in place, and the folders that
have their names are synced once for all: each sync of a folder that has changed waits for
the journal of its filesystem.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from daskps.checkpoint.digests import Content

#: Of a file that is not whole yet.
UNFINISHED: Final = ".unfinished-"
_NEW = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC


def write(root: Path, path: str, content: Content) -> None:
    """Write a file, and have its content on the disk; for its name see `sync_names`.

    Parameters
    ----------
    root : Path
        A folder, which is made where it is missing.
    path : str
        Of the file, below it, with "/".
    content : bytes-like
        All of it, contiguous.
    """
    at = root / path
    try:
        file = os.open(at, _NEW, 0o666)
    except FileNotFoundError:
        os.makedirs(at.parent, exist_ok=True)
        file = os.open(at, _NEW, 0o666)
    try:
        with memoryview(content) as whole, whole.cast("B") as data:
            done = 0
            while done < len(data):
                done += os.write(file, data[done:])
        os.fsync(file)
    finally:
        os.close(file)


def put(root: Path, path: str, content: Content) -> None:
    """Write a file that is there whole or not at all, its name on the disk: by a rename."""
    at = root / path
    part = f"{path.rpartition('/')[0]}/{UNFINISHED}{uuid.uuid4().hex}".lstrip("/")
    try:
        write(root, part, content)
        os.replace(root / part, at)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(root / part)
        raise
    _sync(at.parent)


def sync_names(root: Path, paths: Iterable[str]) -> None:
    """Have the names of files below a folder on the disk, and those of all folders.

    Not before: others that are being written wait for the journal meanwhile.
    """
    folders = {root / of for path in paths for of in Path(path).parents}
    for folder in folders:
        _sync(folder)
    # Those above may be as new. Folders that may not be read were not made here.
    for folder in root.parents:
        with suppress(PermissionError):
            _sync(folder)
        if os.path.ismount(folder):
            break


def _sync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
