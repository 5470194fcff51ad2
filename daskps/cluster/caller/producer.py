"""Identity and sequence numbers of pushes outside runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection
from contextlib import asynccontextmanager, contextmanager, suppress
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from daskps.cluster.wire.deadline import Deadline
from daskps.shards.producers import WINDOW

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

    from daskps.cluster.caller.link import Link

T = TypeVar("T")
#: Tasks of one process that may push at once, each with an identity of its own.
MOST_TASKS = 1024
#: What is said of a push that is given up before it has left.
_UNSENT = {"is_answered": False, "is_sent": False}
#: Called with identity and floor once pushes that were given up are below the floor.
Announce = Callable[[int, int], None]


def producer_of(link: Link, uid: str, task: tuple[Any, float] | None) -> Producer:
    """Return the identity of a task's pushes to a store, or of all others from here.

    Handles share it: one for each would fill the shards' tables with producers of
    which nobody can say that they have ended.
    """
    known: dict[Any, Producer] = link.producers
    # Here too: each push of a handle asks.
    if (found := known.get((uid, task))) is not None:
        return found
    return _kept(known, (uid, task), lambda: Producer(task))


def _kept(known: dict[Any, T], key: Any, make: Callable[[], T]) -> T:
    """Return what is known by a key, made where it is new.

    Nobody here hears that a task has ended: of too many the first is forgotten.
    """
    if (found := known.get(key)) is not None:
        return found
    while len(known) >= MOST_TASKS and key not in known:
        known.pop(next(iter(known)), None)
    return known.setdefault(key, make())


class Turn(NamedTuple):
    """The sequence number of a push, and below which all others are settled."""

    number: int
    floor: int
    #: Which pushes before it were given up, as far as shards have to be told.
    given_up: tuple[int, ...] = ()


class Producer:
    """Identity and sequence numbers of the pushes of one task, or of all handles.

    Those of all handles of a store in this process share one, see :func:`producer_of`.
    Pushes are numbered in the order of their calls, and none leaves while one 32 or more
    older is unanswered: the shards know only within a window what they have applied. A task may be
    tried again, from its first number on, so its pushes say which others were given up,
    until each shard that these were meant for has answered one that leaves them behind.
    """

    SPREAD = 32

    def __init__(self, task: tuple[Any, float] | None = None, nth: int = 0) -> None:
        #: Key and start of the task that pushes, if one does; which of its producers.
        self._task, self._nth = task, nth
        self.id = 0
        self._next = 0
        #: Pushes that have a number and no end, and below which there are none.
        self._open: set[int] = set()
        self._floor = 0
        #: Pushes that were given up, of which the shards have not heard.
        self._given_up: set[int] = set()
        #: The same of shards whose window has yet to leave it behind, and all of them.
        self._unheard: dict[int, set[int]] = {}
        self._listed: tuple[int, ...] = ()
        self._lock = threading.RLock()
        self._turn = threading.Condition(self._lock)
        #: How many threads wait for an older push to end, and who does on event loops.
        self._n_waiting = 0
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []

    async def identify(self, link: Link) -> None:
        """Have the directory issue an identity, at the first push."""
        if not self.id:
            kind, owner = ("task", self._task[0]) if self._task else link.owner
            asked = {"kind": kind, "owner": owner, "nth": self._nth}
            self._take(await link.directory("producer", **asked))

    def _take(self, number: int) -> None:
        # Pushes that start together all ask; the first answer counts for all.
        self.id = self.id or number

    def take(self, n: int) -> Sequence[int]:
        """Give the next pushes numbers; each has a turn then, or is given up.

        A task that is tried again numbers them alike, whatever they wait for.
        """
        with self._lock:
            first = self._next
            self._next += n
            self._open.update(range(first, self._next))
            return range(first, self._next)

    def give_up(
        self, numbers: Iterable[int], announce: Announce, shards: Collection[int]
    ) -> None:
        """Give up those pushes that have had no turn."""
        for number in sorted(self._open.intersection(numbers)):
            self.end(number, announce, shards, **_UNSENT)

    def turn(
        self,
        deadline: Deadline,
        announce: Announce,
        shards: Collection[int] = (),
        number: int = -1,
    ) -> HeldTurn:
        """Hold a sequence number, the next one, while its push to some shards is under way."""
        found = self._begin(number)
        if not isinstance(found, Turn):
            number = found
            try:
                found = self._waited(number, deadline)
            except BaseException:
                self.end(number, announce, shards, **_UNSENT)
                raise
        return HeldTurn(self, found, announce, shards)

    def _waited(self, number: int, deadline: Deadline) -> Turn:
        """Wait in a thread until no older push is too far behind."""
        with self._turn:
            self._n_waiting += 1
            try:
                while not isinstance(found := self._begin(number), Turn):
                    self._turn.wait(deadline.remaining())
                return found
            finally:
                self._n_waiting -= 1

    @asynccontextmanager
    async def turn_async(
        self,
        deadline: Deadline,
        announce: Announce,
        shards: Collection[int] = (),
        number: int = -1,
    ) -> AsyncIterator[Turn]:
        """Hold a sequence number, without blocking the event loop."""
        found = self._begin(number)
        if not isinstance(found, Turn):
            number = found
            try:
                found = await self._called(number, deadline)
            except BaseException:
                self.end(number, announce, shards, **_UNSENT)
                raise
        with HeldTurn(self, found, announce, shards):
            yield found

    async def _called(self, number: int, deadline: Deadline) -> Turn:
        """Wait on an event loop until no older push is too far behind."""
        while not isinstance(found := self._begin(number), Turn):
            place = self._queued(number)
            await asyncio.wait({place}, timeout=deadline.remaining())
        return found

    def _queued(self, number: int) -> asyncio.Future[None]:
        """Take a place among those who wait for older pushes to end."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            heappush(self._queue, (number, id(place), place))
            # One may have ended just now.
            self._call_next()
        return place

    def _call_next(self) -> None:
        """Have those on event loops go on that no older push is too far behind."""
        while self._queue and self._queue[0][0] - self._floor < self.SPREAD:
            *_, place = heappop(self._queue)
            # The loop of another thread may be closed by now.
            with suppress(RuntimeError):
                place.get_loop().call_soon_threadsafe(_call, place)

    def _begin(self, number: int) -> Turn | int:
        """Give a number its turn, or return it where a push is too far behind; -1: a new one."""
        with self._lock:
            if number < 0:
                number = self._next
                self._next += 1
                self._open.add(number)
            if number - self._floor >= self.SPREAD:
                return number
            return Turn(number, self._floor, self._listed)

    def end(
        self,
        number: int,
        announce: Announce,
        shards: Collection[int] = (),
        *,
        is_answered: bool,
        is_sent: bool = True,
    ) -> None:
        """Give a sequence number back: its push was answered or given up.

        A cut would wait for a push that was given up, where it has left: it may have
        reached some of its shards. The next push says that it is settled, but may be
        long in coming.
        """
        with self._lock:
            if not is_answered:
                if is_sent:
                    self._given_up.add(number)
                self._list(number, shards)
            elif self._unheard:
                self._heard(number, shards)
            self._open.discard(number)
            while self._floor < self._next and self._floor not in self._open:
                self._floor += 1
            if self._n_waiting:
                self._turn.notify_all()
            if self._queue:
                self._call_next()
            if not self._given_up:
                return
            floor = self._floor
            told = {n for n in self._given_up if n < floor}
            self._given_up -= told
        if told and self.id:
            announce(self.id, floor)

    def _list(self, number: int, shards: Collection[int]) -> None:
        """Say of a push of a task from here on that it was given up."""
        if self._task is not None:
            self._unheard[number] = {*shards}
            listed = self._listed
            is_last = not listed or number > listed[-1]
            self._listed = (*listed, number) if is_last else (*sorted(self._unheard),)

    def _heard(self, number: int, shards: Collection[int]) -> None:
        """Note that shards have answered a push, and with it what it leaves behind."""
        for behind in self._listed:
            if behind <= number - WINDOW:
                self._unheard[behind].difference_update(shards)
        self._unheard = {n: of for n, of in self._unheard.items() if of}
        self._listed = (*sorted(self._unheard),)


