"""Messages that no caller of ours sends, at the real handlers of a live cluster.

What a store's life sends is recorded, and sent again with one thing wrong in each.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
import random
from contextlib import suppress
from operator import itemgetter
from typing import Any

import dask.array as da
import numpy as np

import daskps
from daskps import errors, optim
from daskps.checkpoint.listing import CheckpointTarget
from daskps.cluster.caller import creation, saving
from daskps.cluster.directory import runs
from daskps.cluster.directory.directory import Directory
from daskps.cluster.host import installation
from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.node import HOSTS
from daskps.cluster.protocol.deadline import Deadline
from daskps.cluster.protocol.handlers import DIRECTORY, HOST
from daskps.cluster.protocol.messages import _HEAD
from daskps.cluster.protocol.packing import UNKNOWN
from daskps.cluster.sockets.frames import HEAD_NBYTES, pack_head, unpack_head
from daskps.cluster.upstream import dumps
from tests.cluster.saved import blueprint, source_of
from tests.invariants import validate
from tests.seams import shards_of
from tests.support import gen_cluster

#: Every way but messages is closed.
FAR = {"daskps.carriers.process": False, "daskps.carriers.machine": False}
JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**5,
    2**70,
    1.5,
    float("nan"),
    float("inf"),
    "x",
    "\ud800",
    b"x",
    [],
    [[]],
    [1, 2],
    {},
    {"a": 1},
)
#: How long the recorded messages may wait for something to happen.
SECONDS = 0.25


def kind_of(message):
    """Return the kind of the step in a call that comes with its form."""
    return json.loads(message["text"])["head"][1]


class Recorder:
    """The messages that reach the handlers, by door and method."""

    def __init__(self, monkeypatch):
        self.found = {}
        self.patch = monkeypatch
        for door, of in (("handle", Directory), ("handle_control", ShardHost)):
            self.record(door, of, lambda kwargs: kwargs["method"])
        self.record("handle_call", ShardHost, kind_of)

    def record(self, door, of, name):
        real, found = getattr(of, door), self.found

        async def handle(self, *args, **kwargs):
            sent = {**dict(zip(["method"], args, strict=False)), **kwargs}
            with suppress(Exception):
                found[door, name(sent)] = copy.deepcopy(sent)
            return await real(self, *args, **kwargs)

        self.patch.setattr(of, door, handle)


def gradient(params, X, y):
    return 1.0, {"w": np.ones((4, 3), "f4")}


def loop(trainer, part):
    trainer.pull("w")
    trainer.push({"w": np.ones((4, 3), "f4")})
    trainer.barrier()
    trainer.allreduce({"a": np.ones(3, "f2"), "b": trainer.rank})
    return trainer.clock


def minus_one(block, name):
    return block - 1


async def live(c, folder):
    """Send all that a store's life sends; return a store to go on with."""
    params = {
        "w": daskps.ArraySpec((4, 3), "f4", daskps.init.normal()),
        "b": np.float64(1),
        "d": da.zeros(6, chunks=3, dtype="f4"),
    }
    store = await daskps.aio.create(
        params, name="s", client=c, optimizer=optim.Adam(0.1)
    )
    grads = {"w": np.ones((4, 3), "f4")}
    await store.push(grads)
    await store.add({"b": np.float64(1)})
    await store.assign({"b": np.float64(1)})
    await store.pull()
    await store.pushpull(grads)
    await store.aggregate([grads, grads])
    await store.aggregate([grads, grads], into=store)
    await store.snapshot()
    await store.stats()
    await store.apply(minus_one, ["w"])
    await store.scale_lr(0.5)
    await store["w"].dot(np.ones((4, 3), "f4"))
    await store.versions
    await daskps.aio.open("s", client=c, wait=SECONDS)
    await daskps.aio.list_stores(client=c)
    X = np.ones((8, 2))
    for execution in ("resident", "graph"):
        await daskps.aio.train(store, gradient, X, execution=execution, stop=bool)
    await daskps.aio.run(store, loop, [0, 1], sync="asp", resumable=True)
    params = {"t": daskps.TableSpec(4, 1), "a": daskps.TableSpec(None, 1)}
    async with await daskps.aio.create(params, client=c, recover_from=folder) as tables:
        for name in params:
            await tables[name].pull_changed()
        deadline, said = Deadline(20, "a save"), saving.TrainingState()
        target = CheckpointTarget(str(folder))
        name, _ = await saving.save(shards_of(tables), target, deadline, said)
        source = source_of(folder / name)
        link = shards_of(tables).link
        made = await creation.create(link, blueprint(source, 2), 20)
        await link.directory("close", uid=made.uid, undo=True)
    return store


