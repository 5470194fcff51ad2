"""The copies of a snapshot, from the host that made them into Dask's memory.

:func:`daskps.cluster.host.cuts.fill_cut` fills them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from daskps.errors import ConsistencyError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping, Sequence

    from daskps.layout.arrays import Layout
    from daskps.layout.spans import Span
    from daskps.shards.frozen import BegunCopy, FrozenShard
    from daskps.typing import Array

#: Copies of up to so many bytes together share one Dask task.
GROUP_NBYTES = 64 * 2**20


class CopyGroup:
    """Copies of some shards of one host, which live, travel and spill together.

    Parameters
    ----------
    copies : mapping of int to FrozenShard
        Copies by shard.
    """

    def __init__(self, copies: Mapping[int, FrozenShard]) -> None:
        self._copies = dict(copies)

    def __reduce__(self) -> Any:
        return type(self), (self._copies,)

    def __repr__(self) -> str:
        return f"<copies of {len(self._copies)} shards, {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum(copy.nbytes for copy in self._copies.values())

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.nbytes

    def __contains__(self, shard: int) -> bool:
        return shard in self._copies

    def get(self, shard: int, span: Span) -> Array:
        """Return elements of a shard, a view."""
        return self._copies[shard].get(span)


@dataclass(slots=True)
class _CutHere:
    """The copies that one cut has of one store on this host."""

    #: Copies to be filled, by shard; and filled copies, by key.
    begun: dict[int, BegunCopy] = field(default_factory=dict)
    copies: dict[str, FrozenShard] = field(default_factory=dict)
    #: Whether there was no room for copies, so that the cut holds the shards instead.
    holds: bool = False
    #: Whether that was asked for.
    asked: bool = False
    #: The last attempt that has begun.
    attempt: int = 0
    #: Releases the shards if the directory never does.
    lease: asyncio.TimerHandle | None = None
    expired: asyncio.Future[None] | None = None
    #: Writes the chunks of a checkpoint, as long as the cut has not been dropped.
    writing: asyncio.Future[list[None]] | None = None

    def end(self) -> None:
        """Stop all that goes on for the cut."""
        self.end_lease()
        if self.writing is not None:
            self.writing.cancel()

    def end_lease(self) -> None:
        """Stop the timer: the shards are released."""
        if self.lease is not None:
            self.lease.cancel()
            self.lease = None


class Copies:
    """The copies of all cuts on one host, until Dask has taken them over."""

    def __init__(self) -> None:
        #: Copies by store and cut.
        self._claims: dict[tuple[str, str], _CutHere] = {}
        #: Name and layout of stores that were cut: all their shards may have left this
        #: host when the copies are written.
        self.stores: dict[str, tuple[str, Layout]] = {}
        #: Cuts that are over: their messages may be late.
        self._over: deque[str] = deque(maxlen=1000)

    def claim(self, store: str, cut: str) -> _CutHere:
        """Return the copies of a cut; the first call creates their record.

        Raises
        ------
        ConsistencyError
            If the cut is over.
        """
        if self.is_over(cut):
            raise ConsistencyError(f"cut {cut} of store {store} is over")
        return self._claims.setdefault((store, cut), _CutHere())

    def is_over(self, cut: str) -> bool:
        """Return whether a cut was dropped; its late messages are refused."""
        return cut in self._over

    def find(self, key: str) -> FrozenShard | None:
        """Return the copy of a key; all copies made of one key are equal."""
        for claim in list(self._claims.values()):
            if key in claim.copies:
                return claim.copies[key]
        return None

    def drop(self, store: str, cut: str | None = None) -> None:
        """Free the copies of a cut, or of all cuts of a store; twice is fine."""
        if cut is not None and cut not in self._over:
            self._over.append(cut)
        for key in [k for k in self._claims if k[0] == store and cut in (None, k[1])]:
            self._claims.pop(key).end()
        if cut is None:
            self.stores.pop(store, None)

    def clear(self) -> None:
        """Free everything."""
        for store, cut in list(self._claims):
            self.drop(store, cut)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        found = list(self._claims.values())
        begun = sum(of.nbytes for c in found for of in list(c.begun.values()))
        copies = [x for c in found for x in list(c.copies.values())]
        return begun + sum(x.memory_nbytes for x in copies)


def groups_of(
    sizes: Mapping[int, int], owners: Sequence[str]
) -> list[tuple[str, list[int]]]:
    """Return which copies share a Dask task: small ones of one host.

    A task takes milliseconds of the scheduler, whatever it copies. Dask keeps, sends
    and spills the copies of a task as one: at most `GROUP_NBYTES`, or a single copy.

    Parameters
    ----------
    sizes : mapping of int to int
        Bytes of each shard's copy.
    owners : sequence of str
        Host of every shard.

    Returns
    -------
    list of (str, list of int)
        Host and shards of each group.

    Examples
    --------
    >>> groups_of({0: 10, 1: 10, 2: 10, 3: 2**26}, ["a", "b", "a", "a"])
    [('a', [0, 2]), ('b', [1]), ('a', [3])]
    """
    groups: list[tuple[str, list[int]]] = []
    #: For each host the group that is not full, and the bytes in it.
    filling: dict[str, tuple[list[int], int]] = {}
    for shard, nbytes in sizes.items():
        owner = owners[shard]
        group, before = filling.get(owner, ([], GROUP_NBYTES))
        if before + nbytes > GROUP_NBYTES:
            group, before = [], 0
            groups.append((owner, group))
        group.append(shard)
        filling[owner] = group, before + nbytes
    return groups
