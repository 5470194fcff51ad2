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
        What the outermost group says of the checkpoint.

    Returns
    -------
    dict of str to bytes
        Contents by path.
    """
    found = {NODE: _group({"daskps": dict(summary)})}
    for array in arrays:
        above = array.path.partition("/")[0]
        found.setdefault(f"{above}/{NODE}", _group({}))
        found[f"{array.path}/{NODE}"] = _array(array)
    return found


def _group(attributes: Mapping[str, Any]) -> bytes:
    return _text({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def _array(array: StoredArray) -> bytes:
    """Return what describes an array; bytes of one have no order, so none is given."""
    endian = {"endian": "little"} if array.itemsize > 1 else {}
    return _text(
        {
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
    )


def _text(node: Mapping[str, Any]) -> bytes:
    # Names may hold halves of characters, which ASCII escapes and UTF-8 has not.
    return json.dumps(node, indent=1).encode("ascii")
