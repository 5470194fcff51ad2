"""Steps as nearly all are: the same bits as those of tickets, or left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps.consistency import BSP
from daskps.layout.arrays import Layout
from daskps.reduction import REDUCTIONS
from daskps.shards.memory.format import GENERATION
from daskps.shards.memory.segment import Segment
from daskps.shards.rounds import usual
from daskps.shards.rounds.usual import Usual
from daskps.shards.seats import ASK
from daskps.shards.shard import Shard
from daskps.shards.steps import (
    GRADIENT,
    MODEL,
    NOTHING,
    Tick,
)
from tests.shards.making import RUN, Momentum, contents, failed, send
from tests.shards.rounds.test_mailbox import gradient

#: Pieces of both dtypes that are not widened, one with its slots in another place.
LAYOUT = Layout.build({"a": ((9,), "float32"), "b": ((5,), "float64")}, 1)
DTYPES = ("f4", "f8")
RULES = {0: Momentum(), 1: Momentum()}


def shard_of(
    n_ranks: int,
    reduce: Any = "mean",
    rules: Any = RULES,
    layout: Layout = LAYOUT,
    index: int = 0,
) -> Shard:
    segment = Segment(layout, index, dict.fromkeys(rules, (0.0,)), durable=True)
    segment.words[GENERATION] = 1
    shard = Shard(segment, rules)
    shard.begin_run(RUN, BSP(), n_ranks, reduce)
    return shard


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step that was tried was a usual one."""
    found: list[bool] = []

    def take(self: Usual, *given: Any) -> bool:
        found.append(real(self, *given))
        return found[-1]

    real = Usual.take
    monkeypatch.setattr(Usual, "take", take)
    return found


def rough(rng: np.random.Generator, position: int) -> Any:
    """Numbers whose sum depends on the order of its additions."""
    n = LAYOUT.pieces[0][position].size
    numbers = rng.normal(size=n) * 10.0 ** rng.integers(-4, 5, n)
    return numbers.astype(DTYPES[position])


def both(rng: np.random.Generator) -> dict[int, Any]:
    return {position: rough(rng, position) for position in (0, 1)}


def sit(shard: Shard, rank: int, tick: Tick, arrays: Any) -> int:
    return shard.seat(RUN, rank).take(tick, arrays)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5, 8, 33])
def test_usual_steps_have_the_bits_of_tickets(n_ranks, reduce, taken):
    rng = np.random.default_rng(n_ranks)
    seated, asked = shard_of(n_ranks, reduce), shard_of(n_ranks, reduce)
    for clock, weights in enumerate(([1.0], [64.0, 7.0], [0.3, 1.7, 1e-3])):
        for place, rank in enumerate(map(int, rng.permutation(n_ranks))):
            arrays, weight = both(rng), weights[place % len(weights)]
            (ticket,) = send(asked, gradient(rank, arrays, weight, clock))
            tick = Tick(GRADIENT, clock, clock, weight)
            assert sit(seated, rank, tick, arrays) == ticket.version
            assert contents(seated) == contents(asked)
            seated.validate()
    assert seated.segment.current.version == 3
    # Clock, next sequence, whether waited for, and what the open clock began with.
    assert seated.segment.current.ranks[:n_ranks].tolist() == [[3, 3, 1, 3]] * n_ranks
    assert seated.n_pushes == asked.n_pushes == 3 * n_ranks
    assert taken == [True] * (3 * n_ranks)


@pytest.mark.parametrize("lack", ["piece", "arrays", "model"])
@pytest.mark.parametrize("odd", range(4))
def test_unusual_steps_are_left_to_the_shard(odd, lack, taken):
    """Before, between and after usual ones of the same round."""
    rng = np.random.default_rng(odd)
    seated, asked = shard_of(4), shard_of(4)
    for clock in range(2):
        for rank in range(4):
            arrays, kind = both(rng), GRADIENT
            if rank == odd and lack == "piece":
                del arrays[rank % 2]
            elif rank == odd and lack == "arrays":
                arrays, kind = {}, NOTHING
            elif lack == "model":
                kind = MODEL
            given = gradient(rank, arrays, 1.0, clock)
            (ticket,) = send(asked, given._replace(kind=kind))
            assert sit(seated, rank, Tick(kind, clock, clock, 1.0), arrays) == (
                ticket.version
            )
            assert contents(seated) == contents(asked)
    assert len(taken) == (0 if lack == "model" else 6)


