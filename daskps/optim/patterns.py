"""Which rule updates which parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from daskps.errors import LayoutError
from daskps.optim.base import Rule


def resolve(
    optimizer: Rule | Mapping[str, Rule], names: Iterable[str]
) -> dict[str, Rule]:
    """Return the rule of every parameter.

    Parameters
    ----------
    optimizer : Rule or mapping of str to Rule
        One rule for all, or shell patterns (``*``, ``?``, ``[...]``, case matters;
        ``*`` also matches "/") tried in order: the first that matches holds.
    names : iterable of str
        The parameters.

    Returns
    -------
    dict of str to Rule
        In the order of `names`.

    Raises
    ------
    LayoutError
        If a name has no match, or a pattern matches no name.
    TypeError
        If `optimizer` or one of its values is no rule.

    Examples
    --------
    >>> rules = {"emb*": daskps.optim.Adagrad(0.1), "*": daskps.optim.SGD(0.1)}
    >>> resolve(rules, ["embedding", "bias"])
    {'embedding': Adagrad(lr=0.1), 'bias': SGD(lr=0.1)}
    """
    names = list(names)
    if isinstance(optimizer, Mapping):
        for pattern, rule in optimizer.items():
            _check(rule, f"optimizer[{pattern!r}]")
        return _match(optimizer, names)
    return dict.fromkeys(names, _check(optimizer, "optimizer"))


def _check(rule: Any, where: str) -> Rule:
    if isinstance(rule, Rule):
        return rule
    fix = "Pass an instance of daskps.optim.Rule, such as daskps.optim.SGD(0.1)"
    if isinstance(rule, type) and issubclass(rule, Rule):
        what = f"is the class {rule.__name__}, not an instance of it"
        fix = f"Call it: {rule.__name__}(lr=0.1)"
    else:
        what = f"is {rule!r}, a {type(rule).__name__}"
    raise TypeError(f"{where} {what}. {fix}.")


def _match(rules: Mapping[str, Rule], names: list[str]) -> dict[str, Rule]:
    chosen: dict[str, Rule] = {}
    for name in names:
        pattern = next((p for p in rules if fnmatchcase(name, p)), None)
        if pattern is None:
            raise LayoutError(
                f"no optimizer for parameter {name!r}: none of the patterns "
                f"{list(rules)} matches it. Add one, for example '*' at the end."
            )
        chosen[name] = rules[pattern]
    for pattern in rules:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise LayoutError(
                f"optimizer pattern {pattern!r} matches no parameter; there are "
                f"{names}. Correct the pattern or leave it out."
            )
    return chosen
