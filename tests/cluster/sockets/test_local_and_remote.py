"""Steps and reads of which one part is near and the rest goes by sockets.

That is what a trainer on one of several machines does: a shard of the store is its own
worker's, the others are those of other machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client

import daskps
from daskps import optim
from daskps.cluster.caller import socket_route
from tests.cluster.callers import counted
from tests.seams import session_of
from tests.support import cleaned, local_cluster, until

#: As between machines: what is in the same process is near, all else is not.
CARRIERS = {
    "daskps.carriers.process": True,
    "daskps.carriers.machine": False,
    "daskps.carriers.socket": True,
    "distributed.worker.profile.enabled": False,
}
#: Calls of Python in a trainer's thread: two of its shards are near, two are not. To be
#: lowered by who makes the route shorter.
MOST_CALLS = {"push": 56, "pull": 25, "pushpull": 75}
N, STEPS = 101, 20


@pytest.fixture(scope="module")
def two() -> Iterator[Client]:
    with dask.config.set(CARRIERS), local_cluster() as client:
        yield client


@pytest.fixture
def client(two: Client) -> Iterator[Client]:
    with cleaned(two):
        yield two


@pytest.fixture
def store(client: Client) -> Iterator[daskps.ParameterStore]:
    sgd = optim.SGD(1.0)
    with daskps.create({"w": np.zeros(N)}, optimizer=sgd, shards=4) as found:
        yield found


def open_sockets(trainer: Any) -> Any:
    """Wait until its process has sockets to all others; return what it counts in."""
    shards = session_of(trainer).shards
    owners = enumerate(session_of(trainer).meta.where.owners)
    others = {w for i, w in owners if shards.carriers.find_shard(i) is None}
    until(lambda: shards.remote.sockets.count(others) >= len(others) == 1)
    return shards.counters


def verbs(trainer: Any, part: float) -> dict[str, Callable[[], Any]]:
    """Return what a trainer does with gradients of that value, and reads into `out`."""
    out, grads, half = ({"w": np.full(N, value)} for value in (np.nan, part, part / 2))

    def torn() -> None:
        trainer.push(half, tick=False)
        trainer.push(half)

    return {
        "push": lambda: trainer.push(grads),
        "pull": lambda: trainer.pull(out=out)["w"].copy(),
        "pushpull": lambda: trainer.pushpull(grads, out=out)["w"].copy(),
        "torn": torn,
    }


def rounds(trainer: Any, part: tuple[float, str]) -> tuple[list[int], Any, Any]:
    """Make steps of a verb; return messages and calls of the last, and all reads."""
    value, verb = part
    act, read = verbs(trainer, value), []
    for k in range(3 * STEPS):
        if k == 2 * STEPS:
            counters = open_sockets(trainer)
            before = counters.messages, counters.socket_calls, counters.local_calls
        found = act[verb]()
        read.append(found if verb == "pushpull" else act["pull"]())
    after = counters.messages, counters.socket_calls, counters.local_calls
    counted = [b - a for a, b in zip(before, after, strict=True)]
    return counted, np.array(read), trainer.pull()["w"]


@pytest.mark.parametrize("verb", ["push", "pushpull", "torn"])
def test_rounds_take_a_socket_for_what_is_not_local(store, verb):
    rows = daskps.run(store, rounds, [(1.0, verb), (3.0, verb)])
    expected = -2.0 * np.arange(1, 3 * STEPS + 1)
    for (messages, by_socket, local), read, last in rows:
        assert (read == expected[:, None]).all()
        assert (last == expected[-1]).all()
        calls = STEPS * (1 if verb == "pushpull" else 2)
        if verb != "torn":
            assert (messages, by_socket) == (0, calls)
        assert local >= calls
    assert store.versions == (3 * STEPS,) * 4


def asynchronous(trainer: Any, part: int) -> Any:
    act, counters = verbs(trainer, 1.0), None
    for k in range(part):
        act["push"]()
        seen = act["pull"]()
        # Its own pushes are there, each once on every shard.
        assert (seen <= -(k + 1)).all()
        if k == part // 2:
            counters = open_sockets(trainer)
            before = counters.messages, counters.socket_calls
    assert counters is not None
    return counters.messages - before[0], counters.socket_calls - before[1]


@pytest.mark.parametrize("sync", ["asp", "ssp"])
def test_steps_without_rounds_count_once_on_each_shard(store, sync):
    for messages, by_socket in daskps.run(store, asynchronous, [60, 60], sync=sync):
        assert messages == 0
        assert by_socket >= 2 * 29
    assert store.versions == (120,) * 4
    assert (store.pull()["w"] == -120).all()


def shortest(trainer: Any, part: float) -> dict[str, list[str]]:
    """Return what each verb calls, where nothing is made anew and nobody is late."""
    act = verbs(trainer, part)
    for _ in range(STEPS):
        act["push"](), act["pull"](), act["pushpull"]()
    open_sockets(trainer)

    def one(verb: str) -> list[str]:
        if verb == "push":
            # Both trainers begin together, as they do where they read: else one of them
            # may be the last in each round.
            act["pull"]()
        return counted(act[verb])

    return {
        verb: min((one(verb) for _ in range(2 * STEPS)), key=len) for verb in MOST_CALLS
    }


def test_a_step_takes_few_calls(store):
    [found, _] = daskps.run(store, shortest, [1.0, 1.0])
    for verb, most in MOST_CALLS.items():
        assert len(found[verb]) <= most, found[verb]


def orders(trainer: Any, small: int) -> list[list[str]]:
    """Return who comes when: the local shards, and the socket, in a push and in a pull."""
    kept, socket_route.SMALL_NBYTES = socket_route.SMALL_NBYTES, small
    try:
        act = verbs(trainer, 1.0)
        for _ in range(STEPS):
            act["push"](), act["pull"]()
        open_sockets(trainer)
        act["push"](), act["pull"]()
        who = {
            "SplitRoute.try_step": "near",
            "PreparedRead.read": "near",
            "CallSocket.ask": "ask",
            "CallSocket.answer": "answer",
        }
        found = [counted(act["push"]), counted(act["pull"])]
        return [[who[name] for name in names if name in who] for names in found]
    finally:
        socket_route.SMALL_NBYTES = kept


@pytest.mark.parametrize("small", [0, 2**16])
def test_local_shards_take_a_step_while_others_are_at_it(store, small):
    for push, _ in daskps.run(store, orders, [small, small]):
        assert push == ["ask", "near", "answer"]


def test_local_shards_are_read_while_others_send_much(store):
    for _, pull in daskps.run(store, orders, [0, 0]):
        assert pull == ["ask", "near", "answer"]


def test_local_shards_are_read_after_those_that_send_little(store):
    # Until then a round may not be complete: to wait for it before would only take the
    # interpreter's lock from who completes it.
    for _, pull in daskps.run(store, orders, [2**16, 2**16]):
        assert pull == ["ask", "answer", "near"]
