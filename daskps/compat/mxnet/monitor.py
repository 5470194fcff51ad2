"""A look at the tensors of a group, now and then."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from daskps.compat.mxnet import executors
from daskps.store.arguments import whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.compat.mxnet.executor_states import ExecutorStates
    from daskps.typing import Array


class TensorMonitor:
    """Numbers of parameters, auxiliary states and outputs, every few batches.

    Parameters
    ----------
    interval : int
        Between two batches that are looked at.
    stat : callable, optional
        ``stat(array)``, on the worker; by default the norm by the root of the size.
    pattern : str
        Regular expression that names match from their beginning.
    sort : bool
        Whether records are sorted by name.

    Examples
    --------
    >>> from daskps.compat import mxnet
    >>> monitor = mxnet.TensorMonitor(2, pattern="w")
    >>> monitor.toc()
    []
    """

    def __init__(
        self,
        interval: int,
        stat: Callable[[Array], Any] | None = None,
        pattern: str = ".*",
        sort: bool = False,
    ) -> None:
        self._interval = whole(interval, "interval", 1)
        self._stat, self._pattern, self._sort = stat, re.compile(pattern), sort
        self._step, self._active = 0, False
        self._groups: list[tuple[ExecutorStates, Callable[[], list[Any]]]] = []

    def watch(self, states: ExecutorStates, ran: Callable[[], list[Any]]) -> None:
        """Take a group in; its `install_monitor` calls this.

        Parameters
        ----------
        states : ExecutorStates
            The state of the executors.
        ran : callable
            Returns what its last forward has left.
        """
        self._groups.append((states, ran))

    def tic(self) -> None:
        """Begin a batch."""
        self._active = self._step % self._interval == 0
        self._step += 1

    def toc(self) -> list[tuple[int, str, Any]]:
        """End a batch.

        Returns
        -------
        list of tuple
            Step, name and value of each tensor of each executor; none for a batch that
            is not looked at.
        """
        if not self._active:
            return []
        self._active = False
        found = []
        for states, ran in self._groups:
            states.settle()
            how = executors.statistics, self._stat, self._pattern.pattern
            futures = [
                states.submit(i, *how, state, one)
                for i, (state, one) in enumerate(zip(states.held, ran(), strict=True))
                if state is not None
            ]
            for of in states.gather(futures):
                found += [(self._step - 1, name, value) for name, value in of]
        return sorted(found, key=lambda one: one[1]) if self._sort else found
