"""Reduced contributions that a host keeps until its shards take them."""

from __future__ import annotations

import time

from daskps.errors import ContributionLostError
from daskps.typing import Array

#: How long a host keeps reduced contributions for a caller that does not come back.
KEPT_SECONDS = 300.0
#: Reduced arrays by shard and position of the piece.
ReducedPieces = dict[tuple[int, int], Array]


class KeptAggregates:
    """Reduced contributions that one host keeps until its shards take them."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, ReducedPieces]] = {}

    def keep(self, token: str, found: ReducedPieces) -> None:
        """Keep reduced pieces, and drop those whose caller has not come in time."""
        now = time.monotonic()
        for old in [t for t, (end, _) in self._kept.items() if end < now]:
            del self._kept[old]
        self._kept[token] = now + KEPT_SECONDS, found

    def find(self, token: str) -> ReducedPieces:
        """Return the reduced pieces of a token.

        Raises
        ------
        ContributionLostError
            If they are not kept, or no longer: the caller must reduce again.
        """
        if token not in self._kept:
            raise ContributionLostError(
                "what contributions have come to went with the worker that had it; "
                "reduce them again"
            )
        return self._kept[token][1]

    def drop(self, token: str) -> None:
        """Drop the reduced pieces of a token."""
        self._kept.pop(token, None)
