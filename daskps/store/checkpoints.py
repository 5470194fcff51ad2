"""Checkpoints as a user sees them: their facts, and lists of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes

from daskps.checkpoint import listing
from daskps.checkpoint.listing import CheckpointTarget
from daskps.checkpoint.storage import Storage, full_url, options_of, shown
from daskps.cluster.protocol.packing import pack_options
from daskps.store.repr import TableList
from daskps.tracebacks import entrance

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from daskps.checkpoint.manifest import Manifest


@dataclass(frozen=True)
class CheckpointInfo:
    """Facts about one checkpoint.

    Parameters
    ----------
    url : str
        Its own, to restore it from; without what may be secret.
    store : str
        Name of the store, "" of one without a name.
    sequence : int
        Its number at its place; several savers may have the same.
    time : datetime
        When it was written, in UTC.
    version : int
        Of the store, the largest of its shards.
    parameters, tables : int
        How many there are.
    nbytes, files : int
        Bytes and number of all files.
    lineage, parent : str
        Id that its stores share, and the folder of the one before it, "" for none.
    daskps : str
        The version that wrote it.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> info = CheckpointInfo(
    ...     url="s3://bucket/ckpt-000000000007-0a1b2c3d",
    ...     store="model",
    ...     sequence=7,
    ...     time=datetime(2026, 11, 23, tzinfo=UTC),
    ...     version=120,
    ...     parameters=2,
    ...     tables=1,
    ...     nbytes=2**20,
    ...     files=12,
    ...     lineage="5f",
    ...     parent="",
    ...     daskps="0.1",
    ... )
    >>> info.version, info.sequence
    (120, 7)
    """

    url: str
    store: str
    sequence: int
    time: datetime
    version: int
    parameters: int
    tables: int
    nbytes: int
    files: int
    lineage: str
    parent: str
    daskps: str


def info_of(url: str, manifest: Manifest) -> CheckpointInfo:
    """Return what is told of the checkpoint at an URL."""
    return CheckpointInfo(
        url=shown(url),
        store=manifest.store,
        sequence=manifest.sequence,
        time=datetime.fromtimestamp(manifest.time, UTC),
        version=manifest.version,
        parameters=len(manifest.parameters),
        tables=len(manifest.tables),
        nbytes=manifest.nbytes,
        files=len(manifest.files),
        lineage=manifest.lineage,
        parent=manifest.parent,
        daskps=manifest.daskps,
    )


class CheckpointList(TableList[CheckpointInfo]):
    """Checkpoints, the oldest first, which show themselves as a table.

    Parameters
    ----------
    entries : iterable of Entry
        The checkpoints.
    url : str
        The place that was listed.
    """

    _noun = "checkpoint"
    _heads = (
        *("checkpoint", "store", "version", "parameters", "tables", "bytes"),
        "time (UTC)",
    )

    def __init__(self, entries: Iterable[listing.Entry] = (), url: str = "") -> None:
        super().__init__()
        #: Why it cannot be read, by the folder of each that is left out.
        self.unread: dict[str, str] = {}
        for entry in entries:
            if entry.manifest is None:
                self.unread[entry.folder] = str(entry.error)
            else:
                self.append(info_of(f"{url}/{entry.folder}", entry.manifest))

    def _notes(self) -> list[str]:
        return [f"{folder}: {why}" for folder, why in self.unread.items()]

    def _row(self, entry: CheckpointInfo) -> tuple[str, ...]:
        name, store = entry.url.rpartition("/")[2], entry.store or "-"
        held = str(entry.parameters), str(entry.tables), format_bytes(entry.nbytes)
        return name, store, str(entry.version), *held, f"{entry.time:%Y-%m-%d %H:%M:%S}"


@entrance
def list_checkpoints(
    url: Any, *, storage_options: Mapping[str, Any] | None = None
) -> CheckpointList:
    """List the checkpoints of an URL; no cluster is needed.

    Parameters
    ----------
    url : str or path-like
        That which stores were saved to: anything fsspec reads, or a local path.
    storage_options : mapping, optional
        For its filesystem, such as keys.

    Returns
    -------
    list of CheckpointInfo
        In the order of their numbers, the newest last, shown as a table. Those that
        cannot be read are not among them; its `unread` says why, by their folders.

    Raises
    ------
    CheckpointError
        If the URL cannot be read.
    TypeError, ValueError
        For what is no URL.

    Examples
    --------
    >>> daskps.list_checkpoints("memory://nothing/saved/here")
    no checkpoints
    """
    at = full_url(url)
    return CheckpointList(listing.entries(Storage(at, storage_options)), at)


def recovery_target(
    recover_from: Any, storage_options: Mapping[str, Any] | None
) -> CheckpointTarget | None:
    """Return where a store is to be restored from, once a shard of it is lost.

    Raises
    ------
    TypeError, ValueError
        For what is no URL, options that cannot be sent, and such without an URL.
    """
    options = options_of(storage_options)
    if recover_from is None:
        return None
    pack_options(options)
    return CheckpointTarget(full_url(recover_from), options)
