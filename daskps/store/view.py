"""Views: the weights of one version for all tasks of a machine, and predictions by them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.cluster.caller.views import ViewRequest, take_view
from daskps.errors import LayoutError
from daskps.layout.arrays import counted
from daskps.store.arguments import least_version
from daskps.store.handle import DEFAULT, Handle
from daskps.store.targets import given_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.protocol.deadline import Deadline
    from daskps.layout.arrays import Layout
    from daskps.typing import Array


class Viewable(Handle):
    """Reading a store by views.

    Parameters
    ----------
    uid, name : str
        Id and name of the store.
    """

    def view(
        self,
        names: str | Iterable[str] | None = None,
        *,
        min_version: int | None = None,
        max_age: float | str | None = None,
        timeout: Any = DEFAULT,
    ) -> dict[str, Array]:
        """Return the arrays at one version, shared by all tasks of this machine.

        The first call copies all arrays of the store, at one moment as
        :meth:`snapshot` does, into memory that all processes of the machine map. Later
        calls return the same arrays, in microseconds, until a newer view is asked for.

        Parameters
        ----------
        names : str or iterable of str, optional
            Names of arrays; all by default.
        min_version : int or Version, optional
            Wait until this version is reached: exactly the shards and versions of a
            :class:`Version`, or by every shard.
        max_age : float, str or None
            Seconds or a duration such as "30s" since the view was the newest, at most;
            0 for the newest at each call. By default any that this process has, else
            the newest.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        dict of str to ndarray
            Read-only arrays, all of one version. They stay as they are for as long as
            somebody holds them.

        Raises
        ------
        UnknownParameterError
            For a name that the store does not have, and for that of a table.
        LayoutError
            Where the store has tables alone, or there is no room for a copy.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says; what this process has serves without the shards.
        ValueError, TypeError
            For a `max_age` or `min_version` that cannot be.

        Notes
        -----
        Where memory is not shared each process has a copy of its own. Code that writes
        into the memory in spite of the flags changes what tasks of its own process see,
        and nothing else. A worker frees a view with the store, a client when its handle
        is closed.

        Examples
        --------
        >>> store = daskps.create({"w": np.arange(3.0), "b": 1.0})
        >>> params = store.view()
        >>> params["w"], params["w"].flags.writeable
        (array([0., 1., 2.]), False)
        >>> _ = store.add({"b": 1.0})
        >>> float(store.view()["b"]), float(store.view(max_age=0)["b"])
        (1.0, 2.0)
        """
        age, link = config.deadline(max_age, "max_age"), self._bind()
        asked = ViewRequest(least_version(min_version), age)
        meta = self._meta_if_known()
        if (known := asked.at_hand(link, meta.uid if meta else self.uid)) is not None:
            return {n: known.arrays[n] for n in viewed(self, known.layout, names)}

        async def work(shards: ShardClient, deadline: Deadline) -> dict[str, Array]:
            chosen = viewed(self, shards.meta.layout, names)
            view = await take_view(shards, asked, deadline)
            return {name: view.arrays[name] for name in chosen}

        return self._with_shards(work, timeout, "a view")


def viewed(store: Handle, layout: Layout, names: Any) -> list[str]:
    """Return the arrays that are asked for, or refuse where there is none."""
    if names is not None:
        return [layout[name].name for name in given_names(names)]
    if not layout.by_name:
        raise LayoutError(
            f"store {store.name!r} has no arrays, and a view has no tables; pull the "
            f"rows that a block needs, with store['name'].pull(ids)"
        )
    return [*layout.by_name]


def predict(
    store: Viewable,
    function: Callable[[dict[str, Array], Any], Any],
    X: Any,
    *,
    names: str | Iterable[str] | None = None,
    min_version: int | None = None,
    max_age: float | str | None = None,
    meta: Any = None,
) -> Any:
    """Predict by the weights of a store, block by block, as Dask computes the result.

    Each task calls `function` with a view, see :meth:`ParameterStore.view`: the model
    is once on each machine, and in no task.

    Parameters
    ----------
    store : ParameterStore
        The store.
    function : callable
        ``function(params, block)`` returns one row for each of the block's: of an
        array an array, of a DataFrame or Series one of these or an array, and of the
        list of a bag's items a list.
    X : dask.array.Array, dask DataFrame or Series, dask.bag.Bag
        The data. An array may be cut along its first axis; other cuts are undone.
    names, min_version, max_age
        As of :meth:`ParameterStore.view`, in each task.
    meta : array_like, DataFrame or Series, optional
        Result of a block without rows, for its dtype and the shape of a row. By default
        `function` is called here, with one row and all parameters filled with ones.

    Returns
    -------
    dask.array.Array, dask DataFrame or Series, or dask.bag.Bag
        Lazy, in the partitions of `X`.

    Raises
    ------
    TypeError
        For an `X` that is no collection of Dask.
    ValueError
        If `function` cannot be called with a row of ones, or returns other than a row
        for a row; of a block the task raises it.
    UnknownParameterError, LayoutError, ShardLostError, StoreClosedError, TimeoutError
        For what its name says; some in the tasks.

    Examples
    --------
    >>> import dask.array as da
    >>> store = daskps.create({"w": np.array([1.0, 2.0])})
    >>> X = da.ones((4, 2), chunks=(2, 2))
    >>> daskps.predict(store, lambda params, block: block @ params["w"], X).compute()
    array([3., 3., 3., 3.])
    """
    asked = {"names": names, "min_version": min_version, "max_age": max_age}
    viewed(store, store.layout, names)
    ViewRequest(least_version(min_version), config.deadline(max_age, "max_age"))
    call = _Call(store, function, asked)
    if hasattr(X, "map_blocks") and hasattr(X, "chunks"):
        return _of_array(call, X, meta)
    # Of a frame: a few rows of its dtypes.
    if (sample := getattr(X, "_meta_nonempty", None)) is not None:
        meta = call.tried(sample) if meta is None else meta
        meta = _like(meta[:0], sample[:0])
        return X.map_partitions(replace(call, meta=meta), meta=meta)
    if hasattr(X, "map_partitions"):
        return X.map_partitions(call.of_items)
    raise TypeError(
        f"X is a dask array, DataFrame, Series or bag, found {type(X).__name__}; of data "
        f"in memory the prediction is function(store.view(), X)"
    )


@dataclass(frozen=True)
class _Call:
    """The work of a task of a prediction."""

    store: Viewable
    function: Callable[[dict[str, Array], Any], Any]
    asked: dict[str, Any]
    #: The result of no rows, None where that is not known.
    meta: Any = None

    def __call__(self, block: Any) -> Any:
        """Return the predictions of a block."""
        if self.meta is not None and not len(block):
            return self.meta
        return _fitted(self.function(self.store.view(**self.asked), block), block)

    def of_items(self, items: Iterable[Any]) -> list[Any]:
        """Return the predictions of a partition of a bag."""
        found: list[Any] = self([*items])
        return found

    def tried(self, block: Any) -> Any:
        """Return what comes of a block, by parameters that are all ones.

        Raises
        ------
        ValueError
            Where the function cannot do with these.
        """
        layout, names = self.store.layout, self.asked["names"]
        params = {
            name: np.broadcast_to(np.ones((), layout[name].dtype), layout[name].shape)
            for name in viewed(self.store, layout, names)
        }
        try:
            with np.errstate(all="ignore"):
                return _fitted(self.function(params, block), block)
        except Exception as error:
            rows = counted(len(block), "row")
            raise ValueError(
                f"function was called with parameters of ones and {rows}, to see what "
                f"it returns, and failed ({type(error).__name__}: {error}); pass meta=, "
                f"a result of no rows, such as np.empty((0, 10), 'float32')"
            ) from error


def _fitted(found: Any, block: Any) -> Any:
    """Return the result of a block as one, or refuse what has not a row for each."""
    found = _like(found, block)
    n = len(found) if getattr(found, "ndim", 1) else -1
    if n != len(block):
        said = "no rows" if n < 0 else counted(n, "row")
        raise ValueError(
            f"function returns one row for each row of its block; it returned {said} "
            f"for {len(block)}"
        )
    return found


def _like(found: Any, block: Any) -> Any:
    """Return a result as a list for a list, as a frame for a frame, else as an array."""
    if isinstance(block, list):
        return list(found)
    if not hasattr(block, "iloc"):
        return np.asarray(found)
    if hasattr(found, "iloc"):
        return found
    array = np.asarray(found)
    if array.ndim == 0 or len(array) != len(block):
        return array
    frame = type(block if block.ndim == 2 else block.to_frame())
    made = frame(array, index=block.index)
    return made if array.ndim == 2 else made[0].rename(None)


def _of_array(call: _Call, X: Any, meta: Any) -> Any:
    """Return the predictions of a dask array."""
    X = X.rechunk(dict.fromkeys(range(1, X.ndim), -1))
    if meta is None:
        meta = call.tried(np.ones((1, *X.shape[1:]), X.dtype))
    meta = np.asarray(meta)[:0]
    return X.map_blocks(
        replace(call, meta=meta),
        drop_axis=[*range(1, X.ndim)],
        new_axis=[*range(1, meta.ndim)],
        chunks=(X.chunks[0], *meta.shape[1:]),
        token="predict",
        meta=meta,
    )
