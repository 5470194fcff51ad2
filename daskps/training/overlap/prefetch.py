"""A read that was begun before the pull it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.store.targets import checked_out, chosen_names, target_of
from daskps.training.overlap.operation import Read

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.cluster.caller.routes import Target
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.wire.deadline import Deadline
    from daskps.training.overlap.background import Background
    from daskps.training.overlap.operation import Operation
    from daskps.typing import Array


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A read under way: of which names, at which clock."""

    names: frozenset[str]
    clock: int
    operation: Operation


class Prefetch:
    """The read ahead of one trainer and the arrays it goes to.

    Parameters
    ----------
    meta : StoreMap
        The store.
    """

    def __init__(self, meta: StoreMap) -> None:
        self._meta = meta
        self._ahead: _Ahead | None = None
        #: Arrays that no caller has, to be used again.
        self._kept: dict[frozenset[str], Target] = {}

    def start(self, background: Background, names: Any, deadline: Deadline) -> None:
        """Begin to read; a read begun before is of no use any more."""
        chosen = frozenset(chosen_names(self._meta, names))
        target = self._kept.get(chosen)
        if target is None:
            whole = len(chosen) == len(self._meta.layout.parameters)
            target = target_of(self._meta, None if whole else sorted(chosen), None)
        self._ahead = None
        operation = background.submit(Read(target, deadline))
        # It may be filled again while it still is: reads come one after the other.
        self._kept = {chosen: target}
        self._ahead = _Ahead(chosen, background.clock, operation)

    def drop(self) -> None:
        """Forget what was read: it is no longer what a pull would read."""
        self._ahead = None

    def take(
        self, names: Any, out: Mapping[str, Array] | None, clock: int
    ) -> dict[str, Array] | None:
        """Return what was read ahead, if it is what a pull at this clock asks for."""
        ahead = self._ahead
        if ahead is None:
            return None
        chosen = chosen_names(self._meta, out if names is None else names)
        if ahead.clock != clock or ahead.names != frozenset(chosen):
            return None
        outs = {n: checked_out(a, self._meta.layout[n]) for n, a in (out or {}).items()}
        if not ahead.names.issuperset(outs):
            # As any other pull it is refused, with the reason.
            return None
        self._ahead = None
        if ahead.operation.exception() is not None:
            # Heard of before; the pull reads for itself.
            return None
        found = ahead.operation.result()
        if out is None:
            # They are the caller's now.
            self._kept.clear()
            return {name: found[name] for name in chosen}
        for name in chosen:
            if name in outs:
                np.copyto(outs[name], found[name])
            else:
                outs[name] = found[name].copy()
        return {name: outs[name] for name in chosen}