def _call(place: asyncio.Future[None]) -> None:
    if not place.done():
        place.set_result(None)


class HeldTurn:
    """A context in which a push has its number.

    Parameters
    ----------
    producer : Producer
        Whose.
    turn : Turn
        The number.
    announce : callable
        Hears which pushes that were given up are settled.
    shards : collection of int
        Where the push goes.
    """

    __slots__ = ("_announce", "_producer", "_shards", "_turn")

    def __init__(
        self,
        producer: Producer,
        turn: Turn,
        announce: Announce,
        shards: Collection[int],
    ) -> None:
        self._producer, self._turn, self._announce = producer, turn, announce
        self._shards = shards

    def __enter__(self) -> Turn:
        return self._turn

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        number, shards = self._turn.number, self._shards
        self._producer.end(number, self._announce, shards, is_answered=error is None)


class Repeated:
    """One number for a push that may be sent again and again: each shard applies it once.

    It takes the place of a producer for that push alone. Producers of such pushes are
    used again by others once the push has ended: a place at a shard is soon had, and
    lasts until a client or a task ends.

    Parameters
    ----------
    link : Link
        The way to the cluster.
    uid : str
        The store.
    task : tuple, optional
        Key and start of the task that pushes, if one does.
    """

    def __init__(
        self, link: Link, uid: str, task: tuple[Any, float] | None = None
    ) -> None:
        idle: dict[Any, tuple[list[Producer], count[int]]] = link.idle_producers
        self._idle, numbers = _kept(idle, (uid, task), lambda: ([], count(1)))
        try:
            self._producer = self._idle.pop()
        except IndexError:
            # Not that of the task's other pushes, whose numbers go on meanwhile.
            self._producer = Producer(task, next(numbers))
        self._shards: Collection[int] = ()
        self._turn = self._producer.turn(Deadline(None, ""), _tell_nobody).__enter__()

    @property
    def id(self) -> int:
        """Identity of the producer; 0 before it has one."""
        return self._producer.id

    async def identify(self, link: Link) -> None:
        """Have the directory issue an identity, where there is none yet."""
        await self._producer.identify(link)

    def end(self, *, is_answered: bool = True) -> None:
        """Let others use the producer: all shards have applied the push, or none will."""
        number, shards = self._turn.number, self._shards
        self._producer.end(number, _tell_nobody, shards, is_answered=is_answered)
        self._idle.append(self._producer)

    def take(self, n: int) -> Sequence[int]:
        """Return the number, for each part of the push."""
        return [self._turn.number] * n

    def give_up(
        self, numbers: Iterable[int], announce: Announce, shards: Collection[int]
    ) -> None:
        """Do nothing: it is sent again."""

    @contextmanager
    def turn(
        self,
        deadline: Deadline,
        announce: Announce,
        shards: Collection[int] = (),
        number: int = -1,
    ) -> Iterator[Turn]:
        """Hold the number while the push is under way, as a producer does."""
        self._shards = shards
        try:
            yield self._turn
        except BaseException:
            # A cut does not wait for it until it is sent again.
            if self.id:
                announce(self.id, self._turn.number + 1)
            raise

    @asynccontextmanager
    async def turn_async(
        self,
        deadline: Deadline,
        announce: Announce,
        shards: Collection[int] = (),
        number: int = -1,
    ) -> AsyncIterator[Turn]:
        """Hold the number on an event loop."""
        with self.turn(deadline, announce, shards) as turn:
            yield turn


def _tell_nobody(identity: int, floor: int) -> None: ...
