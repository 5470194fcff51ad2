"""The keys of all Dask tasks that are ours, and what a shard's anchor is.

A key says what its task is: the scheduler's part of daskps recognises gradients and
anchors by theirs. First it has the kind, by which Dask groups tasks and labels its
metrics: one for each kind, however many stores there are. Then it has the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask.tokenize import tokenize

if TYPE_CHECKING:
    from collections.abc import Sequence

#: In the name of every task of ours, wherever Dask has put it.
OURS = "daskps-"
_SNAPSHOT = "daskps-snapshot-"
#: First elements of keys; the label of the store follows.
_ANCHOR, _TRAINER = "daskps-anchor", "daskps-trainer"
_GRADIENT, _REDUCTION = "daskps-gradient", "daskps-reduce"


class Anchor:
    """The value of a shard's anchor: a name, and the shard's size for Dask's books.

    Parameters
    ----------
    store, shard : str, int
        The shard it stands for.
    nbytes : int
        The bytes that Dask should charge for it. Never the true size of a large shard:
        a future that claims more than Dask's spill target goes straight to disk.
    """

    def __init__(self, store: str, shard: int, nbytes: int) -> None:
        self.store, self.shard, self.nbytes = store, shard, nbytes

    def __sizeof__(self) -> int:
        return self.nbytes

    def __repr__(self) -> str:
        return f"<shard {self.shard} of store {self.store!r}>"


def label_of(name: str, uid: str) -> str:
    """Return what keys call a store: its name, which another one may have later."""
    return f"{name}-{uid[:8]}"


def anchor_key(label: str, shard: int) -> tuple[Any, ...]:
    """Return the key of the anchor of a shard."""
    return (_ANCHOR, label, shard)


def store_of_anchor(key: Any) -> str | None:
    """Return the label of the store a key is an anchor of, if it is one."""
    return key[1] if type(key) is tuple and key[0] == _ANCHOR else None


def holder_of(uid: str) -> str:
    """Return the client of no person that wants the anchors of a named store."""
    return f"{OURS}{uid}"


def is_ours(key: Any) -> bool:
    """Return whether a key is that of a task of ours."""
    name = key[0] if type(key) is tuple and key else key
    return isinstance(name, str) and name.startswith(OURS)


def trainer_key(label: str, run: int, rank: int, attempt: int) -> tuple[Any, ...]:
    """Return the key of the task of a resident trainer."""
    return (_TRAINER, label, run, rank, attempt)


def work_key(run: int) -> str:
    """Return the key of what all tasks of a graph run share."""
    return f"daskps-work-{run}"


def gradient_key(label: str, place: tuple[int, int, int], rank: int) -> Any:
    """Return the key of a rank's gradient task; `place` is run, attempt and round."""
    return (_GRADIENT, label, *place, rank)


def place_of_gradient(key: Any) -> tuple[int, int, int] | None:
    """Return run, attempt and round of a gradient task, if a key is that of one."""
    return key[2:5] if type(key) is tuple and key[0] == _GRADIENT else None


def reduction_key(label: str, place: tuple[int, int, int], shard: int) -> Any:
    """Return the key of a reduction task; `shard` is its first."""
    return (_REDUCTION, label, *place, shard)


def copy_key(store: str, index: int | None, shard: int, version: int) -> str:
    """Return the name of a copy: what it contains follows from these."""
    what = "" if index is None else f"{index}."
    return f"{_SNAPSHOT}{store}-{what}{shard}.{version}"


def saved_key(cut: str, shard: int, version: int) -> str:
    """Return the name of a copy for a checkpoint.

    It is of one cut alone: of the same version another one may have counted other epochs.
    """
    return f"{_SNAPSHOT}{cut}-{shard}.{version}"


def group_key(
    store: str,
    index: int | None,
    versions: Sequence[tuple[int, int]],
) -> str:
    """Return the key of a group of copies: what it contains follows from these.

    Parameters
    ----------
    store : str
        Uid of the store.
    index : int or None
        The only parameter, None for all.
    versions : sequence of (int, int)
        Shard and version of each copy.
    """
    first = copy_key(store, index, *versions[0])
    if len(versions) == 1:
        return first
    return f"{first}-{tokenize(versions)}"
