"""The part of a store's handle that changes learning rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.cluster.caller.owner_steps import Scaled, scale_lr
from daskps.cluster.caller.routes import load_rules
from daskps.errors import NoOptimizerError
from daskps.optim import Function
from daskps.store.arguments import number
from daskps.store.replicating import Replicable
from daskps.store.targets import given_names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.wire.deadline import Deadline

DEFAULT = config.DEFAULT


class Rated(Replicable):
    """Scaling the learning rates of a store.

    Parameters
    ----------
    uid, name : str
        Which store.
    """

    def scale_lr(
        self,
        factor: float,
        names: str | Iterable[str] | None = None,
        *,
        timeout: Any = DEFAULT,
    ) -> Any:
        """Multiply the learning rates of parameters and tables, from here on.

        Also those of schedules, and those that a push gives for once. It stays, over runs
        and in checkpoints, until optimizer state begins anew (``reset_optimizer=True``) or
        it is multiplied again. Functions (:class:`daskps.optim.Function`) have no rate.

        Parameters
        ----------
        factor : float
            Larger than 0.
        names : str or iterable of str, optional
            Which parameters and tables; all by default.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Version
            What the shards reached that have any of these: it is a step of its own,
            between two pushes.

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

        async def work(shards: ShardClient, deadline: Deadline) -> Any:
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
            return await scale_lr(shards, source, scaled, deadline=deadline)

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
    # What only scales need not be able to unpickle the rules of others.
    if not any(told.startswith("Function(") for told in meta.optimizers.values()):
        return set()
    return {i for i, rule in load_rules(meta).items() if isinstance(rule, Function)}
