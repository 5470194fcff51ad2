"""The thread that carries out a trainer's operations while its loop goes on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from daskps.cluster.wire.deadline import Deadline
from daskps.errors import RunCancelledError
from daskps.training.overlap.backlog import Backlog
from daskps.training.overlap.operation import Operation, Push, Read

if TYPE_CHECKING:
    from daskps.cluster.caller.session import Session

#: How long the thread waits for more to do before it ends; the next one is made in
#: less than a millisecond. Of a run that was cancelled nothing is left after this.
IDLE_SECONDS = 0.5


class Background:
    """Operations of one trainer, carried out one after the other by one thread.

    There is a thread only where there was something to do lately. Leaving its context
    waits for all that was issued and raises what nobody has heard of, but after an
    error of the loop's own: then what waits is dropped.

    Parameters
    ----------
    session : Session
        The trainer's place in its run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._backlog = Backlog()
        lock = threading.Lock()
        self._work, self._idle = threading.Condition(lock), threading.Condition(lock)
        self._thread: threading.Thread | None = None
        self._closed = False
        #: The clock once all has been carried out.
        self._clock = 0

    @property
    def clock(self) -> int:
        """Ticks that were issued; those of operations that failed do not count."""
        if self._backlog.quiet:
            return self._session.clock
        with self._work:
            return self._clock if self._backlog.busy else self._session.clock

    @property
    def quiet(self) -> bool:
        """Whether nothing is under way and no error waits to be heard of."""
        return self._backlog.quiet

    def submit(self, request: Read | Push) -> Operation:
        """Have a request carried out after all that were issued before.

        Raises
        ------
        Exception
            What went wrong with one of those and nobody has heard of.
        """
        operation = Operation(request, self._heard, self._check_thread)
        with self._work:
            self._backlog.check()
            if not self._backlog.busy:
                self._clock = self._session.clock
            self._clock += isinstance(request, Push) and request.tick
            self._backlog.put(operation)
            if self._thread is None:
                self._closed = False
                self._thread = threading.Thread(
                    target=self._serve,
                    name=f"daskps-trainer-{self._session.rank}",
                    daemon=True,
                )
                self._thread.start()
            self._work.notify()
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
            What went wrong with one of them and nobody has heard of.
        """
        if self._backlog.quiet:
            return seconds
        self._check_thread()
        where = f"trainer {self._session.rank} before {what}"
        deadline = Deadline(seconds, f"the operations issued by {where}")
        with self._work:
            while self._backlog.busy:
                left = deadline.left()
                self._idle.wait(None if left == float("inf") else left)
            self._backlog.check()
        return deadline.remaining()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is not None:
            self.abandon()
            return
        try:
            self.settle(None, "its end")
        finally:
            self._end()

    def abandon(self) -> None:
        """Carry out no more, for the loop has failed.

        What is under way ends with the run, which is about to be fenced.
        """
        with self._work:
            dropped = self._backlog.drop()
        self._end(wait=False)
        for operation in dropped:
            operation.set_exception(
                RunCancelledError(
                    f"the loop of trainer {self._session.rank} failed before this was "
                    f"sent"
                )
            )

    def _end(self, *, wait: bool = True) -> None:
        with self._work:
            self._closed = True
            self._work.notify()
            thread = self._thread
        if wait and thread is not None:
            thread.join()

    def _heard(self, error: BaseException) -> None:
        with self._work:
            self._backlog.heard(error)

    def _check_thread(self) -> None:
        """Refuse to wait in the thread that would have to end the wait."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                f"trainer {self._session.rank} would wait for itself: callbacks of "
                f"its futures run in the thread that carries out what it has issued; "
                f"wait in the loop instead"
            )

    # -- in the thread -------------------------------------------------------

    def _serve(self) -> None:
        while operation := self._next():
            try:
                found = _timed(self._session, operation.request)
            except BaseException as error:  # noqa: BLE001 - its future's to raise
                with self._work:
                    failed = self._backlog.fail(error)
                    self._idle.notify_all()
                for other in failed:
                    other.set_exception(error)
            else:
                # First the future: a thread that has waited for all finds all of them done.
                operation.set_result(found)
                with self._work:
                    self._backlog.done()
                    if not self._backlog.busy:
                        self._idle.notify_all()

    def _next(self) -> Operation | None:
        """Wait for something to do; nothing where the thread shall end."""
        with self._work:
            while not (operation := self._backlog.take()):
                over = self._closed or self._backlog.cancelled is not None
                if over or not (self._work.wait(IDLE_SECONDS) or self._backlog.waiting):
                    self._thread = None
                    break
            return operation


def _timed(session: Session, request: Read | Push) -> Any:
    """Carry a request out; a timeout says how long was waited since it was issued."""
    try:
        return _carry_out(session, request)
    except TimeoutError as error:
        if request.deadline.timeout is None:
            raise
        raise request.deadline.error() from error


def _carry_out(session: Session, request: Read | Push) -> Any:
    """Make the exchange of a request; return what it gets."""
    seconds = request.deadline.remaining()
    if isinstance(request, Read):
        session.read(request.target, seconds)
        return request.target.finish()
    return session.deliver(
        request.arrays,
        seconds,
        kind=request.kind,
        weight=request.weight,
        tick=request.tick,
        target=request.target,
    )
