"""A state of a shard in a message or a frame: its arrays, with dtypes and shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.protocol.packing import bytes_of, pack_array
from daskps.errors import ProtocolError
from daskps.shards.arrays.unbounded_rows import KnownIds
from daskps.shards.states import Mark, PieceState, RowsState, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array


def pack_state(
    state: State, pack: Callable[[Array], Any] = pack_array
) -> dict[str, Any]:
    """Return a state as plain values, and arrays as `pack` returns each, in order."""

    def _pack(array: Array) -> tuple[str, tuple[int, ...], Any]:
        return array.dtype.str, array.shape, pack(np.ascontiguousarray(array))

    return {
        "goes_back": state.goes_back,
        "since": tuple(state.since),
        "now": tuple(state.now),
        "words": [(at, _pack(words)) for at, words in state.words],
        "header": _pack(state.header),
        "pieces": [
            (*of[:2], _pack(of.weights), [*map(_pack, of.slots)]) for of in state.pieces
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


def pack_arrays(state: State) -> tuple[dict[str, Any], list[Array]]:
    """Return a state as plain values, and its arrays as they follow in a frame."""
    arrays: list[Array] = []

    def pack(array: Array) -> int:
        # Each begins as the one before it, at a whole word.
        arrays.extend((array, np.zeros(-array.nbytes % 8, np.uint8)))
        return array.nbytes

    return pack_state(state, pack), arrays


def unpack_arrays(packed: Any, data: Array) -> State:
    """Rebuild a state from :func:`pack_arrays`, over the bytes of its arrays."""
    end = 0

    def unpack(nbytes: int) -> Array:
        nonlocal end
        start, end = end, end + nbytes + -nbytes % 8
        return data[start : start + nbytes]

    return unpack_state(packed, unpack)


def unpack_state(packed: Any, unpack: Callable[[Any], Array] = bytes_of) -> State:
    """Rebuild a state; `unpack` returns the bytes of each array, in the same order.

    Raises
    ------
    ProtocolError
        For what that never returns.
    """

    def _unpack(packed: Any) -> Array:
        dtype, shape, data = packed
        array: Array = unpack(data).view(dtype).reshape(shape)
        return array

    try:
        return State(
            Mark(*packed["since"]),
            Mark(*packed["now"]),
            [(at, _unpack(words)) for at, words in packed["words"]],
            _unpack(packed["header"]),
            [
                PieceState(i, start, _unpack(weights), tuple(map(_unpack, slots)))
                for i, start, weights, slots in packed["pieces"]
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
            packed["goes_back"],
        )
    except (LookupError, TypeError, ValueError) as error:
        raise ProtocolError(f"a state that is none: {error!r:.200}") from error
