"""What a shard says has changed in a table, with and without its lock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps.errors import ProtocolError
from daskps.layout.arrays import Layout
from daskps.shards.memory.format import ROWS_SEQUENCE, VERSION
from daskps.shards.memory.publication import Withdrawal
from daskps.shards.memory.segment import Segment
from daskps.shards.reader import ShardReader
from daskps.shards.row_changes import NEVER, ChangesRequest, changes, changes_locked
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, REMOVE, Item, Step, Ticket
from tests.kernels.compiling import kept
from tests.shards import unbounded_rowing

LAYOUT = Layout.build({"w": ((2,), "float32")}, 1, {"emb": (40, 1, "float32")})
#: Positions of the array and of the table.
W, EMB = 0, 1


def pushed(shard: Shard, position: int, ids: Any = ()) -> None:
    data, of = np.ones(len(ids) or 2, "f4"), np.array(ids, np.int64)
    item = Item(position, 0, data, of if position == EMB else None)
    ticket = Ticket(Step(ADD, [item], producer=1, sequence=shard.segment.flip))
    shard.submit([ticket])
    assert not isinstance(ticket.outcome, Exception)


@pytest.fixture
def shard() -> Shard:
    """A shard that somebody follows, and two pushes, to rows 3 and 1, and 2."""
    made = Shard(Segment(LAYOUT, 0, {}, durable=True), {}, cache_dir=kept())
    said = changes_locked(made.segment, ChangesRequest(EMB, NEVER, 100))
    assert (said.version, said.complete) == (0, False)
    assert said.ids is not None
    assert said.ids.tolist() == [*range(40)]
    pushed(made, EMB, [3, 1])
    pushed(made, EMB, [2])
    return made


def test_ids_rows_and_version_are_of_one_state(shard):
    each: list[Any] = [changes, changes_locked]
    for asked in each:
        said = asked(shard.segment, ChangesRequest(EMB, 0, 100))
        assert (said.version, said.complete, said.found) == (2, True, None)
        assert (said.ids.tolist(), said.rows.tolist()) == ([1, 2, 3], [1, 1, 1])
        said = asked(shard.segment, ChangesRequest(EMB, 1, 100))
        assert said.ids.tolist() == [2]
        assert (
            asked(shard.segment, ChangesRequest(EMB, 0, 100, by=1)).ids.tolist() == []
        )


@pytest.mark.parametrize("position", [W, EMB])
def test_a_look_that_an_update_runs_into_finds_nothing(shard, monkeypatch, position):
    """Before its rows are copied, and after that."""
    copy, wanted = ShardReader.read_at, ChangesRequest(EMB, 0, 100)

    def before(*args: Any) -> bool:
        pushed(shard, position, [1] if position == EMB else ())
        return copy(*args)

    def after(*args: Any) -> bool:
        is_whole = copy(*args)
        for _ in range(2):
            pushed(shard, position, [1] if position == EMB else ())
        return is_whole

    for run_into in (before, after):
        monkeypatch.setattr(ShardReader, "read_at", run_into)
        assert changes(shard.segment, wanted) is None
    monkeypatch.undo()
    assert changes(shard.segment, wanted) is not None


def test_only_the_owner_says_all_and_settles(shard):
    segment = shard.segment
    assert changes(segment, ChangesRequest(EMB, NEVER, 100)) is None
    assert changes(segment, ChangesRequest(EMB, 0, 2)) is None
    said = changes_locked(segment, ChangesRequest(EMB, 0, 2))
    assert (said.complete, said.rows) == (True, None)
    assert said.ids is not None
    assert said.ids.tolist() == [1, 2, 3]
    said = changes_locked(segment, ChangesRequest(EMB, NEVER, 39))
    assert said == (2, False, None, None, None)
    # A writer that died has left the sequence odd.
    segment.header[ROWS_SEQUENCE] += 1
    assert changes(segment, ChangesRequest(EMB, 0, 100)) is None
    assert changes_locked(segment, ChangesRequest(EMB, 0, 100)).complete
    with pytest.raises(ProtocolError, match="which is no table"):
        changes_locked(segment, ChangesRequest(W, 0, 100))


@pytest.mark.parametrize("policy", [{"ttl": 3}, {"ttl": 5, "max_rows": 40}])
def test_rows_whose_time_is_over_are_told(policy):
    """Though no push names them; also those that had to make room."""
    rng, made_of = (
        np.random.default_rng(2),
        unbounded_rowing.layout_of(room=200, **policy),
    )
    shard = unbounded_rowing.made(made_of)
    n, ids = len(shard.segment.pieces), np.arange(90)
    copy, since = dict[int, Any](), NEVER
    for sequence in range(60):
        few = rng.permutation(ids)[: rng.integers(0, 6)].tolist()
        kind = REMOVE if rng.random() < 0.2 else ADD
        named = {unbounded_rowing.EMB: [(i, 1) for i in few]}
        unbounded_rowing.send(
            shard, unbounded_rowing.step(shard, kind, named, sequence)
        )
        if rng.random() < 0.5:
            continue
        said = changes_locked(shard.segment, ChangesRequest(n, since, 1000))
        assert said.complete == (since != NEVER)
        assert said.ids is not None
        assert said.rows is not None
        assert said.found is not None
        rows = zip(said.ids.tolist(), said.found, said.rows.reshape(-1, 2), strict=True)
        for i, found, row in rows:
            copy.pop(i, None)
            if found:
                copy[i] = row.tolist()
        since = said.version
        assert copy == unbounded_rowing.read(shard, unbounded_rowing.EMB, ids.tolist())
    assert copy


def test_rows_that_are_there_again_after_a_withdrawal_are_told():
    """A round was the push that was one too many for them."""
    shard = unbounded_rowing.made(unbounded_rowing.layout_of(ttl=2))
    asked = ChangesRequest(len(shard.segment.pieces), NEVER, 100)
    changes_locked(shard.segment, asked)
    for sequence, i in enumerate([1, 2, 3]):
        named = {unbounded_rowing.EMB: [(i, 1)]}
        unbounded_rowing.send(shard, unbounded_rowing.step(shard, ADD, named, sequence))
    assert unbounded_rowing.read(shard, unbounded_rowing.EMB, [1]) == {}
    withdrawal = Withdrawal(shard.segment)
    withdrawal.record.plain[VERSION] = 4
    withdrawal.commit()
    said = changes_locked(shard.segment, asked._replace(since=3))
    assert said.ids is not None
    assert (said.version, said.complete, said.ids.tolist()) == (4, False, [1, 2])


def test_who_takes_over_settles_what_a_dead_owner_was_at(shard):
    """Else all who read rows without the lock would have to ask until the next push."""
    shard.segment.header[ROWS_SEQUENCE] += 1
    assert changes(shard.segment, ChangesRequest(EMB, 0, 100)) is None
    shard.take_over()
    said = changes(shard.segment, ChangesRequest(EMB, 0, 100))
    assert said is not None
    assert said.ids is not None
    assert said.ids.tolist() == [1, 2, 3]
