"""Compiled loops over flat arrays.

Layer 1: imports NumPy and, inside functions and generated modules only, Numba.
Nothing is compiled, and Numba is not imported, before the first use.
"""

from daskps.kernels.cache import content_name as content_name
from daskps.kernels.dense import Kernel as Kernel
from daskps.kernels.dense import build as build
from daskps.kernels.finite import finite as finite
from daskps.kernels.rows import OfRows as OfRows
from daskps.kernels.words import plain as plain

__all__ = [
    "Kernel",
    "OfRows",
    "build",
    "content_name",
    "finite",
    "plain",
]
