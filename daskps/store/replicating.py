"""The part of a store's handle that makes replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.cluster.caller.routes import load_rules
from daskps.errors import LayoutError
from daskps.optim.master import WithMaster
from daskps.store.arguments import number, whole
from daskps.store.pushes import Writable
from daskps.store.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from daskps.typing import Array

DEFAULT = config.DEFAULT


class Replicable(Writable):
    """Making copies of a store's arrays that are trained by themselves.

    Parameters
    ----------
    uid, name : str
        Which store.
    """

    def replica(
        self,
        *,
        every: int = 1,
        elastic: float | None = None,
        timeout: Any = DEFAULT,
    ) -> Any:
        """Return a copy of the arrays that is trained by itself, and synced at times.

        Parameters
        ----------
        every : int
            Steps between two syncs.
        elastic : float, optional
            Have a sync move replica and store towards each other, by this share of their
            difference, from 0 to 1 (elastic averaging), instead of adding to the store
            what was done here.
        timeout : float, str or None
            Of the pull: seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Replica
            With an asynchronous client an awaitable of it. It has no tables.

        Raises
        ------
        LayoutError
            If the store has tables alone, or a parameter with a master: a replica
            would have its rounded weights alone.
        ValueError, TypeError
            For an `every` or `elastic` that cannot be.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Examples
        --------
        >>> store = daskps.create({"w": np.full(2, 1.0)})
        >>> replica = store.replica(elastic=0.5)
        >>> _ = store.assign({"w": np.zeros(2)})
        >>> replica.sync()
        >>> replica.params["w"], store.pull()["w"]
        (array([0.5, 0.5]), array([0.5, 0.5]))
        """
        steps = whole(every, "every", least=1)
        share = None if elastic is None else number(elastic, "elastic")
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"elastic is above 0 and at most 1, found {elastic!r}")

        def made(params: dict[str, Array]) -> Replica:
            if not params:
                raise LayoutError(
                    f"store {self.name!r} has no arrays, and a replica has no tables; "
                    f"pull and add rows by the store's handle"
                )
            meta = self._attached().meta
            for index, rule in load_rules(meta).items():
                if isinstance(rule, WithMaster):
                    raise LayoutError(
                        f"parameter {meta.layout.names[index]!r} has a master, and a "
                        f"replica would have its rounded weights alone; push gradients, "
                        f"or make the store of the master's dtype"
                    )
            return Replica(self, params, steps, share)

        async def made_of(pulled: Awaitable[dict[str, Array]]) -> Replica:
            return made(await pulled)

        found = self.pull(timeout=timeout)
        return made(found) if isinstance(found, dict) else made_of(found)
