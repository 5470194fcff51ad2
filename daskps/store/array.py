"""One parameter of a store, seen as an array: its verbs, and numbers that owners work out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.caller import routes
from daskps.cluster.caller.questions import measured
from daskps.cluster.caller.routes import ADD, ASSIGN, GRADIENT
from daskps.cluster.protocol.measures import Measuring
from daskps.store.array_reads import ReadableArray
from daskps.store.handle import DEFAULT
from daskps.store.regions import Region
from daskps.store.usage_errors import refuses_arithmetic
from daskps.store.values import as_array
from daskps.tracebacks import entrances, hide

if TYPE_CHECKING:
    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.protocol.deadline import Deadline
    from daskps.store.pushes import Writable
    from daskps.typing import Array
    from daskps.version import Version


@refuses_arithmetic
@entrances
class ParameterArray(ReadableArray):
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
    region : Region, optional
        The elements that are shown; see :meth:`region`.

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

    _store: Writable

    def push(
        self,
        grad: Any,
        *,
        weight: float = 1.0,
        lr: float | None = None,
        timeout: Any = DEFAULT,
    ) -> Version:
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
            The version that each shard reached.

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
        try:
            if (region := self._region) is not None:
                make = region.planning(GRADIENT, grad, "gradient", weight=weight, lr=lr)
                version: Version = self._store._do(
                    make, timeout, "a push", producer=True
                )
                return version
            grads = {self.name: grad}
            return self._store.push(grads, weight=weight, lr=lr, timeout=timeout)
        except BaseException as error:
            hide(error)
            raise

    def add(self, delta: Any, *, timeout: Any = DEFAULT) -> Version:
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
            The version that each shard reached.

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
        if (region := self._region) is not None:
            make = region.planning(ADD, delta, "delta")
            version: Version = self._store._do(make, timeout, "an add", producer=True)
            return version
        return self._store.add({self.name: delta}, timeout=timeout)

    def assign(self, value: Any, *, timeout: Any = DEFAULT) -> Version:
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
            The version that each shard reached.

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
        if (region := self._region) is not None:
            make = region.planning(ASSIGN, value, "value")
            what = "an assign"
            version: Version = self._store._do(make, timeout, what, producer=True)
            return version
        return self._store.assign({self.name: value}, timeout=timeout)

    def region(self, start: int, stop: int) -> ParameterArray:
        """Return a view of some elements, which has all verbs.

        Parameters
        ----------
        start, stop : int
            Elements [start, stop) in C order, 0 <= start <= stop <= size; of a view
            those of the view.

        Returns
        -------
        ParameterArray
            Of shape (stop - start,). Nothing is read or copied.

        Raises
        ------
        IndexError
            For elements that it does not have.
        TypeError
            For what is no int.

        Notes
        -----
        A :meth:`push` to a region is one optimizer step of the whole parameter, which
        names these elements only: the step count that rules and schedules see rises by
        one for all of it, on any number of shards, and the weights and the slots of all
        other elements stay as they are. All rules that daskps has compute each
        element by itself, so this is exact; a whole push changes elements whose
        gradient is 0 (momentum, decay of weights and of moments), this one changes no
        element that is not named. A :class:`daskps.optim.Function` takes whole arrays:
        a push to a part of its parameter is a `PushRejectedError`. `add` and `assign`
        concern the named elements alone. As any verb of a store, those of a region are
        refused during a BSP run.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros((2, 3))}, shards=2)
        >>> middle = store["w"].region(1, 5)
        >>> _ = middle.add(np.arange(4.0))
        >>> _ = middle.region(0, 2).assign([7.0, 8.0])
        >>> store["w"].pull()
        array([[0., 7., 8.],
               [2., 3., 0.]])
        """
        inner = Region.of(self._shown, start, stop)
        first = self._first
        region = Region(self._parameter, first + inner.start, first + inner.stop)
        return ParameterArray(self._store, self._parameter, region)

    def sum(
        self,
        axis: Any = None,
        dtype: Any = None,
        out: Any = None,
        *,
        timeout: Any = DEFAULT,
        **how: Any,
    ) -> Any:
        """Add up all elements, on the owners.

        Parameters
        ----------
        axis, dtype, out
            As ``numpy.sum`` has them. With any of these the elements are pulled.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.
        **how
            The same.

        Returns
        -------
        numpy scalar
            Of the dtype that ``numpy.sum`` has. Floats are added up as float64, in
            blocks of 4,096 elements and then these, so that the bits depend neither on
            the number of shards nor on where they are. Each shard is read at one
            version, as by :meth:`pull`; shards may differ in theirs.

        Raises
        ------
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Examples
        --------
        >>> store = daskps.create({"w": np.arange(4.0), "n": np.arange(3)})
        >>> store["w"].sum(), store["n"].sum(), store["w"].region(2, 4).sum()
        (np.float64(6.0), np.int64(3), np.float64(5.0))
        """
        return self._reduced("sum", timeout, axis=axis, dtype=dtype, out=out, **how)

    def mean(
        self,
        axis: Any = None,
        dtype: Any = None,
        out: Any = None,
        *,
        timeout: Any = DEFAULT,
        **how: Any,
    ) -> Any:
        """Return the mean of all elements, worked out as :meth:`sum`.

        Parameters
        ----------
        axis, dtype, out
            As ``numpy.mean`` has them. With any of these the elements are pulled.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.
        **how
            The same.

        Returns
        -------
        numpy scalar
            Of the dtype that ``numpy.mean`` has; NaN of no elements, with NumPy's
            warning.

        Raises
        ------
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Examples
        --------
        >>> daskps.create({"w": np.arange(4.0)})["w"].mean()
        np.float64(1.5)
        """
        return self._reduced("mean", timeout, axis=axis, dtype=dtype, out=out, **how)

    def min(
        self, axis: Any = None, out: Any = None, *, timeout: Any = DEFAULT, **how: Any
    ) -> Any:
        """Return the least element, of what is read as by :meth:`sum`.

        Parameters
        ----------
        axis, out
            As ``numpy.min`` has them. With any of these the elements are pulled.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.
        **how
            The same.

        Returns
        -------
        numpy scalar
            NaN where there is any, as of ``numpy.min``.

        Raises
        ------
        ValueError
            NumPy's own, of no elements.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Examples
        --------
        >>> daskps.create({"w": np.arange(4.0)})["w"].min()
        np.float64(0.0)
        """
        return self._reduced("min", timeout, axis=axis, out=out, **how)

    def max(
        self, axis: Any = None, out: Any = None, *, timeout: Any = DEFAULT, **how: Any
    ) -> Any:
        """Return the largest element, of what is read as by :meth:`sum`.

        Parameters
        ----------
        axis, out
            As ``numpy.max`` has them. With any of these the elements are pulled.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.
        **how
            The same.

        Returns
        -------
        numpy scalar
            NaN where there is any, as of ``numpy.max``.

        Raises
        ------
        ValueError
            NumPy's own, of no elements.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Examples
        --------
        >>> daskps.create({"w": np.arange(4.0)})["w"].max()
        np.float64(3.0)
        """
        return self._reduced("max", timeout, axis=axis, out=out, **how)

    def norm(self, *, timeout: Any = DEFAULT) -> Any:
        """Return the root of the sum of all squares, worked out as :meth:`sum`.

        Parameters
        ----------
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        numpy scalar
            Of the dtype that ``numpy.linalg.norm`` has, for all axes.

        Raises
        ------
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Examples
        --------
        >>> daskps.create({"w": np.array([[3.0], [4.0]])})["w"].norm()
        np.float64(5.0)
        """
        return self._measure("norm", timeout)

    def dot(self, other: Any, *, timeout: Any = DEFAULT) -> Any:
        """Return the sum of the products of all elements, worked out as :meth:`sum`.

        Parameters
        ----------
        other : ParameterArray or array_like
            Another parameter of this store, or an array, of the same shape. It travels:
            an array to the owners, another parameter by way of the caller, since its
            elements lie in other shards.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        numpy scalar
            Of the dtype that ``numpy.vdot`` has of both, which are no matrices here.

        Raises
        ------
        ValueError
            For another shape, or a parameter of another store.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Examples
        --------
        >>> store = daskps.create({"v": np.arange(3.0), "w": np.ones(3)})
        >>> store["v"].dot(store["w"]), store["v"].dot([1, 0, 2])
        (np.float64(3.0), np.float64(4.0))
        """
        if isinstance(other, ReadableArray):
            if other._store != self._store:
                raise ValueError(
                    f"{other!r} is of another store than {self!r}; pull it, and give dot "
                    f"the array"
                )
            self._check_shape(other.shape, repr(other))
            return self._measure("dot", timeout, other)
        array = as_array(other, f"the factor of {self.name[:60]!r}", ValueError)
        self._check_shape(array.shape, "the array")
        return self._measure("dot", timeout, np.ascontiguousarray(array).reshape(-1))

    def _reduced(self, kind: str, timeout: Any, **how: Any) -> Any:
        """Have NumPy work it out of a copy where one of its arguments says something."""
        if how := {name: value for name, value in how.items() if value is not None}:
            return getattr(self.pull(timeout=timeout), kind)(**how)
        return self._measure(kind, timeout)

    def _check_shape(self, shape: tuple[int, ...], what: str) -> None:
        if shape != self.shape:
            raise ValueError(
                f"{what} has shape {shape}, {self.name[:60]!r} {self.shape}; the shapes "
                f"must be equal, nothing is broadcast"
            )

    def _measure(self, kind: str, timeout: Any, other: Any = None) -> Any:
        index, first, n = self._parameter.index, self._first, self.size

        async def work(shards: ShardClient, deadline: Deadline) -> Any:
            by = other
            if isinstance(other, ReadableArray):
                by = await _pulled(shards, other, deadline)
            dtype = "" if by is None else by.dtype.name
            asked = Measuring(kind, index, first, n, dtype)
            return await measured(shards, asked, by, deadline)

        return self._store._with_shards(work, timeout, f"the {kind} of {self.name!r}")


async def _pulled(
    shards: ShardClient, other: ReadableArray, deadline: Deadline
) -> Array:
    """Return the elements of another parameter."""
    flat = np.empty(other.size, other.dtype)
    start = other._first
    spans = {other._parameter.index: (start, start + len(flat), flat)}
    target = routes.spanning(shards.meta, spans, lambda: None)
    await shards.call_async(routes.read(shards.meta, target), deadline)
    return flat
