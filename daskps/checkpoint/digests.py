"""Digests of files: BLAKE2b of 128 bits, in hexadecimal digits."""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple, TypeAlias

from daskps.errors import CheckpointError

#: What a file holds, or is to hold: of an array its `data`.
Content: TypeAlias = "bytes | bytearray | memoryview"
#: Digits of a digest.
N_DIGITS: Final = 32


class StoredFile(NamedTuple):
    """One file of a checkpoint."""

    #: Within its folder.
    path: str
    nbytes: int
    digest: str


def digest(content: Content) -> str:
    """Return the digest of the content of a file.

    Parameters
    ----------
    content : bytes-like
        All of it.

    Returns
    -------
    str
        32 hexadecimal digits.

    Examples
    --------
    >>> digest(b"")
    'cae66941d9efbd404e4d88758ea67670'
    """
    return hashlib.blake2b(content, digest_size=N_DIGITS // 2).hexdigest()


def check_content(content: Content, file: StoredFile, parameter: str) -> None:
    """Refuse a file whose content is not what was written.

    Raises
    ------
    CheckpointError
        Naming file and parameter.
    """
    with memoryview(content) as found:
        nbytes = found.nbytes
    of = f" of {parameter!r:.60}" if parameter else ""
    if nbytes != file.nbytes:
        raise CheckpointError(
            f"{file.path}{of} has {nbytes:,} bytes, {file.nbytes:,} were written; the "
            f"checkpoint is torn, nothing was loaded; restore another one",
            file.path,
            parameter,
        )
    if (now := digest(content)) != file.digest:
        raise CheckpointError(
            f"{file.path}{of} has the digest {now}, written was {file.digest}; the "
            f"checkpoint is damaged, nothing was loaded; restore another one",
            file.path,
            parameter,
        )
