"""Calls of the user's code: whatever it raises is an error of that one call.

A process of the cluster serves others too. An exception that is no `Exception` would
leave its thread, its event loop and the process with it: `SystemExit` of a call of
`sys.exit`, `KeyboardInterrupt` raised by hand, `asyncio.CancelledError`.
`StopIteration`, of `next()` at an iterator's end, is one; but no future takes it, and a
caller that waits for one would wait for ever.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import Future
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

T = TypeVar("T")
#: How many times the main thread is inside of `holding_interrupts`.
_held = 0
#: The thread that Ctrl-C interrupts.
_main_ident = threading.main_thread().ident


def is_main() -> bool:
    """Return whether this is the thread that Ctrl-C interrupts."""
    # Every push asks: a thread of Dask's has no need to look itself up first.
    return threading.get_ident() == _main_ident


class user_code(ContextDecorator):  # noqa: N801  (named like those of contextlib)
    """The context in which code of the user's runs; called with a function it guards that.

    Exceptions pass, but `StopIteration`; all else becomes a RuntimeError. Only in the main
    thread, and not where Ctrl-C is held, a KeyboardInterrupt passes too: it is the user's.

    Parameters
    ----------
    what : str
        The name of the code, as in "the gradient".

    Raises
    ------
    RuntimeError
        If the code did something else than return or raise an `Exception`.

    Examples
    --------
    >>> import sys
    >>> with user_code("the gradient"):
    ...     sys.exit(3)
    Traceback (most recent call last):
        ...
    RuntimeError: the gradient called sys.exit(3); raise an error instead: ...
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, StopIteration):
            raise RuntimeError(
                f"{self._what} {_deed(error)}, as next() does at the end of an iterator; "
                f"begin a new one there, or raise an error of your own"
            ) from error
        if error is None or isinstance(error, Exception):
            return
        if isinstance(error, KeyboardInterrupt) and is_main() and not _held:
            return
        raise RuntimeError(
            f"{self._what} {_deed(error)}; raise an error instead: this call ends, and "
            f"not the process, which serves others too"
        ) from error


def _deed(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else repr(error.code)})"
    said = str(error)
    return f"raised {type(error).__name__}{f' ({said})' if said else ''}"


class UserFuture(Future[T]):
    """A future that the user holds: it can also be awaited, whatever its callbacks do."""

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Have a function called with this future, at its end."""
        super().add_done_callback(user_code("the callback of a future")(fn))

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()


class holding_interrupts:  # noqa: N801  (as `user_code`)
    """A context of the main thread at whose end Ctrl-C is raised, and not within.

    For what must not end half way. A KeyboardInterrupt within is one that code of the
    user's raised by hand. In other threads it does nothing: they are not interrupted.
    """

    __slots__ = ("_came", "_main", "_raises")

    def __enter__(self) -> None:
        global _held
        self._main = is_main()
        if self._main:
            self._came: list[Any] = []
            # Other handlers (an event loop's, a command's) raise nothing in the middle.
            self._raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            _held += 1
            if self._raises:
                signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._came.append(frame)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        global _held
        if self._main:
            _held -= 1
            if self._raises:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._came:
                signal.default_int_handler(signal.SIGINT, self._came[0])


def _forked() -> None:
    global _main_ident
    _main_ident = threading.get_ident()


os.register_at_fork(after_in_child=_forked)
