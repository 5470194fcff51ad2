"""Stand-ins for what a call near a shard needs of the cluster."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from daskps.cluster.caller.local import SplitRoute
from daskps.cluster.caller.local_shards import local_call
from daskps.cluster.caller.routes import Reply, Request
from daskps.cluster.caller.shard_map import StoreMap
from daskps.cluster.caller.targets import ReadSlice, Target
from daskps.cluster.counters import Counters
from daskps.cluster.host.hosted import HostedShard, ReachableShards
from daskps.cluster.protocol.deadline import Deadline

#: What reads a thousand numbers of shard 0 into the first array.
ALL = {0: (ReadSlice(("float64", 0, 1000), 0, slice(0, 1000)),)}


def target_in(out: Any) -> Target:
    """Return a read of all of these numbers into an array."""
    return Target(ALL, [out], lambda: None)


def map_of(hosted: HostedShard, owners: Sequence[str] = ("tcp://w",)) -> StoreMap:
    """Return what a handle knows of a store, by one of its shards."""
    wire = {
        "uid": "s",
        "name": "s",
        "session": True,
        "layout": hosted.layout.to_wire(),
        "owners": [*owners],
        "generations": [hosted.shard.generation] * len(owners),
        "segments": [],
        "rules": b"",
        "optimizers": [],
        "lineage": "s",
        "origin": "s",
        "recovers": False,
        "cluster": "",
    }
    return StoreMap(wire)


class Mapped(ReachableShards):
    """Shards of a worker that may be gone."""

    def __init__(self) -> None:
        super().__init__(np.empty, 5.0)
        self.lives = True

    def is_live(self) -> bool:
        """Return whether who owns the shards is there."""
        return self.lives

    def make_room(self, hosted: HostedShard, producer: int, seconds: float) -> None:
        """Leave that to the owner."""


class Carriers:
    """How a process, or the trainer of a run, reaches one shard."""

    def __init__(self, hosted: HostedShard, run: int = 0) -> None:
        self.run, self.rank, self.bsp = run, 0 if run else -1, False
        self.serving, self.hosted = Mapped(), hosted
        self.meta = map_of(hosted)

    def moved(self, hosted: HostedShard) -> None:
        """The shard is at another host from here on."""
        self.hosted = hosted
        self.meta.where = replace(self.meta.where)

    def find_shard(self, shard: int, by_owner: bool = False) -> Any:
        """Return the shard, and what serves it."""
        return self.serving, self.hosted


class RemoteShards:
    """What sends messages: notes them, and answers at once with version 99."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.sent: list[tuple[Request, list[int]]] = []

    def find_socket_route(self, _: Request, __: Any) -> None:
        """Return None: all calls are messages."""

    def send(self, request: Request, shards: Any, deadline: Any) -> Any:
        """Answer a message."""
        self.sent.append((request, [*shards]))
        done: Future[Reply] = Future()
        done.set_result(Reply([(shard, 99) for shard in shards]))
        return done


def call(carriers: Any, request: Request) -> tuple[Reply, RemoteShards]:
    """Make a call; return its reply, and what was sent for it."""
    remote: Any = RemoteShards()
    local = SplitRoute(request.route, carriers)
    return local_call(remote, request, local, Deadline(60, "a call")).run(), remote


def counted(call: Callable[[], object]) -> list[str]:
    """Return what a call calls in this thread."""
    names: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_qualname)

    # Libraries have the collector call functions of theirs.
    gc.disable()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return names[1:]  # the first is the one that is counted
