"""Helpers for tests of code that uses daskps; pytest is imported where it is asked for.

`cluster` and `client` are fixtures, see the page for library authors: ``from
daskps.testing import client, cluster`` in a ``conftest.py``.

Examples
--------
>>> from daskps.testing import updated
>>> updated(daskps.optim.SGD(0.1), [1.0], [[2.0], [3.0]])
array([0.5])
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from distributed import Client, LocalCluster

import daskps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from daskps.typing import Array

__all__ = [
    "PATIENCE",
    "PushOracle",
    "cleaned",
    "gen_cluster",
    "kill_owner",
    "kill_worker",
    "local_cluster",
    "until",
    "updated",
]

#: How long a test waits for other processes, in seconds. On a machine of two cores with
#: a load of ten everything takes five times as long; whatever takes longer hangs.
PATIENCE = 240.0
#: Bits of a float64 that sums of powers of two fill exactly.
_BITS = 52
#: Every so many pushes one goes to some of the shards only.
_PARTIAL = 5


def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Wait until a condition of another process holds.

    Parameters
    ----------
    condition : callable
        Asked without arguments, again and again.
    seconds : float
        For how long.

    Returns
    -------
    object
        The first result of the condition that counts as true.

    Raises
    ------
    AssertionError
        If there was none in time.

    Examples
    --------
    >>> until(lambda: len(client.nthreads()) == 2)
    True
    """
    event, deadline = threading.Event(), time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {condition}")
        event.wait(0.01)
    return found


@contextmanager
def local_cluster(
    n_workers: int = 2, threads: int = 2, **options: Any
) -> Iterator[Client]:
    """Start a cluster of real worker processes on loopback, for as long as a block runs.

    Parameters
    ----------
    n_workers, threads : int
        Number of workers, and of the threads of each.
    **options
        Others of ``distributed.LocalCluster``.

    Yields
    ------
    distributed.Client
        Its client, which is the current one in the block.

    Examples
    --------
    >>> with local_cluster(1) as other:
    ...     len(other.nthreads())
    1
    """
    given = {
        "n_workers": n_workers,
        "threads_per_worker": threads,
        # Not None: that opens Dask's default port on all interfaces.
        "dashboard_address": "127.0.0.1:0",
        "host": "127.0.0.1",
        "silence_logs": 50,
        # So often the scheduler is told of the cluster, which nobody asks for.
        "scheduler_sync_interval": "1 minute",
        **options,
    }
    with LocalCluster(**given) as made, Client(made) as client:
        yield client


@contextmanager
def cleaned(client: Client) -> Iterator[None]:
    """Make a client the current one; free the stores that were made meanwhile.

    Parameters
    ----------
    client : distributed.Client
        The client of a cluster that goes on.

    Yields
    ------
    None
        In the block.

    Examples
    --------
    >>> with cleaned(client):
    ...     _ = daskps.create({"w": np.zeros(2)}, name="forgotten")
    >>> "forgotten" in [info.name for info in daskps.list_stores()]
    False
    """
    with client.as_current():
        before = {info.uid for info in daskps.list_stores()}
        yield
        for info in daskps.list_stores():
            if info.uid not in before:
                # A session store may go with its last handle, just now.
                with suppress(daskps.StoreClosedError, daskps.StoreNotFoundError):
                    daskps.ParameterStore(info.uid, info.name).delete()


def _cluster() -> Iterator[Client]:
    with local_cluster() as client:
        yield client


def _client(cluster: Client) -> Iterator[Client]:
    with cleaned(cluster):
        yield cluster


def __getattr__(name: str) -> Any:
    """Make a fixture of pytest once somebody asks for it."""
    scopes: dict[str, Any] = {"client": "function", "cluster": "session"}
    if name not in scopes:
        raise AttributeError(f"module 'daskps.testing' has no attribute {name!r}")
    import pytest

    return pytest.fixture(scope=scopes[name])(globals()[f"_{name}"])


