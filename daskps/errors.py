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
    │   └── RoundLostError                  a round failed each time it was tried
    ├── ProtocolError                       versions differ, host missing
    └── IllegalStateError(RuntimeError)     a bug of daskps; nothing catches it

A message says what was asked, where, why it was refused and what to do. All
constructor arguments go positionally to ``super().__init__`` and the text is made
in ``__str__``, because an exception that keeps its text elsewhere does not survive
the pickling between Dask processes.
"""

from __future__ import annotations

__all__ = [
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
    "ShardBusyError",
    "ShardLostError",
    "StaleGenerationError",
    "StoreClosedError",
    "StoreExistsError",
    "StoreNotFoundError",
    "UnknownParameterError",
]


class DaskPSError(Exception):
    """Root of all errors raised by daskps."""

    def __str__(self) -> str:
        # KeyError, a second base of some subclasses, would show the repr.
        return " ".join(str(arg) for arg in self.args)


class StoreExistsError(DaskPSError, ValueError):
    """A store of that name exists on this cluster."""


class StoreNotFoundError(DaskPSError, KeyError):
    """No store of that name, or it was deleted or freed."""


class StoreClosedError(DaskPSError):
    """The handle, or the session store behind it, was closed."""


class NoOptimizerError(DaskPSError):
    """A gradient was pushed to a store that has no optimizer."""


class LayoutError(DaskPSError, ValueError):
    """Parameters, patterns or sizes that no layout can hold."""


class UnknownParameterError(DaskPSError, KeyError):
    """The store holds no parameter of that name."""


class PushRejectedError(DaskPSError, ValueError):
    """An array that cannot be applied; nothing was changed."""


class NotEnoughWorkersError(DaskPSError):
    """Fewer workers or trainers than were asked for."""


class ConsistencyError(DaskPSError, RuntimeError):
    """An expected race, retried inside where that is possible."""


class StaleGenerationError(ConsistencyError):
    """The message was meant for another incarnation of the shard."""


class ClockError(ConsistencyError):
    """A trainer's step is not the one the shard expects next."""


class ContributionLostError(ConsistencyError):
    """A gradient that a round needs went with its worker."""


class ProducerExpiredError(ConsistencyError):
    """A push too old, or from a producer too long gone, to be told from a repeat."""


class ShardBusyError(ConsistencyError):
    """The shard has no room for one more producer."""


class RunCancelledError(ConsistencyError):
    """The run this trainer belongs to was fenced."""


class ShardLostError(DaskPSError, RuntimeError):
    """No live copy of a shard is left.

    Parameters
    ----------
    store : str
        Name of the store.
    shard : int
        Index of the shard.
    worker : str
        Address of the worker that held it.
    reason : str
        What happened to that worker.
    """

    def __init__(self, store: str, shard: int, worker: str, reason: str) -> None:
        super().__init__(store, shard, worker, reason)
        self.store, self.shard = store, shard
        self.worker, self.reason = worker, reason

    def __str__(self) -> str:
        return (
            f"shard {self.shard} of store {self.store!r} is lost: worker "
            f"{self.worker} {self.reason}. No other copy exists and there is no "
            f"checkpoint; create the store again from your own values."
        )


class RoundLostError(ShardLostError):
    """A round of graph execution failed each time it was begun anew.

    Parameters
    ----------
    store : str
        Name of the store.
    shard : int
        Number of a shard that is furthest behind.
    worker : str
        Address of its worker.
    reason : str
        What failed the last time.
    """

    def __str__(self) -> str:
        return (
            f"a round of store {self.store!r} was begun anew too often; shard "
            f"{self.shard} on worker {self.worker} still lacks it. The last time: "
            f"{self.reason}. The store keeps the round before; mend the workers and "
            f"train again"
        )


class ProtocolError(DaskPSError):
    """Two ends that do not speak the same protocol, or one that does not answer."""


class IllegalStateError(DaskPSError, RuntimeError):
    """A broken invariant of daskps itself. Please report it."""
