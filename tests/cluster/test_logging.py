"""What `client.forward_logging("daskps")` brings from the workers."""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import contextmanager

import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.cluster import upstream
from daskps.cluster.keys import OURS
from tests.support import gen_cluster, local_cluster, store, until

#: Filters what Dask's own logs say of our tasks.
SHORTENED = upstream._shortened(OURS)


def count(trainer, part):
    for _ in range(trainer.clock, part):
        trainer.pushpull({"w": np.ones(10, "f4")})
    return trainer.clock


class Keep(logging.Handler):
    """Keeps what it is given; Dask's `silence_logs` has silenced those of pytest."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.records = []

    def emit(self, record):
        self.records.append(record)

    def of_workers(self, text=""):
        found = [r for r in self.records if hasattr(r, "worker")]
        return [r for r in found if text in r.getMessage()]


@contextmanager
def forwarding(client):
    """Give a function of the workers' records so far that contain a text."""
    keep = Keep()
    logging.getLogger("daskps").addHandler(keep)
    client.forward_logging("daskps", level=logging.INFO)
    yield keep.of_workers
    client.unforward_logging("daskps")
    logging.getLogger("daskps").removeHandler(keep)


@pytest.fixture
def forwarded(client):
    with forwarding(client) as records:
        yield records


def test_a_store_and_a_run_tell_their_story(client, forwarded):
    """One line per worker and event, none per step, with the worker in each."""
    s = store(client, name="told")
    daskps.run(s, count, [50, 50])
    workers = set(s.placement)
    s.delete()
    until(lambda: len(forwarded("freed")) == 2)
    for text in ("made 1 shard of", "begins run", "ends run", "freed 1 shard of"):
        records = forwarded(text)
        assert {r.worker for r in records} == workers, text
        assert len(records) == 2
        for record in records:
            assert record.worker in record.getMessage()
            assert "'told'" in record.getMessage()
            assert record.levelno == logging.INFO
            assert record.name.startswith("daskps.cluster")
    # Not one for each step, at most one more for a slow compilation.
    assert len(forwarded()) <= 8 + 2
    assert "BSP" in forwarded("begins")[0].getMessage()
    assert "it has ended" in forwarded("ends run")[0].getMessage()
    made = [int(r.getMessage().split()[-2]) for r in forwarded("made")]
    freed = [int(r.getMessage().split()[-2]) for r in forwarded("freed")]
    assert sum(made) == sum(freed) > 48


def levels(dask_worker):
    ours = logging.getLogger("daskps")
    return ours.level, len(ours.handlers), logging.getLogger().level


def test_workers_have_a_level_but_no_handler_of_ours(client):
    for level, handlers, _ in client.run(levels).values():
        assert (level, handlers) == (logging.INFO, 0)


def set_debug(dask_worker):
    logging.getLogger("daskps").setLevel(logging.DEBUG)


def test_level_that_was_set_stays_and_shows_details():
    with local_cluster(threads=1) as client:
        client.run(set_debug)
        with store(client):
            assert {row[0] for row in client.run(levels).values()} == {logging.DEBUG}


def slow_compile(seconds):
    from daskps.cluster.host import store_messages

    store_messages.SLOW_COMPILE_SECONDS = seconds


def test_slow_compilation_is_told(client, forwarded):
    client.run(slow_compile, 0.0)
    try:
        with store(client):
            until(lambda: len(forwarded("compiled the optimizer")) == 2)
    finally:
        client.run(slow_compile, 1.0)


@pytest.mark.slow
def test_fail_over_is_a_warning():
    with local_cluster(n_workers=3, threads=1) as client:
        a, _, c = client.nthreads()
        s = daskps.create(
            {"w": np.zeros(10, "f4")}, optimizer=optim.SGD(1.0), servers=[a]
        )
        pid = client.run(os.getpid, workers=[c])[c]

        def kill():
            until(lambda: s.version > 20, 60)
            os.kill(pid, signal.SIGKILL)

        with forwarding(client) as records:
            thread = threading.Thread(target=kill)
            thread.start()
            daskps.run(s, count, [600, 600, 600], resumable=True)
            thread.join()
            [record] = until(lambda: records("goes on with trainer 2"))
        assert record.levelno == logging.WARNING
        assert record.worker != c


