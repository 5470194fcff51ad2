"""A program in every trainer: it knows where it is, meets others, leaves nothing."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from distributed import Client

import daskps
from daskps.compat import mxnet, systemml
from daskps.compat.behind import behind
from daskps.compat.launch import (
    here,
    launch,
    name_of_ones_own,
    pack_error,
    raise_packed,
)
from tests.inprocess import cluster
from tests.support import until


def where(participant, part):
    found = here("some")
    assert found is participant
    return found.rank, found.size, part


def share(participant, part):
    def make(name):
        return daskps.create({"w": np.zeros(3)}, name=name)

    store = participant.make_store(make, "w of 3")
    store.add({"w": np.full(3, part)})
    participant.meet()
    return store.name, store.pull()["w"].tolist()


def fail(participant, part):
    def make(name):
        raise KeyError("no")

    try:
        participant.make_store(make, "w")
    except KeyError as error:
        return repr(error)
    return None


def differ(participant, part):
    try:
        participant.make_store(lambda name: None, f"w of {part}")
    except ValueError as error:
        return "w of" in str(error)
    return False


def leave(participant, part):
    for _ in range(part):
        participant.meet()
    return part


def make_ones_own(participant, part):
    name = name_of_ones_own()
    with daskps.create({"w": np.zeros(1)}, name=name):
        assert len(left()) == part
    return name


MAKING, OVER, MADE = (threading.Event() for _ in range(3))


def make_late(participant, part):
    """Rank 1 fails while rank 0 is making a store, which is there after the launch."""
    if participant.rank == 1:
        assert MAKING.wait(60)
        raise ArithmeticError("rank one")

    def make(name):
        MAKING.set()
        assert OVER.wait(60)
        store = daskps.create({"w": np.zeros(1)}, name=name)
        MADE.set()
        return store

    participant.make_store(make, "w")


def in_a_thread(participant, part):
    found = []

    def look():
        try:
            here("some")
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found


def break_down(participant, part):
    if participant.rank == 1:
        raise ArithmeticError("rank one")
    participant.make_store(
        lambda name: daskps.create({"w": np.zeros(1)}, name=name), "w"
    )
    participant.meet()


def end_first(participant, part):
    """Rank 0 ends, and rank 1 wants a store of it."""
    if participant.rank:
        participant.make_store(lambda name: None, "a table")


def return_none_of_ours(participant, part):
    return threading.Lock() if participant.rank else part


def left(client=None):
    """Return the stores of launches that are still there."""
    names = [info.name or "" for info in daskps.list_stores(client=client)]
    return [name for name in names if name.startswith("some-")]


def check(client=None):
    """Go through all a program may do; used on both kinds of cluster."""
    assert launch("some", where, [*"abc"], client=client) == [
        (0, 3, "a"),
        (1, 3, "b"),
        (2, 3, "c"),
    ]
    found = launch("some", share, [1.0, 2.0, 4.0], client=client)
    assert len({name for name, _ in found}) == 1
    assert [w for _, w in found] == [[7.0] * 3] * 3
    assert launch("some", leave, [1, 4, 2], client=client) == [1, 4, 2]
    with pytest.raises(ArithmeticError, match="rank one"):
        launch("some", break_down, [0, 0], client=client)
    with pytest.raises(
        RuntimeError, match="trainer 0 has ended, and it is the one that"
    ):
        launch("some", end_first, [0, 0], client=client)
    until(lambda: not left(client))


def test_programs_on_two_processes(client):
    check(client)
    with pytest.raises(TypeError) as error:
        launch("some", return_none_of_ours, [0, 0], client=client)
    assert str(error.value) == (
        "what trainer 1 returned is a lock that cannot be pickled (cannot pickle "
        "'_thread.lock' object); return arrays, numbers and other plain values"
    )
    assert error.value.__notes__ == ["raised in trainer 1 of 2 at clock 0"]


def test_programs_of_one_process():
    with cluster():
        check()
        assert launch("some", fail, [0, 0]) == ["KeyError('no')"] * 2
        assert launch("some", differ, [1, 2]) == [True, True]
        [made] = launch("some", make_ones_own, [1])
        assert made.startswith("some-")
        with pytest.raises(ArithmeticError):
            launch("some", make_late, [0, 0])
        OVER.set()
        assert MADE.wait(60)
        until(lambda: not left())
        [[said]] = launch("some", in_a_thread, [0])
        assert "copy_context" in said
        until(lambda: not left())


def make_three(participant, part):
    for _ in range(3):
        participant.make_store(lambda name: daskps.create({"w": [0.0]}, name=name), "w")
    return participant.name


def test_a_store_that_cannot_be_deleted_keeps_no_other(monkeypatch):
    opened, failed = daskps.open, []

    def fail(name, **options):
        if name.endswith("/1"):
            failed.append(name)
            raise daskps.ShardLostError(name, 0, "tcp://a", "died")
        return opened(name, **options)

    with cluster():
        monkeypatch.setattr(daskps, "open", fail)
        [name] = launch("some", make_three, [0])
        assert failed == [f"{name}/1"]
        until(lambda: [info.name for info in daskps.list_stores()] == failed)


def test_outside_of_a_launch():
    with pytest.raises(RuntimeError, match=r"no trainer of daskps\.compat\.some"):
        here("some")


class UnpicklableError(Exception):
    def __reduce__(self):
        raise TypeError("no")


class OfTwoError(Exception):
    """Pickles, and cannot be made again of its text alone."""

    def __init__(self, what, where):
        super().__init__(f"{what} at {where}")


def raised_below(n_frames):
    """Return an error whose traceback has so many frames, and whose cause has them too."""
    try:
        if n_frames:
            raise raised_below(n_frames - 1)
        raise ArithmeticError("not this")
    except ArithmeticError as error:
        return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (daskps.LayoutError("too large"), daskps.LayoutError),
        (raised_below(300), ArithmeticError),
        (OfTwoError("a fault", 3), daskps.DaskPSError),
        (ValueError("x" * 9_000), daskps.DaskPSError),
        (UnpicklableError("mine"), daskps.DaskPSError),
    ],
)
def test_errors_that_all_hear_of(error, expected):
    with pytest.raises(expected, match=str(error)[:100]) as caught:
        raise_packed(pack_error(error), "a store")
    assert caught.value.__notes__ == ["met by another trainer, for a store"]
    raise_packed(pack_error(None), "a store")


def wait_behind(participant, part):
    """Rank 0 fails while its thread waits for rank 1, which waits for rank 0."""
    with behind("waits") as waits:
        if participant.rank == 0:
            waits.do(lambda: participant.trainer.allreduce(1))
            raise ArithmeticError("rank zero")
        # No all-reduce: two of different kinds would end both by an error of their own.
        participant.trainer.barrier()


def test_a_program_that_fails_waits_for_nothing_behind_it():
    with cluster(), pytest.raises(ArithmeticError, match="rank zero"):
        launch("some", wait_behind, [0, 0], timeout=60)


def test_an_asynchronous_client_is_refused(client):
    async def call():
        async with Client(client.scheduler.address, asynchronous=True) as other:
            with pytest.raises(TypeError, match=r"some\.launch waits for its trainers"):
                launch("some", where, [0], client=other)
            with pytest.raises(TypeError, match=r"some\.launch waits for its trainers"):
                launch("some", where, [0])
            with pytest.raises(TypeError, match="a kvstore waits for its store"):
                mxnet.kvstore.create("local", client=other)
            with pytest.raises(TypeError, match="executors waits for its workers"):
                mxnet.DataParallelExecutorGroup(
                    symbol=None,
                    contexts=list(client.scheduler_info()["workers"]),
                    data_shapes=[("x", (4,))],
                    param_names=["w"],
                    client=other,
                )
            with pytest.raises(TypeError, match="paramserv waits for its workers"):
                systemml.paramserv(
                    model=[np.zeros(1)],
                    features=np.zeros(4),
                    labels=np.zeros(4),
                    upd=lambda model, hyperparams, features, labels: model,
                    agg=lambda model, hyperparams, gradients: model,
                    epochs=1,
                    k=2,
                )

    asyncio.run(call())


def test_a_lost_trainer_is_advised_what_works(monkeypatch):
    def lost(*args, **options):
        raise daskps.RunCancelledError(
            "trainer 1 was lost with its worker; use on_trainer_lost='restart' in train, or "
            "resumable=True in run"
        )

    monkeypatch.setattr(daskps, "run", lost)
    with cluster(), pytest.raises(daskps.RunCancelledError) as caught:
        launch("some", where, [0])
    assert str(caught.value) == (
        "trainer 1 was lost with its worker; what its program knew is gone: call "
        "some.launch again"
    )


def test_nothing_is_looked_for_where_the_scheduler_is_gone(monkeypatch):
    """Dask would try for half a minute to reach it, once for each question."""
    asked = []

    def lost(*args, **options):
        raise daskps.SchedulerLostError("a run ended, as the scheduler is gone")

    with cluster():
        monkeypatch.setattr(daskps, "run", lost)
        monkeypatch.setattr(daskps, "list_stores", lambda **how: asked.append(how))
        with pytest.raises(daskps.SchedulerLostError):
            launch("some", where, [0])
        assert asked == []
        monkeypatch.undo()
        launch("some", where, [0])
