"""Which rule updates which array and table of a store that is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.errors import LayoutError
from daskps.layout.arrays import FLOATS
from daskps.optim import Function, Rule, WithMaster, resolve
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.layout.tables import TableShape


def rules_of(
    optimizer: Any,
    arrays: Mapping[str, str],
    tables: Mapping[str, TableShape],
) -> dict[int, Rule]:
    """Return the rules by index, that of the arrays first and then of the tables."""
    if optimizer is None:
        return {}
    dtypes = {**arrays, **{n: shape[2] for n, shape in tables.items()}}
    floats = [n for n, dtype in dtypes.items() if dtype in FLOATS]
    if not floats and isinstance(optimizer, Rule):
        raise LayoutError(
            "the store has no float parameter, so an optimizer has nothing to do; "
            "leave optimizer= out"
        )
    resolved = resolve(optimizer, floats)
    for name, rule in resolved.items():
        if isinstance(rule, Function) and name in tables:
            raise LayoutError(
                f"the optimizer of table {name[:60]!r} is {rule!r}, which takes whole "
                f"arrays; give tables another one by their names, such as "
                f"optimizer={{{name[:60]!r}: Adagrad(0.1), '*': Function(f)}}"
            )
        with user_code("the optimizer"):
            of_rows, of_ranks = rule.row_mean is not None, bool(rule.rank_slots)
        if of_ranks and name in tables:
            raise LayoutError(
                f"the optimizer of table {name[:60]!r} is {rule!r}, which keeps state for "
                f"each trainer, of arrays only; give tables another one by their names, "
                f"such as optimizer={{{name[:60]!r}: Adagrad(0.1), '*': DCASGD(0.1, ranks=2)}}"
            )
        if of_rows and name in arrays:
            raise LayoutError(
                f"the optimizer of parameter {name[:60]!r} is {rule!r}, which needs the "
                f"rows of a table, and {name[:60]!r} is an array; give arrays another one "
                f"by their names, such as optimizer={{'emb': Adagrad(0.1, rowwise=True), "
                f"'*': Adagrad(0.1)}}"
            )
    return {i: resolved[n] for i, n in enumerate(dtypes) if n in resolved}


def with_masters(
    rules: Mapping[int, Rule], masters: Mapping[int, str]
) -> dict[int, Rule]:
    """Return rules by index, those of parameters with masters, by name, around these.

    Raises
    ------
    LayoutError
        For a parameter without a rule, and for functions.
    """
    # Parameters that share a rule share its loops.
    made: dict[int, Rule] = {}
    found = dict(rules)
    for index, name in masters.items():
        if (rule := rules.get(index)) is None:
            raise LayoutError(
                f"{name[:60]!r} has a master, which is what an optimizer updates, and no "
                f"optimizer; give it one with create(optimizer=...), or leave master= out"
            )
        if isinstance(rule, Function):
            raise LayoutError(
                f"the optimizer of {name[:60]!r} is {rule!r}, which is given the weights "
                f"and returns them: it has no use for a master; leave master= out"
            )
        found[index] = made.setdefault(id(rule), WithMaster(rule))
    return found
