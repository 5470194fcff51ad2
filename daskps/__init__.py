"""A distributed store of named arrays on the Dask cluster you already have."""

from importlib import import_module as _import_module
from typing import Any as _Any

from daskps import aio, codecs, init, optim
from daskps.consistency import ASP, BSP, SSP
from daskps.errors import (
    CheckpointError,
    ClockError,
    ConsistencyError,
    ContributionLostError,
    DaskPSError,
    IllegalStateError,
    LayoutError,
    NoOptimizerError,
    NotEnoughWorkersError,
    ProducerExpiredError,
    ProtocolError,
    PushRejectedError,
    RoundLostError,
    RunCancelledError,
    SchedulerLostError,
    ShardBusyError,
    ShardLostError,
    SnapshotLostError,
    StaleGenerationError,
    StoreClosedError,
    StoreExistsError,
    StoreNotFoundError,
    StoreRestoredError,
    UnknownParameterError,
    UnsavedRunError,
    WorkerUnreachableError,
)
from daskps.layout.text_ids import hash_ids
from daskps.layout.trees import unflatten
from daskps.store.array import ParameterArray
from daskps.store.changes import Changes
from daskps.store.checkpoints import CheckpointInfo, list_checkpoints
from daskps.store.lifecycle import create, open, restore  # noqa: A004 - used as `daskps.open`, like zarr.open
from daskps.store.listed import StoreInfo, delete, list_stores
from daskps.store.replica import Replica
from daskps.store.snapshot import Snapshot
from daskps.store.specs import ArraySpec, RowGrad, TableSpec
from daskps.store.store import ParameterStore
from daskps.store.table import ParameterTable
from daskps.store.view import predict
from daskps.training import stop
from daskps.training.callbacks import Log, ProgressBar, ReduceOnPlateau
from daskps.training.data.rows import partition, split_batch
from daskps.training.fit import TrainResult, run, train
from daskps.training.monitoring import Monitor
from daskps.training.saves import Checkpoints
from daskps.training.stats import RankStats, TrainStats
from daskps.training.timeline import Timeline
from daskps.training.trainer import Trainer
from daskps.training.watching import progress
from daskps.version import VERSION as __version__  # noqa: N811 - the name every package gives it
from daskps.version import Version

__all__ = [
    "ASP",
    "BSP",
    "SSP",
    "ArraySpec",
    "Changes",
    "CheckpointError",
    "CheckpointInfo",
    "Checkpoints",
    "ClockError",
    "ConsistencyError",
    "ContributionLostError",
    "DaskPSError",
    "IllegalStateError",
    "LayoutError",
    "Log",
    "Monitor",
    "NoOptimizerError",
    "NotEnoughWorkersError",
    "ParameterArray",
    "ParameterStore",
    "ParameterTable",
    "ProducerExpiredError",
    "ProgressBar",
    "ProtocolError",
    "PushRejectedError",
    "RankStats",
    "ReduceOnPlateau",
    "Replica",
    "RoundLostError",
    "RowGrad",
    "RunCancelledError",
    "SchedulerLostError",
    "ShardBusyError",
    "ShardLostError",
    "Snapshot",
    "SnapshotLostError",
    "StaleGenerationError",
    "StoreClosedError",
    "StoreExistsError",
    "StoreInfo",
    "StoreNotFoundError",
    "StoreRestoredError",
    "TableSpec",
    "Timeline",
    "TrainResult",
    "TrainStats",
    "Trainer",
    "UnknownParameterError",
    "UnsavedRunError",
    "Version",
    "WorkerUnreachableError",
    "__version__",
    "aio",
    "codecs",
    "create",
    "delete",
    "hash_ids",
    "init",
    "list_checkpoints",
    "list_stores",
    "open",
    "optim",
    "partition",
    "predict",
    "progress",
    "restore",
    "run",
    "split_batch",
    "stop",
    "train",
    "unflatten",
]


def __getattr__(name: str) -> _Any:
    """Import the module for another library once somebody asks for it."""
    if name not in ("jax", "sklearn", "torch"):
        raise AttributeError(f"module 'daskps' has no attribute {name!r}")
    try:
        return _import_module(f"daskps.{name}")
    except ModuleNotFoundError as error:
        error.add_note(f"install daskps[{name}]")
        raise
