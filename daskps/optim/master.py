"""Rules whose weights are kept once more, in a wider dtype: for narrow ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.optim.checks import store
from daskps.optim.composed import Around

if TYPE_CHECKING:
    from daskps.optim.base import Rule


class WithMaster(Around):
    """A rule that updates a master, of which the weights are a rounded copy.

    The master is its first slot, and begins with the weights. Made for parameters with
    ``ArraySpec(master=...)``.

    Parameters
    ----------
    rule : Rule
        The rule that they were given.
    """

    rule: Rule

    def __init__(self, rule: Rule) -> None:
        store(self, rule=rule, lr=rule.lr, _inner=rule)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays: the master, then those of the rule inside."""
        return "master", *self._inner.slots

    def __repr__(self) -> str:
        return f"{self.rule!r} with a master"
