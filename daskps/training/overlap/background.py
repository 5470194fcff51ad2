"""The thread that carries out a trainer's operations while its loop goes on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from daskps.cluster.wire.deadline import Deadline
from daskps.errors import RunCancelledError
from daskps.training.overlap.backlog import Backlog
from daskps.training.overlap.operation import Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.caller.session import Session
    from daskps.cluster.caller.targets import Target


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
            What went wrong with one of those before, and nobody has heard of.
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
            What went wrong with one of them and nobody has heard of.
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
            self.abandon()
            return
        try:
            self.settle(None, "its end")
        finally:
            if thread := self._close():
                thread.join()

    def abandon(self) -> None:
        """Carry out no more, for the loop has failed.

        What is under way ends with the run, which is about to be fenced.
        """
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
                # First the future: a thread that has waited for all finds all of them done.
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
