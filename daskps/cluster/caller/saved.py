"""Owners' answers about the chunks that they have saved, as manifest entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daskps.checkpoint.arrays import StoredArray, stored_arrays
from daskps.checkpoint.digests import StoredFile
from daskps.checkpoint.manifest import StoredParameter, StoredTable
from daskps.checkpoint.rules import StoredRule
from daskps.layout.spans import CANDIDATES, IDS
from daskps.layout.tables import UnboundedTable
from daskps.shards.installing import Counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.checkpoint.arrays import Counts
    from daskps.cluster.host.rules import Rules
    from daskps.layout.arrays import Layout
    from daskps.layout.tables import Table


@dataclass(frozen=True, slots=True)
class OwnersSaid:
    """The answers of all hosts, as one."""

    files: Sequence[StoredFile]
    #: By path of a chunk of ids the hash that it begins with.
    begins: Mapping[str, int]
    #: The counts of the store.
    counted: Counted

    @classmethod
    def joined(cls, replies: Sequence[Mapping[str, Any]]) -> OwnersSaid:
        """Return the answers of all hosts as one."""
        files = [StoredFile(*row) for reply in replies for row in reply["files"]]
        begins = dict(tuple(row) for reply in replies for row in reply["begins"])
        every = [Counted(*row) for reply in replies for row in reply["counted"]]
        return cls(files, begins, Counted.joined(every))


def contents(
    layout: Layout, rules: Rules, counts: Counts, said: OwnersSaid
) -> dict[str, Any]:
    """Return the entries of a manifest on parameters, tables and rules."""
    slots, number = rules.slots, dict[int, int]()
    stored: list[StoredRule] = []
    # Thousands of parameters may share one rule, and a description of it takes long.
    seen = dict[int, int]()
    for index, rule in rules.by_index.items():
        if id(rule) not in seen:
            one = StoredRule.of(rule, slots[index])
            if one not in stored:
                stored.append(one)
            seen[id(rule)] = stored.index(one)
        number[index] = seen[id(rule)]
    parameters = tuple(
        StoredParameter(
            *(p.name, p.shape, p.dtype, number.get(p.index)),
            *(
                said.counted.steps.get(p.index, 0),
                said.counted.factors.get(p.index, 1.0),
            ),
        )
        for p in layout.parameters
    )
    # Only tables of any ids need their stored arrays here: parameters may be many.
    is_asked = any(isinstance(table, UnboundedTable) for table in layout.tables)
    arrays = stored_arrays(layout, slots, counts) if is_asked else []
    tables = tuple(
        _table(
            i,
            table,
            rule=number.get(table.index),
            arrays=arrays,
            counts=counts,
            said=said,
        )
        for i, table in enumerate(layout.tables)
    )
    return {"parameters": parameters, "tables": tables, "rules": tuple(stored)}


def _table(
    ordinal: int,
    table: Table,
    *,
    rule: int | None,
    arrays: Sequence[StoredArray],
    counts: Counts,
    said: OwnersSaid,
) -> StoredTable:
    known: dict[str, Any] = {"steps": said.counted.steps.get(table.index, 0)}
    known["lr_factor"] = said.counted.factors.get(table.index, 1.0)
    known["clock"] = said.counted.clocks[ordinal]
    if isinstance(table, UnboundedTable):
        known["any_ids"] = table.of
        known["n_rows"] = sum(counts.rows[table.index])
        known["n_candidates"] = sum(counts.candidates[table.index])
        known["admitted"], known["evicted"] = said.counted.came[ordinal]
        of = {a.area: a for a in arrays if a.members[0].index == table.index}
        known["begins"] = _begins(of.get(IDS), said)
        known["candidate_begins"] = _begins(of.get(CANDIDATES), said)
    return StoredTable(
        table.name, table.rows, table.dim, table.dtype, rule=rule, **known
    )


def _begins(array: StoredArray | None, said: OwnersSaid) -> tuple[int, ...]:
    if array is None:
        return ()
    return tuple(said.begins[array.path_of(chunk)] for chunk in array.grid.chunks())
