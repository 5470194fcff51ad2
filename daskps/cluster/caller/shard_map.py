"""What a handle knows of its store without asking."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from daskps.cluster.machine.blocks import BlockAddress
from daskps.cluster.upstream import loads
from daskps.layout.arrays import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


#: Calls with the same parameters for which routes are kept, the latest.
MOST_ROUTES = 8

Key = TypeVar("Key")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class RunMembership:
    """A run that somebody calls for, and where its mailboxes are."""

    run: int
    #: How many may wait at once: its trainers.
    size: int
    #: What the directory says of the mailboxes; nothing to who fills none.
    wire: Mapping[str, Any] = field(default_factory=dict)
    #: Name of the codec of what its trainers pull; "" for none.
    read_codec: str = ""
    #: Whether its trainers say with a push what they have read.
    measures_delay: bool = False

    @property
    def coded(self) -> tuple[str, bytes]:
        """What messages call its codec, and it pickled; nothing for none."""
        name, pickled = self.wire.get("codec", ("", b""))
        return name, pickled

    def at(self, rows: Sequence[Any]) -> RunMembership:
        """Return the same with the mailboxes where they are now."""
        return replace(self, wire={**self.wire, "rows": rows})

    @property
    def mailboxes(self) -> dict[int, BlockAddress]:
        """Memory of the mailboxes by shard, where it is shared."""
        return {row[0]: BlockAddress(*row[1:]) for row in self.wire.get("rows", ())}

    @property
    def reduce(self) -> Any:
        """How contributions become one gradient."""
        return loads(self.wire["reduce"])


@dataclass(frozen=True)
class ShardMap:
    """Where the shards of a store are; replaced as a whole when one moves."""

    owners: tuple[str, ...]
    generations: tuple[int, ...]
    #: Memory of the shards that processes of their machine can map.
    segments: Mapping[int, BlockAddress]

    @classmethod
    def of(cls, wire: Mapping[str, Any]) -> ShardMap:
        """Return what the directory says."""
        return cls(
            tuple(wire["owners"]),
            tuple(wire["generations"]),
            {row[0]: BlockAddress(*row[1:]) for row in wire["segments"]},
        )

    @cached_property
    def hosts(self) -> dict[str, list[int]]:
        """Shards of each host, in order."""
        hosts: dict[str, list[int]] = {}
        for shard, owner in enumerate(self.owners):
            hosts.setdefault(owner, []).append(shard)
        return hosts


class StoreMap:
    """Names, layout, owners and rules of one store.

    All of it stays but for `where`: shards move. Who needs more than one fact of where
    they are takes `where` once.

    Parameters
    ----------
    wire : mapping
        What the directory says of the store.
    """

    def __init__(self, wire: Mapping[str, Any]) -> None:
        self.uid: str = wire["uid"]
        self.name: str = wire["name"]
        self.session: bool = wire["session"]
        #: The uid of the store that it goes back to, by checkpoints, or its own.
        self.lineage: str = wire["lineage"]
        #: The uid of the first store that this one has the place of, or its own.
        self.origin: str = wire["origin"]
        #: Whether it is restored where a shard is lost.
        self.recovers: bool = wire["recovers"]
        self.layout = Layout.from_wire(wire["layout"])
        self.where = ShardMap.of(wire)
        self.rules: bytes = wire["rules"]
        self.optimizers: dict[int, str] = dict(wire["optimizers"])
        #: Under which the processes of a machine find each other; "" for not at all.
        self.cluster: str = wire["cluster"]
        #: How calls reach the shards, by what these bring and where they go.
        self.routes: Prepared[Any, Any] = Prepared(self)

    def update(self, located: Mapping[str, Any]) -> None:
        """Take over where the directory says the shards are."""
        where = ShardMap.of(located)
        # What was made ready for the one that is known is kept.
        if where != self.where:
            self.where = where

    @property
    def owners(self) -> tuple[str, ...]:
        """Address of the worker that owns each shard."""
        return self.where.owners

    @property
    def hosts(self) -> dict[str, list[int]]:
        """Shards of each host, in order."""
        return self.where.hosts


class Prepared(Generic[Key, Made]):
    """What was made ready while the shards were where they are; no longer than that.

    Threads: any may use it.

    Parameters
    ----------
    meta : StoreMap
        The store.
    most : int
        How many are kept, the latest.
    """

    def __init__(self, meta: StoreMap, most: int = MOST_ROUTES) -> None:
        self._meta, self._most = meta, most
        self._known: dict[Key, Made] = {}
        #: Where the shards were when these were made.
        self._where = meta.where
        self._lock = threading.Lock()

    def find(self, key: Key) -> Made | None:
        """Return what was kept under a key, unless a shard has moved since."""
        return self._known.get(key) if self._where is self._meta.where else None

    def keep(self, key: Key, made: Made, where: ShardMap) -> None:
        """Keep what was made while the shards were `where`."""
        with self._lock:
            if self._where is not self._meta.where:
                self._known.clear()
                self._where = self._meta.where
            if where is self._where:
                while len(self._known) >= self._most:
                    del self._known[next(iter(self._known))]
                self._known[key] = made

    def forget(self, key: Key) -> None:
        """Forget what was kept under a key."""
        with self._lock:
            self._known.pop(key, None)

    def clear(self) -> None:
        """Forget all of it."""
        with self._lock:
            self._known.clear()
