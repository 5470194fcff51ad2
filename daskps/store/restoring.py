"""All that a store is made of that comes from a checkpoint, or from a part of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.checkpoint.manifest import MANIFEST, StoredParameter
from daskps.checkpoint.selection import take
from daskps.errors import CheckpointError, UnknownParameterError
from daskps.layout.arrays import FLOATS
from daskps.layout.slots import has_master
from daskps.store.blueprints import (
    Values,
    check_size,
    rules_of,
    shape_of,
    with_masters,
)
from daskps.store.specs import ArraySpec, TableSpec, first_rows

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
    manifest, values = source.manifest, Values()
    given = dict({} if init is None else init)
    taken = take(manifest, part.names, part.rename, part.dtype)
    saved = {one.name: (one, manifest.members[one.stored]) for one in taken}
    shapes = {
        n: (of.shape, one.dtype)
        for n, (one, of) in saved.items()
        if isinstance(of, StoredParameter)
    }
    tables = _tables(saved, given)
    # The rest of it is new.
    new_tables = {n: v for n, v in given.items() if isinstance(v, TableSpec)}
    new = {n: v for n, v in given.items() if n not in new_tables}
    if known := given.keys() & saved.keys():
        raise UnknownParameterError(
            f"init names {min(known)!r:.60}, which has its saved values; leave it out of "
            f"names= for others"
        )
    for name, value in new.items():
        if not isinstance(value, ArraySpec) and np.ndim(value) == 0:
            raise _not_in(name, saved)
    shapes |= values.take_all(new, len(shapes))
    tables |= {n: shape_of(n, t, manifest.seed) for n, t in new_tables.items()}
    for name, spec in new_tables.items():
        if spec.rows is not None:
            values.take_table(len(shapes) + [*tables].index(name), name, spec)
    number = where.n_shards
    check_size(shapes, tables, number)
    is_whole = part == WantedPart() and not given
    rules, lost = _rules(
        manifest, saved, optimizer, (shapes, tables), is_whole=is_whole
    )
    if not is_whole:
        kept = (one._replace(keeps=one.name not in lost) for one in taken)
        source = replace(source, taken=tuple(kept))
    return where.blueprint(
        shapes,
        tables,
        rules,
        seed=manifest.seed,
        arrays=values.arrays,
        collections=values.collections,
        initializers=values.initializers,
        source=source,
    )


def _not_in(name: Any, saved: Mapping[str, Any]) -> UnknownParameterError:
    return UnknownParameterError(
        f"init names {name!r:.60}, which is no unbounded table in this checkpoint; it has "
        f"{[*saved][:20]}. For a parameter that it does not have give an array, an "
        f"ArraySpec or a TableSpec"
    )


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
    into: tuple[Mapping[str, Any], Mapping[str, TableShape]],
    *,
    is_whole: bool,
) -> tuple[dict[int, Rule], set[str]]:
    """Return the rules by index: those that were saved, or those that are given.

    And the names of which the saved state does not fit: where all is to be as it was,
    that is an error.
    """
    shapes, tables = into
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
