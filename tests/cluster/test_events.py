"""What the scheduler's log of events says under the topic `daskps`."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import dask
import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.cluster.upstream import dumps
from tests.support import gen_cluster, local_cluster, store, until

HEAD = {"action", "store", "uid"}
FIELDS = {
    "store-created": {"session", "parameters", "tables", "shards", "workers", "nbytes"},
    "store-deleted": {"reason"},
    "store-freed": {"reason"},
    "store-saved": {"checkpoint", "nbytes", "held"},
    "save-failed": {"by"},
    "shards-lost": {"shards", "worker", "reason"},
    "shards-adopted": {"shards", "worker", "by"},
    "copies-made": {"shards", "seconds", "nbytes"},
    "copies-together": {"shards"},
    "copies-lost": {"shards", "why"},
    "run-begun": {"run", "sync", "staleness", "trainers", "execution"},
    "run-ended": {"run"},
    "run-fenced": {"run", "reason"},
    "trainer-lost": {"run", "rank", "worker"},
}


def events(client, uid):
    """The events about one store, oldest first; each has just what it should."""
    found = [event for _, event in client.get_events("daskps")]
    for event in found:
        assert set(event) == HEAD | FIELDS[event["action"]]
        for value in event.values():
            assert isinstance(value, (str, int, float, tuple))
    return [event for event in found if event["uid"] == uid]


def actions(client, uid):
    return [event["action"] for event in events(client, uid)]


def test_session_store(client):
    s = store(client)
    s.close()
    created, freed = events(client, s.uid)
    assert created == {
        "action": "store-created",
        "store": s.name,
        "uid": s.uid,
        "session": True,
        "parameters": 2,
        "tables": 0,
        "shards": 2,
        "workers": 2,
        "nbytes": created["nbytes"],
    }
    assert created["nbytes"] > 48
    assert freed["action"] == "store-freed"
    assert freed["reason"] == "was closed"


def test_named_store(client):
    s = store(client, name="kept")
    again = store(client, name="kept", overwrite=True)
    again.delete()
    assert actions(client, s.uid) == ["store-created", "store-deleted"]
    assert "overwrite" in events(client, s.uid)[1]["reason"]
    assert actions(client, again.uid) == ["store-created", "store-deleted"]
    assert events(client, again.uid)[1]["reason"] == "was deleted"
    assert events(client, s.uid)[0]["session"] is False


def test_second_copies(client):
    """How long it took to make them, and what they take."""
    with store(client, copies=2) as s:
        nbytes = sum(row["copy_nbytes"] for row in s.stats()["shards"])
        made, together, created = events(client, s.uid)
    assert (made["action"], made["shards"]) == ("copies-made", (0, 1))
    assert made["nbytes"] == nbytes > 0
    assert made["seconds"] > 0
    # Both workers are on this machine.
    assert (together["action"], together["shards"]) == ("copies-together", (0, 1))
    assert created["action"] == "store-created"


def test_store_that_could_not_be_made_leaves_no_event(client):
    before = client.get_events("daskps")

    def fails(shape, dtype, rng):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        daskps.create({"w": daskps.ArraySpec((4,), "f8", fails)})
    assert client.get_events("daskps") == before


def count(trainer, part):
    for _ in range(part):
        trainer.pushpull({"w": np.ones(10, "f4")})
    return trainer.clock


@pytest.mark.parametrize(("sync", "staleness"), [("bsp", 0), ("ssp", 3), ("asp", 0)])
def test_run(client, sync, staleness):
    """Two events, however many steps there are."""
    with store(client) as s:
        assert daskps.run(s, count, [200, 200], sync=sync) == [200, 200]
        _, begun, ended = events(client, s.uid)
    assert begun["action"] == "run-begun"
    assert (begun["sync"], begun["staleness"]) == (sync, staleness)
    assert begun["trainers"] == 2
    assert begun["execution"] == "resident"
    assert ended["action"] == "run-ended"
    assert ended["run"] == begun["run"]


def raises(trainer, part):
    raise ZeroDivisionError("of mine")


def test_fenced_run(client):
    """It says why, and not that it has ended."""
    with store(client) as s:
        with pytest.raises(ZeroDivisionError):
            daskps.run(s, raises, [0, 1])
        found = events(client, s.uid)
    assert [e["action"] for e in found[:2]] == ["store-created", "run-begun"]
    assert [e["action"] for e in found[2:]] == ["run-fenced"]
    assert "ZeroDivisionError: of mine" in found[2]["reason"]
    assert found[2]["run"] == found[1]["run"]


class Stop:
    def on_round(self, run):
        raise KeyError("enough")


def ones(params, X, y):
    return {name: np.ones_like(value) for name, value in params.items()}


def test_run_that_its_caller_ends(client):
    with store(client) as s:
        with pytest.raises(KeyError, match="enough"):
            daskps.train(s, ones, np.zeros((64, 1)), epochs=10**6, callbacks=[Stop()])
        found = events(client, s.uid)[1:]
        assert [e["action"] for e in found] == ["run-begun", "run-fenced"]
        assert found[1]["reason"] == "cancelled by its caller (KeyError)"


@gen_cluster(client=True)
async def test_run_closed_while_it_is_fenced_has_one_end(c, s, a, b):
    x = await daskps.aio.create({"w": np.zeros(4)}, client=c)
    runs = s.extensions["daskps-directory"].runs
    begin = {
        "policy": ("asp", -1, 0.0),
        "n_ranks": 1,
        "reduce": dumps("mean"),
        "reset": False,
        "codec": ("", b""),
        "epochs": None,
    }
    who = {"client": c.id, "size": 1, "restartable": False, "gated": False}
    who |= {"graph": False, "described": ""}
    run = await runs.on_open_run(x.uid, begin, **who)
    await asyncio.gather(runs.on_fence_run(run, "enough"), runs.on_close_run(run))
    found = [event["action"] for _, event in s.get_events("daskps")]
    assert found == ["store-created", "run-begun", "run-fenced"]
    await x.close()


def test_subscribers_hear_at_once(client):
    heard, freed = [], threading.Event()

    def hear(event):
        heard.append(event[1])
        if event[1]["action"] == "store-freed":
            freed.set()

    client.subscribe_topic("daskps", hear)
    try:
        s = store(client)
        s.close()
        assert freed.wait(10)
    finally:
        client.unsubscribe_topic("daskps")
    assert [e["action"] for e in heard] == ["store-created", "store-freed"]


def test_lost_shards_and_trainers():
    with local_cluster(n_workers=3, threads=1) as client:
        a, b, c = client.nthreads()
        pids = client.run(os.getpid)
        s = daskps.create(
            {"w": np.zeros(10, "f4")}, optimizer=optim.SGD(1.0), servers=[a]
        )
        with dask.config.set({"daskps.carriers.machine": False}):
            # In private memory: nobody can adopt it.
            both = store(client, servers=[a, b], shards=4)
        shared = store(client, servers=[b], shards=2)
        killed = threading.Event()

        def kill():
            until(lambda: s.version > 20, 60)
            os.kill(pids[c], signal.SIGKILL)
            killed.set()

        thread = threading.Thread(target=kill)
        thread.start()
        daskps.run(s, counts_on, [1000, 1000, 1000], resumable=True)
        thread.join()
        assert killed.is_set()
        [lost] = [e for e in events(client, s.uid) if e["action"] == "trainer-lost"]
        assert lost["worker"] == c
        assert lost["rank"] == 2
        assert actions(client, s.uid)[-1] == "run-ended"

        os.kill(pids[b], signal.SIGKILL)
        until(lambda: "shards-lost" in actions(client, both.uid), 60)
        lost = events(client, both.uid)[-1]
        assert lost["worker"] == b
        assert list(lost["shards"]) == [
            i for i, w in enumerate(both.placement) if w == b
        ]
        assert len(lost["shards"]) == 2
        assert "died" in lost["reason"]
        # By one worker or by two.
        until(lambda: shards_adopted(client, shared.uid) == [0, 1], 60)
        for adopted in events(client, shared.uid)[1:]:
            assert adopted["worker"] == b != adopted["by"]


def shards_adopted(client, uid):
    found = [e for e in events(client, uid) if e["action"] == "shards-adopted"]
    return sorted(shard for event in found for shard in event["shards"])


def counts_on(trainer, part):
    for _ in range(trainer.clock, part):
        trainer.pushpull({"w": np.ones(10, "f4")})
    return trainer.clock


def test_save_that_fails(client, tmp_path):
    """Its cut ends without a checkpoint; one that is made is no failure."""
    (tmp_path / "file").write_text("no folder")
    with store(client) as s:
        with pytest.raises((OSError, daskps.CheckpointError)):
            s.save(str(tmp_path / "file" / "below"))
        s.save(str(tmp_path / "saved"))
        s.snapshot()
        until(lambda: "store-saved" in actions(client, s.uid))
        assert actions(client, s.uid) == ["store-created", "save-failed", "store-saved"]
