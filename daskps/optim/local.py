"""A trainer's own copy of the parameters, updated between two synchronisations.

Not exported: what imports it compiles kernels, which `import daskps` does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskps.optim.binding import Bound, BoundFunction, bind
from daskps.optim.master import WithMaster

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.layout.arrays import Layout
    from daskps.optim.base import Rule
    from daskps.typing import Array


def check_rules(
    rules: Mapping[int, Rule], names: Sequence[str], what: str, *, rounds: bool
) -> None:
    """Refuse rules that are not for steps of one's own between two synchronisations.

    Parameters
    ----------
    rules : mapping of int to Rule
        By index of the parameter or table.
    names : sequence of str
        By index.
    what : str
        The maker of the steps, for messages.
    rounds : bool
        Whether its weights, as it has rounded them, become those of the store.

    Raises
    ------
    ValueError
        Naming the parameter.
    """
    for index, rule in rules.items():
        if rule.rank_slots:
            raise ValueError(
                f"{what} does not take {names[index]!r:.60}, which has the optimizer "
                f"{rule!r}: it makes up for what other trainers do meanwhile, and between "
                f"two synchronisations there are none; push each gradient to the store"
            )
        if rounds and isinstance(rule, WithMaster):
            raise ValueError(
                f"{what} does not take {names[index]!r:.60}, which has a master: it has "
                f"the rounded weights alone, so steps smaller than their spacing would be "
                f"lost; push gradients, or make the store with ArraySpec(dtype='float32')"
            )


class LocalModel:
    """Local updates with the store's rules, on slots of its own.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    rules : mapping of int to Rule
        The rule of each parameter index that has one.
    cache : str
        Directory of compiled kernels.
    """

    def __init__(self, layout: Layout, rules: Mapping[int, Rule], cache: str) -> None:
        self._layout = layout
        self._bounds: dict[int, Bound] = {}
        self._slots: dict[int, tuple[Array, ...]] = {}
        for p in layout.parameters:
            index = p.index
            if (rule := rules.get(index)) is None:
                continue
            bound = self._bounds[index] = bind(rule, p.dtype, cache_dir=cache)
            dtype = bound.kernel.compute_dtype
            self._slots[index] = tuple(np.empty(p.size, dtype) for _ in rule.slots)
        self._steps: dict[int, int] = {}

    def reset(self, params: Mapping[str, Array]) -> None:
        """Forget the optimizer state, as at each synchronisation; masters are `params`."""
        self._steps = dict.fromkeys(self._bounds, 0)
        for index, bound in self._bounds.items():
            for name, slot in zip(bound.rule.slots, self._slots[index], strict=True):
                slot[:] = bound.rule.slot_init.get(name, 0.0)
            if isinstance(bound.rule, WithMaster):
                name = self._layout.parameters[index].name
                self._slots[index][0][:] = params[name].reshape(-1)

    def update(
        self,
        params: Mapping[str, Array],
        grads: Mapping[int, Array],
        epoch: int | None,
    ) -> None:
        """Apply the gradients of one batch to `params`, in place; None for no epoch."""
        for index, grad in grads.items():
            bound = self._bounds[index]
            self._steps[index] += 1
            scalars = bound.scalars(self._steps[index], None, epoch)
            parameter = self._layout.parameters[index]
            weights = params[parameter.name].reshape(-1)
            if isinstance(bound, BoundFunction):
                whole = parameter.name, parameter.shape, (weights, grad)
                weights[:] = bound.apply(*whole, self._steps[index])
                continue
            bound.inplace(weights, grad, self._slots[index], scalars)
