"""One parameter of a store, seen as an array."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.cluster.caller import routes
from daskps.layout.chunks import chunks_of
from daskps.store.indexing import split_index
from daskps.store.mistaken import (
    no_array_attribute,
    not_written_in_part,
    refuses_arithmetic,
)
from daskps.store.repr import array_html
from daskps.store.snapshot import dask_array, taken_by
from daskps.store.targets import target_of

if TYPE_CHECKING:
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.layout.parameters import Parameter
    from daskps.store.pushes import Writable
    from daskps.typing import Array

DEFAULT = config.DEFAULT
logger = logging.getLogger(__name__)


@refuses_arithmetic
class ParameterArray:
    """A dense parameter: NumPy's attributes, and verbs that act on it alone.

    Got from a store by name, ``store["w"]``. Indexing reads only from the shards it
    touches; :func:`numpy.asarray` pulls all of it. With an asynchronous client
    methods and indexing return awaitables, and `numpy.asarray` raises.

    Parameters
    ----------
    store : ParameterStore
        The store it belongs to.
    parameter : Parameter
        Its row in the store's layout.

    Examples
    --------
    >>> store = daskps.create({"w": np.zeros((4, 2))}, optimizer=daskps.optim.SGD(0.1))
    >>> w = store["w"]
    >>> w.shape, w.dtype, w.nbytes
    ((4, 2), dtype('float64'), 64)
    >>> w[1:3].shape
    (2, 2)
    >>> np.asarray(w).sum()
    np.float64(0.0)
    """

    def __init__(self, store: Writable, parameter: Parameter) -> None:
        self._store = store
        self._parameter = parameter

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self._parameter.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        return self._parameter.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the elements."""
        return np.dtype(self._parameter.dtype)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._parameter.size

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self._parameter.nbytes

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_array_attribute(self, name)

        def __setitem__(self, index: Any, value: Any) -> None:
            raise not_written_in_part(self.name)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a parameter without axes")
        return self.shape[0]

    def __repr__(self) -> str:
        return (
            f"<daskps.ParameterArray {self.name!r}: {self.shape} {self.dtype} of "
            f"store {self._store.name!r}>"
        )

    def _repr_html_(self) -> str:
        return array_html(self, self._store.name, self._chunks())

    def _chunks(self) -> tuple[tuple[int, ...], ...]:
        """Return how the shards cut it, to whole rows; nothing where nobody knows."""
        meta = self._store._meta_if_known()
        if meta is None or not self.size or not self.shape:
            return ()
        chunks = chunks_of(meta.layout, self._parameter)
        rows = tuple(chunk.rows for chunk in chunks)
        return rows, *((length,) for length in self.shape[1:])

    def pull(self, out: Array | None = None, *, timeout: Any = DEFAULT) -> Any:
        """Read the parameter.

        Parameters
        ----------
        out : ndarray, optional
            Array of this shape and dtype to fill.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        ndarray
            The values; `out` itself, if given.

        Raises
        ------
        ValueError, TypeError
            For an `out` that does not fit.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Examples
        --------
        >>> store = daskps.create({"w": np.arange(3.0)})
        >>> store["w"].pull()
        array([0., 1., 2.])
        """
        given = None if out is None else {self.name: out}

        def make(meta: StoreMap) -> Request:
            all_of = target_of(meta, [self.name], given)
            target = all_of._replace(finish=lambda: all_of.finish()[self.name])
            return routes.read(meta, target)

        return self._store._do(make, timeout, f"a pull of {self.name!r}")

    def push(
        self,
        grad: Any,
        *,
        weight: float = 1.0,
        lr: float | None = None,
        timeout: Any = DEFAULT,
    ) -> Any:
        """Apply a gradient of this parameter, as :meth:`ParameterStore.push`.

        Parameters
        ----------
        grad : ndarray
            Gradient, of this shape.
        weight, lr, timeout
            As in :meth:`ParameterStore.push`.

        Returns
        -------
        Version
            What the shards reached.

        Raises
        ------
        PushRejectedError, NoOptimizerError, ConsistencyError
            As for :meth:`ParameterStore.push`; nothing was changed.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says; each shard applied it once or not at all.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(3)}, optimizer=daskps.optim.SGD(0.1))
        >>> _ = store["w"].push(np.ones(3), lr=0.5)
        >>> store["w"].pull()
        array([-0.5, -0.5, -0.5])
        """
        grads = {self.name: grad}
        return self._store.push(grads, weight=weight, lr=lr, timeout=timeout)

    def add(self, delta: Any, *, timeout: Any = DEFAULT) -> Any:
        """Add to the parameter, as :meth:`ParameterStore.add`.

        Parameters
        ----------
        delta : ndarray
            Array of this shape.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Version
            What the shards reached.

        Raises
        ------
        PushRejectedError, ConsistencyError
            As for :meth:`ParameterStore.push`; nothing was changed.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says; each shard applied it once or not at all.

        Examples
        --------
        >>> store = daskps.create({"w": np.arange(3.0)})
        >>> _ = store["w"].add(np.ones(3))
        >>> store["w"].pull()
        array([1., 2., 3.])
        """
        return self._store.add({self.name: delta}, timeout=timeout)

    def assign(self, value: Any, *, timeout: Any = DEFAULT) -> Any:
        """Replace the parameter, as :meth:`ParameterStore.assign`.

        Parameters
        ----------
        value : ndarray
            Array of this shape.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Version
            What the shards reached.

        Raises
        ------
        PushRejectedError, ConsistencyError
            As for :meth:`ParameterStore.push`; nothing was changed.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says; each shard applied it once or not at all.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(3)})
        >>> _ = store["w"].assign(np.full(3, 7.0))
        >>> store["w"].pull()
        array([7., 7., 7.])
        """
        return self._store.assign({self.name: value}, timeout=timeout)

    def __getitem__(self, index: Any) -> Any:
        low, high, inner = split_index(index, self.shape)
        width = int(np.prod(self.shape[1:], dtype=np.int64))
        flat = np.empty((high - low) * width, self.dtype)
        spans = {self._parameter.index: (low * width, high * width, flat)}

        def finish() -> Any:
            return flat.reshape((high - low, *self.shape[1:]))[inner]

        def make(meta: StoreMap) -> Request:
            target = routes.spanning(meta, spans, finish)
            return routes.read(meta, target)

        return self._store._do(make, DEFAULT, f"a slice of {self.name!r}")

    def to_dask_array(self, *, timeout: Any = DEFAULT) -> Any:
        """Copy the parameter at one moment into a dask array on the owners.

        Parameters
        ----------
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        dask.array.Array
            Of one version, cut along axis 0 near the borders of the shards; work on
            its chunks is done where they are.

        Raises
        ------
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Examples
        --------
        >>> store = daskps.create({"w": np.arange(6.0).reshape(3, 2)}, shards=2)
        >>> w = store["w"].to_dask_array()
        >>> w.mean(axis=0).compute()
        array([2., 3.])
        """
        parameter = self._parameter
        return taken_by(
            self._store,
            parameter.index,
            lambda taken: dask_array(taken, parameter, alone=True),
            what=f"a copy of {self.name!r}",
            timeout=timeout,
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(
                f"np.asarray(..., copy=False) of parameter {self.name!r}: its values "
                f"are on other workers, a pull must copy them"
            )
        if self._store._bind().asynchronous:
            raise TypeError(
                f"np.asarray of parameter {self.name!r} cannot wait on an event loop; "
                f"use await store[{self.name!r}].pull(), and in a task that is a "
                f"coroutine await store.pull_async({self.name!r})"
            )
        limit = config.warn_pull_nbytes()
        if self.nbytes > limit:
            logger.warning("np.asarray pulls %s of %d bytes", self, self.nbytes)
        value: Array = self.pull()
        return value if dtype is None else value.astype(dtype, copy=False)
