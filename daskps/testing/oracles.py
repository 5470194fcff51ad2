"""What must hold in every simulation, and who looks whether it does."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from daskps.cluster.host import HOSTS
from daskps.errors import DaskPSError, IllegalStateError
from daskps.shards.segment import NONCE, VERSION
from daskps.shards.update import Publication
from daskps.testing.ground import CLOCK, put

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from daskps.shards.segment import Segment
    from daskps.testing.loop import Process

T = TypeVar("T")
#: How much later than its deadline a call may end once faults have stopped.
GRACE_SECONDS = 1.0
#: With what a call may end where there are faults; all else is a finding.
EXPECTED = (DaskPSError, TimeoutError, OSError)


class FoundError(Exception):
    """Something that must not be was found; the simulation ends with it."""


@dataclass(eq=False)
class Watch:
    """Looks at shards, versions and calls, and remembers what was wrong first."""

    finding: str = ""
    #: When no fault comes any more.
    quiet_at: float = float("inf")
    n_calls: int = 0
    #: Outcomes of calls by kind, for the report.
    outcomes: dict[str, int] = field(default_factory=dict)
    _found: asyncio.Event = field(default_factory=asyncio.Event)
    #: By nonce and version of a segment: what its weights were.
    _states: dict[tuple[int, int], str] = field(default_factory=dict)

    def wrong(self, what: str) -> None:
        """Note a finding; the first one counts."""
        if not self.finding:
            self.finding = f"{what} (at {CLOCK.elapsed:.4f} s)"
        self._found.set()

    async def until_found(self) -> None:
        """Wait for a finding."""
        await self._found.wait()

    # -- shards --------------------------------------------------------------

    def look(self, process: Process) -> None:
        """Validate the shards of a process: it has just handled a message."""
        host = HOSTS.get(f"sim://{process.name}")
        for slot in () if host is None else list(host.slots.values()):
            try:
                slot.shard.validate()
            except IllegalStateError as error:
                self.wrong(f"{process.name}, shard {slot.index}: {error}")

    def published(self, segment: Segment) -> None:
        """Compare what a shard shows as a version with what that was before."""
        nonce, flip = int(segment.words[NONCE]), segment.flip
        version = int(segment.record(flip).fixed[VERSION])
        weights = b"".join(w.tobytes() for w in segment.weights[flip & 1])
        state = hashlib.blake2b(weights, digest_size=8).hexdigest()
        known = self._states.setdefault((nonce, version), state)
        if nonce and known != state:
            self.wrong(
                f"version {version} names two states of shard {segment.pieces[0].shard}"
            )

    def follow_publications(self) -> None:
        """See every publication from here on."""
        finish = Publication.finish

        def finish_and_look(publication: Publication) -> None:
            finish(publication)
            self.published(publication.segment)

        put(Publication, finish=finish_and_look)

    # -- calls ---------------------------------------------------------------

    async def call(self, what: str, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Await a call whose deadline is so far away; it must end by then.

        Raises
        ------
        DaskPSError, TimeoutError, OSError
            What the call ends with.
        FoundError
            Where it ends with anything else, or not at all.
        """
        self.n_calls += 1
        task, began = asyncio.ensure_future(work), CLOCK.now
        try:
            while True:
                limit = max(began + seconds, self.quiet_at) + GRACE_SECONDS
                left = 1.0 if limit == float("inf") else limit - CLOCK.now
                if (await asyncio.wait({task}, timeout=max(0.0, left)))[0]:
                    break
                if CLOCK.now >= limit and self.quiet_at < float("inf"):
                    where = [str(frame) for frame in task.get_stack(limit=3)]
                    self.wrong(f"{what} did not end within {seconds:g} s: {where}")
                    raise FoundError(what)
            result = task.result()
        except EXPECTED as error:
            self._count(type(error).__name__)
            if isinstance(error, IllegalStateError):
                self.wrong(f"{what} ended with {error!r}")
            raise
        except (FoundError, asyncio.CancelledError):
            raise
        except BaseException as error:
            self.wrong(f"{what} ended with {error!r}")
            raise FoundError(what) from error
        finally:
            task.cancel()
        self._count("ok")
        return result

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
