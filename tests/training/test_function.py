"""A user's function of whole arrays in place of a rule: outside of runs and in them."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import LayoutError, PushRejectedError, TableSpec, optim
from tests.support import INSIDE, mostly_inside

X = np.zeros((8, 1))
HOW: dict[str, Any] = {"batch_size": 2, "trainers": 2, "callbacks": ()}
#: In functions of the tests, by their own names for processes of workers.
untyped: Any = optim


def plus_twice(name, weights, gradient, step):
    """M5: stored += 2 * received."""
    return weights + 2 * gradient


def centred(name, weights, gradient, step):
    """Needs all elements at once, and says what it was given."""
    assert name == "w"
    assert weights.shape == gradient.shape == (2, 3)
    weights -= gradient * step  # a copy of its own
    gradient[:] = 99
    return weights - weights.mean()


def ones(params, X, y):
    return {"w": np.ones_like(params["w"])}


def ramp(params, X, y):
    return {"w": np.arange(6.0).reshape(2, 3)}


@mostly_inside("dtype", ["f4", "f2", "f8"])
def test_m5_an_updater_of_ones_own(way, dtype):
    """Init 4, push 1: 6; once more with weight 3: 12."""
    with daskps.create(
        {"w": np.full((2, 2), 4, dtype)},
        optimizer=optim.Function(plus_twice),
        shards=1,
    ) as store:
        assert store.push({"w": np.ones((2, 2), dtype)}) == 1
        assert store.pull()["w"].tolist() == [[6, 6], [6, 6]]
        store.push({"w": np.ones((2, 2), dtype)}, weight=3.0)
        store.add({"w": np.ones((2, 2), dtype)})
        found = store.pull()["w"]
        assert found.tolist() == [[13, 13], [13, 13]]
        assert found.dtype == dtype
        assert store.optimizer == {"w": "Function(plus_twice)"}


@mostly_inside("how", [{}, {"sync_every": 2, "average": "models"}], train=True)
def test_rounds_are_updates_of_the_whole_array(train, way, how):
    """Two rounds of each epoch, in NumPy; the second parameter has a rule, and its cut.

    Trainers that take their own steps begin to count with each synchronisation.
    """
    params = {"w": np.zeros((2, 3))}
    with daskps.create(params, optimizer=optim.Function(centred), shards=1) as store:
        train(store, ramp, X, epochs=2, **HOW, **how)
        w = np.zeros((2, 3))
        for step in (1, 2, 1, 2) if how else (1, 2, 3, 4):
            w = w - np.arange(6.0).reshape(2, 3) * step
            w -= w.mean()
        np.testing.assert_allclose(store["w"].pull(), w, rtol=1e-12)


@pytest.mark.parametrize("way", INSIDE, indirect=True)
@pytest.mark.parametrize("sync", ["asp", "ssp"])
def test_each_push_without_rounds_is_an_update(way, sync):
    with daskps.create(
        {"w": np.zeros(3)}, optimizer=optim.Function(plus_twice), shards=1
    ) as store:
        daskps.train(store, ones, X, epochs=2, sync=sync, **HOW)
        assert store["w"].pull().tolist() == [16.0] * 3
        assert store.version == 8


@pytest.mark.parametrize("way", INSIDE, indirect=True)
def test_m7_sums_of_all_workers(way):
    """n workers, worker r pushes r + 1, w += 2 sum, init 1: 13, 25, 37 for n = 3."""
    for shape in ((2, 3), (40, 30)):

        def loop(trainer, part, shape=shape):
            seen = []
            for _ in range(3):
                trainer.push({"w": np.full(shape, trainer.rank + 1.0, "f4")})
                seen.append(set(trainer.pull()["w"].ravel().tolist()))
            return seen

        with daskps.create(
            {"w": np.ones(shape, "f4")}, optimizer=optim.Function(plus_twice), shards=1
        ) as store:
            seen = daskps.run(store, loop, [0] * 3, reduce="sum")
            assert seen == [[{13.0}, {25.0}, {37.0}]] * 3


def exits(name, weights, gradient, step):
    if gradient.ravel()[0] > 5:
        sys.exit(3)
    return weights - gradient


def raising(kind):
    def fails(name, weights, gradient, step):
        if gradient.ravel()[0] > 5:
            raise kind("mine")
        return weights - gradient

    return fails


def where(name, weights, gradient, step):
    """Return 1 where an event loop would wait for it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return weights * 0
    return weights * 0 + 1


@mostly_inside("", [()])
def test_no_event_loop_waits_for_a_function(way):
    """However small the shard is."""
    rules = {"w": optim.Function(where), "v": optim.SGD(1.0)}
    params = {"w": np.ones(3), "v": np.ones(1)}
    with daskps.create(params, optimizer=rules, shards=1) as store:
        store.push({"w": np.ones(3)})
        assert store["w"].pull().tolist() == [0.0] * 3
        daskps.run(store, lambda t, p: t.push({"w": np.ones(3)}), [0, 0])
        assert store["w"].pull().tolist() == [0.0] * 3


