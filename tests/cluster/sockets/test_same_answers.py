"""Frames of a socket are answered as messages are, to the last bit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import pytest

from daskps import codecs, consistency
from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.socket_calls import Parked
from daskps.cluster.protocol.messages import (
    Answer,
    Call,
    Part,
    dtype_of_item,
)
from daskps.config import cache_dir
from daskps.shards.steps import (
    ADD,
    ASSIGN,
    BARRIER,
    GRADIENT,
    MODEL,
    NO_WAIT,
    NOTHING,
    READ,
    Item,
    Step,
)
from tests.cluster.by_socket import (
    LAYOUT,
    Caller,
    RefusedError,
    arrived,
    calling,
    hosted_shards,
)
from tests.cluster.hosted import bare_host

RUN, N_RANKS = 7, 2


class Both:
    """Two hosts of the same shards: one is called by sockets, one by messages."""

    def __init__(self, by_socket: ShardHost, by_message: ShardHost, loop: Any) -> None:
        self.hosts = by_socket, by_message
        self._loop = loop
        #: Whether trainers have sent two kinds to a round: the host that has an event
        #: loop then ends the run, and the other one has none to do so.
        self.is_over = False

    def call(self, socket: Caller, call: Call) -> bool:
        """Make a call in both ways, and see that all of it is the same afterwards.

        Returns whether it was accepted everywhere.
        """
        found, said = by_socket(socket, call), self._by_message(call)
        if isinstance(found, str):
            assert found in [type(answer.error).__name__ for answer in said]
        else:
            assert [*map(plain, found)] == [*map(plain, said)]
        self.is_over |= any("a round has one kind" in str(a.error) for a in said)
        ours, theirs = ([*host.shards.values()] for host in self.hosts)
        for our, their in zip(ours, theirs, strict=True):
            mine, other = our.shard.segment, their.shard.segment
            assert mine.buffer.tobytes() == other.buffer.tobytes()
            assert our.shard.waiting == their.shard.waiting == []
        return not isinstance(found, str) and all(answer.applied for answer in found)

    def _by_message(self, call: Call) -> list[Answer]:
        return self._loop.run_until_complete(self.hosts[1].call(arrived(call)))

    def begin(self, policy: str) -> None:
        for host in self.hosts:
            for hosted in host.shards.values():
                hosted.shard.begin_run(RUN, consistency.policy(policy), N_RANKS)


def by_socket(socket: Caller, call: Call) -> list[Answer] | str:
    """Return what a socket answers, at once; the name of an error where it refuses."""
    found = socket.begin(call)
    if isinstance(found, Parked):
        found = found.finish(0)
    assert isinstance(found, list)
    try:
        return socket.answers(found, call)
    except RefusedError as refusal:
        return str(refusal).partition(":")[0]


def plain(answer: Answer) -> Any:
    """Return an answer as what can be compared; a call that waits has no version."""
    said = answer.shard, answer.parked, answer.applied
    if answer.parked:
        return said
    arrays = [array.tobytes() for array in answer.arrays]
    return (*said, answer.version, answer.lag, arrays)


@contextmanager
def both() -> Iterator[Both]:
    loop = asyncio.new_event_loop()

    async def made() -> ShardHost:
        return stack.__enter__()

    with bare_host(None, *hosted_shards()) as ours:
        stack = bare_host(loop, *hosted_shards())
        theirs = loop.run_until_complete(made())
        try:
            yield Both(ours, theirs, loop)
        finally:
            stack.__exit__(None, None, None)
            loop.close()


# -- calls -----------------------------------------------------------------------


def some_items(rng: Random, shard: int, step: Step, codec: str) -> list[Item]:
    """Return arrays for some pieces of a shard, or for parts of them."""
    share = 0.97 if step.run else 0.6
    items, is_whole = [], rng.random() < share
    for position, piece in enumerate(LAYOUT.pieces[shard]):
        start, n = 0, piece.size
        if not is_whole:
            if rng.random() < 0.3:
                continue
            start = rng.randint(0, piece.size)
            n = rng.randint(0, piece.size - start)
            if codec:  # words are those of whole pieces
                start, n = 0, piece.size
        found = rng.randint(-3, 9) + np.arange(n) / 8
        found = found.astype(dtype_of_item(piece, step.kind))
        if codec:
            words = np.empty(n, "u2")
            codecs.BFloat16().encode(found, words, cache_dir=cache_dir())
            found = words
        items.append(Item(position, start, found))
    return items


def some_ranges(rng: Random, shard: int) -> tuple[Any, ...]:
    """Return some elements of each dtype of a shard."""
    found = []
    for dtype in LAYOUT.lengths:
        stop = rng.randint(0, LAYOUT.n_elements[shard][dtype])
        found.append((dtype, rng.randint(0, stop), stop))
    return tuple(found)


def a_call(rng: Random, common: Step, shards: Iterable[int]) -> Call:
    """Return a call to some shards: what each gets, and maybe reads, is by chance."""
    codec = "bf16" if common.kind == GRADIENT and rng.random() < 0.2 else ""
    parts = []
    for shard in shards:
        items: list[Item] = []
        if common.kind != NOTHING:
            items = some_items(rng, shard, common, codec)
        step = common._replace(items=tuple(items))
        ranges: tuple[Any, ...] = ()
        if common.wait == READ or (common.wait == NO_WAIT and rng.random() < 0.1):
            step, ranges = step._replace(wait=READ), some_ranges(rng, shard)
        if not step.run and step.wait == READ:
            step = step._replace(at_least=rng.choice([0, 0, 0, 1, 5]))
        parts.append(Part(shard, step, ranges))
    read_codec = "" if common.sequence % 3 else "fp16"
    return Call("s", tuple(parts), 0.0, codec=codec, read_codec=read_codec)


SHARDS = range(LAYOUT.n_shards)
SEEDS = range(4)
N_CALLS = 40


@pytest.mark.parametrize("seed", SEEDS)
def test_calls_outside_runs(seed):
    rng = Random(seed)
    with both() as hosts, calling(hosts.hosts[0]) as socket:
        for number in range(1, N_CALLS):
            step = Step(
                rng.choice([NOTHING, GRADIENT, GRADIENT, ADD, ASSIGN]),
                producer=3,
                # Some come again.
                sequence=number - rng.choice([0, 0, 0, 0, 1, 2]),
                weight=rng.choice([1.0, 1.0, 0.5]),
                lr=rng.choice([None, None, 0.25]),
                wait=rng.choice([NO_WAIT, READ]),
                generation=rng.choice([1, 1, 1, 1, 1, 1, 2]),
                touched=rng.choice([None, ((0, 2),)]),
                floor=max(0, number - 5),
                owned=True,
            )
            shards = sorted(rng.sample(SHARDS, rng.randint(1, len(SHARDS))))
            hosts.call(socket, a_call(rng, step, shards))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["bsp", "asp", "ssp"])
def test_calls_of_trainers(policy, seed):
    """Clocks and numbers go on as they would; some steps come again, early or late."""
    rng = Random(seed)
    clocks, numbers = [0] * N_RANKS, [0] * N_RANKS
    with both() as hosts:
        hosts.begin(policy)
        with calling(hosts.hosts[0]) as a, calling(hosts.hosts[0]) as b:
            for _ in range(N_CALLS):
                if hosts.is_over:
                    break
                rank = rng.choice([clocks.index(min(clocks)), 0, 1])
                kind = rng.choice([NOTHING, GRADIENT, GRADIENT, GRADIENT])
                ticks = rng.choice([True, True, True, False])
                step = Step(
                    MODEL if rng.random() < 0.02 else kind,
                    run=RUN,
                    rank=rank,
                    clock=clocks[rank] + rng.choice([0] * 9 + [-1, 1]),
                    tick=ticks,
                    sequence=numbers[rank],
                    weight=rng.choice([1.0, 1.0, 2.0, 0.0]),
                    wait=rng.choice([NO_WAIT, NO_WAIT, READ, BARRIER]),
                    owned=True,
                )
                changes = kind != NOTHING or ticks
                shards = SHARDS if changes else [rng.choice(SHARDS)]
                accepted = hosts.call((a, b)[rank], a_call(rng, step, shards))
                if accepted and step.clock == clocks[rank] and rng.random() < 0.8:
                    numbers[rank] += changes
                    clocks[rank] += ticks
            flips = [h.shard.segment.flip for h in hosts.hosts[0].shards.values()]
            assert max(flips) > 4 or hosts.is_over
