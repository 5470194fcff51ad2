"""What the feed of a table tells of its rows, beside a list of all publications."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from daskps.errors import LayoutError
from daskps.layout.arrays import Layout
from daskps.shards.memory import feed as feed_
from daskps.shards.memory.feed import LOST, LOST_IDS, ROOM, Feed
from daskps.shards.memory.format import VERSION
from daskps.shards.memory.publication import Withdrawal
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, REMOVE, Item, Step, Ticket
from tests.kernels.compiling import kept
from tests.shards.unbounded_rowing import EMB as UNBOUNDED_EMB
from tests.shards.unbounded_rowing import layout_of, made
from tests.shards.unbounded_rowing import step as any_step

N = 400
LAYOUT = Layout.build({"w": ((2,), "float32")}, 1, {"emb": (N, 1, "float32")})


class Told(NamedTuple):
    """A publication that changed rows."""

    version: int
    ids: set[int]
    by: int


def shard_of(*, on: bool = True) -> Shard:
    shard = Shard(Segment(LAYOUT, 0, {}, durable=True), {}, cache_dir=kept())
    if on:
        follow(shard)
    return shard


def follow(shard: Shard) -> None:
    table = shard.segment.tables[0]
    table.feed.follow(shard.segment.current, table.n_rows, shard.segment.memory)


def push(
    shard: Shard, ids: Any, *, by: int = 1, sequence: int, bad: bool = False
) -> Any:
    """Add to some rows; return the error, if it is refused as its last row is NaN."""
    ids = np.array(ids, np.int64)
    data = np.ones(len(ids), "f4")
    if bad:
        data[-1] = np.nan
    step = Step(ADD, [Item(1, 0, data, ids)], producer=by, sequence=sequence, check=bad)
    ticket = Ticket(step)
    shard.submit([ticket])
    return ticket.outcome if isinstance(ticket.outcome, Exception) else None


def read(shard: Shard, since: int, by: int = 0) -> set[int] | None:
    found = shard.segment.tables[0].feed.read(shard.segment.current, since, by)
    assert found is None or (np.diff(found) > 0).all()
    return None if found is None else set(found.tolist())


def version(shard: Shard) -> int:
    return shard.segment.current.plain[VERSION]


def expected(told: list[Told], since: int, by: int = 0) -> set[int]:
    of = [t.ids for t in told if t.version > since and not (by and t.by == by)]
    return set().union(*of)


@pytest.mark.parametrize("seed", range(3))
def test_any_pushes_are_told_or_said_to_be_gone(seed):
    """Of several producers, some refused half-way, in a ring that is written over."""
    rng, shard, told = np.random.default_rng(seed), shard_of(), list[Told]()
    room = shard.segment.tables[0].feed.head[ROOM]
    written, n_gone = [(0, 0)], 0
    for sequence in range(150):
        ids = rng.permutation(N)[
            : rng.choice([1, 3, 20, 45, 130], p=[0.4, 0.3, 0.2, 0.08, 0.02])
        ]
        by, bad = int(rng.integers(1, 4)), rng.random() < 0.15
        error = push(shard, ids, by=by, sequence=sequence, bad=bad)
        assert (error is not None) == bad
        written.append((version(shard) + bad, len(ids)))
        if not bad:
            told.append(Told(version(shard), set(ids.tolist()), by))
        for since in rng.integers(0, version(shard) + 1, 5).tolist():
            for who in (0, by, 9):
                found, wanted = read(shard, since, who), expected(told, since, who)
                assert found in (None, wanted)
                if found is None:
                    n_gone += 1
                    newer = [n for v, n in written if v > since]
                    assert sum(newer) > room or len(newer) > feed_.entries_of(room)
    assert n_gone


def test_nothing_is_noted_until_somebody_asks():
    shard = shard_of(on=False)
    push(shard, [1, 2], sequence=0)
    assert read(shard, 0) is None
    assert shard.segment.current.told[0] == 0
    follow(shard)
    assert read(shard, 0) is None
    assert read(shard, 1) == set()
    push(shard, [3], sequence=1)
    assert read(shard, 1) == {3}
    assert read(shard, 1, by=1) == set()
    follow(shard)  # which it is
    assert read(shard, 1) == {3}
    assert read(shard, 3) is None


def test_off_again_when_nobody_has_asked_for_all_of_it():
    shard = shard_of()
    feed = shard.segment.tables[0].feed
    most = feed_.entries_of(feed.head[ROOM])
    for sequence in range(2 * most):
        push(shard, [sequence], sequence=sequence)
        if sequence == most - 1:
            assert read(shard, most) == set()
    assert read(shard, most) == set(range(most, 2 * most))
    for sequence in range(2 * most, 3 * most + 1):
        assert feed.is_on
        push(shard, [1], sequence=sequence)
    assert read(shard, version(shard)) is None
    follow(shard)
    assert read(shard, version(shard)) == set()


def test_rows_of_a_round_that_is_withdrawn_are_told_again():
    """Also to who has pushed them, and where the process that did it has died at it."""
    shard = shard_of()
    push(shard, [1], sequence=0)
    push(shard, [2, 3], sequence=1)
    feed, old = shard.segment.tables[0].feed, shard.segment.current
    assert read(shard, 2) == set()
    for at in (12, 9):
        withdrawal = Withdrawal(shard.segment)
        withdrawal.record.plain[VERSION] = at
        feed.again(old, withdrawal.record)
        assert read(shard, 1) == {2, 3}
        assert read(shard, 0) == {1, 2, 3}
        assert read(shard, 2) in (set(), {2, 3})
    withdrawal.commit()
    assert version(shard) == 9
    assert read(shard, 2, by=1) == {2, 3}
    assert read(shard, 1, by=1) == {2, 3}
    assert read(shard, 0) == {1, 2, 3}
    assert read(shard, 9) == set()
    push(shard, [5], sequence=2)
    assert read(shard, 9) == {5}
    assert read(shard, 2) == {2, 3, 5}


def test_nothing_is_told_where_a_round_is_withdrawn_from_before_it_began():
    """It has no entry of that round, whose rows read otherwise now."""
    shard = shard_of(on=False)
    push(shard, [1], sequence=0)
    push(shard, [2], sequence=1)
    follow(shard)
    withdrawal = Withdrawal(shard.segment)
    withdrawal.record.plain[VERSION] = 3
    withdrawal.commit()
    assert read(shard, 2) is None
    follow(shard)
    push(shard, [5], sequence=2)
    assert (read(shard, 2), read(shard, 3)) == (None, {5})


def test_what_was_written_over_by_a_push_that_is_refused_is_gone():
    """It is rolled back, and the ring is not."""
    shard = shard_of()
    head = shard.segment.tables[0].feed.head
    for sequence in range(2):
        push(shard, range(50 * sequence, 50 * sequence + 50), sequence=sequence)
    assert read(shard, 0) == set(range(100))
    assert head[LOST_IDS] == 0
    assert push(shard, range(60, 70), sequence=2, bad=True) is not None
    assert head[LOST_IDS] == 10
    assert read(shard, 0) is None
    assert read(shard, 1) == set(range(50, 100))
    for sequence in range(3, 17):
        push(shard, [sequence], sequence=sequence)
    assert head[LOST] == 0
    assert read(shard, 1) == set(range(50, 100)) | set(range(3, 17))
    assert push(shard, [9], sequence=17, bad=True) is not None
    assert head[LOST] == 1
    assert read(shard, 1) is not None


def test_an_unbounded_table_tells_ids_and_its_feed_grows_with_it(monkeypatch):
    monkeypatch.setattr(feed_, "_FEWEST_IDS", 4)
    monkeypatch.setattr(feed_, "FIRST_IDS", 4)
    shard = made(layout_of(room=64))
    table = shard.segment.tables[0]
    feed, memory = table.feed, shard.segment.memory
    feed.follow(shard.segment.current, table.n_rows, memory)
    ids = [-5, 2**62, 0, -(2**63)]

    def add(named: Any, sequence: int) -> None:
        pairs = {UNBOUNDED_EMB: [(i, 1) for i in named]}
        shard.submit([Ticket(any_step(shard, ADD, pairs, sequence))])

    add(ids, 0)
    assert read(shard, 0) == set(ids)
    assert feed.head[ROOM] == 4
    add(range(40), 1)
    assert read(shard, 0) is None
    assert read(shard, 1) is None

    class Full:
        def take(self, parts: Any) -> None:
            raise LayoutError("there is no more")

    for given, room in ((None, 4), (Full(), 4), (memory, 10), (memory, 10)):
        feed.follow(shard.segment.current, table.n_rows, given)
        assert feed.head[ROOM] == room
        assert read(shard, 2) == set()
    add([7, 8], 2)
    assert read(shard, 2) == {7, 8}
    pairs = {UNBOUNDED_EMB: [(i, 0) for i in (8, 1000)]}
    shard.submit([Ticket(any_step(shard, REMOVE, pairs, 3))])
    assert read(shard, 3) == {8}  # what there was of them
    assert read(shard, 3, by=1) == set()


def test_words_that_are_anything_are_read_as_gone():
    """A reader without the lock finds what another is about to write."""
    rng, shard = np.random.default_rng(1), shard_of()
    for sequence in range(5):
        push(shard, [sequence, 9], sequence=sequence)
    feed = shard.segment.tables[0].feed
    assert isinstance(feed, Feed)
    entries = feed._entries
    kept = entries.copy()
    for _ in range(300):
        entries[...] = kept
        at = rng.integers(5), rng.integers(kept.shape[1])
        entries[at] = rng.choice([-1, 1, 7, -(2**62), 2**62])
        found = feed.read(shard.segment.current, int(rng.integers(0, 5)), 0)
        assert found is None or len(found) <= N
