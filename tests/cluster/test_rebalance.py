"""Shards that move to workers which join: fake workers and time, then real stores."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import dask
import numpy as np
import pytest
from distributed.core import Status

import daskps
from daskps import optim
from daskps.cluster.directory import rebalance
from daskps.cluster.directory.entry import StoreEntry
from daskps.cluster.directory.rebalance import Rebalance
from tests import inprocess, virtual
from tests.cluster import joining, killing_copies, killing_owners
from tests.cluster.test_drain import Held, all_of, has_reached, pushed, same, specs
from tests.support import local_cluster, until


@pytest.fixture(autouse=True)
def is_on() -> Iterator[None]:
    with dask.config.set({"daskps.rebalance": True}):
        yield


# -- which shards move when: fake workers, and time that passes at once ----------------


class Plans:
    """A directory's plans, its workers, and the shards that it has moved.

    A move takes a second. `act` is called after each, and may raise.
    """

    status = Status.running

    def __init__(self, *workers: str) -> None:
        self.workers = dict[str, Any]()
        for worker in workers:
            self.come(worker, is_told=False)
        self.stores = dict[str, StoreEntry]()
        #: When, which shard of which store, and the worker that has it now.
        self.moved: list[tuple[float, str, int, str]] = []
        self.events: list[tuple[str, Any]] = []
        self.act: Callable[[], object] = int
        self.is_moving = 0
        here = cast("Any", self)
        self.scheduler = self.hosts = here
        self.rebalance = Rebalance(here, self.send)

    # -- as the scheduler, the hosts and the drains --------------------------

    @property
    def running(self) -> list[Any]:
        return [ws for ws in self.workers.values() if ws.status is Status.running]

    def spawn(self, work: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(work)

    def tell(self, action: str, entry: StoreEntry, **more: Any) -> None:
        self.events.append((action, more))

    async def send(
        self, entry: StoreEntry, shard: int, source: str, target: str
    ) -> None:
        assert entry.owners[shard] == source
        self.is_moving += 1
        assert self.is_moving == 1
        await asyncio.sleep(1.0)
        at = round(asyncio.get_running_loop().time(), 3)
        self.moved.append((at, entry.uid, shard, target))
        self.is_moving -= 1
        self.act()
        generation, held = entry.generations[shard] + 1, entry.sizes[shard]
        taken = {"shard": shard, "generation": generation, "held": held, "name": "n"}
        entry.install(target, [taken | {"nbytes": held, "nonce": shard}])

    # -- what a test does ----------------------------------------------------

    def come(self, worker: str, *, is_told: bool = True, **more: Any) -> None:
        about = {"address": worker, "memory_limit": 0, "status": Status.running}
        self.workers[worker] = SimpleNamespace(**about | {"resources": {}} | more)
        if is_told:
            self.rebalance.worker_came(worker)

    def store(self, uid: str, shards: Mapping[int, str], size: int = 10) -> StoreEntry:
        """Make a store; its shards are of equal size where no other one is given."""
        owners = tuple(shards.values())
        nbytes = {w: n * size for w, n in Counter(owners).items()}
        about: Any = uid, uid, "client", False, {}, owners, nbytes, 0.5, b"", {}
        entry = self.stores[uid] = StoreEntry(*about)
        entry.sizes, entry.ready = dict.fromkeys(shards, size), True
        return entry

    def held(self) -> dict[str, int]:
        found = Counter[str]()
        for entry in self.stores.values():
            found.update(entry.nbytes)
        return dict(found)


def dealt(**counts: int) -> dict[int, str]:
    """Return the owner of each shard, where workers have so many."""
    return dict(enumerate(w for w, n in counts.items() for _ in range(n)))


def pass_time(plans: Plans, *acts: tuple[float, Callable[[], object]]) -> None:
    """Do all this at these times; in the end nobody waits for anything any more."""

    async def watch() -> None:
        for at, act in acts:
            await asyncio.sleep(at - asyncio.get_running_loop().time())
            act()
        await asyncio.sleep(1_000.0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual.run(watch())


def test_a_worker_takes_its_share_once_it_has_stayed():
    """One shard after the other, of the workers that have most."""
    plans = Plans("a", "b")
    plans.store("s", dealt(a=6, b=3))
    pass_time(plans, (5.0, partial(plans.come, "c")))
    assert [(at, to) for at, _, _, to in plans.moved] == [
        (36.0, "c"),
        (37.0, "c"),
        (38.0, "c"),
    ]
    assert plans.held() == {"a": 30, "b": 30, "c": 30}
    about = {"worker": "a", "why": "balanced"}
    assert plans.events == [
        ("shards-moved", {"shards": [shard], **about}) for _, _, shard, _ in plans.moved
    ]


def test_nothing_moves_by_default():
    plans = Plans("a")
    plans.store("s", dealt(a=6))
    with dask.config.set({"daskps.rebalance": False}):
        pass_time(plans, (0.0, partial(plans.come, "b")))
    assert plans.moved == []


def test_workers_that_come_together_take_turns():
    plans = Plans("a", "b")
    plans.store("s", dealt(a=8, b=8))
    pass_time(plans, *((0.0, partial(plans.come, w)) for w in ("c", "d")))
    assert [to for _, _, _, to in plans.moved] == ["c", "d"] * 4
    assert plans.held() == dict.fromkeys("abcd", 40)


def test_no_shard_moves_twice_in_a_minute():
    """Those that the first one to come has got stay there for now."""
    plans = Plans("a")
    plans.store("s", dealt(a=12))
    pass_time(plans, (0.0, partial(plans.come, "b")), (10.0, partial(plans.come, "c")))
    last = dict[int, float]()
    for at, _, shard, _ in plans.moved:
        # It began a second before.
        assert at - 1.0 >= last.get(shard, -60.0) + 60.0
        last[shard] = at
    # By 36 s `b` has six; of the others `c` takes three, and one of them a minute later.
    assert [(at, to) for at, _, _, to in plans.moved[6:]] == [
        (at, "c") for at in (41.0, 42.0, 43.0, 104.0)
    ]
    assert plans.moved[-1][2] in {shard for _, _, shard, _ in plans.moved[:6]}
    assert plans.held() == {"a": 30, "b": 50, "c": 40}


def test_at_most_half_more_than_an_equal_share():
    """Of 20 bytes and two workers 15."""
    plans = Plans("a")
    entry = plans.store("s", {0: "a", 1: "a"})
    entry.sizes |= {0: 16, 1: 4}
    pass_time(plans, (0.0, partial(plans.come, "b")))
    assert plans.held() == {"a": 16, "b": 4}


@pytest.mark.parametrize("shards", [{0: "a"}, {0: "a", 1: "b"}])
def test_shards_do_not_swap_places(shards):
    """Nor where a small one beside makes a little difference."""
    plans = Plans("a", "b")
    plans.store("s", shards)
    plans.store("t", {0: "a"}, size=1).asked_servers = ["a"]
    pass_time(plans, (0.0, partial(plans.come, "c")))
    assert plans.moved == []


def test_the_store_with_most_there_goes_first():
    """Else all calls of one store would come to the new worker."""
    plans = Plans("a")
    for uid in "st":
        plans.store(uid, dealt(a=3))
    pass_time(plans, (0.0, partial(plans.come, "b")))
    assert Counter(uid for _, uid, _, _ in plans.moved) == {"s": 1, "t": 2}


@pytest.mark.parametrize(
    ("about", "moves"),
    [
        ({"asked_servers": "auto"}, True),
        ({"asked_servers": "all"}, True),
        ({"asked_servers": "resource:FAST"}, True),
        ({"asked_servers": "resource:PS"}, False),
        ({"asked_servers": ["a"]}, False),
        ({"asked_servers": ["a", "b"]}, False),
        ({"asked_placement": [(["a"], [0])]}, False),
        ({"device": "cuda"}, False),
        ({"ready": False}, False),
        ({"drained": {"b"}}, False),
        ({"away": {0: "died", 1: "died"}}, False),
        ({"lost": {0: ("a", "died"), 1: ("a", "died")}}, False),
        # Sets of texts have another order in each process that collects tests.
        pytest.param({"sent_on": {(0, "a"), (1, "a")}}, False, id="sent_on"),
        ({"memory_share": 0.1}, False),
    ],
    ids=str,
)
def test_what_may_move(about, moves):
    """Of stores that say which servers they are on, or that have no room, nothing."""
    plans = Plans("a")
    entry = plans.store("s", dealt(a=2))
    for name, value in about.items():
        setattr(entry, name, value)
    come = partial(plans.come, "b", memory_limit=50, resources={"FAST": 1})
    pass_time(plans, (0.0, come))
    assert len(plans.moved) == moves


def test_views_are_no_shards_but_take_room():
    plans = Plans("a", "b")
    plans.store("s", dealt(a=2, b=2)).viewers |= {"a": 1_000}
    plans.store("t", dealt(a=2, b=2))
    pass_time(plans, (0.0, partial(plans.come, "c", memory_limit=50)))
    # As each would have of 80 bytes, but half of its memory is for 25.
    assert plans.held() == {"a": 30, "b": 30, "c": 20}


def leave(plans: Plans, worker: str) -> None:
    del plans.workers[worker]


def test_a_worker_that_leaves_in_time_gets_nothing():
    """Nor does it when it is back, before it has stayed for as long."""
    plans = Plans("a")
    plans.store("s", dealt(a=2))
    pass_time(
        plans,
        (0.0, partial(plans.come, "b")),
        (20.0, partial(leave, plans, "b")),
        (25.0, partial(plans.come, "b")),
        (54.0, partial(leave, plans, "b")),
    )
    assert plans.moved == []


@pytest.mark.parametrize("status", [Status.paused, Status.closing_gracefully])
def test_a_worker_that_does_not_run_gets_nothing(status):
    plans = Plans("a")
    plans.store("s", dealt(a=2))
    pass_time(plans, (0.0, partial(plans.come, "b", status=status)))
    assert plans.moved == []


def test_moves_that_fail_are_given_up():
    """Another shard is tried first, and each one again a minute later."""
    plans = Plans("a")
    plans.store("s", dealt(a=2))

    def fail() -> None:
        raise OSError("nobody is there")

    plans.act = fail
    pass_time(plans, (0.0, partial(plans.come, "b")))
    assert [at for at, *_ in plans.moved] == [31.0, 32.0, 93.0]
    assert plans.events == []
    assert plans.held() == {"a": 20}


# -- shards of hosts -------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebalance, "_STAY_SECONDS", 0.0)


def has_so_many(store: Any, worker: str, n: int) -> bool:
    """Tell whether a worker has so many shards, when a handle has heard of it."""
    store.pull()
    return bool(store.placement.count(worker) == n)


@pytest.mark.usefixtures("at_once")
def test_all_of_a_shard_comes_along():
    """Weights, optimizer state, rows with theirs, and the numbers of pushes.

    All of its shards move: those of the other store count, and stay where they are.
    """
    options: Any = {"optimizer": optim.Adam(0.01), "shards": 4}
    with inprocess.cluster(1) as made:
        servers = [*made.scheduler.workers]
        with (
            daskps.create(specs(), **options) as store,
            daskps.create(specs(), servers=servers, **options) as other,
        ):
            for k in range(30):
                if k == 15:
                    joined = made.join()
                    until(partial(has_so_many, store, joined, 4))
                pushed(store, k)
                pushed(other, k)
            same(all_of(store), all_of(other))
            assert store.versions == other.versions
            assert {*other.placement} == {*servers}
        moves = [event for _, event in made.scheduler.events if "why" in event]
        assert [(e["why"], e["worker"]) for e in moves] == [("balanced", *servers)] * 4


N_ROUNDS = 300


def rounds(trainer: Any, seed: int) -> float:
    rng = np.random.default_rng(seed)
    for _ in range(N_ROUNDS):
        trainer.push({"w": trainer.pull()["w"] * 0.01 + rng.standard_normal(400)})
    return float(trainer.pull()["w"].sum())


def trained(directory: Any, *, grows: bool) -> tuple[Any, ...]:
    """Train a store, and save it meanwhile; return what the run leads to."""
    params, rule = {"w": np.zeros(400)}, optim.Adam(0.01)
    about: dict[str, Any] = {"shards": 4, "optimizer": rule, "copies": 1 + grows}
    with (
        inprocess.cluster(2) as made,
        daskps.create(params, **about) as store,
    ):
        results: list[Any] = []
        run = partial(daskps.run, store, rounds, [0, 1])
        thread = threading.Thread(target=lambda: results.append(run()))
        thread.start()
        until(partial(has_reached, store, 10))
        saving = store.save(directory, wait=False)
        assert store.version < N_ROUNDS
        if grows:
            joined = made.join()
            until(partial(joining.has_some, store, joined))
        thread.join()
        saving.result(60)
        with daskps.restore(directory) as again:
            assert 10 <= again.version <= N_ROUNDS
        return results, store.version, store.pull()["w"].tolist()


@pytest.mark.usefixtures("at_once")
def test_runs_and_saves_go_on(tmp_path):
    """To the bits of a run that nobody has joined, though shards have second copies."""
    plain = trained(tmp_path / "plain", grows=False)
    assert trained(tmp_path / "grown", grows=True) == plain


@pytest.mark.usefixtures("at_once")
def test_a_worker_that_dies_as_it_takes_a_shard_leaves_it_where_it_was():
    with (
        inprocess.cluster(1) as made,
        daskps.create({"w": np.zeros(6)}, shards=2) as store,
    ):
        (first,) = made.scheduler.workers
        sent = Held(made, first, "move_last")
        joined = made.join()
        assert sent.reached.wait(60)
        store.add({"w": np.ones(6)})
        made.end(joined)
        sent.go_on()
        until(lambda: not made.hosts[0].going)
        store.add({"w": np.ones(6)})
        assert store.pull()["w"].tolist() == [2.0] * 6
        entry = made.directory.stores[store.uid]
        assert (entry.owners, {*entry.nbytes}) == ((first, first), {first})


@pytest.mark.parametrize(
    ("is_shared", "copies"), [(True, 1), (False, 2)], ids=["shared", "two copies"]
)
def test_a_cluster_grows_under_pushes(is_shared, copies):
    """None fails, and each counts once; a shard that moves gets its copy again."""
    with (
        dask.config.set({"daskps.carriers.machine": is_shared}),
        local_cluster(n_workers=2, threads=1) as client,
        joining.store_on(client, copies) as store,
    ):
        found = killing_owners.disturb(store, [partial(joining.grow, client, store)])
        assert found.wrong == []
        events = [event for _, event in client.get_events("daskps")]
        moves = [e["why"] for e in events if e["action"] == "shards-moved"]
        assert {*moves} == {"balanced"}
        if copies == 2:
            until(partial(killing_copies.has_all, client, store))
        else:
            assert len(moves) == 1
            assert sorted(Counter(store.placement).values()) == [1, 1, 2]
