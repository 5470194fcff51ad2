"""The part of a store's handle that changes learning rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.cluster.caller import applying
from daskps.errors import NoOptimizerError
from daskps.store.arguments import number
from daskps.store.replicating import Replicable

if TYPE_CHECKING:
    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.wire.deadline import Deadline

DEFAULT = config.DEFAULT


class Rated(Replicable):
    """Scaling the learning rates of a store.

    Parameters
    ----------
    uid, name : str
        Which store.
    """

    def scale_lr(self, factor: float, *, timeout: Any = DEFAULT) -> Any:
        """Multiply the learning rates of all parameters and tables, from here on.

        Also those of schedules, and those that a push gives for once. It stays, over runs
        and in checkpoints, until optimizer state begins anew (``reset_optimizer=True``) or
        it is multiplied again. Functions (:class:`daskps.optim.Function`) have no rate.

        Parameters
        ----------
        factor : float
            Larger than 0.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Version
            What the shards reached: it is a step of its own, between two pushes.

        Raises
        ------
        ValueError, TypeError
            For a factor that is none.
        NoOptimizerError
            Where the store has no optimizer.
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
        """
        by = number(factor, "factor")
        if by <= 0:
            raise ValueError(f"factor must be larger than 0, found {factor!r}")
        source = self._producer_here(self._bind())

        async def work(shards: ShardClient, deadline: Deadline) -> Any:
            if not shards.meta.optimizers:
                raise NoOptimizerError(
                    f"store {self.name!r} has no optimizer, so no learning rate; give "
                    f"create(optimizer=...) one"
                )
            return await applying.scale_lr(shards, source, by, deadline=deadline)

        return self._with_shards(work, timeout, "a scaling of learning rates")
