"""Which routine copies weights out of a shard for a read: NumPy's, or one past the cache."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from daskps import config
from daskps.kernels import copying

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array

    #: Copies to the first array what the second one holds.
    Copy: TypeAlias = Callable[[Array, Array], None]


def copier(nbytes: int) -> Copy:
    """Return what copies to the first array from the second, for so much in all."""
    return np.copyto if nbytes < copying.LARGE_NBYTES else _past()


@functools.cache
def _past() -> Copy:
    # Once: no read looks at the configuration.
    return functools.partial(copying.copy, cache_dir=str(config.load().cache))


def warm(nbytes: int) -> None:
    """Compile what reads of so much need, so that the first one finds it ready."""
    if nbytes >= copying.LARGE_NBYTES:
        copying.warm(cache_dir=str(config.load().cache))
