"""What shards get of ids and rows, and how their answers are put in order again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from daskps.cluster.caller import routes
from daskps.cluster.caller.local import SOON_SECONDS, SplitRoute
from daskps.cluster.caller.routes import Step
from daskps.cluster.caller.row_routes import IdSplit, RowBatch, slices_of
from daskps.cluster.caller.shard_map import StoreMap
from daskps.cluster.caller.targets import Target
from daskps.layout.arrays import Layout

ROWS, DIM = 23, 3
RowIds = st.lists(st.integers(0, ROWS - 1), max_size=30)


def layout_of(n_shards: int) -> Layout:
    return Layout.build(
        {"w": ((4,), "float64")}, n_shards, {"t": (ROWS, DIM, "float64")}
    )


def map_of(layout: Layout) -> StoreMap:
    n = layout.n_shards
    more = {
        "rules": b"",
        "optimizers": [],
        "cluster": "",
        "segments": [],
        "lineage": "s",
        "origin": "s",
        "recovers": False,
    }
    where = {"owners": ["tcp://a"] * n, "generations": [1] * n}
    about = {"uid": "u", "name": "s", "session": True, "layout": layout.to_wire()}
    return StoreMap({**about, **where, **more})


@given(RowIds, st.integers(1, 30), st.booleans())
def test_each_row_goes_to_the_shard_that_has_it(ids, n_shards, sent):
    layout = layout_of(n_shards)
    flat = np.array(ids, "i8")
    data = np.arange(len(ids) * DIM, dtype="f8")
    row_batch = RowBatch(IdSplit.of(layout.tables[0], flat, n_shards), data)
    found: list[tuple[int, Any]] = []
    for shard in range(n_shards):
        position, start, rows, its, at = row_batch.item(layout, shard, sent=sent)
        assert its is not None
        piece = layout.table_pieces[shard][0]
        assert (position, start) == (len(layout.pieces[shard]), 0)
        assert ((its >= piece.first_row) & (its < piece.first_row + piece.n_rows)).all()
        by_row = rows.reshape(-1, DIM)
        by_row = by_row if at is None else by_row[at]
        assert len(by_row) == len(its)
        assert at is None or not sent
        found += zip(its.tolist(), by_row.tolist(), strict=True)
    # Also in order of appearance: sums of repeats and the last of them depend on it.
    expected = [*zip(ids, data.reshape(-1, DIM).tolist(), strict=True)]
    for row in range(ROWS):
        assert [v for i, v in found if i == row] == [v for i, v in expected if i == row]


@given(RowIds, st.integers(1, 30), st.integers(0, 5), st.booleans())
def test_answers_go_where_they_were_asked_for(ids, n_shards, start, local):
    layout = layout_of(n_shards)
    rows = np.arange(ROWS * DIM, dtype="f8").reshape(ROWS, DIM)
    split = IdSplit.of(layout.tables[0], np.array(ids, "i8"), n_shards)
    out = np.full((start + len(ids)) * DIM, -1.0)
    slices = slices_of(layout, split, 0, start)
    target = Target({}, [out], lambda: None, {s: (one,) for s, one in slices.items()})
    for shard in target.shards:
        assert target.reads(shard)
        [asked] = target.rows_asked(shard)
        if local:
            [read] = target.row_reads(shard)
            into = read.out.reshape(-1, DIM)
            into[slice(None) if read.at is None else read.at] = rows[read.ids]
        else:
            target.fill(shard, [rows[asked.ids].reshape(-1)])
    found = out.reshape(-1, DIM)
    np.testing.assert_array_equal(found[start:], rows[np.array(ids, "i8")])
    assert (found[:start] == -1).all()


def test_a_push_of_rows_is_meant_for_all_shards():
    """So each of them counts the steps of a table, and any process may act for it."""
    layout = layout_of(4)
    split = IdSplit.of(layout.tables[0], np.array([1]), 4)
    rows = [RowBatch(split, np.ones(DIM))]
    request = routes.push(map_of(layout), {}, Step(producer=1), rows=rows)
    assert [*request.route.slices] == [0, 1, 2, 3]
    call = request.call(map_of(layout), range(4), 1.0, "")
    found = [part.step.items[0].ids for part in call.parts]
    assert [len(ids) for ids in found if ids is not None] == [1, 0, 0, 0]
    assert all(part.step.touched is None for part in call.parts)
    assert not request.waiting().rows


def test_a_read_of_rows_asks_the_shards_that_have_some():
    layout = layout_of(4)
    split = IdSplit.of(layout.tables[0], np.array([22, 0, 21]), 4)
    slices = slices_of(layout, split, 0, 0)
    target = Target(
        {}, [np.empty(9)], SimpleNamespace, {s: (o,) for s, o in slices.items()}
    )
    request = routes.read(map_of(layout), target)
    assert [*request.route.slices] == [0, 3]
    assert request.route.touched == ((0, 1), (3, 4))


def test_ids_that_are_the_same_again_are_cut_once():
    layout = Layout.build(
        {}, 3, {"t": (9000, DIM, "float64"), "u": (9000, DIM, "float64")}
    )
    table, other = layout.tables
    ids = np.arange(0, 9000, 7)
    split = IdSplit.of(table, ids, 3)
    assert IdSplit.of(table, ids.copy(), 3) is split
    ids[5] = 8999  # whoever gave them writes others there
    again = IdSplit.of(table, ids, 3)
    assert 8999 in again.ids_of(2)
    assert IdSplit.of(other, ids, 3).table is other
    assert IdSplit.of(table, ids, 2).starts[-1] == len(ids)
    few = ids[:10]
    assert IdSplit.of(table, few, 3) is not IdSplit.of(table, few, 3)
    ids[5] = 9000
    assert IdSplit.find(table, ids, 3) is None


def test_of_several_shards_those_that_others_are_at_come_last():
    layout = layout_of(2)
    said: list[tuple[int, float]] = []

    class Hosted:
        """A shard that another process is at, when it is asked first."""

        def __init__(self, shard: int, answers: list[int]) -> None:
            self.layout, self.shard, self.answers = layout, shard, answers

        def try_step(self, step, seconds):
            said.append((self.shard, seconds))
            return self.answers.pop(0)

    meta = map_of(layout)
    shards: Any = [Hosted(0, [-1, 5]), Hosted(1, [7])]
    serving = SimpleNamespace(is_own=True)
    carriers: Any = SimpleNamespace(
        rank=-1, find_shard=lambda shard, by_owner: (serving, shards[shard])
    )
    split = IdSplit.of(layout.tables[0], np.array([1, 22]), 2)
    request = routes.push(meta, {}, Step(), rows=[RowBatch(split, np.zeros(2 * DIM))])
    local = SplitRoute(request.route, carriers)
    assert local.try_step(request.step, {}, request.rows) == ([(1, 7), (0, 5)], [])
    assert said == [(0, 0.0), (1, 0.0), (0, SOON_SECONDS)]
