"""Checkpoints of a run: where and how many, written beside it; and where a run begins."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from daskps.checkpoint import listing
from daskps.checkpoint.listing import CheckpointTarget
from daskps.checkpoint.storage import Storage, full_url, options_of, shown
from daskps.cluster.caller import recovery, saving
from daskps.cluster.protocol.deadline import Deadline
from daskps.cluster.runs.launch import epochs_of
from daskps.epochs import Epochs
from daskps.errors import CheckpointError, ConsistencyError, DaskPSError
from daskps.layout.arrays import counted
from daskps.store.arguments import whole
from daskps.training.progress import Progress, TrainedBy
from daskps.training.result import Epoch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.link import Link
    from daskps.store.handle import Handle
    from daskps.training.result import RunStatus


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
        Save after each epoch, or about every so many rounds (under SSP and ASP: clocks
        of the trainer that is furthest). Training goes on meanwhile. A save that is
        still being written lets the next one skip, which `TrainStats.skipped_saves`
        counts.
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


logger = logging.getLogger(__name__)
#: How long a save waits to hear of an epoch that has ended.
HEAR_SECONDS = 10.0
#: After how long a save that lets others skip is worth a word: until it is written the
#: rounds of skipped saves are lost with the store.
SLOW_SECONDS = 10.0
#: How long a run waits for the cut of a save: one may need what the run is to do next.
CUT_SECONDS = 10.0
#: How long a save may go on after a run that has failed.
FINISH_SECONDS = 60.0
#: How long the save of the end waits for one of somebody else's, and how often it
#: looks.
OTHERS_SECONDS, LOOK_SECONDS = 60.0, 0.5


class Beginning(NamedTuple):
    """Starting point of a run."""

    progress: Progress
    #: Of the epochs before it, as far as a checkpoint has them.
    history: list[Epoch]
    #: The checkpoint that the store is loaded from before, "" for none.
    folder: str = ""


class Saves:
    """The checkpoints of one call of `train`.

    Parameters
    ----------
    shards : ShardClient
        The store.
    where : Checkpoints
        Where to, how often, how many.
    """

    def __init__(self, shards: ShardClient, where: Checkpoints) -> None:
        self._shards, self._where = shards, where
        self._target = CheckpointTarget(where.url, options_of(where.storage_options))
        #: How many were written and left out, and where in its epochs the store was at
        #: the last one.
        self.n_saved = self.n_skipped = 0
        self.saved: Epochs | None = None
        self._task: asyncio.Task[None] | None = None
        self._began, self._last_clock = 0.0, 0
        self._has_said = False
        #: Set when an epoch was heard of, and when the save under way has its cut.
        self._news, self._is_cut = asyncio.Event(), asyncio.Event()
        #: Whether the run has ended, and no epoch will be heard of any more.
        self._is_over = False

    async def is_new(self) -> bool:
        """Return whether nobody has trained the store, or pushed to it."""
        rows = await self._shards.control("versions")
        return not any(version for of in rows for _, version in of)

    async def find(self) -> tuple[Beginning, bool] | None:
        """Return the newest checkpoint of a store of this name, if there is one.

        And whether it is of the store's own lineage.
        """
        found = await recovery.newest(self._shards, self._target)
        if found is None:
            return None
        folder, manifest = found
        values = {"epochs": list(manifest.epochs), **manifest.progress}
        progress = Progress.from_json(values, folder)
        at = Beginning(progress, history_of(manifest.history, folder), folder)
        return at, manifest.lineage == self._shards.meta.lineage

    async def load(self, begin: Beginning) -> None:
        """Load a checkpoint into the store, which is at version 0."""
        await recovery.fill(self._shards, self._target, begin.folder)
        self.saved = begin.progress.epochs
        ended, within = self.saved.place
        logger.info(
            "store %r goes on from its checkpoint %s: after %s and %s",
            self._shards.meta.name,
            begin.folder,
            counted(ended, "epoch"),
            counted(within, "round"),
        )

    async def hear(self, status: RunStatus, *, epoch: bool) -> None:
        """Begin a save where one is due, after an epoch or some rounds.

        It has its cut when this returns: the next act of the user may end the run.

        Raises
        ------
        CheckpointError, OSError
            Why nothing was ever saved; a later save that fails is only logged.
        """
        self._news.set()
        self._look()
        every, rounds = self._where.every, status.clock - self._last_clock
        if not epoch if every == "epoch" else rounds < int(every):
            return
        self._last_clock = status.clock
        if self._task is None:
            self._began = time.monotonic()
            self._is_cut.clear()
            self._task = asyncio.ensure_future(self._save(status))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CUT_SECONDS):
                    await self._is_cut.wait()
            return
        self.n_skipped += 1
        took = time.monotonic() - self._began
        if took >= SLOW_SECONDS and not self._has_said:
            self._has_said = True
            logger.warning(
                "daskps: a checkpoint of store %r is being written for %.0f s when the "
                "next one is due, which is left out; save less often, or to what is faster",
                self._shards.meta.name,
                took,
            )

    def begin_anew(self) -> None:
        """Count rounds from 0 on again, with those of a run that goes on after an error."""
        self._last_clock = 0

    async def finish(self, status: RunStatus, at: Epochs) -> None:
        """Wait for the save under way, and save the end of the run.

        Raises
        ------
        DaskPSError, OSError
            Why the end is not saved.
        """
        if self._task is not None:
            await asyncio.wait({self._task})
            # The one of the end says what is to be said.
            self._look(is_last=True)
        until = time.monotonic() + OTHERS_SECONDS
        while self.saved is None or self.saved.place != at.place:
            self._task = asyncio.ensure_future(self._save(status))
            await asyncio.wait({self._task})
            task, self._task = self._task, None
            try:
                task.result()
                return
            except ConsistencyError:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(LOOK_SECONDS)

    @property
    def newest(self) -> str:
        """Text about the newest checkpoint of the run."""
        if self.saved is None:
            return "there is no checkpoint of this run"
        ended, within = self.saved.place
        more = f" and {counted(within, 'round')}" if within else ""
        return f"the newest checkpoint has {counted(ended, 'epoch')}{more}"

    async def conclude(self, seconds: float) -> None:
        """Wait for the save under way when the run has failed; then give it up.

        Of one that is given up nothing counts.
        """
        self._is_over = True
        self._news.set()
        if self._task is None:
            return
        try:
            await asyncio.wait({self._task}, timeout=seconds)
            # The error of the run says more than why it was not saved.
            with contextlib.suppress(Exception):
                self._look(is_last=True)
        finally:
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)

    def _look(self, *, is_last: bool = False) -> None:
        """Take in a save that has ended; the first one that fails ends the run."""
        if self._task is None or not self._task.done():
            return
        task, self._task = self._task, None
        error = task.exception()
        if error is None:
            return
        if isinstance(error, ConsistencyError):
            logger.warning("daskps: a checkpoint is left out: %s", error)
        elif (self.n_saved or is_last) and isinstance(error, (DaskPSError, OSError)):
            logger.warning("daskps: a checkpoint could not be written: %s", error)
        else:
            raise error

    async def _save(self, status: RunStatus) -> None:
        deadline = Deadline(None, f"a checkpoint of store {self._shards.meta.name!r}")
        try:
            cut = await saving.take(self._shards, deadline)
        finally:
            self._is_cut.set()
        training = saving.TrainingState(hear=partial(self._history, status))
        how: dict[str, Any] = {"deadline": deadline, "training": training}
        _, manifest = await saving.write(self._shards, cut, self._target, **how)
        self.saved = Progress.from_json({"epochs": list(manifest.epochs)}).epochs
        self.n_saved += 1
        await asyncio.to_thread(self._retain)

    async def _history(self, status: RunStatus, at: Epochs) -> list[dict[str, Any]]:
        """Return what is known of the epochs that had ended at a cut.

        The last of them may have yet to be heard of.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEAR_SECONDS):
                while status.following < at.ended and not self._is_over:
                    self._news.clear()
                    await self._news.wait()
        return [asdict(entry) for entry in status.history_at(at)]

    def _retain(self) -> None:
        storage = Storage(self._target.url, self._target.options)
        listing.retain(storage, self._shards.meta.lineage, self._where.keep)
        listing.sweep(storage, time.time())


