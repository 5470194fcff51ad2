"""Loops over rows of tables: row `k` of a launch is the k-th that is named."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from daskps.kernels.device.loops import loop_of
from daskps.kernels.device.pieces import FLAG, as_kind, cast, look_text
from daskps.kernels.update_source import argument_names, call_of

if TYPE_CHECKING:
    from daskps.kernels.device.loops import DeviceLoop
    from daskps.kernels.device.pieces import Kind, RuleText

#: Numbers of rows, where what comes for them is, unless it is in order, and their length.
_WHERE: Final = {"rows": "i8*", "at": "i8*", "direct": "i8", "dim": "i8"}
_SOURCE: Final = "source = k if direct else at[k]"


@functools.cache
def row_loop(rule: RuleText, gradient: Kind) -> DeviceLoop:
    """Return the loop that logs rows and updates them.

    Parameters
    ----------
    rule : RuleText
        The rule. With numbers per row it is launched with one column: an element is a row.
    gradient : dtype
        That of the weights, or of arithmetic.

    Returns
    -------
    DeviceLoop
        It is given the flag, numbers of rows, positions of gradients, 1 where these are in
        order, the length of rows, the first entry of the log, weights, their log, gradients,
        each slot and its log, and scalars. Where the flag is not 0 it only logs.
    """
    dtype, wide, *sizes, per_row, _ = rule.form
    slots, scalars = argument_names(*sizes)
    of_row = [s for s, of in zip(slots, per_row or (), strict=False) if of]
    plain = [s for s in slots if s not in of_row]
    w, g = cast("w[r]", dtype, wide), cast("g[q]", gradient, wide)
    made = ["made", *(f"new_{s}" if s in of_row else f"{s}[r]" for s in slots)]
    mean = [] if per_row is None else ["mean"]
    call = call_of(slots, scalars, "_", between=mean)
    body = [
        "r, e, q = row * dim + i, entry * dim + i, source * dim + i",
        "log[e] = w[r]",
        *(f"log_{s}[e] = {s}[r]" for s in plain),
        f"w_, g_ = {w}, {g}",
        *(f"{s}_ = {s}[r]" for s in plain),
        "if flag[0] == 0:",
        f"    {', '.join(made)} = {call}",
        f"    w[r] = {cast('made', wide, dtype)}",
    ]
    lines = [_SOURCE, "row, entry = rows[k], begin + k"]
    if per_row is None:
        lines += ["i = j", *body]
    else:
        lines += [
            "total = T(0)",
            "for i in range(dim):",
            "    r, q = row * dim + i, source * dim + i",
            f"    total += _mean({', '.join([w, g, *scalars])})",
            "mean = total / T(dim)",
            # Read once: each weight is given what the slot was before them all.
            *(f"{s}_ = new_{s} = log_{s}[entry] = {s}[row]" for s in of_row),
            "for i in range(dim):",
            *(f"    {line}" for line in body),
            *(f"{s}[row] = new_{s}" for s in of_row),
        ]
    stored, number = f"{as_kind(dtype)}*", as_kind(wide)
    arguments = {**FLAG, **_WHERE, "begin": "i8", "w": stored, "log": stored}
    arguments["g"] = f"{as_kind(gradient)}*"
    arguments |= {a: f"{number}*" for s in slots for a in (s, f"log_{s}")}
    arguments |= dict.fromkeys(scalars, number)
    return loop_of("rows", rule.text, arguments, lines, what=rule.what)


@functools.cache
def row_look_loop(dtype: Kind) -> DeviceLoop:
    """Return the loop that sets the flag where what comes for rows is NaN or infinite."""
    arguments = {**FLAG, **_WHERE, "a": f"u{dtype.itemsize}*"}
    body = [_SOURCE, look_text("a[source * dim + j]", dtype)]
    return loop_of("row_look", "", arguments, body)


@functools.cache
def gather_loop(itemsize: int) -> DeviceLoop:
    """Return the loop that copies the rows that are named: `rows` of `w` to `at` of `out`."""
    kind = f"u{itemsize}*"
    body = [_SOURCE, "out[source * dim + j] = w[rows[k] * dim + j]"]
    return loop_of("gather", "", {**_WHERE, "w": kind, "out": kind}, body)


@functools.cache
def sum_loop(dtype: Kind) -> DeviceLoop:
    """Return the loop that adds up rows with one id, in the order of `rows`.

    Those of the k-th id end before `ends[k]`. Integers wrap around; of bools it says whether
    one is true.
    """
    add = "|" if dtype.kind == "b" else "+"
    lines = [
        "first = ends[k - 1] if k else 0",
        "total = a[rows[first] * dim + j]",
        "for i in range(first + 1, ends[k]):",
        f"    total = total {add} a[rows[i] * dim + j]",
        "out[k * dim + j] = total",
    ]
    kind = f"{as_kind(dtype)}*"
    arguments = {"rows": "i8*", "ends": "i8*", "dim": "i8", "a": kind, "out": kind}
    return loop_of("sum", "", arguments, lines)
