"""Asynchronous SGD with delay compensation, against the formulas of its paper."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import ArraySpec, LayoutError, PushRejectedError, TableSpec, optim
from daskps.cluster.host.rules import initial_slots
from daskps.consistency import ASP, BSP, SSP
from daskps.layout.arrays import Layout
from daskps.layout.spans import WEIGHTS, Span
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, GRADIENT, Item, Step, Ticket
from tests.kernels.compiling import kept
from tests.support import INSIDE, mostly_inside

N = 40_000  # more than a tile
X = np.zeros((8, 1))


class Oracle:
    """In float64, as the paper has it."""

    def __init__(self, w: Any, rule: optim.DCASGD) -> None:
        self.rule = rule
        self.w: Any = np.array(w, "f8")
        self.anew()

    def anew(self) -> None:
        self.backups = [self.w.copy() for _ in range(self.rule.ranks)]
        self.mean_square = np.zeros_like(self.w)

    def push(self, rank: int, g: Any) -> None:
        lam: Any = self.rule.lam
        g = np.asarray(g, "f8")
        if self.rule.adaptive:
            self.mean_square = 0.95 * self.mean_square + 0.05 * g**2
            lam = lam / np.sqrt(self.mean_square + 1e-7)
        self.w = self.w - self.rule.lr * (
            g + lam * g * g * (self.w - self.backups[rank])
        )
        self.backups[rank] = self.w.copy()


def make(
    rule: Any, dtype: str = "f8", *, durable: bool = False, w: Any = None
) -> Shard:
    n = N if w is None else len(w)
    layout = Layout.build({"w": ((n,), np.dtype(dtype).name)}, 1)
    segment = Segment(layout, 0, {0: initial_slots(rule)}, durable=durable)
    first = np.linspace(-1, 1, n) if w is None else np.array(w)
    segment.load(Span(WEIGHTS, 0, 0, len(first)), first.astype(dtype))
    bound = {0: optim.bind(rule, dtype, cache_dir=kept())}
    return Shard(segment, bound, 0, cache_dir=kept())


def pushed(rank: int, clock: int, g: Any, kind: str = GRADIENT) -> Ticket:
    said: dict[str, Any] = {
        "run": 7,
        "rank": rank,
        "clock": clock,
        "sequence": clock,
        "tick": True,
    }
    return Ticket(Step(kind, [Item(0, 0, g)], generation=0, **said))


def weights(shard: Shard) -> Any:
    return shard.segment.weights_of(shard.segment.current, 0)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
def test_three_ranks_push_as_in_the_paper(dtype, adaptive, durable, together):
    """Alone and in one pass, in both buffers; sums and new state go past the backups."""
    rule = optim.DCASGD(0.05, 0.5, adaptive, ranks=4)
    mine = optim.WithMaster(rule) if dtype == "f2" else rule
    shard = make(mine, dtype, durable=durable)
    oracle = Oracle(weights(shard), rule)
    rng = np.random.default_rng(3)
    g_dtype = "f8" if dtype == "f8" else "f4"
    for run in (1, 2):
        shard.begin_run(run, ASP(), 3, reset=run == 2)
        if run == 2:
            oracle.anew()
        batch: list[Ticket] = []
        for i, rank in enumerate([0, 1, 1, 2, 0, 2, 2, 1]):
            g = rng.standard_normal(N).astype(g_dtype)
            clock = sum(t.step.rank == rank for t in batch)
            batch.append(pushed(rank, clock, g))
            batch[-1].step = batch[-1].step._replace(run=run)
            oracle.push(rank, g)
            if i == 4:
                delta = np.full(N, 0.25, dtype)
                add = Step(ADD, [Item(0, 0, delta)], producer=run, generation=0)
                batch.append(Ticket(add))
                oracle.w += 0.25
        for part in [batch] if together else [[ticket] for ticket in batch]:
            shard.submit(part)
            assert not [t.outcome for t in part if isinstance(t.outcome, Exception)]
    tolerance = {"f2": 2e-3, "f4": 1e-5, "f8": 1e-12}[dtype]
    np.testing.assert_allclose(weights(shard), oracle.w, rtol=tolerance, atol=tolerance)
    slots = shard.segment.slots_of(shard.segment.current, 0)[dtype == "f2" :]
    tolerance = min(tolerance, 1e-5)
    for slot, backup in zip(slots, oracle.backups, strict=False):
        np.testing.assert_allclose(slot, backup, rtol=tolerance, atol=tolerance)
    assert len(slots) == 4 + adaptive


def test_v16_the_number_of_the_paper():
    """Weight 0.8, backup 1, gradient 1, rate 0.1, lambda 0.04: 0.7008."""
    shard = make(optim.DCASGD(0.1, ranks=2), w=[1.0])
    shard.begin_run(7, SSP(3), 2)
    shard.submit([pushed(1, 0, np.array([2.0]))])
    assert weights(shard) == pytest.approx([0.8], abs=1e-15)
    shard.submit([pushed(0, 0, np.array([1.0]))])
    assert weights(shard) == pytest.approx([0.7008], abs=1e-15)
    # One that starts again has the backup of its rank: 0.8, and a gradient of 1.
    shard.run_state.resume_rank(7, 1, 1)
    shard.submit([pushed(1, 1, np.array([1.0]))])
    after = 0.7008 - 0.1 * (1 + 0.04 * (0.7008 - 0.8))
    assert weights(shard) == pytest.approx([after], abs=1e-15)


def test_runs_that_have_no_such_ranks_are_refused():
    shard = make(optim.chain(optim.clip_by_value(-1, 1), optim.DCASGD(0.1, ranks=2)))
    for policy, n, says in (
        (BSP(), 2, "sync='asp' or 'ssp'"),
        (ASP(), 3, "for 2 trainers, and the run has 3.*ranks=3"),
    ):
        with pytest.raises(LayoutError, match=says):
            shard.begin_run(7, policy, n)
    assert shard.run_state.run == shard.segment.current.version == 0
    outside = Ticket(Step(GRADIENT, [Item(0, 0, np.ones(N))], producer=1, generation=0))
    shard.submit([outside])
    assert isinstance(outside.outcome, PushRejectedError)
    assert "keeps state for each trainer" in str(outside.outcome)
    assert shard.segment.current.version == 0


def test_the_rule():
    rule = optim.DCASGD(0.1, ranks=2)
    assert repr(rule) == "DCASGD(lr=0.1, ranks=2)"
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert rule != optim.DCASGD(0.1, ranks=3)
    assert rule.slots == ("backup.0", "backup.1")
    assert optim.DCASGD(0.1, 0.04, True, ranks=1).slots == ("backup.0", "mean_square")
    untyped: Any = optim
    for arguments, error, says in (
        ({}, TypeError, "ranks"),
        ({"ranks": 0}, ValueError, "at least 1"),
        ({"ranks": 1025}, ValueError, "at most 1,024, .*; found 1,025"),
        ({"ranks": 10**12}, ValueError, "at most 1,024"),
        ({"ranks": 2.0}, TypeError, "ranks must be an int"),
        ({"ranks": 2, "lam": -1}, ValueError, "lam"),
        ({"ranks": 2, "adaptive": 1}, TypeError, "adaptive"),
        ({"ranks": 2, "lr": -1}, ValueError, "lr"),
    ):
        with pytest.raises(error, match=says):
            untyped.DCASGD(**{"lr": 0.1, **arguments})
    bound = optim.bind(rule, "f8", cache_dir=kept())
    w, slots = np.ones(3), (np.ones(3), np.ones(3))
    with pytest.raises(ValueError, match="rank 2 is none of the 2"):
        bound.inplace(w, w, slots, bound.of_rank(bound.scalars(1), 2))


def delayed(trainer, part):
    """Rank 1 goes first, then rank 0, then rank 1 again."""
    for rank in (1, 0, 1):
        if trainer.rank == rank:
            trainer.push({"w": np.full((3, 5), 2.0 - rank)})
        else:
            trainer.tick()
        trainer.barrier()
    return trainer.pull()["w"].ravel().tolist()


@mostly_inside("sync", ["asp", "ssp"])
def test_trainers_without_rounds(way, sync):
    """1 - 0.1 * 1; then rank 0 with 2 and backup 1; then rank 1 with 1 and its own."""
    rule = optim.DCASGD(0.1, ranks=2)
    spec = {"w": np.ones((3, 5)), "v": ArraySpec(4, "float64", 1.0)}
    with daskps.create(spec, optimizer=rule, shards=2) as store:
        found = daskps.run(store, delayed, [0, 0], sync=sync)
        oracle = Oracle(np.ones(15), rule)
        for rank, g in ((1, 1.0), (0, 2.0), (1, 1.0)):
            oracle.push(rank, np.full(15, g))
        np.testing.assert_allclose(found, [oracle.w] * 2, rtol=1e-14)
        # The next run goes on with what each rank has left.
        again = daskps.run(store, delayed, [0, 0], sync=sync)
        for rank, g in ((1, 1.0), (0, 2.0), (1, 1.0)):
            oracle.push(rank, np.full(15, g))
        np.testing.assert_allclose(again, [oracle.w] * 2, rtol=1e-14)


def ones(params, X, y):
    return {"w": np.ones(3)}


@pytest.mark.parametrize("way", INSIDE, indirect=True)
def test_what_has_no_rank_is_refused(way):
    rule = optim.DCASGD(0.1, ranks=2)
    how: dict[str, Any] = {"batch_size": 2, "callbacks": (), "trainers": 2}
    with daskps.create({"w": np.ones(3)}, optimizer=rule, shards=2) as store:
        with pytest.raises(PushRejectedError, match="by a Trainer under sync='asp'"):
            store.push({"w": np.ones(3)})
        for more, says in (
            ({}, "under sync='bsp'"),
            ({"execution": "graph"}, "under sync='bsp'"),
            ({"sync": "asp", "trainers": 3}, "for 2 trainers, and the run has 3"),
            ({"sync": "asp", "sync_every": 2}, "sync_every does not take 'w'"),
            ({"average": "models"}, "average='models' does not take 'w'"),
        ):
            with pytest.raises(ValueError, match=says):
                daskps.train(store, ones, X, **{**how, **more})
        with pytest.raises(ValueError, match=r"Replica\.step does not take 'w'"):
            store.replica().step({"w": np.ones(3)})
        assert store.version == 0
        # And it is as it was: one trainer is not too many.
        daskps.train(store, ones, X, sync="asp", **{**how, "trainers": 1})
        assert store["w"].pull().tolist() == pytest.approx([0.6] * 3)
        store.add({"w": np.ones(3)})
    with pytest.raises(LayoutError, match="for each trainer, of arrays only"):
        daskps.create({"e": TableSpec(4, 2)}, optimizer=rule)
    assert daskps.list_stores() == []
