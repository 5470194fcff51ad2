"""`run`: loops of the user's own, and what a `Trainer` does in them."""

from __future__ import annotations

import threading
from typing import Any

import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.delayed import delayed

import daskps
from daskps import optim
from tests.seams import session_of
from tests.support import mostly_inside, until

SYNCS = ("bsp", "ssp", "asp")


def counting(params=None, **kwargs):
    """A store whose weights say what was applied: SGD with lr 1 from 0."""
    params = {"a": np.zeros(4), "b": np.zeros(3)} if params is None else params
    kwargs.setdefault("optimizer", optim.SGD(1.0))
    return daskps.create(params, **kwargs)


def pulled(store):
    """Return one number per parameter, the same in all its elements."""
    found = {}
    for name, value in store.pull().items():
        assert (value == value.flat[0]).all(), value
        found[name] = -float(value.flat[0])
    return found


def full(a=None, b=None):
    return {n: np.full(k, v) for n, k, v in (("a", 4, a), ("b", 3, b)) if v is not None}


# -- what it is called with, what it returns ---------------------------------


def describe(trainer, part):
    return trainer.rank, trainer.size, trainer.clock, part, repr(trainer)


@mostly_inside("sync", SYNCS)
def test_results_come_in_the_order_of_ranks(way, sync):
    with counting() as store:
        found = daskps.run(store, describe, ["x", None, (1, 2)], sync=sync)
        assert store.version == 0
    assert [row[:4] for row in found] == [
        (0, 3, 0, "x"),
        (1, 3, 0, None),
        (2, 3, 0, (1, 2)),
    ]
    assert found[1][4] == f"<daskps.Trainer 1 of 3 at clock 0 of store {store.name!r}>"


def kinds_and_sums(trainer, part):
    """Say what a part is made of; a lazy one would have no number."""
    values = part if isinstance(part, tuple) else (part,)
    return [(type(value).__name__, float(np.asarray(value).sum())) for value in values]


def test_lazy_parts_are_computed_on_the_workers(client):
    X = da.arange(6, chunks=2)
    frame = dd.from_pandas(pd.DataFrame({"n": range(4)}), npartitions=2)
    parts = [
        X,
        delayed(sum)([1, 2]),
        client.submit(sum, [3, 4]),
        *frame.to_delayed(),
        frame.partitions[1],
        *daskps.partition(X, X + 1, 2),
        (client.submit(np.arange, 3), 5, X[:1]),
        ("kept", 1.5),
    ]
    with counting() as store:
        found = daskps.run(store, kinds_and_sums, parts[:-1])
        assert daskps.run(store, describe, parts[-1:])[0][3] == ("kept", 1.5)
    assert found == [
        [("ndarray", 15.0)],
        [("int", 3.0)],
        [("int", 7.0)],
        [("DataFrame", 1.0)],
        [("DataFrame", 5.0)],
        [("DataFrame", 5.0)],
        [("ndarray", 3.0), ("ndarray", 6.0)],
        [("ndarray", 12.0), ("ndarray", 15.0)],
        [("ndarray", 3.0), ("int", 5.0), ("ndarray", 0.0)],
    ]


def drawn(i, columns=None):
    """Return rows that are others each time, of the columns that are asked for."""
    frame = pd.DataFrame({"a": np.random.default_rng().normal(size=9)})
    frame["b"] = 3 * frame["a"]
    return frame if columns is None else frame[list(columns)]


def differences(trainer, part):
    first, *others = (np.asarray(value).ravel() for value in part)
    return max(float(abs(first - other / 3).max()) for other in others)


def test_what_lazy_parts_share_is_computed_once(client):
    """Tables of one that is drawn; whatever was made of one delayed object."""
    frame = dd.from_map(drawn, range(2), meta=drawn(0)[:0])
    tables = [(frame[["a"]].partitions[i], frame["b"].partitions[i]) for i in (0, 1)]
    one = delayed(np.random.default_rng().normal, pure=False)(size=4)
    array = da.from_delayed(one, (4,), dtype="f8")
    bag = db.from_delayed([delayed(list)(one)]).map(lambda value: value * 3)
    with counting() as store:
        parts = [*tables, (one, array * 3, bag), (frame["a"], frame["b"])]
        assert max(daskps.run(store, differences, parts)) < 1e-12


