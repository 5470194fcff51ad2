"""A rule bound to a dtype: what a shard calls."""
# ruff: noqa: PLR0917  (every loop takes the same five things)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from daskps.kernels import Kernel
    from daskps.optim.base import Rule

__all__ = ["Bound", "bind"]

_Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Bound:
    """Scalars once per update, then the compiled loops.

    Parameters
    ----------
    rule : Rule
        The rule.
    kernel : Kernel
        Its loops for one dtype.
    """

    rule: Rule
    kernel: Kernel

    def scalars(self, step: int, lr: float | None = None) -> tuple[float, ...]:
        """Return the scalars of update number `step`, counted from 1."""
        scalars = self.rule.scalars(step, lr)
        self.kernel.check_scalars(scalars)
        return scalars

    def publish(
        self,
        w_in: _Array,
        w_out: _Array,
        g: _Array,
        slots: tuple[_Array, ...],
        scalars: tuple[float, ...],
        slots_out: tuple[_Array, ...] | None = None,
    ) -> None:
        """Write the updated `w_in` to `w_out` and the slots to `slots_out`.

        Without `slots_out` the slots are updated in place.
        """
        self.kernel.publish(w_in, w_out, g, slots, scalars, slots_out)

    def stream(
        self,
        w_in: _Array,
        w_out: _Array,
        g: _Array,
        slots: tuple[_Array, ...],
        scalars: tuple[float, ...],
        slots_out: tuple[_Array, ...] | None = None,
        *,
        check: bool = False,
    ) -> bool:
        """As `publish`, past the caches; `check` refuses a gradient with NaN or Inf."""
        return self.kernel.stream(
            w_in, w_out, g, slots, scalars, slots_out, check=check
        )

    def inplace(
        self,
        w: _Array,
        g: _Array,
        slots: tuple[_Array, ...],
        scalars: tuple[float, ...],
    ) -> None:
        """Update `w` and the slots in place."""
        self.kernel.inplace(w, g, slots, scalars)


def bind(rule: Rule, dtype: Any, *, cache_dir: str | None = None) -> Bound:
    """Return `rule` with its kernels for parameters of `dtype`.

    Nothing is compiled before the first use, or `Bound.kernel.warm()`.

    Parameters
    ----------
    rule : Rule
        The rule.
    dtype : dtype
        float16, float32 or float64.
    cache_dir : str, optional
        Where compiled kernels are kept between processes.

    Returns
    -------
    Bound
        The rule, ready to apply.

    Raises
    ------
    TypeError
        If the rule's `update` cannot be compiled, or takes another number of
        arguments than its slots and scalars need; ValueError for another dtype.
    """
    # Here, so that `import daskps.optim` on a client stays free of kernels.
    from daskps import kernels

    n_scalars = len(rule.scalars(1))
    n_slots = len(rule.slots)
    kernel = kernels.build(rule.update, n_slots, n_scalars, dtype, cache_dir)
    return Bound(rule, kernel)
