"""Changes that other producers made in a table: answers of all shards, joined."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.cluster.caller import questions
from daskps.cluster.caller.questions import NEVER, Changed, Question
from daskps.layout.tables import UnboundedTable
from daskps.row_init import initial_rows
from daskps.store.targets import pulled, reading

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.protocol.deadline import Deadline
    from daskps.layout.tables import Table
    from daskps.typing import Array

#: How often is asked what has changed while more rows were read than come with an
#: answer.
_TRIES = 4


@dataclass(frozen=True, slots=True)
class TableState:
    """How far a table's changes are known: a token of :meth:`ParameterTable.pull_changed`."""

    uid: str
    table: str
    #: Of each shard, and how often the store was resharded by then.
    versions: tuple[int, ...]
    epoch: int = 0

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


class Asker:
    """Asks the shards of a store, and reads rows: in a thread, or on the event loop.

    Parameters
    ----------
    shards : ShardClient
        The store.
    deadline : Deadline
        The end of all questions.
    on_loop : bool
        Whether it is the event loop that must not wait.
    """

    def __init__(
        self, shards: ShardClient, deadline: Deadline, *, on_loop: bool
    ) -> None:
        self.shards, self._deadline, self._on_loop = shards, deadline, on_loop

    async def ask(self, question: Question) -> dict[int, Changed]:
        """Return what shards know of changes; a thread looks for itself if it can."""
        asking = partial(questions.ask, self.shards, question, self._deadline)
        if self._on_loop:
            return await asking()
        found = questions.look(self.shards, question)
        return self.shards.link.run(asking) if found is None else found

    async def read(self, table: Table, ids: Array) -> Array:
        """Return rows of a table, read part by part where they are many."""
        targets = pulled(self.shards.meta, (), {table.name: ids}, None)
        request = reading(self.shards.meta, targets)
        if self._on_loop:
            await self.shards.call_async(request, self._deadline)
        else:
            self.shards.pull(request, self._deadline)
        found: Array = targets[0].finish()[table.name]
        return found


async def find_changes(
    shards: ShardClient,
    deadline: Deadline,
    *,
    table: Table,
    since: TableState | None,
    by: int,
    on_loop: bool = True,
) -> Changes:
    """Find out what has changed in a table.

    Parameters
    ----------
    shards, deadline : ShardClient, Deadline
        The store, and the end of all questions.
    table : Table
        The table.
    since : TableState, optional
        How far the changes are known.
    by : int
        The producer whose own changes are left out, 0 for none.
    on_loop : bool
        As of :class:`Asker`.

    Returns
    -------
    Changes
        The changes, or all rows.
    """
    meta, asker = shards.meta, Asker(shards, deadline, on_loop=on_loop)
    n = meta.layout.n_shards
    # Shards that are others by now know nothing of that time.
    now = n, meta.epoch
    known = since is not None and (len(since.versions), since.epoch) == now
    versions = since.versions if since is not None and known else (NEVER,) * n
    found = await asker.ask(Question(table, dict(enumerate(versions)), by))
    complete = all(one.complete for one in found.values())
    if not complete:
        others = [shard for shard, one in found.items() if one.complete]
        if others:
            found |= await asker.ask(Question(table, dict.fromkeys(others, NEVER), 0))
    parts = {shard: _Part.of(meta, table, shard, one) for shard, one in found.items()}
    lacking = [shard for shard, one in found.items() if one.rows is None]
    for _ in range(_TRIES):
        if not lacking:
            break
        await _fill(asker, table, [parts[shard] for shard in lacking])
        # Rows were read one part after the other: those that changed meanwhile are read
        # again, together with the version that they lead to.
        since_then = {shard: parts[shard].version for shard in lacking}
        newer = await asker.ask(Question(table, since_then, 0))
        # Where that is gone already the next call says so.
        newer = {shard: one for shard, one in newer.items() if one.complete}
        for shard, one in newer.items():
            parts[shard].take(_Part.of(meta, table, shard, one))
        lacking = [shard for shard, one in newer.items() if one.rows is None]
    versions = tuple(parts[shard].version for shard in range(n))
    state = TableState(meta.known_as, table.name, versions, meta.epoch)
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


async def _fill(asker: Asker, table: Table, parts: Sequence[_Part]) -> None:
    """Read the rows that were too many for an answer, as any pull does."""
    ids = np.concatenate([part.ids[~part.is_read] for part in parts])
    rows = await asker.read(table, ids)
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