class Order:
    def __init__(self):
        self.seen = []

    def on_data(self, run):
        self.seen.append(("data", run.clock))

    def on_start(self, run):
        self.seen.append(("start", run.clock))


def test_callbacks_hear_that_data_is_computed_before_the_start(client):
    def gradient(params, X, y):
        return {"a": np.zeros(4)}

    waits = []
    for parts in (da.ones(4, chunks=2), np.ones(4), list(client.map(np.ones, [2, 2]))):
        order = Order()
        with counting() as store:
            daskps.train(store, gradient, parts, callbacks=[order], trainers=2)
            listed = parts if isinstance(parts, list) else [parts[:2], parts[2:]]
            daskps.run(store, kinds_and_sums, listed, callbacks=[order])
        waits.append([what for what, clock in order.seen if clock == 0])
    assert waits == [["data", "start"] * 2, ["start"] * 2, ["data", "start"] * 2]


def test_a_store_that_is_gone_is_told_before_data_is_computed(client):
    store = counting(name="gone")
    daskps.open("gone").delete()
    with pytest.raises(daskps.StoreClosedError):
        daskps.run(store, describe, [delayed(int)("three")])


def test_a_lazy_part_that_fails_is_named(client):
    with counting() as store:
        wrong = delayed(int)("three")
        with pytest.raises(ValueError, match="three") as caught:
            daskps.run(store, describe, [1, (2, wrong)])
        assert caught.value.__notes__ == [
            "raised by part 1 of the parts of run, which is lazy"
        ]
        assert daskps.run(store, describe, [1])[0][2] == 0  # nothing of it is left


def pull_kinds(trainer, part):
    names = trainer.pull("b")
    out = {"a": np.full(4, np.nan)}
    same = trainer.pull(out=out)
    pushed = trainer.pushpull(full(1.0, 1.0), out=out)
    return list(names), same["a"] is out["a"], list(pushed), out["a"].tolist()


@mostly_inside()
def test_pull_of_names_and_into_arrays(way):
    with counting() as store:
        found = daskps.run(store, pull_kinds, [0, 1])
    assert found == [(["b"], True, ["a"], [-1.0] * 4)] * 2


def clocks(trainer, part):
    seen = [trainer.clock]
    trainer.push(full(1.0, 1.0))
    seen.append(trainer.clock)
    trainer.push(full(1.0, 1.0), tick=False)
    seen.append(trainer.clock)
    trainer.tick()
    seen.append(trainer.clock)
    trainer.pushpull(full(1.0, 1.0))
    seen.append(trainer.clock)
    trainer.barrier()
    return seen


@mostly_inside("sync", SYNCS)
def test_clock_counts_ticks(way, sync):
    with counting() as store:
        assert daskps.run(store, clocks, [0, 1], sync=sync) == [[0, 1, 1, 2, 3]] * 2
        version = 3 if sync == "bsp" else 6
        assert store.versions == (version, version)
        assert pulled(store)["a"] == version


# -- a step of several pushes ------------------------------------------------


def several_pushes(trainer, part):
    """Rank 0 sends 1 and 2 for a, 5 for b; rank 1 sends 10 for a."""
    if trainer.rank == 0:
        trainer.push(full(1.0), tick=False, weight=100.0)
        trainer.push(full(2.0, 5.0), tick=False)
        trainer.push({}, weight=3.0)
    else:
        trainer.push(full(10.0), weight=1.0)
    return {n: -float(v[0]) for n, v in trainer.pull().items()}


def half_pushed(trainer, part):
    """Push 10 to one of two shards, which ends too late; then what `part` says."""
    session = session_of(trainer)
    call = session._call

    def half(request, deadline):
        session._call = call
        session.shards.remote.send(request, [0], deadline).result()
        raise TimeoutError("half way")

    trainer.push(full(1.0, 1.0), tick=False)
    session._call = half
    with pytest.raises(TimeoutError, match="half way"):
        trainer.push(full(10.0, 10.0), tick=False)
    if "again" in part:
        trainer.push(full(10.0, 10.0), tick=False)
    if "more" in part:
        trainer.push(full(100.0, 100.0), tick=False)
    trainer.tick()
    trainer.pushpull(full(1000.0, 1000.0))
    return trainer.clock


