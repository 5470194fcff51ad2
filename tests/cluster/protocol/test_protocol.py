"""Messages as they are on the wire: what is not right is refused and changes nothing."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgpack
import numpy as np
import pytest
from distributed import Client

import daskps
from daskps import optim
from daskps.cluster.caller import routes
from daskps.cluster.host.node import HOSTS
from daskps.cluster.machine.membership import memory_id
from daskps.cluster.protocol.messages import (
    PROTOCOL,
    Call,
    identity,
    unpack_answers,
)
from daskps.cluster.protocol.packing import (
    bytes_of,
    pack_array,
    pack_error,
    unpack_reply,
)
from daskps.cluster.sockets.frames import TEMPLATE, unpack_head
from daskps.cluster.sockets.frames import pack_head as pack
from daskps.shards.memory.format import MAX_PRODUCERS, N_PRODUCERS
from daskps.shards.steps import ADD, GRADIENT, Step
from tests.cluster.by_socket import dtypes_of, message_of
from tests.seams import shards_of
from tests.support import store

W = np.arange(10, dtype="f4")


@pytest.fixture
def shard(client):
    """A store of one shard on one worker."""
    [worker, *_] = client.nthreads()
    with daskps.create(
        {"w": W}, optimizer=optim.SGD(1.0), servers=[worker], client=client
    ) as s:
        yield s


def call_of(store, data=None, **head):
    """Return a call that adds ones, and its wire template."""
    head = {"kind": ADD, "producer": 10**9, "sequence": 0, **head}
    data = np.ones(10, "f4") if data is None else data
    meta = shards_of(store).meta
    call = routes.push(meta, {0: data}, Step(**head)).call(meta, [0], 30.0, "")
    return call, message_of(call, meta.layout)


def send(store, message, op="daskps_call"):
    """Send a message to the store's worker and return the raw reply."""
    link = shards_of(store).link
    return link.run(lambda: link.rpc(store.placement[0], op, **message))


def deliver(store, **head):
    call, message = call_of(store, **head)
    [answer] = unpack_answers(send(store, message), "the worker", dtypes_of(call))
    if answer.error:
        raise answer.error
    return answer


def test_good_message(shard):
    """The raw template that the tests below spoil is one that is applied."""
    assert deliver(shard).version == 1
    np.testing.assert_array_equal(shard["w"].pull(), W + 1)


def spoil(change):
    def spoiled(store):
        _, message = call_of(store)
        message = copy.deepcopy(message)
        change(message)
        return message

    return spoiled


def in_form(change):
    """Change the text of a message's template."""

    def changed(message):
        template = json.loads(message["text"])
        change(template)
        message["text"] = json.dumps(template).encode()

    return changed


def set_head(name, value):
    at = list(pack_head()).index(name)
    return in_form(lambda template: template["head"].__setitem__(at, value))


def pack_head():
    from daskps.cluster.protocol.messages import _HEAD

    return _HEAD


def set_part(position, value):
    return in_form(lambda template: template["parts"][0].__setitem__(position, value))


def set_item(position, value):
    return in_form(
        lambda template: template["parts"][0][2][0].__setitem__(position, value)
    )


def set_data(*arrays):
    def change(message):
        head = unpack_head(message["head"])
        nbytes = sum(len(bytes_of(array)) for array in arrays)
        message["head"] = pack(head._replace(nbytes=nbytes))
        message["body"] = [*arrays]

    return change


def set_number(**said):
    def change(message):
        message["head"] = pack(unpack_head(message["head"])._replace(**said))

    return change


def protocol(value):
    def change(message):
        message["protocol"] = value

    return change


