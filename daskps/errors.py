"""Every error daskps raises on purpose.

::

    DaskPSError(Exception)
    ├── StoreExistsError(ValueError)        the name is taken
    ├── StoreNotFoundError(KeyError)        no store of that name, or deleted
    ├── StoreClosedError                    the handle or its store was closed
    ├── NoOptimizerError                    push to a store without an optimizer
    ├── LayoutError(ValueError)             shapes, sizes, patterns that cannot be
    ├── UnknownParameterError(KeyError)     no parameter of that name
    ├── PushRejectedError(ValueError)       an array that cannot be applied
    ├── NotEnoughWorkersError               fewer workers or trainers than asked
    ├── ConsistencyError(RuntimeError)      an expected race
    │   ├── StaleGenerationError            the shard moved since the message left
    │   ├── ClockError                      a step that is not the next one
    │   ├── ContributionLostError           a gradient went with its worker
    │   ├── ProducerExpiredError            too old to be told from a repeat
    │   ├── ShardBusyError                  no room; names the holder
    │   └── RunCancelledError               the run was fenced
    ├── ShardLostError(RuntimeError)        no live copy of a shard
    │   ├── RoundLostError                  a round failed each time it was tried
    │   ├── SnapshotLostError               nor of a snapshot's part
    │   └── StoreRestoredError              its store goes on from a checkpoint
    ├── CheckpointError                     missing, torn, damaged or too new
    │   └── UnsavedRunError                 a run whose end could not be saved
    ├── SchedulerLostError(RuntimeError)    and all stores with it
    ├── WorkerUnreachableError(RuntimeError) by this client, which reaches the scheduler
    ├── ProtocolError                       versions differ, host missing
    └── IllegalStateError(RuntimeError)     a bug of daskps; nothing catches it

A message says what was asked, where, why it was refused and what to do. All
constructor arguments go positionally to ``super().__init__`` and the text is made
in ``__str__``, because an exception that keeps its text elsewhere does not survive
the pickling between Dask processes.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

__all__ = [
    "CheckpointError",
    "ClockError",
    "ConsistencyError",
    "ContributionLostError",
    "DaskPSError",
    "IllegalStateError",
    "LayoutError",
    "NoOptimizerError",
    "NotEnoughWorkersError",
    "ProducerExpiredError",
    "ProtocolError",
    "PushRejectedError",
    "RoundLostError",
    "RunCancelledError",
    "SchedulerLostError",
    "ShardBusyError",
    "ShardLostError",
    "SnapshotLostError",
    "StaleGenerationError",
    "StoreClosedError",
    "StoreExistsError",
    "StoreNotFoundError",
    "StoreRestoredError",
    "UnknownParameterError",
    "UnsavedRunError",
    "WorkerUnreachableError",
]


class DaskPSError(Exception):
    """Root of all errors raised by daskps.

    Examples
    --------
    >>> issubclass(daskps.StoreNotFoundError, daskps.DaskPSError)
    True
    """

    def __str__(self) -> str:
        # KeyError, a second base of some subclasses, would show the repr.
        return " ".join(str(arg) for arg in self.args)


class StoreExistsError(DaskPSError, ValueError):
    """A store of that name exists on this cluster.

    Examples
    --------
    >>> store = daskps.create({"w": np.zeros(2)}, name="taken")
    >>> try:
    ...     daskps.create({"w": np.zeros(2)}, name="taken")
    ... except daskps.StoreExistsError as error:
    ...     print(error)
    a store named 'taken' exists on this cluster; open it with
    daskps.open('taken'), or pass overwrite=True to replace it
    >>> store.delete()
    """


class StoreNotFoundError(DaskPSError, KeyError):
    """No store of that name, or it was deleted or freed.

    Examples
    --------
    >>> try:
    ...     daskps.open("nothing")
    ... except daskps.StoreNotFoundError as error:
    ...     print(error)
    no store named 'nothing' on this cluster; ...
    """


class StoreClosedError(DaskPSError):
    """The handle, or the session store behind it, was closed.

    Examples
    --------
    >>> store = daskps.create({"w": np.zeros(2)}, name="shut")
    >>> store.delete()
    >>> try:
    ...     store.pull()
    ... except daskps.StoreClosedError as error:
    ...     print(error)
    store 'shut' was deleted by this handle; create it again
    """


class NoOptimizerError(DaskPSError):
    """A gradient was pushed to a store that has no optimizer.

    Examples
    --------
    >>> store = daskps.create({"w": np.zeros(2)})
    >>> try:
    ...     store.push({"w": np.ones(2)})
    ... except daskps.NoOptimizerError as error:
    ...     print(error)
    a gradient was pushed for 'w', but the store was created without an
    optimizer for it; pass create(..., optimizer=...), or use add for a plain +=
    """


class LayoutError(DaskPSError, ValueError):
    """Parameters, patterns or sizes that no layout can hold.

    Examples
    --------
    >>> try:
    ...     daskps.create({"w": np.array(["a", "b"])})
    ... except daskps.LayoutError as error:
    ...     print(error)
    parameter 'w' has dtype <U1, which a store cannot hold; convert it to one
    of float16, float32, float64, ...
    """


class UnknownParameterError(DaskPSError, KeyError):
    """The store holds no parameter of that name.

    Examples
    --------
    >>> store = daskps.create({"w": np.zeros(2)})
    >>> try:
    ...     store.pull("v")
    ... except daskps.UnknownParameterError as error:
    ...     print(error)
    no parameter 'v' in this store; it holds ['w']
    """


class PushRejectedError(DaskPSError, ValueError):
    """An array that cannot be applied; nothing was changed.

    But where a codec of your own cannot decode at a shard what it could at the trainer:
    that shard has taken nothing, and others may have taken their parts. It says so.

    Examples
    --------
    >>> store = daskps.create({"w": np.zeros(2)}, optimizer=daskps.optim.SGD(0.1))
    >>> try:
    ...     store.push({"w": np.ones(3)})
    ... except daskps.PushRejectedError as error:
    ...     print(error)
    the gradient of 'w' has shape (3,), the parameter (2,); shapes must be equal,
    nothing is broadcast
    """


class NotEnoughWorkersError(DaskPSError):
    """Fewer workers or trainers than were asked for.

    Examples
    --------
    >>> import dask
    >>> try:
    ...     with dask.config.set({"daskps.register-timeout": "10ms"}):
    ...         daskps.create({"w": np.zeros(2)}, servers="resource:PS")
    ... except daskps.NotEnoughWorkersError as error:
    ...     print(error)
    servers='resource:PS' found 0 running workers; the cluster has 2. ...
    """


class ConsistencyError(DaskPSError, RuntimeError):
    """An expected race, retried inside where that is possible.

    Examples
    --------
    >>> def loop(trainer, store):
    ...     store.push({"w": np.ones(2)})  # not of this run
    >>> store = daskps.create({"w": np.zeros(2)}, optimizer=daskps.optim.SGD(0.1))
    >>> try:
    ...     daskps.run(store, loop, [store], sync="bsp")
    ... except daskps.ConsistencyError as error:
    ...     print(error)
    run ... has this store to itself (sync='bsp'), a gradient from outside
    was refused; push through its trainers, wait until it ends, ...
    """


class StaleGenerationError(ConsistencyError):
    """The message was meant for another incarnation of the shard.

    Examples
    --------
    >>> issubclass(daskps.StaleGenerationError, daskps.ConsistencyError)
    True
    """


class ClockError(ConsistencyError):
    """A trainer's step is not the one the shard expects next.

    Examples
    --------
    >>> issubclass(daskps.ClockError, daskps.ConsistencyError)
    True
    """


class ContributionLostError(ConsistencyError):
    """A gradient that a round needs went with its worker.

    Users do not see it: the round begins anew, or a trainer sends its clock again.

    Examples
    --------
    >>> issubclass(daskps.ContributionLostError, daskps.ConsistencyError)
    True
    """


class ProducerExpiredError(ConsistencyError):
    """A push of which a shard no longer knows whether it has applied it.

    Its producer is too long gone, or has given up too many. Nothing was applied now.

    Examples
    --------
    >>> issubclass(daskps.ProducerExpiredError, daskps.ConsistencyError)
    True
    """


class ShardBusyError(ConsistencyError):
    """The shard was in use for too long, or has no room for one more producer.

    Examples
    --------
    >>> issubclass(daskps.ShardBusyError, daskps.ConsistencyError)
    True
    """


class RunCancelledError(ConsistencyError):
    """The run this trainer belongs to was fenced.

    Examples
    --------
    >>> issubclass(daskps.RunCancelledError, daskps.ConsistencyError)
    True
    """


class ShardLostError(DaskPSError, RuntimeError):
    """No live copy of a shard is left.

    Parameters
    ----------
    store : str
        Name of the store.
    shard : int
        Index of the shard.
    worker, reason : str
        Address of the worker that held it, and the cause, such as that worker's death.
    away : bool
        Whether its memory is whole, as far as is known, and only its run has ended.

    Examples
    --------
    >>> error = daskps.ShardLostError("model", 0, "tcp://10.0.0.7:4040", "has left")
    >>> error.shard, error.worker
    (0, 'tcp://10.0.0.7:4040')
    """

    def __init__(  # noqa: PLR0917 - what is not given by position is not pickled
        self, store: str, shard: int, worker: str, reason: str, away: bool = False
    ) -> None:
        super().__init__(store, shard, worker, reason, away)
        self.store, self.shard = store, shard
        self.worker, self.reason, self.away = worker, reason, away

    def __str__(self) -> str:
        if self.away:
            return (
                f"shard {self.shard} of store {self.store!r} was away for too long: "
                f"worker {self.worker} {self.reason}. Its memory is whole: end or "
                f"wake the process that keeps it, then begin the run again; a run "
                f"waits as long as daskps.run-away-timeout says."
            )
        return (
            f"shard {self.shard} of store {self.store!r} is lost: worker "
            f"{self.worker} {self.reason}. No other copy is known; make the "
            f"store again from a checkpoint, daskps.restore(url), or from your own values."
        )


class RoundLostError(ShardLostError):
    """A round of graph execution failed each time it was begun anew.

    Parameters
    ----------
    store, shard, worker, reason, away
        As of a :class:`ShardLostError`, of a shard that is furthest behind.

    Examples
    --------
    >>> issubclass(daskps.RoundLostError, daskps.ShardLostError)
    True
    """

    def __str__(self) -> str:
        return (
            f"a round of store {self.store!r} was begun anew too often; shard "
            f"{self.shard} on worker {self.worker} still lacks it. The last time: "
            f"{self.reason}. All shards hold the round before it; mend the workers and "
            f"train again"
        )


class SnapshotLostError(ShardLostError):
    """A part of a snapshot is gone with its worker; the store itself may be well.

    Parameters
    ----------
    store, shard, worker, reason, away
        As of a :class:`ShardLostError`, of the worker that had the copy.

    Examples
    --------
    >>> issubclass(daskps.SnapshotLostError, daskps.ShardLostError)
    True
    """

    def __str__(self) -> str:
        return (
            f"shard {self.shard} of a snapshot of store {self.store!r} is lost: worker "
            f"{self.worker} {self.reason}. A snapshot cannot be computed again; take "
            f"another one with store.snapshot()."
        )


class StoreRestoredError(ShardLostError):
    """A shard was lost, and its store has been restored from its last checkpoint.

    All later updates are gone. A handle raises it once; its next call goes to the
    restored store.

    Parameters
    ----------
    store, shard, worker, reason, away
        As of a :class:`ShardLostError`, of the shard that was lost.
    checkpoint : str
        URL of what was loaded.
    saved, version : int
        When that was written, in seconds since 1970, and the largest version of a shard
        in it.
    lost : int
        How many versions came after it at least: as many as shards that live and the
        handle that raises this know of.
    uid : str
        Of the store as it goes on.

    Examples
    --------
    >>> error = daskps.StoreRestoredError(
    ...     "model", 0, "tcp://10.0.0.7:4040", "died", False, "s3://a/ckpt", 0, 120, 7
    ... )
    >>> error.version, error.lost, error.time.year
    (120, 7, 1970)
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what is not given by position is not pickled
        self,
        store: str,
        shard: int,
        worker: str,
        reason: str,
        away: bool = False,
        checkpoint: str = "",
        saved: int = 0,
        version: int = 0,
        lost: int = 0,
        uid: str = "",
    ) -> None:
        super().__init__(store, shard, worker, reason, away)
        self.args = (*self.args, checkpoint, saved, version, lost, uid)
        self.checkpoint, self.version, self.lost = checkpoint, version, lost
        self.time, self.uid = datetime.fromtimestamp(saved, UTC), uid

    def __str__(self) -> str:
        gone = "versions" if self.lost > 1 else "version"
        gone = f"at least {self.lost:,} {gone}" if self.lost else "if anything"
        return (
            f"shard {self.shard} of store {self.store!r} was lost: worker {self.worker} "
            f"{self.reason}. The store was restored from {self.checkpoint} of "
            f"{self.time:%Y-%m-%d %H:%M:%S} UTC, at version {self.version:,}: what came "
            f"after that is gone, {gone}. Call again to go on from there; a run goes on "
            f"with train(..., resume=True)"
        )


