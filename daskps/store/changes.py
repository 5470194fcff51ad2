"""Changes that other producers made in a table: answers of all shards, joined."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from daskps import config
from daskps.cluster.caller import changes
from daskps.cluster.caller.changes import NEVER, Changed, Question
from daskps.layout.tables import UnboundedTable
from daskps.row_init import initial_rows
from daskps.store.targets import pulled, reading

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.wire.deadline import Deadline
    from daskps.layout.tables import Table
    from daskps.typing import Array

#: How often is asked what has changed while more rows were read than come with an answer.
_TRIES = 4


@dataclass(frozen=True, slots=True)
class TableState:
    """How far a table's changes are known: a token of :meth:`ParameterTable.pull_changed`."""

    uid: str
    table: str
    #: Of each shard.
    versions: tuple[int, ...]

    def __repr__(self) -> str:
        return f"<daskps state of table {self.table!r} at version {max(self.versions)}>"


@dataclass(frozen=True, eq=False, slots=True)
class Changes:
    """Rows of a table that were changed, as they are now.

    Made by :meth:`ParameterTable.pull_changed`.

    Parameters
    ----------
    ids : ndarray, shape (n,), int64
        Ids, ascending, each once.
    rows : ndarray, shape (n, dim)
        The row of each id as it is now; initial values for an id that lost its row.
    since : object
        A token for the next call. It can be pickled, and is the caller's to keep.
    complete : bool
        Whether these are the changes since the call before. False where these are all
        rows of the table: a row that is not among them reads as at the beginning.

    Examples
    --------
    >>> store = daskps.create({"emb": daskps.TableSpec(3, 1, "int64")})
    >>> first = store["emb"].pull_changed()
    >>> first.ids, first.complete
    (array([0, 1, 2]), False)
    """

    ids: Array
    rows: Array
    since: TableState
    complete: bool


#: Yields questions, or ids to read, gets the answers, and returns the changes.
_Steps: TypeAlias = Generator["Question | Mapping[str, Array]", Any, Changes]


def checked_since(
    uid: str, table: Table, since: Any, latest: Callable[[str], str]
) -> TableState | None:
    """Return how far the changes of a table are known.

    `latest` returns the uid of what has the place of a store that was restored: of what
    was known of the lost one nothing is known to hold.

    Raises
    ------
    TypeError
        For what is no token.
    ValueError
        For that of another store or table.
    """
    if since is None:
        return None
    if not isinstance(since, TableState):
        raise TypeError(
            f"since is what the call before returned as its `since`, found "
            f"{type(since).__name__}; begin with since=None"
        )
    now = latest(since.uid)
    if (now, since.table) != (latest(uid), table.name):
        where = "another store" if now != latest(uid) else "this store"
        raise ValueError(
            f"since is of table {since.table[:60]!r} of {where}, the changes asked for "
            f"are those of table {table.name[:60]!r}; a store that was made anew under "
            f"its old name is another one, begin with since=None"
        )
    return since if since.uid == now else None


def here(steps: _Steps, shards: ShardClient, deadline: Deadline) -> Changes:
    """Take all steps from a thread that may wait."""
    result: Any = None
    try:
        while True:
            step = steps.send(result)
            if isinstance(step, Question):
                result = changes.look(shards, step)
                if result is None:
                    asking = partial(changes.ask, shards, step, deadline)
                    result = shards.link.run(asking)
            else:
                request = _reading(shards.meta, step)
                shards.pull(request, deadline)
                result = _rows_of(request, step)
    except StopIteration as end:
        found: Changes = end.value
        return found


async def awaited(steps: _Steps, shards: ShardClient, deadline: Deadline) -> Changes:
    """Take all steps on the event loop."""
    result: Any = None
    try:
        while True:
            step = steps.send(result)
            if isinstance(step, Question):
                result = await changes.ask(shards, step, deadline)
            else:
                request = _reading(shards.meta, step)
                await shards.call_async(request, deadline)
                result = _rows_of(request, step)
    except StopIteration as end:
        found: Changes = end.value
        return found


def _reading(meta: StoreMap, rows: Mapping[str, Array]) -> Request:
    """Return what reads rows, part by part where they are many."""
    return reading(meta, pulled(meta, (), rows, None))


def _rows_of(request: Request, rows: Mapping[str, Array]) -> Array:
    """Return what was read of one table."""
    (name,) = rows
    if request.target is None:
        raise TypeError(f"no rows of {name!r} were read")
    found: Array = request.target.finish()[name]
    return found


