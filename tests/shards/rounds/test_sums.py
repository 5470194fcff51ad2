"""Sums that are formed at once: the same bits as those formed tile by tile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps.consistency import BSP
from daskps.layout.arrays import Layout
from daskps.reduction import REDUCTIONS
from daskps.shards.memory.format import GENERATION
from daskps.shards.memory.segment import Segment
from daskps.shards.rounds import sums
from daskps.shards.rounds.sums import DirectSums
from daskps.shards.shard import Shard
from daskps.shards.steps import (
    ASK,
    GRADIENT,
    MODEL,
    NOTHING,
    Tick,
)
from tests.invariants import validate
from tests.seams import form_lazily, sums_of, take_tickets
from tests.shards.making import RUN, Momentum, contents, counts, failed, send
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


def lazy(*given: Any, **more: Any) -> Any:
    """A shard whose steps all take the general road."""
    shard: Any = shard_of(*given, **more)
    take_tickets(shard)
    assert shard.round
    form_lazily(shard.round)
    return shard


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the sum of each step that was looked at was formed at once."""
    found: list[bool] = []

    def weigh(self: DirectSums, *given: Any) -> float:
        found.append(real(self, *given) > 0)
        return real(self, *given)

    real = DirectSums.weigh
    monkeypatch.setattr(DirectSums, "weigh", weigh)
    return found


def rough(rng: np.random.Generator, position: int) -> Any:
    """Numbers whose sum depends on the order of its additions."""
    n = LAYOUT.pieces[0][position].size
    numbers = rng.normal(size=n) * 10.0 ** rng.integers(-4, 5, n)
    return numbers.astype(DTYPES[position])


def both(rng: np.random.Generator) -> dict[int, Any]:
    return {position: rough(rng, position) for position in (0, 1)}


def take(
    shard: Shard, rank: int, clock: int, arrays: Any, weight: float = 1.0, kind=GRADIENT
) -> int:
    return shard.try_step(Tick(RUN, rank, clock, clock, kind, weight), arrays)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5, 8, 33])
def test_direct_sums_have_the_bits_of_lazy_ones(n_ranks, reduce, direct):
    rng = np.random.default_rng(n_ranks)
    taken, asked = shard_of(n_ranks, reduce), lazy(n_ranks, reduce)
    for clock, weights in enumerate(([1.0], [64.0, 7.0], [0.3, 1.7, 1e-3])):
        for place, rank in enumerate(map(int, rng.permutation(n_ranks))):
            arrays, weight = both(rng), weights[place % len(weights)]
            (ticket,) = send(asked, gradient(rank, arrays, weight, clock))
            assert take(taken, rank, clock, arrays, weight) == ticket.version
            assert contents(taken) == contents(asked)
            validate(taken)
    assert taken.segment.current.version == 3
    # Clock, next sequence, whether waited for, and what the open clock began with.
    assert taken.segment.current.ranks[:n_ranks].tolist() == [[3, 3, 1, 3, 0]] * n_ranks
    assert counts(taken)[0] == counts(asked)[0] == 3 * n_ranks
    assert direct == [True] * (3 * n_ranks)


@pytest.mark.parametrize("lack", ["piece", "arrays", "model"])
@pytest.mark.parametrize("odd", range(4))
def test_rounds_of_both_have_the_same_bits(odd, lack, direct):
    """A step that is not like the others comes before, between and after them."""
    rng = np.random.default_rng(odd)
    taken, asked = shard_of(4), lazy(4)
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
            assert take(taken, rank, clock, arrays, kind=kind) == ticket.version
            assert contents(taken) == contents(asked)
    assert len(direct) == 8
    assert any(direct) == (lack != "model")


def test_shard_without_pieces_takes_steps():
    few = Layout.build({"a": ((1,), "float32")}, 2)
    taken, asked = (make(3, layout=few, index=1) for make in (shard_of, lazy))
    for clock in range(2):
        for rank in range(3):
            (ticket,) = send(asked, gradient(rank, {}, 1.0, clock))
            assert take(taken, rank, clock, {}) == ticket.version
            assert contents(taken) == contents(asked)
    assert taken.segment.current.version == 2


def without_rule() -> Shard:
    return shard_of(2, rules={0: Momentum()})


def narrow() -> Shard:
    return shard_of(2, layout=Layout.build({"a": ((9,), "float16")}, 1))


def of_users() -> Shard:
    return shard_of(2, lambda stacked, weights: stacked.sum(0))


@pytest.mark.parametrize("make", [without_rule, narrow, of_users])
def test_other_shards_form_all_sums_lazily(make):
    assert sums_of(make()) is None


@pytest.mark.parametrize("name", ["TILE_NBYTES", "PAST_NBYTES"])
def test_large_shards_form_all_sums_lazily(name, monkeypatch):
    few: Any = shard_of(2)
    assert sums_of(few) is not None
    monkeypatch.setattr(sums, name, 8)
    many: Any = shard_of(2)
    assert sums_of(many) is None


def test_gradients_of_a_shard_are_formed_in_one_place():
    """As large as one piece: each of them is applied before the next is formed."""
    shard: Any = shard_of(4)
    formed = sums_of(shard).formed
    assert len({array.ctypes.data for array in formed}) == 1
    assert formed[0].base.nbytes == 8 * 5


class Failing(Momentum):
    """A rule that fails at its second step, before or while it is applied."""

    def __init__(self, early: bool) -> None:
        self.early, self.fails = early, False

    def scalars(self, step, lr=None, epoch=None, factor=0):
        if self.early and step == 2:
            raise ArithmeticError("this schedule raises")
        self.fails = step == 2
        return super().scalars(step, lr, epoch)

    def write(self, w_in, w_out, g, slots, scalars, slots_out):
        if self.fails:
            w_out[0] = 99
            raise MemoryError("no memory is left")
        super().write(w_in, w_out, g, slots, scalars, slots_out)


@pytest.mark.parametrize("early", [True, False], ids=["scalars", "update"])
def test_failing_rule_ends_the_run_as_for_tickets(early):
    shard = shard_of(2, rules={0: Momentum(), 1: Failing(early)})
    arrays = both(np.random.default_rng(0))
    for rank in (0, 1):
        assert take(shard, rank, 0, arrays) == rank
    assert take(shard, 0, 1, arrays) == 1
    before = contents(shard)
    assert take(shard, 1, 1, arrays) == ASK
    if early:  # nothing was changed: the ticket hears of it
        assert contents(shard) == before
    (ticket,) = send(shard, gradient(1, arrays, clock=1))
    wanted, reason = (
        (ArithmeticError, "schedule") if early else (MemoryError, "no memory")
    )
    assert failed([ticket], wanted)
    assert reason in str(ticket.outcome)
    assert shard.segment.current.version == 1
