"""The text of the loops of an update rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from daskps.kernels.compiled import module_source
from daskps.kernels.freeze import freeze
from daskps.kernels.past import past_source
from daskps.kernels.rows import (
    OfRows,
    row_text,
    rows_source,
    weights_text,
)

if TYPE_CHECKING:
    import numpy as np

    from daskps.kernels.freeze import Frozen

#: Functions `(g, *scalars) -> g` that a gradient goes through first, and how many
#: scalars each takes.
Before: TypeAlias = tuple[tuple[Callable[..., Any], int], ...]

_NUMBERS = """\
from daskps.kernels.intrinsics import weight

T, U = np.{dtype}, np.{unsigned}
READ, WRITE = read(types.{dtype}), write(types.{dtype})
"""

#: The text of an update, of the function whose result is averaged over a row, and of those
#: that change a gradient before.
_FUNCTION = """\

# Machine code from the disk names the module that it belongs to.
_names = {{"__name__": __name__, {names}}}
_cells = tuple(CellType(value) for value in ({cells}))
{name} = rebuild("{name}", _names, _cells,
{code})
{name} = inner({name})
"""

_AFTER = """\

{name}_of_changed = {name}


@inner
def {name}({arguments}):
    return {name}_of_changed({given})
"""

#: The text of an update of the first slot, of which the weight is a copy.
_MASTERED = """\

_update_of_master = _update


@inner
def _update({arguments}):
    {targets} = {call}
    return s0, {given}
"""

_LOOP = """

@loop
def {name}({arguments}, c: READ):
{scalars}    for i in range(w.size):
        {targets} = {call}
"""


def update_source(
    update: Callable[..., Any],
    n_slots: int,
    n_scalars: int,
    dtype: np.dtype[Any],
    *,
    of_rows: OfRows | None = None,
    before: Before = (),
    master: bool = False,
) -> str:
    """Return the module with the loops of an update function.

    Parameters
    ----------
    update : function
        `(w, g, *slots, *scalars) -> (w, *slots)` for one weight.
    n_slots, n_scalars : int
        How many of them.
    dtype : dtype
        float32 or float64.
    of_rows : OfRows, optional
        The parts of a rule that need whole rows: it takes a mean after the gradient,
        and there are loops over rows only.
    before : sequence of (function, int)
        As `build` takes it.
    master : bool, default False
        The same.

    Returns
    -------
    str
        Python source; the same text for the same code and constants.

    Raises
    ------
    TypeError
        If the function cannot be a kernel.
    """
    slots, scalars = argument_names(n_slots, n_scalars)
    scalars_read = "".join(f"    {c} = c[{j}]\n" for j, c in enumerate(scalars))
    text = functions_text(
        update, n_slots, n_scalars, dtype, of_rows=of_rows, before=before, master=master
    )
    text = module_source(text)
    if of_rows is not None:
        rows = row_text(of_rows.per_row, scalars)
        return text + rows_source(slots, scalars_read, rows)
    for name, target, arguments in (
        ("inplace", "w", "w: WRITE, g: READ"),
        ("publish", "out", "w: READ, out: WRITE, g: READ"),
    ):
        text += _LOOP.format(
            name=name,
            arguments=", ".join([arguments, *(f"{slot}: WRITE" for slot in slots)]),
            scalars=scalars_read,
            targets=", ".join(f"{a}[i]" for a in (target, *slots)),
            call=call_of(slots, scalars, "[i]"),
        )
    text += past_source(slots, scalars_read, call_of(slots, scalars, "_[i]"))
    call = call_of(slots, scalars, "[r, i]", "[source, i]")
    return text + rows_source(slots, scalars_read, weights_text(slots, call))


def functions_text(
    update: Callable[..., Any],
    n_slots: int,
    n_scalars: int,
    dtype: np.dtype[Any],
    *,
    of_rows: OfRows | None = None,
    before: Before = (),
    master: bool = False,
) -> str:
    """Return the text of what loops call: `_update`, and maybe `_mean`, of one weight.

    Parameters
    ----------
    update, n_slots, n_scalars, dtype, of_rows, before, master
        As in `update_source`.

    Returns
    -------
    str
        Definitions, for a generated module.
    """
    names, scalars = argument_names(n_slots, n_scalars)
    slots = names[master:]
    own = scalars[: len(scalars) - sum(n for _, n in before)]
    between = slots if of_rows is None else ["mean", *slots]
    unsigned = f"uint{8 * dtype.itemsize}"
    text = _NUMBERS.format(dtype=dtype.name, unsigned=unsigned)
    text += _function("_update", freeze(update, 2 + len(between) + len(own), dtype))
    called = [("_update", between)]
    if of_rows is not None:
        called.append(("_mean", []))
        text += _function("_mean", freeze(of_rows.mean, 2 + len(own), dtype))
    changed, at = "g", len(scalars)
    for j, (function, n) in reversed([*enumerate(before)]):
        name, at = f"before{j}", at - n
        text += _function(name, freeze(function, 1 + n, dtype))
        changed = f"{name}({', '.join([changed, *scalars[at : at + n]])})"
    for name, more in called if before else ():
        arguments = ", ".join(["w", "g", *more, *scalars])
        given = ", ".join(["w", changed, *more, *own])
        text += _AFTER.format(name=name, arguments=arguments, given=given)
    return text + _mastered(names, scalars) if master else text


def argument_names(n_slots: int, n_scalars: int) -> tuple[list[str], list[str]]:
    """Return the names in generated text.

    Parameters
    ----------
    n_slots, n_scalars : int
        How many of them.

    Returns
    -------
    tuple of (list of str, list of str)
        Those of slots, and those of scalars.
    """
    return [f"s{j}" for j in range(n_slots)], [f"c{j}" for j in range(n_scalars)]


def _mastered(slots: list[str], scalars: list[str]) -> str:
    """Return the text of an update of the first slot, which is the weight too."""
    arguments = ", ".join(["w", "g", *slots, *scalars])
    call = f"_update_of_master({', '.join(['s0', 'g', *slots[1:], *scalars])})"
    call = call if len(slots) > 1 else f"weight({call})"
    given = ", ".join(slots)
    return _MASTERED.format(arguments=arguments, targets=given, call=call, given=given)


def _function(name: str, frozen: Frozen) -> str:
    """Return the text that makes a function again, and compiles it where it is called."""
    code, names, cells = frozen.code, frozen.names, frozen.cells
    return _FUNCTION.format(name=name, code=code, names=names, cells=cells)


def call_of(
    slots: list[str],
    scalars: list[str],
    at: str,
    g_at: str = "",
    *,
    between: Sequence[str] = (),
) -> str:
    """Return the text of the update of one weight.

    Parameters
    ----------
    slots, scalars : list of str
        Names of the arguments.
    at, g_at : str
        Follow the names of weights and slots, and that of the gradient, if it is elsewhere.
    between : sequence of str
        Names of the arguments between gradient and slots.

    Returns
    -------
    str
        A call; without slots its result is the bare weight.
    """
    read = [f"w{at}", f"g{g_at or at}", *between, *(f"{slot}{at}" for slot in slots)]
    call = f"_update({', '.join([*read, *scalars])})"
    return call if slots else f"weight({call})"
