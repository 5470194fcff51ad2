"""Plain functions of integers, compiled as they are.

Their code is taken, not their text: an installation may have none, and a file may be a
newer one by now than what this process runs.
"""

from __future__ import annotations

import dis
from typing import TYPE_CHECKING, Any

from daskps.kernels.compiled import Module
from daskps.kernels.freeze import written
from daskps.kernels.source import plain_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import CodeType


def plain(
    functions: Mapping[Callable[..., Any], str],
    *,
    cache_dir: str | None = None,
    alone: bool = False,
    borrows: bool = False,
) -> Module:
    """Return functions, compiled for one signature each.

    Parameters
    ----------
    functions : mapping of function to str
        The types of the arguments of each, as Python text in which `WORDS` is an array
        of int64, `F4` and `F8` one of float32 or float64, `IDS`, `R4` and `R8` such a
        one that is only read, and `types` is Numba's. A function may use NumPy, the functions
        before it and numbers of its module; those are taken as they are now.
    cache_dir : str, optional
        Where the compiled code is kept, as in `build`.
    alone : bool, default False
        Whether they run without the interpreter's lock, and may use what
        :mod:`daskps.kernels.system` has.
    borrows : bool, default False
        Whether they make no arrays. Then no function counts who holds those that it is
        given: of small functions that call one another that is most of the time.

    Returns
    -------
    Module
        Its functions have the names of those. Nothing is compiled before the first use.

    Raises
    ------
    ValueError
        If two modules have different numbers of one name.
    """
    numbers: dict[str, int] = {}
    codes = {}
    for function in functions:
        known, code = function.__globals__, function.__code__
        for name in code.co_names:
            if (
                _is_int(name, known)
                and numbers.setdefault(name, known[name]) != (known[name])
            ):
                raise ValueError(f"{name} of {function.__module__} has another value")
        codes[function.__name__] = written(code, code.co_code, _constants(code))
    signatures = {f.__name__: signature for f, signature in functions.items()}
    return Module(
        plain_source(numbers, codes, signatures, alone=alone, borrows=borrows),
        cache_dir,
    )


def _constants(code: CodeType) -> Iterator[str]:
    """Yield the constants of a function as text, None for its docstring."""
    steps = dis.get_instructions(code)
    used = {step.arg for step in steps if step.opcode in dis.hasconst}
    for index, const in enumerate(code.co_consts):
        yield repr(const) if index in used else "None"


def _is_int(name: str, known: Mapping[str, Any]) -> bool:
    return type(known.get(name)) is int
