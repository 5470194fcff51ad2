"""Sequence numbers of pushes: how far they are apart, and who is next."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from daskps.cluster.caller.producer import (
    MOST_TASKS,
    HeldTurn,
    Producer,
    Repeated,
    Turn,
    producer_of,
)
from daskps.cluster.protocol.deadline import Deadline

FOR_EVER = Deadline(None, "a push")


def acknowledge(number: int, floor: int) -> None:
    """Hear of pushes that were given up."""


def end(held: HeldTurn) -> None:
    held.__exit__(None, None, None)


async def until(turn: asyncio.Event, producer: Producer, taken: list[int]) -> None:
    async with producer.turn_async(FOR_EVER, acknowledge) as held:
        taken.append(held.number)
        await turn.wait()


async def settled() -> None:
    """Let all go on that can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_turns_on_a_loop_are_waited_for_without_looking_again() -> None:
    async def work() -> None:
        producer, taken = Producer(), list[int]()
        ends = [asyncio.Event() for _ in range(3 * Producer.SPREAD)]
        tasks = [asyncio.ensure_future(until(end, producer, taken)) for end in ends]
        await settled()
        assert taken == list(range(Producer.SPREAD))
        # None may be 32 ahead of the oldest that is open.
        for end in ends[1:5]:
            end.set()
        await settled()
        assert len(taken) == Producer.SPREAD
        ends[0].set()
        await settled()
        assert taken == list(range(Producer.SPREAD + 5))
        for end in ends:
            end.set()
        await asyncio.gather(*tasks)
        assert taken == list(range(3 * Producer.SPREAD))

    asyncio.run(work())


@pytest.mark.parametrize("when", ["waiting", "called"])
def test_who_is_cancelled_leaves_the_turn_to_the_next(when: str) -> None:
    async def work() -> None:
        producer, taken = Producer(), list[int]()
        held = [producer.turn(FOR_EVER, acknowledge) for _ in range(Producer.SPREAD)]
        first, second = (
            asyncio.ensure_future(until(asyncio.Event(), producer, taken))
            for _ in range(2)
        )
        await settled()
        if when == "called":
            # Heard on the loop only after it was cancelled.
            end(held[0])
            first.cancel()
            end(held[1])
        else:
            first.cancel()
            await settled()
            end(held[0])
            end(held[1])
        await settled()
        assert first.cancelled()
        # It keeps its number: another try of the task has no error there.
        assert taken == [Producer.SPREAD + 1]
        second.cancel()

    asyncio.run(work())


def test_a_turn_is_waited_for_as_long_as_was_said() -> None:
    async def work() -> None:
        producer = Producer()
        held = [producer.turn(FOR_EVER, acknowledge) for _ in range(Producer.SPREAD)]
        with pytest.raises(TimeoutError, match="a push"):
            async with producer.turn_async(Deadline(0.01, "a push"), acknowledge):
                pass
        end(held[0])
        end(held[1])
        async with producer.turn_async(FOR_EVER, acknowledge) as turn:
            assert turn == Turn(Producer.SPREAD + 1, 2)

    asyncio.run(work())


def test_parts_of_a_push_are_numbered_together_and_leave_one_by_one() -> None:
    """As many as there are: in a task that is tried again all have the same numbers."""

    async def work() -> None:
        producer, taken = Producer(("task", 0.0)), list[int]()
        told: list[tuple[int, ...]] = []
        producer.id = 7
        parts = producer.take(3 * Producer.SPREAD)
        assert producer.take(1) == range(96, 97)
        waiting = asyncio.ensure_future(until(asyncio.Event(), producer, taken))
        for number in parts[:70]:
            async with producer.turn_async(FOR_EVER, acknowledge, [0], number) as turn:
                assert turn == Turn(number, number)
        await settled()
        assert (taken, waiting.done()) == ([97], False)
        # The one after fails: nothing is to become of the others.

        def hear(*what: int) -> None:
            told.append(what)

        with pytest.raises(KeyError), producer.turn(FOR_EVER, hear, [0], 70):
            raise KeyError
        producer.give_up(parts, hear, [0, 1])
        waiting.cancel()
        with producer.turn(FOR_EVER, hear) as turn:
            assert turn == Turn(98, 96, (*range(70, 96),))
        # A cut waits for what may have reached some shards, and for nothing else.
        assert told == [(7, 71)]

    asyncio.run(work())


def test_of_tasks_that_nobody_hears_the_end_of_some_are_kept() -> None:
    link: Any = SimpleNamespace(producers={}, idle_producers={})
    last = MOST_TASKS + 10
    for task in range(last + 1):
        producer_of(link, "a", (task, 0.0))
        Repeated(link, "a", (task, 0.0)).end()
    assert len(link.producers) == len(link.idle_producers) == MOST_TASKS
    key = "a", (last, 0.0)
    assert producer_of(link, *key) is link.producers[key]
    [kept], _ = link.idle_producers[key]
    Repeated(link, *key).end()
    assert link.idle_producers[key][0] == [kept]
