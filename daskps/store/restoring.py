"""All that a store is made of that comes from a checkpoint, or from a part of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.checkpoint.manifest import MANIFEST, StoredParameter
from daskps.checkpoint.selection import take
from daskps.errors import CheckpointError, LayoutError, UnknownParameterError
from daskps.layout.arrays import FLOATS
from daskps.layout.slots import has_master
from daskps.store.arguments import encoded
from daskps.store.blueprints import Values, rules_of, with_masters
from daskps.store.intake import plain
from daskps.store.specs import ArraySpec, TableSpec, first_rows
from daskps.store.targets import given_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.checkpoint.listing import FoundCheckpoint
    from daskps.checkpoint.manifest import Manifest
    from daskps.checkpoint.selection import TakenEntry
    from daskps.cluster.caller.creation import Blueprint
    from daskps.layout.tables import TableShape
    from daskps.optim import Rule
    from daskps.store.blueprints import Wanted


@dataclass(frozen=True, slots=True)
class WantedPart:
    """The part of a checkpoint that its user wants; see `selection.take`."""

    names: Any = None
    rename: Any = None
    dtype: Any = None


def restored(
    source: FoundCheckpoint,
    *,
    where: Wanted,
    optimizer: Any,
    init: Any,
    part: WantedPart,
) -> Blueprint:
    """Check everything `restore` was given against what the checkpoint holds.

    Raises
    ------
    CheckpointError
        For rules that are not daskps' own and were not passed, and for others than were
        saved.
    LayoutError, UnknownParameterError, TypeError, ValueError
        For what no store can be made of.
    """
    manifest = source.manifest
    given = plain({} if init is None else init)
    names = None if part.names is None else given_names(part.names)
    taken = take(manifest, names, part.rename, part.dtype)
    saved = {one.name: (one, manifest.members[one.stored]) for one in taken}
    for name in plain(dict.fromkeys(saved)):
        encoded(name, "parameter name", LayoutError)
    if not saved and not given:
        raise LayoutError("nothing is named; a store needs at least one parameter")
    shapes = {
        n: (of.shape, one.dtype)
        for n, (one, of) in saved.items()
        if isinstance(of, StoredParameter)
    }
    values = Values(shapes, _tables(saved, given))
    if known := given.keys() & saved.keys():
        raise UnknownParameterError(
            f"init names {min(known)!r:.60}, which has its saved values; leave it out of "
            f"names= for others"
        )
    for name, value in given.items():
        if not isinstance(value, (ArraySpec, TableSpec)) and np.ndim(value) == 0:
            raise UnknownParameterError(
                f"init names {name!r:.60}, which is no unbounded table in this checkpoint; "
                f"it has {[*saved][:20]}. For a parameter that it does not have give an "
                f"array, an ArraySpec or a TableSpec"
            )
    # The rest of it is new.
    values.take_all(given, where.n_shards, seed=manifest.seed)
    is_whole = part == WantedPart() and not given
    rules, lost = _rules(manifest, saved, optimizer, values, is_whole=is_whole)
    if not is_whole:
        kept = (one._replace(keeps=one.name not in lost) for one in taken)
        source = replace(source, taken=tuple(kept))
    return where.blueprint(values, rules, seed=manifest.seed, source=source)


def _tables(
    saved: Mapping[str, tuple[TakenEntry, Any]], given: dict[str, Any]
) -> dict[str, TableShape]:
    """Return the tables, those that `given` names with other first rows."""
    found: dict[str, TableShape] = {}
    for name, (one, of) in saved.items():
        if isinstance(of, StoredParameter):
            continue
        unbounded = of.unbounded
        if unbounded is None:
            found[name] = of.rows, of.dim, one.dtype
            continue
        if name in given:
            first = first_rows(given.pop(name), name=name, dtype=of.dtype)
            unbounded = replace(unbounded, init=first)
        found[name] = 0, of.dim, of.dtype, unbounded
    return found


def _rules(
    manifest: Manifest,
    saved: Mapping[str, tuple[TakenEntry, Any]],
    optimizer: Any,
    values: Values,
    *,
    is_whole: bool,
) -> tuple[dict[int, Rule], set[str]]:
    """Return the rules by index: those that were saved, or those that are given.

    And the names of which the saved state does not fit: where all is to be as it was,
    that is an error.
    """
    shapes, tables = values.shapes, values.tables
    index = {name: i for i, name in enumerate([*shapes, *tables])}
    ruled = {n: of for n, (_, of) in saved.items() if of.rule is not None}
    if optimizer is None:
        made: dict[int, Rule] = {}
        for of in ruled.values():
            if of.rule not in made:
                made[of.rule] = manifest.rules[of.rule].make(MANIFEST, of.name)
        return {index[n]: made[of.rule] for n, of in ruled.items()}, set()
    masters = {
        index[n]: n
        for n, of in ruled.items()
        if has_master(manifest.rules[of.rule].first)
    }
    arrays = {name: dtype for name, (_, dtype) in shapes.items()}
    found = with_masters(rules_of(optimizer, arrays, tables), masters)
    lost: set[str] = set()
    for name, (_, of) in saved.items():
        try:
            _check_rule(manifest, of, found.get(index[name]))
        except CheckpointError:
            if is_whole or getattr(of, "unbounded", None):
                raise
            lost.add(name)
    return found, lost


def _check_rule(manifest: Manifest, of: Any, given: Rule | None) -> None:
    """Refuse a rule that the saved state is not for."""
    if of.dtype not in FLOATS:
        return
    if of.rule is not None:
        if given is None:
            raise CheckpointError(
                f"{of.name!r:.60} was saved with an optimizer, whose state goes on; "
                f"give it the same rule in optimizer=, and not None",
                MANIFEST,
                of.name,
            )
        manifest.rules[of.rule].check(given, MANIFEST, of.name)
    elif given is not None and given.slots:
        raise CheckpointError(
            f"{of.name!r:.60} was saved without an optimizer, so there is nothing "
            f"for the slots {list(given.slots)} of {given!r}; restore "
            f"without optimizer=, or with a rule without slots",
            MANIFEST,
            of.name,
        )
