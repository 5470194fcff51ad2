"""Digests of files: XXH3 of 128 bits, in hexadecimal digits.

They guard against damage to files, not against people: a user who may write a file of a
checkpoint may write its manifest too.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import xxhash

from daskps.errors import CheckpointError

#: The bytes that a file holds, or is to hold: of an array its `data`.
Content: TypeAlias = "bytes | bytearray | memoryview"
#: The algorithm of digests: the command `xxh128sum` prints the same digits.
ALGORITHM: Final = "xxh128"
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

    It is XXH3 of 128 bits with seed 0, from the xxHash library of Yann Collet, in its
    canonical form, which begins with the highest byte.

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
    '99aa06d3014798d86001c324468d497f'
    """
    # The function that does it in one call holds the GIL before release 4.
    return xxhash.xxh3_128(content).hexdigest()


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
