"""An update function as text: code, constants and nothing that can change.

Numba compiles `0.9 * w` of a float32 weight in float64, because a Python number is
a float64 or an int64 to it, and either of them with a float32 makes a float64. So
every number a function holds (literal, global, closure, `np.pi`) becomes a NumPy
scalar of the compute dtype. One exception: the literal exponent of `x ** 2` stays an
int, which Numba turns into multiplications without widening.
"""

from __future__ import annotations

import builtins
import dis
import math
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_BUILTINS = ("abs", "max", "min", "pow")
_MODULES = {"np": np, "math": math}
_LOAD_CONST = dis.opmap["LOAD_CONST"]
_NOP = dis.opmap["NOP"]
#: Not a plain function: *args, **kwargs, generator, coroutine, async generator.
_UNUSUAL_FLAGS = 0x04 | 0x08 | 0x20 | 0x80 | 0x200
_FIX = (
    "An update may use its arguments, numbers, numpy and math, and abs, min, max and "
    "pow: compute anything else in `prepare` and take it as a scalar"
)


@dataclass(frozen=True, slots=True)
class Frozen:
    """Python expressions that build the function again; see `kernels.source`."""

    #: Keyword arguments for `CodeType.replace`.
    code: str
    #: Global names and free variables, as items of a dict and of a tuple.
    names: str
    cells: str


def freeze(
    update: Callable[..., Any], n_arguments: int, dtype: np.dtype[Any]
) -> Frozen:
    """Return `update` as text, with its numbers in the compute dtype.

    Parameters
    ----------
    update : function
        A plain Python function; a lambda or one from a notebook will do.
    n_arguments : int
        How many positional arguments it must take.
    dtype : dtype
        float32 or float64.

    Returns
    -------
    Frozen
        Equal for functions of equal code and constants, whatever their names and
        line numbers.

    Raises
    ------
    TypeError
        If it is no plain function, takes other arguments, or refers to something
        that has no place in a kernel.
    """
    function = _check(update, n_arguments)
    patch = _Patch(function, dtype)
    names, cells = patch.run()
    return Frozen(written(function.__code__, patch.units, patch.consts), names, cells)


