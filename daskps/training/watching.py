"""The progress of a run for those that have not begun it."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from daskps import config
from daskps.cluster.caller.link import current_link
from daskps.cluster.caller.scheduler_lost import scheduler_named
from daskps.cluster.caller.user_calls import Pump, UserCall, call_directly
from daskps.epochs import Epochs
from daskps.errors import DaskPSError
from daskps.store.lifecycle import Opening, open  # noqa: A004 - as daskps.open
from daskps.store.store import ParameterStore
from daskps.tracebacks import entrance
from daskps.training.callbacks import ProgressBar
from daskps.training.progress import TrainedBy
from daskps.training.result import RunStatus

if TYPE_CHECKING:
    from typing import TextIO

    from daskps.cluster.caller.link import Link

#: Between two looks at a run.
PAUSE_SECONDS = 1.0


@entrance
def progress(
    store: ParameterStore | str,
    *,
    client: Any = None,
    file: TextIO | None = None,
    timeout: Any = None,
) -> None:
    """Show the progress of the run that trains a store, until it is over.

    Whoever has begun it: another client, or a task. Ctrl-C ends the bar, not the run.
    Returns at once where no run goes on.

    Parameters
    ----------
    store : ParameterStore or str
        The store, or its name.
    client : distributed.Client, optional
        The client of a store by name; the current one by default.
    file : text stream, optional
        Where the bar is drawn, as for :class:`ProgressBar`.
    timeout : float, str or None
        Seconds or a duration such as "30s"; by default it watches for as long as the
        run takes.

    Returns
    -------
    None
        With an asynchronous client an awaitable.

    Raises
    ------
    TypeError
        For what is neither a store nor a name.
    StoreNotFoundError, StoreClosedError, SchedulerLostError
        If there is no such store, or its handle was closed before. The bar of a store
        that is deleted meanwhile ends.
    TimeoutError
        If the run takes longer.

    Examples
    --------
    >>> store = daskps.create({"w": np.zeros(2)})
    >>> daskps.progress(store)
    """
    if not isinstance(store, str | ParameterStore):
        raise TypeError(
            f"progress shows a ParameterStore, or one by its name, found {store!r:.60}"
        )
    seconds, bar = config.deadline(timeout), ProgressBar(file)
    found: Any = open(store, client=client) if isinstance(store, str) else store
    link = current_link(client) if isinstance(store, str) else store._bind()
    what = f"the progress of store {store if isinstance(store, str) else store.name!r}"

    async def shown(call: UserCall) -> None:
        try:
            async with scheduler_named(link, what):
                follow = partial(_follow, link, found, bar, call)
                await link.within(follow, seconds, what)
        finally:
            if link.asynchronous:
                bar.close()

    if link.asynchronous:
        return cast("None", shown(call_directly))
    try:
        return Pump().drive(link, shown)
    finally:
        bar.close()


async def _follow(link: Link, found: Any, bar: ProgressBar, call: UserCall) -> None:
    """Draw a bar again and again, as long as one run goes on."""
    store: ParameterStore = await found if isinstance(found, Opening) else found
    shards, run, is_over = await store._attach(link), 0, False
    news: dict[str, Any] | None = None
    deadline = partial(store._deadline, config.DEFAULT, "the progress")
    while not is_over:
        now = await link.directory("running", uid=store.uid)
        # One that has ended since the last look has come further: it is looked at again.
        is_over, news = not now, now or news
        if not news or run not in (0, news["run"]):
            break
        try:
            rows = await shards.control("stats", deadline())
        except (DaskPSError, TimeoutError):
            # A shard is away: the run waits for it too, or ends.
            rows = []
        if places := [(r["version"], Epochs(*r["epochs"])) for of in rows for r in of]:
            if not run:
                run, first = news["run"], min(places)[0]
                status = RunStatus(store, 0)
                await call(bar.on_start, status)
            _advance(status, news, places, first)
            await call(bar.on_round, status)
        await asyncio.sleep(0 if is_over else PAUSE_SECONDS)
    if run:
        await call(bar.on_stop, status)


def _advance(
    status: RunStatus,
    news: dict[str, Any],
    places: list[tuple[int, Epochs]],
    first: int,
) -> None:
    """Note how far shards are: in their epochs, or in versions since the first look."""
    at = min((epochs for _, epochs in places), key=lambda epochs: epochs.rounds)
    status.loss = news["loss"]
    if not (at.per_epoch and news["described"]):
        versions = [version - first for version, _ in places]
        status.advance(max(versions), min(versions))
        return
    run = TrainedBy.from_json(json.loads(news["described"]))
    status.first, status.epochs = at.ended, run.epochs
    status.rounds = (run.epochs - at.first) * at.per_epoch
    status.advance(max(epochs.clock for _, epochs in places), at.clock)
