"""Answers by socket wait for the second copy, as calls that no thread waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import daskps
from daskps.cluster.host.calls import Parked, all_backed
from daskps.cluster.host.host import ShardHost
from daskps.cluster.protocol.messages import Answer, Call, Part
from daskps.cluster.protocol.states import unpack_state
from daskps.cluster.sockets.fetches import text_nbytes
from daskps.cluster.sockets.frames import (
    ANSWER,
    FETCH,
    HEAD_NBYTES,
    REFUSAL,
    Head,
    pack_head,
    text_of,
    unpack_head,
    unpack_text,
)
from daskps.cluster.sockets.served import views_of
from daskps.consistency import ASP, BSP
from daskps.errors import StaleGenerationError
from daskps.shards.states import State
from daskps.shards.steps import ADD, MODEL, NOTHING, READ, Item, Step
from tests import inprocess
from tests.cluster.by_socket import Caller, RefusedError, calling
from tests.cluster.test_drain import Held
from tests.inprocess import Cluster
from tests.support import until

N = 6


@dataclass
class Begun:
    """A call that a host has begun, on a socket of its own."""

    socket: Caller
    call: Call
    found: list[Any] | Parked

    def waits(self) -> bool:
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
        self.socket: Caller = connect()
        self._link = cluster.link
        self.store = next(iter(cluster.directory.stores.values()))
        self.held = Held(cluster, self.store.owners[0], "copy_next")
        assert self.held.reached.wait(60)

    def begin(self, step: Step, *, reads: bool) -> Begun:
        ranges = (("float64", 0, N),) if reads else ()
        call = Call(self.store.uid, (Part(0, step, ranges),))
        socket = self._connect()
        return Begun(socket, call, socket.begin(call))

    def push(self, sequence: int = 1) -> Begun:
        items = (Item(0, 0, np.ones(N)),)
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
        head = Head(FETCH, len(text), 5, clock=flip, sequence=N, floor=version)
        return self.socket.serve([pack_head(head), text] if text else [pack_head(head)])

    @property
    def flip(self) -> int:
        return self.hosted.shard.segment.flip


@pytest.fixture
def owner() -> Iterator[Owner]:
    with inprocess.cluster(3) as made:
        store = daskps.create({"w": np.zeros(N)}, shards=1, copies=2)
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
    data = b"".join(views_of(frame))
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


def test_who_asks_again_takes_the_place_of_who_asked(owner):
    asked = owner.ask(owner.flip, 0), owner.ask(owner.flip, 0)
    assert [waits(one) for one in asked] == [False, True]
    assert unpack_head(asked[0].finish(0.0)[0]).kind == REFUSAL


def test_a_copy_of_another_move_is_none(owner):
    frame = owner.ask(owner.flip, 0, move="another")
    assert unpack_head(frame[0]).kind == REFUSAL
    assert owner.push().waits()


def test_a_call_whose_time_is_up_goes_on_by_message(owner):
    """The push is the same one there."""
    answer = owner.push().answer()
    assert answer.parked
    assert not answer.applied
    again = owner.push()
    owner.held.go_on()
    until(lambda: not again.waits())
    assert again.answer().version == 1


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
    owner.tell("copy_on", move="")
    assert before is not None
    assert owner.hosted.backing is None
    assert push.answer().version == 1
    assert owner.push(2).answer().version == 2


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
