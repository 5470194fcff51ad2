from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.errors import ProducerExpiredError, ShardBusyError
from daskps.shards import producers
from daskps.shards.memory.format import CLOSED, MAX_KEPT, MAX_PRODUCERS, N_KEPT, Record
from daskps.shards.producers import WINDOW, list_open, note_push
from daskps.shards.steps import ADD, Item, Step
from tests.invariants import validate
from tests.shards.making import A, contents, done, failed, make, send, weights


def record() -> Record:
    return Record(np.zeros(Record.n_words(0), np.int64), 0)


def add(producer, sequence=0):
    data = np.zeros(5)
    data[0] = 1
    return Step(ADD, [Item(A, 0, data)], producer=producer, sequence=sequence)


def took(found: Record, producer: int, sequence: int) -> bool:
    """Note a push unless it is a repeat, as a shard does; return whether it was new."""
    is_new = not producers.repeats(found, producer, sequence)
    if is_new:
        note_push(found, Step(producer=producer, sequence=sequence))
    return is_new


@given(st.lists(st.integers(0, 200), max_size=60))
def test_each_number_is_new_once_and_nothing_new_below_the_window(sequences):
    found = record()
    seen: set[int] = set()
    for sequence in sequences:
        is_new = sequence not in seen
        if seen and sequence <= max(seen) - WINDOW:
            # It was meant for other shards, or has been applied.
            is_new = False
        assert producers.repeats(found, 5, sequence) != is_new
        assert took(found, 5, sequence) == is_new
        seen |= {sequence} if is_new else set()


def given_up(found: Record, *numbers: int, by: int = 1, before: int) -> None:
    """Note a push that leaves some behind which were given up."""
    note_push(found, Step(producer=by, sequence=before, given_up=numbers))


def test_a_push_that_was_given_up_is_applied_once_however_late():
    found = record()
    for number in (0, 1, 3):
        took(found, 1, number)
    given_up(found, 0, 2, 5, 90, before=WINDOW + 30)
    # Applied before, in the window, and what nobody has ever pushed here.
    assert not any(took(found, 1, number) for number in (0, 1, 3, 4))
    assert [took(found, 1, number) for number in (2, 2, 5, 5)] == [True, False] * 2
    assert [took(found, 1, 90), took(found, 1, 90)] == [True, False]
    assert found.fixed[N_KEPT] == 0


def test_given_up_before_any_push_came():
    found = record()
    given_up(found, 0, 63, 64, before=500)
    assert [took(found, 1, number) for number in (63, 0, 64, 1)] == [True] * 3 + [False]


def test_producers_do_not_share_what_was_given_up():
    found = record()
    for by in (1, 2):
        given_up(found, by, by=by, before=100)
    assert took(found, 1, 1)
    assert not took(found, 1, 2)
    assert took(found, 2, 2)


def test_of_too_many_the_oldest_are_refused_and_no_others():
    found = record()
    many = MAX_KEPT * WINDOW
    for block in range(MAX_KEPT + 2):
        given_up(found, block * WINDOW + 5, before=(block + 2) * WINDOW)
    for number in (5, WINDOW + 5):
        with pytest.raises(
            ProducerExpiredError, match=r"1 is one of 0 to 127.*applied"
        ):
            took(found, 1, number)
    assert not took(found, 1, 2 * WINDOW)
    assert took(found, 1, 2 * WINDOW + 5)
    assert took(found, 1, many + 5)
    # Those that stay are those of others too.
    given_up(found, 7, by=2, before=100)
    assert took(found, 2, 7)
    assert not took(found, 2, 8)


def test_a_producer_that_loses_its_place_leaves_nothing_behind():
    found = record()
    given_up(found, 3, before=100)
    producers._expire(found, 1)
    assert found.fixed[N_KEPT] == 0


def test_all_of_a_window_may_come_in_reverse():
    found = record()
    assert all(took(found, 1, s) for s in reversed(range(WINDOW)))
    assert not any(took(found, 1, s) for s in range(WINDOW))
    assert took(found, 1, WINDOW)
    assert not took(found, 1, 0)
    assert not took(found, 1, 1)


def test_producers_do_not_share_a_window():
    found = record()
    assert took(found, 1, 500)
    assert took(found, 2, 0)
    assert not took(found, 2, 0)
    assert list_open(found) == [1, 2]


def test_asking_changes_nothing():
    found = record()
    took(found, 1, 3)
    before = found.fixed.tolist(), found.producers.tolist()
    producers.repeats(found, 1, 3)
    producers.repeats(found, 1, 4)
    producers.repeats(found, 2, 0)
    assert (found.fixed.tolist(), found.producers.tolist()) == before


def full_shard():
    shard = make()
    send(shard, *(add(p) for p in range(1, MAX_PRODUCERS + 1)))
    return shard


def test_one_producer_too_many_is_refused_while_all_are_open():
    shard = full_shard()
    before = contents(shard)
    assert producers.lacks_room(shard.segment.current, 2000)
    assert not producers.lacks_room(shard.segment.current, 5)
    assert len(producers.list_open(shard.segment.current)) == MAX_PRODUCERS
    (ticket,) = send(shard, add(2000))
    assert isinstance(ticket.outcome, ShardBusyError)
    assert "the first is 1" in str(ticket.outcome)
    assert contents(shard) == before
    assert not done(send(shard, add(5, 1))[0]).duplicate


