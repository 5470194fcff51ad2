"""Groups that train apart, and meet in a store that all of them add to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from daskps.store.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.store.store import ParameterStore
    from daskps.training.trainer import Trainer
    from daskps.typing import Array

#: No replica makes so many steps: it is synced by hand.
_NEVER = 2**62


@dataclass
class Following:
    """One worker's part in bringing its group and the others together.

    Only worker 0 of a group talks to the store of all groups; the others are there for
    the rounds in which the group takes over what comes from it.

    Parameters
    ----------
    master : ParameterStore
        The store of all groups; at version 0 until the first group has put its values.
    group : int
        Number of the group.
    rank : int
        Number of the worker in it.
    sync_freq, warmup_steps : int
        As of :class:`daskps.compat.singa.WorkerGroup`.
    """

    master: ParameterStore
    group: int
    rank: int
    sync_freq: int
    warmup_steps: int
    _replica: Replica | None = field(default=None, repr=False)

    def first_values(self, values: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return what this worker puts: not its own values, where others have begun."""
        if not self.group:
            return values
        if self.rank:
            return {}
        # The first group has put them by its warm-up's end.
        found = self.master.pull(min_version=1, timeout=None)
        self._replica = Replica(self.master, found, _NEVER, None)
        return {name: value.copy() for name, value in found.items()}

    def after(self, trainer: Trainer, n_updates: int) -> None:
        """Sync after an update of the group, where it is time to."""
        since = n_updates if self.group else n_updates - self.warmup_steps
        if since == 0 and not self.group:
            self._lead(trainer)
        elif since > 0 and since % self.sync_freq == 0:
            trainer.add(self._exchanged(trainer))

    def end(self, trainer: Trainer) -> None:
        """Add what was done since the last sync."""
        if self._replica is not None:
            self._exchanged(trainer)
        elif not self.group:
            # The others wait for its warm-up, which has ended before its last step.
            self._lead(trainer)

    def _lead(self, trainer: Trainer) -> None:
        """Have the other groups begin from what the first one has come to."""
        if self.rank == 0:
            values = trainer.pull()
            self.master.assign(values)
            # Of what was assigned: others may have added to it by now.
            self._replica = Replica(self.master, values, _NEVER, None)

    def _exchanged(self, trainer: Trainer) -> dict[str, Array]:
        """Return what the group has to add, so that it is where all groups are."""
        replica = self._replica
        if replica is None:
            return {}
        found = trainer.pull()
        for name, value in found.items():
            replica.params[name] = value
        replica.sync(timeout=None)
        return {name: replica.params[name] - value for name, value in found.items()}