#: What is changed in the good message, and the error it is refused with.
REFUSED: dict[str, tuple[Any, Any]] = {
    "newer protocol": (protocol(PROTOCOL + 1), daskps.ProtocolError),
    "older protocol": (protocol(PROTOCOL - 1), daskps.ProtocolError),
    "no protocol": (protocol(None), daskps.ProtocolError),
    "unknown store": (set_head("store", "0" * 32), daskps.StaleGenerationError),
    "unknown shard": (set_part(0, 5), daskps.StaleGenerationError),
    "later generation": (set_part(1, 2), daskps.StaleGenerationError),
    "earlier generation": (set_part(1, 0), daskps.StaleGenerationError),
    "unknown run": (set_head("run", 77), daskps.RunCancelledError),
    "too long": (set_data(pack_array(np.ones(11, "f4"))), daskps.ProtocolError),
    "too long as a frame": (
        set_data(pack_array(np.ones(20_000, "f4"))),
        daskps.ProtocolError,
    ),
    "array of nothing that is one": (
        lambda m: m.update(body=[None]),
        daskps.ProtocolError,
    ),
    "in two pieces": (set_data(bytes(20), bytes(20)), daskps.ProtocolError),
    "other length than the head says": (
        set_number(nbytes=36),
        daskps.ProtocolError,
    ),
    "no call": (set_number(kind=TEMPLATE), daskps.ProtocolError),
    "starts below": (set_item(1, -1), daskps.PushRejectedError),
    "starts beyond": (set_item(1, 1), daskps.PushRejectedError),
    "rows of what has none": (
        in_form(lambda template: template.update(tables=[[0], [], False])),
        daskps.ProtocolError,
    ),
    "half an element": (set_data(b"\0\0\0\0\0\0"), daskps.ProtocolError),
    "numbers too short": (lambda m: m.update(head=m["head"][1:]), daskps.ProtocolError),
    "head too short": (in_form(lambda template: template["head"].pop()), ValueError),
    "part too short": (
        in_form(lambda template: template["parts"][0].pop()),
        ValueError,
    ),
    "no parts": (
        in_form(lambda template: template["parts"].clear()),
        (daskps.DaskPSError, ValueError),
    ),
    "no text": (lambda m: m.update(text=b"{"), daskps.ProtocolError),
    "no name": (lambda m: m.update(token=3), daskps.ProtocolError),
    "given up what is no number": (
        lambda m: m.update(given_up=["x"]),
        daskps.ProtocolError,
    ),
    "unknown piece": (set_item(0, 3), (daskps.DaskPSError, ValueError)),
    "negative piece": (set_item(0, -1), (daskps.DaskPSError, ValueError)),
    "unknown kind": (set_head("kind", "sing"), (daskps.DaskPSError, ValueError)),
    "read beyond": (
        set_part(3, [["float32", 0, 99]]),
        (daskps.DaskPSError, ValueError),
    ),
    "read of another dtype": (
        set_part(3, [["int8", 0, 1]]),
        (daskps.DaskPSError, ValueError),
    ),
}


def raise_refusal(reply, call):
    for answer in unpack_answers(reply, "the worker", dtypes_of(call)):
        if answer.error:
            raise answer.error


@pytest.mark.parametrize("what", REFUSED)
def test_refused_messages_change_nothing(shard, what):
    change, error = REFUSED[what]
    before = shard.stats()["shards"][0]
    call, _ = call_of(shard)
    reply = send(shard, spoil(change)(shard))
    with pytest.raises(error):
        raise_refusal(reply, call)
    after = shard.stats()["shards"][0]
    assert after["version"] == before["version"]
    assert after["pushes"] == before["pushes"]
    np.testing.assert_array_equal(shard["w"].pull(), W)
    assert deliver(shard).version == 1


@pytest.mark.parametrize("reply", [None, {}, [], "OK", {"status": "error"}, 1, True])
def test_only_an_acknowledgement_is_success(reply):
    call = Call("u", ())
    with pytest.raises(daskps.ProtocolError, match=r"tcp://w.*preload"):
        unpack_answers(reply, "tcp://w", dtypes_of(call))
    with pytest.raises(daskps.ProtocolError):
        unpack_reply(reply, "tcp://w")


