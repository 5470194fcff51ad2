"""`train` and `run`: their arguments, checked before one job begins."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from daskps import codecs, config
from daskps.combination import Combination, check_rows, check_together
from daskps.consistency import SSP, Policy, policy
from daskps.limits import MOST_TRAINERS, check_trainers
from daskps.store.arguments import addresses, flag, whole
from daskps.tracebacks import entrance
from daskps.training import callbacks as callbacks_module
from daskps.training.data.dataframes import array_of
from daskps.training.data.parts import check
from daskps.training.data.rows import check_index
from daskps.training.early_end import Retries, check_metrics
from daskps.training.functions import (
    batches_between,
    check_choice,
    check_function,
    pulled_by,
    reduced_by,
    rows_ahead,
)
from daskps.training.job import Job
from daskps.training.monitoring import Monitor, watches_of
from daskps.training.overlap.background import Background
from daskps.training.result import Epoch, TrainResult
from daskps.training.row_ids import checked_functions
from daskps.training.saves import Checkpoints, check_resume
from daskps.training.steps import FitPlan
from daskps.training.trainer import Trainer
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.caller.session import Session
    from daskps.store.store import ParameterStore
    from daskps.typing import Array


__all__ = ["TrainResult", "run", "train"]

T = TypeVar("T")

#: The way out for loops that start processes, as torch's DataLoader does.
_DAEMONIC = (
    "Dask's workers are daemonic processes, which may start none: pass num_workers=0, or "
    "start workers with the configuration value distributed.worker.daemon set to False"
)


@entrance
def train(  # noqa: PLR0913 - the public contract
    store: ParameterStore,
    gradient: Callable[..., Any],
    X: Any,
    y: Any = None,
    *,
    rows: Mapping[str, Callable[..., Any]] | None = None,
    epochs: int = 1,
    batch_size: int = 64,
    trainers: int | None = None,
    workers: str | Iterable[str] | None = None,
    sync: str | Policy = "bsp",
    reduce: Any = "mean",
    sync_every: str | int = "batch",
    average: str = "gradients",
    scheme: str = "contiguous",
    weights: Sequence[float] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    execution: str = "auto",
    codec: str | codecs.Codec | None = None,
    pull_codec: str | codecs.Codec | None = None,
    validate: Callable[[dict[str, Array]], Mapping[str, float]] | None = None,
    callbacks: str | Iterable[object] = "auto",
    stop: Callable[[list[Epoch]], bool] | None = None,
    checkpoint: Checkpoints | None = None,
    resume: bool = False,
    reset_optimizer: bool = False,
    on_trainer_lost: str = "restart",
    retries: int = 0,
    retry_window: Any = "120s",
    timeout: Any = None,
) -> TrainResult:
    """Train the parameters of a store on data, with one trainer per worker.

    Data on the cluster is trained on where it lies. With ``scheme="contiguous"`` and
    no weights, parts of a dask array are runs of whole chunks, and each trainer
    starts on the worker that holds most of its part. Blocks that lie elsewhere travel
    and are counted in ``stats.moved_parts``.

    Parameters
    ----------
    store : ParameterStore
        The store, with an optimizer.
    gradient : callable
        ``gradient(params, X_batch, y_batch)`` returns the mean gradients over the
        batch as a mapping of names to arrays, or ``(loss, gradients)``; a table's
        is a :class:`RowGrad`. `params` is a flat dict whose arrays are valid until
        it returns, on the device of the batch if that is on one. Each trainer has a
        copy of its own, pickled when the run begins: values that it keeps between two
        calls are its trainer's, and begin anew with the next run, and where the trainer
        goes on on another worker.
    X : array_like, table or dask array, shape (n, ...), or list of Future or Delayed
        Training rows. Tables are pandas and dask DataFrames and Series and pyarrow
        Tables; each is converted once, to an array of the dtype that holds all its
        columns, and a column that holds no numbers, or integers that the floats beside
        it would round, is refused. Dask computes lazy ones once, those
        of `X` and `y` together, keeps them during the run, and computes again what
        goes with a worker.
        Each element of a list of futures or delayed objects is one trainer's part, an
        array of shape (n_i, ...) or a table.
    y : like X, optional
        Labels. Those of a dask array in other chunks than `X` are rechunked along
        the first axis to those of `X`: they travel. One label of a row is no column:
        y is of shape (n,), not (n, 1). Where X and y are tables of pandas, their
        indexes are equal. For a list of parts, a list of as many, of shape (n_i, ...).
        An array in memory beside a dask array is sent in pieces to the trainers.
    rows : mapping of str to callable, optional
        By the names of tables: ``f(X_batch)``, or ``f(X_batch, rng)``, returns the ids
        of the rows that the batch is about, in any shape. `params` has these rows
        under that name, in an array of shape ``ids.shape + (dim,)``, and the gradient
        for them is an array of that shape or a :class:`RowGrad`. It is called once for
        each batch, before the step that precedes it is delivered. Under BSP the ids
        travel with that step and the rows come with its answer, exactly those after the
        last round; under SSP and ASP they are read while that step is computed, and
        those that it changes once more after it. In the task graph each task reads the
        rows of its own batch. `rng` depends on `seed`, epoch, rank and clock alone, so
        that a trainer that is started again gets the same ids. `validate` is called
        with arrays. Options for arrays alone, such as `sync_every`, refuse rows.
    epochs : int
        Passes over the data. The store counts them: a second call goes on with the
        epoch after the last one, also in ``TrainResult.history``, and under BSP two
        calls of one epoch lead to the same bits as one call of two. After a run that
        was stopped in the middle of an epoch the next one begins.
    batch_size : int
        Rows per batch and trainer; the short last batch is kept.
    trainers : int, optional
        Number of trainers. By default one per worker, for a dask array at most one
        per chunk, for a list of parts one for each. With more trainers than chunks,
        chunks are cut on their workers.
    workers : str or iterable of str, optional
        Addresses of the workers that trainers may be on, also those that are started
        again; by default all. Data that lies elsewhere travels, and shards stay where
        they are. The run ends when the last of these workers has left.
    sync : {"bsp", "ssp", "asp"} or BSP, SSP, ASP
        How trainers are kept together; "ssp" has a staleness of 3 clocks.
    reduce : {"mean", "sum"} or callable
        How the contributions of a BSP round become one gradient: the mean weighs
        them by rows, and divides by those of the trainers that named the parameter.
        A callable is ``f(stacked, weights) -> (n,)`` with stacked
        (P, n) in rank order, and acts on each element alone.
    sync_every : {"batch", "epoch"} or int
        Batches between two synchronisations. In between, a trainer updates a copy of
        its own and then delivers the sum of its gradients.
    average : {"gradients", "models"}
        With "models" a round assigns the row-weighted mean of the trainers' copies
        instead; BSP only.
    scheme : {"contiguous", "round_robin", "random", "reshuffle"}
        How rows are dealt out, see :func:`partition`; only "contiguous" follows the
        chunks of a dask array, for the others and with `weights` its rows travel.
    weights : sequence of float, optional
        Relative sizes of the parts.
    shuffle : bool
        Whether each epoch visits a trainer's rows in a new order, which depends on
        `seed`, the store's epoch and the rank alone.
    seed : int
        Seed of `scheme` and `shuffle`.
    execution : {"auto", "resident", "graph"}
        "resident": one long-running loop per trainer, no task per round. "graph": a
        round is one Dask task per trainer and one per shard of the store; trainers
        may outnumber the threads of the cluster by far, and a lost worker costs a
        round at most. BSP only, and the same bits. "auto": resident unless BSP
        trainers outnumber the threads four to one.
    codec : {None, "bf16", "fp16"} or codecs.Codec
        "bf16", "fp16": every contribution is rounded to bfloat16 or float16 and
        travels in half the bytes of float32, a quarter of those of float64. Sums,
        updates and weights are as without; the run's numbers do not depend on what
        travelled. A gradient that would become infinite is refused. Others are in
        :mod:`daskps.codecs`; in the task graph only those of 16 bits, and no rows.
    pull_codec : {None, "bf16", "fp16"} or codecs.BFloat16 or codecs.Float16
        The values that trainers pull are rounded so, rows too, and travel in these
        bytes; the store, its updates and the result of this call are as without. Too
        large a weight becomes infinite.
    validate : callable, optional
        ``validate(params) -> dict of str to float``, called here after each epoch
        with a snapshot. Training goes on meanwhile, for one epoch at most; with
        `stop` it waits.
    callbacks : "auto" or iterable of object
        Objects with any of ``on_data, on_start, on_round, on_epoch, on_failover,
        on_stop``, and a :class:`Monitor`.
        "auto" is a :class:`ProgressBar` where a person looks, in a terminal or a
        notebook; nothing in tasks, under pytest, or into a pipe. ``()`` is silence.
    stop : Condition or callable, optional
        When to end before the last epoch: a condition of :mod:`daskps.stop`, such as
        ``stop.steps(1000) | stop.loss_below(0.1)``, or ``stop(history) -> bool``,
        called here after each epoch. The run ends at the border of a round, and a
        history has the epoch that it ended in.
    checkpoint : Checkpoints, optional
        Where to save the store beside the run and at its end, and how often. A
        checkpoint has the history of the epochs that had ended. One that is due has its
        copy of the store before `on_epoch` is called, and is finished however the run
        ends, within `timeout` and at most 60 s: a note at the error says up to where
        `resume` goes, and Ctrl-C once more gives it up. Where the first one
        cannot be written the run ends; a later one that cannot be is logged, and that
        of the end is an :class:`UnsavedRunError`, which has the result.
    resume : bool
        Go on where the run before has ended, also in the middle of an epoch: that of
        this store, or, where it is at version 0, that of the newest checkpoint there of
        a store of its name, which is loaded into it. `epochs` is then how many epochs
        the store will have had at the end; where it has, nothing is done. Under BSP the
        bits are those of a run that was never ended; under SSP and ASP all trainers
        begin at the clock of the slowest one, approximately. The epoch in the middle of
        which it begins has the loss of the rows from there on (``Epoch.since``). The
        number of trainers is that of the run before, the arguments and the data must
        be.
    reset_optimizer : bool
        Begin with fresh optimizer state instead of that of the run before, and with
        epoch 0.
    on_trainer_lost : {"restart", "raise"}
        The consequence of a trainer's worker dying: go on at its clock on another
        worker, or end the run.
    retries : int
        How often, within `retry_window`, the run goes on after an error that
        `gradient`, the update rule or `reduce` has raised: at the last complete round,
        under BSP to the bits of a run without the error, under SSP and ASP at the clock
        of the slowest trainer. Not before the first tick, not for what the store
        refuses, such as NaN, and not where the store lost a shard and was restored
        meanwhile. One more error is raised as it is.
    retry_window : float, str or None
        Seconds or a duration such as "120s" after which an error no longer counts; None
        for never.
    timeout : float, str or None
        Seconds or a duration such as "1h" for the whole run; None for none. To end
        what is left of it takes up to 3 s more where the cluster is slow to answer.

    Returns
    -------
    TrainResult
        Weights, history and counters; with an asynchronous client an awaitable.

    Raises
    ------
    ValueError, TypeError
        For arguments that cannot be, before anything is started.
    CheckpointError
        If a checkpoint cannot be written or read, or is of another store. Where it is
        the end of the run that could not be saved, an :class:`UnsavedRunError`.
    LayoutError
        For more trainers than a shard has room for; or, under BSP, gradients that do
        not fit beside the shards into what Dask lets a worker use before it pauses it.
    ConsistencyError
        If the store has a run already.
    NotEnoughWorkersError
        If not all trainers could start, or `workers` names one that is not there.
    Exception
        The error of `gradient`, with the trainer's rank in a note.

    Examples
    --------
    >>> def gradient(params, X, y):
    ...     error = X @ params["w"] - y
    ...     return np.mean(error**2) / 2, {"w": X.T @ error / len(y)}
    >>> X = np.random.default_rng(0).normal(size=(200, 2))
    >>> store = daskps.create({"w": np.zeros(2)}, optimizer=daskps.optim.SGD(0.5))
    >>> result = daskps.train(store, gradient, X, X @ [1.0, -2.0], epochs=10)
    >>> result.weights["w"].round(3)
    array([ 1., -2.])
    """
    resumes, resets = flag(resume, "resume"), flag(reset_optimizer, "reset_optimizer")
    check_resume(checkpoint, resume=resumes, reset=resets)
    check_choice("execution", execution, ("auto", "resident", "graph"))
    check_choice("average", average, ("gradients", "models"))
    check_choice("on_trainer_lost", on_trainer_lost, ("restart", "raise"))
    of_rows = checked_functions(rows)
    called = callbacks_module.chosen(callbacks)
    watches = watches_of(callbacks_module.of_kind(called, Monitor))
    chosen = Combination(
        "train",
        policy=policy(sync),
        execution=execution,
        reduce=reduced_by(reduce),
        codec=codecs.choose(codec),
        pull_codec=pulled_by(pull_codec),
        sync_every=batches_between(sync_every),
        average=average,
        monitored=bool(watches),
    )
    check_together(chosen)
    check_rows(chosen, of_rows)
    check_function("gradient", gradient)
    for what, function in (("validate", validate), ("stop", stop)):
        if function is not None:
            check_function(what, function)
    check_metrics(stop, validate, called)
    job = Job(
        store=store,
        chosen=chosen,
        reduce=reduce,
        epochs=whole(epochs, "epochs", least=1),
        trainers=None if trainers is None else whole(trainers, "trainers", least=1),
        validate=validate,
        stop=stop,
        callbacks=called,
        reset=resets,
        resume=resumes,
        checkpoint=checkpoint,
        restartable=on_trainer_lost == "restart",
        workers=addresses(workers, "workers"),
        retries=Retries.of(retries, retry_window),
    )
    if job.trainers:
        in_graph = chosen.has_rounds and execution != "resident"
        check_trainers(job.trainers, graph=in_graph)
    ahead = rows_ahead(chosen.policy)
    waits = isinstance(chosen.policy, SSP) and job.gated
    # The rows of a batch come with the step before it, and not a step earlier; and a
    # trainer that sits out may not go on with values that it read before that.
    read_ahead = config.load().double_buffer == "parameters" and chosen.sync_every == 1
    read_ahead = read_ahead and ahead > 0 and not (of_rows or waits)
    plan = FitPlan(
        gradient=gradient,
        epochs=job.epochs,
        batch_size=whole(batch_size, "batch_size", least=1),
        shuffle=flag(shuffle, "shuffle"),
        seed=whole(seed, "seed", least=0),
        sits_out=chosen.has_rounds or waits,
        read_ahead=read_ahead,
        chosen=chosen,
        rows=of_rows,
        rows_ahead=ahead,
        watches=watches,
    )
    if read_ahead and isinstance(chosen.policy, SSP):
        # Values that are read at one clock are used at the next: the bound holds there.
        job.policy = SSP(chosen.policy.staleness - 1)
    split: dict[str, Any] = {"scheme": scheme, "weights": weights, "seed": seed}
    # Here, so that bad data is refused before anything is started.
    check_index(X, y)
    X, y = array_of(X, "X", y), array_of(y, "y", X)
    check(X, y, job.trainers, split)
    return job.start(lambda: job.train(plan, X, y, split), timeout)


@entrance
def run(  # noqa: PLR0913 - the public contract
    store: ParameterStore,
    loop: Callable[[Trainer, Any], T],
    parts: Sequence[Any],
    *,
    workers: str | Iterable[str] | None = None,
    sync: str | Policy = "bsp",
    reduce: Any = "mean",
    codec: str | codecs.Codec | None = None,
    callbacks: str | Iterable[object] = "auto",
    resumable: bool = False,
    timeout: Any = None,
) -> list[T]:
    """Run a loop of your own in every trainer: one program, many data.

    Parameters
    ----------
    store : ParameterStore
        The store.
    loop : callable
        ``loop(trainer, part)``; this call returns its results.
    parts : sequence
        One part of the data per trainer. A part that is a future, delayed or another
        dask collection, or a tuple with some of these, is computed on the workers
        before the loops begin, and `loop` gets what it came to: a pandas DataFrame of
        each of ``df.to_delayed()``, two arrays of each of ``daskps.partition(X, y,
        k)``.
    workers : str or iterable of str, optional
        Addresses of the workers that trainers may be on, as in :func:`train`.
    sync, reduce, codec
        As in :func:`train`.
    callbacks : "auto" or iterable of object
        As in :func:`train`. A run of your own has no epochs, and nobody knows how many
        rounds there will be: the bar shows those that there were.
    resumable : bool
        Whether `loop` can be started again on another worker when its own died; it
        must then begin at ``trainer.clock``.
    timeout : float, str or None
        Seconds or a duration such as "1h" for the whole run; None for none. To end
        what is left of it takes up to 3 s more where the cluster is slow to answer.

    Returns
    -------
    list
        The result of each trainer's loop, in rank order; with an asynchronous client
        an awaitable.

    Raises
    ------
    RunCancelledError
        If a trainer was lost and the run is not resumable.
    ValueError, TypeError
        For arguments that cannot be, before anything is started.
    Exception
        The error of `loop`, with the trainer's rank in a note, or of the computation of
        a lazy part, with its number; else as :func:`train`.

    Examples
    --------
    >>> def loop(trainer, part):
    ...     for _ in range(3):
    ...         w = trainer.pull()["w"]
    ...         trainer.push({"w": w - part})
    ...     return trainer.rank, trainer.clock
    >>> store = daskps.create({"w": np.zeros(1)}, optimizer=daskps.optim.SGD(1.0))
    >>> daskps.run(store, loop, [np.array([1.0]), np.array([3.0])])
    [(0, 3), (1, 3)]
    >>> store["w"].pull()
    array([2.])
    """
    chosen = Combination(
        "push",
        policy=policy(sync),
        reduce=reduced_by(reduce),
        codec=codecs.choose(codec),
    )
    check_together(chosen)
    check_function("loop", loop)
    given = _listed(parts)
    if not given:
        raise ValueError("parts is empty; give one part per trainer")
    check_trainers(len(given), graph=False)
    called = callbacks_module.chosen(callbacks)
    if callbacks_module.of_kind(called, Monitor):
        raise ValueError(
            "a Monitor watches train; in a loop of your own, whose gradients only it "
            "knows, call trainer.allreduce and note what you like"
        )
    job = Job(
        store=store,
        chosen=chosen,
        reduce=reduce,
        epochs=0,
        trainers=len(given),
        restartable=flag(resumable, "resumable"),
        callbacks=called,
        workers=addresses(workers, "workers"),
    )
    body = partial(_call_loop, loop, chosen)
    return job.start(lambda: job.run_loops(body, given), timeout)


def _call_loop(
    loop: Callable[[Trainer, Any], Any],
    chosen: Combination,
    session: Session,
    part: Any,
) -> Any:
    """Call a user's loop with a trainer for its session, in the trainer's task."""
    with Background(session) as background, user_code("the loop"):
        trainer = Trainer(session, background, chosen)
        try:
            value = loop(trainer, part)
        except AssertionError as error:
            if "daemonic processes" in str(error):
                error.add_note(_DAEMONIC)
            raise
        left = trainer._left  # noqa: SLF001 - no verb of users
        return value if left is None else left.ended(value, session.meta.layout)


def _listed(parts: Any) -> list[Any]:
    """Return parts as a list, or refuse what would be cut in no way that is meant."""
    whole = isinstance(parts, (str, bytes, Mapping)) or any(
        hasattr(parts, name) for name in ("iloc", "__dask_graph__")
    )
    if whole or not isinstance(parts, Iterable):
        raise TypeError(
            f"parts is a list with one part of the data for each trainer, found "
            f"{type(parts).__name__}; daskps.partition(X, y, k) cuts arrays into such, "
            f"and of a dask DataFrame df.to_delayed() is one"
        )
    # One more than there may be: it may go on for ever.
    return list(itertools.islice(parts, MOST_TRAINERS + 1))
