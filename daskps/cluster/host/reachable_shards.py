"""Shards that threads of this process can call, of whichever process they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from daskps.cluster.host.hosted import HostedShard
    from daskps.reduction import Empty


class ReachableShards(ABC):
    """Shards of one worker, in its process or mapped into another one.

    Parameters
    ----------
    empty : callable
        Makes arrays for the values that are read and widened here.
    patience : float
        Most seconds that a call waits here.
    """

    #: Whether this process owns the shards.
    is_own = False

    def __init__(self, empty: Empty, patience: float) -> None:
        self.shards: dict[tuple[str, int], HostedShard] = {}
        self.empty, self.patience = empty, patience

    @abstractmethod
    def is_live(self) -> bool:
        """Return whether the owner of the shards is there."""

    @abstractmethod
    def make_room(self, hosted: HostedShard, producer: int, seconds: float) -> None:
        """Make room at a shard for the pushes of a producer, if it needs any.

        Raises
        ------
        ShardBusyError
            If that takes longer than so many seconds.
        """
