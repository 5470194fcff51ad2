"""Reads by address: they find what others find, and give nothing that is torn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.consistency import ASP, SSP
from daskps.kernels import system
from daskps.layout.arrays import Layout
from daskps.shards import addressed
from daskps.shards.addressed import find_flip, part_of, read_part
from daskps.shards.deputy import CLOSED, READING, RELEASED, set_gate
from daskps.shards.memory.format import (
    CLOCK,
    GENERATION,
    LIVE,
    MAX_RANKS,
    N_RANKS,
    SIDE,
)
from daskps.shards.memory.publication import Publication
from daskps.shards.reads import (
    ASK,
    NOT_YET,
    LatestReads,
    TrainerReads,
    copy_parts,
)
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, Ready, Step
from tests.shards.making import RUN, A, B, bsp, items, make, send, step

OUTSIDE = 0, -1
WHOLE = [("float64", 0, 6), ("int64", 0, 4)]


def table_of(
    shard: Shard,
    reader: tuple[int, int] = OUTSIDE,
    ranges: Sequence[tuple[str, int, int]] = WHOLE,
) -> Any:
    words = part_of(shard.segment, (0, shard.generation), reader, ranges)
    return np.array(words, np.int64)


def read(table: Any, bound: int, nbytes: int = 80) -> tuple[list[int], np.ndarray]:
    """Return what is said of a shard, and what is read; nothing where it must be asked."""
    said, out = np.zeros(4, np.int64), np.zeros(nbytes, np.uint8)
    at = table.ctypes.data, bound, said.ctypes.data, out.ctypes.data
    found = read_part(*at)
    return ([], out) if found < 0 else (said.tolist()[:3], out[:found])


def add(shard: Shard, sequence: int, *positions: int) -> None:
    sizes = [piece.size for piece in shard.segment.pieces]
    given = items({p: np.ones(sizes[p]) for p in positions})
    send(shard, Step(ADD, given, producer=1, sequence=sequence))


# -- where it may read --------------------------------------------------------------


@given(
    st.sampled_from(["bsp", "ssp", "asp"]),
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=5),
    st.integers(0, 12),
    st.integers(0, 3),
)
def test_a_trainer_reads_where_others_let_it(policy, ranks, clock, staleness):
    shard = make() if policy != "bsp" else bsp(len(ranks))
    if policy != "bsp":
        policies: dict[str, Any] = {"ssp": SSP(staleness), "asp": ASP()}
        shard.begin_run(RUN, policies[policy], len(ranks))
    for rank, (at, is_live) in enumerate(ranks):
        shard.segment.current.ranks[rank, [CLOCK, LIVE]] = at, is_live
    reads = TrainerReads(shard.segment, RUN, 0)
    table = table_of(shard, (RUN, 0))
    assert find_flip(table.ctypes.data, clock) == (flip := reads.find_flip(clock))
    said, _ = read(table, clock)
    version = shard.segment.current.version
    assert said == ([0, version, reads.lag] if flip >= 0 else [])


def test_it_reads_the_round_of_its_clock():
    shard = bsp(2)
    table = table_of(shard, (RUN, 0))
    assert read(table, 0)[0] == [0, shard.segment.current.version, 0]
    assert find_flip(table.ctypes.data, 1) == NOT_YET
    send(shard, step(0, 0), step(1, 0))
    said, out = read(table, 1)
    assert said == [0, shard.segment.current.version, 0]
    assert out[:40].view("f8").tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert find_flip(table.ctypes.data, 0) == ASK
    shard.finish_rank(RUN, 0)
    send(shard, step(1, 1))
    assert find_flip(table.ctypes.data, 2) == ASK


def test_outside_runs_it_reads_versions_that_are_there():
    shard = make(ruled=())
    table, reads = table_of(shard), LatestReads(shard.segment, *OUTSIDE)
    for version in range(3):
        for bound in range(4):
            assert find_flip(table.ctypes.data, bound) == reads.find_flip(bound)
        assert read(table, version)[0] == [0, version, 0]
        add(shard, version, A)


def end(shard: Shard) -> None:
    shard.end_run(RUN, "a test")


def close(shard: Shard) -> None:
    set_gate(shard.segment, CLOSED)


def adopt(shard: Shard) -> None:
    shard.segment.words[GENERATION] += 1


def shrink(shard: Shard) -> None:
    shard.segment.current.plain[N_RANKS] = 1


@pytest.mark.parametrize("change", [end, close, adopt, shrink])
def test_the_shard_says_whatever_else_there_is_to_say(change: Callable[[Shard], None]):
    shard = bsp(2)
    table = table_of(shard, (RUN, 1))
    assert find_flip(table.ctypes.data, 0) >= 0
    change(shard)
    assert find_flip(table.ctypes.data, 0) == ASK


def release(shard: Shard) -> None:
    set_gate(shard.segment, RELEASED)


@pytest.mark.parametrize("change", [close, release, adopt])
def test_outside_runs_a_shard_that_is_gone_is_asked(change: Callable[[Shard], None]):
    shard = make(ruled=())
    table = table_of(shard)
    assert find_flip(table.ctypes.data, 0) >= 0
    change(shard)
    assert find_flip(table.ctypes.data, 0) == ASK


def test_reads_go_on_where_only_changes_may_not():
    shard = make(ruled=())
    table = table_of(shard)
    set_gate(shard.segment, READING)
    assert find_flip(table.ctypes.data, 0) >= 0


@pytest.mark.parametrize("rank", [-2, MAX_RANKS])
def test_no_rank_is_looked_for_outside_the_memory(rank):
    with pytest.raises(ValueError, match="rank"):
        part_of(bsp(2).segment, (0, 1), (RUN, rank), WHOLE)


# -- what it reads ------------------------------------------------------------------


def test_whatever_is_asked_for_is_read_wherever_it_lies():
    layout = Layout.build({str(i): ((i % 3 + 1,), "float64") for i in range(7)}, 1)
    shard, rng = make(layout, ruled=[]), np.random.default_rng(0)
    segment = shard.segment
    segment.is_together, sides = False, set()
    size = len(segment.vectors[0]["float64"])
    for sequence in range(30):
        share = 1 if sequence < 3 else 0.5
        add(shard, sequence, *[p for p in range(7) if rng.random() < share])
        sides.add(segment.current.plain[SIDE])
        for _ in range(5):
            cut = sorted(rng.integers(0, size + 1, 4).tolist())
            ranges = [("float64", *cut[:2]), ("float64", *cut[2:])]
            outs = [np.empty(stop - start) for _, start, stop in ranges]
            parts = [(*r, out) for r, out in zip(ranges, outs, strict=True)]
            ready = Ready(segment.flip, segment.current.version)
            assert copy_parts(segment, ready, parts)
            said, out = read(table_of(shard, ranges=ranges), 0, 8 * 2 * size)
            assert said == [0, ready.version, 0]
            assert out.tobytes() == b"".join(o.tobytes() for o in outs)
    assert sides == {-1, 0, 1}


def test_what_lies_in_too_many_places_is_for_the_shard(monkeypatch):
    monkeypatch.setattr(addressed, "MOST_PIECES", 2)
    shard = make(ruled=())
    shard.segment.is_together = False
    few, many = (table_of(shard, ranges=r) for r in (WHOLE[1:], WHOLE + WHOLE[:1]))
    assert read(few, 0)[0] == [0, 0, 0]
    monkeypatch.setattr(addressed, "MOST_PIECES", 1)
    many = table_of(shard)
    assert read(many, 0)[0] == [0, 0, 0]
    add(shard, 0, B)
    assert read(many, 0)[0] == []
    assert read(few, 0)[0] == [0, 1, 0]


# -- while others write -------------------------------------------------------------


@pytest.fixture
def beside(monkeypatch) -> Callable[[list[Callable[[], object]]], None]:
    """Have something happen in the middle of each copy, as long as there is some."""

    def use(things: list[Callable[[], object]]) -> None:
        copied = system.copy

        def copy(to: int, source: int, nbytes: int) -> None:
            half = nbytes // 2
            copied(to, source, half)
            if things:
                things.pop(0)()
            copied(to + half, source + half, nbytes - half)

        monkeypatch.setattr(addressed, "copy", copy)

    return use


def test_a_copy_is_good_until_a_second_publication_begins(beside):
    shard = make(ruled=())
    table = table_of(shard)
    beside([lambda: add(shard, 0, A, B)])
    said, out = read(table, 0)
    assert said == [0, 0, 0]
    assert not out.any()


def test_a_copy_that_updates_run_into_is_made_again(beside):
    shard = make(ruled=())
    table = table_of(shard)

    def both() -> None:
        add(shard, 0, A, B)
        add(shard, 1, A, B)

    beside([both])
    said, out = read(table, 0)
    assert said == [0, 2, 0]
    assert out[:48].view("f8").tolist() == [2.0] * 6


def test_a_copy_that_a_publication_has_begun_to_overwrite_is_none(beside):
    shard = make(ruled=())
    add(shard, 0, A, B)
    table = table_of(shard)

    def begun() -> None:
        add(shard, shard.segment.flip, A, B)
        Publication(shard.segment)

    # One that was never whole: the shard is asked then.
    beside([begun] * 10)
    assert read(table, 0)[0] == []


def test_a_copy_of_a_flip_that_came_back_is_none(beside):
    """As where what was in force has been put there by others."""
    shard = make(ruled=())
    add(shard, 0, A)
    table, segment = table_of(shard), shard.segment

    def back() -> None:
        segment.flip -= 1

    beside([back])
    assert read(table, 0)[0] == [0, 0, 0]


@pytest.mark.parametrize("word", [2**62, -(2**62), 7])
def test_words_of_a_record_that_is_being_written_lead_nowhere_else(word):
    shard = make(ruled=())
    shard.begin_run(RUN, SSP(2), 2)
    table, record = table_of(shard, (RUN, 0)), shard.segment.current
    shard.segment.is_together = False
    for at in (N_RANKS, SIDE):
        before, record.plain[at] = record.plain[at], word
        read(table, 0)
        record.plain[at] = before
    record.plain[SIDE] = -1
    record.weight_sides[0] = word
    assert read(table, 0)[0] == []
