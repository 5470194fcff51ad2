"""Memory that goes back when the last array that looks at it is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array


class _Lease:
    """What all views of some memory have as their base."""

    __slots__ = ("__array_interface__", "_end", "_held")

    def __init__(self, memory: Array, end: Callable[[Any], None], held: Any) -> None:
        self.__array_interface__ = memory.__array_interface__
        # Not looked up when it ends: names of modules may be gone by then.
        self._end, self._held = end, held

    def __del__(self) -> None:
        self._end(self._held)


def leased(memory: Array, end: Callable[[Any], None], held: Any) -> Array:
    """Return a view of memory whose last view's end is told.

    Parameters
    ----------
    memory : ndarray
        The memory, which `held` keeps.
    end : callable
        Gets `held` when no view is left, in whatever thread that happens.
    held : object
        What is to be given back.
    """
    return np.asarray(_Lease(memory, end, held))
