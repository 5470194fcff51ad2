"""Which unbounded rows there are: candidates, so many rows at most, rows in their time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps.consistency import BSP
from daskps.kernels import id_hash
from daskps.layout.buckets import bucket_rows
from daskps.shards.arrays.unbounded_rows import UnboundedRows
from daskps.shards.frozen_rows import all_ids
from daskps.shards.memory import areas
from daskps.shards.memory.format import VERSION
from daskps.shards.memory.publication import Withdrawal
from daskps.shards.rounds.mailbox import Mailbox
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, ASSIGN, GRADIENT, REMOVE, Step
from tests.invariants import validate
from tests.shards.unbounded_rowing import (
    EMB,
    Model,
    all_rows,
    item,
    layout_of,
    made,
    read,
    send,
    slots_of,
    step,
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Little memory for the log of words, all of which is written, and for the index."""
    monkeypatch.setattr(areas, "MOST_PUSHED_ROWS", 256)
    monkeypatch.setattr(areas, "FEWEST_SLOTS", 16)


POLICIES: dict[str, dict[str, int]] = {
    "candidates": {"admit_after": 3},
    "time": {"ttl": 4},
    "most": {"max_rows": 300},
    "all": {"max_rows": 130, "ttl": 9, "admit_after": 2},
}


