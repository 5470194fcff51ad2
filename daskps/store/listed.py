"""The stores of a cluster by name: listing and deleting them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from dask.utils import format_bytes

from daskps import config
from daskps.cluster.caller.finding import ensure_directory
from daskps.cluster.caller.link import current_link
from daskps.cluster.caller.scheduler_lost import scheduler_named
from daskps.store.lifecycle import Opening, open  # noqa: A004 - as daskps.open
from daskps.store.repr import TableList
from daskps.tracebacks import entrance

DEFAULT = config.DEFAULT


@dataclass(frozen=True)
class StoreInfo:
    """One row of :func:`list_stores`.

    Parameters
    ----------
    name, uid : str
        Name and id of the store.
    session : bool
        Whether it goes with its last handle, and at the latest with its client.
    parameters, tables, shards, workers : int
        How many there are.
    nbytes : int
        Bytes of one copy of the values, without unbounded rows: how many of these there
        are their shards know, see :meth:`ParameterStore.stats`.
    device : str
        The device that it is on; "" for host memory.

    Examples
    --------
    >>> store = daskps.create({"w": np.zeros(2)}, name="listed")
    >>> [info] = [info for info in daskps.list_stores() if info.name == "listed"]
    >>> info.session, info.parameters, info.shards, info.workers, info.nbytes
    (False, 1, 2, 2, 16)
    >>> store.delete()
    """

    name: str
    uid: str
    session: bool
    parameters: int
    tables: int
    shards: int
    workers: int
    nbytes: int
    device: str = ""


class StoreList(TableList[StoreInfo]):
    """The stores of a cluster, which show themselves as a table."""

    _noun = "store"
    _heads = (
        *("name", "kind", "parameters", "tables", "bytes", "shards", "workers"),
        "device",
    )

    def _row(self, entry: StoreInfo) -> tuple[str, ...]:
        kind = "session" if entry.session else "named"
        held = str(entry.parameters), str(entry.tables), format_bytes(entry.nbytes)
        where = str(entry.shards), str(entry.workers), entry.device or "-"
        return entry.name, kind, *held, *where


@entrance
def list_stores(*, client: Any = None, timeout: Any = DEFAULT) -> list[StoreInfo]:
    """List the stores of a cluster.

    Parameters
    ----------
    client : distributed.Client, optional
        The client; the current one by default.
    timeout : float, str or None
        Seconds or a duration such as "30s"; None waits for ever.

    Returns
    -------
    list of StoreInfo
        One row per store, shown as a table; with an asynchronous client an awaitable
        of it.

    Raises
    ------
    ValueError
        Without a client.
    TimeoutError
        If the directory does not answer.
    SchedulerLostError
        If the scheduler is gone, within five seconds.

    Examples
    --------
    >>> store = daskps.create({"w": np.zeros(2)}, name="model")
    >>> "model" in [info.name for info in daskps.list_stores()]
    True
    >>> store.delete()
    """
    seconds = config.deadline(timeout)
    link = current_link(client)

    async def rows() -> list[StoreInfo]:
        async with scheduler_named(link, "the list of stores"):
            await ensure_directory(link)
            found = await link.directory("list")
        return StoreList(StoreInfo(**row) for row in found)

    return link.run(lambda: link.within(rows, seconds, "the directory"))


@entrance
def delete(name: str, *, client: Any = None, timeout: Any = DEFAULT) -> None:
    """Free a named store on all workers, even where others use it.

    Parameters
    ----------
    name : str
        Its name.
    client : distributed.Client, optional
        The client; the current one by default.
    timeout : float, str or None
        Seconds or a duration such as "30s"; None waits for ever.

    Returns
    -------
    None
        With an asynchronous client an awaitable.

    Raises
    ------
    StoreNotFoundError
        If there is none of that name.
    ValueError, TypeError
        For what can be no name, and without a client.
    TimeoutError
        If the directory does not answer.
    SchedulerLostError
        If the scheduler is gone, within five seconds.

    Examples
    --------
    >>> store = daskps.create({"w": np.zeros(2)}, name="old")
    >>> daskps.delete("old")
    >>> "old" in [info.name for info in daskps.list_stores()]
    False
    """
    found: Any = open(name, client=client, timeout=timeout)
    if not isinstance(found, Opening):
        return cast("None", found.delete(timeout=timeout))

    async def end() -> None:
        store: Any = await found
        await store.delete(timeout=timeout)

    return cast("None", end())
