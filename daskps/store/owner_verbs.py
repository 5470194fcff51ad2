"""The verbs of a store that its owners carry out: reducing, applying, scaling rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from daskps import config
from daskps.cluster.caller import owner_steps
from daskps.cluster.caller.owner_steps import (
    Scaled,
    aggregate,
    aggregate_into,
    check_same_layout,
    scale_lr,
)
from daskps.cluster.caller.routes import load_rules
from daskps.cluster.upstream import dumps
from daskps.errors import NoOptimizerError
from daskps.optim import Function
from daskps.reduction import check_reduce
from daskps.store import intake
from daskps.store.arguments import number
from daskps.store.handle import DEFAULT, Handle
from daskps.store.targets import chosen_names, given_names

if TYPE_CHECKING:
    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.protocol.deadline import Deadline
    from daskps.typing import Array
    from daskps.version import Version


class Owned(Handle):
    """Work on the parameters of a store that is done where they are."""

    @overload
    def aggregate(
        self,
        contributions: Iterable[Mapping[str, Any]],
        *,
        reduce: Any = ...,
        into: None = ...,
        timeout: Any = ...,
    ) -> dict[str, Array]: ...

    @overload
    def aggregate(
        self,
        contributions: Iterable[Mapping[str, Any]],
        *,
        reduce: Any = ...,
        into: Self,
        timeout: Any = ...,
    ) -> Version: ...

    def aggregate(
        self,
        contributions: Iterable[Mapping[str, Any]],
        *,
        reduce: Any = "mean",
        into: Self | None = None,
        timeout: Any = DEFAULT,
    ) -> Any:
        """Reduce contributions on the owners of the shards.

        This store is untouched, unless it is `into`. That store gets what the
        contributions come to, where it was reduced: it does not travel back.

        Parameters
        ----------
        contributions : iterable of mapping
            One mapping of name to array per contributor, in rank order.
        reduce : {"mean", "sum"} or callable
            A callable is ``f(stacked, weights) -> (n,)`` with stacked (P, n) and
            weights (P,), all 1.
        into : ParameterStore, optional
            A store of the same layout, maybe this one, whose parameters are replaced
            by the result; those that nobody has contributed to, and optimizer state,
            stay. A call that fails on any owner changes nothing on all of them.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        dict of str to ndarray, or Version
            The reduced arrays, in the compute dtype of their parameters; with `into`
            what its shards have reached.

        Raises
        ------
        PushRejectedError, UnknownParameterError, ValueError, TypeError
            For arrays that do not fit, an unknown `reduce`, and sums that are not
            finite in `into`.
        LayoutError
            If `into` has other parameters, or other shards.
        ConsistencyError
            During a BSP run on `into`, which has that store to itself.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(2)})
        >>> given = [{"w": np.array([1.0, 2.0])}, {"w": np.array([3.0, 6.0])}]
        >>> store.aggregate(given)
        {'w': array([2., 4.])}
        >>> store.pull()["w"]
        array([0., 0.])
        >>> store.aggregate(given, reduce="sum", into=store)
        1
        >>> store.pull()["w"]
        array([4., 8.])
        """
        check_reduce(reduce)
        if into is not None and not isinstance(into, Owned):
            raise TypeError(f"into is a ParameterStore, found {type(into).__name__}")
        given = _listed(contributions)
        if not given:
            raise ValueError("aggregate needs at least one contribution")

        async def work(shards: ShardClient, deadline: Deadline) -> Any:
            layout, finite = shards.meta.layout, config.check_finite()
            arrays = [
                intake.values(layout, g, "gradient", finite=finite) for g in given
            ]
            if into is None:
                made = await aggregate(shards, arrays, reduce, deadline)
                if finite and isinstance(reduce, str):
                    intake.check_sums(made)
                return made
            if not any(arrays):
                raise ValueError("the contributions name no parameter to leave")
            # As the producer of this thread's pushes to that store.
            taker = await into._attach_within(shards.link, deadline)  # noqa: SLF001 (ours)
            source = into._producer_here(shards.link)  # noqa: SLF001 (ours)
            check_same_layout(shards.meta, taker.meta)
            return await aggregate_into(
                taker, arrays, reduce, source=source, deadline=deadline
            )

        return self._with_shards(work, timeout, "an aggregate")

    def apply(
        self,
        f: Callable[[Array, str], Any],
        names: str | Iterable[str] | None = None,
        *,
        timeout: Any = DEFAULT,
    ) -> Version:
        """Put parameters through a function, on the owners: pruning, projection, clipping.

        Parameters
        ----------
        f : callable
            ``f(block, name) -> block``. It gets what one shard has of one parameter, in
            C order, shape (n,), as a copy of its own, and returns an array of the same
            shape and of a dtype that can be cast to the parameter's. How a parameter is
            cut depends on the number of shards: let it treat each element by itself, or
            keep the parameter whole by `placement`. It may be called again where pushes
            come in between, and after a few times keeps them waiting until it returns.
        names : str or iterable of str, optional
            Names of parameters; all by default. Tables are left out.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Version
            The version that each shard reached: one update of each, however many
            parameters.

        Raises
        ------
        PushRejectedError
            For what `f` raises (also `SystemExit`) or returns that is none; nothing was
            changed on that shard, and the error names those that have applied it.
        ConsistencyError
            During a BSP run, which has the store to itself.
        UnknownParameterError, TypeError
            For names that are none, and an `f` that cannot be called or pickled.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says; each shard applied it once or not at all.

        Examples
        --------
        >>> store = daskps.create({"w": np.array([0.01, -2.0, 0.5, 3.0])})
        >>> _ = store.apply(lambda block, name: np.where(abs(block) < 0.1, 0, block))
        >>> _ = store.apply(lambda block, name: block.clip(-1, 1), "w")
        >>> store["w"].pull()
        array([ 0. , -1. ,  0.5,  1. ])
        """
        if not callable(f):
            raise TypeError(f"f is a function f(block, name) -> block, found {f!r:.60}")
        try:
            pickled = dumps(f)
        except Exception as error:
            raise TypeError(
                f"f cannot be pickled ({error}); define it without open files and locks"
            ) from error
        finite, source = config.check_finite(), self._producer_here(self._bind())

        async def work(shards: ShardClient, deadline: Deadline) -> Version:
            meta = shards.meta
            chosen = [meta.layout[name].index for name in chosen_names(meta, names)]
            applied = owner_steps.Applied(pickled, chosen, finite)
            how: Any = {"deadline": deadline, "renew": self._renewed}
            return await owner_steps.apply(shards, source, applied, **how)

        return self._with_shards(work, timeout, "an apply")

    def scale_lr(
        self,
        factor: float,
        names: str | Iterable[str] | None = None,
        *,
        timeout: Any = DEFAULT,
    ) -> Version:
        """Multiply the learning rates of parameters and tables, from here on.

        Also those of schedules, and those that a push gives for once. It stays, over
        runs and in checkpoints, until optimizer state begins anew
        (``reset_optimizer=True``) or it is multiplied again. Functions
        (:class:`daskps.optim.Function`) have no rate.

        Parameters
        ----------
        factor : float
            Larger than 0.
        names : str or iterable of str, optional
            Names of parameters and tables; all by default.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Version
            The version that each shard with any of these reached: it is a step of its
            own, between two pushes.

        Raises
        ------
        ValueError, TypeError
            For a factor that is none.
        NoOptimizerError
            Where the store has no optimizer, or one of the names none, or one that is a
            function; without names where all are.
        UnknownParameterError
            For a name that is none.
        PushRejectedError
            If no number is left of the rates; nothing was changed.
        ConsistencyError
            During a BSP run, which has the store to itself.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says; each shard has done it once or not at all.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(1)}, optimizer=daskps.optim.SGD(1.0))
        >>> _ = store.push({"w": np.ones(1)})
        >>> _ = store.scale_lr(0.5)
        >>> _ = store.push({"w": np.ones(1)})
        >>> store["w"].pull()
        array([-1.5])

        Of one parameter alone: ``store.scale_lr(0.1, "w")``.
        """
        by = number(factor, "factor")
        if by <= 0:
            raise ValueError(f"factor must be larger than 0, found {factor!r}")
        source = self._producer_here(self._bind())

        async def work(shards: ShardClient, deadline: Deadline) -> Version:
            meta = shards.meta
            if not meta.optimizers:
                raise NoOptimizerError(
                    f"store {self.name!r} has no optimizer, so no learning rate; give "
                    f"create(optimizer=...) one"
                )
            if names is None and meta.optimizers.keys() == _functions(meta):
                raise NoOptimizerError(
                    f"all parameters of store {self.name!r} have functions of whole "
                    f"arrays as optimizers, which have no learning rate; have the function "
                    f"make smaller steps"
                )
            scaled = Scaled(by, None if names is None else _indices(meta, names))
            how: Any = {"deadline": deadline, "renew": self._renewed}
            return await scale_lr(shards, source, scaled, **how)

        return self._with_shards(work, timeout, "a scaling of learning rates")


def _indices(meta: StoreMap, names: Any) -> list[int]:
    """Return the indices of the parameters and tables that are named, each once."""
    layout, found = meta.layout, dict[int, None]()
    functions = _functions(meta)
    for name in given_names(names):
        is_table = isinstance(name, str) and name in layout.table_by_name
        index = (layout.table_by_name if is_table else layout)[name].index
        if index not in meta.optimizers:
            raise NoOptimizerError(
                f"{name!r} of store {meta.name!r} has no optimizer, so no learning rate; "
                f"leave it out of names, or give create(optimizer=...) one for it"
            )
        if index in functions:
            raise NoOptimizerError(
                f"the optimizer of {name!r} of store {meta.name!r} is "
                f"{meta.optimizers[index]}, which has no learning rate; leave it out of "
                f"names"
            )
        found[index] = None
    return list(found)


def _functions(meta: StoreMap) -> set[int]:
    """Return the indices of parameters whose optimizer is a function."""
    # A caller that only scales rates need not be able to unpickle rules of others.
    if not any(told.startswith("Function(") for told in meta.optimizers.values()):
        return set()
    return {i for i, rule in load_rules(meta).items() if isinstance(rule, Function)}


def _listed(contributions: Any) -> list[Any]:
    """Return contributions as a list, or refuse what is none of several."""
    one = isinstance(contributions, (str, bytes, np.ndarray, Mapping))
    if one or not isinstance(contributions, Iterable):
        raise TypeError(
            f"contributions is a list with one mapping of names to arrays for each "
            f"contributor, found {type(contributions).__name__}; pass [{{'w': array}}]"
        )
    return list(contributions)
