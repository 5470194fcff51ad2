"""What must hold in every simulation, and who looks whether it does."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.node import HOSTS
from daskps.errors import DaskPSError, IllegalStateError
from daskps.shards.memory.format import (
    GENERATION,
    NONCE,
    ROWS_SEQUENCE,
    RUN,
    VERSION,
)
from daskps.shards.memory.publication import Publication
from tests.invariants import validate
from tests.simulator.ground import CLOCK, put
from tests.simulator.loop import PROCESS
from tests.simulator.machines import SimFile

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from daskps.cluster.host.hosted import HostedShard
    from daskps.cluster.protocol.messages import Answer, Call
    from daskps.epochs import Epochs
    from daskps.shards.memory.segment import Segment
    from daskps.shards.shard import Shard
    from tests.simulator.loop import Process

T = TypeVar("T")
#: Deadline of calls outside runs.
SECONDS = 8.0
#: How much later than its deadline a call may end once faults have stopped.
GRACE_SECONDS = 1.0
#: With what a call may end where there are faults; all else is a finding.
EXPECTED = (DaskPSError, TimeoutError, OSError)


class FoundError(Exception):
    """Something that must not be was found; the simulation ends with it."""


@dataclass(frozen=True)
class Restored:
    """What a store holds that was made of a checkpoint."""

    #: Arrays and rows by name, and "ids".
    values: Any
    #: Where it is in its epochs.
    epochs: Epochs


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
    #: By process and shard: at what changes of rows its tables were validated last.
    _rows: dict[tuple[str, Shard], tuple[int, ...]] = field(default_factory=dict)
    #: By nonce of a segment: the last version that it has shown.
    _versions: dict[int, int] = field(default_factory=dict)

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
        for hosted in _shards(process):
            # What nobody has changed since is as it was.
            segment, words = hosted.shard.segment, hosted.shard.segment.header
            rows = segment.flip, words[ROWS_SEQUENCE], hosted.shard.generation
            known = self._rows.get((process.name, hosted.shard))
            self._rows[process.name, hosted.shard] = rows
            try:
                validate(hosted.shard, tables=rows != known)
                _check_memory(hosted)
            except IllegalStateError as error:
                self.wrong(f"{process.name}, shard {hosted.index}: {error}")

    def look_for_runs(self, processes: Iterable[Process]) -> None:
        """Find shards that are in a run when all runs are over."""
        for process in processes:
            for hosted in _shards(process):
                if run := int(hosted.shard.segment.current.fixed[RUN]):
                    self.wrong(
                        f"{process.name}, shard {hosted.index}: still in run {run}"
                    )

    def look_for_copies(self, processes: Iterable[Process]) -> None:
        """Find copies of cuts when all of these are over."""
        for process in processes:
            if (host := _host(process)) is not None and (n := host.snapshots.nbytes):
                self.wrong(f"{process.name} keeps {n:,} bytes of cuts that are over")

    def published(self, segment: Segment) -> None:
        """Compare what a shard shows as a version with what that was before."""
        nonce, flip = int(segment.words[NONCE]), segment.flip
        record = segment.record(flip)
        version = int(record.fixed[VERSION])
        pieces = range(len(segment.pieces))
        weights = b"".join(segment.weights_of(record, p).tobytes() for p in pieces)
        state = hashlib.blake2b(weights, digest_size=8).hexdigest()
        known = self._states.setdefault((nonce, version), state)
        if nonce and known != state:
            self.wrong(
                f"version {version} names two states of shard {segment.pieces[0].shard}"
            )
        if nonce and version < self._versions.get(nonce, 0):
            self.wrong(f"version {version} of shard {segment.pieces[0].shard} is back")
        self._versions[nonce] = version

    def follow_publications(self) -> None:
        """See every publication from here on."""
        commit = Publication.commit

        def commit_and_look(publication: Publication) -> None:
            commit(publication)
            self.published(publication.segment)

        put(Publication, commit=commit_and_look)

    def follow_calls(self) -> None:
        """See every call that a host has answered from here on."""
        call_host = ShardHost.call

        async def call_and_look(host: ShardHost, call: Call) -> list[Answer]:
            # As they came: what they were taken for is another matter.
            meant = {part.shard: part.step.generation for part in call.parts}
            # One that was handed over and taken back meanwhile has what it had before.
            came = {
                part.shard: hosted.shard.generation
                for part in call.parts
                if (hosted := host.shards.get((call.store, part.shard)))
            }
            answers = await call_host(host, call)
            for answer in answers if call.step.producer or call.step.tick else ():
                hosted = host.shards.get((call.store, answer.shard))
                # One that it has handed over meanwhile has another generation.
                if hosted is None or hosted.is_released:
                    continue
                was_meant = came.get(answer.shard) == meant[answer.shard]
                if not (answer.error or answer.parked or was_meant):
                    self._acknowledged(hosted, meant[answer.shard])
            return answers

        put(ShardHost, call=call_and_look)

    def _acknowledged(self, hosted: HostedShard, meant: int) -> None:
        generation = int(hosted.shard.segment.words[GENERATION])
        if generation != meant:
            self.wrong(
                f"shard {hosted.index} of generation {generation} has acknowledged a "
                f"call meant for generation {meant}"
            )

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
        except RuntimeError as error:
            process = PROCESS.get()
            if process is None or not process.is_closing:
                self.wrong(f"{what} ended with {error!r}")
            # Dask has closed the connections of a worker that ends.
            raise OSError(f"{what}: its worker closes") from error
        except BaseException as error:
            self.wrong(f"{what} ended with {error!r}")
            raise FoundError(what) from error
        finally:
            task.cancel()
        self._count("ok")
        return result

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


def _host(process: Process) -> ShardHost | None:
    return HOSTS.get(f"sim://{process.name}")


def _shards(process: Process) -> list[HostedShard]:
    host = _host(process)
    return [] if host is None else [*host.shards.values()]


def _check_memory(hosted: HostedShard) -> None:
    """Find memory that a shard uses and nobody has taken: on a machine it may not be there."""
    file = None if hosted.block is None else hosted.block.file
    if isinstance(file, SimFile) and (held := file.held_nbytes) != file.taken_nbytes:
        raise IllegalStateError(
            f"it uses {held:,} bytes of memory, {file.taken_nbytes:,} were taken"
        )
