"""The turn to restore a store that lost a shard: of one process, while that lives."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from daskps.errors import ConsistencyError

#: How long whoever restores a store may be silent before another one does.
LEASE_SECONDS = 10.0
#: For how long those that ask after a failure hear of that one, before it is tried again.
AGAIN_SECONDS = 5.0


@dataclass(eq=False)
class Lease:
    """The turn to restore one store, by times of the event loop."""

    #: Counts whose turn it is: what an earlier one says is refused.
    token: int = 0
    #: Client or worker that has it.
    holder: tuple[str, str] | None = None
    #: The uid of what it makes, "" where there is nothing yet.
    made: str = ""
    _until: float = 0.0
    #: Why the last one has failed that did, its number, and when anew may be tried.
    _why: str = ""
    _failed: int = 0
    _again_at: float = 0.0
    #: Set when the turn is over, and then replaced.
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    def is_free(self, now: float) -> bool:
        """Return whether nobody has the turn, or nobody who lives."""
        return self.holder is None or now >= self._until

    def failure(self, now: float, tried: int) -> str:
        """Return why the last one to try has failed, "" where one may try.

        A caller that has waited for number `tried`, or not long enough, hears of it.
        """
        heard = now < self._again_at or 0 < tried <= self._failed
        return self._why if heard else ""

    def take(self, holder: tuple[str, str], now: float) -> int:
        """Give somebody the turn; return the number by which it is told from others."""
        self.token += 1
        self.holder, self.made = holder, ""
        self.renew(self.token, now)
        return self.token

    def renew(self, token: int, now: float) -> None:
        """Hear that whoever has the turn is at it.

        Raises
        ------
        ConsistencyError
            If somebody else has it.
        """
        self.check(token)
        self._until = now + LEASE_SECONDS

    def check(self, token: int) -> None:
        """Refuse whoever has not the turn, or not any more."""
        if self.holder is None or token != self.token:
            raise ConsistencyError(
                "this process was silent for too long while it restored a store, and its "
                "turn is over; what it had made was undone"
            )

    def fail(self, why: str, now: float) -> None:
        """Note that whoever had the turn has given up, and why."""
        self._why, self._failed, self._again_at = why, self.token, now + AGAIN_SECONDS
        self.end()

    def end(self) -> None:
        """Note that nobody has the turn any more; those that wait hear of it."""
        self.holder = None
        self._over.set()
        self._over = asyncio.Event()

    async def wait(self, now: float, seconds: float) -> None:
        """Wait until the turn is over, at most so long."""
        over = asyncio.ensure_future(self._over.wait())
        await asyncio.wait({over}, timeout=max(0.0, min(seconds, self._until - now)))
        over.cancel()