def test_shard_without_pieces_takes_steps():
    few = Layout.build({"a": ((1,), "float32")}, 2)
    seated, asked = (shard_of(3, layout=few, index=1) for _ in range(2))
    for clock in range(2):
        for rank in range(3):
            (ticket,) = send(asked, gradient(rank, {}, 1.0, clock))
            assert sit(seated, rank, Tick(GRADIENT, clock, clock, 1.0), {}) == (
                ticket.version
            )
            assert contents(seated) == contents(asked)
    assert seated.segment.current.version == 2


def without_rule() -> Shard:
    return shard_of(2, rules={0: Momentum()})


def narrow() -> Shard:
    return shard_of(2, layout=Layout.build({"a": ((9,), "float16")}, 1))


def of_users() -> Shard:
    return shard_of(2, lambda stacked, weights: stacked.sum(0))


@pytest.mark.parametrize("make", [without_rule, narrow, of_users])
def test_shards_without_usual_steps_have_none(make):
    assert make().seat(RUN, 0)._usual is None


@pytest.mark.parametrize("name", ["TILE_NBYTES", "PAST_NBYTES"])
def test_large_shards_have_no_usual_steps(name, monkeypatch):
    assert shard_of(2).seat(RUN, 0)._usual is not None
    monkeypatch.setattr(usual, name, 8)
    shard: Any = shard_of(2)
    assert shard.seat(RUN, 0)._usual is None
    # Its steps compile nothing under the lock either.
    assert "work" in vars(shard.rounds.tables)


def test_trainers_of_a_process_form_gradients_in_one_place():
    """As large as one piece: each of them is applied before the next is formed."""
    shard: Any = shard_of(4)
    formed = [shard.seat(RUN, rank)._usual._formed for rank in range(4)]
    starts = {array.ctypes.data for arrays in formed for array in arrays}
    assert len(starts) == 1
    assert shard.rounds.tables.scratch.nbytes == 8 * 9


class Failing(Momentum):
    """A rule that fails at its second step, before or while it is applied."""

    def __init__(self, early: bool) -> None:
        self.early, self.fails = early, False

    def scalars(self, step, lr):
        if self.early and step == 2:
            raise ArithmeticError("this schedule raises")
        self.fails = step == 2
        return super().scalars(step, lr)

    def publish(self, w_in, w_out, g, slots, scalars, slots_out=None):
        if self.fails:
            w_out[0] = 99
            raise MemoryError("no memory is left")
        super().publish(w_in, w_out, g, slots, scalars, slots_out)


@pytest.mark.parametrize("early", [True, False], ids=["scalars", "update"])
def test_failing_rule_ends_the_run_as_for_tickets(early):
    shard = shard_of(2, rules={0: Momentum(), 1: Failing(early)})
    arrays = both(np.random.default_rng(0))
    for rank in (0, 1):
        assert sit(shard, rank, Tick(GRADIENT, 0, 0, 1.0), arrays) == rank
    assert sit(shard, 0, Tick(GRADIENT, 1, 1, 1.0), arrays) == 1
    before = contents(shard)
    assert sit(shard, 1, Tick(GRADIENT, 1, 1, 1.0), arrays) == ASK
    if early:  # nothing was changed: the ticket hears of it
        assert contents(shard) == before
    (ticket,) = send(shard, gradient(1, arrays, clock=1))
    wanted, reason = (
        (ArithmeticError, "schedule") if early else (MemoryError, "no memory")
    )
    assert failed([ticket], wanted)
    assert reason in str(ticket.outcome)
    assert shard.segment.current.version == 1
