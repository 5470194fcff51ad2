"""Metadata by which Zarr reads a checkpoint: version 3, chunks as they are in memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from daskps.checkpoint.arrays import StoredArray

#: Name of the metadata of a node.
NODE = "zarr.json"


def nodes(
    arrays: Iterable[StoredArray], summary: Mapping[str, Any]
) -> dict[str, bytes]:
    """Return the metadata of a checkpoint: a file of each group and array.

    Parameters
    ----------
    arrays : iterable of StoredArray
        All of them.
    summary : mapping
        The attributes of the checkpoint in the outermost group.

    Returns
    -------
    dict of str to bytes
        Contents by path.
    """
    below: dict[str, dict[str, Any]] = {}
    for array in arrays:
        below.setdefault(array.path.partition("/")[0], _group({}))
        below[array.path] = _array(array)
    # Zarr's own way to say what is in a group: it lists no folders then, in which the
    # manifest would be no node that it knows. It takes what is in a group from one run.
    ordered = dict(sorted(below.items()))
    consolidated = {"kind": "inline", "must_understand": False, "metadata": ordered}
    top = _group({"daskps": dict(summary)}) | {"consolidated_metadata": consolidated}
    found = {f"{path}/{NODE}": _text(node) for path, node in below.items()}
    return {NODE: _text(top), **found}


def node_paths(arrays: Iterable[StoredArray]) -> set[str]:
    """Return the paths of what :func:`nodes` has."""
    paths = [array.path for array in arrays]
    groups = {path.partition("/")[0] for path in paths}
    return {NODE, *(f"{path}/{NODE}" for path in (*paths, *groups))}


def _group(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def _array(array: StoredArray) -> dict[str, Any]:
    """Return what describes an array; bytes of one have no order, so none is given."""
    endian = {"endian": "little"} if array.itemsize > 1 else {}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": array.shape,
        "data_type": array.dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": array.chunk},
        },
        "chunk_key_encoding": {
            "name": "default",
            "configuration": {"separator": "/"},
        },
        "fill_value": False if array.dtype == "bool" else 0,
        "codecs": [{"name": "bytes", "configuration": endian}],
        "attributes": {"daskps": dict(array.attributes)},
    }


def _text(node: Mapping[str, Any]) -> bytes:
    # Names may hold halves of characters, which ASCII escapes and UTF-8 has not. In one
    # line: indented, 10,000 members take ten times as long.
    return json.dumps(node).encode("ascii")