WRONG: Any = [
    (lambda n, w, g, t: None, TypeError, "dtype object for 'w'"),
    (lambda n, w, g, t: w[:2], ValueError, r"shape \(2,\) and .* of shape \(3,\)"),
    (lambda n, w, g, t: w * 1j, TypeError, "complex128 for 'w'; .* and float64"),
    (
        lambda n, w, g, t: w / 0,
        ValueError,
        r"returned NaN or Inf \(as float64\) for 'w'",
    ),
    (lambda n, w, g, t: ["a"] * 3, TypeError, "dtype <U1 for 'w'"),
    (lambda n, w, g, t: [[1], [1, 2], 3], ValueError, "inhomogeneous"),
    (lambda n, w, g, t: 1 // 0, ZeroDivisionError, "division"),
    (exits, RuntimeError, r"Function\(exits\) called sys.exit\(3\)"),
    (raising(StopIteration), RuntimeError, r"raised StopIteration \(mine\)"),
    # No time-out of the call, and no host out of reach; by message a DaskPSError.
    (raising(TimeoutError), TimeoutError, "^mine"),
    (raising(OSError), (OSError, daskps.DaskPSError), "mine"),
]


@pytest.mark.parametrize("way", INSIDE, indirect=True)
@pytest.mark.parametrize(("f", "kind", "match"), WRONG)
def test_what_it_returns_or_raises_wrongly_changes_nothing(way, f, kind, match):
    """Neither its parameter nor those that came with it; runs end with the error."""
    rules = {"w": optim.Function(f), "v": optim.SGD(1.0)}
    params = {"w": np.ones(3), "v": np.ones(1)}
    with daskps.create(params, optimizer=rules, shards=1) as store:
        given = {"w": np.full(3, 9.0), "v": np.ones(1)}
        with pytest.raises(kind, match=match):
            store.push(given)
        with pytest.raises(kind, match=match):
            daskps.run(store, lambda t, p: t.pushpull(given), [0, 0])
        assert store.version == 0
        assert {n: a.tolist() for n, a in store.pull().items()} == {
            "w": [1, 1, 1],
            "v": [1],
        }
        assert store.push({"v": np.ones(1)}) == 1


@pytest.mark.parametrize("way", INSIDE, indirect=True)
def test_its_error_says_what_other_shards_may_have_done(way):
    """Outside of runs they have taken theirs; a round is taken back from all."""

    def odd(name, weights, gradient, step):
        if name == "b" and gradient[0] > 5:
            raise ZeroDivisionError("mine")
        return weights - gradient

    with daskps.create({"w": np.zeros(2)}) as store:
        first, second = store.placement
    where = {"a": first, "b": second}
    given = {"a": np.full(2, 9.0), "b": np.full(2, 9.0)}
    params = {"a": np.zeros(2), "b": np.zeros(2)}
    rule = optim.Function(odd)
    says = r"mine\nraised by Function\(.*odd\) for 'b'; its shard has taken nothing"
    with daskps.create(params, optimizer=rule, placement=where) as store:
        with pytest.raises(ZeroDivisionError, match=says):
            daskps.run(store, lambda t, p: t.push(given), [0, 0])
        assert store["a"].pull().tolist() == [0, 0]
        with pytest.raises(ZeroDivisionError, match=says):
            store.push(given)
        assert {n: a.tolist() for n, a in store.pull().items()} == {
            "a": [-9, -9],
            "b": [0, 0],
        }


@mostly_inside("", [()])
def test_what_it_cannot_be_given(way):
    function = optim.Function(plus_twice)
    with pytest.raises(LayoutError, match=r"'w' is Function\(plus_twice\).*2 shards"):
        daskps.create({"w": np.zeros(2)}, optimizer=function, shards=2)
    with pytest.raises(LayoutError, match="table 'emb' is Function"):
        daskps.create({"emb": TableSpec(3, 2)}, optimizer=function, shards=1)
    # One element is whole wherever it lies.
    rules = {"one": function, "*": optim.SGD(1.0)}
    with daskps.create({"w": np.zeros(8), "one": 1.0}, optimizer=rules) as store:
        store.push({"one": np.ones(())})
        assert store["one"].pull() == 3
        with pytest.raises(PushRejectedError, match="has no learning rate"):
            store.push({"one": np.ones(())}, lr=0.1)
        with pytest.raises(PushRejectedError, match="NaN"):
            store.push({"one": np.array(np.nan)})
        assert store["one"].pull() == 3


def test_a_function_is_a_value_and_no_part_of_others():
    assert optim.Function(plus_twice) == optim.Function(plus_twice)
    assert optim.Function(plus_twice) != optim.Function(centred)
    assert hash(optim.Function(centred)) == hash(optim.Function(centred))
    assert repr(optim.Function(plus_twice)) == "Function(plus_twice)"
    for make in (
        lambda: untyped.Function(3),
        lambda: untyped.Function(dict),
        lambda: optim.chain(optim.clip_by_value(0, 1), optim.Function(plus_twice)),
        lambda: optim.scaled(optim.Function(plus_twice), 2.0),
    ):
        with pytest.raises(TypeError, match=r"takes a function|whole arrays"):
            make()
