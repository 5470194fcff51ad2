"""`paramserv`: the call that trains a model with a function for gradients and one for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps.cluster.caller.link import blocking_link, current_link
from daskps.cluster.runs.parts import threads_of
from daskps.compat.systemml import arguments
from daskps.compat.systemml.structure import Structure
from daskps.compat.systemml.worker import MODEL, Aggregate, Plan
from daskps.limits import check_trainers
from daskps.store.arguments import flag, whole
from daskps.training.functions import check_function
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def paramserv(  # noqa: PLR0913 - their contract
    *,
    model: Sequence[Any] | Mapping[str, Any],
    features: Any,
    labels: Any,
    upd: Callable[..., Any],
    agg: Callable[..., Any],
    val_features: Any = None,
    val_labels: Any = None,
    val: Callable[..., Any] | None = None,
    mode: str = "LOCAL",
    utype: str = "ASP",
    freq: str = "EPOCH",
    epochs: int,
    batchsize: int = 64,
    nbatches: int = 1,
    k: int | None = None,
    scheme: str = "DISJOINT_CONTIGUOUS",
    runtime_balancing: str = "NONE",
    weighting: bool = False,
    hyperparams: Any = None,
    checkpointing: str = "NONE",
    seed: int | None = None,
    modelAvg: bool = False,  # noqa: N803 - their name
    num_backup_workers: int = 1,
    he: bool = False,
) -> Any:
    """Train a model on several workers, with functions for gradients and for updates.

    Parameters
    ----------
    model : sequence or mapping of str to array_like
        The matrices to begin with, by place or by name.
    features : ndarray, shape (n, ...)
        One row for each case.
    labels : ndarray, shape (n, ...)
        As many rows.
    upd : callable
        ``upd(model, hyperparams, features, labels)`` returns the gradients of a batch,
        as many and of what shapes it likes, always the same. Also called once here, with
        the first batch, to know these.
    agg : callable
        ``agg(model, hyperparams, gradients)`` returns the new model. Runs on the server,
        and for the steps that workers make by themselves on these.
    val_features, val_labels : ndarray, optional
        Cases to validate with.
    val : callable, optional
        ``val(model, hyperparams, features, labels)`` returns loss and accuracy. They are
        logged after each epoch, on the worker that has the first part of the rows.
    mode : {"LOCAL"}
        Workers are those of the Dask cluster.
    utype : {"ASP", "BSP"}
        "ASP": `agg` is called with the gradients of each push. "BSP": all workers push,
        and it is called once with the **sum**.
    freq : {"EPOCH", "BATCH", "NBATCHES"}
        When workers push: after an epoch, a batch, or `nbatches` of them. In between
        they update models of their own by `agg`, and then push the sum of the gradients.
    epochs : int
        Passes over the rows.
    batchsize : int
        Rows of a batch; the last one may be short. Batches come in the order of the rows.
    nbatches : int
        Batches between two pushes, with ``freq="NBATCHES"``.
    k : int, optional
        Number of workers; by default as many as the cluster has threads.
    scheme : {"DISJOINT_CONTIGUOUS", "DISJOINT_ROUND_ROBIN", "DISJOINT_RANDOM", \
"OVERLAP_RESHUFFLE"}
        How rows are dealt out, see :func:`daskps.partition`. No row is lost.
    runtime_balancing : {"NONE"}
        For federated data alone.
    weighting : bool
        Whether what a worker pushes counts by its rows: times own rows / mean rows.
    hyperparams : object, optional
        Handed through to the functions.
    checkpointing : {"NONE"}
        Theirs is never used.
    seed : int, optional
        Seed of `scheme`; by default another one at each call.
    modelAvg : bool
        Whether workers push their models and the server takes the mean; BSP only.
    num_backup_workers : int
        For "SBP", which is refused.
    he : bool
        Homomorphic encryption, which is refused.

    Returns
    -------
    list or dict of str to ndarray
        The last model, of float64, as it was given.

    Raises
    ------
    ValueError, TypeError
        For arguments that cannot be, naming the choices, before anything has begun; and
        for models and gradients of other structures.
    LayoutError
        Where the model does not fit into one worker.
    Exception
        The error of a function, with the worker's rank in a note.

    Notes
    -----
    After Boehm et al., SYSTEMML-2083 and SYSTEMML-2086. The model is one parameter of a
    store with one shard, and `agg` its :class:`daskps.optim.Function`.

    Examples
    --------
    Workers of two rows each, with a step after each epoch of both:

    >>> from daskps.compat import systemml
    >>> found = systemml.paramserv(
    ...     model={"w": np.zeros(1)}, features=np.arange(4.0), labels=np.zeros(4),
    ...     upd=lambda model, hyperparams, X, y: {"dw": X.sum(keepdims=True)},
    ...     agg=lambda model, hyperparams, grads: {"w": model["w"] + grads["dw"]},
    ...     utype="BSP", freq="BATCH", epochs=3, k=2,
    ... )
    >>> found
    {'w': array([18.])}
    """
    blocking_link("paramserv waits for its workers")
    chosen = arguments.check_choice
    chosen("mode", mode)
    kind, often = chosen("utype", utype), chosen("freq", freq)
    words = arguments.SCHEMES[chosen("scheme", scheme)]
    chosen("runtime_balancing", runtime_balancing)
    chosen("checkpointing", checkpointing)
    average = arguments.check_averaging(modelAvg, kind)
    if flag(he, "he"):
        raise ValueError("he=True is not here: sums of encrypted models; leave it out")
    for what, function in (("upd", upd), ("agg", agg)):
        check_function(what, function, arguments.CALLS[what])
    check = arguments.check_validation(val, (val_features, val_labels))
    count = _threads() if k is None else whole(k, "k", least=1)
    check_trainers(count, graph=False)
    arguments.check_backups(num_backup_workers, count, kind)
    how_often = arguments.batches_between(often, nbatches)
    n_epochs = whole(epochs, "epochs", least=1)
    size = whole(batchsize, "batchsize", least=1)
    begin = Structure.of("model", model)
    if seed is not None:
        whole(seed, "seed", least=0)
    parts = daskps.partition(
        _rows("features", features),
        _rows("labels", labels),
        count,
        scheme=words,
        seed=seed,
    )
    lengths = [len(X) for X, _ in parts]
    if not any(lengths):
        raise ValueError("features have no rows; give at least one")
    X, y = next(part for part in parts if len(part[0]))
    with user_code("upd"):
        first = upd(begin.unflat(begin.flat(model)), hyperparams, X[:size], y[:size])
    gradients = Structure.of("what upd returned", first)
    made = replace(begin, what="what agg returned")
    aggregate = Aggregate(agg, hyperparams, made, gradients)
    plan = Plan(
        upd=upd,
        aggregate=aggregate,
        size=max(begin.size, gradients.size),
        epochs=n_epochs,
        batch_size=size,
        every=how_often,
        bsp=kind == "BSP",
        average=average,
        weighting=flag(weighting, "weighting"),
        most_rows=max(lengths),
        mean_rows=sum(lengths) / count,
        val=check,
        val_data=None if check is None else (val_features, val_labels),
    )
    found = np.zeros(plan.size)
    found[: begin.size] = begin.flat(model)
    rule = daskps.optim.Function(aggregate)
    with daskps.create({MODEL: found}, optimizer=rule, shards=1) as store:
        daskps.run(
            store,
            plan.work,
            parts,
            sync=kind.lower(),
            reduce="sum" if kind == "BSP" else "mean",
            resumable=True,
            callbacks=(),
        )
        return begin.unflat(store.pull()[MODEL])


def _threads() -> int:
    """Return how many threads the cluster has."""
    link = current_link()
    return sum(link.run(lambda: threads_of(link)).values())


def _rows(what: str, given: Any) -> Any:
    """Return rows as an array, or refuse what has to be fetched for that."""
    if hasattr(given, "__dask_graph__"):
        raise TypeError(
            f"{what} is a dask collection, and paramserv takes matrices of this process; "
            f"daskps.train has data trained on where it lies"
        )
    found = np.asarray(given)
    if found.ndim == 0:
        raise TypeError(f"{what} is a matrix, found {given!r:.60}")
    return found
