"""Pulls and pushes of a trainer that do not wait, on real worker processes."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

import daskps
from daskps import SSP, RowGrad, TableSpec, optim
from tests.seams import session_of
from tests.support import mostly_inside, until
from tests.training.test_run import SYNCS, Flag, counting, full, pulled
from tests.training.test_staleness import TRAINERS, clock_store, lags, work

NAMES = ("a", "b")


def helpers(rank):
    return [t for t in threading.enumerate() if t.name == f"daskps-trainer-{rank}"]


# -- order and results -------------------------------------------------------


def kinds(trainer, part):
    """Return what a step of each kind of operation gives, and the clocks meanwhile."""
    assert not helpers(trainer.rank)
    out = {"a": np.full(4, np.nan)}
    first = trainer.pull_async(out=out)
    pushed = trainer.push_async(full(1.0, 1.0))
    clocks = [trainer.clock]
    second = trainer.pull_async("b")
    trainer.push_async(full(1.0), tick=False)
    trainer.push_async(full(b=1.0))
    clocks.append(trainer.clock)
    assert first.result()["a"] is out["a"]
    found = asyncio.run(_awaited(second))
    # The last steps are carried out though nobody waits for them.
    trainer.push_async(full(1.0, 1.0))
    assert len(helpers(trainer.rank)) == 1
    return clocks, out["a"][0], list(found), found["b"][0], pushed.result()


async def _awaited(future):
    return await future


@mostly_inside("sync", SYNCS)
def test_operations_take_effect_in_the_order_of_issue(way, sync):
    with counting(shards=1) as store:
        [found] = daskps.run(store, kinds, [0], sync=sync)
        assert found == ([1, 2], 0.0, ["b"], -1.0, 1)
        assert pulled(store) == {"a": 3.0, "b": 3.0}
        assert store.version == (3 if sync == "bsp" else 4)


def writes_on(trainer, part):
    """Rank 0 writes to what it pushed while a pull before the push waits for rank 1."""
    flag, how = part
    if trainer.rank:
        until(flag.exists)
        trainer.tick()
        return
    w, ids, rows = np.ones(2), np.array([5, 2]), np.ones((2, 1), "f4")
    trainer.tick()
    trainer.pull_async()
    trainer.push_async({"w": w, "emb": RowGrad(ids, rows)}, **how)
    w[:], ids[:], rows[:] = 9, 7, 9
    flag.set_total()


@mostly_inside("sync", ["bsp", SSP(0)])
def test_a_push_has_its_own_copy_unless_it_is_given_the_arrays(way, tmp_path, sync):
    for how, pushed in ({}, 1), ({"copy": False}, 9):
        params = {"w": np.zeros(2), "emb": TableSpec(9, 1)}
        with daskps.create(params, optimizer=optim.SGD(1.0)) as store:
            flag = Flag(tmp_path / str(pushed))
            daskps.run(store, writes_on, [(flag, how)] * 2, sync=sync)
            assert store["w"].pull().tolist() == [-pushed] * 2
            if not how:
                expected = [0, 0, -1, 0, 0, -1, 0, 0, 0]
                assert store["emb"].pull(range(9)).ravel().tolist() == expected


def layers(trainer, part):
    """Deliver a by itself first, or all in one push; in several rounds."""
    rng = np.random.default_rng(trainer.rank)
    out = trainer.pull()
    for step in range(5):
        grads = {n: rng.normal(size=out[n].shape) - out[n] for n in NAMES}
        if part == "sync":
            trainer.pushpull(grads, weight=1.0 + trainer.rank, out=out)
            continue
        for number, name in enumerate(NAMES):
            trainer.push_async({name: grads[name]}, tick=False, priority=number)
        if part == "tick":
            trainer.push({}, weight=1.0 + trainer.rank)
        else:
            trainer.push_async({}, weight=1.0 + trainer.rank)
        if step % 2:
            trainer.prefetch()
        trainer.pull(out=out)
    return {n: a.copy() for n, a in out.items()}


@mostly_inside()
def test_rounds_have_the_same_bits_either_way(way):
    found = []
    for part in ("sync", "tick", "async"):
        with counting() as store:
            daskps.run(store, layers, [part] * 3)
            assert store.versions == (5, 5)
            found.append({n: a.tobytes() for n, a in store.pull().items()})
    assert found[0] == found[1] == found[2]


def refused(trainer, part):
    """Nothing that is refused at the call reaches a shard or moves the clock."""
    with pytest.raises(daskps.PushRejectedError):
        trainer.push_async({"a": np.full(4, np.nan)})
    with pytest.raises(daskps.UnknownParameterError):
        trainer.push_async({"c": np.zeros(4)})
    with pytest.raises(ValueError, match="weight"):
        trainer.push_async(full(1.0), weight=-1)
    with pytest.raises(TypeError, match="priority"):
        trainer.push_async(full(1.0), priority="high")
    with pytest.raises(TypeError, match="tick is True or False, found 'no'"):
        trainer.push_async(full(1.0), tick="no")
    with pytest.raises(TypeError, match="copy is True or False, found 1"):
        trainer.push_async(full(1.0), copy=1)
    with pytest.raises(daskps.UnknownParameterError):
        trainer.pull_async("c")
    with pytest.raises(ValueError, match="shape"):
        trainer.pull_async(out={"a": np.zeros(3)})
    with pytest.raises(daskps.UnknownParameterError):
        trainer.prefetch("c")
    with pytest.raises(ValueError, match="timeout"):
        trainer.prefetch(timeout=-1)
    assert trainer.clock == 0
    assert not helpers(trainer.rank)
    trainer.finish()
    with pytest.raises(daskps.ClockError, match="finished"):
        trainer.push_async(full(1.0))
    return trainer.pull_async("b").result()["b"].tolist()


def test_bad_input_is_refused_at_the_call(client):
    with counting() as store:
        assert daskps.run(store, refused, [0]) == [[0.0] * 3]
        assert store.version == 0


# -- what was read ahead -----------------------------------------------------


def matching(trainer, part):
    """Return what pulls give after reads ahead that fit, or do not."""
    calls = []
    read = session_of(trainer).read

    def counted(*args, **how):
        calls.append(1)
        return read(*args, **how)

    session_of(trainer).read = counted
    seen = []

    def pull(*args, **kwargs):
        found = trainer.pull(*args, **kwargs)
        seen.append((len(calls), {n: float(a[0]) for n, a in found.items()}))
        calls.clear()
        return found

    trainer.push_async(full(1.0, 1.0))
    trainer.prefetch()
    first = pull()
    trainer.prefetch(["b", "a"])
    second = pull(["a", "b"])
    assert not np.shares_memory(first["a"], second["a"])
    trainer.prefetch("a")
    out = {"a": np.zeros(4)}
    assert pull(out=out)["a"] is out["a"]
    # It was used up.
    pull("a")
    # Other names.
    trainer.prefetch("a")
    pull()
    # Another clock.
    trainer.prefetch()
    trainer.push(full(1.0, 1.0))
    pull()
    # A push of its own, a step at once under ASP.
    trainer.prefetch()
    trainer.push(full(1.0), tick=False)
    pull()
    trainer.tick()
    return seen


@mostly_inside("sync", ["bsp", "asp"])
def test_prefetch_is_what_the_next_pull_would_read(way, sync):
    """Numbers of reads since the pull before, and what was seen."""
    with counting() as store:
        [seen] = daskps.run(store, matching, [0], sync=sync)
    one, two = {"a": -1.0, "b": -1.0}, {"a": -2.0, "b": -2.0}
    last = (1, two) if sync == "bsp" else (2, {"a": -3.0, "b": -2.0})
    a = {"a": -1.0}
    assert seen == [(1, one), (1, one), (1, a), (1, a), (2, one), (2, two), last]


def record_ahead(trainer, part):
    """As `record` of the tests of staleness, each pull read ahead of some work."""
    rng = np.random.default_rng([part, trainer.rank])
    mark = np.zeros((2, TRAINERS))
    mark[:, trainer.rank] = -1.0
    seen, out = [], trainer.pull()
    for step in range(9):
        trainer.push_async({"clocks": mark})
        trainer.prefetch()
        work(rng, trainer.rank)
        trainer.pull(out=out)
        seen.append((step + 1, out["clocks"].copy()))
    return seen


@mostly_inside("staleness", [0, 2], real=[2])
def test_prefetch_keeps_the_bound(way, staleness):
    for seed in range(3):
        with clock_store() as store:
            sync = daskps.SSP(staleness)
            found = daskps.run(store, record_ahead, [seed] * TRAINERS, sync=sync)
        for rank, seen in enumerate(found):
            assert max(lags(seen, [9] * TRAINERS)) <= staleness
            for clock, clocks in seen:
                np.testing.assert_array_equal(clocks[:, rank], clock)


# -- errors and ends ---------------------------------------------------------


def impatient(trainer, flag):
    if trainer.rank == 0:
        trainer.push(full(1.0))
        late = trainer.pull_async(timeout=0.05)
        behind = trainer.push_async(full(1.0))
        for future in (late, behind):
            with pytest.raises(TimeoutError, match="a pull of trainer 0 at clock 1"):
                future.result()
        assert trainer.clock == 1
        # Unheard, it is raised by the next call, once.
        trainer.pull_async(timeout=0.05)
        with pytest.raises(TimeoutError, match="a pull of trainer 0 at clock 1"):
            trainer.tick()
        trainer.prefetch(timeout=0.05)
        with pytest.raises(TimeoutError, match="a prefetch of trainer 0"):
            trainer.pull()
        flag.set_total()
    else:
        until(flag.exists)
        trainer.push(full(3.0))
    return float(trainer.pull()["a"][0])


@mostly_inside()
def test_errors_are_raised_and_the_trainer_goes_on(way, tmp_path):
    with counting() as store:
        flag = Flag(tmp_path / "late")
        assert daskps.run(store, impatient, [flag, flag]) == [-2.0, -2.0]


def waits_alone(trainer, flag):
    """Rank 0 waits for a round in the background; rank 1 then fails."""
    if trainer.rank:
        until(flag.exists)
        raise ZeroDivisionError("from rank 1")
    future = trainer.push_async(full(1.0))
    waiting = trainer.pull_async()
    future.result()
    flag.set_total()
    [thread] = helpers(0)
    try:
        waiting.result()
    finally:
        thread.join(10)
        for call in (trainer.pull_async, trainer.tick):
            with pytest.raises(daskps.RunCancelledError):
                call()
        assert not helpers(0)
        Flag(flag.path + "-ended").set_total()


@mostly_inside()
def test_cancelled_run_ends_what_is_under_way(way, tmp_path):
    flag = Flag(str(tmp_path / "waits"))
    with counting() as store:
        with pytest.raises(ZeroDivisionError, match="from rank 1"):
            daskps.run(store, waits_alone, [flag, flag])
        until(Flag(flag.path + "-ended").exists)
        assert daskps.run(store, kinds, [0])[0][0] == [1, 2]


def waits_for_itself(trainer, part):
    """Return what callbacks get that wait; in the thread they wait for."""
    found = []

    def wait(future):
        for call in (trainer.pull, trainer.pull_async().result):
            with pytest.raises(RuntimeError) as error:
                call()
            found.append("would wait for itself" in str(error.value))

    # Not carried out before the callback is there: else it runs here.
    with session_of(trainer)._lock:
        trainer.push_async(full(1.0)).add_done_callback(wait)
    # What the callback has issued is carried out, too.
    trainer.pull()
    return found


def test_callback_that_waits_is_refused(client):
    with counting() as store:
        assert daskps.run(store, waits_for_itself, [0], timeout=20) == [[True, True]]


def fails_unheard(trainer, part):
    trainer.finish()
    trainer.pull_async(timeout=0)


def test_error_nobody_heard_of_fails_the_run(client):
    with (
        counting() as store,
        pytest.raises(TimeoutError, match="a pull of trainer 0 at clock 0"),
    ):
        daskps.run(store, fails_unheard, [0])
