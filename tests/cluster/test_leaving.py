"""User code that ends its process ends its call, on workers that others use too."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import ArraySpec, optim
from tests.support import store

X = np.ones((8, 10), "f4")


@pytest.fixture
def processes(client):
    """The workers' processes, which must be the same ones afterwards."""
    before = client.run(os.getpid)
    yield client
    assert client.run(os.getpid) == before


def leave(*args):
    sys.exit(3)


def interrupt(*args):
    raise KeyboardInterrupt


def callback(trainer, part):
    """Add a callback that ends the thread, to a future of each kind."""
    for future in (trainer.push_async({"w": np.ones(10)}), trainer.pull_async()):
        future.add_done_callback(leave)
        future.result()
    trainer.barrier()
    return trainer.clock


class Unreadable:
    """A reduce function that ends the process that unpickles it."""

    def __call__(self, stacked, weights):
        raise NotImplementedError

    def __reduce__(self):
        return leave, ()


@dataclass(frozen=True)
class Leaving(optim.Rule):
    """A rule that is fine until it is used a second time."""

    lr: float = 0.1

    def prepare(self, step, lr):
        if step == 2:
            leave()
        return (lr,)

    @staticmethod
    def update(w, g, lr):
        return w - lr * g


EXIT = r"called sys\.exit\(3\)"


@pytest.mark.parametrize(
    ("function", "said"), [(leave, EXIT), (interrupt, "raised KeyboardInterrupt")]
)
def test_no_verb_ends_a_worker(processes, train, function, said):
    with pytest.raises(RuntimeError, match="the initializer of parameter 'w' " + said):
        daskps.create({"w": ArraySpec((10,), "f4", function)})
    with store(processes) as found:
        grads = {"w": np.ones(10, "f4")}
        with pytest.raises(RuntimeError, match="the reduce function " + said):
            found.aggregate([grads], reduce=function)
        with pytest.raises(RuntimeError, match="the gradient " + said):
            train(found, function, X)
        with pytest.raises(RuntimeError, match="the reduce function " + said):
            train(found, lambda params, X, y: grads, X, reduce=function)
        if train.execution == "graph":
            return
        with pytest.raises(RuntimeError, match="the loop " + said):
            daskps.run(found, function, [0, 1])
        found.push(grads)


def test_no_rule_ends_a_worker(processes):
    with store(processes, optimizer=Leaving()) as found:
        found.push({"w": np.ones(10)})
        for _ in range(2):
            with pytest.raises(RuntimeError, match="prepare of the optimizer " + EXIT):
                found.push({"w": np.ones(10)})
        assert found.versions == (1, 1)
    with pytest.raises(RuntimeError, match="the schedule " + EXIT):
        store(processes, optimizer=optim.SGD(leave))


def test_nothing_that_is_unpickled_or_called_back_ends_a_worker(processes):
    with store(processes) as found:
        with pytest.raises(RuntimeError, match="what was pickled " + EXIT):
            found.aggregate([{"w": np.ones(10)}], reduce=Unreadable())
        with pytest.raises(RuntimeError, match="what was pickled " + EXIT):
            daskps.run(found, callback, [0], reduce=Unreadable())
        assert daskps.run(found, callback, [0, 1]) == [1, 1]
        future = found.pull_async()
        future.add_done_callback(leave)
        assert future.result().keys() == {"w", "b"}


@pytest.mark.parametrize("what", ["validate", "stop", "callbacks"])
def test_what_runs_at_the_client_ends_the_call(processes, what):
    class Leave:
        on_epoch = leave

    def gradient(params, X, y):
        return {"w": np.ones(10, "f4")}

    options: dict[str, Any] = {what: [Leave()] if what == "callbacks" else leave}
    with store(processes) as found, pytest.raises(RuntimeError, match=EXIT):
        daskps.train(found, gradient, X, **options)
