"""Plain functions of integers, compiled: their text is taken as it stands."""

from __future__ import annotations

import inspect
import textwrap
from typing import TYPE_CHECKING, Any

from daskps.kernels.compiled import Module
from daskps.kernels.source import plain_source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["plain"]


def plain(
    functions: Mapping[Callable[..., Any], str], *, cache_dir: str | None = None
) -> Module:
    """Return functions, compiled for one signature each.

    Parameters
    ----------
    functions : mapping of function to str
        The types of the arguments of each, as Python text in which `WORDS` is an array
        of int64, `F4` and `F8` one of float32 or float64, `R4` and `R8` such a one that
        is only read, and `types` is Numba's. A function may use NumPy and numbers of its
        module; those are taken as they are now.
    cache_dir : str, optional
        Where the compiled code is kept, as in `build`.

    Returns
    -------
    Module
        Its functions have the names of those. Nothing is compiled before the first use.
    """
    numbers: dict[str, int] = {}
    texts = []
    for function in functions:
        known = function.__globals__
        numbers |= {
            n: known[n] for n in function.__code__.co_names if _is_int(n, known)
        }
        texts.append(textwrap.dedent(inspect.getsource(function)))
    signatures = {f.__name__: signature for f, signature in functions.items()}
    return Module(plain_source(numbers, texts, signatures), cache_dir)


def _is_int(name: str, known: Mapping[str, Any]) -> bool:
    return type(known.get(name)) is int