@mostly_inside(
    "part,pushed",
    [("", 1001), ("again", 1011), ("again, and more", 1111), ("more", 1101)],
)
def test_a_push_that_some_shards_have_counts_only_if_pushed_again(way, part, pushed):
    with counting() as store:
        assert daskps.run(store, half_pushed, [part]) == [2]
        assert pulled(store) == {"a": pushed, "b": pushed}


@mostly_inside()
def test_bsp_pushes_without_a_tick_join_the_step(way):
    """Equal names are summed, the ticking push has the weight, 3 against 1."""
    with counting() as store:
        expected = {"a": ((1 + 2) * 3 + 10 * 1) / 4, "b": 5.0}
        assert daskps.run(store, several_pushes, [0, 1]) == [expected] * 2
        assert store.versions == (1, 1)


@mostly_inside("sync", ["ssp", "asp"])
def test_asynchronous_pushes_without_a_tick_are_steps(way, sync):
    """Each is an optimizer step at once; a weight multiplies the gradient."""
    with counting(shards=1) as store:
        daskps.run(store, several_pushes, [0, 1], sync=sync)
        assert pulled(store) == {"a": 100 * 1 + 2 + 10, "b": 5.0}
        assert store.version == 3


def weight_zero(trainer, part):
    trainer.push(full(7.0, 7.0), weight=0.0 if trainer.rank else 2.0)
    first = {n: -float(v[0]) for n, v in trainer.pull().items()}
    trainer.push(full(7.0, 7.0), weight=0.0)
    trainer.pull()
    return first, trainer.clock


@mostly_inside()
def test_weight_zero_sits_the_round_out(way):
    """A round without any weight raises no version."""
    with counting() as store:
        found = daskps.run(store, weight_zero, [0, 1, 2])
        assert found == [({"a": 7.0, "b": 7.0}, 2)] * 3
        assert store.versions == (1, 1)


def bad_weights(trainer, part):
    for weight, error in ((-1.0, ValueError), (np.nan, ValueError), ("1", TypeError)):
        with pytest.raises(error, match="weight"):
            trainer.push(full(1.0), weight=weight)
    refused: list[Any] = [
        ({"c": np.zeros(4)}, daskps.UnknownParameterError),
        ({"a": np.zeros(1)}, daskps.PushRejectedError),
        ({"a": np.full(4, np.inf)}, daskps.PushRejectedError),
        ({"a": np.zeros(4), "b": np.zeros(2)}, daskps.PushRejectedError),
    ]
    for grads, kind in refused:
        with pytest.raises(kind):
            trainer.push(grads)
    with pytest.raises(TypeError, match="tick is True or False, found 'no'"):
        trainer.push(full(1.0), tick="no")
    trainer.push(full(2.0), weight=np.float32(2), tick=np.True_)
    return trainer.clock


@mostly_inside("sync", ["bsp", "asp"])
def test_refused_push_leaves_the_clock(way, sync):
    """The trainer goes on as if it had not been."""
    with counting() as store:
        assert daskps.run(store, bad_weights, [0], sync=sync) == [1]
        assert pulled(store) == {"a": 2.0 if sync == "bsp" else 4.0, "b": 0.0}


# -- keys --------------------------------------------------------------------


def some_keys(trainer, part):
    """Both ranks send a; rank 1 alone b, in the first and the last of 3 rounds."""
    for step in range(3):
        b = 4.0 if trainer.rank and step != 1 else None
        trainer.push(full(1.0 + trainer.rank, b), weight=1.0 + 2 * trainer.rank)
    return trainer.pull()


