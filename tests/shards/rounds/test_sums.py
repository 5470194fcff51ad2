"""Sums in one pass of a compiled loop: the bits of NumPy, tile by tile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps.consistency import BSP
from daskps.layout.arrays import Layout
from daskps.reduction import REDUCTIONS, reduce_all
from daskps.shards.memory.format import GENERATION
from daskps.shards.memory.segment import Segment
from daskps.shards.rounds import sums
from daskps.shards.shard import Shard
from daskps.shards.steps import ASK, MODEL, NOTHING
from tests.invariants import validate
from tests.seams import form_by, judge_all, room_of_sums
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


def plain(*given: Any, **more: Any) -> Any:
    """A shard that judges all steps, and has NumPy add their arrays, a tile at a time."""
    shard: Any = shard_of(*given, **more)
    judge_all(shard)
    assert shard.round
    form_by(shard.round, None)
    return shard


@pytest.fixture(autouse=True, params=[16, sums.TILE_NBYTES], ids=["tiles", "whole"])
def tile(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many bytes of a sum are formed at a time."""
    monkeypatch.setattr(sums, "TILE_NBYTES", request.param)
    nbytes: int = request.param
    return nbytes


def rough(rng: np.random.Generator, position: int) -> Any:
    """Numbers whose sum depends on the order of its additions."""
    n = LAYOUT.pieces[0][position].size
    numbers = rng.normal(size=n) * 10.0 ** rng.integers(-4, 5, n)
    return numbers.astype(DTYPES[position])


def both(rng: np.random.Generator) -> dict[int, Any]:
    return {position: rough(rng, position) for position in (0, 1)}


def take(
    shard: Shard, rank: int, clock: int, arrays: Any, weight: float = 1.0, **said: Any
) -> int:
    return shard.step(gradient(rank, arrays, weight, clock)._replace(**said))


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5, 8, 33])
def test_sums_have_the_bits_of_numpy(n_ranks, reduce):
    rng = np.random.default_rng(n_ranks)
    taken, asked = shard_of(n_ranks, reduce), plain(n_ranks, reduce)
    nodes: dict[int, Any] = {}
    for clock, weights in enumerate(([0.3, 1.7, 1e-3], [64.0, 7.0], [1.0])):
        for place, rank in enumerate(map(int, rng.permutation(n_ranks))):
            arrays, weight = both(rng), weights[place % len(weights)]
            scale = weight if reduce == "mean" else 1.0
            scaled = {p: a * a.dtype.type(scale) for p, a in arrays.items()}
            nodes[rank] = scaled, dict.fromkeys(arrays, weight)
            (ticket,) = send(asked, gradient(rank, arrays, weight, clock))
            assert take(taken, rank, clock, arrays, weight) == ticket.version
            assert contents(taken) == contents(asked)
            validate(taken)
        if not clock:  # slots have the gradient itself yet
            of, found = taken.segment, reduce_all(nodes, n_ranks, reduce)
            slots = [of.slots_of(of.current, position)[0] for position in (0, 1)]
            assert [s.tobytes() for s in slots] == [found[p].tobytes() for p in (0, 1)]
    assert taken.segment.current.version == 3
    # Clock, next sequence, whether waited for, and what the open clock began with.
    assert taken.segment.current.ranks[:n_ranks].tolist() == [[3, 3, 1, 3, 0]] * n_ranks
    assert counts(taken)[0] == counts(asked)[0] == 3 * n_ranks


@pytest.mark.parametrize("lack", ["piece", "arrays", "model"])
@pytest.mark.parametrize("odd", range(4))
def test_rounds_of_both_have_the_same_bits(odd, lack):
    """A step that is not like the others comes before, between and after them."""
    rng = np.random.default_rng(odd)
    taken, asked = shard_of(4), plain(4)
    for clock in range(2):
        for rank in range(4):
            arrays, said = both(rng), dict[str, Any]()
            if rank == odd and lack == "piece":
                del arrays[rank % 2]
            elif rank == odd and lack == "arrays":
                arrays, said = {}, {"kind": NOTHING}
            elif lack == "model":
                said = {"kind": MODEL}
            given = gradient(rank, arrays, 1.0, clock)
            (ticket,) = send(asked, given._replace(**said))
            assert take(taken, rank, clock, arrays, **said) == ticket.version
            assert contents(taken) == contents(asked)


def test_shard_without_pieces_takes_steps():
    few = Layout.build({"a": ((1,), "float32")}, 2)
    taken, asked = (make(3, layout=few, index=1) for make in (shard_of, plain))
    for clock in range(2):
        for rank in range(3):
            (ticket,) = send(asked, gradient(rank, {}, 1.0, clock))
            assert take(taken, rank, clock, {}) == ticket.version
            assert contents(taken) == contents(asked)
    assert taken.segment.current.version == 2


def test_sums_of_a_shard_are_formed_in_one_place(tile):
    """As large as one piece, or a tile: each is applied before the next is formed."""
    shard: Any = shard_of(4)
    rooms = room_of_sums(shard.round)
    assert len({array.ctypes.data for array in rooms}) == 1
    assert rooms[0].nbytes == min(8 * 5, tile)


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
