"""Copying large arrays past the caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from daskps.kernels.compiled import module_of
from daskps.kernels.source import module_source

if TYPE_CHECKING:
    from daskps.typing import Array

#: Copies of so much together gain by stores past the caches, also where the copy is
#: read at once: 8 MiB and more did, 4 MiB lost (one core with 32 MiB of cache).
LARGE_NBYTES: Final = 8 * 2**20
#: An array that is less is copied as ever: it costs no more than to look at it.
_LEAST_NBYTES = 64 * 2**10
_LINE = 64

_SOURCE: Final = module_source("""\
from daskps.kernels.intrinsics import fence, stream


@loop
def copy(a: read(types.uint8), out: write(types.uint8)):
    stream(out, a, a.size)
    fence()
""")


def copy(out: Array, a: Array, *, cache_dir: str | None = None) -> None:
    """Copy a large array past the caches.

    Parameters
    ----------
    out : ndarray
        Where to.
    a : ndarray
        The array to copy. Where it has another dtype or shape, or one of the two is not
        contiguous, this is `numpy.copyto`.
    cache_dir : str, optional
        Where the compiled loop is kept, as in `build`.
    """
    if (
        a.nbytes < _LEAST_NBYTES
        or a.dtype != out.dtype
        or a.shape != out.shape
        or not (a.flags.c_contiguous and out.flags.carray)
    ):
        np.copyto(out, a)
        return
    source, target = (x.reshape(-1).view(np.uint8) for x in (a, out))
    first = -target.ctypes.data % _LINE
    last = len(target) - (len(target) - first) % _LINE
    for edge in (slice(0, first), slice(last, None)):
        target[edge] = source[edge]
    middle = slice(first, last)
    loop = module_of(_SOURCE, cache_dir).function("copy")
    loop(source[middle], target[middle])


def warm(*, cache_dir: str | None = None) -> None:
    """Compile the loop, so that its first use finds it ready.

    Parameters
    ----------
    cache_dir : str, optional
        Where it is kept, as in `build`.
    """
    module_of(_SOURCE, cache_dir).function("copy")
