"""The checkpoints of an URL: those that are there, the next one, and those that may go.

A checkpoint is a folder ``ckpt-<sequence>-<8 hexadecimal digits>`` with a manifest. Two
processes that save at the same moment may take the same number, and have different
folders: the order is that of both parts of the name. A *lineage* is a store with those
that were restored from it; resuming, and removing old checkpoints, keeps to one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from daskps.checkpoint.digests import digest
from daskps.checkpoint.manifest import MANIFEST, is_torn
from daskps.checkpoint.storage import Storage, shown
from daskps.checkpoint.texts import from_bytes
from daskps.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from daskps.checkpoint.manifest import Manifest
    from daskps.checkpoint.selection import TakenEntry

    StorageOptions = Mapping[str, Any] | None

_NAME = re.compile(r"ckpt-(\d{12,})-[0-9a-f]{8}")
#: After so many seconds no process goes on writing a folder that has no manifest.
ABANDONED_SECONDS: Final = 86_400.0
#: Bytes for which a save or a restore may take one second more by default: a slow disk.
SAVED_NBYTES_A_SECOND = 1e7


class Entry(NamedTuple):
    """A checkpoint of an URL."""

    folder: str
    #: None where there is none that can be used, and why.
    manifest: Manifest | None
    error: CheckpointError | None = None
    #: Whether its storage did not give it: it may be whole.
    is_unread: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointTarget:
    """The place where checkpoints of a store go.

    Raises
    ------
    CheckpointError
        For the URL of one checkpoint.
    """

    #: The folder that has them all.
    url: str
    #: Options of its file system; they may be secrets.
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if is_one(self.url):
            raise not_within(self.url)

    def folder(self, name: str) -> str:
        """Return the URL of one of them."""
        return f"{self.url.rstrip('/')}/{name}"


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint that is to be read."""

    #: Of its folder.
    url: str
    #: For its file system; they may be secrets.
    options: StorageOptions = field(repr=False)
    #: Of the file of the manifest, and what that says.
    digest: str
    manifest: Manifest = field(repr=False)
    #: The parts that are read, where that is not all as it is.
    taken: tuple[TakenEntry, ...] | None = None


def number_of(folder: str) -> int:
    """Return the sequence number of a checkpoint; -1 of a folder that is none."""
    found = _NAME.fullmatch(folder)
    return int(found[1]) if found else -1


def is_one(url: str) -> bool:
    """Return whether an URL has the name of a checkpoint, not of a folder of them."""
    return number_of(url.rstrip("/").rpartition("/")[2]) >= 0


def not_within(url: str) -> CheckpointError:
    """Return the refusal to save a checkpoint into another one."""
    above = url.rstrip("/").rpartition("/")[0]
    return CheckpointError(
        f"{shown(url)} is a checkpoint itself, and no other can be saved into it; give "
        f"the folder that has it, {shown(above)}, and the new one gets its own name there"
    )


def next_folder(storage: Storage, digits: str) -> tuple[str, int]:
    """Return the folder of a new checkpoint, and its sequence number.

    Parameters
    ----------
    storage : Storage
        Of the URL.
    digits : str
        8 hexadecimal digits that nobody else draws.

    Returns
    -------
    (str, int)
        The number is one above the highest there, also of those without a manifest.

    Raises
    ------
    CheckpointError
        If the URL cannot be read, or is a checkpoint itself.
    """
    if storage.has(MANIFEST):
        raise not_within(storage.url)
    number = 1 + max(map(number_of, storage.folders()), default=-1)
    number = max(1, number)
    return f"ckpt-{number:012d}-{digits}", number


def entries(storage: Storage) -> list[Entry]:
    """Return the checkpoints of an URL, the oldest first.

    Those without a manifest do not exist. Of one that is damaged, newer, or cannot be
    read the error is there: it may be that of another run, and says nothing against the
    others.

    Raises
    ------
    CheckpointError
        If the URL cannot be listed, or is that of a checkpoint itself.
    """
    found = [*_backwards(storage)][::-1]
    if not found and storage.has(MANIFEST):
        raise CheckpointError(
            f"{storage.url} is one checkpoint, not a folder of them; list the URL above "
            f"it, or restore or show this one by its own",
            MANIFEST,
        )
    return found


