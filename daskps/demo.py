"""What ``daskps demo`` does: softmax regression on handwritten digits.

It trains through a store on a cluster, then in this process with plain NumPy on the
same batches, and prints both.
"""

from __future__ import annotations

import itertools
import logging
import signal
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Client, LocalCluster

import daskps
from daskps.errors import ProtocolError
from daskps.optim import SGD, Adagrad, Adam, AdamW, RMSprop, Rule
from daskps.training.data import batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Array = np.ndarray[Any, np.dtype[Any]]
Params = dict[str, Array]

N_CLASSES = 10
#: Rows that no trainer sees: a fifth of the 1,797 pictures.
N_HELD_OUT = 359
CONNECT_SECONDS = 10.0
RULES: dict[str, Rule] = {
    "sgd": SGD(0.5),
    "adagrad": Adagrad(0.1),
    "rmsprop": RMSprop(0.005),
    "adam": Adam(0.01),
    "adamw": AdamW(0.01),
}
POLICIES = ("bsp", "ssp", "asp")


class DemoError(Exception):
    """The demo cannot run as asked; the text is one line for the user."""


@dataclass(frozen=True)
class Options:
    """The options of ``daskps demo``."""

    scheduler: str | None = None
    sync: str = "bsp"
    staleness: int | None = None
    trainers: int | None = None
    epochs: int = 20
    batch_size: int = 32
    optimizer: str = "sgd"
    seed: int = 0

    @property
    def policy(self) -> Any:
        """What `daskps.train` takes as ``sync=``."""
        if self.staleness is None:
            return self.sync
        return daskps.SSP(self.staleness)


@dataclass(frozen=True)
class Digits:
    """Pictures of 64 pixels from 0 to 1, and the digits they show."""

    X: Array
    y: Array
    X_held_out: Array
    y_held_out: Array


def demo(options: Options) -> None:
    """Train through a store and print how it went.

    Parameters
    ----------
    options : Options
        What the command line said.

    Raises
    ------
    DemoError
        If scikit-learn is missing, or the cluster cannot be reached, has no workers
        or lacks daskps.
    """
    digits = load(options.seed)
    with cluster(options.scheduler) as client:
        trainers = options.trainers or len(client.nthreads())
        try:
            params = train(options, digits, client, trainers)
        except ProtocolError as error:
            raise DemoError(str(error)) from error
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


# -- data and model ---------------------------------------------------------------


def load(seed: int) -> Digits:
    """Return the digits that come with scikit-learn, some of them held out.

    Parameters
    ----------
    seed : int
        Which are held out.

    Returns
    -------
    Digits
        Training rows and held-out rows.

    Raises
    ------
    DemoError
        If scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise DemoError(
            f"the demo needs scikit-learn ({error}); "
            f'install it with: pip install "daskps[demo]"'
        ) from error
    X, y = load_digits(return_X_y=True)
    X = X / 16.0
    order = np.random.default_rng(seed).permutation(len(X))
    held, kept = order[:N_HELD_OUT], order[N_HELD_OUT:]
    return Digits(X[kept], y[kept], X[held], y[held])


def initial() -> Params:
    """Return the weights training begins with."""
    return {"weight": np.zeros((64, N_CLASSES)), "bias": np.zeros(N_CLASSES)}


def gradient(params: Params, X: Array, y: Array) -> tuple[float, Params]:
    """Return mean cross-entropy and mean gradients of a batch.

    Parameters
    ----------
    params : dict of str to ndarray
        "weight", shape (d, c), and "bias", shape (c,).
    X : ndarray, shape (n, d)
        Pictures.
    y : ndarray of int, shape (n,)
        Digits.

    Returns
    -------
    float, dict of str to ndarray
        The loss, and the gradients by the parameters' names.
    """
    scores = X @ params["weight"] + params["bias"]
    scores -= scores.max(axis=1, keepdims=True)
    chance = np.exp(scores)
    chance /= chance.sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    loss = -np.log(np.maximum(chance[rows, y], np.finfo(float).tiny)).mean()
    chance[rows, y] -= 1.0
    chance /= len(y)
    return float(loss), {"weight": X.T @ chance, "bias": chance.sum(axis=0)}


def accuracy(params: Params, digits: Digits) -> float:
    """Return the share of held-out pictures that are recognised."""
    scores = digits.X_held_out @ params["weight"] + params["bias"]
    return float((scores.argmax(axis=1) == digits.y_held_out).mean())


def difference(a: Params, b: Params) -> float:
    """Return the largest absolute difference of two sets of parameters."""
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


# -- through the store ------------------------------------------------------------


def train(options: Options, digits: Digits, client: Any, trainers: int) -> Params:
    """Train through a store, printing as it goes.

    Parameters
    ----------
    options : Options
        What the command line said.
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
    with daskps.create(initial(), optimizer=rule, client=client) as store:
        print(f"{len(store.placement)} shards of {store.nbytes:,} bytes of parameters:")
        for shard, worker in enumerate(store.placement):
            n_weights = sum(p.stop - p.start for p in store.layout.pieces[shard])
            print(f"  shard {shard} on {worker}, {n_weights:,} weights")
        print(
            f"{trainers} trainers, {options.sync}, batches of {options.batch_size}, "
            f"{rule!r}\n"
        )
        print("epoch    loss  accuracy  rounds/s  seconds", flush=True)
        rounds = len(list(steps(options, len(digits.X), trainers, epoch=0)))
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
            callbacks=[_Lines(rounds)],
        )
        trained: Params = result.weights
        return trained


