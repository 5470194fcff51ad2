"""Running a program in the workers of one or several groups."""

from __future__ import annotations

import contextvars
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps.cluster.caller.link import blocking_link
from daskps.compat import launch as base
from daskps.compat.singa.group import WorkerGroup
from daskps.compat.singa.grouped import SYSTEM
from daskps.compat.singa.worker import Following, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.compat.launch import Participant
    from daskps.store.store import ParameterStore


def launch(
    main: Callable[[WorkerGroup], Any],
    groups: WorkerGroup | Sequence[WorkerGroup],
    *,
    updater: Any,
    servers: Any = "auto",
    shards: int | None = None,
    client: Any = None,
    timeout: Any = None,
) -> list[Any]:
    """Run a program in all workers of one group, or of several that train apart.

    Parameters
    ----------
    main : callable
        ``main(group)``, called in each worker. The methods of the group know which.
    groups : WorkerGroup or sequence of WorkerGroup
        One group, or several. Each of several has a server of its own and is synchronous
        inside. Every `sync_freq` updates it adds what it has done to a store of all
        groups, and takes over what the others have done.
    updater : Rule or mapping of str to Rule
        How a server changes parameters by the mean gradients, as `optimizer` of
        :func:`daskps.create`.
    servers, shards
        As of :func:`daskps.create`: where the servers are.
    client : distributed.Client, optional
        The client; the current one by default.
    timeout : float, str or None
        Seconds or a duration for all of it; None for none.

    Returns
    -------
    list
        The result of each worker's program; of several groups a list for each.

    Raises
    ------
    TypeError, ValueError
        For what are no groups, groups of other parameters or warm-ups, and `sync_freq` or
        `warmup_steps` of a group that is alone.
    Exception
        The error of a program, with its rank in a note. All groups end then.

    Examples
    --------
    Two groups of one worker each, which sync after each update:

    >>> from daskps.compat import singa
    >>> net = [singa.Layer("fc", "linear", params={"w": np.zeros(1)})]
    >>> groups = [singa.WorkerGroup(net, 1, batch=1, sync_freq=1) for _ in range(2)]
    >>> def main(group):
    ...     group.put_own()
    ...     group.update("w", np.ones(1))
    ...     return len(group.collect("w"))
    >>> singa.launch(main, groups, updater=daskps.optim.SGD(0.5))
    [[1], [1]]
    """
    several = not isinstance(groups, WorkerGroup)
    listed = list(groups) if not isinstance(groups, WorkerGroup) else [groups]
    _check(main, listed)
    blocking_link("singa.launch waits for its trainers", client)
    how = {"servers": servers, "shards": shards, "client": client}
    with ExitStack() as stack:
        stores = [_store(listed[0], stack, optimizer=updater, **how) for _ in listed]
        master = _store(listed[0], stack, **how) if len(listed) > 1 else None
        calls = [
            partial(
                base.launch,
                SYSTEM,
                _Program(main, group, number, master),
                [None] * group.n_workers,
                store=store,
                client=client,
                timeout=timeout,
            )
            for number, (group, store) in enumerate(zip(listed, stores, strict=True))
        ]
        found = [calls[0]()] if len(calls) == 1 else _side_by_side(calls, stack)
    return found if several else found[0]


def _check(main: Any, groups: Sequence[Any]) -> None:
    """Refuse what cannot be launched."""
    if not callable(main):
        raise TypeError(f"main is a function main(group), found {main!r:.60}")
    if not groups or not all(isinstance(group, WorkerGroup) for group in groups):
        raise TypeError(
            f"groups is a WorkerGroup or a list of them, found {groups!r:.60}"
        )
    first = groups[0]
    if len(groups) == 1 and (first.sync_freq != 1 or first.warmup_steps):
        raise ValueError(
            "a group that is alone has none to sync with or to be waited for by: leave "
            "sync_freq and warmup_steps, or launch several groups"
        )
    shapes = {name: value.shape for name, value in first.params.items()}
    for number, group in enumerate(groups):
        if {name: value.shape for name, value in group.params.items()} != shapes:
            raise ValueError(f"group {number} has other parameters than the first one")
        if group.warmup_steps != first.warmup_steps:
            raise ValueError(
                f"group {number} has warmup_steps={group.warmup_steps}, the first one "
                f"{first.warmup_steps}; all wait for the same"
            )


def _store(group: WorkerGroup, stack: ExitStack, **how: Any) -> ParameterStore:
    """Return a store of a group's parameters, none of which was put yet."""
    empty = {name: np.zeros_like(value) for name, value in group.params.items()}
    store: ParameterStore = stack.enter_context(daskps.create(empty, **how))
    return store


def _side_by_side(calls: Sequence[Callable[[], Any]], stack: ExitStack) -> list[Any]:
    """Launch groups at the same time; where one fails the others end too."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(contextvars.copy_context().run, call) for call in calls]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            # Without their stores those that are left end at once.
            if not all(f.done() and not f.exception() for f in futures):
                stack.close()
        for future in done:
            future.result()
        return [future.result() for future in futures]


class _Program:
    """The program that the workers of one group run.

    Parameters
    ----------
    main : callable
        The user's program.
    group : WorkerGroup
        The group of the workers.
    number : int
        Number of the group.
    master : ParameterStore or None
        Where there are several groups, the store of all of them.
    """

    def __init__(
        self,
        main: Callable[[WorkerGroup], Any],
        group: WorkerGroup,
        number: int,
        master: ParameterStore | None,
    ) -> None:
        self._main, self._group = main, group
        self._number, self._master = number, master

    def __call__(self, participant: Participant, part: Any) -> Any:
        """Run it in one worker, and send what it has left."""
        group, following = self._group, None
        if self._master is not None:
            following = Following(
                self._master,
                self._number,
                participant.rank,
                group.sync_freq,
                group.warmup_steps,
            )
        # A group answers questions about this worker from here.
        rows = group.rows
        worker = Worker(
            participant.trainer, group.owned, rows.stop - rows.start, following
        )
        participant.kept[SYSTEM] = worker
        found = self._main(group)
        worker.end()
        return found