def wrong(value, rng, depth=3):
    """Yield copies of a value with one thing in it replaced, left out or added."""
    if isinstance(value, dict):
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
            for other in junk(value[key], rng, depth):
                yield {**value, key: other}
        yield {**value, "unheard_of": 1}
    elif isinstance(value, (list, tuple)) and value:
        yield value[:-1]
        yield [*value, value[-1]]
        at = rng.randrange(len(value))
        for other in junk(value[at], rng, depth):
            yield [*value[:at], other, *value[at + 1 :]]


def junk(value, rng, depth):
    yield from JUNK
    if depth:
        yield from wrong(value, rng, depth - 1)


def is_typed(name):
    """Return whether the name of an error says that the message was refused."""
    return name in ("ValueError", "TypeError", "TimeoutError") or (
        name in errors.__all__ and name not in ("DaskPSError", "IllegalStateError")
    )


async def ask(handler, message):
    """Return what is wrong with a handler's answer; None where nothing is."""
    try:
        inspect.signature(handler).bind(**message)
    except TypeError:
        # Python refuses it, as of any other handler of Dask's.
        return None
    try:
        reply = await asyncio.wait_for(handler(**message), 2)
    except Exception as error:  # noqa: BLE001 - reported with all others
        return f"raised {error!r:.200}"
    if reply["status"] == UNKNOWN:
        return None
    rows = [row[1] for row in reply.get("answers", ()) if row[1]]
    found = rows if reply["status"] == "OK" else [reply["error"]]
    return (
        "; ".join(str(error[:2]) for error in found if not is_typed(error[0])) or None
    )


def unsent(store):
    """Return messages that the life of this store had no need of."""
    of, place = {"store": store.uid}, [0, "block", 64, 1]
    layout = {"parameters": [["w", [4], "float64"]], "shards": 1}
    about = {"name": "s", "layout": layout, "rules": b"", "cluster": "c"}
    rounds = {"run": 1, "rows": [place], "reduce": b"", "graph": False}
    adopt = {"about": about, "rows": [[*place, 2]], "rounds": rounds}
    adopt["codecs"] = []
    cut = {"cut": "c", "attempt": 1, "producers": [1]}
    for name, message in {
        "adopt": of | adopt,
        "look": {"cluster": "c", "rows": [place]},
        "orphans": {"cluster": "c"},
        "sweep": {"cluster": "c", "names": ["x"], "keep": [place]},
        "keeps": of | {"shards": [0]},
        "mark_lost": of | cut,
        "acknowledge": of | {"run": 1, "owner": -1, "floor": 1},
        "give_up": of | {"token": "t"},
        "hold": of | {"run": 1, "limit": 1},
        "rounds": of | {"run": 1},
        "goes_on": of | {"run": 1},
        "changed": of | {"run": 1},
        "warm": {"layout": layout, "rules": dumps({})},
        "resume": of | {"run": 1, "rank": 0, "attempt": 2},
    }.items():
        yield ("handle_control", name), {"method": name, **message}
    for name, message in {
        "delete": {"uid": "nothing", "wait_seconds": SECONDS},
        "locate": {"uid": store.uid, "run": 1, "wait_seconds": SECONDS},
        "await_store": {"name": "nobody", "wait_seconds": SECONDS},
        "ended": {"producers": [1]},
        "fence_run": {"run": 1, "reason": "r"},
        "progress": {"run": 1, "rank": 0, "clock": 1, "loss": 1.0, "rows": 1},
        "note": {"run": 1, "number": 0, "receipts": []},
        "receipts": {"run": 1, "since": 0},
    }.items():
        yield ("handle", name), {"method": name, **message}


