"""`store.aggregate(into=)`: the result stays with the owners of a store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.cluster.host.collectives import KEPT_SECONDS, Collectives
from daskps.errors import ContributionLostError
from tests.support import mostly_inside

inside = pytest.mark.parametrize("way", ["inside"], indirect=True)
PARAMS = {"w": np.arange(9.0), "h": np.full(4, 1.0, "f2"), "n": np.zeros(2, "int64")}
GIVEN = [
    {"w": np.full(9, 3.0), "h": np.full(4, 2.0, "f2")},
    {"w": np.full(9, 6.0)},
    {"w": np.full(9, 9.0), "h": np.full(4, 6.0, "f2")},
]


def store_of(params=None, **how):
    how.setdefault("shards", 3)
    return daskps.create(params or PARAMS, optimizer=optim.Adam(0.1), **how)


@mostly_inside()
def test_the_owners_keep_what_contributions_come_to(way):
    with store_of() as store, store_of() as other:
        version = store.aggregate(GIVEN, into=other)
        assert store.version == 0
        assert version == 1
        assert len(version.pairs) == 3
        found = other.pull(min_version=version)
        assert (found["w"] == 6).all()
        assert (found["h"] == 4).all()
        assert (found["n"] == 0).all()
        # Optimizer state stays: this is Adam's first step.
        other.push({"w": np.ones(9)})
        np.testing.assert_allclose(other["w"].pull(), 5.9)
        assert store.aggregate(GIVEN, reduce="sum", into=store) == 1
        assert (store["w"].pull() == 18).all()


@inside
def test_what_fails_on_one_owner_changes_none(way):
    def odd(stacked, weights):
        if (stacked[0] > 7).any():  # in the last shard alone
            raise ZeroDivisionError("mine")
        return stacked[0]

    given = [{"w": np.arange(9.0)}]
    with store_of() as store:
        with pytest.raises(ZeroDivisionError, match="mine"):
            store.aggregate(given, reduce=odd, into=store)
        large = {"h": np.array([1, 1, 1, 60000], "f2")}
        with pytest.raises(daskps.PushRejectedError, match="'h' come to is not finite"):
            store.aggregate([large, large], reduce="sum", into=store)
        assert store.versions == (0, 0, 0)
        assert store.aggregate(given, into=store) == 1


@inside
@pytest.mark.parametrize("error", [TimeoutError, daskps.StaleGenerationError])
def test_what_a_function_raises_is_not_taken_for_a_host_out_of_reach(way, error):
    def fails(stacked, weights):
        raise error("mine")

    with store_of(shards=1) as store:
        for into in (None, store):
            with pytest.raises(daskps.DaskPSError, match=f"{error.__name__}: mine"):
                store.aggregate(GIVEN[:1], reduce=fails, into=into, timeout=20)
        assert store.version == 0


@inside
def test_where_a_part_was_lost_it_is_reduced_again(way, monkeypatch):
    find = Collectives.pieces
    lost: list[str] = []

    def forgets(self, token, shards):
        if len(lost) < 2:
            lost.append(token)
            self.drop_pieces(token)
        return find(self, token, shards)

    monkeypatch.setattr(Collectives, "pieces", forgets)
    with store_of() as store:
        assert store.aggregate([{"w": np.ones(9)}], into=store) == 1
        assert (store["w"].pull() == 1).all()
        assert store.versions == (1, 1, 1)
    assert len(lost) == 2


@inside
@pytest.mark.parametrize(
    ("params", "how"),
    [({"w": np.zeros(9)}, {}), (PARAMS, {"shards": 2})],
)
def test_another_layout_is_refused(way, params, how):
    with store_of() as store, store_of(params, **how) as other:
        with pytest.raises(daskps.LayoutError, match="other shards"):
            store.aggregate([{"w": np.ones(9)}], into=other)
        assert other.version == 0


@inside
def test_what_is_no_store_and_what_names_nothing(way):
    with store_of() as store:
        odd: Any = "store"
        with pytest.raises(TypeError, match="into is a ParameterStore, found str"):
            store.aggregate([{"w": np.ones(9)}], into=odd)
        with pytest.raises(ValueError, match="name no parameter"):
            store.aggregate([{}], into=store)


@inside
def test_a_run_in_rounds_has_the_store_to_itself(way):
    def loop(trainer, stores):
        a, b = stores
        with pytest.raises(daskps.ConsistencyError, match="an assign from outside"):
            b.aggregate([{"w": np.ones(9)}], into=a)
        a.aggregate([{"w": np.ones(9)}], into=b)

    with store_of() as store, store_of() as other:
        daskps.run(store, loop, [(store, other)])
        assert store.version == 0
        assert (other["w"].pull() == 1).all()


def test_what_nobody_comes_for_is_dropped(monkeypatch):
    kept, now = Collectives(), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    kept.keep_pieces("a", {})
    kept.keep_pieces("b", {(0, 0): np.ones(1)})
    assert kept.pieces("b", [0])[0, 0] == 1
    now[0] = KEPT_SECONDS + 1
    kept.keep_pieces("c", {})
    for token in ("a", "b"):
        with pytest.raises(ContributionLostError):
            kept.pieces(token, [0])
    kept.drop_pieces("c")
    kept.drop_pieces("c")