class CheckpointError(DaskPSError):
    """A checkpoint that is missing, torn, damaged, of a newer format, or does not fit.

    Nothing of it is loaded then.

    Parameters
    ----------
    message : str
        The problem, and the way out.
    file, parameter : str, optional
        The file that is meant, within the checkpoint, and whose values it has.

    Examples
    --------
    >>> error = daskps.CheckpointError("it is damaged", "weights/w/c/0", "w")
    >>> error.file, error.parameter
    ('weights/w/c/0', 'w')
    """

    def __init__(self, message: str, file: str = "", parameter: str = "") -> None:
        super().__init__(message, file, parameter)
        self.file, self.parameter = file, parameter

    def __str__(self) -> str:
        return str(self.args[0])


class UnsavedRunError(CheckpointError):
    """A run of :func:`daskps.train` that has ended, and whose end could not be saved.

    Its `__cause__` is why. The store is as the run has left it, and can be saved elsewhere.

    Parameters
    ----------
    message : str
        Why, what is saved, and what to do.
    result : TrainResult
        The result that `train` would have returned.

    Examples
    --------
    >>> issubclass(daskps.UnsavedRunError, daskps.CheckpointError)
    True
    """

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.args, self.result = (message, result), result

    def __repr__(self) -> str:
        # Weights and history are not for a line of a log.
        return f"{type(self).__name__}({self.args[0]!r})"