def test_the_producer_that_was_closed_first_makes_room_and_cannot_come_back():
    shard = full_shard()
    producers.close_producers(shard.segment, [7])
    producers.close_producers(shard.segment, [3, 7, 12345])
    validate(shard)
    assert not producers.lacks_room(shard.segment.current, 2000)
    send(shard, add(2000))
    # A repeat of 7's push cannot be told from a new one any more.
    assert failed(send(shard, add(7), add(7, 1)), ProducerExpiredError)
    assert done(send(shard, add(3))[0]).duplicate
    send(shard, add(2001))
    assert failed(send(shard, add(3)), ProducerExpiredError)
    assert weights(shard)[A][0] == MAX_PRODUCERS + 2


def test_a_closed_producer_that_pushes_is_open_again():
    """A task that runs again has the number it had."""
    shard = full_shard()
    producers.close_producers(shard.segment, [7])
    send(shard, add(7, 1))
    assert 7 in producers.list_open(shard.segment.current)
    assert failed(send(shard, add(2000)), ShardBusyError)


def test_closing_is_no_publication():
    shard = full_shard()
    flip = shard.segment.flip
    producers.close_producers(shard.segment, range(100))
    assert shard.segment.flip == flip
    validate(shard)


def test_a_floor_that_comes_before_a_push_takes_a_row_that_is_free():
    shard = make()
    send(shard, *(add(p) for p in range(1, MAX_PRODUCERS)))
    flip = shard.segment.flip
    for producer in (2000, 2001):
        shard.in_flight.raise_floor(producer, 3)
        validate(shard)
    assert shard.segment.flip == flip
    assert [shard.in_flight.floor(p) for p in (2000, 2001)] == [3, 0]
    assert not done(send(shard, add(2000, 2))[0]).duplicate
    assert failed(send(shard, add(2001)), ShardBusyError)
    producers.close_producers(shard.segment, [7])
    send(shard, add(2001))
    # A producer that has lost its row gets no other: its pushes would count again.
    shard.in_flight.raise_floor(7, 3)
    assert failed(send(shard, add(7)), ProducerExpiredError)


def test_thousands_of_tasks_push_once_each_and_none_twice():
    shard = make()
    for first in range(1, 5000, 500):
        ids = range(first, first + 500)
        tickets = send(shard, *(add(p) for p in ids), *(add(p) for p in ids))
        assert [done(t).duplicate for t in tickets] == [False] * 500 + [True] * 500
        producers.close_producers(shard.segment, ids)
    assert weights(shard)[A][0] == 5000
    assert failed(send(shard, *(add(p) for p in range(1, 3900))), ProducerExpiredError)
    assert weights(shard)[A][0] == 5000
    assert not done(send(shard, add(6000))[0]).duplicate


# -- shards that are cut anew ----------------------------------------------------------


def cut_anew(*shards: Record) -> Record:
    """Return a new shard that has elements of some."""
    found = record()
    every = [producers.noted(shard) for shard in shards]
    # By host first, as a store does.
    producers.take_over(
        found, producers.joined([producers.joined(every[:2]), *every[2:]])
    )
    return found


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 7)), max_size=60))
def test_other_shards_know_each_push_that_any_has_applied(pushes):
    """Each is meant for some of three shards, and within the window of the newest."""
    shards, applied, newest = [record() for _ in range(3)], set[int](), 0
    for sequence, meant in pushes:
        newest = max(newest, sequence)
        if sequence > newest - WINDOW // 2:
            applied.add(sequence)
            for i, shard in enumerate(shards):
                if meant >> i & 1:
                    took(shard, 5, sequence)
    found = cut_anew(*shards)
    for sequence in range(newest - WINDOW // 2 + 1, newest + 3):
        assert took(found, 5, sequence) == (sequence not in applied)
    assert not took(found, 5, newest - WINDOW - 200)
    assert took(found, 6, 0)


def test_of_what_was_given_up_other_shards_cannot_tell():
    one, other = record(), record()
    took(other, 1, 3)
    given_up(one, 2, 5, before=2 * WINDOW + 30)
    found = cut_anew(one, other)
    for number in (2, 3, 63):
        with pytest.raises(ProducerExpiredError, match="nothing was applied"):
            took(found, 1, number)
    assert not took(found, 1, WINDOW)
    assert took(found, 1, 2 * WINDOW + 31)


def test_those_that_nobody_remembers_any_more_are_refused_by_other_shards():
    """Each number that has pushed, also where the shard had no place left for it."""
    found = record()
    for producer in range(1, 2 * MAX_PRODUCERS + 3):
        assert took(found, producer, 0)
        row = producers.find_row(found, producer)
        assert row is not None
        row[CLOSED] = producer
    for shard in (found, cut_anew(found), cut_anew(cut_anew(found))):
        for gone in (1, 2, 3, MAX_PRODUCERS):
            with pytest.raises(ProducerExpiredError):
                took(shard, gone, 0)


def test_those_that_were_closed_make_room_in_other_shards():
    one, other = record(), record()
    for producer in range(1, MAX_PRODUCERS + 1):
        took(one, producer, 0)
        took(other, producer + 5, 0)
    with pytest.raises(ShardBusyError, match="still open"):
        cut_anew(one, other)
    for turn, producer in enumerate((9, 3, 4, 6, 7, 8), 1):
        for shard in (one, other):
            if (row := producers.find_row(shard, producer)) is not None:
                row[CLOSED] = turn
    found = cut_anew(one, other)
    assert len(list_open(found)) == MAX_PRODUCERS - 1
    for gone in (9, 3, 4, 6, 7):
        with pytest.raises(ProducerExpiredError):
            took(found, gone, 1)
    assert took(found, 8, 1)
    assert took(found, MAX_PRODUCERS + 5, 1)