def drop_behind_its_back(uid, dask_worker):
    from daskps.cluster.host.node import HOSTS

    hosted_shards = HOSTS[dask_worker.address].shards
    for key in [key for key in hosted_shards if key[0] == uid]:
        del hosted_shards[key]


def pull(s):
    with pytest.raises(daskps.StaleGenerationError):
        s.pull()


def test_exhausted_retries_are_a_warning(client, forwarded):
    with store(client) as s:
        local, remote = s.placement
        client.run(drop_behind_its_back, s.uid, workers=[remote])
        client.submit(pull, s, workers=[local]).result()
        [record] = until(lambda: forwarded("gives up"))
        assert record.levelno == logging.WARNING
        assert remote in record.getMessage()
        assert record.worker == local


def failure(key, error, logger="distributed.worker"):
    """A record as Dask makes it of a task that failed."""
    text = (
        "Compute Failed\nKey:       %s\nState:     %s\nTask:  %s\nException: %r\n%r\n"
    )
    args = (key, "executing", "<Task>", error, "  File ...\n" * 30)
    return logging.LogRecord(logger, logging.ERROR, "worker.py", 1, text, args, None)


@pytest.mark.parametrize(
    ("key", "error", "logged"),
    [
        (
            ("daskps-trainer", "model-01234567", 3, 0, 0),
            "ValueError('no')",
            "('daskps-trainer', 'model-01234567', 3, 0, 0) failed: ValueError('no') (its "
            "caller gets the traceback)",
        ),
        (
            ("daskps-gradient", "m-01234567", 3, 0, 1, 0),
            "E" * 1000,
            f"('daskps-gradient', 'm-01234567', 3, 0, 1, 0) failed: {'E' * 500}... (its "
            "caller gets the traceback)",
        ),
        (
            ("frompandas-daskps-rows-0123", 1, 0),
            "ValueError('no')",
            "('frompandas-daskps-rows-0123', 1, 0) failed: ValueError('no') (its caller "
            "gets the traceback)",
        ),
        (
            ("daskps-trainer", "model-01234567", 3, 1, 0),
            "RunCancelledError('run 3 is over')",
            None,
        ),
    ],
)
def test_a_failure_of_ours_is_one_line_at_most(key, error, logged, monkeypatch):
    monkeypatch.setattr(upstream, "workers", lambda: ["one that runs"])
    record = failure(key, error)
    assert SHORTENED.filter(record) is (logged is not None)
    assert logged in (None, record.getMessage())


def test_nothing_is_said_of_a_task_whose_worker_is_closing(monkeypatch):
    """As of a snapshot at Ctrl-C: nobody is there to hear what came of it."""
    monkeypatch.setattr(upstream, "workers", list)
    lost = "SnapshotLostError('model', 1, 'tcp://a', 'no longer has the copy', False)"
    assert not SHORTENED.filter(failure("daskps-snapshot-a-1", lost))


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("inc-1", "ValueError('no')"),
        (("sum", 0), "ValueError('no')"),
        (("daskps-trainer", "model-01234567", 3, 0, 0), "IllegalStateError('a bug')"),
    ],
)
def test_failures_of_others_and_bugs_keep_their_frames(key, error):
    record = failure(key, error)
    assert SHORTENED.filter(record)
    assert record.getMessage().count("File") == 30
    other = logging.makeLogRecord({"msg": "Compute Failed", "args": ()})
    assert SHORTENED.filter(other)


@gen_cluster(client=True)
async def test_a_mistake_prints_no_frames(c, s, a, b, monkeypatch):
    """In both executions, with a second trainer that is cancelled for it."""

    def gradient(params, X, y):
        raise ZeroDivisionError("on purpose")

    keep, logger = Keep(), logging.getLogger("distributed.worker")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, keep])
    made = await daskps.aio.create(
        {"w": np.zeros(2)}, client=c, optimizer=optim.SGD(0.1)
    )
    for execution in ("resident", "graph"):
        with pytest.raises(ZeroDivisionError):
            await daskps.aio.train(made, gradient, np.ones((8, 2)), execution=execution)
    said = [record.getMessage() for record in keep.records]
    assert not any("Compute Failed" in text or "File" in text for text in said)
    assert any("failed: ZeroDivisionError('on purpose')" in text for text in said)
