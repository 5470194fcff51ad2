"""Numbers of a parameter that its owners work out: norm, sums and extremes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.caller import routes
from daskps.cluster.caller.measuring import measured
from daskps.cluster.wire.measuring import Measuring
from daskps.store import intake
from daskps.store.array_reads import ReadableArray
from daskps.store.handle import DEFAULT

if TYPE_CHECKING:
    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.wire.deadline import Deadline
    from daskps.typing import Array


class MeasurableArray(ReadableArray):
    """What the owners of a parameter say of its elements, without sending them.

    Parameters
    ----------
    store, parameter, region
        As of :class:`ReadableArray`.
    """

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
            the number of shards nor on where they are. Each shard is read at one version,
            as by :meth:`pull`; shards may differ in theirs.

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
        if how := _given(axis=axis, dtype=dtype, out=out, **how):
            return self.pull(timeout=timeout).sum(**how)
        return self._measure("sum", timeout)

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
        if how := _given(axis=axis, dtype=dtype, out=out, **how):
            return self.pull(timeout=timeout).mean(**how)
        return self._measure("mean", timeout)

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
        if how := _given(axis=axis, out=out, **how):
            return self.pull(timeout=timeout).min(**how)
        return self._measure("min", timeout)

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
        if how := _given(axis=axis, out=out, **how):
            return self.pull(timeout=timeout).max(**how)
        return self._measure("max", timeout)

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
        array = intake.as_array(other, f"the factor of {self.name[:60]!r}", ValueError)
        self._check_shape(array.shape, "the array")
        return self._measure("dot", timeout, np.ascontiguousarray(array).reshape(-1))

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


def _given(**how: Any) -> dict[str, Any]:
    """Return the arguments of NumPy's that say something: it passes all of them on."""
    return {name: value for name, value in how.items() if value is not None}
