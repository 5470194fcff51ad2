"""Replicas of a store: local steps, syncs that add, and syncs that fail."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client

import daskps
from daskps import TableSpec, optim
from daskps.errors import PushRejectedError
from tests import inprocess
from tests.seams import bound_link
from tests.support import CARRIERS, mostly_inside

inside = pytest.mark.parametrize("way", ["inside"], indirect=True)


def store_of(params=None, rule=None, **how):
    how.setdefault("shards", 2)
    return daskps.create(
        {"w": np.zeros(4)} if params is None else params,
        optimizer=optim.SGD(0.1) if rule is None else rule,
        **how,
    )


@mostly_inside()
def test_v6_delta_sync_of_a_matrix(way):
    """A 200 x 200 replica in each of two, two local steps, then sync."""
    like = np.arange(1.0, 40001).reshape(200, 200)
    with store_of({"w": np.zeros((200, 200))}) as store:
        replicas = [store.replica(every=2) for _ in range(2)]
        for i in range(3):
            for replica in replicas:
                for _ in range(2):
                    # -0.1 times this is what the test of Multiverso adds.
                    replica.step({"w": -10 * like})
            for replica in replicas:
                replica.sync()
                expected = like * (i + 1) * 2 * 2
                np.testing.assert_allclose(replica.params["w"], expected, rtol=1e-12)


@inside
def test_steps_are_those_of_the_store_s_rule_and_syncs_leave_its_state(way, rng):
    """A replica alone, synced every other step, does what pushes would do."""
    grads = rng.normal(size=(7, 4))
    with store_of(rule=optim.Adam(0.1)) as store, store_of(rule=optim.Adam(0.1)) as own:
        with store.replica(every=2) as replica:
            for grad in grads:
                replica.step({"w": grad})
                own.push({"w": grad})
        np.testing.assert_allclose(store["w"].pull(), own["w"].pull(), rtol=1e-12)
        assert store.version == 4  # syncs: three, and that at the end
        assert replica.steps == 7


@inside
def test_a_sync_takes_over_what_others_have_done(way):
    with store_of() as store:
        replica = store.replica(every=3)
        store.add({"w": np.full(4, 5.0)})
        replica.step({"w": np.ones(4)})
        assert replica.params["w"].tolist() == [-0.1] * 4
        assert store.pull()["w"].tolist() == [5.0] * 4
        replica.sync()
        np.testing.assert_allclose(replica.params["w"], 4.9)
        np.testing.assert_allclose(store.pull()["w"], 4.9)


@inside
def test_a_sync_without_changes_is_no_update(way):
    with store_of() as store:
        with store.replica() as replica:
            pass
        assert store.version == 0
        store.add({"w": np.ones(4)})
        replica.sync()
        assert (store.version, replica.params["w"].tolist()) == (1, [1.0] * 4)


@mostly_inside()
def test_syncs_beside_the_steps_lose_nothing(way):
    """Downpour: each step of two replicas arrives in the store once, whenever synced."""
    with store_of({"w": np.zeros(3)}) as store:
        with store.replica(every=100) as a, store.replica(every=100) as b:
            for _ in range(20):
                for replica in (a, b):
                    replica.step({"w": np.ones(3)})
                    replica.sync_async()
        for replica in (a, b):
            replica.sync()
        for found in (store.pull()["w"], a.params["w"], b.params["w"]):
            np.testing.assert_allclose(found, -4.0, rtol=1e-12)


@inside
def test_elastic_replicas_and_their_store_meet(way):
    """S15 on a store; integers are added as they are without it."""
    params = {"w": np.full(4, 1.0), "n": np.zeros(1, "int64")}
    with store_of(params) as store:
        replica = store.replica(elastic=0.5)
        store.assign({"w": np.zeros(4)})
        replica.params["n"][0] += 3
        replica.sync()
        assert replica.params["w"].tolist() == store.pull()["w"].tolist() == [0.5] * 4
        assert (replica.params["n"], store["n"].pull()) == ([3], [3])
        replica.params["w"] += 1
        replica.sync_async().result()
        assert replica.params["w"].tolist() == [1.5] * 4  # until its next call
        replica.params["w"] += 1
        replica.sync()  # takes over, 2.0 and 1.0, and meets again
        assert replica.params["w"].tolist() == store.pull()["w"].tolist() == [1.5] * 4


# -- syncs that fail ------------------------------------------------------------


class Silenced:
    """A host that applies a call and never answers it, or does not even apply it."""

    def __init__(self, made, host, *, applies):
        self._door = made.doors[made.hosts[host].worker.address]
        self._serve = self._door.handlers["daskps_call"]
        self._applies = applies
        self._door.handlers["daskps_call"] = self._silent

    async def _silent(self, **message):
        if self._applies:
            await self._serve(**message)
        await asyncio.Event().wait()

    def end(self):
        self._door.handlers["daskps_call"] = self._serve


@pytest.mark.parametrize("how", ["with", "beside"])
@pytest.mark.parametrize("elastic", [None, 0.5])
@pytest.mark.parametrize("applies", [True, False])
def test_a_sync_of_which_nothing_is_known_counts_once(applies, elastic, how):
    """One host applied it, the other one has it or has not: it is sent again."""
    params = {"w": np.zeros(4)} | ({"n": np.zeros(4, int)} if elastic else {})
    with (
        dask.config.set(CARRIERS["rpc"]),
        inprocess.cluster() as made,
        store_of(params) as store,
    ):
        replica = store.replica(every=100, elastic=elastic)
        replica.step({"w": np.full(4, 10.0)})
        if elastic:
            replica.params["n"][:] = 1
            store.add({"w": np.ones(4)})
            # Else its first call, which reads, would be the one that fails.
            pending = replica._begun(bound_link(store))
            replica._weights.meet(pending.exchange, store.pull())
        silenced = Silenced(made, 1, applies=applies)
        failing = replica.sync if how == "with" else async_sync(replica)
        with pytest.raises(TimeoutError):
            failing(timeout=0.2)
        silenced.end()
        # What was done since goes after it; of another size, or two faults would
        # cancel.
        replica.step({"w": np.full(4, 30.0)})
        if how == "beside":
            replica.sync_async().result()
        with replica:
            pass
        found = store.pull()["w"].tolist()
        if elastic:
            # w -1, s 1: both 0; w -3, s 0: both -1.5
            assert found == replica.params["w"].tolist() == [-1.5] * 4
            assert store["n"].pull().tolist() == [1] * 4
        else:
            assert found == replica.params["w"].tolist() == [-4.0] * 4
        repeats = [row["duplicates"] for row in store.stats()["shards"]]
        assert repeats == [1, int(applies)]


def async_sync(replica):
    return lambda **how: replica.sync_async(**how).result()


@inside
def test_a_cancelled_sync_is_not_forgotten_and_counts_once(way):
    with store_of() as store:
        replica = store.replica(every=100)
        for _ in range(5):
            replica.step({"w": np.ones(4)})
            replica.sync_async().cancel()
        replica.sync()
        np.testing.assert_allclose(store.pull()["w"], -0.5)
        np.testing.assert_allclose(replica.params["w"], -0.5)


@inside
def test_a_refused_sync_is_worked_out_anew(way):
    with store_of() as store:
        replica = store.replica(every=100)
        replica.params["w"][:] = [1, 2, 3, np.nan]
        for _ in range(2):
            with pytest.raises(PushRejectedError, match="'w'"):
                replica.sync()
        with pytest.raises(PushRejectedError, match="'w'"):
            replica.sync_async().result()
        assert store.version == 0
        replica.params["w"][3] = 4
        replica.sync()
        assert store.pull()["w"].tolist() == [1, 2, 3, 4]


HELD: dict[str, Any] = {}


def step_and_sync(trainer, part):
    """Use a replica of this process, as a loop of the tests' own cluster can."""
    HELD["replica"].step({"w": np.ones(4)})
    try:
        HELD["replica"].sync()
    except daskps.ConsistencyError:
        return "refused"