class SchedulerLostError(DaskPSError, RuntimeError):
    """The scheduler of the cluster is gone, or out of reach, and its stores with it.

    Checkpoints remain: :func:`daskps.restore` makes a store of one, and `train` resumes
    from there. Its `__cause__` is what the call heard first.

    Examples
    --------
    >>> issubclass(daskps.SchedulerLostError, daskps.DaskPSError)
    True
    """


class WorkerUnreachableError(DaskPSError, RuntimeError):
    """A worker that answers the scheduler, and not this client.

    Parameters
    ----------
    worker, scheduler : str
        The addresses of both.
    reason : str
        How the client's connection to the worker failed.

    Examples
    --------
    >>> error = daskps.WorkerUnreachableError("tcp://10.0.0.7:4040", "tcp://gate:8786", "")
    >>> error.worker
    'tcp://10.0.0.7:4040'
    """

    def __init__(self, worker: str, scheduler: str, reason: str) -> None:
        super().__init__(worker, scheduler, reason)
        self.worker = worker

    def __str__(self) -> str:
        _, scheduler, reason = self.args
        return (
            f"worker {self.worker} cannot be reached from this client ({reason}), but "
            f"from the scheduler at {scheduler}, which it answers. Each of its shards "
            f"has applied each earlier call once or not at all. Let this process "
            f"connect to the addresses and ports of the workers, or make the call in a "
            f"task of the cluster: client.submit(...). snapshot() and run() need the "
            f"scheduler alone. The worker is called again in a minute"
        )


class ProtocolError(DaskPSError):
    """Two ends that do not speak the same protocol, or one that does not answer.

    Examples
    --------
    >>> issubclass(daskps.ProtocolError, daskps.DaskPSError)
    True
    """


class IllegalStateError(DaskPSError, RuntimeError):
    """A broken invariant of daskps itself. Please report it.

    Examples
    --------
    >>> issubclass(daskps.IllegalStateError, daskps.DaskPSError)
    True
    """
