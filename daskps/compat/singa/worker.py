"""One worker of a group: its exchange with the group's server, and with other groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from daskps.store.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.store.store import ParameterStore
    from daskps.training.overlap.background import Operation
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


@dataclass
class Worker:
    """One worker of a group, in its trainer.

    All workers of a group come to the same rounds: one for what they put, and one for
    each update.

    Parameters
    ----------
    trainer : Trainer
        Its place in the run of the group.
    owned : list of str
        The parameters that it puts.
    n_rows : int
        How many rows of a batch it has.
    following : Following or None
        Where there are other groups.
    """

    trainer: Trainer
    owned: list[str]
    n_rows: int
    following: Following | None = None
    #: Parameters that were put, and are not on the server yet.
    puts: dict[str, Array] = field(default_factory=dict)
    #: Gradients that the group has not averaged yet.
    grads: dict[str, Array] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    #: How many updates there were, of whatever parameters.
    n_updates: int = 0
    has_begun: bool = False
    #: Fetches under way, and the version of each.
    fetches: dict[str, tuple[int, Operation]] = field(default_factory=dict)

    def sent(self, name: str) -> int:
        """Return how many updates of a parameter it has sent."""
        return self.versions.get(name, 0) + (name in self.grads)

    def reach(self, name: str, version: int) -> None:
        """Have the server come to a version of a parameter.

        Raises
        ------
        ValueError
            For one that never comes, and where not all is put that it owns.
        """
        if version > (sent := self.sent(name)):
            raise ValueError(
                f"version {version} of {name!r} comes after {version} updates, and this "
                f"worker has sent {sent}; it would wait for ever"
            )
        if not self.has_begun:
            self._begin()
        if version > self.versions.get(name, 0):
            self._deliver()

    def _begin(self) -> None:
        """Put what was put, in one round of the group."""
        missing = [name for name in self.owned if name not in self.puts]
        if missing:
            raise ValueError(
                f"worker {self.trainer.rank} owns {missing} and has not put them; call "
                f"put_own() before what reads them"
            )
        values: Mapping[str, Array] = self.puts
        if self.following is not None:
            values = self.following.first_values(values)
        self.trainer.assign(values, weight=float(bool(values)))
        self.has_begun, self.puts = True, {}
        self._follow()

    @property
    def _leads(self) -> bool:
        of = self.following
        return of is not None and of.group == of.rank == 0

    def _deliver(self) -> None:
        """Send the gradients there are: one update, of the group's mean."""
        self.trainer.push(self.grads, weight=float(self.n_rows))
        for name in self.grads:
            self.versions[name] = self.versions.get(name, 0) + 1
        self.grads = {}
        self.n_updates += 1
        self._follow()

    def _follow(self) -> None:
        if self.following is not None:
            self.following.after(self.trainer, self.n_updates)

    def end(self) -> None:
        """Send what is left, when the program is over."""
        # All groups begin from what the first worker of the first one has put.
        if not self.has_begun and (self.puts or self._leads):
            self._begin()
        if self.grads:
            self._deliver()
        if self.following is not None:
            self.following.end(self.trainer)
