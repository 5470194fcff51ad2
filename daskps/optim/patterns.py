"""The choice of the rule that updates each parameter, by patterns of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from daskps.errors import LayoutError
from daskps.optim.base import Rule


def resolve(
    optimizer: Rule | Mapping[str, Rule | None], names: Iterable[str]
) -> dict[str, Rule]:
    """Return the rule of every parameter.

    Parameters
    ----------
    optimizer : Rule or mapping of str to Rule
        One rule for all, or shell patterns (``*``, ``?``, ``[...]``, case matters;
        ``*`` also matches "/") tried in order: the first that matches holds, and None
        is for parameters without a rule.
    names : iterable of str
        The parameters.

    Returns
    -------
    dict of str to Rule
        In the order of `names`, of those that have one.

    Raises
    ------
    LayoutError
        If a name has no match, or a pattern matches no name.
    TypeError
        If `optimizer` or one of its values is no rule, or a pattern no text.

    Examples
    --------
    >>> rules = {"emb*": daskps.optim.Adagrad(0.1), "*": daskps.optim.SGD(0.1)}
    >>> resolve(rules, ["embedding", "bias"])
    {'embedding': Adagrad(lr=0.1), 'bias': SGD(lr=0.1)}
    """
    names = list(names)
    if isinstance(optimizer, Mapping):
        for pattern, rule in optimizer.items():
            if not isinstance(pattern, str):
                raise TypeError(
                    f"a pattern of optimizer is a text such as 'layer*', found "
                    f"{pattern!r:.60}"
                )
            if rule is not None:
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


def _match(rules: Mapping[str, Rule | None], names: list[str]) -> dict[str, Rule]:
    chosen: dict[str, Rule] = {}
    found = first_matches(rules, names, "optimizer")
    for name, pattern in zip(names, found, strict=True):
        if pattern is None:
            raise LayoutError(
                f"no optimizer for parameter {name!r}: none of the patterns "
                f"{list(rules)} matches it. Add one, for example '*' at the end."
            )
        if (rule := rules[pattern]) is not None:
            chosen[name] = rule
    return chosen


def first_matches(
    patterns: Iterable[str], names: Sequence[str], what: str
) -> list[str | None]:
    """Return the first pattern that matches each name, None where there is none.

    Parameters
    ----------
    patterns : iterable of str
        Shell patterns; case matters, and ``*`` also matches "/".
    names : sequence of str
        Of parameters.
    what : str
        The owner of the patterns, for the message.

    Raises
    ------
    LayoutError
        If a pattern matches no name.

    Examples
    --------
    >>> first_matches(["emb*", "*x"], ["embedding", "max", "bias"], "optimizer")
    ['emb*', '*x', None]
    """
    patterns = [*patterns]
    found = [next((p for p in patterns if fnmatchcase(n, p)), None) for n in names]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise LayoutError(
                f"{what} pattern {pattern!r} matches no parameter; there are "
                f"{names}. Correct the pattern or leave it out."
            )
    return found
