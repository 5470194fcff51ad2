"""Saves of a store beside its run, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import asdict, fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from daskps.checkpoint import listing
from daskps.checkpoint.storage import Storage, options_of
from daskps.cluster.caller import filling, saving
from daskps.cluster.wire.deadline import Deadline
from daskps.errors import CheckpointError, ConsistencyError, DaskPSError
from daskps.layout.arrays import counted
from daskps.training.progress import Progress
from daskps.training.result import Epoch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.epochs import Epochs
    from daskps.training.checkpoints import Checkpoints
    from daskps.training.result import RunStatus

logger = logging.getLogger(__name__)
#: How long a save waits to hear of an epoch that has ended.
HEAR_SECONDS = 10.0
#: After how long a save that lets others skip is worth a word: what it skips is lost with
#: the store until it is written.
SLOW_SECONDS = 10.0
#: How long a run waits for the cut of a save: one may need what the run is to do next.
CUT_SECONDS = 10.0
#: How long a save may go on after a run that has failed.
FINISH_SECONDS = 60.0
#: How long the save of the end waits for one of somebody else's, and how often it looks.
OTHERS_SECONDS, LOOK_SECONDS = 60.0, 0.5


class Saved(NamedTuple):
    """The newest checkpoint that a run may go on from."""

    folder: str
    progress: Progress
    #: Of the epochs that had ended.
    history: list[Epoch]
    #: Whether it is of the store's own lineage.
    is_own: bool


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
        self._target = saving.CheckpointTarget(
            where.url, options_of(where.storage_options)
        )
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

    async def find(self) -> Saved | None:
        """Return the newest checkpoint of a store of this name, if there is one."""
        found = await filling.newest(self._shards, self._target)
        if found is None:
            return None
        folder, manifest = found
        values = {"epochs": list(manifest.epochs), **manifest.progress}
        progress = Progress.from_json(values, folder)
        history = history_of(manifest.history, folder)
        is_own = manifest.lineage == self._shards.meta.lineage
        return Saved(folder, progress, history, is_own)

    async def load(self, folder: str, progress: Progress) -> None:
        """Load a checkpoint into the store, which is at version 0."""
        described = progress.described
        await filling.fill(self._shards, self._target, folder, described)
        self.saved = progress.epochs
        ended, within = self.saved.place
        logger.info(
            "store %r goes on from its checkpoint %s: after %s and %s",
            self._shards.meta.name,
            folder,
            counted(ended, "epoch"),
            counted(within, "round"),
        )

    async def hear(self, status: RunStatus, *, epoch: bool) -> None:
        """Begin a save where one is due, after an epoch or some rounds.

        It has its cut when this returns: what the user does next may end the run.

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
        """What the newest checkpoint of the run is, in words."""
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
        # What later versions add has a default.
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
