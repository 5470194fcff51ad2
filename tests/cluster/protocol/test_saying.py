"""What callers say to hosts: plans, numbers and calls, made without a cluster."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskps.cluster.caller import routes
from daskps.cluster.caller.allreduce import CallCount
from daskps.cluster.caller.producer import Producer
from daskps.cluster.caller.session import Session
from daskps.cluster.caller.shard_map import StoreMap
from daskps.cluster.caller.targets import at_least
from daskps.cluster.protocol.deadline import Deadline
from daskps.cluster.protocol.messages import Call, Part
from daskps.cluster.protocol.packing import pack_error, unpack_error
from daskps.cluster.protocol.row_messages import RowRequest
from daskps.cluster.protocol.wellformed import MOST_SECONDS, check
from daskps.errors import (
    ClockError,
    DaskPSError,
    ProtocolError,
    RunCancelledError,
)
from daskps.layout.arrays import Layout
from daskps.shards.steps import GRADIENT, NOTHING, Item, Step
from daskps.version import Version
from tests.cluster.by_socket import arrived


@pytest.fixture
def meta() -> StoreMap:
    """A store of two shards, with a parameter in each."""
    layout = Layout.build(dict.fromkeys("ab", ((4,), "float64")), 2)
    more = {
        "rules": b"",
        "optimizers": [],
        "cluster": "",
        "segments": [],
        "lineage": "s",
        "origin": "s",
        "recovers": False,
    }
    where = {"owners": ["tcp://a", "tcp://b"], "generations": [1, 1]}
    about = {"uid": "u", "name": "s", "session": True, "layout": layout.to_wire()}
    return StoreMap({**about, **where, **more})


def push(meta: StoreMap, *indices: int, **more: Any) -> dict[str, Call]:
    arrays = {index: np.ones(4) for index in indices}
    request = routes.push(meta, arrays, Step(kind=GRADIENT), **more)
    hosts = {meta.owners[shard]: [shard] for shard in request.route.slices}
    return {w: request.call(meta, shards, 1.0, "") for w, shards in hosts.items()}


def test_a_push_says_which_shards_it_goes_to(meta: StoreMap) -> None:
    """Where that is not all: a cut must not wait for it at the others."""
    assert push(meta, 1)["tcp://b"].step.touched == ((1, 2),)
    both = push(meta, 0, 1)
    assert [call.step.touched for call in both.values()] == [None, None]


def test_a_tick_goes_to_all_shards(meta: StoreMap) -> None:
    calls = push(meta, 1, everywhere=True)
    assert [call.step.touched for call in calls.values()] == [None, None]
    items = {w: [len(part.step.items) for part in c.parts] for w, c in calls.items()}
    assert items == {"tcp://a": [0], "tcp://b": [1]}


def test_a_read_waits_for_the_versions_of_its_shards_alone() -> None:
    version = Version.of([(1, 5), (2, 3)])
    assert [at_least(shard, version) for shard in range(3)] == [0, 5, 3]
    assert at_least(0, 5) == 5
    assert at_least(0, None) == 0


def test_a_call_that_waits_on_ticks_no_second_time(meta: StoreMap) -> None:
    step = Step(kind=GRADIENT, clock=3, tick=True)
    request = routes.push(meta, {1: np.ones(4)}, step)
    waiting = request.waiting()
    call = waiting.call(meta, [1], 1.0, "")
    step = call.step
    assert (step.kind, step.clock, step.tick) == (NOTHING, 4, False)
    assert [part.step.items for part in call.parts] == [()]


def spoiled(*, step: dict[str, Any], more: dict[str, Any], n_parts: int) -> Any:
    """Return a call to the first of two shards with something else in it."""
    good = {"kind": GRADIENT, "items": (Item(0, 0, np.ones(4)),)}
    asked = more.get("ranges", (("float64", 0, 4),))
    one = Part(0, Step(**{**good, **step}), asked)
    return Call("u", (one,) * n_parts)


@pytest.mark.parametrize(
    ("step", "more", "n_parts"),
    [
        pytest.param({}, {}, 2, id="shard twice"),
        pytest.param({"items": (Item(0, 0, np.ones(1)),) * 2}, {}, 1, id="piece twice"),
        pytest.param({}, {"ranges": (("float64", 2, 5),)}, 1, id="of another shard"),
        pytest.param({}, {"ranges": (("float64", 3, 2),)}, 1, id="backwards"),
        pytest.param({}, {"ranges": (("float64", 0, 3),) * 2}, 1, id="read twice"),
        pytest.param({"weight": math.nan}, {}, 1, id="no weight"),
        pytest.param({"weight": -1.0, "run": 7}, {}, 1, id="negative weight in a run"),
        pytest.param({"sequence": -2}, {}, 1, id="no number"),
        pytest.param({"kind": "sing"}, {}, 1, id="no kind"),
        pytest.param({"wait": "sing"}, {}, 1, id="no wait"),
    ],
)
def test_a_call_that_no_caller_makes_is_refused(
    meta: StoreMap, step: dict[str, Any], more: dict[str, Any], n_parts: int
) -> None:
    good = spoiled(step={}, more={}, n_parts=1)
    assert arrived(good, meta.layout).parts[0].ranges
    with pytest.raises(ProtocolError):
        arrived(spoiled(step=step, more=more, n_parts=n_parts), meta.layout)


def test_rows_go_to_no_array(meta: StoreMap) -> None:
    item = Item(0, 0, np.ones(4), np.array([7, 7]))
    call = Call("u", (Part(0, Step(GRADIENT, (item,))),))
    with pytest.raises(ProtocolError, match="table -1 of the 0 of a store"):
        arrived(call, meta.layout)
    asked = RowRequest(0, np.array([0]), 4, "float64")
    with pytest.raises(ProtocolError, match="table -1 of the 0 of a store"):
        arrived(Call("u", (Part(0, Step(), (), (asked,)),)), meta.layout)


class OddError(Exception):
    pass


def test_an_error_of_the_users_is_named() -> None:
    found = unpack_error(pack_error(OddError("no such row")))
    assert type(found) is DaskPSError
    assert str(found) == "OddError: no such row"
    found = unpack_error(pack_error(ClockError("late")))
    assert type(found) is ClockError


def test_no_push_leaves_while_one_is_far_behind() -> None:
    """The shards could not tell it from a repeat."""
    source, patient = Producer(), Deadline(None, "a turn")
    with source.turn(patient, print):
        for _ in range(Producer.SPREAD - 1):
            with source.turn(patient, print) as turn:
                assert turn.floor == 0
        with pytest.raises(TimeoutError), source.turn(Deadline(0, "a turn"), print):
            pass
    with source.turn(patient, print) as turn:
        assert (turn.number, turn.floor) == (Producer.SPREAD + 1,) * 2


@pytest.mark.parametrize(("bsp", "place"), [(False, (2, 4)), (True, (2, 6))])
def test_who_starts_again_goes_on_where_the_last_shard_is(
    bsp: bool, place: tuple[int, int]
) -> None:
    """In rounds with a number that no shard has seen: repeats are told by clocks."""
    session: Any = SimpleNamespace(
        run=7,
        rank=0,
        bsp=bsp,
        link=SimpleNamespace(run=lambda work: work()),
        shards=SimpleNamespace(control=lambda *_, **__: [[(3, 6)], [(2, 4), (3, 5)]]),
        allreduces=SimpleNamespace(resume=lambda *told: heard.append(told)),
        barriers=CallCount(),
    )
    heard: list[Any] = []
    told = {"allreduces": (2, 5, 7, 1, 4), "barriers": (1, 3, 4, 0, 0), "latest": 7}
    Session.resume(session, 2, told)
    assert (session.clock, session.sequence) == place
    assert heard == [(told, 2)]
    assert session.barriers.number == 5


def test_trainer_that_was_replaced_tells_no_shard_that_it_ends() -> None:
    told: list[str] = []

    async def control(method: str, **_: Any) -> None:
        told.append(method)

    async def directory(method: str, **_: Any) -> None:
        raise RunCancelledError(method)

    link = SimpleNamespace(directory=directory, node=SimpleNamespace(address="tcp://a"))
    shards = SimpleNamespace(control=control)
    session: Any = SimpleNamespace(
        run=7, rank=0, _failed=False, link=link, shards=shards
    )
    with pytest.raises(RunCancelledError, match="finishes"):
        asyncio.run(Session._finish(session))
    assert told == []


def handler(host: Any, n: int, wait_seconds: float | None = None) -> None:
    """Take a message; a stand-in for a handler of a host."""


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"n": 1, "m": 1},
        {"n": True},
        {"n": 1.0},
        {"n": 2**63},
        {"n": 1, "wait_seconds": "1"},
        {"n": 1, "wait_seconds": -1.0},
        {"n": 1, "wait_seconds": float("nan")},
        {"n": 1, "wait_seconds": MOST_SECONDS * 2},
    ],
)
def test_a_message_that_its_handler_does_not_take(message: dict[str, Any]) -> None:
    check(handler, {"n": -1, "wait_seconds": None}, "a message")
    check(handler, {"n": 2**63 - 1, "wait_seconds": 1}, "a message")
    with pytest.raises(ProtocolError, match="a message"):
        check(handler, message, "a message")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (4.99981, " after 5 s"),
        (0.05, " after 0.05 s"),
        (5400.0, " after 5400 s"),
        (None, ""),
    ],
)
def test_a_time_that_is_over_has_three_digits(seconds, said):
    error = Deadline(seconds, "a pull").error()
    assert str(error).startswith(f"timed out{said} waiting for a pull; ")
