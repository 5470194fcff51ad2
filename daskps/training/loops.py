"""`run`: one program of the user's in every trainer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps import codecs
from daskps.combination import Combination, check_together
from daskps.consistency import Policy, policy
from daskps.limits import MOST_TRAINERS, check_trainers
from daskps.store.arguments import addresses, flag
from daskps.tracebacks import entrance
from daskps.training import callbacks as callbacks_module
from daskps.training.choices import described, reduced_by
from daskps.training.functions import check_function
from daskps.training.job import Job
from daskps.training.monitoring import Monitor
from daskps.training.overlap.background import Background
from daskps.training.trainer import Trainer
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.caller.session import Session
    from daskps.store.store import ParameterStore

__all__ = ["run"]


@entrance
def run(  # noqa: PLR0913 - the public contract
    store: ParameterStore,
    loop: Callable[[Trainer, Any], Any],
    parts: Sequence[Any],
    *,
    workers: str | Iterable[str] | None = None,
    sync: str | Policy = "bsp",
    reduce: Any = "mean",
    codec: str | codecs.Codec | None = None,
    callbacks: str | Iterable[object] = "auto",
    resumable: bool = False,
    timeout: Any = None,
) -> Any:
    """Run a loop of your own in every trainer: one program, many data.

    Parameters
    ----------
    store : ParameterStore
        The store.
    loop : callable
        ``loop(trainer, part)``; what it returns is returned here.
    parts : sequence
        One part of the data per trainer. A part that is a future, delayed or another
        dask collection, or a tuple with some of these, is computed on the workers before
        the loops begin, and `loop` gets what it came to: a pandas DataFrame of each of
        ``df.to_delayed()``, two arrays of each of ``daskps.partition(X, y, k)``.
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
        What each trainer's loop returned, in rank order; with an asynchronous
        client an awaitable.

    Raises
    ------
    RunCancelledError
        If a trainer was lost and the run is not resumable.
    ValueError, TypeError
        For arguments that cannot be, before anything is started.
    Exception
        What `loop` raised, with the trainer's rank in a note, or the computation of a
        lazy part, with its number; else as :func:`train`.

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
        policy=chosen.policy,
        reduce=reduce,
        epochs=0,
        sync=described(chosen.policy),
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
        return loop(Trainer(session, background, chosen), part)


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
