"""The arguments of `paramserv`, or the error that says which ones it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.store.arguments import flag, whole
from daskps.training.functions import check_function

if TYPE_CHECKING:
    from collections.abc import Callable

#: How the functions are called.
CALLS = {
    "upd": "upd(model, hyperparams, features, labels)",
    "agg": "agg(model, hyperparams, gradients)",
    "val": "val(model, hyperparams, features, labels)",
}
#: Our words for their schemes.
SCHEMES = {
    "DISJOINT_CONTIGUOUS": "contiguous",
    "DISJOINT_ROUND_ROBIN": "round_robin",
    "DISJOINT_RANDOM": "random",
    "OVERLAP_RESHUFFLE": "reshuffle",
}
#: Values that only SystemML takes, and why they are refused here.
REFUSED = {
    "mode": {
        "REMOTE_SPARK": "there is no Spark here; LOCAL has workers on all of the cluster",
        "FEDERATED": "data stays where it lies with daskps.train, which takes a list of "
        "futures, one for each trainer",
    },
    "utype": {
        "SBP": "it waits for all workers; choose BSP",
        "SSP": "it was never built there either; daskps.train has it as "
        "sync=daskps.SSP(s)",
    },
    "scheme": dict.fromkeys(
        (
            "KEEP_DATA_ON_WORKER",
            "SHUFFLE",
            "REPLICATE_TO_MAX",
            "SUBSAMPLE_TO_MIN",
            "BALANCE_TO_AVG",
        ),
        "it is for federated data; daskps.partition(balance=...) evens out parts",
    ),
    "runtime_balancing": dict.fromkeys(
        ("BASELINE", "CYCLE_MIN", "CYCLE_AVG", "CYCLE_MAX", "SCALE_BATCH"),
        "it is for federated data; parts differ by one row at most here",
    ),
    "checkpointing": dict.fromkeys(
        ("EPOCH", "EPOCH10"),
        "it never wrote anything; daskps.train(checkpoint=...) does",
    ),
}
CHOICES = {
    "mode": ("LOCAL",),
    "utype": ("ASP", "BSP"),
    "freq": ("EPOCH", "BATCH", "NBATCHES"),
    "scheme": tuple(SCHEMES),
    "runtime_balancing": ("NONE",),
    "checkpointing": ("NONE",),
}


def check_choice(what: str, value: Any) -> str:
    """Return one of the words that an argument has, or refuse it by its name."""
    choices = CHOICES[what]
    if isinstance(value, str):
        if value in choices:
            return value
        if (why := REFUSED.get(what, {}).get(value)) is not None:
            raise ValueError(f"{what}={value!r} is not here: {why}")
    raise ValueError(
        f"{what}={value!r} is not known; choose one of {', '.join(choices)}"
    )


def check_backups(workers: Any, k: int, utype: str) -> None:
    """Refuse numbers of backup workers that cannot be, and those without a meaning."""
    backups = whole(workers, "num_backup_workers")
    if backups == 1:  # theirs where nothing is said, and of no effect
        return
    if not 0 <= backups < k:
        raise ValueError(
            f"num_backup_workers must be at least 0 and below k={k}, found {backups}"
        )
    if backups:
        raise ValueError(
            f"num_backup_workers={backups} has no meaning for utype={utype!r}, which "
            f"waits for all; leave it out"
        )


def batches_between(freq: str, nbatches: Any) -> int:
    """Return the batches between two exchanges; 0 for those of an epoch."""
    n = whole(nbatches, "nbatches", least=1)
    if freq != "NBATCHES" and n != 1:
        raise ValueError(
            f"nbatches={n} has a meaning for freq='NBATCHES' alone, found freq={freq!r}"
        )
    return {"EPOCH": 0, "BATCH": 1, "NBATCHES": n}[freq]


def check_validation(val: Any, data: tuple[Any, Any]) -> Callable[..., Any] | None:
    """Return the function that validates, which comes with its data or not at all."""
    given = [value is not None for value in (val, *data)]
    if any(given) and not all(given):
        raise ValueError("val, val_features and val_labels go together; give all three")
    if val is not None:
        check_function("val", val, CALLS["val"])
    checked: Callable[..., Any] | None = val
    return checked


def check_averaging(average: Any, utype: str) -> bool:
    """Return whether models are averaged, where that can be."""
    if flag(average, "modelAvg") and utype == "ASP":
        raise ValueError(
            "modelAvg=True needs utype='BSP': without rounds there is no mean"
        )
    return bool(average)
