"""In which order a trainer's operations are carried out: a queue without threads.

Operations take effect in the order in which they were issued, but for pushes without
a tick that wait side by side: those that share no parameter may change places, and
the one with the higher priority goes first. Pushes of one parameter keep their order:
a sum of three would have other bits in another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.errors import RunCancelledError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.training.overlap.operation import Operation


class Backlog:
    """Operations of one trainer that are not done."""

    def __init__(self) -> None:
        self.waiting: list[Operation] = []
        self.running: Operation | None = None
        #: What went wrong and nobody has heard of.
        self._failed: BaseException | None = None
        #: The end of the run, which everybody who comes hears of.
        self.cancelled: RunCancelledError | None = None

    @property
    def busy(self) -> bool:
        """Whether anything waits or is under way."""
        return bool(self.waiting or self.running)

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to wait for and nothing to raise.

        May be asked without a lock: whatever changes keeps one of these at any moment.
        """
        under_way = self.waiting or self.running
        return not under_way and self._failed is None and self.cancelled is None

    def check(self) -> None:
        """Raise what went wrong unheard; once, unless the run is over."""
        if self.cancelled is not None:
            raise self.cancelled
        if self._failed is not None:
            error, self._failed = self._failed, None
            raise error

    def heard(self, error: BaseException) -> None:
        """Note that somebody has got an error from a future."""
        if error is self._failed:
            self._failed = None

    def put(self, operation: Operation) -> None:
        """Let an operation wait for its turn."""
        self.waiting.append(operation)

    def take(self) -> Operation | None:
        """Take what is next, if anything waits."""
        if not self.waiting:
            return None
        # Noted before it leaves those that wait, for `quiet`.
        number = _first(self.waiting)
        self.running = self.waiting[number]
        del self.waiting[number]
        return self.running

    def done(self) -> None:
        """Note that what was taken last has been carried out."""
        self.running = None

    def fail(self, error: BaseException) -> list[Operation]:
        """Note that it has failed; return all operations that fail with it.

        Those behind it were issued in the belief that it would not.
        """
        if isinstance(error, RunCancelledError):
            self.cancelled = error
        else:
            self._failed = error
        failed = [] if self.running is None else [self.running]
        failed += self.waiting
        self.running, self.waiting = None, []
        return failed

    def drop(self) -> list[Operation]:
        """Return what waits and shall not be carried out."""
        dropped, self.waiting = self.waiting, []
        return dropped


def _first(waiting: Sequence[Operation]) -> int:
    """Return which of the operations is next: the first, or a push that may pass it."""
    found, highest = 0, None
    before: set[int] = set()
    for number, operation in enumerate(waiting):
        if operation.passing is None:
            break
        free = before.isdisjoint(operation.passing)
        if free and (highest is None or operation.priority > highest):
            found, highest = number, operation.priority
        before |= operation.passing
    return found