def written(code: CodeType, units: bytes | bytearray, consts: Iterable[str]) -> str:
    """Return the keyword arguments with which `CodeType.replace` makes code again.

    Parameters
    ----------
    code : code
        Of a plain function.
    units : bytes
        Its instructions.
    consts : iterable of str
        Expressions of its constants.

    Returns
    -------
    str
        Lines of Python, without where the function was defined.
    """
    fields: dict[str, object] = {
        "co_argcount": code.co_argcount,
        "co_posonlyargcount": 0,
        "co_nlocals": code.co_nlocals,
        "co_stacksize": code.co_stacksize,
        "co_flags": 0x01 | 0x02,  # fast locals; the rest says where it was defined
        "co_code": bytes(units),
        "co_names": code.co_names,
        "co_varnames": code.co_varnames,
        "co_freevars": code.co_freevars,
        "co_linetable": _one_line(len(units) // 2),
        "co_exceptiontable": code.co_exceptiontable,
    }
    text = "".join(f"    {name}={value!r},\n" for name, value in fields.items())
    items = "".join(f"        {const},\n" for const in consts)
    return f"{text}    co_consts=(\n{items}    ),\n"


def _check(update: Callable[..., Any], n_arguments: int) -> FunctionType:
    if not isinstance(update, FunctionType):
        raise TypeError(
            f"update must be a plain Python function, not {type(update).__name__}: "
            f"{update!r}. Make it a staticmethod of the rule."
        )
    code = update.__code__
    if code.co_flags & _UNUSUAL_FLAGS or code.co_kwonlyargcount:
        raise TypeError(
            f"update {update.__qualname__!r} must take positional arguments only and "
            f"return (not yield) its result."
        )
    if code.co_argcount != n_arguments:
        raise TypeError(
            f"update {update.__qualname__!r} takes {code.co_argcount} arguments, but "
            f"weight, gradient, slots and the scalars of `prepare` make {n_arguments}."
        )
    return update


def _one_line(n_units: int) -> bytes:
    """Return a line table that puts all instructions on the first line."""
    table = bytearray()
    for start in range(0, n_units, 8):
        # Kind 13 of CPython's location table: no columns, line delta in one byte.
        table += bytes((0x80 | 13 << 3 | min(8, n_units - start) - 1, 0))
    return bytes(table)


class _Patch:
    """The rewriting of one code object."""

    def __init__(self, update: FunctionType, dtype: np.dtype[Any]) -> None:
        self.update = update
        self.dtype = dtype
        self.units = bytearray(update.__code__.co_code)
        self.consts: list[str] = []

    def run(self) -> tuple[str, str]:
        """Rewrite; return the text of the global names and of the closure."""
        code = self.update.__code__
        steps = list(_instructions(code))
        used = {step.arg for _, _, step in steps if step.opcode in dis.hasconst}
        for index, const in enumerate(code.co_consts):
            # The docstring and what the optimiser left behind are not the code.
            self.consts.append(self._constant(const) if index in used else "None")
        names: dict[str, str] = {}
        for index, (start, end, step) in enumerate(steps):
            after = steps[index + 1] if index + 1 < len(steps) else None
            if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
                self._literal(start, end, step, after)
            elif step.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
                value = self._value(step)
                names[step.argval] = self._reference(step.argval, value)
                if isinstance(value, ModuleType):
                    self._attribute(start, step.argval, value, after)
            elif step.opname in ("STORE_GLOBAL", "IMPORT_NAME", "MAKE_FUNCTION"):
                raise self._refuse(f"does {step.opname}")
        cells = "".join(f"{names[name]}, " for name in code.co_freevars)
        items = {k: v for k, v in sorted(names.items()) if k not in code.co_freevars}
        return "".join(f"{k!r}: {v}, " for k, v in items.items()), cells

    def _refuse(self, what: str) -> TypeError:
        return TypeError(f"update {self.update.__qualname__!r} {what}. {_FIX}.")

    def _number(self, value: Any) -> str:
        if isinstance(value, complex):
            raise self._refuse(f"uses the complex number {value!r}")
        with np.errstate(all="ignore"):
            number = float(self.dtype.type(value))
        if math.isfinite(number):
            return f"T({number!r})"
        return f"T('{number!r}')"

    def _constant(self, const: Any) -> str:
        if isinstance(const, tuple):
            return f"({''.join(f'{self._constant(item)}, ' for item in const)})"
        if isinstance(const, CodeType):
            raise self._refuse(f"defines a function inside, {const.co_name!r}")
        return self._number(const) if _is_number(const) else repr(const)

    def _literal(self, start: int, end: int, step: Any, after: Any) -> None:
        if after is not None and after[2].argrepr in ("**", "**="):
            if type(step.argval) is int:
                self._put(start, end, repr(step.argval))
        elif step.opname == "LOAD_SMALL_INT":
            self._put(start, end, self._number(step.argval))

    def _value(self, step: Any) -> Any:
        name = step.argval
        if step.opname == "LOAD_DEREF":
            cells = self.update.__closure__ or ()
            free = self.update.__code__.co_freevars
            if name not in free:
                raise self._refuse(f"defines a function that uses {name!r}")
            return cells[free.index(name)].cell_contents
        space = self.update.__globals__
        if name in space:
            return space[name]
        if name in _BUILTINS:
            return getattr(builtins, name)
        raise self._refuse(f"refers to {name!r}")

    def _reference(self, name: str, value: Any) -> str:
        """Return the expression that stands for a global or a free variable."""
        if _is_number(value):
            return self._number(value)
        inner = str(getattr(value, "__name__", ""))
        if inner in _BUILTINS and value is getattr(builtins, inner):
            return inner
        for prefix, module in _MODULES.items():
            if value is module:
                return prefix
            if _is_function(value) and getattr(module, inner, None) is value:
                return f"{prefix}.{inner}"
        raise self._refuse(f"refers to {name!r}, {type(value).__name__} {value!r}")

    def _attribute(self, start: int, name: str, module: ModuleType, after: Any) -> None:
        """Fold `np.pi` and the like; refuse what is no function."""
        if after is None or after[2].opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            raise self._refuse(f"uses the module {name!r} as a value")
        attribute = after[2].argval
        value = getattr(module, attribute, None)
        if _is_number(value):
            self._put(start, after[1], self._number(value))
        elif not _is_function(value):
            # Also np.float64(...): a dtype by name is a hidden change of dtype.
            raise self._refuse(f"uses '{name}.{attribute}'")

    def _put(self, start: int, end: int, const: str) -> None:
        """Load `const` instead of what the code units [start, end) do."""
        if const not in self.consts:
            self.consts.append(const)
        index = self.consts.index(const)
        if index > 255:
            raise self._refuse("has more than 256 constants")
        self.units[start:end] = bytes((_NOP, 0)) * ((end - start) // 2)
        self.units[start : start + 2] = bytes((_LOAD_CONST, index))


def _is_number(value: Any) -> bool:
    kinds = (int, float, complex, np.number)
    return isinstance(value, kinds) and not isinstance(value, bool)


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _instructions(code: CodeType) -> Iterator[tuple[int, int, dis.Instruction]]:
    """Yield instructions with their extents in bytes, prefixes and caches included."""
    steps = list(dis.get_instructions(code))
    ends = [step.offset for step in steps[1:]] + [len(code.co_code)]
    start = 0
    for step, end in zip(steps, ends, strict=True):
        if step.opname == "EXTENDED_ARG":
            continue
        yield start, end, step
        start = end
