"""The manifest: what a checkpoint is of, and the size and digest of each of its files.

It is written last, so a checkpoint without one does not exist. It begins with a digest
of what follows, and what it says is looked at before anything is done with it::

    {"digest": "xxh128:<32 hexadecimal digits>",
    "format": 1, ..., "end": true}

The digest is that of all that follows the first line, by the algorithm that is named
before it, as are those of the files. Every format to come keeps this line, "format" and
the end, so that what is newer, damaged, and not written to its end can be told from
each other.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from daskps.checkpoint.arrays import Counts, stored_arrays
from daskps.checkpoint.digests import ALGORITHM, digest
from daskps.errors import CheckpointError
from daskps.layout.arrays import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.checkpoint.arrays import StoredArray
    from daskps.checkpoint.digests import StoredFile
    from daskps.checkpoint.rules import StoredRule
    from daskps.layout.tables import UnboundedIds

#: Its name in the folder of a checkpoint, and the format that is written.
MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
_BEGIN, _BETWEEN, _END = b'{"digest": "', b'",\n', b'"end": true}'
#: The first line: an algorithm, which each manifest names, and a digest by it.
_HEAD = re.compile(rb'\{"digest": "(?:([\w-]{1,40}):)?([0-9a-f]{8,128})",\n')


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """An array of the store."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    #: The index of the rule that updates it, None for none, and how often it has.
    rule: int | None = None
    steps: int = 0
    #: By what the rule's learning rate is multiplied.
    lr_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class StoredTable:
    """A table of the store."""

    name: str
    rows: int
    dim: int
    dtype: str
    unbounded: UnboundedIds | None = None
    rule: int | None = None
    steps: int = 0
    lr_factor: float = 1.0
    #: How many pushes have named it.
    clock: int = 0
    #: Unbounded: rows and candidates that there are; ids that got rows, and lost them.
    n_rows: int = 0
    n_candidates: int = 0
    admitted: int = 0
    evicted: int = 0
    #: The hashes that the chunks of its ids begin with, and of its candidates.
    begins: tuple[int, ...] = ()
    candidate_begins: tuple[int, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint says of itself."""

    #: Name of the store, "" of a session store, and its lineage: that of the store
    #: which it was restored from, or one of its own.
    store: str
    lineage: str
    #: The checkpoint before it in its lineage, "" for none, and its number in its URL.
    parent: str
    sequence: int
    #: When it was written, in seconds since 1970.
    time: float
    #: The store's; it may have any number of digits.
    seed: int
    #: The largest of the shards'.
    version: int
    parameters: tuple[StoredParameter, ...]
    tables: tuple[StoredTable, ...]
    rules: tuple[StoredRule, ...]
    files: tuple[StoredFile, ...]
    #: Where it is in its epochs, as :class:`daskps.epochs.Epochs` has it.
    epochs: tuple[int, int, int] = (0, 0, 0)
    #: How far training has come, and what was measured: plain values of JSON.
    progress: Mapping[str, Any] = field(default_factory=dict)
    history: Sequence[Mapping[str, Any]] = ()
    #: The version of daskps that wrote it.
    daskps: str = ""

    def layout(self, n_shards: int) -> Layout:
        """Return the layout of the store in any number of shards.

        Raises
        ------
        LayoutError
            If no store has such parameters.
        """
        shapes = {p.name: (p.shape, p.dtype) for p in self.parameters}
        tables: dict[str, Any] = {
            t.name: (t.rows, t.dim, t.dtype, *([t.unbounded] if t.unbounded else []))
            for t in self.tables
        }
        return Layout.build(shapes, n_shards, tables)

    @property
    def members(self) -> list[StoredParameter | StoredTable]:
        """Its parameters and tables, by index."""
        return [*self.parameters, *self.tables]

    @cached_property
    def slots(self) -> dict[int, tuple[float, ...]]:
        """First values of the slots by index of parameter or table."""
        return {
            index: self.rules[of.rule].first
            for index, of in enumerate(self.members)
            if of.rule is not None
        }

    @cached_property
    def counts(self) -> Counts:
        """Of unbounded tables: how many rows and candidates, in one shard."""
        of = [t for t in enumerate(self.tables, len(self.parameters)) if t[1].unbounded]
        rows = {index: (t.n_rows,) for index, t in of}
        return Counts(rows, {index: (t.n_candidates,) for index, t in of})

    @cached_property
    def arrays(self) -> list[StoredArray]:
        """Its arrays."""
        return stored_arrays(self.layout(1), self.slots, self.counts)

    @cached_property
    def file_at(self) -> dict[str, StoredFile]:
        """Files by path."""
        return {file.path: file for file in self.files}

    @property
    def nbytes(self) -> int:
        """Bytes of all files but its own."""
        return sum(file.nbytes for file in self.files)

    def parameter_of(self, path: str) -> str:
        """Return whose elements a file has: the name of a parameter or table, or "".

        Of packed arrays the first name and the number of others.
        """
        return self._names.get("/".join(path.split("/")[:2]), "")

    @cached_property
    def _names(self) -> dict[str, str]:
        names = [of.name for of in self.members]
        found = {}
        for array in self.arrays:
            n = len(array.members)
            more = f" and {n - 1:,} more" if n > 1 else ""
            found[array.path] = names[array.members[0].index] + more
        return found


def sealed(body: Mapping[str, Any]) -> bytes:
    """Return the text of a manifest, with the digest of what it says."""
    text = json.dumps({**body, "end": True}).encode("ascii")[1:]
    told = f"{ALGORITHM}:{digest(text)}"
    return _BEGIN + told.encode("ascii") + _BETWEEN + text


def is_torn(content: bytes) -> bool:
    """Return whether a manifest was not written to its end: as if there were none."""
    return not content.endswith(_END)


def unsealed(content: bytes, file: str) -> dict[str, Any]:
    """Return what a manifest says, if it is whole and of a format that is known.

    Raises
    ------
    CheckpointError
        If it is damaged, newer, or has digests of another algorithm.
    """
    head = _HEAD.match(content)
    if head is None or is_torn(content):
        raise CheckpointError(
            f"{file} is no whole manifest of daskps: of {len(content):,} bytes beginning "
            f"with {content[:40]!r}; restore another checkpoint",
            file,
        )
    algorithm, told = head.groups()
    if algorithm != ALGORITHM.encode():
        by = (
            f"by {algorithm.decode()!r}"
            if algorithm
            else "of which it says no algorithm"
        )
        raise CheckpointError(
            f"{file} has digests {by}, and this daskps knows {ALGORITHM} alone; read it "
            f"with the daskps that wrote it, or restore another checkpoint",
            file,
        )
    text = content[head.end() :]
    if digest(text).encode("ascii") != told:
        raise CheckpointError(
            f"{file} is damaged: it has another digest than it says; restore another "
            f"checkpoint",
            file,
        )
    try:
        body = json.loads(b"{" + text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no JSON: {error}", file) from None
    version = body.get("format")
    if type(version) is int and version > FORMAT:
        raise CheckpointError(
            f"{file} has format {version}, written by daskps "
            f"{body.get('daskps', '?')!s:.40}; this daskps reads up to {FORMAT}: upgrade "
            f"it",
            file,
        )
    if version != FORMAT or type(version) is not int:
        raise CheckpointError(
            f"{file} has the format {version!r:.60}, expected {FORMAT}", file
        )
    return dict(body)
