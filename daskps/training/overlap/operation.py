"""The future of what a trainer asked for in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.usercode import UserFuture

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.cluster.wire.deadline import Deadline


class Operation(UserFuture[Any]):
    """The future of an exchange; it can also be awaited, and not be cancelled.

    Parameters
    ----------
    exchange : callable
        Makes the exchange within so many seconds and returns what it gets.
    deadline : Deadline
        When it must have ended.
    heard : callable
        Called with the error that somebody has got from this future.
    check_thread : callable, optional
        Called before a thread waits; raises where that would be for ever.
    passing : frozenset of int, optional
        The parameters that a push without a tick brings; None for all else, which
        nothing passes.
    priority : int
        Of those that may pass each other the highest goes first.
    """

    def __init__(
        self,
        exchange: Callable[[float | None], Any],
        deadline: Deadline,
        heard: Callable[[BaseException], None],
        check_thread: Callable[[], None] = lambda: None,
        *,
        passing: frozenset[int] | None = None,
        priority: int = 0,
    ) -> None:
        super().__init__()
        self._exchange, self._deadline = exchange, deadline
        self._heard, self._check_thread = heard, check_thread
        self.passing, self.priority = passing, priority
        # Others may count on it: a pull on the tick before it, a round on the push.
        self.set_running_or_notify_cancel()

    def carry_out(self) -> Any:
        """Make the exchange; a timeout says how long was waited since it was issued."""
        try:
            return self._exchange(self._deadline.remaining())
        except TimeoutError as error:
            if self._deadline.timeout is None:
                raise
            raise self._deadline.error() from error

    def result(self, timeout: float | None = None) -> Any:
        """Return what came of it, waiting for it, or raise its error."""
        if error := self.exception(timeout):
            raise error
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return its error, waiting for its end; None where there is none."""
        if not self.done():
            self._check_thread()
        error = super().exception(timeout)
        if error is not None:
            self._heard(error)
        return error
