"""Frames of many lanes that are served together.

Where many callers ask at once, a shard takes all their pushes in one pass over memory, as
it does with those that queue up: each frame of a batch only leaves its tickets there, and
the shards are served once. Then all of them are answered.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.lane.calls import Queues, Waiting

logger = logging.getLogger(__name__)
#: Frames of a batch: what more would save is little, and the first of them waits.
MOST_FRAMES = 32


#: What has a frame in it.
Asking = TypeVar("Asking")


class FrameBatch(Generic[Asking]):
    """The frames of one batch, one of a lane at most."""

    def __init__(self) -> None:
        #: Where their tickets wait.
        self.queues: Queues = {}
        self._asked: list[tuple[Asking, list[Any] | Waiting]] = []

    def add(self, connection: Asking, found: list[Any] | Waiting) -> None:
        """Take what answers a frame, or the call that has left its tickets."""
        self._asked.append((connection, found))

    @property
    def is_full(self) -> bool:
        """Whether its frames are to be answered before there are more."""
        return len(self._asked) >= MOST_FRAMES

    def serve(self) -> Sequence[tuple[Asking, list[Any] | Waiting]]:
        """Serve the shards; return the frames, in their order, and be empty."""
        queues, self.queues = self.queues, {}
        asked, self._asked = self._asked, []
        for queue in queues:
            try:
                queue.serve()
            except Exception:
                # Those of other shards, and of all lanes, are not to end with it.
                logger.exception("a shard could not be served for lanes")
        return asked
