"""Where, how often and how many checkpoints of a run are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from daskps.checkpoint.storage import full_url, options_of, shown
from daskps.store.arguments import whole

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoints:
    """Where `train` saves its store, how often, and how many checkpoints it keeps.

    Parameters
    ----------
    url : str or path-like
        A folder that all workers and this process reach, by any URL that fsspec knows.
        One for each model, or stores with names: with ``resume=True`` a new store is
        loaded from the newest checkpoint there of a store of its name, and one without
        a name from that of any without.
    every : "epoch" or int
        Save after each epoch, or about every so many rounds (under SSP and ASP: clocks of
        the trainer that is furthest). Training goes on meanwhile. A save that is still
        being written lets the next one skip, which `TrainStats.skipped_saves` counts.
    keep : int
        How many checkpoints of the store are kept, the newest ones.
    storage_options : mapping of str to object, optional
        For the file system of the URL: plain values. They are shown nowhere.

    Raises
    ------
    ValueError, TypeError
        For what is no URL, `every` below 1, or `keep` below 1.

    Examples
    --------
    >>> daskps.Checkpoints("s3://bucket/model/", every=500, storage_options={"key": "x"})
    daskps.Checkpoints('s3://bucket/model', every=500, keep=3)
    """

    url: Any
    every: str | int = "epoch"
    keep: int = 3
    storage_options: Mapping[str, Any] | None = field(default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", full_url(self.url))
        options_of(self.storage_options)
        if self.every != "epoch":
            if isinstance(self.every, str):
                raise ValueError(
                    f"every={self.every!r:.60} is not known; choose 'epoch' or a number "
                    f"of rounds"
                )
            whole(self.every, "every", least=1)
        whole(self.keep, "keep", least=1)

    def __repr__(self) -> str:
        return (
            f"daskps.Checkpoints({shown(self.url)!r}, every={self.every!r}, "
            f"keep={self.keep})"
        )


def check_resume(checkpoint: Any, *, resume: bool, reset: bool) -> None:
    """Refuse a run that cannot go on as it is told to.

    Raises
    ------
    ValueError, TypeError
        Saying what goes with what.
    """
    if checkpoint is not None and not isinstance(checkpoint, Checkpoints):
        raise TypeError(
            f"checkpoint is a daskps.Checkpoints, found {type(checkpoint).__name__}; "
            f"pass daskps.Checkpoints(url)"
        )
    if resume and checkpoint is None:
        raise ValueError(
            "resume=True needs checkpoint=, which says where the checkpoints are; pass "
            "checkpoint=daskps.Checkpoints(url)"
        )
    if resume and reset:
        raise ValueError(
            "resume=True goes on with the optimizer as it was, reset_optimizer=True "
            "begins anew; leave one of them out"
        )