class Policy(Model):
    """A dict for each table, that rows leave as the policy of the table says."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        of = table.of
        self.table, self.most = table, of.max_rows
        self.ttl, self.admit = of.ttl or 10**9, of.admit_after
        self.clock = 0
        self.touched: dict[int, int] = {}
        self.candidates: dict[int, int] = {}
        self.admitted = self.evicted = 0

    def push(self, kind: str, named: dict[int, list[tuple[int, int]]]) -> None:
        ids = list(dict.fromkeys(i for i, _ in named[EMB]))
        if kind == REMOVE:
            super().push(kind, named)
            for i in ids:
                self.candidates.pop(i, None)
                self.touched.pop(i, None)
            return
        admit = 1 if kind == ASSIGN else self.admit
        new = []
        for i in ids:
            if i not in self.touched:
                n = self.candidates.pop(i, 0) + 1
                if n < admit:
                    self.candidates[i] = n
                else:
                    new.append(i)
        self.clock += 1
        self.admitted += len(new)
        for i in [*new, *(i for i in ids if i in self.touched)]:
            self.touched[i] = self.clock
        if self.most:
            self._evict()
        here = [(i, v) for i, v in named[EMB] if i in self.touched]
        super().push(kind, {EMB: here})
        self._expire()

    def _evict(self) -> None:
        ids = np.array([*self.touched], np.int64)
        found = id_hash.buckets(ids, self.table.hash_seed, self.table.n_buckets)
        for bucket in set(found.tolist()):
            mine = sorted((self.touched[i], i) for i in ids[found == bucket].tolist())
            edges = bucket, bucket + 1
            low, high = (bucket_rows(self.most, b) for b in edges)
            for _, i in mine[: max(0, len(mine) - (high - low))]:
                self.evicted += 1
                self._forget(i)

    def _expire(self) -> None:
        for i, last in list(self.touched.items()):
            if last <= self.clock - self.ttl:
                self._forget(i)

    def _forget(self, i: int) -> None:
        del self.touched[i]
        self.rows[EMB].pop(i, None)
        self.slots.pop(i, None)


def pushes(n: int) -> Any:
    """Pushes of chance; every tenth of them names many ids that nobody has named yet."""
    rng, kinds = np.random.default_rng(7), (GRADIENT, ADD, GRADIENT, ASSIGN, REMOVE)
    for i in range(n):
        ids = rng.integers(-200, 200, 60) * 1_000_003
        if i % 10 == 9:
            ids = np.append(ids, rng.integers(10**9, 10**12, 150))
        values = rng.integers(-4, 5, len(ids))
        kind = kinds[i % len(kinds)]
        pairs = list(zip(ids.tolist(), values.tolist(), strict=True))
        yield kind, {EMB: pairs[: 10 if kind == REMOVE else None]}


@pytest.mark.parametrize("n_shards", [1, 2, 3, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_those_of_a_plain_dict_on_any_number_of_shards(policy, n_shards):
    layout = layout_of(n_shards, room=4096, **POLICIES[policy])
    shards, model = [made(layout, i) for i in range(n_shards)], Policy(layout.tables[0])
    for n, (kind, named) in enumerate(pushes(30)):
        candidates: dict[int, int] = {}
        counts = np.zeros(4, int)
        slots: dict[int, Any] = {}
        told: list[int] = []
        for shard in shards:
            flip, asked = shard.segment.flip, [i for i, _ in named[EMB]]
            there = read(shard, EMB, asked)
            (ticket,) = send(shard, step(shard, kind, named, n))
            assert not isinstance(ticket.outcome, Exception), ticket.outcome
            assert read(shard, EMB, asked, flip) == there
            validate(shard)
            (table, _), segment = shard.segment.tables, shard.segment
            assert table.unbounded is not None
            slots |= slots_of(shard)
            told += all_ids(segment, len(segment.pieces)).tolist()
            keys, times = table.unbounded.index.candidates()
            candidates |= dict(zip(keys.tolist(), times.tolist(), strict=True))
            lowest = table.since(segment.current)
            counts += [*table.unbounded.counts(lowest).values()]
        model.push(kind, named)
        rows = rows_of(shards)
        assert rows == model.of(EMB)
        assert sorted(told) == sorted(rows)
        assert slots == {i: [v] * 2 for i, v in model.slots.items()}
        assert candidates == model.candidates
        known = [len(rows), len(candidates), model.admitted, model.evicted]
        assert counts.tolist() == known
        assert {s.segment.current.clocks[0] for s in shards} == {model.clock}
    assert model.candidates or model.admit == 1
    assert model.evicted > 9 or not model.most


def test_a_publication_that_evicted_rows_is_withdrawn():
    """Ids, rows, slots, counts and candidates are what they were."""
    shard = made(layout_of(max_rows=40, admit_after=2, ttl=9))
    ids = [(i * 999, 1) for i in range(40)]
    for n in range(2):
        send(shard, step(shard, GRADIENT, {EMB: ids}, n))
    before, slots = contents(shard), slots_of(shard)
    new = [(-i, 2) for i in range(1, 30)]
    send(shard, step(shard, ADD, {EMB: new}, 2))
    at_last = contents(shard)
    assert [*at_last[2]] == [-i for i in range(29, 0, -1)]
    flip = shard.segment.flip
    send(shard, step(shard, ASSIGN, {EMB: [*new, *ids[:3]]}, 3))
    assert contents(shard)[4]["evictions"] == 29
    assert len(read(shard, EMB, [i for i, _ in ids], flip) or ()) == 40
    withdrawal = Withdrawal(shard.segment)
    withdrawal.record.plain[VERSION] = 9
    withdrawal.commit()
    assert contents(shard) == at_last
    assert contents(shard)[:2] == before[:2]
    assert slots_of(shard) == slots
    validate(shard)


@pytest.mark.parametrize("n_shards", [1, 2, 3, 5])
def test_rounds_that_evict_rows_have_the_same_rows_on_any_number_of_shards(n_shards):
    """Two ranks, new ids in every tenth round; the last such round is withdrawn."""
    layout, ranks = layout_of(n_shards, 4096, max_rows=200, admit_after=2), 2
    model, before = Policy(layout.tables[0]), dict[int, list[float]]()
    shards = [made(layout, i) for i in range(n_shards)]
    for shard in shards:
        piece = shard.segment.tables[0].piece
        about = (
            layout.pieces[piece.shard],
            ranks,
            "sum",
            layout.table_pieces[piece.shard],
        )
        memory = np.zeros(Mailbox.nbytes_of(*about), np.uint8)
        shard.begin_run(7, BSP(), ranks, "sum", memory=memory)
    for clock, (_, named) in enumerate(pushes(20)):
        before = model.of(EMB)
        parts = named[EMB][::2], named[EMB][1::2]
        for shard in shards:
            for rank, pairs in enumerate(parts):
                said: Any = {"run": 7, "rank": rank, "clock": clock, "tick": True}
                items = (item(shard, EMB, pairs),)
                one = Step(GRADIENT, items, sequence=clock, **said)
                (ticket,) = send(shard, one)
                assert not isinstance(ticket.outcome, Exception), ticket.outcome
        model.push(GRADIENT, named)
        assert rows_of(shards) == model.of(EMB)
    assert model.evicted > 50
    for shard in shards:
        shard.hold_run(7)
        shard.end_run(7, "over", rounds=19, version=99)
        validate(shard)
    assert rows_of(shards) == before


def rows_of(shards: list[Shard]) -> dict[int, list[float]]:
    """All rows of the first table, by id."""
    found: dict[int, list[float]] = {}
    for shard in shards:
        ids, rows = all_rows(shard.segment, len(shard.segment.pieces))
        found |= dict(zip(ids.tolist(), rows.tolist(), strict=True))
    return found


def contents(shard: Any) -> Any:
    """Ids with their rows and states, counts, and candidates with theirs."""
    segment = shard.segment
    table = segment.tables[0].unbounded
    ids, rows = all_rows(segment, len(segment.pieces))
    keys, times = table.index.candidates()
    counted = dict(zip(keys.tolist(), times.tolist(), strict=True))
    _, numbers = table.ids(0)
    states, clock = table.state[numbers].tolist(), segment.current.clocks.tolist()
    return ids.tolist(), rows.tolist(), counted, states, table.counts(), clock


def test_a_push_says_which_ids_have_lost_their_rows(monkeypatch):
    """Evicted, expired and removed ids, not those that only read as absent."""
    gone: list[list[int]] = []
    change = UnboundedRows.change

    def noted(*args: Any) -> Any:
        update, ids = change(*args)
        gone.append(sorted(ids.tolist()))
        return update, ids

    monkeypatch.setattr(UnboundedRows, "change", noted)
    shard = made(layout_of(room=500, ttl=2))
    send(shard, step(shard, ADD, {EMB: [(i, 1) for i in range(9)]}, 0))
    send(shard, step(shard, ADD, {EMB: [(50, 1)]}, 1))
    assert len(read(shard, EMB, range(60)) or ()) == 10
    # No push: the rows of the first one stay.
    send(shard, step(shard, REMOVE, {EMB: [(50, 0), (51, 0)]}, 2))
    assert len(read(shard, EMB, range(60)) or ()) == 9
    send(shard, step(shard, ADD, {EMB: [(52, 1)]}, 3))
    assert [*(read(shard, EMB, range(60)) or ())] == [52]
    send(shard, step(shard, ADD, {EMB: [(50, 1), (3, 1)]}, 4))
    assert gone[:3] == [[], [], [50]]
    assert sorted({i for ids in gone[3:] for i in ids}) == [*range(9)]
    assert contents(shard)[4]["rows"] == 3
    validate(shard)


def test_a_push_of_more_ids_than_a_bucket_has_rows():
    """The largest ids stay, in whatever order they come."""
    shard = made(layout_of(max_rows=3))
    send(shard, step(shard, ADD, {EMB: [(i, 1) for i in (5, 900, -7, 40, 41, 3)]}, 0))
    assert read(shard, EMB, range(-10, 901)) == {i: [4.0] * 2 for i in (40, 41, 900)}
    send(shard, step(shard, ADD, {EMB: [(i, 1) for i in range(200)]}, 1))
    assert [*(read(shard, EMB, range(1000)) or ())] == [197, 198, 199]
    validate(shard)
