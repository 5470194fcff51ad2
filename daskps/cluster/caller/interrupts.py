"""Calls of the main thread, in which Ctrl-C may raise between any two lines.

One such place is between taking a lock and the `try` that gives it back: the shard
would stay locked. So another thread does the work that takes locks, and the main thread
waits for it.
"""

from __future__ import annotations

import concurrent.futures
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from daskps.usercode import is_main

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
#: How long to wait for a call that was interrupted.
_STOP_SECONDS = 5.0
#: How soon Ctrl-C is seen at the latest.
LOOK_SECONDS = 0.2
#: Made when the main thread first needs it; it ends with the process's last client.
_EXECUTOR: list[ThreadPoolExecutor] = []
os.register_at_fork(after_in_child=_EXECUTOR.clear)


def shielded(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """Do work that Ctrl-C must not end half way.

    Parameters
    ----------
    work : callable
        The work.
    stop : callable
        Makes it end soon, from another thread.

    Returns
    -------
    T
        The value that the work returns.
    """
    if not is_main():
        return work()
    # Made here: Ctrl-C may come before `submit` has returned a future.
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by the main thread, which waits for it
            future.set_exception(error)

    try:
        _submit(run)
        while True:
            try:
                return future.result(LOOK_SECONDS)
            except TimeoutError:
                # A signal just before the wait does not end it.
                if future.done():
                    raise
    except BaseException:
        if not future.cancel():
            stop()
            # Until it ends the work may read or fill the caller's arrays.
            concurrent.futures.wait([future], _STOP_SECONDS)
        raise


def end() -> None:
    """End the threads, each after the call that it carries out."""
    while _EXECUTOR:
        # Taken out first: `_submit` asks by that whether the executor was ended here.
        _EXECUTOR.pop().shutdown(wait=False)


def _submit(run: Callable[[], None]) -> None:
    try:
        executor = _EXECUTOR[0]
    except IndexError:
        executor = ThreadPoolExecutor(4, "daskps-main")
        _EXECUTOR.append(executor)
    try:
        executor.submit(run)
    except RuntimeError:
        if executor in _EXECUTOR:  # the interpreter ends
            raise
        # Another thread has closed the last client; the call itself says so.
        _submit(run)
