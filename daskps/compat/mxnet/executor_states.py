"""The parameters of a network on each worker of a group, and of groups that share them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster import upstream
from daskps.cluster.caller.link import blocking_link
from daskps.compat.mxnet import executors
from daskps.errors import NotEnoughWorkersError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.typing import Array


class ExecutorStates:
    """The state of executors between two calls, as futures pinned to their workers.

    Parameters
    ----------
    contexts : sequence of str
        Address of the worker of each.
    client : distributed.Client, optional
        The client; the current one by default.
    """

    def __init__(self, contexts: Sequence[str], client: Any) -> None:
        link = blocking_link("a group of executors waits for its workers", client)
        self.client: Any = link.client
        self.contexts = list(contexts)
        there = self._workers()
        unknown = [context for context in self.contexts if context not in there]
        if unknown or not self.contexts:
            raise ValueError(
                f"contexts are addresses of workers, one for each executor, found "
                f"{unknown or self.contexts}; there are {sorted(there)}"
            )
        #: (parameters, auxiliary states) of each executor, or None before they are set.
        self.held: list[Any] = [None] * len(self.contexts)
        #: The results of the last backward.
        self.ran_back: list[Any] = [None] * len(self.contexts)
        #: The state of executors before their last forward, and that which it has left.
        self._before: list[Any] = [None] * len(self.contexts)
        #: Shape of each parameter and auxiliary state.
        self.shapes: dict[str, tuple[int, ...]] = {}

    def _workers(self) -> list[str]:
        return list(self.client.nthreads())

    def submit(self, i: int, function: Callable[..., Any], *args: Any) -> Any:
        """Have one executor's worker do something; another one if that is gone."""
        return self.client.submit(
            function,
            *args,
            workers=[self.contexts[i]],
            allow_other_workers=True,
            pure=False,
        )

    def send(self, i: int, value: Any) -> Any:
        """Bring something to one executor's worker.

        Raises
        ------
        NotEnoughWorkersError
            If that is gone.
        """
        context = self.contexts[i]
        try:
            [future] = self.client.scatter([value], workers=[context], hash=False)
        except (KeyError, OSError) as error:  # Dask's, for an address without a worker
            raise _lost(context) from error
        return future

    def gather(self, futures: Sequence[Any]) -> list[Any]:
        """Wait for results.

        Raises
        ------
        NotEnoughWorkersError
            If a worker is gone.
        """
        try:
            found: list[Any] = self.client.gather(list(futures))
        except upstream.LOSSES as error:
            there = self._workers()
            gone = [context for context in self.contexts if context not in there]
            raise _lost(", ".join(gone)) from error
        return found

    def advance(self, i: int, ran: Any) -> None:
        """Take what a forward has made of auxiliary states, unless it fails."""
        before = self.held[i]
        self._before[i] = before, ran
        self.held[i] = self.submit(i, executors.with_aux, before, ran)

    def settle(self) -> None:
        """Wait for what runs, and forget what has failed: its caller hears of it."""
        for i, before in enumerate(self._before):
            if before is not None and before[1].exception() is not None:
                self.held[i] = before[0]
            self._before[i] = None
        for i, back in enumerate(self.ran_back):
            if back is not None and back.exception() is not None:
                self.ran_back[i] = None

    def set(self, params: Mapping[str, Array], aux: Mapping[str, Array]) -> None:
        """Copy arrays to all executors.

        Raises
        ------
        ValueError
            For another shape than before.
        """
        self.settle()
        new = {**params, **aux}
        for name, array in new.items():
            if self.shapes.get(name, array.shape) != array.shape:
                raise ValueError(
                    f"{name!r} has shape {self.shapes[name]}, found {array.shape}"
                )
        for i, state in enumerate(self.held):
            sent = self.send(i, (dict(params), dict(aux)))
            self.held[i] = self.submit(i, executors.merged, state, sent)
        self.shapes |= {name: array.shape for name, array in new.items()}

    def mean(self) -> dict[str, Array]:
        """Return the mean of what executors hold, by name."""
        self.settle()
        states = self.gather(self.held)
        found: dict[str, Array] = {}
        for name in self.shapes:
            replicas = [{**params, **aux}[name] for params, aux in states]
            found[name] = np.mean(replicas, axis=0)
        return found


def _lost(context: str) -> NotEnoughWorkersError:
    return NotEnoughWorkersError(
        f"worker {context or 'of one'} of an executor is gone, and what it held; make a "
        f"group on those that are there, and set its parameters again"
    )
