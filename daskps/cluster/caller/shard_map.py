"""Maps of stores: the facts that a handle knows of its store without asking."""

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


#: Number of routes kept, the latest, each for calls with the same parameters.
MOST_ROUTES = 8

Key = TypeVar("Key")
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class RunMembership:
    """A run that a trainer calls for, and where its mailboxes are."""

    run: int
    #: Number of callers that may wait at once: that of its trainers.
    size: int
    #: The directory's facts about the mailboxes; empty for a process that fills none.
    wire: Mapping[str, Any] = field(default_factory=dict)
    #: Name of the codec of its trainers' pulls; "" for none.
    read_codec: str = ""
    #: Whether its trainers say with a push the versions that they have read.
    measures_delay: bool = False

    @property
    def coded(self) -> tuple[str, bytes]:
        """The name of its codec in messages, and the codec pickled; empty for none."""
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
        """Return the map that a message of the directory describes."""
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

    All of it stays but for `where`: shards move. Code that needs more than one fact of
    where they are takes `where` once.

    Parameters
    ----------
    wire : mapping
        The directory's facts about the store.
    """

    def __init__(self, wire: Mapping[str, Any]) -> None:
        self.uid: str = wire["uid"]
        #: The uid that users know, which stays, and how often it was resharded.
        self.known_as: str = wire.get("known_as", self.uid)
        self.epoch: int = wire.get("epoch", 0)
        self.name: str = wire["name"]
        self.session: bool = wire["session"]
        #: The uid of the store that it goes back to through checkpoints, or its own.
        self.lineage: str = wire["lineage"]
        #: The uid of the first store that this one has replaced, or its own.
        self.origin: str = wire["origin"]
        #: Whether it is restored where a shard is lost.
        self.recovers: bool = wire["recovers"]
        self.layout = Layout.from_wire(wire["layout"])
        self.where = ShardMap.of(wire)
        self.rules: bytes = wire["rules"]
        self.optimizers: dict[int, str] = dict(wire["optimizers"])
        #: The name by which the processes of a machine find each other; "" for not at
        #: all.
        self.cluster: str = wire["cluster"]
        #: The device of each owner that its shards are on; "" for host memory.
        self.device: str = wire.get("device", "")
        #: How many copies of each shard there are to be. Of two the owner answers alone,
        #: once the other one has what it tells: all calls go to it, as messages.
        self.copies: int = wire.get("copies", 1)
        #: Routes of calls, by the arrays that they bring and the shards that they go
        #: to.
        self.routes: Prepared[Any, Any] = Prepared(self)

    def update(self, located: Mapping[str, Any]) -> None:
        """Take over where the directory says the shards are."""
        where = ShardMap.of(located)
        # Objects prepared for an equal map stay valid.
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


class Prepared(Generic[Key, _Made]):
    """Objects prepared for the present places of the shards; dropped when one moves.

    Threads: any may use it.

    Parameters
    ----------
    meta : StoreMap
        The store.
    most : int
        Number of objects kept, the latest.
    """

    def __init__(self, meta: StoreMap, most: int = MOST_ROUTES) -> None:
        self._meta, self._most = meta, most
        self._known: dict[Key, _Made] = {}
        #: Where the shards were when these were made.
        self._where = meta.where
        self._lock = threading.Lock()

    def find(self, key: Key) -> _Made | None:
        """Return the object kept under a key, unless a shard has moved since."""
        return self._known.get(key) if self._where is self._meta.where else None

    def keep(self, key: Key, made: _Made, where: ShardMap) -> None:
        """Keep an object that was made while the shards were `where`."""
        with self._lock:
            if self._where is not self._meta.where:
                self._known.clear()
                self._where = self._meta.where
            if where is self._where:
                while len(self._known) >= self._most:
                    del self._known[next(iter(self._known))]
                self._known[key] = made

    def forget(self, key: Key) -> None:
        """Forget the object kept under a key."""
        with self._lock:
            self._known.pop(key, None)

    def clear(self) -> None:
        """Forget all objects."""
        with self._lock:
            self._known.clear()
