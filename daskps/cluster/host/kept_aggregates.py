"""What was reduced on a host and is yet to be taken by its shards."""

from __future__ import annotations

import time

from daskps.errors import ContributionLostError
from daskps.typing import Array

#: How long what was reduced is kept for a caller that does not come back.
KEPT_SECONDS = 300.0
#: By shard and position of the piece.
ReducedPieces = dict[tuple[int, int], Array]


class KeptAggregates:
    """What was reduced on one host and is yet to be taken by its shards."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, ReducedPieces]] = {}

    def keep(self, token: str, found: ReducedPieces) -> None:
        """Keep what was reduced, and drop what nobody has come for."""
        now = time.monotonic()
        for old in [t for t, (end, _) in self._kept.items() if end < now]:
            del self._kept[old]
        self._kept[token] = now + KEPT_SECONDS, found

    def find(self, token: str) -> ReducedPieces:
        """Return what was kept.

        Raises
        ------
        ContributionLostError
            Where it was not, or no more: it is to be reduced again.
        """
        if token not in self._kept:
            raise ContributionLostError(
                "what contributions have come to went with the worker that had it; "
                "reduce them again"
            )
        return self._kept[token][1]

    def drop(self, token: str) -> None:
        """Forget it."""
        self._kept.pop(token, None)
