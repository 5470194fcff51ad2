"""Choice of the routine that copies weights: NumPy's, or one past the CPU's caches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from daskps import config
from daskps.kernels import copying

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array

    #: Copies the second array to the first.
    Copy: TypeAlias = Callable[[Array, Array], None]


def copier(nbytes: int) -> Copy:
    """Return the routine for reads of so many bytes in all."""
    return np.copyto if nbytes < copying.LARGE_NBYTES else _past()


@functools.cache
def _past() -> Copy:
    # Cached: no read looks at the configuration.
    return functools.partial(copying.copy, cache_dir=str(config.load().cache))


def warm(nbytes: int) -> None:
    """Compile the routine for reads of so many bytes, before the first one."""
    if nbytes >= copying.LARGE_NBYTES:
        copying.warm(cache_dir=str(config.load().cache))
