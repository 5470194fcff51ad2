"""Tries of one task and the shards that it pushes to: each push counts once."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import NamedTuple
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps.cluster.caller.producer import HeldTurn, Producer
from daskps.cluster.protocol.deadline import Deadline
from daskps.errors import ProducerExpiredError
from daskps.shards import producers
from daskps.shards.memory.format import Record
from daskps.shards.steps import Step

N_SHARDS, ID = 3, 7
NO_END = Deadline(None, "a push")


class Sent(NamedTuple):
    """A message to one shard."""

    by: Try
    number: int
    shard: int
    given_up: tuple[int, ...]


class Shard:
    """The record of a shard, and how often it has applied each push."""

    def __init__(self) -> None:
        self.record = Record(np.zeros(Record.n_words(0), np.int64), 0)
        self.applied = Counter[int]()

    def take(self, number: int, given_up: tuple[int, ...]) -> None:
        if not producers.repeats(self.record, ID, number):
            step = Step(producer=ID, sequence=number, given_up=given_up)
            producers.note_push(self.record, step)
            self.applied[number] += 1


class Try:
    """One try of the task, with the pushes that it has under way."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.producer = Producer(("task", 0.0))
        self.next = 0
        self.open: dict[int, tuple[HeldTurn, set[int]]] = {}

    @property
    def may_push(self) -> bool:
        is_spread = self.next - min(self.open, default=self.next) >= Producer.SPREAD
        return self.next < len(self.world.targets) and not is_spread

    def push(self) -> list[Sent]:
        to = self.world.targets[self.next]
        held = self.producer.turn(NO_END, lambda *_: None, to)
        number, _, given_up = held.__enter__()
        assert number == self.next
        self.next += 1
        self.open[number] = held, set(to)
        return [Sent(self, number, shard, given_up) for shard in to]

    def end(self, number: int, error: Exception | None = None) -> None:
        held, _ = self.open.pop(number)
        held.__exit__(type(error), error, None)

    def answered(self, sent: Sent) -> None:
        if sent.number in self.open:
            _, left = self.open[sent.number]
            left.discard(sent.shard)
            if not left:
                self.end(sent.number)


class World:
    """A network that loses, delays and repeats messages, and tries that give up."""

    def __init__(self, n: int, chance: Random, loss: float) -> None:
        self.chance, self.loss = chance, loss
        rare, subsets = chance.choice([0.5, 0.01]), [[0], [1], [0, 1]]
        self.targets = [
            chance.choice(subsets) + [2] * (chance.random() < rare) for _ in range(n)
        ]
        #: Pushes that a shard refuses whenever they come.
        self.refused = {
            (number, shard)
            for number, to in enumerate(self.targets)
            for shard in to
            if chance.random() < loss / 3
        }
        self.shards = [Shard() for _ in range(N_SHARDS)]
        self.tries = [Try(self)]
        self.messages: list[Sent] = []
        #: Of which a shard has said that it cannot tell.
        self.unknown: set[tuple[int, int]] = set()

    def deliver(self, sent: Sent, *, is_lossy: bool) -> None:
        of, what = sent.by, (sent.number, sent.shard)
        try:
            if what in self.refused:
                raise ValueError("NaN")
            self.shards[sent.shard].take(sent.number, sent.given_up)
        except (ValueError, ProducerExpiredError) as error:
            if isinstance(error, ProducerExpiredError):
                self.unknown.add(what)
            if sent.number in of.open:
                of.end(sent.number, error)
            return
        if not (is_lossy and self.chance.random() < self.loss):
            of.answered(sent)

    def act(self) -> None:
        chance, one = self.chance, self.chance.choice(self.tries)
        what = chance.random()
        if what < 0.45 and one.may_push:
            sent = one.push()
            self.messages += [m for m in sent if chance.random() >= self.loss]
        elif what < 0.93 and self.messages:
            # Mostly the oldest, which may come again.
            i = chance.randrange(
                1 + min(len(self.messages) - 1, chance.choice([0, 99]))
            )
            again = chance.random() < self.loss / 2
            sent_ = self.messages[i] if again else self.messages.pop(i)
            self.deliver(sent_, is_lossy=True)
        elif what < 0.97 and one.open:
            one.end(chance.choice([*one.open]), TimeoutError())
        elif what > 0.997:
            # Its worker is taken for dead; it may go on all the same.
            if chance.random() < 0.7:
                self.tries.remove(one)
            self.tries.append(Try(self))

    def wanted(self, shard: int) -> set[int]:
        """Return the pushes that a shard is to have."""
        meant = {number for number, to in enumerate(self.targets) if shard in to}
        return {number for number in meant if (number, shard) not in self.refused}

    def end_well(self) -> None:
        """Let the task run once more, with nothing in its way but what is refused."""
        last = Try(self)
        while last.may_push:
            for sent in last.push():
                self.deliver(sent, is_lossy=False)
        for sent in self.messages:
            self.deliver(sent, is_lossy=False)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 400), st.integers(), st.sampled_from([0.02, 0.1, 0.4]))
def test_each_push_of_a_task_counts_once_however_often_it_is_tried(
    n: int, seed: int, loss: float
) -> None:
    world = played(n, seed, loss)
    assert not world.unknown
    for shard, of in enumerate(world.shards):
        assert of.applied == dict.fromkeys(world.wanted(shard), 1)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 400), st.integers(), st.integers(1, 3))
def test_where_there_is_no_room_for_what_was_given_up_none_is_lost_in_silence(
    n: int, seed: int, room: int
) -> None:
    """Nor doubled: the shard says of which it cannot tell."""
    with mock.patch.object(producers, "MAX_KEPT", room):
        world = played(n, seed, 0.4)
    for shard, of in enumerate(world.shards):
        assert set(of.applied.values()) <= {1}
        lost = world.wanted(shard) - of.applied.keys()
        assert all((number, shard) in world.unknown for number in lost)


def played(n: int, seed: int, loss: float) -> World:
    world = World(n, Random(seed), loss)
    for _ in range(8 * n):
        world.act()
    world.end_well()
    return world
