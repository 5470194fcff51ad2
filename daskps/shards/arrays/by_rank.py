"""Rules that keep state for each trainer: which runs they are for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.consistency import BSP
from daskps.errors import LayoutError
from daskps.layout.arrays import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from daskps.consistency import Policy
    from daskps.optim import Bound


def check_run(
    rules: Iterable[tuple[str, Bound | None]], policy: Policy, n_ranks: int
) -> None:
    """Refuse a run whose trainers such a rule cannot tell from each other.

    Parameters
    ----------
    rules : iterable of (str, Bound or None)
        Parameters and their rules.
    policy : Policy
        Of the run.
    n_ranks : int
        How many trainers it has.

    Raises
    ------
    LayoutError
        Naming the parameter.
    """
    for name, bound in rules:
        if bound is None or not bound.ranks:
            continue
        said = f"{name[:60]!r} has the optimizer {bound.rule!r}"
        if isinstance(policy, BSP):
            raise LayoutError(
                f"{said}, which keeps state for each trainer, and under sync='bsp' their "
                f"gradients are reduced to one; use sync='asp' or 'ssp'"
            )
        if n_ranks > bound.ranks:
            raise LayoutError(
                f"{said}, which keeps state for {counted(bound.ranks, 'trainer')}, and the "
                f"run has {n_ranks}; use fewer, or make the store with ranks={n_ranks}"
            )
