"""The future of a call that an event loop carries out."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import InvalidStateError
from typing import TYPE_CHECKING, Any, TypeVar

from daskps.usercode import UserFuture

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class CallFuture(UserFuture[T]):
    """A future of work on an event loop; cancelling it cancels that.

    Parameters
    ----------
    loop : IOLoop
        The event loop.
    """

    def __init__(self, loop: Any) -> None:
        super().__init__()
        self._loop = loop
        #: The one thread that wakes the waiting ones after a cancellation holds this
        #: lock.
        self._told = threading.Lock()
        #: Kept so that it is not collected half way.
        self.task: asyncio.Future[T] | None = None

    def take(self, task: asyncio.Future[T]) -> None:
        """Take over the outcome of the task behind the future."""
        error = None if task.cancelled() else task.exception()
        # The caller's thread may cancel it meanwhile.
        with contextlib.suppress(InvalidStateError):
            if task.cancelled():
                self._cancel()
            elif error:
                self.set_exception(error)
            else:
                self.set_result(task.result())

    def cancel(self) -> bool:
        """Cancel the future and the work behind it."""
        done = self._cancel()
        if done:
            self.stop()
        return done

    def _cancel(self) -> bool:
        """Cancel it and wake waiting threads, in `wait` and `as_completed` as well."""
        done = super().cancel()
        # Once: a second call raises. No thread lets go of the lock.
        if done and self._told.acquire(blocking=False):
            self.set_running_or_notify_cancel()
        return done

    def stop(self) -> None:
        """Cancel the work behind it, also where it is about to begin."""

        def cancel() -> None:
            if self.task is not None:
                self.task.cancel()

        self._loop.add_callback(cancel)