class _Lines:
    """Prints a line per epoch."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def on_epoch(self, run: Any) -> None:
        epoch = run.history[-1]
        print(
            f"{epoch.epoch + 1:5d}  {epoch.loss:6.4f}  "
            f"{epoch.metrics['accuracy']:8.4f}  "
            f"{self._rounds / epoch.seconds:8.0f}  {epoch.seconds:7.3f}",
            flush=True,
        )


@contextmanager
def cluster(scheduler: str | None) -> Iterator[Any]:
    """Give a client of a running cluster, or of two worker processes of our own.

    Parameters
    ----------
    scheduler : str or None
        Address of a running cluster's scheduler.

    Yields
    ------
    distributed.Client
        The client. What was started ends with the context, and leaves no file.

    Raises
    ------
    DemoError
        If there is no such cluster, or it has no workers.
    """
    with ExitStack() as stack:
        address = scheduler or _two_processes(stack)
        try:
            client: Any = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError) as error:
            reason = (str(error) or repr(error)).splitlines()[0]
            raise DemoError(
                f"cannot reach a scheduler at {address}: {reason}"
            ) from error
        stack.enter_context(client)
        if not client.nthreads():
            raise DemoError(f"the cluster at {address} has no workers; start some")
        yield client


def _two_processes(stack: ExitStack) -> LocalCluster:
    """Start two worker processes on the loopback interface, to end with `stack`."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="daskps-demo-"))
    # A terminal sends Ctrl-C to all processes. Those started while interrupts wait
    # never see it, so that this one ends them in good order. Python's own helper
    # process comes first: starting it lifts the mask in the thread that does it.
    resource_tracker.ensure_running()
    with _interrupts_wait():
        cluster = LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address=None,
            # Dask listens for HTTP without a dashboard too.
            scheduler_kwargs={
                "dashboard_address": "127.0.0.1:0",
                "local_directory": folder,
            },
            local_directory=folder,
            silence_logs=logging.ERROR,
        )
        stack.callback(_close, cluster)
    return cluster


def _close(cluster: LocalCluster) -> None:
    with _interrupts_wait():
        cluster.close()


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Keep back Ctrl-C until the block has ended."""
    caught: list[int] = []
    # The mask is for what is started in the block. It does not suffice for this
    # process: any thread of a library's, made before, may take the signal.
    handler = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if caught:
            raise KeyboardInterrupt


# -- the same with plain NumPy ----------------------------------------------------


def train_plain(options: Options, digits: Digits, trainers: int) -> Params:
    """Train in this process with plain NumPy: same batches, same mathematics.

    Under BSP the gradients of a round become their mean over rows, then one step.
    Under SSP and ASP every gradient is a step; here the trainers take turns.

    Parameters
    ----------
    options : Options
        What the command line said.
    digits : Digits
        The data.
    trainers : int
        Number of trainers whose batches are used.

    Returns
    -------
    dict of str to ndarray
        The trained parameters.
    """
    params = initial()
    step = _plain_step(RULES[options.optimizer], params)
    parts = daskps.partition(digits.X, digits.y, trainers)
    for epoch in range(options.epochs):
        for turn in steps(options, len(digits.X), trainers, epoch=epoch):
            taken = [
                (parts[rank][0][rows], parts[rank][1][rows]) for rank, rows in turn
            ]
            if options.sync == "bsp":
                grads = [gradient(params, X, y)[1] for X, y in taken]
                step(_mean(grads, [len(y) for _, y in taken]))
            else:
                for X, y in taken:
                    step(gradient(params, X, y)[1])
    return params


def steps(
    options: Options, n: int, trainers: int, *, epoch: int
) -> Iterator[list[tuple[int, Any]]]:
    """Return for each round of an epoch the ranks that have a batch, and its rows.

    Parameters
    ----------
    options : Options
        Batch size and seed.
    n, trainers : int
        Training rows, and trainers they are dealt out to.
    epoch : int
        Number of the epoch, from 0.

    Returns
    -------
    iterator of list of tuple
        Pairs of rank and row numbers within that rank's part.
    """
    size, seed = options.batch_size, options.seed
    of_ranks = [
        batches(len(part), size, seed=seed, epoch=epoch, rank=rank)
        for rank, (part, _) in enumerate(daskps.partition(np.empty(n), None, trainers))
    ]
    for turn in itertools.zip_longest(*of_ranks):
        yield [(rank, rows) for rank, rows in enumerate(turn) if rows is not None]


def _mean(grads: Sequence[Params], rows: Sequence[int]) -> Params:
    return {
        name: np.average([g[name] for g in grads], axis=0, weights=rows)
        for name in grads[0]
    }


def _plain_step(rule: Rule, params: Params) -> Callable[[Params], None]:
    """Return a function that applies gradients to `params` in place."""
    if isinstance(rule, SGD):
        rate = rule.rate(0)

        def descend(grads: Params) -> None:
            for name, grad in grads.items():
                params[name] -= rate * grad

        return descend

    slots = {
        name: [np.full_like(w, rule.slot_init.get(s, 0.0)) for s in rule.slots]
        for name, w in params.items()
    }
    count = itertools.count(1)

    def update(grads: Params) -> None:
        scalars = rule.scalars(next(count))
        for name, grad in grads.items():
            w, *slots[name] = rule.update(params[name], grad, *slots[name], *scalars)
            params[name] = w

    return update
