"""Manifests to and from JSON: all that is read is looked at."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import limits
from daskps.checkpoint.digests import N_DIGITS, StoredFile
from daskps.checkpoint.fields import MOST, Fields
from daskps.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    StoredParameter,
    StoredTable,
    sealed,
    unsealed,
)
from daskps.checkpoint.rules import StoredRule
from daskps.checkpoint.zarr import node_paths
from daskps.errors import CheckpointError, LayoutError
from daskps.layout.arrays import DTYPES
from daskps.layout.spans import CANDIDATES, IDS
from daskps.layout.tables import UnboundedIds

if TYPE_CHECKING:
    from collections.abc import Callable

_WORD = 2**64 - 1


def to_bytes(manifest: Manifest) -> bytes:
    """Return the text of a manifest."""
    return sealed(
        {
            "format": FORMAT,
            **_entries(manifest),
            "seed": str(manifest.seed),
            "parameters": [*map(_entries, manifest.parameters)],
            "tables": [*map(_table_entries, manifest.tables)],
            "rules": [rule.to_json() for rule in manifest.rules],
            "progress": dict(manifest.progress),
            "history": [dict(entry) for entry in manifest.history],
        }
    )


def _entries(of: Manifest | StoredParameter | StoredTable) -> dict[str, Any]:
    """Return the fields of a part of a manifest by name, in the order of its class."""
    return {name: getattr(of, name) for name in of.__dataclass_fields__}


def _table_entries(table: StoredTable) -> dict[str, Any]:
    """Return the fields of a table, with what the format calls any ids."""
    entries = _entries(table)
    unbounded = entries.pop("unbounded")
    return entries | {"any_ids": unbounded and unbounded.to_wire()}


def from_bytes(content: bytes, folder: str = "") -> Manifest:
    """Read a manifest.

    Parameters
    ----------
    content : bytes
        Of the file.
    folder : str, default ""
        Of the checkpoint, for errors.

    Returns
    -------
    Manifest
        Its files are those of its arrays, each of the right size.

    Raises
    ------
    CheckpointError
        If it is damaged, newer, or says what no manifest does; it names the file.
    """
    file = f"{folder}/{MANIFEST}".strip("/")
    found = Fields(unsealed(content, file), file, "")
    rules = tuple(map(StoredRule.from_json, found.objects("rules")))
    manifest = Manifest(
        store=found.text("store"),
        lineage=found.text("lineage"),
        parent=found.text("parent"),
        sequence=found.whole("sequence"),
        time=found.moment("time"),
        seed=_seed(found),
        version=found.whole("version"),
        parameters=tuple(
            _parameter(f, len(rules)) for f in found.objects("parameters")
        ),
        tables=tuple(_table_of(f, len(rules)) for f in found.objects("tables")),
        rules=rules,
        files=tuple(_file(f, file) for f in found.items("files")),
        epochs=_epochs(found),
        progress=found.mapping("progress"),
        history=tuple(map(_entry(found), found.items("history"))),
        daskps=found.text("daskps"),
    )
    _check_layout(manifest, file)
    _check_files(manifest, file)
    return manifest


def _epochs(found: Fields) -> tuple[int, int, int]:
    match found.wholes("epochs"):
        case (first, per_epoch, clock):
            return first, per_epoch, clock
        case other:
            raise CheckpointError(
                f"{found.file}: the epochs are {other!r:.60}, expected three numbers",
                found.file,
            )


def _factor(found: Fields) -> float:
    factor = found.get("lr_factor")
    if type(factor) not in (int, float) or not 0 < factor <= sys.float_info.max:
        raise CheckpointError(
            f"{found.file}: the learning rate of {found.where} is multiplied by "
            f"{factor!r:.60}, expected a number above 0; restore another checkpoint",
            found.file,
        )
    return float(factor)


def _seed(found: Fields) -> int:
    text = found.text("seed")
    if not text.isdecimal() or len(text) > 4000:
        raise CheckpointError(f"{found.file}: the seed is {text!r:.60}", found.file)
    return int(text)


def _entry(found: Fields) -> Callable[[Any], dict[str, Any]]:
    def check(entry: Any) -> dict[str, Any]:
        Fields(entry, found.file, "history")
        return dict(entry)

    return check


def _rule(found: Fields, n_rules: int) -> int | None:
    return None if found.get("rule") is None else found.whole("rule", 0, n_rules - 1)


def _parameter(found: Fields, n_rules: int) -> StoredParameter:
    return StoredParameter(
        found.text("name"),
        found.wholes("shape"),
        found.text("dtype"),
        _rule(found, n_rules),
        found.whole("steps"),
        _factor(found),
    )


def _table_of(found: Fields, n_rules: int) -> StoredTable:
    return StoredTable(
        name=found.text("name"),
        rows=found.whole("rows", 0, 0 if found.get("any_ids") else MOST),
        dim=found.whole("dim", 1),
        dtype=found.text("dtype"),
        unbounded=_unbounded(found),
        rule=_rule(found, n_rules),
        steps=found.whole("steps"),
        lr_factor=_factor(found),
        clock=found.whole("clock"),
        n_rows=found.whole("n_rows"),
        n_candidates=found.whole("n_candidates"),
        admitted=found.whole("admitted"),
        evicted=found.whole("evicted"),
        begins=found.wholes("begins", _WORD),
        candidate_begins=found.wholes("candidate_begins", _WORD),
    )


def _unbounded(found: Fields) -> UnboundedIds | None:
    wire = found.get("any_ids")
    if wire is None:
        return None
    try:
        unbounded = UnboundedIds.from_wire(*wire)
        policy = unbounded.max_rows, unbounded.ttl, unbounded.admit_after - 1
        if all(type(n) is int and 0 <= n < 2**47 for n in policy):
            return unbounded
    except (ValueError, TypeError, KeyError, LayoutError):
        pass
    raise CheckpointError(
        f"{found.file}: {found.where} has unbounded rows as {wire!r:.100}, which no "
        f"table has; it is damaged",
        found.file,
    )


def _file(found: Any, file: str) -> StoredFile:
    match found:
        case [str(path), int(nbytes), str(digest)]:
            at = path.split("/")
            if path.startswith("/") or "\\" in path or {"", ".", ".."} & {*at}:
                raise CheckpointError(
                    f"{file} names {path!r:.100}, which is outside its folder; do not "
                    f"trust it",
                    file,
                )
            if nbytes >= 0 and len(digest) == N_DIGITS:
                return StoredFile(path, nbytes, digest)
    raise CheckpointError(f"{file} names a file by {found!r:.100}", file)


def _check_layout(manifest: Manifest, file: str) -> None:
    """Refuse what no store can be, before anything of its size is built."""
    parameters = [(p.name, p.shape, p.dtype) for p in manifest.parameters]
    tables = [(t.name, t.rows, t.dim, t.dtype) for t in manifest.tables]
    names = [name for name, *_ in (*parameters, *tables)]
    try:
        if len({*names}) != len(names) or "" in names:
            raise LayoutError("a name is given twice, or empty")
        if wrong := {dtype for *_, dtype in (*parameters, *tables)} - {*DTYPES}:
            raise LayoutError(f"{min(wrong)!r:.60} is no dtype of a store")
        for stored in manifest.members:
            if stored.rule is not None and np.dtype(stored.dtype).kind != "f":
                raise LayoutError(
                    f"{stored.name!r:.60} of {stored.dtype} has an optimizer, which "
                    f"integers have not"
                )
        limits.check_parameters(parameters, len(parameters), 1, tables)
        manifest.layout(1)
    except LayoutError as error:
        raise CheckpointError(f"{file}: {error}", file) from None
    arrays = {(a.members[0].index, a.area): a for a in manifest.arrays}
    for index, table in enumerate(manifest.tables, len(manifest.parameters)):
        for area, begins in (
            (IDS, table.begins),
            (CANDIDATES, table.candidate_begins),
        ):
            array = arrays.get((index, area))
            n = 0 if array is None else array.grid.n_chunks
            if len(begins) != n or list(begins) != sorted(begins):
                raise CheckpointError(
                    f"{file}: the {n} chunks of {area} of table {table.name!r:.60} begin "
                    f"with {len(begins)} hashes, or these do not rise",
                    file,
                    table.name,
                )


def _check_files(manifest: Manifest, file: str) -> None:
    """Refuse a list of files that is not that of the arrays."""
    listed = manifest.file_at
    if len(listed) != len(manifest.files):
        raise CheckpointError(f"{file} names a file twice", file)
    wanted = dict.fromkeys(node_paths(manifest.arrays), -1)
    for array in manifest.arrays:
        # So many are no list: what it says would never end.
        if array.grid.n_chunks <= len(listed):
            paths = map(array.path_of, array.grid.chunks())
            wanted |= dict.fromkeys(paths, array.chunk_nbytes)
        else:
            wanted[f"{array.path}/c"] = array.chunk_nbytes
    for path, nbytes in wanted.items():
        of = manifest.parameter_of(path)
        if path not in listed:
            raise CheckpointError(
                f"{file} has no digest of {path}{f', of {of!r:.60}' if of else ''}",
                file,
                of,
            )
        if listed[path].nbytes != nbytes >= 0:
            raise CheckpointError(
                f"{file} says that {path} has {listed[path].nbytes:,} bytes, a chunk of "
                f"{of!r:.60} has {nbytes:,}",
                file,
                of,
            )
    if more := listed.keys() - wanted.keys():
        raise CheckpointError(
            f"{file} names {min(more)!r:.100}, which is none of its arrays'", file
        )