def steps(meta: StoreMap, table: Table, since: TableState | None, by: int) -> _Steps:
    """Find out what has changed in a table.

    Parameters
    ----------
    meta : StoreMap
        The store.
    table : Table
        The table.
    since : TableState, optional
        How far the changes are known.
    by : int
        The producer whose own changes are left out, 0 for none.

    Yields
    ------
    Question or mapping of str to ndarray
        A question that the caller asks the shards, or ids that it reads the rows of;
        it sends the answers or the rows back.

    Returns
    -------
    Changes
        The changes, or all rows.
    """
    n = meta.layout.n_shards
    # Shards that are others by now know nothing of that time.
    known = since is not None and len(since.versions) == n
    versions = since.versions if since is not None and known else (NEVER,) * n
    found = yield Question(table, dict(enumerate(versions)), by)
    complete = all(one.complete for one in found.values())
    if not complete:
        others = [shard for shard, one in found.items() if one.complete]
        if others:
            found |= yield Question(table, dict.fromkeys(others, NEVER), 0)
    parts = {shard: _Part.of(meta, table, shard, one) for shard, one in found.items()}
    lacking = [shard for shard, one in found.items() if one.rows is None]
    for _ in range(_TRIES):
        if not lacking:
            break
        yield from _fill(table, [parts[shard] for shard in lacking])
        # Rows were read one part after the other: those that changed meanwhile are read
        # again, together with the version that they lead to.
        since_then = {shard: parts[shard].version for shard in lacking}
        newer = yield Question(table, since_then, 0)
        # Where that is gone already the next call says so.
        newer = {shard: one for shard, one in newer.items() if one.complete}
        for shard, one in newer.items():
            parts[shard].take(_Part.of(meta, table, shard, one))
        lacking = [shard for shard, one in newer.items() if one.rows is None]
    versions = tuple(parts[shard].version for shard in range(n))
    state = TableState(meta.uid, table.name, versions)
    return _together(table, [*parts.values()], state, complete)


@dataclass(slots=True)
class _Part:
    """The answers of one shard so far."""

    version: int
    #: Ascending, and their rows.
    ids: Array
    rows: Array
    #: Whether a row was read, and whether there is one.
    is_read: Array
    is_there: Array

    @classmethod
    def of(cls, meta: StoreMap, table: Table, shard: int, said: Changed) -> _Part:
        """Return what a shard has said."""
        version, _, ids, rows, found = said
        if ids is None:
            ordinal = table.index - len(meta.layout.parameters)
            piece = meta.layout.table_pieces[shard][ordinal]
            ids = np.arange(piece.first_row, piece.first_row + piece.n_rows)
        n, is_read = len(ids), rows is not None
        if rows is None:
            rows = np.empty(n * table.dim, table.dtype)
        there = np.ones(n, bool) if found is None else found != 0
        read = np.full(n, is_read)
        return cls(version, ids, rows.reshape(n, table.dim), read, there)

    def take(self, newer: _Part) -> None:
        """Take what the shard has said later in place of what it has said of the same."""
        self.version = newer.version
        at = np.searchsorted(self.ids, newer.ids)
        if np.array_equal(self.ids[np.minimum(at, len(self.ids) - 1)], newer.ids):
            # As all of them are where the whole table was read.
            for name in ("rows", "is_read", "is_there"):
                getattr(self, name)[at] = getattr(newer, name)
            return
        kept = ~np.isin(self.ids, newer.ids)
        order = np.argsort(np.concatenate([self.ids[kept], newer.ids]))
        for name in ("ids", "rows", "is_read", "is_there"):
            both = getattr(self, name)[kept], getattr(newer, name)
            setattr(self, name, np.concatenate(both)[order])


def _fill(table: Table, parts: Sequence[_Part]) -> Generator[Any, Any, None]:
    """Read the rows that were too many for an answer, as any pull does."""
    ids = np.concatenate([part.ids[~part.is_read] for part in parts])
    rows = yield {table.name: ids}
    for part in parts:
        n = len(part.ids) - int(part.is_read.sum())
        if n == len(part.ids):
            part.rows = rows[:n]
        else:
            part.rows[~part.is_read] = rows[:n]
        rows = rows[n:]
        # The shard has worked out initial values for ids without a row.
        part.is_there[~part.is_read] = True
        part.is_read[:] = True


def _together(
    table: Table, parts: Sequence[_Part], state: TableState, complete: bool
) -> Changes:
    """Return what all shards have said."""
    ids = np.concatenate([part.ids for part in parts])
    rows = np.concatenate([part.rows for part in parts])
    absent = ~np.concatenate([part.is_there for part in parts])
    if isinstance(table, UnboundedTable) and absent.any():
        rows[absent] = initial_rows(
            ids[absent],
            (table.dim, table.dtype),
            table.of.init,
            name=table.name,
            seed=table.of.seed,
            cache_dir=str(config.load().cache),
        )
    if not table.is_bounded:
        order = np.argsort(ids)
        ids, rows = ids[order], rows[order]
    return Changes(ids, rows, state, complete)