@inside
def test_a_run_in_rounds_refuses_syncs_until_it_is_over(way):
    with store_of() as store:
        replica = HELD["replica"] = store.replica(every=100)
        assert daskps.run(store, step_and_sync, [0]) == ["refused"]
        replica.step({"w": np.ones(4)})
        replica.sync()
        np.testing.assert_allclose(store.pull()["w"], -0.2)


@inside
def test_producers_of_syncs_are_used_again(way):
    with store_of() as store:
        for _ in range(20):
            with store.replica(every=100) as replica:
                replica.step({"w": np.ones(4)})
        np.testing.assert_allclose(store.pull()["w"], -2.0)
        ((idle, _),) = bound_link(store).idle_producers.values()
        assert len(idle) == 1


@inside
def test_snapshots_do_not_wait_for_a_sync_that_failed(way):
    with store_of() as store:
        replica = store.replica(every=100)
        replica.step({"w": np.ones(4)})
        replica.sync_async().cancel()
        assert store._ask("versions", len, timeout=30)
        replica.sync()


# -- arguments and what a person sees -------------------------------------------


@inside
@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ({"every": 0}, ValueError, "every must be at least 1"),
        ({"every": "epoch"}, TypeError, "every is an int"),
        ({"elastic": 0.0}, ValueError, "elastic is above 0 and at most 1"),
        ({"elastic": 1.5}, ValueError, "elastic is above 0 and at most 1"),
        ({"elastic": "no"}, TypeError, "elastic is a number"),
    ],
)
def test_arguments_that_cannot_be(way, how, error, match):
    with store_of() as store, pytest.raises(error, match=match):
        store.replica(**how)


