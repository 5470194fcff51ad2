"""Measures: one number of a parameter, worked out where its elements are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.wire.measuring import Measuring, Share
from daskps.cluster.wire.packing import pack_array, unpack_array
from daskps.errors import IllegalStateError
from daskps.kernels.measures import BLOCK, by_block, computed_in, n_blocks, total

if TYPE_CHECKING:
    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.wire.deadline import Deadline
    from daskps.layout.arrays import Layout
    from daskps.typing import Array


async def measured(
    shards: ShardClient, asked: Measuring, other: Array | None, deadline: Deadline
) -> Any:
    """Return one number of some elements of a parameter.

    Parameters
    ----------
    shards : ShardClient
        The store.
    asked : Measuring
        The number, and the elements that it is of.
    other : ndarray, shape (n,), optional
        The vector that a "dot" multiplies them by.
    deadline : Deadline
        Its end.

    Returns
    -------
    numpy scalar
        As :func:`daskps.kernels.measures.total` returns it.

    Raises
    ------
    ValueError
        NumPy's own, for the least or largest of no elements.
    """
    layout = shards.meta.layout
    dtype = layout.parameters[asked.parameter].dtype
    shares = _shares(layout, asked)

    def say(shard: int) -> tuple[int, Any]:
        part = shares[shard].start, shares[shard].stop
        return shard, None if other is None else pack_array(other[slice(*part)])

    rows = await shards.ask_owners(
        "measure", shares, say, deadline, key="given", asked=tuple(asked)
    )
    of = None if other is None else other.dtype
    joined = _Joined(asked, dtype, other)
    for shard, blocks, *cut in rows:
        joined.take(shares[shard], blocks, cut)
    return total(asked.kind, joined.finish(), asked.n, dtype, by=of)


def _shares(layout: Layout, asked: Measuring) -> dict[int, Share]:
    found = {}
    for piece in layout.pieces_of[asked.parameter]:
        share = Share.of(asked, piece.start, piece.stop)
        if share.start < share.stop:
            found[piece.shard] = share
    return found


class _Joined:
    """The numbers of all blocks, joined from the answers of the shards."""

    def __init__(self, asked: Measuring, dtype: str, other: Array | None) -> None:
        self._asked, self._dtype, self._other = asked, dtype, other
        self._in = computed_in(
            asked.kind, dtype, None if other is None else other.dtype
        )
        self._blocks = np.empty(n_blocks(asked.n), self._in)
        #: Elements of blocks that several shards have, and how many are missing.
        self._cut: dict[int, tuple[Array, int]] = {}
        self._n = 0

    def take(self, share: Share, blocks: Any, cut: Any) -> None:
        """Take the answer of a shard."""
        self._blocks[share.first : share.end] = unpack_array(blocks, self._in.name)
        self._n += share.end - share.first
        for where, packed in zip(share.cut, cut, strict=True):
            if where.start < where.stop:
                self._fill(where, unpack_array(packed, self._dtype))

    def _fill(self, where: slice, elements: Array) -> None:
        block = where.start // BLOCK
        first = block * BLOCK
        length = min(BLOCK, self._asked.n - first)
        held, missing = self._cut.get(block, (np.empty(length, self._dtype), length))
        held[where.start - first : where.stop - first] = elements
        self._cut[block] = held, missing - len(elements)

    def finish(self) -> Array:
        """Return the numbers of all blocks."""
        if self._n + len(self._cut) != len(self._blocks):
            raise IllegalStateError(f"shards lack blocks of {self._asked}")
        for block, (held, missing) in self._cut.items():
            if missing:
                raise IllegalStateError(f"shards lack elements of {self._asked}")
            other = self._other
            first = block * BLOCK
            by = None if other is None else other[first : first + len(held)]
            self._blocks[block] = by_block(self._asked.kind, held, by)[0]
        return self._blocks
