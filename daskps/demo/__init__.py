"""The command ``daskps demo``: softmax regression on handwritten digits, or words.

The digits are trained through a store on a cluster, then in this process with plain NumPy
on the same batches, and both are printed. The words are in :mod:`daskps.demo.words`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import daskps
from daskps.demo import words
from daskps.demo.digits import accuracy, difference, gradient, initial, load
from daskps.demo.options import POLICIES, RULES, TASKS, DemoError, Options
from daskps.demo.plain import train_plain
from daskps.demo.servers import cluster
from daskps.demo.waiting import WaitNotice

if TYPE_CHECKING:
    from daskps.demo.digits import Digits, Params

__all__ = ["POLICIES", "RULES", "TASKS", "DemoError", "Options", "demo", "train"]


def demo(options: Options) -> None:
    """Do a task through a store and print how it went.

    Parameters
    ----------
    options : Options
        The options of the command line.

    Raises
    ------
    DemoError
        If scikit-learn or Python's own text is missing, or the cluster cannot be
        reached, has no workers or lacks daskps.
    """
    if options.task == "words":
        words.demo(options)
    else:
        _digits(options)


def _digits(options: Options) -> None:
    digits = load(options.seed)
    with cluster(options.scheduler) as client:
        trainers = options.trainers or len(client.nthreads())
        params = train(options, digits, client, trainers)
    began = time.perf_counter()
    plain = train_plain(options, digits, trainers)
    seconds = time.perf_counter() - began
    print(f"\nheld-out accuracy {accuracy(params, digits):.4f} through the store")
    print(
        f"                  {accuracy(plain, digits):.4f} with plain NumPy in one "
        f"process, {seconds:.1f} s"
    )
    if options.sync == "bsp":
        print(f"largest difference of a weight: {difference(params, plain):.1e}")


def train(options: Options, digits: Digits, client: Any, trainers: int) -> Params:
    """Train on the digits through a store, printing as it goes.

    Parameters
    ----------
    options : Options
        The options of the command line.
    digits : Digits
        The data.
    client : distributed.Client
        Where.
    trainers : int
        Number of trainers.

    Returns
    -------
    dict of str to ndarray
        The trained parameters.
    """
    rule = RULES[options.optimizer]
    with WaitNotice("the store, whose loops are compiled the first time"):
        made = daskps.create(initial(), optimizer=rule, client=client)
    with made as store, WaitNotice("the first epoch") as waiting:
        print(f"{len(store.placement)} shards of {store.nbytes:,} bytes of parameters:")
        for shard, worker in enumerate(store.placement):
            n_weights = sum(p.stop - p.start for p in store.layout.pieces[shard])
            print(f"  shard {shard} on {worker}, {n_weights:,} weights")
        print(
            f"{trainers} trainers, {options.sync}, batches of {options.batch_size}, "
            f"{rule!r}\n"
        )
        print("epoch    loss  accuracy  rounds/s  seconds", flush=True)
        result = daskps.train(
            store,
            gradient,
            digits.X,
            digits.y,
            epochs=options.epochs,
            batch_size=options.batch_size,
            trainers=trainers,
            sync=options.policy,
            seed=options.seed,
            validate=lambda params: {"accuracy": accuracy(params, digits)},
            callbacks=[_Lines(waiting)],
        )
        trained: Params = result.weights
        return trained


class _Lines:
    """Prints a line per epoch."""

    def __init__(self, waiting: WaitNotice) -> None:
        self._waiting = waiting

    def on_epoch(self, run: Any) -> None:
        self._waiting.end()
        epoch = run.history[-1]
        print(
            f"{epoch.epoch + 1:5d}  {epoch.loss:6.4f}  "
            f"{epoch.metrics['accuracy']:8.4f}  "
            f"{run.rounds / run.epochs / epoch.seconds:8.0f}  {epoch.seconds:7.3f}",
            flush=True,
        )
