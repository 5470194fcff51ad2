"""Plain functions of integers, compiled as they are.

Their code is taken, not their text: an installation may have none, and a file may be a
newer one by now than what this process runs. The names of their annotations say what they
are compiled for.
"""

from __future__ import annotations

import dis
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias

from daskps.kernels import system
from daskps.kernels.compiled import Module, module_source
from daskps.kernels.freeze import written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType

#: Arguments: arrays of int64, those that are only read, and of int32; an int64, and one
#: without a sign.
Longs: TypeAlias = Any
Ids: TypeAlias = Any
Ints: TypeAlias = Any
Long: TypeAlias = Any
Hash: TypeAlias = Any
#: Arrays of float64, unless `plain` is told another dtype, and those that are only read.
Floats: TypeAlias = Any
GivenFloats: TypeAlias = Any

#: Of each name the type in a generated module.
TYPES = {
    "Longs": "write(types.int64)",
    "Ids": "read(types.int64)",
    "Ints": "write(types.int32)",
    "Long": "types.int64",
    "Hash": "types.uint64",
    "Floats": "write(types.{floats})",
    "GivenFloats": "read(types.{floats})",
    "int": "types.int64",
    "float": "types.float64",
    "bool": "types.boolean",
}

_HEAD = """\
# Nobody calls them from C: to compile what would be for that takes a tenth as long.
_jit = njit(
    error_model="numpy", nogil={alone}, _nrt={counts}, cache=CACHE, no_cfunc_wrapper=True
)
"""
#: Without these, functions take less time than to give the interpreter to another thread.
_ALONE = """\
from daskps.kernels.intrinsics import fetch, fetch_to_read, hold, store

"""

_FUNCTION = """
{name} = _jit(rebuild("{name}", globals(), (),
{code}))
SIGNATURES["{name}"] = ({types},)
"""


def plain(
    functions: tuple[Callable[..., Any], ...],
    cache_dir: str | None = None,
    *,
    floats: str = "float64",
    alone: bool = True,
) -> Module:
    """Return functions, compiled for one signature each.

    Parameters
    ----------
    functions : tuple of function
        Their arguments are annotated with the types above, or int, float and bool. They
        may use NumPy, other such functions, and numbers of their modules; those are taken
        as they are now.
    cache_dir : str, optional
        Where the compiled code is kept, as in `build`.
    floats : str
        The dtype of `Floats` and `GivenFloats`.
    alone : bool, default True
        Whether they run without the interpreter's lock, make no arrays, and may use what
        :mod:`daskps.kernels.system` has. Then none counts who holds what it is given: of
        small functions that call one another that is most of the time.

    Returns
    -------
    Module
        Its functions have the names of those. Nothing is compiled before the first use.

    Raises
    ------
    ValueError
        If two modules have different numbers or functions of one name.
    """
    used: dict[str, Any] = {}
    for function in functions:
        _collect(function, used)
    text = _ALONE * alone + _HEAD.format(alone=alone, counts=not alone)
    for name, of in sorted(used.items(), key=lambda item: type(item[1]) is not int):
        # By their own names: `Module.entry("look")` is the function `look` that was given.
        if type(of) is int:
            text += f"{name} = {of}\n"
        else:
            code = written(of.__code__, of.__code__.co_code, _constants(of.__code__))
            text += _FUNCTION.format(name=name, code=code, types=_signature(of, floats))
    return Module(module_source(text), cache_dir)


def _collect(function: Any, used: dict[str, Any]) -> None:
    """Add what a function refers to, and then itself."""
    known = function.__globals__
    for name in function.__code__.co_names:
        value = known.get(name)
        is_plain = (
            isinstance(value, FunctionType) and value.__module__ != system.__name__
        )
        if is_plain and name not in used:
            _collect(value, used)
        elif (is_plain or type(value) is int) and used.setdefault(name, value) != value:
            raise ValueError(f"{name} of {function.__module__} has another value")
    used[function.__name__] = function


def _signature(function: FunctionType, floats: str) -> str:
    code, named = function.__code__, function.__annotations__
    types = [TYPES[named[name]] for name in code.co_varnames[: code.co_argcount]]
    return ", ".join(types).format(floats=floats)


def _constants(code: CodeType) -> Iterator[str]:
    """Yield the constants of a function as text, None for its docstring."""
    steps = dis.get_instructions(code)
    used = {step.arg for step in steps if step.opcode in dis.hasconst}
    for index, const in enumerate(code.co_consts):
        yield repr(const) if index in used else "None"