def history_of(rows: Sequence[Mapping[str, Any]], file: str) -> list[Epoch]:
    """Return the history that a checkpoint has.

    Raises
    ------
    CheckpointError
        For what is none.
    """
    names = {field.name for field in fields(Epoch)}
    try:
        # Fields that later versions add have defaults.
        found = [Epoch(**{n: row[n] for n in row if n in names}) for row in rows]
        for entry in found:
            float(entry.seconds), int(entry.epoch), dict(entry.metrics)
            if entry.loss is not None:
                float(entry.loss)
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{file}: its history is none of epochs; restore another checkpoint", file
        ) from None
    return found


async def last_round(link: Link, store: Handle, saves: Saves | None) -> Beginning:
    """Return where the run before has ended, in this store or in its last checkpoint.

    Raises
    ------
    CheckpointError
        Where the last checkpoint is further than the store, which is not new.
    """
    found, described = await epochs_of(link, store.uid, store.name)
    run = TrainedBy.from_json(json.loads(described)) if described else None
    begin = Beginning(Progress(found, run), [])
    if saves is not None and (newest := await saves.find()):
        saved, is_own = newest
        if await saves.is_new():
            begin = saved
        elif is_own:
            begin = begin._replace(history=saved.history)
        elif saved.progress.epochs.place > found.place:
            raise CheckpointError(
                f"store {store.name!r} has been trained or pushed to, and the checkpoint "
                f"{saved.folder}, which is further (epoch {saved.progress.epochs.ended}), "
                f"was saved of another one: it is loaded into a new store only. Make the "
                f"store anew, or pass resume=False or another URL",
                saved.folder,
            )
    progress = begin.progress
    if progress.run is None:
        progress = Progress(Epochs(progress.epochs.following))
    history = [e for e in begin.history if e.epoch < progress.epochs.ended]
    return begin._replace(progress=progress, history=history)
