"""Update rules in a manifest: by the names that daskps has for them, and never pickled.

Of a rule or schedule of one's own only its text is kept, and a restore asks for it: what a
file names is never imported.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from daskps import optim
from daskps.errors import CheckpointError
from daskps.layout.slots import PerRow, marked, with_marks
from daskps.optim import Rule, schedules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.checkpoint.fields import Fields

#: Those that are made from a manifest; a class of the same name elsewhere is none.
RULES: Mapping[str, type[Rule]] = {
    rule.__name__: rule
    for rule in (
        optim.SGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.DCASGD,
        optim.Ftrl,
        optim.RMSprop,
        optim.WithMaster,
        optim.chain,
        optim.scaled,
    )
}
SCHEDULES: Mapping[str, Any] = {
    name: getattr(schedules, name) for name in schedules.__all__
}
#: Other kinds of arguments, by the key that they have there: these two, and rules.
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "schedule": SCHEDULES,
    "part": {"clip_by_value": optim.clip_by_value},
    "rule": RULES,
}
#: They are nested that deeply at most.
_MOST_NESTED = 8


@dataclass(frozen=True, slots=True)
class StoredRule:
    """A rule as a manifest has it."""

    #: Its text, for people.
    told: str
    #: Names of its slots, their first values, and which have one number per row.
    slots: tuple[str, ...]
    first: tuple[float, ...]
    #: The name of its class, "" for one of a user's own, and its arguments.
    kind: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, rule: Rule, first: tuple[float, ...]) -> StoredRule:
        """Return what is kept of a rule, whose slots have these first values."""
        told, slots = repr(rule)[:1000], tuple(rule.slots)
        kind, own = type(rule).__name__, RULES.get(type(rule).__name__)
        try:
            arguments = _arguments(rule)
        except (TypeError, AttributeError, ValueError):
            own = None
        if own is not type(rule):
            return cls(told, slots, first)
        return cls(told, slots, first, kind, arguments)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "told": self.told,
            "slots": list(self.slots),
            "first": [float(v) for v in self.first],
            "per_row": marked(self.first),
            "kind": self.kind,
            "arguments": dict(self.arguments),
        }

    @classmethod
    def from_json(cls, found: Fields) -> StoredRule:
        """Rebuild it from :meth:`to_json`.

        Raises
        ------
        CheckpointError
            For what that never returns.
        """
        slots, first = found.texts("slots"), found.numbers("first")
        per_row = found.wholes("per_row", least=-1)
        if len(slots) != len(first) or any(j >= len(slots) for j in per_row):
            raise CheckpointError(
                f"{found.file}: {found.where} has {len(slots)} slots, first values of "
                f"{len(first)} and of rows {list(per_row)}; it is damaged",
                found.file,
            )
        return cls(
            found.text("told"),
            slots,
            with_marks(first, per_row),
            found.text("kind"),
            found.mapping("arguments"),
        )

    def make(self, file: str, parameter: str) -> Rule:
        """Return the rule.

        Parameters
        ----------
        file : str
            The manifest, for errors.
        parameter : str
            One that it updates, for errors.

        Returns
        -------
        Rule
            An equal one.

        Raises
        ------
        CheckpointError
            For a rule or schedule that is not one of daskps.
        """
        rule = RULES.get(self.kind)
        if rule is None:
            raise CheckpointError(
                f"{parameter!r:.60} is updated by {self.told}, which is not one of "
                f"daskps, and nothing that a file names is imported; pass it: "
                f"daskps.restore(..., optimizer=...)",
                file,
                parameter,
            )
        try:
            made: Rule = _made(rule, self.arguments, 0)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{file}: no {self.kind} has the arguments {dict(self.arguments)!r:.200} "
                f"({error}); pass the rule: daskps.restore(..., optimizer=...)",
                file,
                parameter,
            ) from None
        self.check(made, file, parameter)
        return made

    def check(self, rule: Rule, file: str, parameter: str) -> None:
        """Refuse a rule whose slots are not those that were saved.

        Raises
        ------
        CheckpointError
            Naming both.
        """
        rows = {n for n, v in zip(self.slots, self.first, strict=True) if _of_row(v)}
        if tuple(rule.slots) != self.slots or {*rule.row_slots} & {*rule.slots} != rows:
            raise CheckpointError(
                f"the slots of {parameter!r:.60} are {list(self.slots)}, of {self.told}; "
                f"{rule!r} has {list(rule.slots)}"
                f"{' per row' if rule.row_slots else ''}; restore with a rule that has "
                f"the same",
                file,
                parameter,
            )


def _of_row(first: float) -> bool:
    return isinstance(first, PerRow)


def _arguments(value: Any) -> dict[str, Any]:
    """Return what a rule, or an argument of one, was made with, by name."""
    return {
        n: _plain(getattr(value, n)) for n in inspect.signature(type(value)).parameters
    }


def _made(kind: Any, arguments: Mapping[str, Any], level: int) -> Any:
    """Return a rule, or an argument of one, from :func:`_arguments`."""
    given = {n: _value(v, level) for n, v in arguments.items()}
    several: list[Any] = []
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            several += given.pop(name)
    return kind(*several, **given)


def _plain(value: Any) -> Any:
    """Return an argument as JSON has it; TypeError for one that it has not."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    name = type(value).__name__
    for key, known in ARGUMENTS.items():
        if known.get(name) is type(value):
            return {key: name, "arguments": _arguments(value)}
    raise TypeError(f"{value!r} is not of daskps")


def _value(plain: Any, level: int) -> Any:
    """Return an argument from :func:`_plain`."""
    if isinstance(plain, list):
        return tuple(_value(one, level) for one in plain)
    if not isinstance(plain, dict):
        return plain
    if level > _MOST_NESTED:
        raise ValueError("rules or schedules of others without an end")
    for key, known in ARGUMENTS.items():
        if key in plain:
            return _made(known[plain[key]], plain["arguments"], level + 1)
    raise KeyError("an argument of no kind")
