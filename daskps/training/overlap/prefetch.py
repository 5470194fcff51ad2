"""A read that was begun before the pull it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.store.targets import chosen_names, target_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.caller.targets import Target
    from daskps.cluster.wire.deadline import Deadline
    from daskps.training.overlap.background import Background
    from daskps.training.overlap.operation import Operation
    from daskps.typing import Array


class Prefetch:
    """The read ahead of one trainer and the arrays it goes to.

    Parameters
    ----------
    meta : StoreMap
        The store.
    """

    def __init__(self, meta: StoreMap) -> None:
        self._meta = meta
        #: The read under way: of which names, at which clock.
        self._ahead: tuple[frozenset[str], int, Operation] | None = None
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
        operation = background.read(target, deadline)
        # It may be filled again while it still is: reads come one after the other.
        self._kept = {chosen: target}
        self._ahead = chosen, background.clock, operation

    def drop(self) -> None:
        """Forget what was read: it is no longer what a pull would read."""
        self._ahead = None

    def take(
        self, names: Any, out: Mapping[str, Array] | None, clock: int
    ) -> dict[str, Array] | None:
        """Return what was read ahead, if it is what a pull at this clock asks for."""
        if self._ahead is None:
            return None
        ahead, at, operation = self._ahead
        chosen = chosen_names(self._meta, out if names is None else names)
        if at != clock or ahead != frozenset(chosen):
            return None
        # As any other pull it is refused for an `out` that does not fit.
        target = None if out is None else target_of(self._meta, names, out)
        self._ahead = None
        if operation.exception() is not None:
            # Heard of before; the pull reads for itself.
            return None
        values = operation.result()
        if target is None:
            # They are the caller's now.
            self._kept.clear()
            return {name: values[name] for name in chosen}
        found: dict[str, Array] = target.finish()
        for name, array in found.items():
            np.copyto(array, values[name])
        return found