def gen_cluster(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """Decorate a coroutine as `distributed.utils_test.gen_cluster` does.

    Dask's closes every client it can find, counts what it finds open and kills all
    processes; clusters that other tests of this process go on with are hidden from it.

    Parameters
    ----------
    *args, **kwargs
        As Dask's, such as ``client=True``.

    Returns
    -------
    callable
        A decorator of a test.

    Examples
    --------
    >>> @gen_cluster(client=True)
    ... async def test_push(c, s, a, b):
    ...     async with daskps.aio.create({"w": np.zeros(2)}) as store:
    ...         assert await store.add({"w": np.ones(2)}) == 1
    """
    from distributed import utils_test
    from distributed.client import _current_client, _global_clients
    from distributed.comm.core import Comm

    kwargs["clean_kwargs"] = {"threads": False, "instances": False, "processes": False}
    decorate = utils_test.gen_cluster(*args, **kwargs)

    def decorator(test: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = decorate(test)

        @functools.wraps(wrapped)
        def alone(*args: Any, **kwargs: Any) -> Any:
            instances = Comm._instances
            clients, comms = dict(_global_clients), list(instances)
            _global_clients.clear()
            instances.clear()
            current = _current_client.set(None)
            try:
                with mock.patch.object(utils_test, "term_or_kill_active_children"):
                    return wrapped(*args, **kwargs)
            finally:
                _current_client.reset(current)
                _global_clients.update(clients)
                instances.update(comms)

        return alone

    return decorator


def _place() -> tuple[int, str, int]:
    """Return the number of this process, and where it is one."""
    return os.getpid(), os.uname().nodename, os.stat("/proc/self/ns/pid").st_ino


def kill_worker(client: Client, worker: str) -> None:
    """Kill the process of a worker as the system does, and return once that is known.

    Parameters
    ----------
    client : distributed.Client
        The client of a cluster whose workers are processes of this machine.
    worker : str
        The worker's address.

    Raises
    ------
    ValueError
        For a worker within this process or elsewhere, and for what is none.

    Examples
    --------
    >>> worker = next(iter(client.nthreads()))
    >>> kill_worker(client, worker)
    Traceback (most recent call last):
    ValueError: worker inproc://... is no other process of this machine; start...
    """
    if worker not in client.nthreads():
        raise ValueError(f"no worker {worker!r}; there are {[*client.nthreads()]}")
    [(pid, *place)] = client.run(_place, workers=[worker]).values()
    own, *here = _place()
    # The number may be that of any other process elsewhere.
    if pid == own or place != here:
        raise ValueError(
            f"worker {worker} is no other process of this machine; start workers as "
            f"such, as local_cluster() does"
        )
    os.kill(pid, signal.SIGKILL)
    until(lambda: worker not in client.nthreads())


def kill_owner(client: Client, store: daskps.ParameterStore, shard: int = 0) -> str:
    """Kill the worker that owns a shard of a store; see :func:`kill_worker`.

    Another worker of the machine adopts the shard, with all that was pushed. Where
    ``daskps.carriers.machine`` is false as the workers start, the shard is lost, as
    with its machine.

    Parameters
    ----------
    client : distributed.Client
        The client of the store's cluster.
    store : ParameterStore
        The store.
    shard : int
        Number of the shard.

    Returns
    -------
    str
        The address that the worker had.

    Examples
    --------
    >>> with local_cluster() as other:
    ...     store = daskps.create({"w": np.zeros(4)})
    ...     version = store.add({"w": np.ones(4)})
    ...     owner = kill_owner(other, store)
    ...     store.pull(min_version=version)["w"], owner in store.placement
    (array([1., 1., 1., 1.]), False)
    """
    worker: str = store.placement[shard]
    kill_worker(client, worker)
    return worker


def updated(rule: daskps.optim.Rule, w: Any, gradients: Iterable[Any]) -> Array:
    """Return what a rule makes of weights, worked out by NumPy alone in float64.

    Parameters
    ----------
    rule : daskps.optim.Rule
        An update rule, also one of your own.
    w : array_like
        The weights at the beginning.
    gradients : iterable of array_like
        One gradient for each step.

    Returns
    -------
    ndarray of float64
        The weights after them.

    Examples
    --------
    >>> rule = daskps.optim.SGD(0.5, momentum=0.5)
    >>> updated(rule, [0.0, 1.0], [[1.0, 0.0], [1.0, 2.0]])
    array([-1.25,  0.  ])
    """
    w, first = np.array(w, np.float64), rule.slot_init
    slots = [np.full(w.shape, first.get(name, 0.0)) for name in rule.slots]
    for step, g in enumerate(gradients, 1):
        new = rule.update(w, np.asarray(g, np.float64), *slots, *rule.scalars(step))
        w, *slots = new if isinstance(new, tuple) else (new,)
    return np.asarray(w)


@dataclass(frozen=True)
class PushOracle:
    """Pushes that leave a mark each: the weights tell which ones a store has applied.

    Each sets one bit of the parameter of each shard it goes to: :meth:`faults` names
    the pushes that only some of their shards have, and :meth:`total` lacks those that
    were lost or applied twice. The store has the rule ``SGD(1.0)`` and as many shards
    as the oracle.

    Parameters
    ----------
    shards, producers, pushes : int
        How many there are; pushes are those of one producer.

    Examples
    --------
    >>> oracle = PushOracle(shards=2, producers=1, pushes=3)
    >>> store = daskps.create(
    ...     oracle.params(), shards=2, optimizer=daskps.optim.SGD(1.0)
    ... )
    >>> for push in range(2):
    ...     _ = store.push(oracle.grads(0, push))
    >>> oracle.faults(store.pull()), oracle.total(store.pull())
    ([], 2)
    >>> _ = store.add({"o1": -oracle.grads(0, 2)["o1"]})
    >>> oracle.faults(store.pull())
    ['push 2 of 0 is on [1] only']
    """

    shards: int
    producers: int
    pushes: int

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the parameter of one shard: a row per producer."""
        return self.producers, -(-self.pushes // _BITS)

    def params(self) -> dict[str, Any]:
        """Return one parameter per shard; of one size, so that each fills one."""
        return {f"o{i}": np.zeros(self.shape) for i in range(self.shards)}

    def _touched(self, push: int) -> list[int]:
        """Return the shards a push goes to."""
        every = list(range(self.shards))
        if push % _PARTIAL == 0 and self.shards > 1:
            every.remove(push // _PARTIAL % self.shards)
        return every

    def grads(self, producer: int, push: int) -> dict[str, Array]:
        """Return the gradients of a push.

        Parameters
        ----------
        producer, push : int
            Their numbers, from 0.

        Returns
        -------
        dict of str to ndarray
            By the names of :meth:`params`.
        """
        grad = np.zeros(self.shape)
        grad[producer, push // _BITS] = 2.0 ** (push % _BITS)
        return {f"o{i}": grad for i in self._touched(push)}

    def contained(self, values: Mapping[str, Any]) -> list[list[set[int]]]:
        """Return which pushes each shard contains.

        Parameters
        ----------
        values : mapping of str to array_like
            As of :meth:`faults`.

        Returns
        -------
        list of list of set of int
            For each producer and each shard their numbers.
        """
        return [
            [_bits(-values[f"o{i}"][p]) for i in range(self.shards)]
            for p in range(self.producers)
        ]

    def faults(self, values: Mapping[str, Any]) -> list[str]:
        """Return what is inconsistent.

        Parameters
        ----------
        values : mapping of str to array_like
            The parameters of the store, of one moment: a snapshot's, or a pull's while
            nobody pushes.

        Returns
        -------
        list of str
            A line for each push that not all of its shards contain.
        """
        found = []
        for producer, shards in enumerate(self.contained(values)):
            for push in set().union(*shards):
                having = [i for i, of in enumerate(shards) if push in of]
                if having != self._touched(push):
                    found.append(f"push {push} of {producer} is on {having} only")
        return found

    def total(self, values: Mapping[str, Any]) -> int:
        """Return how many pushes the values contain.

        Parameters
        ----------
        values : mapping of str to array_like
            As of :meth:`faults`.

        Returns
        -------
        int
            Of all producers.
        """
        return sum(len(set().union(*shards)) for shards in self.contained(values))


def _bits(words: Array) -> set[int]:
    bits = words.astype(np.int64)[:, None] >> np.arange(_BITS) & 1
    return set(np.flatnonzero(bits).tolist())
