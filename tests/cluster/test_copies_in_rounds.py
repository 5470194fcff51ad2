"""Runs in rounds whose shards have two copies: a machine's end costs no round."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.cluster.caller import remote, uncommitted
from daskps.cluster.caller.client import ShardClient
from daskps.cluster.caller.routes import Request
from daskps.cluster.caller.session import Session
from daskps.errors import ContributionLostError
from daskps.shards.cut_requests import begin_cut, end_cut
from daskps.shards.steps import GRADIENT, NOTHING
from tests import inprocess
from tests.cluster.test_copies import fall_silent, questions_held, shards_at
from tests.cluster.test_drain import Held
from tests.inprocess import Cluster
from tests.support import until

#: Rounds of a run, and the round in which something happens.
ROUNDS, AT = 6, 3
#: A loop that is sent to trainers finds here what a test does in their midst.
NOW = SimpleNamespace(act=None, done=threading.Event(), second=threading.Event())
TABLE = daskps.TableSpec(rows=None, dim=2)


@pytest.fixture
def four() -> Iterator[Cluster]:
    with inprocess.cluster(4) as made:
        yield made


def made(**kwargs: Any) -> Any:
    params = {"w": np.linspace(-1, 1, 5, dtype="f4"), "b": np.ones(3), "emb": TABLE}
    rule = optim.Adam(0.05)
    return daskps.create(params, shards=2, copies=2, optimizer=rule, **kwargs)


def grads(trainer: Any, k: int) -> dict[str, Any]:
    """Return gradients that depend on all that has been applied so far."""
    found = trainer.pull(rows={"emb": [k % 3, 7]})
    scale = 1 + trainer.rank
    return {
        "w": np.cos(scale * found["w"] + k).astype("f4"),
        "b": scale * found["b"] - k,
        "emb": daskps.RowGrad([k % 3, 7], np.sin(found["emb"] + scale)),
    }


def act(trainer: Any, k: int) -> None:
    """Have the test act, once, in the midst of a round: trainer 0 has sent its step."""
    if k != AT or NOW.done.is_set():
        return
    if trainer.rank == 0:
        NOW.act()
        NOW.done.set()


def wait(trainer: Any, k: int) -> None:
    """Have the other trainers wait for that."""
    if k == AT and trainer.rank:
        assert NOW.done.wait(60)


def pushes(trainer: Any, part: Any) -> None:
    for k in range(trainer.clock, ROUNDS):
        g = grads(trainer, k)
        wait(trainer, k)
        trainer.push(g)
        act(trainer, k)


def pushes_before_the_tick(trainer: Any, part: Any) -> None:
    for k in range(trainer.clock, ROUNDS):
        g = grads(trainer, k)
        wait(trainer, k)
        trainer.push({"w": g["w"], "emb": g["emb"]}, tick=False)
        if trainer.rank == 0 and part == "early":
            act(trainer, k)
        trainer.push({"w": 2 * g["w"], "b": g["b"]})
        act(trainer, k)


def pushes_and_pulls(trainer: Any, part: Any) -> None:
    g = grads(trainer, 0)
    for k in range(trainer.clock, ROUNDS):
        wait(trainer, k)
        if trainer.rank == 0:
            # Its call waits for the others: what happens does so meanwhile.
            threading.Thread(target=act, args=(trainer, k)).start()
        found = trainer.pushpull({"w": g["w"], "b": g["b"]})
        g = {"w": np.cos(found["w"] + k), "b": found["b"] * (1 + trainer.rank)}


def adds(trainer: Any, part: Any) -> None:
    for k in range(trainer.clock, ROUNDS):
        g = grads(trainer, k)
        wait(trainer, k)
        trainer.add({"w": g["w"]})
        act(trainer, k)


def never_reads(trainer: Any, part: Any) -> None:
    for k in range(trainer.clock, ROUNDS):
        wait(trainer, k)
        trainer.push({"w": np.full(5, k + trainer.rank, "f4")})
        act(trainer, k)


def barriers(trainer: Any, part: Any) -> None:
    for k in range(trainer.clock, ROUNDS):
        g = grads(trainer, k)
        wait(trainer, k)
        trainer.push(g)
        act(trainer, k)
        trainer.barrier()


def content(store: Any) -> Any:
    ids = np.sort(store["emb"].ids())
    return (
        {name: value.tobytes() for name, value in store.pull().items()},
        (ids.tolist(), store["emb"].pull(ids).tobytes()),
        store.version,
    )


def end_owner(cluster: Cluster, store: Any, shard: int = 0) -> None:
    cluster.end(store.placement[shard])


def has_all(cluster: Cluster, store: Any) -> bool:
    entry = cluster.directory.stores[store.uid]
    return len(entry.copies) == 2 and all(c.counts for c in entry.copies.values())


def trained(cluster: Cluster, loop: Any, what: Callable[[Any], Any], **how: Any) -> Any:
    """Run a loop while something happens, on workers that have no shards."""
    servers = sorted(cluster.scheduler.workers)
    NOW.done.clear()
    with made(servers=servers[:2]) as store:
        NOW.act = partial(what, store)
        until(partial(has_all, cluster, store))
        parts = how.pop("parts", [0, 1, 2])
        daskps.run(store, loop, parts, workers=servers[2:], **how)
        return content(store)


LOOPS = [pushes, pushes_before_the_tick, pushes_and_pulls, adds, barriers, never_reads]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("codec", [None, "int8"])
def test_the_bits_are_those_of_an_undisturbed_run(four, loop, codec):
    """The owner of a shard goes in the midst of a round, and its copy has no part."""
    how = {"codec": codec}
    expected = trained(four, loop, lambda store: None, **how)
    found = trained(four, loop, partial(end_owner, four), **how)
    assert NOW.done.is_set()
    assert found == expected
    assert promoted(four) == 1


def promoted(cluster: Cluster) -> int:
    return [e["action"] for _, e in cluster.scheduler.events].count("shards-promoted")


def end_behind(cluster: Cluster, store: Any) -> None:
    """End an owner that has applied a round which its copy has yet to ask for."""
    owner = store.placement[0]
    (hosted,) = shards_at(cluster, owner)
    held = questions_held(cluster, owner)

    def end() -> None:
        until(lambda: hosted.shard.segment.current.version == AT + 1)
        cluster.end(owner)
        held.go_on(OSError("nobody is there"))

    threading.Thread(target=end).start()


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_round_that_was_not_answered_is_made_again(four, loop):
    expected = trained(four, loop, lambda store: None)
    assert trained(four, loop, partial(end_behind, four)) == expected
    assert promoted(four) == 1


def test_a_step_that_waits_for_long_is_sent_again(four, monkeypatch):
    """Its arrays do not travel while it waits; the copy that takes over has none."""
    expected = trained(four, pushes_and_pulls, lambda store: None)
    waiting, waits = Request.waiting, threading.Event()

    def wait_on(request: Request) -> Request:
        if request.step.clock == AT:
            waits.set()
        return waiting(request)

    monkeypatch.setattr(Request, "waiting", wait_on)
    monkeypatch.setattr(remote, "WAIT_SECONDS", 0.05)

    def end(store: Any) -> None:
        assert waits.wait(60)
        end_owner(four, store)

    assert trained(four, pushes_and_pulls, end) == expected
    assert promoted(four) == 1


def test_many_shards_may_lack_a_step_in_turn(four, monkeypatch):
    """So many owners may go while one read waits for its round."""
    expected = trained(four, pushes, lambda store: None)
    call, lacking = ShardClient.call, [ContributionLostError("gone")] * 5

    def lacks(client: Any, request: Any, deadline: Any) -> Any:
        if request.step.floor == AT and request.step.kind == NOTHING and lacking:
            raise lacking.pop()
        return call(client, request, deadline)

    monkeypatch.setattr(ShardClient, "call", lacks)
    assert trained(four, pushes, lambda store: None) == expected
    assert not lacking


def test_a_push_before_the_tick_may_go_with_the_owner_that_took_it(four, monkeypatch):
    """The next owner knows that there was one, and nothing of what it brought."""
    expected = trained(four, pushes_before_the_tick, lambda store: None)
    call, n = ShardClient.call, 0

    def lost(client: Any, request: Any, deadline: Any) -> Any:
        nonlocal n
        step = request.step
        is_first = (step.rank, step.clock, step.tick) == (0, AT, False)
        if is_first and step.kind == GRADIENT and not step.whole:
            n += 1
            assert n == 1
            raise ContributionLostError("push all of it again")
        return call(client, request, deadline)

    monkeypatch.setattr(ShardClient, "call", lost)
    assert trained(four, pushes_before_the_tick, lambda store: None) == expected
    assert n == 1


def one_meets_first(trainer: Any, meets: str) -> None:
    """Have trainer 0 wait for others, which first read what all of them have sent."""
    for k in range(trainer.clock, ROUNDS):
        g = grads(trainer, k)
        wait(trainer, k)
        trainer.push(g)
        act(trainer, k)
        if trainer.rank:
            trainer.pull("w")
        meet_others(trainer, meets)


def meet_others(trainer: Any, meets: str) -> None:
    if meets == "barrier":
        trainer.barrier()
    elif meets == "allreduce":
        trainer.allreduce(np.ones(1))


@pytest.mark.parametrize("meets", ["barrier", "allreduce"])
def test_a_trainer_that_waits_elsewhere_sends_again(four, meets, monkeypatch):
    """The others wait for it at a copy, and it for them where no shard is asked."""
    monkeypatch.setattr(uncommitted, "_LOOK_SECONDS", 0.05)
    how = {"parts": [meets] * 3}
    expected = trained(four, one_meets_first, lambda store: None, **how)
    found = trained(four, one_meets_first, partial(end_owner, four), **how)
    assert found == expected
    assert promoted(four) == 1


def meets_before_the_push(trainer: Any, meets: str) -> None:
    for k in range(trainer.clock, ROUNDS):
        meet_others(trainer, meets)
        g = grads(trainer, k)
        wait(trainer, k)
        trainer.push(g)
        act(trainer, k)


@pytest.mark.parametrize("meet", ["", "barrier", "allreduce"])
@pytest.mark.parametrize("loop", [one_meets_first, meets_before_the_push])
def test_a_trainer_that_was_started_again_makes_a_step_once_more(
    four, loop, meet, monkeypatch
):
    """Its step was in when it began, and went with an owner after that."""
    monkeypatch.setattr(uncommitted, "_LOOK_SECONDS", 0.05)
    deliver = Session.deliver

    def succeed(session: Any, *args: Any, **kwargs: Any) -> Any:
        """Be the next trainer of a rank, once, which has nothing of the last step."""
        found = deliver(session, *args, **kwargs)
        if (session.rank, session.clock, NOW.done.is_set()) == (0, AT + 1, False):
            about = {"run": session.run, "rank": 0, "worker": session.link.node.address}
            tell = session.link.directory("register", **about, wait_seconds=60.0)
            told = session.link.run(lambda: tell)
            session.resume(told["attempt"], told["goes_on"])
            assert session.clock == AT + 1
            monkeypatch.setattr(session, "_last", None)
        return found

    monkeypatch.setattr(Session, "deliver", succeed)
    how: dict[str, Any] = {"resumable": True, "parts": [meet] * 3}
    expected = trained(four, loop, lambda store: None, **how)
    assert trained(four, loop, partial(end_owner, four), **how) == expected
    assert promoted(four) == 1


def mean_error(params: Any, X: Any, y: Any) -> Any:
    return {"w": params["w"] - X.mean()}


def test_an_epoch_is_reported_once_copies_have_its_rounds(four, monkeypatch):
    """One that was started again waits there for others, and they for its last step."""
    deliver, report = Session.deliver, Session.report
    again, servers = threading.Event(), sorted(four.scheduler.workers)
    NOW.done.clear()

    def fail_once(session: Any, *args: Any, **kwargs: Any) -> Any:
        """Have trainer 0 start again behind the last step of an epoch."""
        if session.clock == 1 and not NOW.done.is_set():
            if session.rank == 0 and not again.is_set():
                again.set()
                deliver(session, args[0], None)
                raise ContributionLostError("as if its worker had gone")
            assert NOW.done.wait(60)
        return deliver(session, *args, **kwargs)

    def end_and_report(session: Any, *args: Any) -> Any:
        if session.rank == 0 and not NOW.done.is_set():
            assert session.clock == 2
            four.end(owner)
            NOW.done.set()
        return report(session, *args)

    monkeypatch.setattr(Session, "deliver", fail_once)
    monkeypatch.setattr(Session, "report", end_and_report)
    how: Any = {"epochs": 2, "batch_size": 2, "trainers": 3, "workers": servers[2:]}
    how |= {"stop": lambda history: False, "timeout": 60}
    rule, spec = optim.SGD(0.1), {"w": np.zeros(5)}
    more: Any = {"shards": 2, "copies": 2, "servers": servers[:2]}
    with daskps.create(spec, optimizer=rule, **more) as store:
        until(partial(has_all, four, store))
        owner = store.placement[0]
        daskps.train(store, mean_error, np.arange(12.0)[:, None], **how)
        assert store.version == 4
    assert promoted(four) == 1


def ends_early(trainer: Any, n: int) -> None:
    for k in range(trainer.clock, n):
        g = grads(trainer, k)
        if k == 1 and trainer.rank:
            assert NOW.done.wait(60)
            if trainer.rank == 1:
                NOW.act()
        trainer.push(g)
    if not trainer.rank:
        NOW.done.set()
    trainer.finish()


def end_once_it_waits(cluster: Cluster, store: Any) -> None:
    (hosted,) = shards_at(cluster, store.placement[0])
    until(lambda: hosted.shard.waiting)
    end_owner(cluster, store)


def test_a_trainer_ends_when_copies_have_its_last_round(four):
    """Later nobody could send it again."""
    how = {"parts": [2, 4, 4]}
    expected = trained(four, ends_early, lambda store: None, **how)
    assert (
        trained(four, ends_early, partial(end_once_it_waits, four), **how) == expected
    )
    assert promoted(four) == 1


def ends_with_an_owner(trainer: Any, n: int) -> None:
    for k in range(trainer.clock, n):
        g = grads(trainer, k)
        if k == AT and trainer.rank == 1:
            NOW.act()
        trainer.push(g)


def end_after_a_trainer(cluster: Cluster, store: Any) -> None:
    (entry,) = (e for e in cluster.directory.stores.values() if e.uid == store.uid)
    (run,) = (r for r in cluster.directory.runs.open.values() if r.entry is entry)
    until(lambda: 0 in run.finished)
    end_owner(cluster, store)


def test_a_copy_hears_which_trainers_have_ended(four):
    """One has ended in the open round, as the owner alone had noted."""
    how = {"parts": [AT, 6, 6]}
    expected = trained(four, ends_with_an_owner, lambda store: None, **how)
    found = trained(four, ends_with_an_owner, partial(end_after_a_trainer, four), **how)
    assert found == expected
    assert promoted(four) == 1


def ends_meanwhile(trainer: Any, n: int) -> None:
    for k in range(trainer.clock, n):
        g = grads(trainer, k)
        if k == AT:
            assert NOW.done.wait(60)
        trainer.push(g)
    if not trainer.rank:
        NOW.act()


def end_in_between(cluster: Cluster, store: Any) -> None:
    """Have a copy take over; its owner, which knows nothing of it, hears that one ends."""
    owner, entry = store.placement[0], cluster.directory.stores[store.uid]
    (run,) = (r for r in cluster.directory.runs.open.values() if r.entry is entry)
    copy = entry.copies[0].worker
    own, stop = Held(cluster, copy, "move_own"), Held(cluster, owner, "move_deposed")
    silent = fall_silent(cluster, store, owner)
    assert own.reached.wait(60)

    def go_on() -> None:
        until(lambda: 0 in run.finished)
        own.go_on()
        until(lambda: entry.owners[0] == copy)
        stop.go_on()
        silent.go_on()
        NOW.done.set()

    threading.Thread(target=go_on).start()


def test_a_copy_hears_which_trainers_end_as_it_takes_over(four):
    """Its owner is cut from the scheduler and from the copy, and not from a trainer."""
    how = {"parts": [AT, ROUNDS, ROUNDS]}
    expected = trained(four, ends_meanwhile, lambda store: NOW.done.set(), **how)
    found = trained(four, ends_meanwhile, partial(end_in_between, four), **how)
    assert found == expected
    assert promoted(four) == 1


def fails(trainer: Any, part: Any) -> None:
    for k in range(ROUNDS):
        g = grads(trainer, k)
        wait(trainer, k)
        if k == AT and trainer.rank == 2:
            raise ZeroDivisionError
        trainer.push(g)
        act(trainer, k)


def test_a_run_that_fails_then_leaves_complete_rounds(four):
    """The copy lacks a contribution: the other shard does not keep the round either."""
    servers = sorted(four.scheduler.workers)
    NOW.done.clear()
    with made(servers=servers[:2]) as store:
        NOW.act = partial(end_owner, four, store)
        until(partial(has_all, four, store))
        with pytest.raises(ZeroDivisionError):
            daskps.run(store, fails, [0, 1, 2], workers=servers[2:])
        assert list(store.versions) == [AT, AT]
        daskps.run(store, pushes, [0, 1, 2], workers=servers[2:])
        assert store.version == AT + ROUNDS


def ones(trainer: Any, part: Any) -> None:
    """Trainer 2 is the last one in, on each shard: else two could wait for each other."""
    for k in range(ROUNDS):
        wait(trainer, k)
        if k == AT and trainer.rank == 2:
            assert NOW.second.wait(60)
        trainer.push({"w": np.ones(6)})
        act(trainer, k)
        if k == AT and trainer.rank == 1:
            NOW.second.set()


def under(hosted: Any, function: Callable[[Any], Any]) -> None:
    hosted.enqueue(function)
    hosted.serve()


def test_shards_are_a_round_apart_at_most_where_a_cut_has_held_one(four):
    """Else one has two rounds more than a copy that takes over as the run is fenced."""
    first, second, *others = sorted(four.scheduler.workers)
    NOW.done.clear()
    NOW.second.clear()
    params = {"w": np.zeros(6)}
    how: Any = {"shards": 2, "copies": 2, "optimizer": optim.SGD(1.0)}
    with daskps.create(params, servers=[first, second], **how) as store:
        until(partial(has_all, four, store))
        (x,), (y,) = (shards_at(four, owner) for owner in store.placement)

        def hold() -> None:
            for hosted in (y, x):
                under(hosted, lambda shard: begin_cut(shard, "c", 0))

        def have_met() -> bool:
            rounds = [hosted.shard.segment.current.version for hosted in (x, y)]
            waits = all(hosted.shard.round.lacks_one for hosted in (x, y))
            is_ahead = rounds == [AT + 1, AT + 2]
            return y.behind == 0 and (is_ahead or (waits and rounds == [AT + 1] * 2))

        NOW.act = hold
        run = partial(daskps.run, store, ones, [0, 1, 2], workers=others)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(run)
            until(lambda: len(x.shard.waiting) == len(y.shard.waiting) == 3)
            held = questions_held(four, store.placement[0])
            for hosted in (y, x):
                under(hosted, lambda shard: end_cut(shard, "c"))
            until(have_met)
            (fenced,) = four.directory.runs.open.values()
            error = daskps.RunCancelledError("it is over")
            four.loop.add_callback(four.directory.runs.fence, fenced, error)
            until(lambda: y.shard.run_state.is_held)
            end_owner(four, store)
            held.go_on(OSError("nobody is there"))
            with pytest.raises(daskps.RunCancelledError):
                running.result()
        assert len({*store.pull()["w"].tolist()}) == 1
