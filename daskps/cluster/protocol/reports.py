"""Hosts' reports to the directory on shards: for a cut, and of one without an owner."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.shards.cuts.cut import ShardReport

if TYPE_CHECKING:
    from collections.abc import Sequence


#: Metric of a worker: which shared memory it has.
MEMORY_METRIC = "daskps-memory"


class Sight(enum.StrEnum):
    """The answer of a worker about the memory of a shard that has no owner."""

    #: It is there, whole, though a process that lives keeps it, or has to take it.
    FOUND = "found"
    #: The worker is on its machine, and there is no such memory.
    ABSENT = "absent"
    #: It did not answer, or cannot know.
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class OrderWire:
    """The steps that the shards of a host must have applied before they are copied."""

    #: Shard, owner and sequence.
    missing: Sequence[tuple[int, int, int]]
    run: int
    rounds: int


def pack_report(report: ShardReport) -> list[Any]:
    """Return a report as plain msgpack."""
    rows = np.ascontiguousarray(report.rows).tobytes()
    return [report.shard, report.run, report.rounds, rows, list(report.touched)]


def unpack_report(packed: Sequence[Any]) -> ShardReport:
    """Undo :func:`pack_report`."""
    shard, run, rounds, rows, touched = packed
    return ShardReport(
        shard,
        run,
        rounds,
        np.frombuffer(rows, np.int64).reshape(-1, 4),
        [(o, s, tuple((a, b) for a, b in runs)) for o, s, runs in touched],
    )
