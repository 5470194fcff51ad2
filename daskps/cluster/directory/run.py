"""One run as the directory sees it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from daskps.errors import RunCancelledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from daskps.cluster.directory.entry import StoreEntry


@dataclass(frozen=True)
class EpochReport:
    """The report of a trainer on an epoch."""

    rank: int
    rows: int
    #: Sum over the rows.
    loss: float | None
    seconds: float
    #: Largest number of clocks a live trainer was behind one of its pulls.
    lag: int
    clock: int
    #: Sum of the losses of its first step of the run, and their rows.
    first: tuple[float, int] | None
    #: Bytes that it has sent and read, as numbers and in words of codecs.
    sent_nbytes: int = 0
    sent_encoded_nbytes: int = 0
    received_nbytes: int = 0
    received_encoded_nbytes: int = 0
    #: Where its time went.
    compute_seconds: float = 0.0
    delivery_seconds: float = 0.0
    waiting_seconds: float = 0.0
    #: Messages that were sent again; calls by message, by socket and without either.
    retries: int = 0
    messages: int = 0
    socket_calls: int = 0
    local_calls: int = 0
    #: Values that monitors watch: the number of the monitor, step, name and value.
    records: Sequence[tuple[int, int, str, float]] = ()
    #: How often the slowest trainer was so many clocks behind.
    lags: Sequence[tuple[int, int]] = ()


@dataclass
class CountedCalls:
    """How far the ranks are in calls that all trainers make equally often."""

    #: By rank its clock, its first call at that clock, its last call of all, and the
    #: clock before with its first call.
    places: dict[int, tuple[int, int, int, int, int]] = field(default_factory=dict)

    def note(self, rank: int, clock: int, number: int) -> None:
        """Note which call a rank is at."""
        at, first, last, *before = self.places.get(rank, (-1, 0, -1, -1, 0))
        if clock > at:
            at, first, before = clock, number, [at, first]
        self.places[rank] = at, first, max(number, last), before[0], before[1]

    def place(self, rank: int) -> tuple[int, int, int, int, int]:
        """Return where a rank is, as in `places`."""
        return self.places.get(rank, (0, 0, -1, -1, 0))


@dataclass
class RunState:
    """One run in progress."""

    id: int
    entry: StoreEntry
    client: str
    size: int
    #: Whether a trainer that lost its worker may register again.
    restartable: bool
    #: Whether trainers wait for the client's verdict after each epoch.
    gated: bool
    #: The client's text that describes it to others once it is over.
    described: str = ""
    #: The workers its trainers may be on; all, where it names none.
    workers: Sequence[str] = ()
    #: The name of its codec in messages, and the codec pickled.
    codec: tuple[str, bytes] = ("", b"")
    #: Worker of each rank that has registered and lives.
    ranks: dict[int, str] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    #: Also those that have sent all, of which not all shards have heard yet.
    finishing: set[int] = field(default_factory=set)
    #: Per epoch and rank what the trainer reported.
    reports: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    announced: int = 0
    allowed: int = 0
    stopped: bool = False
    clock: int = 0
    #: Clock, sum of losses and rows of the epoch under way, as each rank told them.
    told: dict[int, tuple[int, float | None, int]] = field(default_factory=dict)
    #: Mean loss over the last epoch that all have ended.
    last_loss: float | None = None
    fenced: Exception | None = None
    #: Memory of the mailboxes that trainers on its machine may fill, as rows of
    #: shard, name, bytes and nonce; how contributions are reduced, pickled; codec.
    mailboxes: dict[str, Any] = field(default_factory=dict)
    #: Whether its trainers go on in rounds.
    bsp: bool = True
    sync: str = "bsp"
    staleness: int = 0
    #: Whether tasks of the graph, not resident trainers, compute the rounds; then the
    #: workers that may hold contributions to them.
    graph: bool = False
    holders: set[str] = field(default_factory=set)
    #: Attempt and round of the newest gradient task the scheduler has forgotten.
    forgotten: tuple[int, ...] = ()
    #: By round the receipts of gradient tasks that the client has yet to hear of.
    receipts: dict[int, Sequence[Any]] = field(default_factory=dict)
    #: Its all-reduces, and the workers that keep what these have come to.
    collectives: CountedCalls = field(default_factory=CountedCalls)
    collecting: set[str] = field(default_factory=set)
    #: Its barriers, how many of them all live trainers have reached, and the least
    #: clock that any of these had then.
    barriers: CountedCalls = field(default_factory=CountedCalls)
    passed: int = 0
    passed_clock: int = 0
    #: Ended epochs and everything else the client wants to hear of.
    events: list[dict[str, Any]] = field(default_factory=list)
    first_event: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    #: By host the request to begin it: each host is asked by itself.
    begun: dict[str, asyncio.Future[Any]] = field(default_factory=dict)
    #: Whether all shards have begun it.
    began: bool = False
    #: The work that ends it on all shards, how long others wait for that, in time of
    #: the event loop, and what it waits for.
    ended: asyncio.Future[None] | None = None
    end_by: float = 0.0
    waits_for: str = "its shards"

    def notify(self) -> None:
        """Wake all tasks that wait for something of this run."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def wait(self, done: Callable[[], bool], seconds: float | None) -> bool:
        """Wait until `done()` or the run is fenced; return whether it was done."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not (done() or self.fenced):
                    await self.changed.wait()
        return done()

    async def met(self, done: Callable[[], bool], seconds: float | None) -> bool:
        """Wait as :meth:`wait` does, and raise where the run is fenced."""
        found = await self.wait(done, seconds)
        if self.fenced:
            raise RunCancelledError(f"run {self.id} is over: {self.fenced}")
        return found

    def tell(self, rank: int, clock: int, loss: float | None, rows: int) -> None:
        """Note how far a trainer is."""
        self.told[rank] = clock, loss, rows
        self.clock = max(self.clock, clock)

    def goes_on(self, rank: int) -> dict[str, Any]:
        """Return where the next trainer of a rank goes on, and how far others are."""
        of = self.collectives.places
        return {
            "allreduces": of.get(rank),
            "barriers": self.barriers.places.get(rank),
            "latest": max((last for _, _, last, *_ in of.values()), default=-1),
        }

    @property
    def live(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in range(self.size) if rank not in self.finished]

    def count_barriers(self) -> bool:
        """Count the barriers that all live trainers have reached; say if one is new."""
        places = [self.barriers.place(rank) for rank in self.live]
        reached = min((last + 1 for _, _, last, *_ in places), default=0)
        is_new = reached > self.passed
        if is_new:
            self.passed, self.passed_clock = reached, min(places)[0]
        return is_new

    def missing(self, number: int) -> list[int]:
        """Return the live trainers that have not called a barrier so often."""
        return [r for r in self.live if self.barriers.place(r)[2] < number]

    @property
    def slowest(self) -> int:
        """Clock of the live trainer that is furthest behind, where trainers tell theirs.

        In rounds none is further than one: it waits for a round that may come to nothing.
        """
        told = (self.told.get(rank, (0,))[0] for rank in self.live if self.told)
        return max(min(told, default=self.clock), self.clock - 1 if self.bsp else 0)

    @property
    def loss(self) -> float | None:
        """Mean loss over the epoch under way, as far as it was told."""
        return mean_loss((loss, rows) for _, loss, rows in self.told.values())

    @property
    def mailboxes_at(self) -> list[Any]:
        """Where the mailboxes are."""
        return list(self.mailboxes.get("rows", ()))

    @property
    def rounds(self) -> dict[str, Any] | None:
        """The facts that the next owner of a shard needs of its rounds, once begun."""
        if not self.mailboxes:
            return None
        return {
            "run": self.id,
            "graph": self.graph,
            # By the task graph, or by trainers, where these keep their last step.
            "is_sent_again": self.graph or (self.keeps_last and not self.fenced),
            "attempts": {r: n for r, n in self.attempts.items() if n > 1},
            "finishing": sorted(self.finishing),
            "n_finished": len(self.finished),
            **self.mailboxes,
        }

    @property
    def keeps_last(self) -> bool:
        """Whether its trainers keep their last step, for a copy that takes over."""
        return self.bsp and self.entry.n_copies > 1

    def mailbox_moved(self, shard: int, place: Sequence[Any]) -> None:
        """Note where the mailboxes in a shard are now."""
        # Not in place: what was sent to others may be under way.
        rows = [row for row in self.mailboxes_at if row[0] != shard]
        self.mailboxes = {**self.mailboxes, "rows": [*rows, [shard, *place]]}

    def survives(self, shards: Sequence[int]) -> bool:
        """Return whether it can go on when others adopt shards of a worker that died.

        In rounds it can if they can have its mailboxes too. Rounds of the task graph
        leave nothing there.
        """
        if not self.bsp:
            return True
        if self.graph:
            return bool(self.mailboxes)
        return {row[0] for row in self.mailboxes_at}.issuperset(shards)


def mean_loss(told: Iterable[tuple[float | None, int]]) -> float | None:
    """Return the mean of sums of losses, each of so many rows; None without any."""
    known = [(loss, rows) for loss, rows in told if loss is not None]
    rows = sum(n for _, n in known)
    return sum(loss for loss, _ in known) / rows if rows else None


def rounds_error(worker: str) -> RunCancelledError:
    """Return what a run in rounds ends with whose open round went with a worker."""
    return RunCancelledError(
        f"worker {worker} died, and with it what trainers had sent it of the open "
        f"round; the store keeps all complete rounds, start the run again"
    )