def lose_handler(name, dask_worker):
    """Take a handler away, as on a worker without daskps; Dask then answers None."""
    dask_worker.handlers[f"lost-{name}"] = dask_worker.handlers.pop(name)


def regain_handler(name, dask_worker):
    dask_worker.handlers[name] = dask_worker.handlers.pop(f"lost-{name}")


@pytest.mark.parametrize("verb", ["pull", "push", "add", "assign", "pushpull"])
def test_worker_that_answers_none(shard, client, verb):
    """No verb takes silence for success."""
    [worker] = shard.placement
    client.run(lose_handler, "daskps_call", workers=[worker])
    try:
        given = () if verb == "pull" else ({"w": np.ones(10, "f4")},)
        with pytest.raises(daskps.ProtocolError, match=worker):
            getattr(shard, verb)(*given)
    finally:
        client.run(regain_handler, "daskps_call", workers=[worker])
    assert shard.version == 0
    np.testing.assert_array_equal(shard["w"].pull(), W)


def test_control_that_answers_none(shard, client):
    [worker] = shard.placement
    client.run(lose_handler, "daskps_control", workers=[worker])
    try:
        with pytest.raises(daskps.ProtocolError, match=worker):
            shard.stats()
        with pytest.raises(daskps.ProtocolError, match=worker):
            shard.aggregate([{"w": W}])
        with pytest.raises(daskps.ProtocolError, match=worker):
            daskps.create({"w": W}, servers=[worker])
    finally:
        client.run(regain_handler, "daskps_control", workers=[worker])
    assert shard.version == 0


@pytest.mark.parametrize("op", ["daskps_control", "daskps_directory"])
def test_unknown_methods_are_refused(shard, client, op):
    if op == "daskps_control":
        reply = send(shard, {"method": "sing"}, op)
    else:
        link = shards_of(shard).link
        reply = link.run(lambda: link.node.scheduler.daskps_directory(method="sing"))
    with pytest.raises((daskps.ProtocolError, ValueError, daskps.DaskPSError)):
        unpack_reply(reply, "it")


def test_hello(shard):
    reply = send(shard, {"method": "hello"}, "daskps_control")
    hello = {**identity(), "memory": memory_id()}
    assert unpack_reply(reply, "the worker") == hello


def test_a_form_is_told_once(shard):
    """A host that does not know it says so and changes nothing."""
    call, message = call_of(shard, sequence=1)
    text = message.pop("text")
    unknown = {**message, "template": b"0" * 16, "text": None}
    assert send(shard, unknown) == {"status": "unknown"}
    for said in ({**message, "text": text}, {**message, "text": None}):
        [answer] = unpack_answers(send(shard, said), "the worker", dtypes_of(call))
        assert answer.version == 1
    np.testing.assert_array_equal(shard["w"].pull(), W + 1)


# -- repeats -----------------------------------------------------------------------


def test_sequence_numbers_may_overtake_each_other(shard):
    """Each once, in whatever order they come."""
    for sequence in (3, 1, 3, 0, 2, 1, 2):
        deliver(shard, sequence=sequence)
    np.testing.assert_array_equal(shard["w"].pull(), W + 4)
    assert shard.stats()["shards"][0]["duplicates"] == 3


def test_below_the_window_what_was_given_up_is_applied_and_all_else_is_a_repeat(shard):
    deliver(shard, sequence=0)
    deliver(shard, sequence=100, given_up=(2, 5, 99))
    for sequence in (0, 1, 2, 2, 5):
        deliver(shard, sequence=sequence)
    np.testing.assert_array_equal(shard["w"].pull(), W + 4)


# -- more producers than a shard has room for ----------------------------------------


def n_producers(uid, dask_worker):
    hosted = HOSTS[dask_worker.address].shards[uid, 0]
    return int(hosted.shard.segment.current.fixed[N_PRODUCERS])


