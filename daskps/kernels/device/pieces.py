"""Loops over many pieces of arrays in one launch.

A piece is a row of a table of int64: how many elements it has, and the addresses of its
arrays. So one launch takes parameters of all sizes, and a small one costs what it has.
Arguments are the table, then int64 `flag` where the loop has one, then scalars.
"""
# ruff: noqa: PLR0917  (the parts of a text, in their order)

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from daskps.kernels.device.loops import DeviceLoop, loop_of, numpy_type
from daskps.kernels.update_source import argument_names, call_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.kernels.rule_kernel import RuleForm

    Kind = np.dtype[Any]

_HALF, _SINGLE = np.dtype(np.float16), np.dtype(np.float32)
FLAG: Final = {"flag": "i8*"}


class RuleText(NamedTuple):
    """An update rule for weights of one dtype, as text."""

    #: From `update_source.functions_text`.
    text: str
    form: RuleForm
    #: The rule, in messages.
    what: str


def as_kind(dtype: Kind) -> str:
    """Return the kind of what an array has: bits, but for float32 and float64."""
    plain = dtype.kind == "f" and dtype != _HALF
    return f"{'f' if plain else 'u'}{dtype.itemsize}"


def cast(number: str, of: Kind, to: Kind) -> str:
    """Return the text of a number of a dtype, rounded to another one or widened."""
    if of == to:
        return number
    if of == _HALF:
        return cast(f"widen({number})", _SINGLE, to)
    return f"narrow({number})" if to == _HALF else f"np.{to}({number})"


def _loop(
    name: str,
    text: str,
    arrays: Mapping[str, Kind],
    more: Mapping[str, str],
    body: Sequence[str],
    **form: Any,
) -> DeviceLoop:
    """Return a loop whose body finds arrays by their names."""
    width = 1 + len(arrays)
    where = [
        f"{a} = pointer(table[k * {width} + {i}], {numpy_type(as_kind(dtype))})"
        for i, (a, dtype) in enumerate(arrays.items(), 1)
    ]
    arguments, body = {"table": "i8*", **more}, [*where, *body]
    return loop_of(name, text, arguments, body, width=width, **form)


@functools.cache
def update_loop(rule: RuleText, gradient: Kind) -> DeviceLoop:
    """Return the loop of an update rule.

    Parameters
    ----------
    rule : RuleText
        The rule.
    gradient : dtype
        That of the weights, or of arithmetic.

    Returns
    -------
    DeviceLoop
        Its arrays are weights, new weights, gradient, slots and new slots, which may be the
        same ones. It does nothing where the flag is not 0.
    """
    dtype, wide, *sizes = rule.form[:4]
    slots, scalars = argument_names(*sizes)
    outs = [f"t{j}" for j in range(len(slots))]
    arrays = {"w": dtype, "out": dtype, "g": gradient}
    arrays |= dict.fromkeys([*slots, *outs], wide)
    targets = ", ".join(["made", *(f"{out}[j]" for out in outs)])
    body = [
        f"w_, g_ = {cast('w[j]', dtype, wide)}, {cast('g[j]', gradient, wide)}",
        *(f"{slot}_ = {slot}[j]" for slot in slots),
        f"{targets} = {call_of(slots, scalars, '_')}",
        f"out[j] = {cast('made', wide, dtype)}",
    ]
    more = FLAG | dict.fromkeys(scalars, as_kind(wide))
    return _loop("update", rule.text, arrays, more, body, guarded=True, what=rule.what)


def look_text(place: str, dtype: Kind) -> str:
    """Return the line that sets the flag if the bits of a number are NaN or infinite."""
    info = np.finfo(dtype)
    exponent = f"np.uint{info.bits}({((1 << info.iexp) - 1) << info.nmant})"
    return f"if {place} & {exponent} == {exponent}: flag[0] = 1"


@functools.cache
def look_loop(dtype: Kind) -> DeviceLoop:
    """Return the loop that sets the flag to 1 where an element is NaN or infinite."""
    arrays = {"a": np.dtype(f"u{dtype.itemsize}")}
    return _loop("look", "", arrays, FLAG, [look_text("a[j]", dtype)], guarded=True)


@functools.cache
def elementwise(expression: str, dtype: Kind, to: Kind | None = None) -> DeviceLoop:
    """Return the loop of an expression.

    Parameters
    ----------
    expression : str
        Of arrays `a` and `b` and scalars `s` and `d`: "a + b", or "(a * s + b) / d".
    dtype : dtype
        Of the arrays. float16 is computed in float32; integers wrap around.
    to : dtype, optional
        Of the result, if not that of the arrays: rounded to the nearest.

    Returns
    -------
    DeviceLoop
        Its arrays are the result and those of the expression; its scalars, in the order of
        their names, have the dtype of arithmetic.
    """
    floats = dtype.kind == "f"
    wide = max(dtype, _SINGLE) if floats else np.dtype(as_kind(dtype))
    found = sorted(set(re.findall(r"\b[a-z]\b", expression)))
    arrays = {"out": (to or dtype) if floats else wide}
    arrays |= {a: dtype if floats else wide for a in found if a in "ab"}
    places = {a: cast(f"{a}[j]", arrays[a], wide) for a in found if a in arrays}
    text = re.sub(r"\b[ab]\b", lambda name: places[name[0]], expression)
    body = [f"out[j] = {cast(f'({text})', wide, arrays['out'])}"]
    number = dtype if dtype.kind in "iu" else wide
    more = {s: number.str[1:] for s in found if s not in arrays}
    return _loop("form", "", arrays, more, body)
