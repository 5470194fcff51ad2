"""Calls of the user's functions where the user's code runs."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, TypeVar

from daskps.cluster.caller.interrupts import LOOK_SECONDS

if TYPE_CHECKING:
    from daskps.cluster.caller.link import Link

_T = TypeVar("_T")
#: Calls a function of the user's where the user's code runs.
UserCall = Callable[..., Awaitable[Any]]
#: How long a run that was cancelled may take to clean up.
CLEAN_UP_SECONDS = 10.0


class Pump:
    """Carries calls of the user's functions to the user's own thread.

    The driver of a run is one coroutine. Callbacks of a synchronous client must run in
    the thread that called the run: on the event loop they could not use the store.
    """

    def __init__(self) -> None:
        self._calls: queue.Queue[Any] = queue.Queue()

    async def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run a function in the thread that pumps, and await its result."""
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._calls.put((future, function, args))
        return await future

    def drive(
        self,
        link: Link,
        main: Callable[[UserCall], Awaitable[_T]],
        seconds: float = CLEAN_UP_SECONDS,
    ) -> _T:
        """Run the coroutine on the link's loop, its calls here, until it ends.

        If Ctrl-C cancels it, it may take so many seconds to clean up, or until Ctrl-C
        comes again.
        """
        pending = link.start(lambda: main(self.call))
        try:
            pending.add_done_callback(lambda _: self._calls.put(None))
            while (entry := self._calls.get()) is not None:
                self._answer(link, *entry)
        except BaseException:
            try:
                pending.stop()
                # Let a cancelled run clean up before its caller goes on. In steps: a
                # signal just before a wait does not end it.
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    if wait([pending], LOOK_SECONDS).done:
                        break
            except BaseException:
                pending.stop()
                raise
            raise
        return pending.result()

    def _answer(
        self, link: Link, future: Any, function: Callable[..., Any], args: Any
    ) -> None:
        def settle(method: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                method(value)

        try:
            result = function(*args)
        except Exception as error:  # noqa: BLE001 - the run raises it, by the future
            link.loop.add_callback(settle, future.set_exception, error)
        else:
            link.loop.add_callback(settle, future.set_result, result)


async def call_directly(function: Callable[..., _T], *args: Any) -> _T:
    """Call a user's function of an asynchronous client, off the event loop."""
    return await asyncio.to_thread(function, *args)
