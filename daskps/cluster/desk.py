"""What a thread of a worker keeps for the graph tasks of one run."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distributed import get_worker

from daskps.cluster.client import ShardClient
from daskps.cluster.host import HOSTS
from daskps.cluster.link import link_of
from daskps.cluster.messages import Call
from daskps.cluster.meta import Meta
from daskps.cluster.upstream import loads

if TYPE_CHECKING:
    from daskps.cluster.host import ShardHost


@dataclass(frozen=True)
class Work:
    """What all tasks of one run have in common; travels to each worker once."""

    uid: str
    run: int
    #: Number of parts P.
    size: int
    reduce: bytes
    #: Pickled function of the store's `Meta` that makes a `Stepper`.
    body: bytes


class Desk:
    """What one thread of a worker needs for the tasks of a run."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.link = link_of(get_worker())
        self.worker: str = self.link.node.address
        self.host: ShardHost = HOSTS[self.worker]
        meta = self.host.contributions.shared(work.run, "meta", self._find)
        self.meta: Meta = meta
        self.shards = ShardClient(self.link, meta)
        self.reduce = loads(work.reduce)
        self._stepper: Any = None

    def _find(self) -> Meta:
        find = self.link.directory("find", uid=self.work.uid)
        return Meta(self.link.run(lambda: find))

    @property
    def stepper(self) -> Any:
        """The user's function with its buffers, a copy of its own for each thread."""
        if self._stepper is None:
            self._stepper = loads(self.work.body)(self.meta)
        return self._stepper

    def call(self, **head: Any) -> Call:
        """Return what a message of the run's one rank has in common."""
        return Call(self.work.uid, (), run=self.work.run, rank=0, **head)


def desk_of(work: Work) -> Desk:
    """Return this thread's desk, which goes with the run."""
    kept = HOSTS[get_worker().address].contributions
    key = ("desk", threading.get_ident())
    desk: Desk = kept.shared(work.run, key, lambda: Desk(work))
    return desk
