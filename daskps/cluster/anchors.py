"""Anchors: the Dask futures that stand for shards."""

from __future__ import annotations

from typing import Any

_PREFIX = "daskps-anchor-"


class Anchor:
    """What a shard's anchor holds: a name, and the shard's size for Dask's books.

    Parameters
    ----------
    store, shard : str, int
        The shard it stands for.
    nbytes : int
        What Dask should charge for it. Never the true size of a large shard: a
        future that claims more than Dask's spill target goes straight to disk.
    """

    def __init__(self, store: str, shard: int, nbytes: int) -> None:
        self.store, self.shard, self.nbytes = store, shard, nbytes

    def __sizeof__(self) -> int:
        return self.nbytes

    def __repr__(self) -> str:
        return f"<shard {self.shard} of store {self.store!r}>"


def make_anchor(store: str, shard: int, nbytes: int) -> Anchor:
    """Make an anchor: no side effects, so it may run again anywhere."""
    return Anchor(store, shard, nbytes)


def anchor_key(uid: str, shard: int) -> str:
    """Return the key of the anchor of a shard."""
    return f"{_PREFIX}{uid}-{shard}"


def store_of_anchor(key: Any) -> str | None:
    """Return the uid of the store a key is an anchor of, if it is one."""
    if not isinstance(key, str) or not key.startswith(_PREFIX):
        return None
    return key[len(_PREFIX) :].rsplit("-", 1)[0]
