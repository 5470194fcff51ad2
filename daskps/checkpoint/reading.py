"""Reading a checkpoint without a cluster, each file compared with its digest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskps.checkpoint.digests import check_content
from daskps.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daskps.checkpoint.arrays import StoredArray
    from daskps.checkpoint.digests import Content, StoredFile
    from daskps.checkpoint.manifest import Manifest
    from daskps.checkpoint.storage import Storage
    from daskps.typing import Array


def read_file(
    storage: Storage, manifest: Manifest, file: StoredFile, room: Array | None = None
) -> Content:
    """Return the content of a file of a checkpoint.

    Parameters
    ----------
    storage : Storage
        Of the checkpoint's folder.
    manifest : Manifest
        Its manifest.
    file : StoredFile
        One of its files.
    room : ndarray, shape (nbytes,), uint8, optional
        Where it may be read to.

    Returns
    -------
    bytes-like
        The bytes of the file, in `room` or in memory of their own.

    Raises
    ------
    CheckpointError
        If it is missing, torn or damaged; it names the file and whose it is.
    """
    of = manifest.parameter_of(file.path)
    try:
        path = file.path
        content: Content
        content = storage.read(path) if room is None else storage.read_into(path, room)
    except CheckpointError as error:
        raise CheckpointError(str(error), file.path, of) from None
    check_content(content, file, of)
    return content


def faults(storage: Storage, manifest: Manifest) -> Iterator[CheckpointError]:
    """Give what is wrong with the files of a checkpoint; all are read."""
    for file in manifest.files:
        try:
            read_file(storage, manifest, file)
        except CheckpointError as error:
            yield error


def blocks(
    storage: Storage, manifest: Manifest, array: StoredArray, member: int = 0
) -> Iterator[Array]:
    """Give the elements of a member of an array in C order, chunk by chunk.

    Parameters
    ----------
    storage : Storage
        Of the checkpoint's folder.
    manifest : Manifest
        Its manifest.
    array : StoredArray
        One of its arrays.
    member : int, default 0
        The number of its member.

    Yields
    ------
    ndarray, shape (k,)
        A chunk's; little-endian.

    Raises
    ------
    CheckpointError
        As of :func:`read_file`.
    """
    of, dtype = array.members[member], np.dtype(array.dtype).newbyteorder("<")
    for chunk in array.grid.chunks(of.start, of.stop):
        content = read_file(storage, manifest, manifest.file_at[array.path_of(chunk)])
        start, stop = max(of.start, chunk.start), min(of.stop, chunk.stop)
        yield np.frombuffer(content, dtype)[start - chunk.start : stop - chunk.start]
