"""The ids that the directory issues to producers, and whether they are still in use."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from daskps.cluster.protocol.handlers import DIRECTORY
from daskps.errors import ConsistencyError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distributed import Scheduler


class Producers:
    """Ids of runs and of the producers outside runs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._ids = itertools.count(1)
        #: Producers by task key and number within the task; what each belongs to.
        self._tasks: dict[Any, dict[int, int]] = {}
        self._owners: dict[int, tuple[str, Any]] = {}

    def new(self) -> int:
        """Return an id no run or producer has had."""
        return next(self._ids)

    @DIRECTORY.handles("producer")
    def on_producer(self, kind: str, owner: Any, nth: int = 0) -> int:
        """Issue the identity of a pusher outside runs.

        The n-th of a task gets the same number each time it runs until the scheduler
        forgets it, so what a re-run pushes again is told from what is new.
        """
        if kind not in ("task", "client", "worker"):
            raise ProtocolError(f"a producer that is a {kind!r:.60}")
        if kind != "task":
            number = self.new()
        else:
            ts = self._scheduler.tasks.get(owner)
            if ts is None or ts.state != "processing":
                raise ConsistencyError(
                    f"task {owner!r} is no longer the scheduler's to run, so its push "
                    f"was refused; nothing was applied"
                )
            numbers = self._tasks.setdefault(owner, {})
            number = numbers.get(nth) or self.new()
            numbers[nth] = number
        self._owners[number] = (kind, owner)
        return number

    @DIRECTORY.handles("ended")
    def on_ended(self, producers: Sequence[int]) -> list[int]:
        """Return those of the producers that will not push again."""
        return [p for p in producers if not self._is_open(p)]

    def _is_open(self, producer: int) -> bool:
        kind, owner = self._owners.get(producer, ("", None))
        if kind == "task":
            ts = self._scheduler.tasks.get(owner)
            return ts is not None and ts.state == "processing"
        if kind == "client":
            return owner in self._scheduler.clients
        return kind == "worker" and owner in self._scheduler.workers

    def forget_task(self, key: Any) -> None:
        """Forget the producer of a task the scheduler has forgotten."""
        for number in self._tasks.pop(key, {}).values():
            self._owners.pop(number, None)

    def forget(self, kind: str, owner: str) -> None:
        """Forget the producers of a client or worker that left."""
        for producer in [p for p, of in self._owners.items() if of == (kind, owner)]:
            del self._owners[producer]
