"""What a user holds: a store with all its verbs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.cluster.caller.aggregate import aggregate
from daskps.reduction import check_reduce
from daskps.store import intake
from daskps.store.array import ParameterArray
from daskps.store.mistaken import (
    no_store_attribute,
    not_deleted,
    not_set,
    not_written,
)
from daskps.store.pushes import Writable
from daskps.store.snapshot import Snapshot, taken_by
from daskps.store.table import ParameterTable

if TYPE_CHECKING:
    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.wire.deadline import Deadline
    from daskps.typing import Array

DEFAULT = config.DEFAULT
#: What a handle has itself.
_ATTRIBUTES = {"uid", "name"}


class ParameterStore(Writable):
    """A store of named arrays, sharded over the workers of a Dask cluster.

    Made by :func:`create` and :func:`open`. The handle is light: it can be an
    argument of tasks or be captured in their closures, and binds to the worker it
    finds itself on. With an asynchronous client methods return awaitables.

    Parameters
    ----------
    uid, name : str
        Which store.

    Notes
    -----
    Threads: a handle may be used from several threads at once. Memory: a push keeps
    no reference to the arrays after it returns; what a pull returns is the caller's.

    Examples
    --------
    >>> store = daskps.create(
    ...     {"w": np.zeros(3), "b": 0.0}, name="shop", optimizer=daskps.optim.SGD(0.1)
    ... )
    >>> store.names, store.nbytes, len(store.placement)
    (['w', 'b'], 32, 2)
    >>> store.optimizer
    {'w': 'SGD(lr=0.1)', 'b': 'SGD(lr=0.1)'}
    >>> _ = store.push({"w": np.ones(3)})
    >>> store["w"].pull(), store.version, store.versions
    (array([-0.1, -0.1, -0.1]), 1, (1, 1))
    >>> store.delete()
    """

    def aggregate(
        self,
        contributions: Iterable[Mapping[str, Any]],
        *,
        reduce: Any = "mean",
        timeout: Any = DEFAULT,
    ) -> Any:
        """Reduce contributions on the owners of the shards; the store is untouched.

        Parameters
        ----------
        contributions : iterable of mapping
            One mapping of name to array per contributor, in rank order.
        reduce : {"mean", "sum"} or callable
            A callable is ``f(stacked, weights) -> (n,)`` with stacked (P, n) and
            weights (P,), all 1.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        dict of str to ndarray
            The reduced arrays, in the compute dtype of their parameters.

        Raises
        ------
        PushRejectedError, UnknownParameterError, ValueError, TypeError
            For arrays that do not fit, or an unknown `reduce`.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(2)})
        >>> store.aggregate([{"w": np.array([1.0, 2.0])}, {"w": np.array([3.0, 6.0])}])
        {'w': array([2., 4.])}
        >>> store.pull()["w"]
        array([0., 0.])
        """
        check_reduce(reduce)
        given = _listed(contributions)
        if not given:
            raise ValueError("aggregate needs at least one contribution")

        async def work(shards: ShardClient, deadline: Deadline) -> dict[str, Array]:
            layout = shards.meta.layout
            finite = config.check_finite()
            arrays = [
                intake.gradients(layout, {}, g, finite=finite, model=True)
                for g in given
            ]
            return await aggregate(shards, arrays, reduce, deadline)

        return self._with_shards(work, timeout, "an aggregate")

    def snapshot(self, *, timeout: Any = DEFAULT) -> Any:
        """Copy all parameters at one moment, while others go on pushing.

        For every producer all shards contain the same of its steps; in a BSP run it
        is the last round that all shards have completed. The copies are made by the
        owners and stay there, in Dask's memory; pushes wait while that is done.

        Parameters
        ----------
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Snapshot
            Mapping of name to dask array.

        Raises
        ------
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Notes
        -----
        A push that was given up (by a timeout or a cancel) may be contained in part,
        as it may in the store. A task that takes a snapshot leaves its worker's
        thread to other tasks meanwhile.

        Examples
        --------
        >>> store = daskps.create({"w": np.arange(4.0)})
        >>> snap = store.snapshot()
        >>> snap["w"].chunks
        ((2, 2),)
        >>> (snap["w"] * 2).compute()
        array([0., 2., 4., 6.])
        """
        return taken_by(self, None, Snapshot, what="a snapshot", timeout=timeout)

    def __getitem__(self, name: str) -> Any:
        layout, found = self.layout, None
        with contextlib.suppress(TypeError):  # of what is no name, as below
            found = layout.table_by_name.get(name)
        if found is not None:
            return ParameterTable(self, found)
        return ParameterArray(self, layout[name])

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            meta = None if name.startswith("_") else self._meta_if_known()
            names = None if meta is None else meta.layout.names
            raise no_store_attribute(self, name, names)

        def __setattr__(self, name: str, value: Any) -> None:
            # Or `store.w = values` would look as if it had done something.
            if (
                name[0] != "_"
                and name not in _ATTRIBUTES
                and not hasattr(type(self), name)
            ):
                raise not_set(name)
            super().__setattr__(name, value)

        def __setitem__(self, name: Any, value: Any) -> None:
            raise not_written(name)

        def __delitem__(self, name: Any) -> None:
            raise not_deleted(name)


def _listed(contributions: Any) -> list[Any]:
    """Return contributions as a list, or refuse what is none of several."""
    one = isinstance(contributions, (str, bytes, np.ndarray, Mapping))
    if one or not isinstance(contributions, Iterable):
        raise TypeError(
            f"contributions is a list with one mapping of names to arrays for each "
            f"contributor, found {type(contributions).__name__}; pass [{{'w': array}}]"
        )
    return list(contributions)
