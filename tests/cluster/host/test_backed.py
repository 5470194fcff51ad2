"""Answers by socket wait for the second copy, as calls that no thread waits for."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import pytest

import daskps
from daskps.cluster.host import coming
from daskps.cluster.host.calls import Parked, all_backed
from daskps.cluster.host.coming import Asking
from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.hosted import HostedShard
from daskps.cluster.keys import copy_key
from daskps.cluster.protocol import encoding
from daskps.cluster.protocol.messages import Answer, Call, Part
from daskps.cluster.protocol.states import unpack_state
from daskps.cluster.sockets.channel import BUFFER_NBYTES
from daskps.cluster.sockets.connection import ANSWERED, Connection
from daskps.cluster.sockets.fetches import text_nbytes
from daskps.cluster.sockets.frames import (
    ANSWER,
    FETCH,
    HEAD_NBYTES,
    REFUSAL,
    Head,
    Tail,
    pack_head,
    text_of,
    unpack_head,
    unpack_text,
)
from daskps.cluster.sockets.served import ServedChannel, views_of
from daskps.consistency import ASP, BSP, SSP
from daskps.errors import ShardBusyError, StaleGenerationError
from daskps.layout.spans import WEIGHTS, Span
from daskps.shards import states
from daskps.shards.frozen import HeldShard
from daskps.shards.memory.segment import Segment
from daskps.shards.states import State
from daskps.shards.steps import ADD, MODEL, NOTHING, READ, Item, Step
from tests import inprocess
from tests.cluster.by_socket import Caller, RefusedError, calling
from tests.cluster.test_drain import Held
from tests.inprocess import Cluster
from tests.support import until

N = 6
#: So many that they are sent from the memory of the shard.
LARGE = 20_000


@dataclass
class Begun:
    """A call that a host has begun, on a socket of its own."""

    socket: Caller
    call: Call
    found: list[Any] | Parked

    def waits(self) -> bool:
        while isinstance(self.found, Parked) and self.found.done:
            self.found = self.found.finish(0.0)
        return waits(self.found)

    def answer(self) -> Answer:
        frame = self.found
        if isinstance(frame, Parked):
            frame = frame.finish(0.0)
        assert isinstance(frame, list)
        [answer] = self.socket.answers(frame, self.call)
        return answer


class Owner:
    """The owner of a shard whose copy asks for nothing but what a test asks for."""

    def __init__(self, cluster: Cluster, connect: Any, host: ShardHost) -> None:
        self._connect, self.host = connect, host
        (self.hosted,) = host.shards.values()
        self.n = self.hosted.shard.segment.sizes[0]
        self.socket: Caller = connect()
        self.cluster, self._link = cluster, cluster.link
        self.store = next(iter(cluster.directory.stores.values()))
        self.held = Held(cluster, self.store.owners[0], "copy_next")
        self.hosted.send_on()  # so that it asks again at once
        assert self.held.reached.wait(60)

    def begin(self, step: Step, *, reads: bool) -> Begun:
        ranges = (("float64", 0, self.n),) if reads else ()
        call = Call(self.store.uid, (Part(0, step, ranges),))
        socket = self._connect()
        return Begun(socket, call, socket.begin(call))

    def push(self, sequence: int = 1) -> Begun:
        items = (Item(0, 0, np.ones(self.n)),)
        step = Step(ADD, items, producer=9, sequence=sequence)
        return self.begin(step, reads=False)

    def read(self, **more: Any) -> Begun:
        return self.begin(Step(NOTHING, wait=READ, **more), reads=True)

    def run(self, work: Any) -> None:
        self._link.run(lambda: work)

    def tell(self, method: str, **more: Any) -> None:
        about = {"store": self.store.uid, "shard": 0, **more}
        about = {key: value for key, value in about.items() if value is not None}
        owner = self.store.owners[0]
        self._link.run(lambda: self._link.control(owner, method, **about))

    def ask(self, flip: int, version: int, **other: str) -> list[Any] | Parked:
        """Ask as the copy does."""
        text = b""
        if other or flip == self.flip:
            of = {"store": self.store.uid, "shard": 0, "by": "the copy"}
            move = self.store.copies[0].move
            text = text_of(["copy_next", {**of, "move": move, **other}])
        head = Head(FETCH, len(text), 5, clock=flip, sequence=8 * self.n, floor=version)
        return self.socket.serve([pack_head(head), text] if text else [pack_head(head)])

    @property
    def flip(self) -> int:
        return self.hosted.shard.segment.flip


@pytest.fixture
def owner(request: pytest.FixtureRequest) -> Iterator[Owner]:
    with inprocess.cluster(3) as made:
        n = getattr(request, "param", N)
        store = daskps.create({"w": np.zeros(n)}, shards=1, copies=2)
        host = next(h for h in made.hosts if h.worker.address == store.placement[0])
        (hosted,) = host.shards.values()
        until(lambda: hosted.backing is not None and hosted.backing.flip >= 0)
        with ExitStack() as stack:
            connect = lambda: stack.enter_context(calling(host))  # noqa: E731
            found = Owner(made, connect, host)
            yield found
            found.held.go_on()


def waits(found: object) -> bool:
    return isinstance(found, Parked) and not found.done


def state_in(frame: Any) -> State:
    views = views_of(frame)
    data = b"".join(v.made() if isinstance(v, Tail) else v for v in views)
    head = unpack_head(data[:HEAD_NBYTES])
    assert head.kind == ANSWER
    n = HEAD_NBYTES + text_nbytes(head)
    arrays, at = np.frombuffer(data[n:], "u1"), 0

    def unpack(nbytes: int) -> Any:
        nonlocal at
        at += nbytes
        return arrays[at - nbytes : at].copy()

    return unpack_state(unpack_text(data[HEAD_NBYTES:n]), unpack)


def test_a_push_and_what_shows_it_wait(owner):
    """It is applied, and neither its answer nor a read that sees it leaves."""
    assert owner.read().answer().arrays[0].tolist() == [0.0] * N
    push, read = owner.push(), owner.read()
    assert owner.hosted.shard.segment.current.version == 1
    again = owner.push()
    assert [one.waits() for one in (push, read, again)] == [True] * 3
    owner.held.go_on()
    until(lambda: not any(one.waits() for one in (push, read, again)))
    assert push.answer().version == again.answer().version == 1
    assert read.answer().arrays[0].tolist() == [1.0] * N


def test_to_ask_for_a_state_says_that_the_one_before_is_there(owner):
    """By socket as well; who asks again says nothing but the moment."""
    first, asked = owner.flip, owner.ask(owner.flip, 0)
    assert waits(asked)
    push = owner.push()
    assert asked.done
    assert push.waits()
    state = state_in(asked.finish(0.0))
    assert (state.since.flip, state.now.flip) == (first, first + 1)
    assert state.pieces[0].weights.tolist() == [1.0] * N
    later = owner.push(2)
    asked = owner.ask(*state.now)
    assert not push.waits()
    assert push.answer().version == 1
    # The next state has all that came meanwhile.
    assert later.waits()
    state = state_in(asked)
    assert waits(owner.ask(*state.now))
    assert later.answer().version == 2


@pytest.mark.parametrize("owner", [LARGE], indirect=True)
def test_pushes_wait_while_a_large_state_is_sent_from_the_shard(owner):
    """They would write over it; then all that wait are one publication, and state."""
    first, asked = owner.flip, owner.ask(owner.flip, 0)
    push = owner.push()
    frame = asked.finish(0.0)
    weights = (
        owner.hosted.shard.segment.weights[0][0],
        owner.hosted.shard.segment.weights[1][0],
    )
    assert any(np.shares_memory(of, b) for of in weights for b in frame[1:-1] if len(b))
    later = owner.push(2), owner.push(3)
    assert all(one.waits() for one in (push, *later))
    assert owner.flip == first + 1
    state = state_in(frame)
    assert (state.now.flip, set(state.pieces[0].weights)) == (first + 1, {1.0})
    frame = owner.ask(*state.now)
    assert push.answer().version == 1
    assert [one.waits() for one in later] == [True, True]
    state = state_in(frame)
    assert (state.now.flip, set(state.pieces[0].weights)) == (first + 2, {3.0})
    assert waits(owner.ask(*state.now))
    assert [one.answer().version for one in later] == [2, 3]


class Copy:
    """The copy of an owner, and a socket by which a test sends it states."""

    def __init__(self, cluster: Cluster, store: Any) -> None:
        (self.host,) = [h for h in cluster.hosts if h.coming]
        (self.coming,) = self.host.coming.values()
        of = {"store": store.uid, "shard": 0, "move": self.coming.move}
        here, self.there = socket.socketpair()
        self.asking = Asking(self.host, self.coming, of)
        self.connection = Connection(ServedChannel(here, 0.2), self.asking)

    def __enter__(self) -> Copy:
        return self

    def __exit__(self, *_: object) -> None:
        self.there.close()
        self.connection.end()

    def hear(self, data: bytes) -> None:
        """Serve these bytes, and all that they lead to."""
        sending = threading.Thread(target=self.there.sendall, args=(data,))
        sending.start()
        while self.go_on() != ANSWERED:
            pass
        sending.join()

    def go_on(self) -> int:
        return self.connection.go_on(memoryview(bytearray(BUFFER_NBYTES)), 1.0)

    @property
    def segment(self) -> Segment:
        return self.coming.hosted.shard.segment

    def weights(self, *, in_force: bool = True) -> Any:
        segment, record = self.segment, self.segment.current
        return segment.weights[record.weight_sides[0] ^ (not in_force)][0]


def sent(owner: Owner) -> bytes:
    """Return the frame with a state after a push."""
    asked = owner.ask(owner.flip, 0)
    owner.push()
    assert isinstance(asked, Parked)
    frame = asked.finish(0.0)
    assert isinstance(frame, list)
    views = views_of(frame)
    return b"".join(v.made() if isinstance(v, Tail) else v for v in views)


@pytest.mark.parametrize("owner", [LARGE, N], indirect=True)
def test_a_state_that_came_is_installed_and_the_next_one_asked_for(owner):
    with Copy(owner.cluster, owner.store) as copy:
        copy.hear(sent(owner))
        assert set(copy.weights()) == {1.0}
        asks = unpack_head(copy.there.recv(1000))
        assert (asks.kind, asks.clock, asks.floor) == (FETCH, owner.flip, 1)
        assert copy.coming.installing.done()


@pytest.mark.parametrize("owner", [LARGE, N], indirect=True)
def test_a_copy_that_has_stopped_ends_its_socket_in_silence(owner):
    """An error of another kind would be in the log of its worker with a traceback."""
    with Copy(owner.cluster, owner.store) as copy:
        data = sent(owner)
        copy.coming.end()
        copy.there.sendall(data[:50_000])
        with pytest.raises(ConnectionAbortedError, match="has stopped"):
            copy.go_on()


@pytest.mark.parametrize("owner", [LARGE], indirect=True)
def test_a_large_state_goes_where_nothing_is_in_force(owner):
    """A copy that stops waits until no more comes there, and is as it was."""
    with Copy(owner.cluster, owner.store) as copy:
        data, before = sent(owner), copy.segment.flip
        copy.there.sendall(data[: len(data) // 2])
        assert copy.go_on() != ANSWERED
        assert set(copy.weights()) == {0.0}
        assert set(copy.weights(in_force=False)[: LARGE // 3]) == {1.0}
        assert (copy.segment.flip, copy.segment.writing) == (before, before + 1)
        loop = owner.cluster.loop.asyncio_loop
        stopping = asyncio.run_coroutine_threadsafe(copy.coming.stop(), loop)
        owner.run(asyncio.sleep(0))
        assert not stopping.done()
    stopping.result(60)
    assert set(copy.weights()) == {0.0}


@pytest.mark.parametrize("owner", [LARGE], indirect=True)
def test_a_large_state_that_came_in_part_comes_by_message(owner):
    with Copy(owner.cluster, owner.store) as copy:
        data = sent(owner)
        copy.there.sendall(data[: len(data) // 2])
        assert copy.go_on() != ANSWERED
    owner.held.go_on()
    until(lambda: copy.segment.flip == copy.segment.writing)
    assert set(copy.weights()) == {1.0}


@pytest.mark.parametrize("owner", [LARGE], indirect=True)
def test_no_message_brings_a_state_while_a_socket_installs_one(owner, monkeypatch):
    """An install that takes long looks as if the owner were silent."""
    begun, reached, free = threading.Event(), threading.Event(), threading.Event()
    install = states.install

    def slow(*args: Any) -> None:
        reached.set()
        assert free.wait(60)
        install(*args)

    async def open_socket(*_: Any, **__: Any) -> None:
        begun.set()

    monkeypatch.setattr(states, "install", slow)
    monkeypatch.setattr(coming, "open_socket", open_socket)
    with Copy(owner.cluster, owner.store) as copy:
        channel = copy.connection.channel
        sockets = SimpleNamespace(serve=lambda *_: channel)
        with dask.config.set({"daskps.suspect-after": "0.1s"}):
            loop = owner.cluster.loop.asyncio_loop
            work = copy.asking.go_on(sockets)
            asking = asyncio.run_coroutine_threadsafe(work, loop)
            assert begun.wait(60)
        turn = copy.coming.turn

        def hear(data: bytes) -> None:
            with suppress(OSError):  # as it asks for the next one
                copy.hear(data)

        hearing = threading.Thread(target=hear, args=(sent(owner),))
        hearing.start()
        assert reached.wait(60)
        until(lambda: not channel.is_open)
        owner.run(asyncio.sleep(0))
        is_over = asking.done()
        free.set()
        with pytest.raises(TimeoutError, match="is silent"):
            asking.result(60)
        hearing.join()
        assert not is_over
        assert copy.coming.mark.flip == owner.flip
        with pytest.raises(daskps.ConsistencyError, match="has stopped"):
            copy.coming.begin(turn)


def test_a_copy_that_is_asked_twice_to_take_over_does_it_once(owner, monkeypatch):
    """To learn codecs may import much; the directory asks again after five seconds."""
    begun, free, n = threading.Semaphore(0), threading.Event(), 0

    def slow(*_: Any) -> None:
        nonlocal n
        n += 1
        begun.release()
        assert free.wait(60)

    with Copy(owner.cluster, owner.store) as copy:
        of = {"store": owner.store.uid, "shard": 0, "move": copy.coming.move}
    monkeypatch.setattr(encoding, "learn", slow)
    runs = {"codecs": [("a codec", b"")], "rounds": None}
    of |= {"generation": 5, "runs": runs, "alone": True}
    worker, link = copy.host.worker.address, owner.cluster.link
    loop = owner.cluster.loop.asyncio_loop

    def own() -> Any:
        asked = link.control(worker, "move_own", **of)
        return asyncio.run_coroutine_threadsafe(asked, loop)

    first = own()
    assert begun.acquire(timeout=60)
    second = own()
    for _ in range(10):
        owner.run(asyncio.sleep(0))
    free.set()
    assert first.result(60) == second.result(60)
    assert n == 1
    assert copy.host.shards[owner.store.uid, 0] is copy.coming.hosted


def test_a_copy_without_memory_for_a_state_says_so(owner, monkeypatch):
    """Another one is made at once; else all answers would wait until it is missed."""
    with Copy(owner.cluster, owner.store) as copy:
        worker, following, said = copy.host.worker, copy.coming.following, []
        tell = worker.directory

    async def directory(method: str, **about: Any) -> Any:
        said.append(method)
        return await tell(method, **about)

    def install(*_: Any) -> None:
        raise MemoryError

    push = owner.push()
    with monkeypatch.context() as at_first:
        at_first.setattr(worker, "directory", directory)
        at_first.setattr(states, "install", install)
        owner.held.go_on()
        until(following.done)
        assert said == ["copy-ended"]
    until(lambda: not push.waits())


@pytest.mark.parametrize("owner", [LARGE], indirect=True)
def test_a_copy_with_a_part_of_a_state_can_be_saved_once_it_is_the_owner(owner):
    """Its buffers are being written, as far as its memory says, and nobody writes."""
    with Copy(owner.cluster, owner.store) as copy:
        data = sent(owner)
        copy.there.sendall(data[: len(data) // 2])
        assert copy.go_on() != ANSWERED
    of = {"store": owner.store.uid, "shard": 0, "move": copy.coming.move}
    of |= {"generation": 5, "runs": {"codecs": [], "rounds": None}, "alone": True}
    worker, link = copy.host.worker.address, owner.cluster.link
    link.run(lambda: link.control(worker, "move_own", **of))
    held = HeldShard(copy.segment, copy.segment.flip, 0)
    assert set(held.get(Span(WEIGHTS, 0, 0, LARGE))) == {0.0}


def test_a_state_for_which_there_is_no_memory_is_refused(owner):
    """Else the copy would wait for it, and all answers for the copy."""

    def empty(*_: Any) -> None:
        raise MemoryError

    owner.host.empty, before = empty, owner.host.empty
    try:
        asked = owner.ask(owner.flip, 0)
    finally:
        owner.host.empty = before
    assert waits(asked)
    owner.push()
    assert not waits(asked)
    assert unpack_head(asked.finish(0.0)[0]).kind == REFUSAL


def test_a_copy_that_asks_as_the_shard_is_freed_hears_so(owner):
    """Nobody would end its wait, which keeps the memory of the shard."""
    closed(owner)
    frame = owner.ask(owner.flip, 0)
    assert not waits(frame)
    assert unpack_head(frame[0]).kind == REFUSAL


def test_a_copy_that_asks_as_the_shard_is_handed_over_hears_so(owner):
    """Another thread has the shard, and finds the question behind its end."""
    hosted = owner.hosted
    with hosted.turn(60):
        hosted.enqueue(lambda _: hosted.hand_over(7))
        asked = owner.ask(owner.flip, 0)
        assert waits(asked)
    assert not waits(asked)
    assert unpack_head(asked.finish(0.0)[0]).kind == REFUSAL


def test_a_copy_may_be_struck_off_as_its_state_is_to_be_sent(owner, monkeypatch):
    """By another thread, between two looks of this one."""
    assert waits(owner.ask(owner.flip, 0))
    looks = iter([owner.hosted.backing])
    seen = property(lambda _: next(looks, None))
    with monkeypatch.context() as just_now:
        just_now.setattr(HostedShard, "backing", seen, raising=False)
        owner.hosted.send_on()
    assert next(looks, None) is None


@pytest.mark.parametrize("owner", [LARGE], indirect=True)
def test_a_large_state_that_something_has_written_over_has_no_end(owner):
    asked = owner.ask(owner.flip, 0)
    owner.push()
    owner.hosted.shard.begin_run(7, ASP(), 1)
    with pytest.raises(ConnectionAbortedError, match="updates have run into"):
        state_in(asked.finish(0.0))


@pytest.mark.parametrize("owner", [LARGE], indirect=True)
def test_without_a_copy_pushes_go_on_that_waited_for_its_state(owner):
    asked = owner.ask(owner.flip, 0)
    pushes = [owner.push(n) for n in (1, 2)]
    assert asked.done
    assert [one.waits() for one in pushes] == [True, True]
    owner.tell("copy_on", move="", order=9)
    assert [one.answer().version for one in pushes] == [1, 2]


def test_who_asks_again_takes_the_place_of_who_asked(owner):
    asked = owner.ask(owner.flip, 0), owner.ask(owner.flip, 0)
    assert [waits(one) for one in asked] == [False, True]
    assert unpack_head(asked[0].finish(0.0)[0]).kind == REFUSAL


def test_a_copy_of_another_move_is_none(owner):
    frame = owner.ask(owner.flip, 0, move="another")
    assert unpack_head(frame[0]).kind == REFUSAL
    assert owner.push().waits()


def test_a_snapshot_waits_for_a_push_that_it_has_let_through(owner):
    """Other shards have applied it; of this one the copy may be what is left."""
    loop, link = owner.cluster.loop.asyncio_loop, owner.cluster.link
    cut: dict[str, Any] = {"store": owner.store.uid, "cut": "a cut", "index": None}

    def tell(method: str, **more: Any) -> Any:
        asked = link.control(owner.store.owners[0], method, **cut, **more)
        return asyncio.run_coroutine_threadsafe(asked, loop)

    tell("prepare_cut").result(60)
    tell("begin_cut", attempt=1, lease_seconds=60.0).result(60)
    push = owner.push()
    assert owner.flip == 0
    order = {"missing": [(0, 9, 1)], "run": 0, "rounds": -1}
    copying = tell("fill_cut", attempt=1, order=order)
    until(lambda: owner.host.snapshots.find(copy_key(owner.store.uid, None, 0, 1)))
    assert push.waits()
    for _ in range(10):
        owner.run(asyncio.sleep(0))
    assert not copying.done()
    owner.held.go_on()
    assert [shard[:2] for shard in copying.result(60)] == [(0, 1)]
    until(lambda: not push.waits())


def test_a_call_whose_time_is_up_goes_on_by_message(owner):
    """The push is the same one there."""
    answer = owner.push().answer()
    assert answer.parked
    assert not answer.applied
    again = owner.push()
    owner.held.go_on()
    until(lambda: not again.waits())
    assert again.answer().version == 1


def test_a_push_whose_read_has_to_wait_is_not_told_before_the_copy_has_it(owner):
    """Its trainer would send no arrays with the wait that goes on by message."""
    owner.hosted.shard.begin_run(7, SSP(0), 2)
    place: dict[str, Any] = {"run": 7, "rank": 0, "tick": True, "wait": READ}
    items = (Item(0, 0, np.ones(N)),)

    def push(clock: int) -> Answer:
        step = Step(ADD, items, clock=clock, sequence=clock, **place)
        begun = owner.begin(step, reads=True)
        assert begun.waits()  # for the other trainer
        begun.found = begun.found.finish(0.0)
        return begun.answer()

    before = push(0)
    assert owner.hosted.behind
    owner.held.go_on()
    until(lambda: not owner.hosted.behind)
    after = push(0)
    assert [(one.parked, one.applied) for one in (before, after)] == [
        (True, False),
        (True, True),
    ]
    assert owner.hosted.shard.segment.current.version == 1


def closed(owner: Owner) -> None:
    owner.hosted.close()


def let_go(owner: Owner) -> None:
    """Others of the machine are to have it, and the copy follows these."""
    owner.hosted.is_shared = True
    owner.tell("let_go", shard=None, shards=[(0, 1)])


@pytest.mark.parametrize("leave", [closed, let_go])
def test_where_the_shard_has_another_owner_nobody_is_answered(owner, leave):
    begun = owner.push(), owner.read()
    leave(owner)
    for one in begun:
        assert not one.waits()
        with pytest.raises(RefusedError, match="StaleGenerationError"):
            one.answer()
    # Of its own changes no more is on both than before; and nobody accuses the copy.
    assert owner.hosted.behind == 1
    assert owner.hosted.backing.error is not None
    with pytest.raises(StaleGenerationError):
        owner.run(all_backed([owner.hosted], owner.host.run_for))


def test_without_a_copy_what_waits_is_answered(owner):
    push, before = owner.push(), owner.hosted.backing
    assert push.waits()
    owner.tell("copy_on", move="", order=9)
    assert before is not None
    assert owner.hosted.backing is None
    assert push.answer().version == 1
    assert owner.push(2).answer().version == 2


def test_an_owner_that_is_locked_goes_on_alone_later(owner, monkeypatch):
    """It says that it could not, and does it once another process lets go of it."""

    def locked(seconds: float = 0.0) -> None:
        if seconds:
            raise ShardBusyError("another process has it")

    push = owner.push()
    with monkeypatch.context() as at_first:
        at_first.setattr(owner.hosted, "serve", locked)
        with pytest.raises(ShardBusyError):
            owner.tell("copy_on", move="", order=9)
    assert push.waits()
    owner.hosted.serve()
    assert owner.hosted.backing is None
    assert push.answer().version == 1


@pytest.mark.parametrize("policy", [ASP(), BSP()])
def test_trainers_that_promise_nothing_to_each_other_read_ahead(owner, policy):
    """In rounds all see the same, also after a promotion."""
    owner.hosted.shard.begin_run(7, policy, 1)
    read = owner.read(run=7, rank=0)
    assert owner.hosted.behind
    assert read.waits() == isinstance(policy, BSP)


def test_a_round_waits_until_the_copy_has_the_one_before(owner):
    """Two rounds as one state could not be taken back one by one."""
    shard = owner.hosted.shard
    shard.begin_run(7, BSP(), 1)

    def push(clock: int) -> Begun:
        place: dict[str, Any] = {"run": 7, "rank": 0, "clock": clock, "sequence": clock}
        items = (Item(0, 0, np.ones(N)),)
        return owner.begin(Step(MODEL, items, tick=True, **place), reads=False)

    assert waits(owner.ask(owner.flip, 0))
    push(0)
    push(1)
    assert shard.rounds_of(7) == 1
    owner.ask(owner.flip, shard.segment.current.version)
    assert shard.rounds_of(7) == 2
