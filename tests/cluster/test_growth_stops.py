"""Where a shard has no more memory for unbounded rows, and others had."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import daskps
from daskps import LayoutError, PushRejectedError, RowGrad, TableSpec
from daskps.cluster.host import growth
from daskps.store import intake

IDS = np.arange(6000) * 7919 - 10**6
ONES = np.ones((len(IDS), 4), "f4")


class Full:
    """Refuses memory to the hosts of some shards."""

    def __init__(self) -> None:
        self.workers: set[str] = set()

    def __call__(self, need: Any, held: Any, limits: Any, share: float) -> None:
        if self.workers & need.keys():
            raise LayoutError("the shards have no more memory")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Full:
    found = Full()
    monkeypatch.setattr(growth, "check_memory", found)
    return found


def pushing(trainer: Any, part: Any) -> None:
    trainer.push({"any": RowGrad(IDS, ONES)})


def adding(s: Any) -> None:
    s["any"].add(IDS, ONES)


def training(s: Any) -> None:
    daskps.run(s, pushing, [0], sync="asp")


@pytest.mark.parametrize("way", ["inside", "queue"], indirect=True)
@pytest.mark.parametrize("push", [adding, training])
def test_the_error_names_the_shards_that_have_the_push(way, full, push):
    params = {"any": TableSpec(None, 4)}
    with daskps.create(params, shards=3, optimizer=daskps.optim.SGD(1.0)) as s:
        full.workers = {s.placement[2]}
        assert s.placement[0] not in full.workers
        with pytest.raises(PushRejectedError, match="no more memory") as refused:
            push(s)
        rows = [row["tables"]["any"]["rows"] for row in s.stats()["shards"]]
        have = [shard for shard, n in enumerate(rows) if n]
        assert 2 not in have
        named = f"{len(have)} shard" + "s" * (len(have) != 1)
        of = ", ".join(map(str, have))
        said = f"{named} ({of}) had applied it" if have else "no shard has applied it"
        assert str(refused.value).endswith(f"Of store {s.name!r}: {said}")
        # Those that have it count it once, and a push that is given memory all of it.
        full.workers = set()
        s["any"].add(IDS, ONES)
        found = s["any"].pull(IDS)
        sign = -1 if push is training else 1
        first = {1 + sign} if have else set()
        assert set(found.ravel().tolist()) <= first | {1.0}
        assert len(s["any"]) == len(IDS)


@pytest.mark.parametrize("way", ["inside", "queue"], indirect=True)
@pytest.mark.parametrize("policy", [{}, {"ttl": 99}, {"max_rows": 9000}])
def test_rows_are_removed_where_there_is_no_memory(way, full, policy):
    """Any number of them: their room is there from the beginning."""
    params = {"any": TableSpec(None, 4, **policy)}
    with daskps.create(params, shards=2) as s:
        table = s["any"]
        for start in range(0, len(IDS), 200):
            table.add(IDS[start : start + 200], ONES[start : start + 200])
        n = len(table)
        full.workers = {*s.placement}
        with pytest.raises(PushRejectedError, match=r"room for a push of .* new: "):
            s["any"].add(np.arange(30_000), np.ones((30_000, 4), "f4"))
        assert len(table) == n
        table.remove(IDS[:5000])
        assert table.ids().tolist() == IDS[5000:][table.contains(IDS[5000:])].tolist()
        assert 900 < len(table) <= 1000
        # There is room again where they were.
        table.add(IDS[:100], ONES[:100])
        np.testing.assert_array_equal(table.pull(IDS[:100]), 1.0)


def in_rounds(trainer: Any, part: Any) -> None:
    for round_ in range(4):
        n = 3 if round_ < 2 else len(IDS)
        trainer.push({"any": RowGrad(IDS[:n] + trainer.rank, ONES[:n])})


@pytest.mark.parametrize("way", ["inside", "queue"], indirect=True)
def test_a_round_that_one_shard_has_no_memory_for_is_none(way, full):
    """All shards end with the round before it, and the run says why."""
    params = {"any": TableSpec(None, 4)}
    with daskps.create(params, shards=3, optimizer=daskps.optim.SGD(1.0)) as s:
        full.workers = {s.placement[2]}
        with pytest.raises(daskps.DaskPSError, match="no more memory"):
            daskps.run(s, in_rounds, [0, 1], sync="bsp")
        first = sorted({*IDS[:3].tolist(), *(IDS[:3] + 1).tolist()})
        assert s["any"].ids().tolist() == first
        np.testing.assert_array_equal(s["any"].pull(first), -1.0)
        # With memory the next run goes through.
        full.workers = set()
        daskps.run(s, in_rounds, [0, 1], sync="bsp")
        assert len(s["any"]) == 2 * len(IDS)
        np.testing.assert_array_equal(s["any"].pull(first), -3.0)


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_the_parts_of_a_large_push_are_told(way, full, monkeypatch):
    monkeypatch.setattr(intake, "MOST_PUSHED_ROWS", 2000)
    with daskps.create({"any": TableSpec(None, 4)}, shards=2) as s:
        s["any"].add(IDS[:2000], ONES[:2000])
        full.workers = {*s.placement}
        said = "all shards have applied 1 part of the push; of the next one "
        with pytest.raises(PushRejectedError, match=said):
            s["any"].add(IDS, ONES)
