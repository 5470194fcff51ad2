"""What a store is made of that is made from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from daskps.checkpoint.manifest import MANIFEST
from daskps.cluster.caller.creation import Blueprint
from daskps.errors import CheckpointError, UnknownParameterError
from daskps.layout.arrays import FLOATS
from daskps.layout.slots import has_master
from daskps.limits import check_parameters
from daskps.store.arguments import checked_name, flag
from daskps.store.created import most_rows
from daskps.store.first_rows import first_rows
from daskps.store.rules import rules_of, with_masters
from daskps.store.servers import checked_placement, checked_servers, checked_shards

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.checkpoint.manifest import Manifest, StoredParameter, StoredTable
    from daskps.cluster.caller.creation import CheckpointSource
    from daskps.layout.tables import TableShape
    from daskps.optim import Rule
    from daskps.store.servers import Wanted


def restored(
    source: CheckpointSource,
    *,
    name: str | None,
    where: Wanted,
    optimizer: Any,
    init: Any,
    overwrite: Any,
) -> Blueprint:
    """Check everything `restore` was given against what the checkpoint holds.

    Raises
    ------
    CheckpointError
        For rules that are not daskps' own and were not passed, and for others than were
        saved.
    LayoutError, TypeError, ValueError
        For what no store can be made of.
    """
    manifest, number = source.manifest, checked_shards(where.shards)
    shapes = {p.name: (p.shape, p.dtype) for p in manifest.parameters}
    tables = _tables(manifest, init)
    check_parameters(
        ((n, shape, dtype) for n, (shape, dtype) in shapes.items()),
        len(shapes),
        number or 1,
        [(n, most_rows(of), *of[1:3]) for n, of in tables.items()],
    )
    return Blueprint(
        name=None if name is None else checked_name(name),
        shapes=shapes,
        tables=tables,
        arrays={},
        collections={},
        initializers={},
        rules=_rules(manifest, optimizer, tables),
        shards=number,
        servers=checked_servers(where.servers),
        placement=checked_placement(where.placement, [*shapes, *tables]),
        seed=manifest.seed,
        overwrite=flag(overwrite, "overwrite"),
        source=source,
    )


def _tables(manifest: Manifest, init: Any) -> dict[str, TableShape]:
    """Return the tables, those that `init` names with other first rows."""
    given = dict({} if init is None else init)
    found: dict[str, TableShape] = {}
    for of in manifest.tables:
        any_ids = of.any_ids
        if any_ids is None:
            found[of.name] = of.rows, of.dim, of.dtype
            continue
        if of.name in given:
            first = first_rows(given.pop(of.name), name=of.name, dtype=of.dtype)
            any_ids = replace(any_ids, init=first)
        found[of.name] = 0, of.dim, of.dtype, any_ids
    if given:
        raise UnknownParameterError(
            f"init names {min(map(str, given))!r:.60}, which is no table of any ids in "
            f"this checkpoint; all else has its saved values"
        )
    return found


def _rules(
    manifest: Manifest, optimizer: Any, tables: Mapping[str, TableShape]
) -> dict[int, Rule]:
    """Return the rules by index: those that were saved, or those that are given."""
    saved: list[StoredParameter | StoredTable]
    saved = [*manifest.parameters, *manifest.tables]
    if optimizer is None:
        made: dict[int, Rule] = {}
        found = {}
        for index, of in enumerate(saved):
            if of.rule is not None:
                if of.rule not in made:
                    made[of.rule] = manifest.rules[of.rule].make(MANIFEST, of.name)
                found[index] = made[of.rule]
        return found
    arrays = {p.name: p.dtype for p in manifest.parameters}
    masters = {
        i: of.name
        for i, of in enumerate(saved)
        if of.rule is not None and has_master(manifest.rules[of.rule].first)
    }
    found = with_masters(rules_of(optimizer, arrays, tables), masters)
    for index, of in enumerate(saved):
        if of.dtype not in FLOATS:
            continue
        if of.rule is not None:
            manifest.rules[of.rule].check(found[index], MANIFEST, of.name)
        elif found[index].slots:
            raise CheckpointError(
                f"{of.name!r:.60} was saved without an optimizer, so there is nothing "
                f"for the slots {list(found[index].slots)} of {found[index]!r}; restore "
                f"without optimizer=, or with a rule without slots",
                MANIFEST,
                of.name,
            )
    return found
