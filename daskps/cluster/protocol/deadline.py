"""The time when a call must have ended, and the wait for several calls at once."""

from __future__ import annotations

import asyncio
import time
from copy import copy
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection

T = TypeVar("T")

#: How long a host waits for a caller that takes no byte of an answer: others may wait
#: for its memory.
TAKE_SECONDS = 5.0


class Deadline:
    """When a call must have ended, and what to say if it has not.

    Parameters
    ----------
    timeout : float or None
        Seconds from now; None for ever.
    what : str
        The name of the thing that is waited for.
    """

    def __init__(self, timeout: float | None, what: str) -> None:
        self.what = what
        self.timeout = timeout
        #: When that is, by `time.monotonic`; None for never.
        self.end = None if timeout is None else time.monotonic() + timeout

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return self.end is not None and time.monotonic() >= self.end

    def left(self) -> float:
        """Return the seconds left, or raise TimeoutError."""
        if self.end is None:
            return float("inf")
        left = self.end - time.monotonic()
        if left <= 0:
            raise self.error()
        return left

    def remaining(self) -> float | None:
        """Return the seconds left as a timeout for the next part of a call."""
        return None if self.end is None else self.left()

    def later(self, seconds: float) -> Deadline:
        """Return one that is so many seconds later; it may be over too."""
        found = copy(self)
        if found.end is not None and found.timeout is not None:
            found.end, found.timeout = found.end + seconds, found.timeout + seconds
        return found

    def error(self, where: str = "", *, changes: bool = True) -> TimeoutError:
        """Return the error that says what was waited for, and where.

        `changes` says whether what was sent may have changed a shard.
        """
        at = f": {where}" if where else ""
        # Three digits: what is left of another deadline has more.
        after = f" after {float(f'{self.timeout:.3g}'):g} s" if self.timeout else ""
        sent = "what was sent, each shard has applied once or not at all. Pass"
        return TimeoutError(
            f"timed out{after} waiting for {self.what}{at}; "
            f"{sent if changes else 'pass'} a larger timeout=, or None to wait for ever"
        )


def silence(workers: Collection[str]) -> str:
    """Return what is said of workers that have yet to answer; "" of none."""
    if not workers:
        return ""
    named, n = ", ".join(sorted(workers)[:3]), len(workers)
    more = f" and {n - 3} more" if n > 3 else ""
    return f"{named}{more} to answer, of which one is stopped, or busy"


async def gather(*work: Awaitable[T]) -> list[T]:
    """Await all; at the first error cancel the rest and wait until they stopped."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