@mostly_inside()
def test_key_of_some_ranks_is_divided_by_their_weight(way):
    with counting() as store:
        daskps.run(store, some_keys, [0, 1])
        assert pulled(store) == {"a": 3 * (1 * 1 + 2 * 3) / 4, "b": 2 * 4.0}
        assert store.versions == (3, 3)


@mostly_inside()
def test_key_of_nobody_takes_no_step(way):
    """Adam's second step on b is that of its own count, not of the rounds."""
    adam = optim.Adam(0.1)
    with counting(optimizer=adam) as store, counting(optimizer=adam) as plain:
        daskps.run(store, some_keys, [0, 1])
        for _ in range(2):
            plain.push(full(b=4.0))
        expected = plain.pull()["b"]
        np.testing.assert_array_equal(store.pull()["b"], expected)


def nested(trainer, part):
    return sorted(trainer.pushpull({"net": {"w": np.ones(2), "b": np.ones(1)}}))


@mostly_inside()
def test_pushes_may_be_nested(way):
    params = {"net": {"w": np.zeros(2), "b": np.zeros(1)}}
    with counting(params) as store:
        assert daskps.run(store, nested, [0]) == [["net/b", "net/w"]]
        assert pulled(store) == {"net/w": 1.0, "net/b": 1.0}


def mixed_stack(stacked, weights):
    """Say who delivered: their number, and their weights in rank order."""
    assert stacked.shape[0] == len(weights)
    digits = (weights * 10.0 ** np.arange(len(weights))).sum()
    return stacked[0] * 0 + digits + 1000 * stacked.shape[1]


@mostly_inside()
def test_callable_reduce_gets_who_delivered(way):
    """On one shard, so that n is the parameter's size."""
    with counting(shards=1) as store:
        daskps.run(store, some_keys, [0, 1], reduce=mixed_stack)
        both, alone = 1 + 3 * 10 + 1000 * 4, 3 + 1000 * 3
        assert pulled(store) == {"a": 3 * both, "b": 2 * alone}


# -- leaving, meeting, failing -----------------------------------------------


def rank_steps(trainer, part):
    """Rank r takes r steps, then leaves and returns what it saw last."""
    for _ in range(trainer.rank):
        trainer.pushpull(full(1.0, 1.0))
    return trainer.clock


@mostly_inside("sync", [*SYNCS, daskps.SSP(0)])
def test_trainers_that_end_are_not_waited_for(way, sync):
    with counting() as store:
        assert daskps.run(store, rank_steps, [0] * 5, sync=sync) == [0, 1, 2, 3, 4]
        # Rounds: the longest; steps on their own: all of them.
        assert pulled(store)["a"] == (4 if sync == "bsp" else 10)


def finish_early(trainer, part):
    if trainer.rank == 0:
        trainer.finish()
        trainer.finish()
        for step in (lambda: trainer.push(full(1.0)), trainer.tick):
            with pytest.raises(daskps.ClockError, match="finished"):
                step()
        return trainer.pull(timeout=30)["a"].shape
    for _ in range(5):
        trainer.pushpull(full(1.0))
    return trainer.clock


@mostly_inside("sync", SYNCS)
def test_finish_may_come_before_the_loop_ends(way, sync):
    with counting() as store:
        assert daskps.run(store, finish_early, [0, 1], sync=sync) == [(4,), 5]
        assert pulled(store)["a"] == 5


def never_alone(trainer, part):
    """Rank 1 waits for a step rank 0 never takes."""
    if trainer.rank == 0:
        trainer.push(full(1.0))
        raise ZeroDivisionError(f"from rank {trainer.rank}")
    try:
        while True:
            trainer.push(full(1.0))
            trainer.pull()
    except daskps.RunCancelledError:
        part.set_total()
        raise


class Path:
    """Writes when an event came, for another process to read."""

    def __init__(self, path):
        self.path = path

    def set_total(self):
        with open(self.path, "w") as file:
            file.write("it came")


@mostly_inside("sync", SYNCS)
def test_error_of_one_ends_all(way, sync, tmp_path):
    path = tmp_path / "cancelled"
    with counting() as store:
        with pytest.raises(ZeroDivisionError, match="from rank 0") as caught:
            daskps.run(store, never_alone, [Path(path)] * 2, sync=sync)
        assert caught.value.__notes__ == ["raised in trainer 0 of 2 at clock 1"]
        until(path.exists)
        assert daskps.run(store, describe, [0, 1])[1][:2] == (1, 2)


