"""`train(retries=)` on real processes: of its trainers one fails, and others are killed."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from typing import Any

import pytest

import daskps
from daskps import optim
from daskps.cluster.caller.link import link_of
from daskps.cluster.runs.parts import DataPart, sent
from tests.support import local_cluster
from tests.training.test_epochs import HOW, X, Y, gradient
from tests.training.test_retries import AccidentError, bits, made

#: The trainer that has this row fails, and no other one has it.
LABEL = Y[40]


@dataclass(frozen=True)
class FailsOnce:
    """As `gradient`, but raises once in all processes, after the first tick."""

    path: str

    def __call__(self, params: Any, X: Any, y: Any) -> Any:
        if params["b"] != 0.5 and LABEL in y:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL))
                raise AccidentError("once")
        return gradient(params, X, y)


def trained(store: Any, function: Any, **how: Any) -> daskps.TrainResult:
    return daskps.train(store, function, X, Y, **HOW | {"epochs": 3} | how)


@pytest.mark.parametrize("sync", ["bsp", "asp", daskps.ASP(damping=0.5)])
def test_one_rank_fails_and_all_go_on(client, sync, tmp_path):
    """In rounds to the bits of a run without errors; else each goes on about there."""
    with made() as store, made() as whole:
        wanted = trained(whole, gradient, sync=sync)
        flag = tmp_path / "failed"
        found = trained(store, FailsOnce(str(flag)), sync=sync, retries=1)
        assert flag.exists()
        if sync == "bsp":
            assert bits(store) == bits(whole)
            assert found.version == wanted.version
    assert found.stats.retried_runs == 1
    assert [entry.epoch for entry in found.history] == [0, 1, 2]
    assert found.history[-1].step == wanted.history[-1].step


class Killer:
    """Kills a worker as a run begins anew, and another one when that is under way."""

    def __init__(self, pids: list[int]) -> None:
        self.pids, self.heard = pids, 0

    def on_failover(self, run: Any) -> None:
        self.heard += 1
        self._kill(2)

    def on_round(self, run: Any) -> None:
        if self.heard:
            self._kill(1)

    def _kill(self, left: int) -> None:
        if len(self.pids) == left:
            os.kill(self.pids.pop(), signal.SIGKILL)


def test_workers_are_killed_while_it_is_tried_again(tmp_path):
    """To the same bits all the same; the owner of the shards is alone in the end."""
    with local_cluster(n_workers=3, threads=1) as client:
        servers = [*client.nthreads()]
        pids = [client.run(os.getpid, workers=[w])[w] for w in servers]
        rule: Any = {"optimizer": optim.Adam(0.05), "servers": servers[:1]}
        stores = [daskps.create({"w": [0.0] * 3, "b": 0.5}, **rule) for _ in "ab"]
        trained(stores[1], gradient, epochs=60)
        killer = Killer(pids[1:])
        function, how = FailsOnce(str(tmp_path / "failed")), {"callbacks": [killer]}
        found = trained(stores[0], function, epochs=60, retries=1, **how)
        assert (killer.pids, found.stats.retried_runs) == ([], 1)
        assert bits(stores[0]) == bits(stores[1])


def test_data_for_a_worker_that_has_gone_is_sent_to_another(client):
    """Dask's scheduler says so by a KeyError; the run asks anew who is there."""
    workers, there = iter([["tcp://127.0.0.1:1"], *[[*client.nthreads()]] * 9]), []
    part = DataPart(1, ([1.0],), worker="tcp://127.0.0.1:2")

    async def send(_: Any) -> None:
        await part.deliver(client, next(workers)[0])
        there.append(True)

    client.sync(sent, link_of(client), send)
    assert there
