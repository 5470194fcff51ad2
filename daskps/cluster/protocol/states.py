"""A state of a shard in a message: its arrays, each with its dtype and shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.protocol.packing import bytes_of, pack_array
from daskps.errors import ProtocolError
from daskps.shards.arrays.unbounded_rows import KnownIds
from daskps.shards.states import Mark, PieceState, RowsState, State

if TYPE_CHECKING:
    from daskps.typing import Array


def pack_state(state: State) -> dict[str, Any]:
    """Return a state as plain values and arrays."""
    return {
        "since": tuple(state.since),
        "now": tuple(state.now),
        "words": [(at, _pack(words)) for at, words in state.words],
        "header": _pack(state.header),
        "pieces": [
            (of.position, _pack(of.weights), [*map(_pack, of.slots)])
            for of in state.pieces
        ],
        "tables": [
            (
                *(of.ordinal, _pack(of.ids), _pack(of.rows), [*map(_pack, of.slots)]),
                of.known and [*map(_pack, of.known)],
                of.whole,
            )
            for of in state.tables
        ],
    }


def unpack_state(packed: Any) -> State:
    """Rebuild a state.

    Raises
    ------
    ProtocolError
        For what that never returns.
    """
    try:
        return State(
            Mark(*packed["since"]),
            Mark(*packed["now"]),
            [(at, _unpack(words)) for at, words in packed["words"]],
            _unpack(packed["header"]),
            [
                PieceState(position, _unpack(weights), tuple(map(_unpack, slots)))
                for position, weights, slots in packed["pieces"]
            ],
            [
                RowsState(
                    *(ordinal, _unpack(ids), _unpack(rows)),
                    tuple(map(_unpack, slots)),
                    known and KnownIds(*map(_unpack, known)),
                    whole,
                )
                for ordinal, ids, rows, slots, known, whole in packed["tables"]
            ],
        )
    except (LookupError, TypeError, ValueError) as error:
        raise ProtocolError(f"a state that is none: {error!r:.200}") from error


def _pack(array: Array) -> tuple[str, tuple[int, ...], Any]:
    return array.dtype.str, array.shape, pack_array(np.ascontiguousarray(array))


def _unpack(packed: Any) -> Array:
    dtype, shape, data = packed
    array: Array = bytes_of(data).view(dtype).reshape(shape)
    return array