@inside
def test_a_store_of_tables_alone_has_no_replica(way):
    with (
        daskps.create({"t": TableSpec(4, 2)}) as store,
        pytest.raises(daskps.LayoutError, match="has no arrays"),
    ):
        store.replica()


@inside
def test_a_store_with_a_master_has_no_replica(way):
    spec = daskps.ArraySpec((4,), "float16", master="float32")
    with (
        store_of({"v": np.zeros(1), "w": spec}) as store,
        pytest.raises(daskps.LayoutError, match="'w' has a master"),
    ):
        store.replica()


@inside
@pytest.mark.parametrize(
    ("grads", "error"),
    [
        ({"w": np.ones(3)}, PushRejectedError),
        ({"w": np.full(4, np.inf)}, PushRejectedError),
        ({"v": np.ones(4)}, daskps.UnknownParameterError),
        ({"n": np.ones(1)}, PushRejectedError),
    ],
)
def test_refused_gradients_change_nothing(way, grads, error):
    with store_of({"w": np.zeros(4), "n": np.zeros(1, int)}) as store:
        replica = store.replica()
        with pytest.raises(error):
            replica.step(grads)
        assert replica.steps == 0
        assert not replica.params["w"].any()
        assert store.version == 0


@inside
def test_a_step_without_an_optimizer_is_refused_and_writing_is_not(way):
    with daskps.create({"w": np.zeros(4)}) as store:
        replica = store.replica()
        with pytest.raises(daskps.NoOptimizerError):
            replica.step({"w": np.ones(4)})
        replica.params["w"] -= 1
        replica.sync()
        assert store["w"].pull().tolist() == [-1] * 4


@inside
def test_a_rate_that_goes_by_epochs_is_refused(way):
    rule = optim.SGD(optim.schedules.by_epoch(lambda epoch: 0.1))
    with store_of(rule=rule) as store:
        replica = store.replica()
        with pytest.raises(PushRejectedError, match="goes by epochs"):
            replica.step({"w": np.ones(4)})


@inside
def test_a_replica_stays_in_its_process(way):
    with store_of() as store:
        replica = store.replica(every=100)
        with pytest.raises(TypeError, match="make a replica there"):
            pickle.dumps(replica)
        with pytest.raises(ValueError, match="has shape"):
            replica.params["w"] = np.ones(3)
        kept = replica.params["w"]
        replica.params["w"] = np.zeros(4, "f4")
        assert replica.params["w"] is kept
        replica.step({"w": np.ones(4)})
        assert "after 1 steps" in repr(replica)


@inside
def test_an_error_in_a_with_is_not_followed_by_a_sync(way):
    with store_of() as store:
        replica = store.replica(every=100)
        replica.step({"w": np.ones(4)})
        with pytest.raises(KeyError), replica:
            raise KeyError
        assert store.version == 0
        replica.sync()
        assert store.version == 1


def test_an_asynchronous_client_awaits_syncs(cluster):
    async def work():
        async with (
            Client(cluster.scheduler.address, asynchronous=True) as client,
            daskps.aio.create(
                {"w": np.zeros(4)}, optimizer=optim.SGD(0.1), client=client
            ) as store,
        ):
            replica = await store.replica(every=2)
            for _ in range(3):
                await replica.step({"w": np.ones(4)})
            first = await store.pull()
            with pytest.raises(TypeError, match="use async with"):
                replica.__enter__()  # type: ignore[attr-defined]
            future = replica.sync_async()
            replica.params["w"] += 1
            await replica.sync()
            assert future.done()
            async with replica:
                replica.params["w"] += 1
            return first["w"], (await store.pull())["w"]

    first, found = asyncio.run(work())
    np.testing.assert_allclose(first, -0.2)
    np.testing.assert_allclose(found, 1.7)
