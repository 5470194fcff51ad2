"""The launch of workers, their numbers, and the calls that they make together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.compat import launch as base
from daskps.compat.behind import Behind, behind
from daskps.compat.multiverso.updaters import updater_of
from daskps.store.arguments import flag, whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps import optim
    from daskps.compat.launch import Participant
    from daskps.typing import Array

_SYSTEM = "multiverso"


class TableWorker:
    """A worker's place in its launch, and the adds that it has not waited for.

    Parameters
    ----------
    here : Participant
        Its place among the others.
    rule : Rule or None
        The rule for differences; None for plus.
    servers : object
        As :func:`daskps.create` takes it.
    sync : bool
        Whether all get the same, get for get.
    adds : Behind
        Its adds that it has not waited for.
    """

    def __init__(
        self,
        here: Participant,
        rule: optim.Rule | None,
        servers: Any,
        *,
        sync: bool,
        adds: Behind,
    ) -> None:
        self.here, self.rule, self.servers, self.sync = here, rule, servers, sync
        self.adds = adds
        self.is_open = self.is_over = False

    def get(self, read: Callable[[], Any]) -> Any:
        """Read something that contains what this worker has added."""
        self.adds.settle()
        if not self.sync:
            return read()
        # Nobody adds between the two, so all of them read the same.
        self.here.meet()
        found = read()
        self.here.meet()
        return found


def this_worker() -> TableWorker:
    """Return what this worker knows, between `init` and `shutdown`.

    Raises
    ------
    RuntimeError
        Outside of that.
    """
    found: TableWorker = base.here(_SYSTEM).kept["worker"]
    if found.is_over:
        raise RuntimeError("this worker has called multiverso.shutdown()")
    if not found.is_open:
        raise RuntimeError("call multiverso.init() before anything else in main")
    return found


def launch(  # noqa: PLR0913 - the public contract
    main: Callable[[], Any],
    n_workers: int,
    *,
    sync: bool = False,
    updater: Any = "default",
    workers: Any = None,
    servers: Any = None,
    client: Any = None,
    timeout: Any = None,
) -> list[Any]:
    """Run a program in workers of Multiverso's kind; here they are trainers.

    Parameters
    ----------
    main : callable
        ``main()``, which calls :func:`init` first. It finds its own part of the data by
        :func:`worker_id`.
    n_workers : int
        How many.
    sync : bool
        Whether the i-th `get` of all workers is the same: each waits for the others. All
        then make the same sequence of adds and gets.
    updater : {"default", "sgd", "momentum", "adagrad"} or Rule
        The rule for differences: "default" adds them, "sgd" subtracts them; a rule of
        :mod:`daskps.optim` takes them as gradients.
    workers : str or iterable of str, optional
        Addresses of the Dask workers that run `main`; all by default.
    servers : str or iterable of str, optional
        The Dask workers that hold tables, as in :func:`daskps.create`; all by default.
    client : distributed.Client, optional
        The client; the current one by default.
    timeout : float, str or None
        Seconds or a duration for all of it; None for none.

    Returns
    -------
    list
        The results of `main`, by worker.

    Raises
    ------
    ValueError, TypeError
        For arguments that cannot be.
    Exception
        The error of `main`.

    Examples
    --------
    >>> from daskps.compat import multiverso
    >>> def main():
    ...     multiverso.init()
    ...     return multiverso.worker_id(), multiverso.num_workers()
    >>> multiverso.launch(main, 2)
    [(0, 2), (1, 2)]
    """
    if not callable(main):
        raise TypeError(f"main is a function main(), found {main!r:.60}")
    n = whole(n_workers, "n_workers", 1)
    with_rule, together = updater_of(updater), flag(sync, "sync")
    where = "auto" if servers is None else servers
    body = partial(_work, main, rule=with_rule, servers=where, sync=together)
    parts = [None] * n
    return base.launch(
        _SYSTEM, body, parts, workers=workers, client=client, timeout=timeout
    )


def _work(main: Callable[[], Any], here: Participant, part: Any, **how: Any) -> Any:
    """Call the program of one worker, and wait for what it has added."""
    del part
    with behind("daskps-multiverso") as adds:
        here.kept["worker"] = TableWorker(here, adds=adds, **how)
        return main()


def init() -> None:
    """Begin; once, before anything else.

    Raises
    ------
    RuntimeError
        The second time, and outside of a launch.

    Examples
    --------
    >>> from daskps.compat import multiverso
    >>> multiverso.launch(multiverso.init, 2)
    [None, None]
    """
    mine: TableWorker = base.here(_SYSTEM).kept["worker"]
    if mine.is_open:
        raise RuntimeError("multiverso.init() is called once for each worker")
    mine.is_open = True


def shutdown() -> None:
    """End this worker's part; once, after training. The others no longer wait for it.

    Raises
    ------
    RuntimeError
        The second time, and before :func:`init`.
    RunCancelledError, ShardLostError
        For what its name says.

    Examples
    --------
    >>> from daskps.compat import multiverso
    >>> def main():
    ...     multiverso.init()
    ...     if multiverso.is_master():
    ...         return multiverso.shutdown()
    ...     return multiverso.barrier()
    >>> multiverso.launch(main, 2)
    [None, None]
    """
    mine = this_worker()
    mine.adds.settle()
    mine.here.trainer.finish()
    mine.is_over = True


def barrier() -> None:
    """Wait until all workers have reached it that have not ended.

    All adds of this worker are in its tables then.

    Raises
    ------
    RuntimeError
        Before :func:`init` and after :func:`shutdown`.
    RunCancelledError, ShardLostError
        For what its name says.

    Examples
    --------
    >>> from daskps.compat import multiverso
    >>> def main():
    ...     multiverso.init()
    ...     multiverso.barrier()
    >>> multiverso.launch(main, 2)
    [None, None]
    """
    mine = this_worker()
    mine.adds.settle()
    mine.here.meet()


def num_workers() -> int:
    """Return how many workers there are.

    Returns
    -------
    int
        Also those that have ended.

    Examples
    --------
    >>> from daskps.compat import multiverso
    >>> def main():
    ...     multiverso.init()
    ...     return multiverso.num_workers()
    >>> multiverso.launch(main, 2)
    [2, 2]
    """
    return this_worker().here.size


def worker_id() -> int:
    """Return the number of this worker.

    Returns
    -------
    int
        From 0.

    Examples
    --------
    >>> from daskps.compat import multiverso
    >>> def main():
    ...     multiverso.init()
    ...     return multiverso.worker_id()
    >>> multiverso.launch(main, 2)
    [0, 1]
    """
    return this_worker().here.rank


def is_master() -> bool:
    """Return whether this is worker 0, whose first values count.

    Returns
    -------
    bool
        Whether it is.

    Examples
    --------
    >>> from daskps.compat import multiverso
    >>> def main():
    ...     multiverso.init()
    ...     return multiverso.is_master()
    >>> multiverso.launch(main, 2)
    [True, False]
    """
    return worker_id() == 0


def aggregate(data: Array) -> Array:
    """Sum an array over all workers, in place; all of them call it.

    Parameters
    ----------
    data : ndarray
        Of one shape and dtype in all workers; it becomes the sum.

    Returns
    -------
    ndarray
        `data` itself.

    Raises
    ------
    TypeError, ValueError
        For what is no array that can be written, and where they differ.
    RunCancelledError, ShardLostError
        For what its name says.

    Examples
    --------
    >>> from daskps.compat import multiverso
    >>> def main():
    ...     multiverso.init()
    ...     return multiverso.aggregate(np.ones(2)).tolist()
    >>> multiverso.launch(main, 3)
    [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """
    mine = this_worker()
    if not isinstance(data, np.ndarray):
        raise TypeError(f"data is an array, found {type(data).__name__}")
    if not data.flags.writeable:
        raise ValueError("data is read-only; give an array to write the sum to")
    data[...] = mine.here.gather({"aggregate": data})[0]["aggregate"]
    return data
