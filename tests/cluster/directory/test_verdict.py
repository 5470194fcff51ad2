"""When a shard without an owner is away, and when it is lost."""

from __future__ import annotations

from itertools import pairwise

from daskps.cluster.directory.candidates import Due, Verdict
from daskps.cluster.protocol.reports import Sight


def verdict(lost_after: float = 10.0, runs_end_after: float | None = None) -> Verdict:
    return Verdict(100.0, lost_after=lost_after, runs_end_after=runs_end_after)


def test_lost_without_a_sign_for_so_long() -> None:
    found = verdict()
    found.see(Sight.UNKNOWN, 104.0)
    assert found.due(104.9, others=True) == []
    assert found.due(105.0, others=True) == [Due.SAY]
    found.see(Sight.UNKNOWN, 109.0)
    assert found.due(109.9, others=False) == []
    assert found.due(110.0, others=False) == [Due.LOSE]
    assert found.is_lost
    # Once.
    assert found.due(500.0, others=False) == []


def test_each_sign_counts_anew() -> None:
    """Whoever says so: the owner that lives, who keeps its lock, or nobody."""
    found, said = verdict(runs_end_after=300.0), []
    for now in range(101, 500, 9):
        said += [(now, due) for due in found.due(now, others=False)]
        found.see(Sight.FOUND, now)
    assert said == [(110, Due.SAY), (407, Due.END_RUNS)]
    assert not found.is_lost
    assert found.due(now + 10.0, others=False) == [Due.LOSE]


def test_lost_at_once_where_all_of_its_machine_looked() -> None:
    found = verdict()
    found.see(Sight.ABSENT, 100.1)
    assert found.due(100.1, others=True) == []
    found.see(Sight.FOUND, 100.2)
    assert found.due(100.2, others=False) == []
    found.see(Sight.ABSENT, 100.3)
    assert found.due(100.3, others=False) == [Due.LOSE]


def test_a_lost_shard_stays_lost_until_somebody_has_it() -> None:
    found = verdict()
    assert found.due(110.0, others=False) == [Due.LOSE]
    found.see(Sight.FOUND, 111.0)
    assert found.due(111.0, others=False) == []
    assert found.is_lost
    # But whoever has it may let go of it soon.
    assert found.wakes_at() == 112.0


def test_questions_come_often_at_first_then_every_second() -> None:
    found, now, asked = verdict(lost_after=60.0), 100.0, []
    while now < 130.0:
        if found.is_to_ask(now):
            asked.append(now)
            found.asked(now)
            found.see(Sight.FOUND, now)
        now = min(found.wakes_at(), 130.0)
        found.due(now, others=False)
    gaps = [b - a for a, b in pairwise(asked)]
    assert round(gaps[0], 6) == 0.05
    assert max(gaps) < 1.001
    assert round(gaps[-1], 6) == 1.0
    assert all(b - a > -1e-9 for a, b in pairwise(gaps))
    found.ask_now(130.0)
    assert found.is_to_ask(130.0)
    assert found.due(200.0, others=False) == [Due.LOSE]
    found.asked(200.0)
    assert found.wakes_at() == 210.0


def test_whatever_is_next_wakes() -> None:
    """A question, a word, a loss; the loss also where all questions are put."""
    found = verdict(lost_after=1.0)
    assert found.wakes_at() == 100.0
    found.asked(100.9)
    assert found.wakes_at() == 101.0
    assert found.due(101.0, others=False) == [Due.LOSE]
    found.asked(101.0)
    assert found.wakes_at() == 111.0
