"""Delays of gradients in a simulation: what shards make of them, against what was read."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.typing import Array
    from tests.simulator.oracles import Watch

#: How far numbers may be from what they are for sure.
CLOSE = 1e-9


class Delays:
    """What one-hot gradients say of their delays that are damped by a power of 1.

    A gradient with a delay of d counts 1 / (1 + d). The updates that its trainer had read
    of a shard, and d more: that is its place among all updates of the shard, and no two of
    them have one place. What had been read is counted in the values that were.

    Parameters
    ----------
    watch : Watch
        Hears of what is wrong.
    bound : int
        Gradients with a larger delay are left out; -1 for none.
    """

    def __init__(self, watch: Watch, bound: int) -> None:
        self._watch, self.bound = watch, bound
        #: By rank and clock how many updates of each shard a trainer had read: once for
        #: each time that it was there.
        self._read: dict[tuple[int, int], list[Array]] = defaultdict(list)

    def note(self, rank: int, clock: int, there: Array) -> None:
        """Know which updates a trainer has read before a step."""
        self._read[rank, clock].append(there.sum(axis=(1, 2)).astype(int))

    def there(self, counts: Array, what: str) -> Array:
        """Return 1 for each step that a shard has, 0 for others; look at what it counts."""
        there = counts != 0
        delays = self._of(counts)
        wrong = abs(counts * (1 + delays) - there) > CLOSE
        if self.bound >= 0:
            wrong |= there & (delays > self.bound)
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0].tolist())
            self._watch.wrong(
                f"{what}: {counts[at]:g} at {at}, with a delay of no step"
            )
        found: Array = there.astype(float)
        return found

    def _of(self, counts: Array) -> Array:
        with np.errstate(divide="ignore"):
            found = np.where(counts > 0, 1 / np.abs(counts) - 1, 0.0)
        return np.rint(found).astype(int)

    def check(
        self, counts: Array, shards: list[Mapping[str, Any]], n_made: int | None
    ) -> None:
        """Compare delays with what was read, and what was counted with both.

        Parameters
        ----------
        counts : ndarray, shape (n_shards, n_ranks, n_clocks)
            What each step counts.
        shards : list of mapping
            What the shards say of themselves.
        n_made : int or None
            How many steps there were; None where some are in doubt.
        """
        delays = self._of(counts)
        for row in shards:
            shard = row["shard"]
            applied = np.argwhere(counts[shard]).tolist()
            self._check_places(shard, applied, delays[shard])
            found = [int(delays[shard, rank, clock]) for rank, clock in applied]
            self._check_counts(row, found, n_made)

    def _check_places(self, shard: int, applied: Any, delays: Array) -> None:
        taken: set[int] = set()
        for rank, clock in applied:
            reads = {int(read[shard]) for read in self._read[rank, clock]}
            places = {n + int(delays[rank, clock]) for n in reads}
            if len(places) > 1:
                continue  # two trainers have sent it: nobody knows whose has come first
            if places <= taken or max(places) >= len(applied):
                self._watch.wrong(
                    f"clock {clock} of trainer {rank} has a delay of "
                    f"{delays[rank, clock]} in shard {shard}, of which it had read "
                    f"{reads} of {len(applied)} updates"
                )
            taken |= places

    def _check_counts(
        self, row: Mapping[str, Any], found: list[int], n_made: int | None
    ) -> None:
        said, dropped = dict(row["delays"]), row["dropped"]
        wanted = Counter(1 << d.bit_length() >> 1 for d in found)
        # Of those that were left out no delay is known, but that it is above the bound.
        exact = {
            d: n for d, n in said.items() if self.bound < 0 or d <= self.bound // 2
        }
        is_wrong = sum(said.values()) != len(found) + dropped
        is_wrong |= any(wanted[delay] != n for delay, n in exact.items())
        is_wrong |= n_made is not None and n_made != len(found) + dropped
        if is_wrong or (self.bound < 0 and dropped):
            self._watch.wrong(
                f"shard {row['shard']} counts {said} by delay and {dropped} left out, "
                f"where {dict(wanted)} were applied of {n_made}"
            )
