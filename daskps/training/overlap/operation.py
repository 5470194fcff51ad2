"""What a trainer asks for in the background, and the future of what it asked for."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daskps.cluster.caller.routes import GRADIENT, Target
from daskps.usercode import CALLBACK, guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from daskps.cluster.wire.deadline import Deadline


@dataclass(frozen=True, slots=True)
class Read:
    """Read parameters at the clock the trainer will have by then."""

    target: Target
    deadline: Deadline


@dataclass(frozen=True, slots=True)
class Push:
    """Deliver checked arrays, with or without a tick, and perhaps read afterwards."""

    #: Flat arrays by parameter index.
    arrays: Mapping[int, np.ndarray[Any, np.dtype[Any]]]
    deadline: Deadline
    weight: float = 1.0
    tick: bool = True
    priority: int = 0
    kind: str = GRADIENT
    target: Target | None = None


class Operation(Future[Any]):
    """The future of a request; it can also be awaited, and not be cancelled.

    Parameters
    ----------
    request : Read or Push
        What is to be done.
    heard : callable
        Called with the error that somebody has got from this future.
    check_thread : callable, optional
        Called before a thread waits; raises where that would be for ever.
    """

    def __init__(
        self,
        request: Read | Push,
        heard: Callable[[BaseException], None],
        check_thread: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.request = request
        self._heard, self._check_thread = heard, check_thread
        # Others may count on it: a pull on the tick before it, a round on the push.
        self.set_running_or_notify_cancel()

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Have a function called with this future, at its end."""
        super().add_done_callback(guarded(fn, CALLBACK))

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

    def __await__(self) -> Any:
        return asyncio.wrap_future(self).__await__()