def impatient(trainer, part):
    if trainer.rank == 0:
        trainer.push(full(1.0))
        with pytest.raises(TimeoutError, match="a pull of trainer 0 at clock 1"):
            trainer.pull(timeout=0.05)
        part.set_total()
        return float(trainer.pull()["a"][0])
    while not part.exists():
        threading.Event().wait(0.001)
    return float(trainer.pushpull(full(3.0))["a"][0])


class Flag(Path):
    def exists(self):
        import os

        return os.path.exists(self.path)


@mostly_inside()
def test_timeout_of_one_call_leaves_the_run_alone(way, tmp_path):
    with counting() as store:
        flag = Flag(tmp_path / "late")
        assert daskps.run(store, impatient, [flag, flag]) == [-2.0, -2.0]


def forever(trainer, part):
    while True:
        trainer.pushpull(full(1.0))


@mostly_inside("sync", SYNCS)
def test_timeout_of_the_run(way, sync):
    with counting() as store:
        with pytest.raises(TimeoutError, match="a run on store"):
            daskps.run(store, forever, [0, 1], sync=sync, timeout="300ms")
        assert daskps.run(store, rank_steps, [0, 1]) == [0, 1]


def test_deleting_the_store_ends_the_run(client):
    with counting(name="going") as store:
        other = daskps.open("going")

        def end():
            until(lambda: store.version > 3)
            other.delete()

        thread = threading.Thread(target=end)
        thread.start()
        with pytest.raises((daskps.StoreClosedError, daskps.StoreNotFoundError)):
            daskps.run(store, forever, [0, 1])
        thread.join()


def unpicklable_result(trainer, part):
    return threading.Lock()


def test_result_that_cannot_be_pickled(client):
    with counting() as store:
        with pytest.raises(TypeError, match=r"pickle|serialize"):
            daskps.run(store, unpicklable_result, [0])
        assert daskps.run(store, rank_steps, [0]) == [0]


def other_store(trainer, part):
    """A run on one store may push to another one."""
    trainer.pushpull(full(1.0))
    part.push(full(1.0))
    return trainer.clock


@mostly_inside()
def test_loop_may_use_another_store(way):
    with counting() as store, counting() as second:
        daskps.run(store, other_store, [second] * 3)
        assert pulled(store)["a"] == 1
        assert pulled(second)["a"] == 3


def own_store(trainer, part):
    with pytest.raises(daskps.ConsistencyError, match="bsp"):
        part.push(full(1.0))
    return float(part.pull()["a"][0])


@mostly_inside()
def test_loop_may_not_go_round_its_trainer(way):
    with counting() as store:
        assert daskps.run(store, own_store, [store] * 2) == [0.0, 0.0]
        assert store.version == 0


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((describe, []), {}, ValueError, "parts"),
        (("describe", [1]), {}, TypeError, "loop"),
        ((describe, 3), {}, TypeError, "parts is a list with one part"),
        ((describe, da.ones(4)), {}, TypeError, "found Array.*partition.*to_delayed"),
        ((describe, [1]), {"sync": "sbp"}, ValueError, "bsp.*ssp.*asp"),
        ((describe, [1]), {"reduce": "median"}, ValueError, "mean.*sum"),
        ((describe, [1]), {"reduce": max, "sync": "ssp"}, ValueError, "bsp"),
        ((describe, [1]), {"codec": "bf61"}, ValueError, "bf16"),
        ((describe, [1]), {"checkpoint": None}, TypeError, "checkpoint"),
        ((describe, [1] * 1025), {}, daskps.LayoutError, "1,024"),
    ],
)
def test_bad_arguments(client, args: Any, kwargs: Any, error, match):
    with counting() as store:
        with pytest.raises(error, match=match):
            daskps.run(store, *args, **kwargs)
        assert daskps.run(store, rank_steps, [0]) == [0]
