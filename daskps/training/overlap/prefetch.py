"""A read that was begun before the pull it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.store.row_targets import given_ids, pulled
from daskps.store.targets import chosen_names, target_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.caller.targets import Target
    from daskps.cluster.wire.deadline import Deadline
    from daskps.training.overlap.background import Background
    from daskps.training.overlap.operation import Operation
    from daskps.typing import Array


class _Begun(NamedTuple):
    """A read under way."""

    names: frozenset[str]
    #: Ids by the names of tables.
    rows: Mapping[str, Array]
    clock: int
    operation: Operation

    def is_for(self, names: list[str], rows: Mapping[str, Array], clock: int) -> bool:
        """Return whether it reads what a pull at a clock asks for."""
        return (
            self.clock == clock
            and self.names == frozenset(names)
            and self.rows.keys() == rows.keys()
            and all(np.array_equal(ids, self.rows[name]) for name, ids in rows.items())
        )


class Prefetch:
    """The read ahead of one trainer and the arrays it goes to.

    Parameters
    ----------
    meta : StoreMap
        The store.
    """

    def __init__(self, meta: StoreMap) -> None:
        self._meta = meta
        self._ahead: _Begun | None = None
        #: Arrays that no caller has, to be used again; rows are others each time.
        self._kept: dict[frozenset[str], Target] = {}

    def start(
        self, background: Background, names: Any, rows: Any, deadline: Deadline
    ) -> None:
        """Begin to read; a read begun before is of no use any more."""
        chosen, ids = frozenset(chosen_names(self._meta, names)), {}
        targets: list[Target] = []
        if rows is not None:
            ids = given_ids(self._meta, rows)
            targets = pulled(self._meta, names, ids, None)
        elif kept := self._kept.get(chosen):
            targets = [kept]
        else:
            whole = len(chosen) == len(self._meta.layout.parameters)
            targets = [target_of(self._meta, None if whole else sorted(chosen), None)]
        self._ahead = None
        operation = background.read(targets, deadline)
        # It may be filled again while it still is: reads come one after the other.
        self._kept = {} if ids else {chosen: targets[0]}
        self._ahead = _Begun(chosen, ids, background.clock, operation)

    def drop(self) -> None:
        """Forget what was read: it is no longer what a pull would read."""
        self._ahead = None

    def take(
        self, names: Any, rows: Any, out: Mapping[str, Array] | None, clock: int
    ) -> dict[str, Array] | None:
        """Return what was read ahead, if it is what a pull at this clock asks for."""
        if (ahead := self._ahead) is None:
            return None
        ids = {} if rows is None else given_ids(self._meta, rows)
        if names is None and out:
            names = [name for name in out if name not in ids]
        chosen = chosen_names(self._meta, names)
        if not ahead.is_for(chosen, ids, clock):
            return None
        # As any other pull it is refused for an `out` that does not fit.
        target = None if out is None else pulled(self._meta, names, rows, out)[-1]
        self._ahead = None
        if ahead.operation.exception() is not None:
            # Heard of before; the pull reads for itself.
            return None
        values = ahead.operation.result()
        if target is None:
            # They are the caller's now.
            self._kept.clear()
            return {name: values[name] for name in [*chosen, *ids]}
        found: dict[str, Array] = target.finish()
        for name, array in found.items():
            np.copyto(array, values[name])
        return found
