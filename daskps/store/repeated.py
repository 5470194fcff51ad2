"""Gradients of a loop: what is like those of the step before is looked at in one go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.kernels import finite as is_finite
from daskps.layout.arrays import compute_dtype
from daskps.store import intake

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.layout.arrays import Layout
    from daskps.typing import Array


class RepeatedGradients:
    """Checks mappings of gradients, nearly all of which are like the one before.

    Threads: one at a time, as all of a trainer's calls.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    optimizers : mapping of int to str
        The parameters that have an optimizer.
    finite : bool
        Whether NaN and Inf are refused.
    """

    def __init__(
        self, layout: Layout, optimizers: Mapping[int, str], *, finite: bool
    ) -> None:
        self._layout, self._optimizers, self._finite = layout, optimizers, finite
        self._cache = str(config.load().cache)
        #: Of the gradients before, in their order: name, index, shape and dtype.
        self._wanted: tuple[tuple[str, int, tuple[int, ...], Any], ...] = ()

    def take(self, given: Any) -> dict[int, Array]:
        """Return gradients as :func:`intake.gradients` does.

        Parameters
        ----------
        given : mapping
            Nested mapping of name to array of the parameter's shape.

        Returns
        -------
        dict of int to ndarray, shape (n,)
            By parameter index, C order, contiguous, in the parameter's compute dtype.

        Raises
        ------
        UnknownParameterError, NoOptimizerError, PushRejectedError
            For what its name says. Nothing has been changed anywhere.
        """
        wanted = self._wanted
        if type(given) is dict and len(given) == len(wanted):
            found = {}
            for (name, index, shape, dtype), (key, value) in zip(
                wanted, given.items(), strict=True
            ):
                if (
                    key != name
                    or type(value) is not np.ndarray
                    or value.shape != shape
                    or value.dtype != dtype
                    or not value.flags.c_contiguous
                ):
                    break
                flat = value.reshape(-1)
                # What is wrong with it is for those that look at all of them.
                if self._finite and not is_finite(flat, cache_dir=self._cache):
                    break
                found[index] = flat
            else:
                return found
        found = intake.gradients(
            self._layout, self._optimizers, given, finite=self._finite
        )
        self._learn(given)
        return found

    def _learn(self, given: Mapping[str, Any]) -> None:
        """Remember what was good, unless it is nested: then other names say it."""
        wanted: list[tuple[str, int, tuple[int, ...], Any]] = []
        for name in given:
            parameter = self._layout.by_name.get(name)
            if parameter is None:
                wanted.clear()
                break
            dtype = np.dtype(compute_dtype(parameter.dtype))
            wanted.append((name, parameter.index, parameter.shape, dtype))
        self._wanted = tuple(wanted)
