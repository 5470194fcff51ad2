"""How far behind pulls may be, seen by recording and in the history.

Each trainer adds 1 to its own element of a vector with each push, so what a pull
returns says which clock of every trainer it has seen. It is looked at shard by shard:
the vector has one copy in every shard.
"""

from __future__ import annotations

import numpy as np

import daskps
from daskps import optim
from tests.seams import session_of
from tests.support import mostly_inside

TRAINERS, STEPS, SHARDS = 3, 9, 2
SEEDS = range(10)


def work(rng, rank):
    """Work for a random while without the interpreter's lock; rank 0 is slower."""
    rng.standard_normal(int(rng.choice([1, 1, 12_500, 50_000])) * (1 + (rank == 0)))


def record(trainer, part):
    """Push, work and pull; return (own clock, clocks seen per shard) of each pull.

    The first trainer begins once it has seen that all others are at a clock.
    """
    seed, steps, others = part
    while trainer.rank == 0 and trainer.pull()["clocks"][:, 1:].min() < others:
        pass
    rng = np.random.default_rng([seed, trainer.rank])
    mark = np.zeros((SHARDS, TRAINERS))
    mark[:, trainer.rank] = -1.0
    seen = []
    for step in range(steps):
        seen.append((step, trainer.pull()["clocks"]))
        work(rng, trainer.rank)
        # Both ways to push take part.
        if step % 3 == 2:
            seen.append((step + 1, trainer.pushpull({"clocks": mark})["clocks"]))
        else:
            trainer.push({"clocks": mark})
    return seen, session_of(trainer).reads.lag


def clock_store():
    """One row of clocks in each shard; a gradient of -1 with lr 1 adds 1."""
    return daskps.create(
        {"clocks": np.zeros((SHARDS, TRAINERS))},
        optimizer=optim.SGD(1.0),
        shards=SHARDS,
    )


def lags(seen, steps):
    """Return for each pull and shard how far the slowest live trainer was behind.

    A trainer that has taken all of its steps may have ended: it is not waited for.
    """
    for clock, clocks in seen:
        for row in clocks:
            live = [c for c, n in zip(row, steps, strict=True) if c < n]
            yield clock - min([*live, clock])


@mostly_inside("staleness", [0, 1, 3], real=[1])
def test_no_pull_sees_a_live_trainer_too_far_behind(way, request, staleness):
    """Ten seeds with random delays, half of them by call and half by message.

    On clusters one of them: that the bound is the shards' there as well.
    """
    by = request.node.callspec.params["way"]
    seeds = {"inside": SEEDS[5:], "queue": SEEDS[:5]}.get(by, SEEDS[:1])
    steps = [STEPS] * TRAINERS
    worst = 0
    with clock_store() as store:
        for seed in seeds:
            store.assign({"clocks": np.zeros((SHARDS, TRAINERS))})
            # The others have pulled with the first one as far behind as may be.
            parts = [(seed, n, staleness + 1) for n in steps]
            found = daskps.run(store, record, parts, sync=daskps.SSP(staleness))
            for rank, (seen, lag) in enumerate(found):
                assert len(seen) == STEPS + STEPS // 3
                recorded = max(lags(seen, steps))
                assert recorded <= staleness
                assert lag <= staleness
                worst = max(worst, recorded)
                for clock, clocks in seen:
                    np.testing.assert_array_equal(clocks[:, rank], clock)
            np.testing.assert_array_equal(store["clocks"].pull(), STEPS)
    assert worst == staleness


@mostly_inside()
def test_asp_is_not_bound(way):
    """The same trainers without a bound: all others end before the first one begins."""
    with clock_store() as store:
        parts = [(0, STEPS, STEPS)] * TRAINERS
        found = daskps.run(store, record, parts, sync="asp", timeout=60)
        assert max(max(lags(s, [STEPS + 1] * TRAINERS)) for s, _ in found) == STEPS
        np.testing.assert_array_equal(store["clocks"].pull(), STEPS)


@mostly_inside("staleness", [0, 1, 3], real=[1])
def test_trainer_that_ends_is_not_waited_for(way, staleness):
    """Ranks of 1, 4 and 9 steps: each takes all of its own, within the bound."""
    steps = [1, 4, 9]
    with clock_store() as store:
        found = daskps.run(
            store, record, [(0, n, 0) for n in steps], sync=daskps.SSP(staleness)
        )
        np.testing.assert_array_equal(store["clocks"].pull(), [steps] * SHARDS)
    for seen, lag in found:
        assert max(lags(seen, steps)) <= staleness
        assert lag <= staleness


def uneven(params, X, y):
    """Work as long as the row says, then mark a step of the row's rank."""
    for _ in range(int(X[0, 1])):
        np.sin(params["clocks"]).sum()
    grad = np.zeros_like(params["clocks"])
    grad[:, int(X[0, 0])] = -1.0
    return grad_loss(params), {"clocks": grad}


def grad_loss(params):
    """Return the largest distance between two visible clocks, per shard."""
    clocks = params["clocks"]
    return float((clocks.max(axis=1) - clocks.min(axis=1)).max())


@mostly_inside("sync", ["bsp", daskps.SSP(0), daskps.SSP(2)], real=[daskps.SSP(2)])
def test_history_has_the_largest_staleness(way, sync):
    """Rank 0 is slow, so the others reach their bound, and the history says so."""
    rows = np.zeros((3 * 60, 2))
    rows[:, 0] = np.repeat([0, 1, 2], 60)
    rows[:60, 1] = 500
    with clock_store() as store:
        result = daskps.train(
            store, uneven, rows, trainers=3, batch_size=1, sync=sync, shuffle=False
        )
    [entry] = result.history
    assert entry.staleness == (0 if sync == "bsp" else sync.staleness)
    # 60 of 180 steps each, or 60 rounds of their mean.
    total = 20 if sync == "bsp" else 60
    np.testing.assert_allclose(result.weights["clocks"], total, rtol=1e-12)