def unfinished(storage: Storage, now: float) -> dict[str, float | None]:
    """Return the folders without a manifest: saves that write, or ended before their time.

    Parameters
    ----------
    storage : Storage
        Of the URL.
    now : float
        Seconds since 1970.

    Returns
    -------
    dict of str to float
        By folder for how many seconds nothing of it was written, None where the
        filesystem does not say; :func:`sweep` removes those of a day.
    """
    return {
        folder: storage.age(folder, now)
        for folder in reversed(_folders(storage))
        if not _may_have(storage, f"{folder}/{MANIFEST}")
    }


def _backwards(storage: Storage) -> Iterator[Entry]:
    """Give the checkpoints of an URL, the newest first; a manifest is read when asked for."""
    for folder in _folders(storage):
        path = f"{folder}/{MANIFEST}"
        try:
            content = storage.read(path)
        except CheckpointError as error:
            if _may_have(storage, path):
                yield Entry(folder, None, error, is_unread=True)
            continue  # not written, or removed meanwhile
        try:
            yield Entry(folder, from_bytes(content, folder))
        except CheckpointError as error:
            yield Entry(folder, None, error)


def _may_have(storage: Storage, path: str) -> bool:
    try:
        return storage.has(path)
    except CheckpointError:
        return True


def _folders(storage: Storage) -> list[str]:
    """Return the folders of checkpoints, also of those without a manifest, newest first."""
    found = (folder for folder in storage.folders() if number_of(folder) >= 0)
    return sorted(found, key=lambda folder: (number_of(folder), folder), reverse=True)


def newest(storage: Storage, lineage: str | None = None) -> Entry | None:
    """Return the last checkpoint that is whole, of a lineage or of any."""
    for entry in _backwards(storage):
        of = entry.manifest
        if of is not None and lineage in (None, of.lineage):
            return entry
    return None


def find(
    url: str, options: StorageOptions = None, lineage: str | None = None
) -> FoundCheckpoint:
    """Return the checkpoint that an URL means: itself, or the newest of those below it.

    Parameters
    ----------
    url : str
        Of one checkpoint, or of a folder of them.
    options : mapping, optional
        For its filesystem.
    lineage : str, optional
        The only lineage whose checkpoints count; they are in a folder of them then.

    Returns
    -------
    FoundCheckpoint
        The checkpoint.

    Raises
    ------
    CheckpointError
        If there is none, or it cannot be read: an older one is never taken in silence.
    """
    storage = Storage(url, options)
    if lineage is None and (is_one(url) or storage.has(MANIFEST)):
        content = storage.read(MANIFEST)
        return FoundCheckpoint(url, options, digest(content), from_bytes(content))
    for found in _whole(url, storage, options):
        if lineage in (None, found.manifest.lineage):
            return found
    why = "this store was never saved there"
    if lineage is None:
        why = (
            f"no folder ckpt-... there has a {MANIFEST}; look at the URL, or save one "
            f"with store.save(url)"
        )
    raise CheckpointError(f"no checkpoint at {storage.url}: {why}", MANIFEST)


def _whole(
    url: str, storage: Storage, options: StorageOptions
) -> Iterator[FoundCheckpoint]:
    """Give the checkpoints of an URL, the newest first; what cannot be read is an error."""
    for folder in _folders(storage):
        path = f"{folder}/{MANIFEST}"
        # One that was not written to its end is none, where no rename makes it whole.
        if storage.has(path) and not is_torn(content := storage.read(path)):
            manifest = from_bytes(content, folder)
            at = f"{url}/{folder}"
            yield FoundCheckpoint(at, options, digest(content), manifest)


def remove(storage: Storage, folder: str) -> None:
    """Remove a checkpoint: first what makes it one, so that no half of it is ever found."""
    storage.remove(f"{folder}/{MANIFEST}")
    storage.remove(folder)


def retain(storage: Storage, lineage: str, keep: int) -> list[str]:
    """Remove the oldest checkpoints of a lineage until `keep` are left; return which.

    Those of others, and those that cannot be read, stay.
    """
    own = [
        entry.folder
        for entry in entries(storage)
        if entry.manifest is not None and entry.manifest.lineage == lineage
    ]
    gone = own[: max(0, len(own) - keep)]
    for folder in gone:
        remove(storage, folder)
    return gone


def sweep(storage: Storage, now: float) -> list[str]:
    """Remove folders that nobody has finished for a day; return which.

    Parameters
    ----------
    storage : Storage
        Of the URL.
    now : float
        Seconds since 1970.

    Returns
    -------
    list of str
        Only folders named as checkpoints are looked at.
    """
    gone = []
    for folder, age in unfinished(storage, now).items():
        if age is not None and age > ABANDONED_SECONDS:
            storage.remove(folder)
            gone.append(folder)
    return gone