def producers_of_client(store, owner, n):
    """Have the directory issue identities to a client of that id."""
    link = shards_of(store).link

    async def issue():
        return [
            await link.directory("producer", kind="client", owner=owner)
            for _ in range(n)
        ]

    return link.run(issue)


def deliver_all(store, ids):
    link = shards_of(store).link
    _, message = call_of(store)

    async def all_of_them():
        for number in ids:
            set_head("producer", number)(message)
            reply = await link.rpc(store.placement[0], "daskps_call", **message)
            assert unpack_reply(reply, "it")[0][1] is None

    link.run(all_of_them)


def push_once(store):
    store.push({"w": np.ones(10, "f4")})
    return store.stats()["handle"]["local_calls"]


@pytest.mark.parametrize("how", ["message", "task in the process"])
def test_ended_producers_make_room(shard, client, how):
    """When the table is full the directory says which have ended; a new one enters."""
    deliver_all(shard, range(10**9, 10**9 + MAX_PRODUCERS))
    worker = shard.placement[0]
    found = client.run(n_producers, shard.uid, workers=[worker])
    assert found == {worker: MAX_PRODUCERS}
    if how == "message":
        push_once(shard)
    else:
        future = client.submit(push_once, shard, workers=[worker])
        assert future.result(timeout=30) == 1
    # Each of them added one, the push took one away.
    np.testing.assert_array_equal(shard["w"].pull(), W + MAX_PRODUCERS - 1)
    # One that lost its place is told so, and applied nothing.
    with pytest.raises(
        daskps.ProducerExpiredError, match="before another task pushes it"
    ):
        deliver(shard, producer=10**9, sequence=1)


def test_open_producers_are_kept(shard, client):
    """All of a client that is still there: a new one is refused, nothing applied.

    Once that client has gone there is room.
    """
    with Client(client.scheduler.address, set_as_default=False) as other:
        ids = producers_of_client(shard, other.id, MAX_PRODUCERS)
        deliver_all(shard, ids)
        with pytest.raises(daskps.ShardBusyError, match="still open"):
            push_once(shard)
        np.testing.assert_array_equal(shard["w"].pull(), W + MAX_PRODUCERS)
        # Those that are known go on.
        deliver(shard, producer=ids[0], sequence=1)
    push_once(shard)
    np.testing.assert_array_equal(shard["w"].pull(), W + MAX_PRODUCERS)


def test_gradient_of_a_task_that_is_no_longer_the_schedulers(shard):
    """A cancelled task that goes on gets no identity."""
    link = shards_of(shard).link
    with pytest.raises(daskps.ConsistencyError, match="no longer"):
        link.run(lambda: link.directory("producer", kind="task", owner="gone-task"))


def test_lr_and_weight_travel(shard):
    deliver(shard, kind=GRADIENT, lr=0.5, weight=4.0)
    np.testing.assert_array_equal(shard["w"].pull(), W - 2)


def unsendable(stacked, weights):
    raise ValueError("half \ud800", 10**30)


def test_errors_of_the_user_that_msgpack_has_no_form_for(client):
    """The reply could not be sent, and its caller waited until it timed out."""
    error = ValueError("half \ud800", 10**30, -(2**63))
    error.add_note("half \ud800")
    packed = msgpack.unpackb(msgpack.packb(pack_error(error)))
    text = "half \\ud800"
    assert packed == ["ValueError", [text, str(10**30), -(2**63)], [text]]
    with store(client) as made:
        one = [{"w": np.ones(10, "f4")}]
        with pytest.raises(ValueError, match="half"):
            made.aggregate(one, reduce=unsendable, timeout=20)
        with pytest.raises(ValueError, match="half"):
            daskps.run(made, lambda trainer, part: unsendable(1, 2), [1])
        assert daskps.run(made, lambda trainer, part: part, [1]) == [1]
