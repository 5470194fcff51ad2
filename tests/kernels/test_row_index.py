"""Rows by id, against dicts; every word that changes can be put back."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps.kernels import id_hash
from daskps.kernels import index_probe as at
from daskps.kernels.index_probe import home
from daskps.kernels.row_index import NoRoomError, RowIndex
from daskps.layout.buckets import bucket_edges, bucket_rows, n_buckets
from tests.kernels.indexing import BASE, GUARD, guards, made, push, rows_of, validate

ENDS = [0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**32)]


def colliding(n: int, slots: int, seed: int = 7) -> list[int]:
    """Return ids whose home is the last entry but one: they wrap around."""
    found: list[int] = []
    with np.errstate(over="ignore"):
        row = 0
        while len(found) < n:
            if home(np.int64(row), np.int64(seed), slots) == slots - 2:
                found.append(row)
            row += 1
    return found


NEAR = colliding(8, 64)
some_ids = st.lists(
    st.sampled_from(ENDS + NEAR) | st.integers(-12, 12), max_size=12, unique=True
)
changes = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "remove", "refused", "build"]), some_ids
    ),
    max_size=14,
)


@settings(max_examples=60)
@given(changes, st.integers(1, 3))
def test_rows_are_those_of_a_dict(story: Any, admit: int) -> None:
    index, log = made()
    model: dict[int, int] = {}
    counts: dict[int, int] = {}
    for kind, ids in story:
        before = index.ids()
        if kind == "build":
            if not index.is_building:
                index.start(96)
            if index.build(20):
                old = int(index.head[at.SIDE])
                index.switch(log)
                # Its memory is given back.
                start, n = index.places[2 * (at.SIDE_0 + old) :][:2]
                index.words[start : start + n] = 0
        elif kind == "remove":
            rows, _ = index.remove(np.array(ids, np.int64), log)
            gone = [model.pop(i, -1 - counts.get(i, 0)) for i in ids]
            assert rows.tolist() == gone
            counts = {i: n for i, n in counts.items() if i not in ids}
        else:
            rows, taken = push(index, ids, log, admit=admit)
            assert (log.word[0] == BASE + taken.n) or not taken.n
            asked = np.array(ids + ENDS, np.int64)
            was = dict(zip(*(a.tolist() for a in before), strict=True))
            then = index.rows_before(log, taken.n, asked)
            assert then.tolist() == [was.get(i, -1) for i in asked.tolist()]
            if kind == "refused":
                for _ in range(2):
                    index.restore(log, taken.n)
                validate(index)
                restored = index.ids()
                assert all(
                    (a == b).all() for a, b in zip(before, restored, strict=True)
                )
                assert index.candidates()[1].sum() == sum(counts.values())
                continue
            fresh = [ids[k] for k in taken.fresh]
            due = [i for i in ids if i not in model and counts.get(i, 0) + 1 == admit]
            assert fresh == due
            counts |= {i: counts.get(i, 0) + 1 for i in ids if i not in model}
            model |= dict.fromkeys(due, -1)
            counts = {i: n for i, n in counts.items() if i not in model}
            model |= {i: int(r) for i, r in zip(ids, rows, strict=True) if i in model}
            assert not len(taken.gone)
        assert validate(index) == model
        assert (
            dict(zip(*(a.tolist() for a in index.candidates()), strict=True)) == counts
        )


def test_ids_that_all_have_one_home_are_found_and_forgotten() -> None:
    index, log = made(40, 64)
    ids = NEAR[:6]
    push(index, ids, log)
    start = index.places[2 * at.SIDE_0]
    values = index.words[start + 1 : start + 128 : 2]
    assert np.flatnonzero(values).tolist() == [0, 1, 2, 3, 62, 63]
    for gone in (ids[1], ids[5], ids[0]):
        index.remove(np.array([gone]), log)
        ids.remove(gone)
        assert sorted(validate(index)) == ids


def test_there_is_room_for_so_many_and_no_more() -> None:
    index, log = made(10, 16)
    push(index, range(10), log)
    held = index.words.copy()
    n = int(log.word[0]) - BASE
    assert n
    with pytest.raises(NoRoomError, match="rows") as told:
        push(index, [3, 99], log)
    assert told.value.what == "rows"
    index.restore(log, int(log.word[0]) - BASE)
    assert (index.words[: index.places[6]] == held[: index.places[6]]).all()
    validate(index)
    index, log = made(40, 16)
    with pytest.raises(NoRoomError, match="slots"):
        push(index, range(20), log)
    index.restore(log, int(log.word[0]) - BASE)
    assert validate(index) == {}
    for entries in range(30):
        index, log = made(10, 16, log=entries)
        if entries < 26:
            with pytest.raises(NoRoomError, match="log"):
                push(index, range(10), log)
            index.restore(log, max(0, int(log.word[0]) - BASE))
            assert validate(index) == {}
        else:
            push(index, range(10), log)
    assert len(validate(index)) == 10


@pytest.mark.parametrize("stamp", [0, 5])
def test_rows_nobody_pushes_read_as_absent_and_begin_anew(stamp: int) -> None:
    index, log = made()
    push(index, [1, 2, 3], log, stamp=3)
    push(index, [2], log, stamp=4)
    assert rows_of(index, [1, 2, 3], since=4).tolist() == [-1, 1, -1]
    if stamp:
        rows, taken = push(index, [3, 9, 2], log, stamp=stamp, since=4)
        assert rows.tolist() == [2, 3, 1]
        assert taken.fresh.tolist() == [0, 1]
        # What the row of 3 holds is in force until then.
        assert taken.kept.tolist() == [True, False]
    gone, _ = index.expire(0, 2, 4, log)
    assert gone.tolist() == [1]
    gone, _ = index.expire(0, 99, 4, log)
    assert gone.tolist() == ([] if stamp else [3])
    assert set(validate(index)) == ({2, 3, 9} if stamp else {2})


def test_rows_are_forgotten_as_far_as_the_log_has_room() -> None:
    index, log = made(log=100)
    push(index, range(20), log, stamp=3)
    free = len(log.entries) // 2
    how: Any = {"part": 4, "room": free}
    gone, stop = index.expire(0, 99, 4, log, **how)
    # With one look at the log four rows go.
    assert gone.tolist() == [0, 1, 2, 3]
    assert stop == 4
    assert set(validate(index)) == {*range(4, 20)}
    gone, stop = index.expire(stop, 99, 4, log._replace(begin=1), **how)
    assert not len(gone)
    assert stop == 4
    gone, stop = index.expire(stop, 12, 4, log)
    assert gone.tolist() == [*range(4, 12)]
    assert stop == 12
    # Rows that were pushed in time are looked at, and stay.
    push(index, [15], log, stamp=4)
    gone, stop = index.expire(12, 99, 4, log)
    assert gone.tolist() == [12, 13, 14, 16, 17, 18, 19]
    assert stop == index.end == 20
    assert set(validate(index)) == {15}


def test_a_row_that_was_given_up_in_this_publication_is_in_force_still() -> None:
    index, log = made()
    push(index, [1, 2], log)
    rows, n = index.remove(np.array([1]), log)
    rows, taken = push(index, [8, 9], log._replace(begin=n))
    assert rows.tolist() == [0, 2]
    assert taken.kept.tolist() == [True, False]
    index.restore(log, taken.n)
    assert validate(index) == {1: 0, 2: 1}
    index.remove(np.array([1]), log)
    rows, taken = push(index, [8], log)
    assert (rows.tolist(), taken.kept.tolist()) == ([0], [False])


def test_a_look_ends_and_stays_inside_whatever_the_memory_holds() -> None:
    rng = np.random.default_rng(0)
    ids = np.array(ENDS + NEAR, np.int64)
    for _ in range(200):
        index, _ = made(20, 32)
        for start, n in index.places.reshape(-1, 2):
            junk = rng.integers(-(2**63), 2**63 - 1, n)
            few = rng.integers(-40, 200, n)
            index.words[start : start + n] = np.where(rng.random(n) < 0.5, junk, few)
        asked = np.concatenate([ids, index.words[::7]])
        rows = np.empty(len(asked) + 2, np.int64)
        rows[[0, -1]] = GUARD
        index.look_up(asked, rows[1:-1], since=int(rng.integers(0, 3)))
        assert (rows[[0, -1]] == GUARD).all()
        assert ((rows[1:-1] >= -1) & (rows[1:-1] < 20)).all()
        assert guards(index)


def test_a_side_that_was_left_half_way_is_built_anew() -> None:
    index, log = made(40, 64)
    assert index.slots_wanted == 0
    push(index, range(40), log)
    assert index.slots_wanted == 128
    with pytest.raises(ValueError, match="no side"):
        index.build(10)
    index.start(128)
    assert not index.build(10)
    index.head[at.BUILT] |= 1
    with pytest.raises(ValueError, match="half-way"):
        index.build(10)
    # Nobody builds upon it, and nobody changes it.
    n = index.remove(np.arange(5), log)[1]
    assert not (log.entries[: 2 * n : 2] >> 48 == at.SIDE_0 + 1).any()
    with pytest.raises(ValueError, match="not have all"):
        index.switch(log)
    index.start(0)
    assert not index.is_building
    start, n = index.places[2 * at.SIDE_0 + 2 :][:2]
    index.words[start : start + n] = 0
    index.start(128)
    assert index.build(1000)
    index.switch(log)
    assert sorted(validate(index)) == list(range(5, 40))
    with pytest.raises(ValueError, match="35 ids with 30 of 128"):
        index.start(30)


def test_a_look_back_costs_what_was_pushed_and_not_what_there_may_be() -> None:
    """A piece has addresses for hundreds of millions of rows."""
    index, log = made(rows=1 << 20)
    push(index, range(20), log)
    _, taken = push(index, range(20, 30), log)
    index.rows_before(log, taken.n, np.arange(40))
    tracemalloc.start()
    then = index.rows_before(log, taken.n, np.arange(40))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (then >= 0).sum() == 20
    assert peak < 100_000


def test_it_grows_before_it_is_full() -> None:
    index, log = made(3_000, 1024, log=20_000)
    for low in range(0, 3_000, 100):
        push(index, range(low, low + 100), log)
        if index.slots_wanted and not index.is_building:
            index.start(index.slots_wanted)
        if index.is_building and index.build(16 * 100):
            old = int(index.head[at.SIDE])
            index.switch(log)
            start, n = index.places[2 * (at.SIDE_0 + old) :][:2]
            index.words[start : start + n] = 0
        if low == 800:
            break
    assert index.head[at.SIDE] == 1
    assert sorted(validate(index)) == list(range(900))


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        (np.arange(3.0), np.arange(3)),
        (np.arange(3), np.arange(4)),
        (np.arange(6)[::2], np.arange(3)),
        (np.arange(3), np.arange(6)[::2]),
        (np.arange(3), np.broadcast_to(np.int64(0), 3)),
    ],
)
def test_arrays_that_do_not_fit_are_refused(ids: Any, rows: Any) -> None:
    index, log = made()
    for call in (
        lambda: index.look_up(ids, rows),
        lambda: index.take(ids, rows, log),
    ):
        with pytest.raises(ValueError, match=r"expected|must be"):
            call()


def test_a_row_that_is_none_is_refused_before_anything_changes() -> None:
    index, log = made()
    held = index.words.copy()
    with pytest.raises(ValueError, match="cannot have"):
        index.take(np.arange(2), np.array([0, 40]), log)
    assert (index.words == held).all()
    for bad in (index.places[:-2], index.places * 2, -index.places):
        with pytest.raises(ValueError, match=r"expected|not inside"):
            RowIndex(index.words, bad)
    entries = np.array([(at.KEYS << 48) | 40, 1, at.N_AREAS << 48, 1, -1, 1])
    for k in range(3):
        broken = log._replace(entries=entries[2 * k :])
        with pytest.raises(ValueError, match="entry 0 of a log of words"):
            index.restore(broken, 1)
    with pytest.raises(ValueError, match="are not in a log"):
        index.restore(log, 401)
    assert (index.words == held).all()


MAX_ROWS = 300


def bounded_by_buckets(shards: int) -> Any:
    """Return an index for each shard of a table of at most 300 rows, and who is whose."""
    n = n_buckets(MAX_ROWS)
    edges, made_of = bucket_edges(n, shards), []
    for s in range(shards):
        first, stop = (bucket_rows(MAX_ROWS, int(b)) for b in edges[s : s + 2])
        made_of.append(
            made(
                max(1, stop - first),
                512,
                log=6_000,
                max_rows=MAX_ROWS,
                buckets=n,
                first_bucket=int(edges[s]),
            )
        )
        made_of[-1][0].head[at.ROWS] = stop - first
    return edges, made_of


@pytest.mark.parametrize("shards", [2, 3, 5])
def test_the_same_rows_go_on_any_number_of_shards(shards: int) -> None:
    rng = np.random.default_rng(shards)
    worlds = [bounded_by_buckets(n) for n in (1, shards)]
    model: dict[int, int] = {}
    n, every = n_buckets(MAX_ROWS), np.arange(-450, 450)
    bucket = dict(zip(every.tolist(), id_hash.buckets(every, 7, n), strict=True))
    for stamp in range(1, 12):
        ids = rng.choice(900, 150, replace=False) - 450
        if stamp == 8:
            # More than there is room for.
            ids = rng.permutation(900) - 450
        told: list[Any] = []
        for edges, pieces in worlds:
            split = id_hash.split(ids, 7, edges)
            gone: set[int] = set()
            left: dict[int, bool] = {}
            for s, (index, log) in enumerate(pieces):
                mine = split.ids[split.starts[s] : split.starts[s + 1]].copy()
                rows, taken = push(index, mine, log, stamp=stamp)
                gone |= set(taken.gone.tolist())
                left |= dict(zip(mine.tolist(), (rows >= 0).tolist(), strict=True))
                assert set(mine[taken.fresh].tolist()) <= {i for i in left if left[i]}
                validate(index)
            told.append((gone, left))
        assert told[0] == told[1]
        # The newest of each bucket stay, of those as new the largest ids.
        model |= dict.fromkeys(ids.tolist(), stamp)
        for b in range(n):
            here = [i for i in model if bucket[i] == b]
            here.sort(key=lambda i: (model[i], i), reverse=True)
            room = bucket_rows(MAX_ROWS, b + 1) - bucket_rows(MAX_ROWS, b)
            for i in here[room:]:
                del model[i]
        for _, pieces in worlds:
            assert sorted(model) == sorted(
                i for index, _ in pieces for i in index.ids()[0].tolist()
            )
    assert len(model) == MAX_ROWS


def test_what_had_to_go_comes_back_with_the_publication() -> None:
    _, [(index, log)] = bounded_by_buckets(1)
    push(index, range(300), log, stamp=1)
    held = validate(index)
    counts = index.head.copy()
    _, taken = push(index, range(400, 480), log, stamp=2)
    assert len(taken.gone)
    assert taken.kept.sum() == len(taken.gone)
    then = index.rows_before(log, taken.n, np.arange(500))
    assert {i: r for i, r in enumerate(then.tolist()) if r >= 0} == held
    index.restore(log, taken.n)
    assert validate(index) == held
    assert (index.head == counts).all()
    _, [(first, its_log), *_] = bounded_by_buckets(3)
    with pytest.raises(ValueError, match="cannot have"):
        push(first, np.arange(300), its_log, stamp=1)
