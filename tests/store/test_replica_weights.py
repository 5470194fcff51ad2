"""What a replica and its store exchange, as arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from daskps.errors import PushRejectedError
from daskps.store.replica_weights import ReplicaWeights


def exchanged(replica, store, meanwhile=None):
    """Sync with a store that is a dict of arrays, in which nothing fails."""
    exchange = replica.begin()
    if not exchange.is_complete:
        replica.meet(exchange, {n: a.copy() for n, a in store.items()})
    for name, delta in exchange.deltas.items():
        store[name] += delta
    exchange.found = {n: a.copy() for n, a in store.items()}
    if meanwhile:
        meanwhile()
    replica.end(exchange)
    return exchange


def arrays(**values):
    return {n: np.asarray(v) for n, v in values.items()}


def test_s15_elastic_averaging_meets_half_way():
    store = arrays(w=np.array(0.0))
    replica = ReplicaWeights(arrays(w=np.array(1.0)), 0.5)
    exchanged(replica, store)
    assert replica.params["w"] == store["w"] == 0.5


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_elastic_averaging_follows_the_paper(share, rng):
    """Zhang et al., algorithm 1: x -= a (x - c); c += a (x - c), both of what was."""
    c, xs = rng.normal(size=5), rng.normal(size=(3, 5))
    store, replicas = arrays(w=c.copy()), []
    replicas = [ReplicaWeights(arrays(w=x.copy()), share) for x in xs]
    for i in range(9):
        replica, x = replicas[i % 3], xs[i % 3]
        grad = rng.normal(size=5)
        x -= 0.1 * grad
        replica.params["w"] -= 0.1 * grad
        exchanged(replica, store)
        moved = share * (x - c)
        x -= moved
        c += moved
        np.testing.assert_allclose(replica.params["w"], x, rtol=1e-12)
        np.testing.assert_allclose(store["w"], c, rtol=1e-12)


def test_what_was_done_during_a_sync_stays_and_goes_with_the_next():
    store = arrays(w=np.zeros(3))
    replica = ReplicaWeights(arrays(w=np.zeros(3)))
    replica.params["w"] += 1

    def meanwhile():
        replica.params["w"] += [0, 4, 0]

    store["w"] += 10  # another's
    exchanged(replica, store, meanwhile)
    assert store["w"].tolist() == [11, 11, 11]
    assert replica.params["w"].tolist() == [11, 15, 11]
    exchanged(replica, store)
    assert store["w"].tolist() == replica.params["w"].tolist() == [11, 15, 11]


def test_elastic_averaging_keeps_what_was_done_during_a_sync():
    store = arrays(w=np.zeros(1))
    replica = ReplicaWeights(arrays(w=np.ones(1)), 0.5)

    def meanwhile():
        replica.params["w"] += 8

    exchanged(replica, store, meanwhile)
    assert (replica.params["w"].item(), store["w"].item()) == (8.5, 0.5)


def test_only_what_has_changed_is_sent():
    replica = ReplicaWeights(arrays(a=np.zeros(2), b=np.zeros(2), n=np.zeros(1, int)))
    assert replica.begin().deltas == {}
    replica.params["b"][1] = 3
    assert {n: d.tolist() for n, d in replica.begin().deltas.items()} == {"b": [0, 3]}


@pytest.mark.parametrize("share", [None, 0.5])
def test_integers_are_added_and_taken_over_whatever_the_floats_do(share):
    store = arrays(n=np.array([5, 5]), u=np.array([3], "u1"), w=np.zeros(1))
    replica = ReplicaWeights({n: a.copy() for n, a in store.items()}, share)
    replica.params["n"][0] += 2
    replica.params["u"][0] -= 1  # as 255, which wraps around
    store["n"] += 10
    exchanged(replica, store)
    assert store["n"].tolist() == replica.params["n"].tolist() == [17, 15]
    assert store["u"].tolist() == replica.params["u"].tolist() == [2]


def test_a_change_of_bools_is_refused_and_others_are_not():
    store = arrays(m=np.array([True, False]), w=np.zeros(1))
    replica = ReplicaWeights({n: a.copy() for n, a in store.items()})
    store["m"][1] = True
    exchanged(replica, store)
    assert replica.params["m"].tolist() == [True, True]
    replica.params["m"][0] = False
    with pytest.raises(PushRejectedError, match="'m' is bool"):
        replica.begin()


def test_a_replica_that_did_nothing_has_the_very_bits_of_the_store(rng):
    store = arrays(w=rng.normal(size=1000).astype("f4"))
    replica = ReplicaWeights(arrays(w=rng.normal(size=1000).astype("f4")))
    replica._base["w"][:] = replica.params["w"]
    exchanged(replica, store)
    assert replica.params["w"].tobytes() == store["w"].tobytes()


def test_what_is_assigned_is_written_to_the_array_that_is_there():
    params = {"w": np.zeros(2), "n": np.zeros(1, int)}
    w = params["w"]
    weights = ReplicaWeights(params)
    weights.params["w"] = [1, 2]
    assert (weights.params["w"] is w, w.tolist()) == (True, [1, 2])
    w += 1  # as `weights.params["w"] += 1` does first
    weights.params["w"] = w
    with pytest.raises(ValueError, match=r"'w' has shape \(2,\), found \(1,\)"):
        weights.params["w"] = [3.0]  # nothing is broadcast
    with pytest.raises(TypeError, match="same_kind"):
        weights.params["n"] = [1.5]
    with pytest.raises(KeyError):
        weights.params["v"] = 1
    assert weights.begin().deltas["w"].tolist() == [2, 3]
