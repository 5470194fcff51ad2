"""Identity and sequence numbers of pushes outside runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection
from contextlib import asynccontextmanager, contextmanager, suppress
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from daskps.cluster.protocol.deadline import Deadline
from daskps.shards.producers import WINDOW

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

    from daskps.cluster.caller.link import Link

T = TypeVar("T")
#: Tasks of one process that may push at once, each with an identity of its own.
MOST_TASKS = 1024
#: Arguments of `end` for a push that is given up before it has left.
_UNSENT = {"is_answered": False, "is_sent": False}
#: A function that gets identity and floor once given-up pushes are below the floor.
_Announce = Callable[[int, int], None]


def producer_of(link: Link, uid: str, task: tuple[Any, float] | None) -> Producer:
    """Return the producer of a task's pushes to a store, or of all other pushes here.

    All handles share it: one for each would fill the shards' tables with producers of
    which nobody can say that they have ended.
    """
    known: dict[Any, Producer] = link.producers
    # Here too: each push of a handle asks.
    if (found := known.get((uid, task))) is not None:
        return found
    return _kept(known, (uid, task), lambda: Producer(task))


def _kept(known: dict[Any, T], key: Any, make: Callable[[], T]) -> T:
    """Return the value of a key, made where the key is new.

    Nobody here hears that a task has ended: of too many this forgets the first.
    """
    if (found := known.get(key)) is not None:
        return found
    while len(known) >= MOST_TASKS and key not in known:
        known.pop(next(iter(known)), None)
    return known.setdefault(key, make())


class Turn(NamedTuple):
    """The number of a push, and the floor below which all other pushes have ended."""

    number: int
    floor: int
    #: Pushes before it that were given up, as far as shards have to hear of them.
    given_up: tuple[int, ...] = ()


class Producer:
    """Identity and sequence numbers of the pushes of one task, or of all handles.

    All handles of a store in this process share one, see :func:`producer_of`. It
    numbers pushes in the order of their calls, and none leaves while one 32 or more
    older is unanswered: the shards know only within a window which pushes they have
    applied. Dask may try a task again, from its first number on, so its pushes name the
    others that were given up, until each shard that these were meant for has answered
    one that leaves them behind.
    """

    SPREAD = 32

    def __init__(self, task: tuple[Any, float] | None = None, nth: int = 0) -> None:
        #: Key and start of the task that pushes, if one does, and the number of this
        #: producer among the task's.
        self._task, self._nth = task, nth
        self.id = 0
        self._next = 0
        #: Numbers of pushes that have not ended, and the number below which there are
        #: none.
        self._open: set[int] = set()
        self._floor = 0
        #: Pushes that were given up, of which the shards have not heard.
        self._given_up: set[int] = set()
        #: Given-up pushes of a task, each with the shards whose window has yet to leave
        #: it behind; and their sorted numbers.
        self._unheard: dict[int, set[int]] = {}
        self._listed: tuple[int, ...] = ()
        self._lock = threading.RLock()
        self._turn = threading.Condition(self._lock)
        #: Number of threads that wait for an older push to end, and the waiting calls
        #: of event loops.
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

        A task that is tried again gives its pushes the same numbers, whatever they wait
        for.
        """
        with self._lock:
            first = self._next
            self._next += n
            self._open.update(range(first, self._next))
            return range(first, self._next)

    def give_up(
        self, numbers: Iterable[int], announce: _Announce, shards: Collection[int]
    ) -> None:
        """Give up those pushes that have had no turn."""
        for number in sorted(self._open.intersection(numbers)):
            self.end(number, announce, shards, **_UNSENT)

    def turn(
        self,
        deadline: Deadline,
        announce: _Announce,
        shards: Collection[int] = (),
        number: int = -1,
    ) -> HeldTurn:
        """Hold the next sequence number while its push to some shards is under way."""
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
        announce: _Announce,
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
        """Take a place among the calls that wait for older pushes to end."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            heappush(self._queue, (number, id(place), place))
            # A push may have ended just now.
            self._call_next()
        return place

    def _call_next(self) -> None:
        """Wake calls on event loops once no older push is too far behind them."""
        while self._queue and self._queue[0][0] - self._floor < self.SPREAD:
            *_, place = heappop(self._queue)
            # The loop of another thread may be closed by now.
            with suppress(RuntimeError):
                place.get_loop().call_soon_threadsafe(_call, place)

    def _begin(self, number: int) -> Turn | int:
        """Give a number, or for -1 a new one, its turn; return it if it has to wait."""
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
        announce: _Announce,
        shards: Collection[int] = (),
        *,
        is_answered: bool,
        is_sent: bool = True,
    ) -> None:
        """Give a sequence number back: its push was answered or given up.

        A cut would wait for a push that was given up after it had left: it may have
        reached some of its shards. The next push says that this one has ended, but may
        be long in coming.
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
        """Have later pushes of a task say that this one was given up."""
        if self._task is not None:
            self._unheard[number] = {*shards}
            listed = self._listed
            is_last = not listed or number > listed[-1]
            self._listed = (*listed, number) if is_last else (*sorted(self._unheard),)

    def _heard(self, number: int, shards: Collection[int]) -> None:
        """Note that shards have answered a push, which leaves older ones behind."""
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
        The producer of the push.
    turn : Turn
        The number.
    announce : callable
        Gets identity and floor once given-up pushes have ended.
    shards : collection of int
        Where the push goes.
    """

    __slots__ = ("_announce", "_producer", "_shards", "_turn")

    def __init__(
        self,
        producer: Producer,
        turn: Turn,
        announce: _Announce,
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
    """One number for a push that may be sent repeatedly: each shard applies it once.

    It takes the place of a producer for that push alone. Once the push has ended other
    such pushes use its producer again: a producer takes a place at each shard, until a
    client or a task ends.

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
            # Not the producer of the task's other pushes, whose numbers go on
            # meanwhile.
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
        """Free the producer: all shards have applied the push, or none will."""
        number, shards = self._turn.number, self._shards
        self._producer.end(number, _tell_nobody, shards, is_answered=is_answered)
        self._idle.append(self._producer)

    def take(self, n: int) -> Sequence[int]:
        """Return the number, for each part of the push."""
        return [self._turn.number] * n

    def give_up(
        self, numbers: Iterable[int], announce: _Announce, shards: Collection[int]
    ) -> None:
        """Do nothing: the caller sends the push again."""

    @contextmanager
    def turn(
        self,
        deadline: Deadline,
        announce: _Announce,
        shards: Collection[int] = (),
        number: int = -1,
    ) -> Iterator[Turn]:
        """Hold the number while the push is under way, as a producer does."""
        self._shards = shards
        try:
            yield self._turn
        except BaseException:
            # A cut does not wait for the push until the caller sends it again.
            if self.id:
                announce(self.id, self._turn.number + 1)
            raise

    @asynccontextmanager
    async def turn_async(
        self,
        deadline: Deadline,
        announce: _Announce,
        shards: Collection[int] = (),
        number: int = -1,
    ) -> AsyncIterator[Turn]:
        """Hold the number on an event loop."""
        with self.turn(deadline, announce, shards) as turn:
            yield turn


def _tell_nobody(identity: int, floor: int) -> None: ...