def guessed():
    """Return a message for every handler, for those of which nothing better is known."""
    for door, handlers in (("handle", DIRECTORY), ("handle_control", HOST)):
        for name, handler in handlers.by_name.items():
            _, *takes = inspect.signature(handler.function).parameters
            yield (door, name), {"method": name, **dict.fromkeys(takes, "x")}


async def steps(directory, recorder, sync):
    """Begin a run; return it, and a push of its first trainer that then reads."""
    message = recorder.found["handle", "open_run"]
    message["begin"] |= {"policy": (sync, 1, 0.0), "n_ranks": 2}
    message |= {"size": 2, "graph": False}
    reply = await directory.handle(**message)
    call = copy.deepcopy(recorder.found["handle_call", "gradient"])
    form = json.loads(call["text"])
    named = dict(zip(_HEAD, form["head"], strict=True))
    named |= {"run": reply["value"], "rank": 0, "tick": True, "producer": 0}
    form["parts"] = [[*part[:-1], "read"] for part in form["parts"]]
    text = json.dumps({**form, "head": list(named.values())}).encode()
    head = unpack_head(call["head"])._replace(clock=0, sequence=0, wait_ms=0, flags=0)
    return reply["value"], {**call, "text": text, "head": pack_head(head)}


async def wrong_forms(handler, message, rng):
    """Send a call with one thing wrong in its form, or in the numbers of its head."""
    found = []
    for one in wrong(json.loads(message["text"]), rng):
        with suppress(TypeError, ValueError, UnicodeEncodeError):  # no text has it
            said = {**message, "text": json.dumps(one).encode()}
            found += [(a, one) for a in [await ask(handler, said)] if a]
    for at in range(HEAD_NBYTES - 8):  # behind these it says how long it may wait
        data = bytearray(message["head"])
        data[at] ^= 1 << rng.randrange(8)
        if said := await ask(handler, {**message, "head": bytes(data)}):
            found.append((said, bytes(data)))
    return found


async def wrongs(handler, message, rng):
    """Send a message with one thing wrong in each; return what is wrong with answers."""
    found = []
    for one in wrong(message, rng):
        if said := await ask(handler, copy.deepcopy(one)):
            changed = {k: v for k, v in one.items() if message.get(k) is not v}
            found.append((said, changed))
    return found


@gen_cluster(client=True, config=FAR, timeout=100)
async def test_what_is_malformed_is_refused(c, s, a, b, monkeypatch, caplog, tmp_path):
    # What is logged tells the malformed text, which pytest-xdist cannot send.
    for name in ("daskps", "distributed"):
        caplog.set_level(logging.CRITICAL + 1, logger=name)
    recorder = Recorder(monkeypatch)
    store = await live(c, tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(installation, "MOST_LOOKS", 0)
    monkeypatch.setattr(runs, "OPEN_SECONDS", SECONDS)
    rng, bad = random.Random(7), list[Any]()
    directory, host = s.extensions["daskps-directory"], HOSTS[a.address]
    bad = []
    for sync in ("asp", "bsp"):
        run, call = await steps(directory, recorder, sync)
        bad += await wrongs(host.handle_call, call, rng)
        bad += await wrong_forms(host.handle_call, call, rng)
        await directory.handle("close_run", run=run)
    messages = {**dict(guessed()), **recorder.found, **dict(unsent(store))}
    for (door, _), message in sorted(messages.items(), key=itemgetter(0)):
        for of in (message, message.get("request", {})):
            of |= {key: SECONDS for key in ("wait_seconds", "seconds") if key in of}
        handler = directory.handle if door == "handle" else getattr(host, door)
        bad += await wrongs(handler, message, rng)
    assert not bad, "\n".join(map(str, bad[:20]))
    for hosted in host.shards.values():
        validate(hosted.shard)
