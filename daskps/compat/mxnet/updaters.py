"""MXNet's updaters, as functions of whole arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daskps import optim
from daskps.compat.mxnet.keys import key_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array


@dataclass(frozen=True)
class _Updating:
    """A function `(name, weights, gradient, step)` that calls an updater."""

    updater: Callable[[Any, Array, Array], Any]

    def __call__(self, name: str, weights: Array, gradient: Array, step: int) -> Any:
        del step
        made = self.updater(key_of(name), gradient, weights)
        return weights if made is None else made


def rule_of(updater: Callable[[Any, Array, Array], Any]) -> optim.Function:
    """Return the rule that calls an updater.

    Parameters
    ----------
    updater : callable
        ``updater(key, received, stored)``.

    Returns
    -------
    Function
        For arrays that are kept whole.
    """
    return optim.Function(_Updating(updater))
