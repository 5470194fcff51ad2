"""Owners' answers about the chunks that they have saved, as manifest entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daskps.checkpoint.arrays import StoredArray, stored_arrays
from daskps.checkpoint.digests import StoredFile
from daskps.checkpoint.manifest import StoredParameter, StoredTable
from daskps.checkpoint.rules import StoredRule
from daskps.epochs import Epochs
from daskps.layout.spans import CANDIDATES, IDS
from daskps.layout.tables import UnboundedTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
    #: Steps by index of parameters and tables, the largest of all shards: a push whose
    #: process died half-way may have reached some of them only.
    steps: Mapping[int, int]
    #: Clock of each table, the largest too: no row was touched at a later one.
    clocks: Sequence[int]
    came: Sequence[tuple[int, int]]
    #: The place in the epochs of the shard that is furthest behind.
    epochs: Epochs
    #: Factors of learning rates, the least of all shards: the process that scaled them
    #: last may have died half-way.
    factors: Mapping[int, float]

    @classmethod
    def joined(cls, replies: Iterable[Mapping[str, Any]]) -> OwnersSaid:
        """Return the answers of all hosts as one."""
        files: list[StoredFile] = []
        begins: dict[str, int] = {}
        steps: dict[int, int] = {}
        clocks: dict[int, int] = {}
        came: dict[int, tuple[int, int]] = {}
        epochs: list[Epochs] = []
        factors: dict[int, float] = {}
        for reply in replies:
            files += [StoredFile(*row) for row in reply["files"]]
            begins |= dict(map(tuple, reply["begins"]))
            for of_shard, of_tables, ids, at in reply["counted"]:
                epochs.append(Epochs(*at))
                for index, n, factor in of_shard:
                    steps[index] = max(n, steps.get(index, 0))
                    factors[index] = min(factor, factors.get(index, factor))
                for i, n in enumerate(of_tables):
                    clocks[i] = max(n, clocks.get(i, 0))
                for i, (admitted, evicted) in enumerate(ids):
                    before = came.get(i, (0, 0))
                    came[i] = before[0] + admitted, before[1] + evicted
        every = sorted(clocks)
        return cls(
            files=files,
            begins=begins,
            steps=steps,
            clocks=[clocks[i] for i in every],
            came=[came[i] for i in every],
            epochs=min(epochs, key=lambda at: at.place),
            factors=factors,
        )


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
            *(said.steps.get(p.index, 0), said.factors.get(p.index, 1.0)),
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
    known: dict[str, Any] = {"steps": said.steps.get(table.index, 0)}
    known["lr_factor"] = said.factors.get(table.index, 1.0)
    known["clock"] = said.clocks[ordinal]
    if isinstance(table, UnboundedTable):
        known["any_ids"] = table.of
        known["n_rows"] = sum(counts.rows[table.index])
        known["n_candidates"] = sum(counts.candidates[table.index])
        known["admitted"], known["evicted"] = said.came[ordinal]
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
