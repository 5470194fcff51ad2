"""Large gradients that are not finite are refused as small ones are, in every way."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

import daskps
from daskps import config, kernels, optim
from daskps.kernels.past import PAST_NBYTES
from daskps.shards.memory.format import RANK_FLOOR
from daskps.store import values
from tests.seams import session_of

#: Each of two shards is large enough to be written past the caches.
N = PAST_NBYTES // 2 + 1000
NAN = r"the gradient of '{}' has NaN or Inf \(as float32\); look for them in the data"


def gradient(*bad):
    """A gradient of ones, but for some elements of `a` and `b`."""
    found = {"a": np.ones(N, "f4"), "b": np.ones(3, "f4")}
    for name, at, value in bad:
        found[name][at] = value
    return found


def cases():
    """What is refused, and the error, which names what is wrong with the first."""
    yield gradient(("a", 0, np.nan)), NAN.format("a")
    yield gradient(("a", -1, np.inf)), NAN.format("a")
    yield gradient(("b", 1, -np.inf)), NAN.format("b")
    both = gradient(("a", N // 2, np.nan), ("b", 0, np.nan))
    yield both, NAN.format("a")
    yield dict(reversed(both.items())), NAN.format("b")
    yield {**gradient(("a", 5, np.nan)), "b": np.ones(4)}, NAN.format("a")
    yield {"b": np.ones(4), "a": both["a"]}, r"has shape \(4,\)"


def mixed(trainer, part):
    """Push what is refused between what is not."""
    out = {"a": np.empty(N, "f4"), "b": np.empty(3, "f4")}
    trainer.pull(out=out)
    for bad, error in cases():
        clock = trainer.clock
        with pytest.raises(daskps.PushRejectedError, match=error):
            trainer.push(bad)
        with pytest.raises(daskps.PushRejectedError, match=error):
            trainer.pushpull(bad, out=out)
        assert trainer.clock == clock
        trainer.pushpull(gradient(), out=out)
        assert np.isfinite(out["a"]).all()
    return trainer.clock


def looks(trainer, part):
    """Return how many gradients of a push are looked at before it."""
    with (
        mock.patch.object(values, "finite_of", wraps=kernels.finite) as look,
        mock.patch(
            "daskps.cluster.caller.local_shards.finite", wraps=kernels.finite
        ) as later,
    ):
        trainer.push(gradient())
    # What the first shard does not get is looked at by a loop that is kept on disk.
    assert later.call_count == (0 if look.call_count else 2), later.call_count
    for call in later.call_args_list:
        assert call.kwargs == {"cache_dir": str(config.load().cache)}
    return look.call_count


def test_a_refused_push_changes_nothing_anywhere(way):
    params = {"a": np.zeros(N, "f4"), "b": np.zeros(3, "f4")}
    with daskps.create(params, optimizer=optim.SGD(1.0), client=way) as store:
        found = daskps.run(store, mixed, [0, 1], sync="asp")
        pushes = len(list(cases()))
        assert found == [pushes] * 2
        total = 2 * pushes
        assert store.versions == (total, total)
        assert {name: set(v.tolist()) for name, v in store.pull().items()} == {
            "a": {-float(total)},
            "b": {-float(total)},
        }
        rows = store.stats()["shards"]
        assert [row["pushes"] for row in rows] == [total] * 2
        assert [row["duplicates"] for row in rows] == [0, 0]


@pytest.mark.parametrize(
    ("way", "sync", "looked"),
    [("machine", "asp", 0), ("machine", "ssp", 0), ("machine", "bsp", 2)],
    indirect=["way"],
)
def test_who_applies_a_large_gradient_alone_looks_at_it(way, sync, looked):
    params = {"a": np.zeros(N, "f4"), "b": np.zeros(3, "f4")}
    with daskps.create(params, optimizer=optim.SGD(1.0), client=way) as store:
        assert daskps.run(store, looks, [0], sync=sync) == [looked]


@pytest.mark.parametrize("rule", [optim.SGD(1.0), optim.Adagrad(1.0)])
def test_a_refused_push_of_a_handle_changes_nothing(way, rule):
    """Of one shard, which looks in the pass that applies it where nothing else may."""
    params = {"a": np.zeros(2 * N, "f4"), "b": np.zeros(3, "f4")}
    good = {"a": np.ones(2 * N, "f4"), "b": np.ones(3, "f4")}
    with daskps.create(params, optimizer=rule, shards=1, client=way) as store:
        version = store.push(good)
        before = store.pull()["a"][[0, -1]].tolist()
        for at, value in ((0, np.nan), (-1, np.inf)):
            bad = {"a": good["a"].copy(), "b": good["b"]}
            bad["a"][at] = value
            with pytest.raises(daskps.PushRejectedError, match=NAN.format("a")):
                store.push(bad)
            with pytest.raises(daskps.PushRejectedError, match=NAN.format("a")):
                store.pushpull(bad)
        assert store.pull()["a"][[0, -1]].tolist() == before
        assert store.push(good) == version + 1
        assert store.stats()["shards"][0]["duplicates"] == 0


def mixed_local(trainer, part):
    """The same, and how far each shard knows that the trainer's steps are settled."""
    mixed(trainer, part)
    trainer.push({"b": np.ones(3, "f4")})
    local = [
        session_of(trainer).shards.carriers.find_shard(shard) for shard in range(6)
    ]
    records = [hosted.shard.segment.current for _, hosted in local]
    floors = [record.ranks.item(0, RANK_FLOOR) for record in records]
    return floors, session_of(trainer).sequence - 1


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_a_large_gradient_of_small_shards_is_looked_at_before_they_take_it(way):
    """They take a step of ASP at once, and look at nothing."""
    params = {"a": np.zeros(N, "f4"), "b": np.zeros(3, "f4")}
    with daskps.create(params, optimizer=optim.SGD(1.0), shards=6) as store:
        [(floors, number)] = daskps.run(store, mixed_local, [0], sync="asp")
        pushes = len(list(cases()))
        assert set(store.versions) == {pushes, pushes + 1}
        assert np.isfinite(store.pull()["a"]).all()
    # A cut waits for none of its steps.
    assert floors == [number] * 6
