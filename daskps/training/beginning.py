"""Where in a store's epochs a run begins: after the last one, or in the middle of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from daskps.cluster.runs.epochs import epochs_of
from daskps.epochs import Epochs
from daskps.errors import CheckpointError
from daskps.training.progress import Progress, TrainedBy

if TYPE_CHECKING:
    from daskps.cluster.caller.link import Link
    from daskps.store.store import ParameterStore
    from daskps.training.result import Epoch
    from daskps.training.saves import Saves


class Beginning(NamedTuple):
    """Where a run begins."""

    progress: Progress
    #: Of the epochs before it, as far as a checkpoint has them.
    history: list[Epoch]
    #: The checkpoint that the store is loaded from before, "" for none.
    folder: str = ""


async def next_epoch(link: Link, store: ParameterStore) -> Beginning:
    """Return where the next epoch of a store begins."""
    found, _ = await epochs_of(link, store.uid, store.name)
    return Beginning(Progress(Epochs(found.following)), [])


async def last_round(
    link: Link, store: ParameterStore, saves: Saves | None
) -> Beginning:
    """Return where the run before has ended, in this store or in its last checkpoint.

    Raises
    ------
    CheckpointError
        Where the last checkpoint is further than the store, which is not new.
    """
    found, described = await epochs_of(link, store.uid, store.name)
    run = TrainedBy.from_json(json.loads(described)) if described else None
    before, folder = Progress(found, run), ""
    history: list[Epoch] = []
    if saves is not None and (saved := await saves.find()):
        if await saves.is_new():
            before, folder, history = saved.progress, saved.folder, saved.history
        elif saved.is_own:
            history = saved.history
        elif saved.progress.epochs.place > found.place:
            raise CheckpointError(
                f"store {store.name!r} has been trained or pushed to, and the checkpoint "
                f"{saved.folder}, which is further (epoch {saved.progress.epochs.ended}), "
                f"was saved of another one: it is loaded into a new store only. Make the "
                f"store anew, or pass resume=False or another URL",
                saved.folder,
            )
    if before.run is None:
        before = Progress(Epochs(before.epochs.following))
    ended = before.epochs.ended
    return Beginning(before, [e for e in history if e.epoch < ended], folder)
