"""Rows of graph rounds: their sums have the bits of an arena's, wherever they are formed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskps.cluster.caller.row_routes import IdSplit
from daskps.cluster.host.contributions import Contribution, Contributions, RoundId
from daskps.cluster.host.partial_sums import SumsRequest, check_ids, keep_rows, reduced
from daskps.cluster.host.reductions import sums_here
from daskps.cluster.runs.graph.tasks import row_batches
from daskps.errors import ProtocolError
from daskps.init import constant
from daskps.layout.arrays import Layout
from daskps.layout.tables import UnboundedIds
from daskps.reduction import cover
from daskps.shards.arrays.row_planning import each_once
from daskps.shards.rounds.arena import Arena, RankRows
from daskps.shards.steps import GRADIENT, Item
from tests.kernels.compiling import kept

DIM, ROWS = 3, 40
PLACE = RoundId(1, 0, 7)


def layout_of(n_shards: int) -> Layout:
    tables: Any = {
        "known": (ROWS, DIM, "float32"),
        "any": (0, DIM, "float64", UnboundedIds(constant(0.0), 5)),
    }
    return Layout.build({"w": ((5,), "float32")}, n_shards, tables=tables)


def brought(layout: Layout, size: int, seed: int) -> dict[int, dict[int, Any]]:
    """Return what each rank that is there brings: ids that repeat, rows, by table."""
    rng = np.random.default_rng(seed)
    found: dict[int, dict[int, Any]] = {}
    for rank in range(size):
        if size > 2 and rank == size // 2:
            continue  # sits out
        found[rank] = {}
        for table in layout.tables:
            if (rank + table.index) % 4 == 3:
                continue  # does not name it
            n = 0 if (rank + table.index) % 4 == 2 else int(rng.integers(5, 60))
            ids = rng.integers(0, ROWS, n)
            if table.name == "any":
                ids = ids * 10**15 - 3
            dtype = "f4" if table.name == "known" else "f8"
            found[rank][table.index] = ids, rng.normal(size=(n, DIM)).astype(dtype)
    return found


def weight_of(rank: int) -> float:
    return 3.0 + rank


def contributed(
    layout: Layout, given: dict[int, Any], rank: int, scale: float
) -> Contribution:
    rows = {}
    for index, (ids, data) in given.items():
        table = layout.tables[index - 1]
        cut = IdSplit.of(table, ids, layout.n_shards)
        item = Item(0, 0, data.reshape(-1), cut.ids, cut.at)
        rows[index] = keep_rows(table, item, cut.starts, scale=scale)
    return Contribution(layout, weight_of(rank), {}, rows=rows)


def in_an_arena(
    layout: Layout, of: dict[int, dict[int, Any]], size: int, shard: int, mean: bool
) -> dict[int, tuple[list[int], bytes]]:
    """Return what a resident round comes to in one shard, by table."""
    found = {}
    for piece in layout.table_pieces[shard]:
        table, room = piece.table, 4000
        buffer = np.empty(Arena.nbytes_of(piece, room), np.uint8)
        arena = Arena(piece, size, room, buffer)
        spans: dict[int, Any] = {}
        for rank, given in of.items():
            if table.index not in given:
                continue
            ids, data = given[table.index]
            cut = IdSplit.of(table, ids, layout.n_shards)
            at = cut.at_of(shard)
            a, b = cut.starts[shard : shard + 2]
            rows = data[a:b] if at is None else data[at]
            item = Item(0, 0, rows.reshape(-1), cut.ids_of(shard))
            came = RankRows(*each_once(item, piece, GRADIENT, kept())[:3])
            scale = weight_of(rank) if mean else 1.0
            spans[rank] = arena.place(spans.values(), came, scale)
        weights = {rank: weight_of(rank) for rank in spans} if mean else None
        if spans:
            ids, rows = arena.merge(spans, weights, kept())
            found[table.index] = ids.tolist(), rows.tobytes()
    return found


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 6, 13])
def test_sums_have_the_bits_of_an_arena(size, n_shards, mean):
    layout = layout_of(n_shards)
    of = brought(layout, size, seed=size)
    wheres = [lambda r: 0, lambda r: r % 2, lambda r: r * 3 // size, lambda r: r]
    for where in wheres:
        workers = sorted({where(rank) for rank in of})
        opened: dict[int, dict[Any, Any]] = {shard: {} for shard in range(n_shards)}
        for worker in workers:
            mine = [rank for rank in of if where(rank) == worker]
            held = Contributions(str(worker))
            for rank in mine:
                scale = weight_of(rank) if mean else 1.0
                held.leave(PLACE, rank, contributed(layout, of[rank], rank, scale))
            nodes = cover(set(mine), set(range(size)) - of.keys(), size)
            host: Any = SimpleNamespace(contributions=held)
            shards = [*range(n_shards)]
            about: Any = {"shards": shards, "ranks": mine, "nodes": nodes}
            said, arrays = sums_here(host, place=(1, 0, 7), **about)
            # Asked again it says the same, and it holds more than it sends.
            again = sums_here(host, place=(1, 0, 7), **about)[1]
            assert [a.tobytes() for a in again] == [a.tobytes() for a in arrays]
            asked = SumsRequest(layout, str(worker), shards, nodes, mine, held.nbytes)
            sizes = [(str(a.dtype), len(a)) for a in arrays]
            assert asked.sizes(said) == sizes
            for shard, row in zip(shards, asked.sums(said, arrays), strict=True):
                opened[shard] |= zip(nodes, row, strict=True)
        how = "mean" if mean else "sum"
        by_shard = {
            s: reduced(n, layout.pieces[s], size, reduce=how) for s, n in opened.items()
        }
        for given in row_batches(layout, by_shard):
            table = given.split.table
            for shard in range(n_shards):
                item = given.item(layout, shard, sent=False)
                assert item.ids is not None
                expected = in_an_arena(layout, of, size, shard, mean)[table.index]
                # Also in this order: so unbounded rows are numbered alike.
                assert (item.ids.tolist(), item.data.tobytes()) == expected
        named = {index for given in of.values() for index in given}
        assert {g.split.table.index for g in row_batches(layout, by_shard)} == named


def said_of(*sums: Any, codec: str = "") -> Any:
    return [[[(*one, codec, 1.0) for one in sums]]]


@pytest.mark.parametrize(
    "said",
    [
        [],
        [[]],
        [[[(1, 1.0, 2)]]],
        said_of((1, 1.0, 2.0)),
        said_of((0, 1.0, 2)),  # an array
        said_of((3, 1.0, 2)),
        said_of((1, 1.0, -2)),
        said_of((1, 1.0, 2), (1, 1.0, 2)),
        said_of((1, 1.0, 2**50)),
        said_of((1, 1.0, -1)),  # a table
        said_of((-1, 1.0, -1)),
        said_of((0, 1.0, -1), (0, 1.0, -1)),
        said_of((1, 1.0, 2), codec="bf16"),
    ],
)
def test_sums_that_were_not_asked_for_take_no_memory(said):
    asked = SumsRequest(layout_of(1), "w", [0], [(0, 2)], [0, 1], row_nbytes=100)
    with pytest.raises(ProtocolError):
        asked.sizes(said)
    assert asked.sizes(said_of((1, 1.0, 5)))[-1] == ("float32", 15)


@pytest.mark.parametrize("ids", [[1, 2, 1], [-1], [ROWS // 2], [5, 2**40]])
def test_ids_that_are_none_or_twice_are_not_added_up(ids):
    """A loop that adds them up counts on it."""
    known, other = layout_of(2).table_pieces[0]
    with pytest.raises(ProtocolError, match="some of them twice"):
        check_ids(known, np.array(ids))
    check_ids(known, np.array([1, 2]))
    mine = [i for i in range(50) if other.holds(np.array([i]), cache_dir=kept())]
    check_ids(other, np.array(mine))
    with pytest.raises(ProtocolError, match="none of the buckets"):
        check_ids(other, np.array([*mine, *range(50)]))
    with pytest.raises(ProtocolError, match="some of them twice"):
        check_ids(other, np.array(mine[:1] * 2))


def test_what_is_kept_is_no_memory_of_the_caller():
    table = layout_of(1).tables[0]
    ids, data = np.array([3, 1, 3]), np.ones((3, DIM), "f4")
    of = []
    for n, scale in ((3, 2.0), (2, 1.0)):
        item = Item(0, 0, data[:n].reshape(-1), ids[:n], None)
        of.append(keep_rows(table, item, [0, n], scale=scale))
    ids[:], data[:] = 0, 9
    assert [k.ids.tolist() for k in of] == [[3, 1], [3, 1]]
    assert [k.rows[:, 0].tolist() for k in of] == [[4, 2], [1, 1]]
    assert of[0].nbytes == 2 * (8 + 4 * DIM)
    with pytest.raises(ValueError, match="read-only"):
        of[0].rows[:] = 1
