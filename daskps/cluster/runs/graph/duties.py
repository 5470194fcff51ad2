"""What the tasks of graph execution are told to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daskps.cluster.host.contributions import RoundId


@dataclass(frozen=True, slots=True)
class Duty:
    """Whose gradient a task computes, for which round, and where its data should be."""

    place: RoundId
    rank: int
    home: str

    def __reduce__(self) -> Any:
        """Travel with each task: what dataclasses do by themselves takes far longer."""
        return Duty, (self.place, self.rank, self.home)


@dataclass(frozen=True, slots=True)
class Reduction:
    """Which round a task reduces for which shards, all of one host."""

    place: RoundId
    shards: tuple[int, ...]

    def __reduce__(self) -> Any:
        """Travel as `Duty` does."""
        return Reduction, (self.place, self.shards)
