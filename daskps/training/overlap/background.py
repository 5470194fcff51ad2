"""Operations of a trainer beside its loop: futures, their order, and the thread.

Operations take effect in the order in which they were issued, but for pushes without
a tick that wait side by side: those that share no parameter may change places, and
the one with the higher priority goes first. Pushes of one parameter keep their order:
a sum of three would have other bits in another.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from daskps.cluster.protocol.deadline import Deadline
from daskps.errors import RunCancelledError
from daskps.usercode import UserFuture

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.caller.session import Session
    from daskps.cluster.caller.targets import Target


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


class Backlog:
    """Operations of one trainer that are not done."""

    def __init__(self) -> None:
        self.waiting: list[Operation] = []
        self.running: Operation | None = None
        #: The error of an operation, until somebody has heard of it.
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


class Background:
    """Operations of one trainer, carried out one after the other by one thread.

    There is a thread from the first one on. Leaving its context waits for all that was
    issued and raises what nobody has heard of, but after an error of the loop's own:
    then what waits is dropped.

    Parameters
    ----------
    session : Session
        The trainer's place in its run.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._backlog = Backlog()
        #: Told of every change of the backlog.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        #: Whether anything was ever issued; before that nothing has to be settled.
        self.is_used = False
        self._closed = False
        #: The clock once all has been carried out.
        self._clock = 0

    @property
    def clock(self) -> int:
        """Ticks that were issued; those of operations that failed do not count."""
        if self._backlog.quiet:
            return self.session.clock
        with self._changed:
            return self._clock if self._backlog.busy else self.session.clock

    @property
    def quiet(self) -> bool:
        """Whether nothing is under way and no error waits to be heard of."""
        return self._backlog.quiet

    def read(self, targets: Sequence[Target], deadline: Deadline) -> Operation:
        """Have parameters read at the clock that the trainer will have by then."""

        def exchange(seconds: float | None) -> Any:
            self.session.read_all(targets, seconds)
            return targets[-1].finish()

        return self.submit(exchange, deadline)

    def submit(
        self,
        exchange: Callable[[float | None], Any],
        deadline: Deadline,
        *,
        tick: bool = False,
        passing: frozenset[int] | None = None,
        priority: int = 0,
    ) -> Operation:
        """Have an exchange made after all that were issued before.

        Parameters
        ----------
        exchange, deadline
            As of :class:`Operation`.
        tick : bool
            Whether it ends a step.
        passing, priority
            As of :class:`Operation`.

        Returns
        -------
        Operation
            Its future.

        Raises
        ------
        Exception
            The error of an operation before, where nobody has heard of it.
        """
        operation = Operation(
            exchange,
            deadline,
            self._heard,
            self._check_thread,
            passing=passing,
            priority=priority,
        )
        with self._changed:
            self._backlog.check()
            if not self._backlog.busy:
                self._clock = self.session.clock
            self._clock += tick
            self.is_used = True
            self._backlog.put(operation)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve,
                    name=f"daskps-trainer-{self.session.rank}",
                    daemon=True,
                )
                self._thread.start()
            self._changed.notify_all()
        return operation

    def settle(self, seconds: float | None, what: str) -> float | None:
        """Wait for all that was issued; return what is left of the seconds.

        Raises
        ------
        TimeoutError
            If that takes longer; nothing is given up for it.
        RuntimeError
            In the thread that carries them out.
        Exception
            The error of one of them, where nobody has heard of it.
        """
        if self._backlog.quiet:
            return seconds
        self._check_thread()
        where = f"trainer {self.session.rank} before {what}"
        deadline = Deadline(seconds, f"the operations issued by {where}")
        with self._changed:
            while self._backlog.busy:
                self._changed.wait(deadline.remaining())
            self._backlog.check()
        return deadline.remaining()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is not None:
            # The operation under way ends with the run, which is about to be fenced.
            with self._changed:
                dropped = self._backlog.drop()
            self._close()
            for operation in dropped:
                operation.set_exception(
                    RunCancelledError(
                        f"the loop of trainer {self.session.rank} failed before this was "
                        f"sent"
                    )
                )
            return
        try:
            self.settle(None, "its end")
        finally:
            if thread := self._close():
                thread.join()

    def _close(self) -> threading.Thread | None:
        """Have the thread end once nothing waits; return it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self._thread

    def _heard(self, error: BaseException) -> None:
        with self._changed:
            self._backlog.heard(error)

    def _check_thread(self) -> None:
        """Refuse to wait in the thread that would have to end the wait."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                f"trainer {self.session.rank} would wait for itself: callbacks of "
                f"its futures run in the thread that carries out what it has issued; "
                f"wait in the loop instead"
            )

    # -- in the thread -------------------------------------------------------

    def _serve(self) -> None:
        while operation := self._next():
            try:
                found = operation.carry_out()
            except BaseException as error:  # noqa: BLE001 - its future's to raise
                with self._changed:
                    failed = self._backlog.fail(error)
                    self._changed.notify_all()
                for other in failed:
                    other.set_exception(error)
            else:
                # First the future: a thread that has waited for all finds all of them
                # done.
                operation.set_result(found)
                with self._changed:
                    self._backlog.done()
                    self._changed.notify_all()

    def _next(self) -> Operation | None:
        """Wait for something to do; nothing where the thread shall end."""
        with self._changed:
            while not (operation := self._backlog.take()):
                if self._closed or self._backlog.cancelled is not None:
                    self._thread = None
                    break
                self._changed.wait()
            return operation
