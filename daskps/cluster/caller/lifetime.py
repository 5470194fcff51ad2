"""Lifetime of session stores: as long as a handle lives in the process that made them.

The handles share a `Hold`, which goes with the last of them and has the store freed.
Nobody knows where a pickled copy of a handle is, and for how long: once a user has
pickled one, the client keeps the hold until it closes itself.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distributed import Future

    from daskps.cluster.caller.link import Link
    from daskps.cluster.keys import Anchor

_FOR_A_RUN: ContextVar[bool] = ContextVar("daskps-for-a-run", default=False)


@contextmanager
def for_a_run() -> Iterator[None]:
    """Pickle handles in a block for a run, whose caller keeps its own meanwhile."""
    token = _FOR_A_RUN.set(True)
    try:
        yield
    finally:
        _FOR_A_RUN.reset(token)


class Hold:
    """The object that a session store's handles share in the process that made it.

    Parameters
    ----------
    link : Link
        The client, or the worker, that made the store.
    uid : str
        The store.
    anchors : sequence of Future
        Of its shards; Dask keeps them as long as these.
    """

    def __init__(self, link: Link, uid: str, anchors: Sequence[Future[Anchor]]) -> None:
        self.uid = uid
        self._link, self._anchors = link, [*anchors]
        self._end = weakref.finalize(self, link.free, uid)
        # The client's own end frees the store then.
        self._end.atexit = False

    @property
    def is_kept(self) -> bool:
        """Whether the store stays until its client closes."""
        return self.uid in self._link.holds

    def note_pickled(self) -> None:
        """Keep the store: a handle is pickled, and its copy may be anywhere."""
        if not _FOR_A_RUN.get():
            self._link.holds[self.uid] = self

    def release(self) -> None:
        """Let go of a store that was closed."""
        self._end.detach()
        self._anchors.clear()
        self._link.holds.pop(self.uid, None)
