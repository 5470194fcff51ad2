"""The half of a parameter's view that reads: what it is, pulls and slices."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.cluster.caller import routes
from daskps.cluster.caller.region_routes import read_runs
from daskps.layout.chunks import chunks_of
from daskps.store.handle import DEFAULT
from daskps.store.regions import named_rows, runs_of_rows, split_index
from daskps.store.repr import array_html
from daskps.store.snapshot import dask_array
from daskps.store.targets import Outs, device_for, target_of
from daskps.store.usage_errors import no_array_attribute
from daskps.tracebacks import hide

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.layout.parameters import Parameter
    from daskps.store.handle import Handle
    from daskps.store.regions import Region
    from daskps.typing import Array

logger = logging.getLogger(__name__)


class ReadableArray:
    """Metadata and values of a parameter of a store, or of a region of one.

    Parameters
    ----------
    store : ParameterStore
        The store it belongs to.
    parameter : Parameter
        Its row in the store's layout.
    region : Region, optional
        The elements that are shown; all by default.
    """

    def __init__(
        self, store: Handle, parameter: Parameter, region: Region | None = None
    ) -> None:
        self._store = store
        self._parameter = parameter
        #: Of a view the elements that it shows.
        self._region = region

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self._parameter.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        return self._shown.shape

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
        return self._shown.size

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self._shown.nbytes

    @property
    def _first(self) -> int:
        """Number of the first element of the parameter that it shows."""
        return 0 if self._region is None else self._region.start

    @property
    def _shown(self) -> Parameter:
        """The array that it shows: the parameter, or the elements of its region."""
        return self._parameter if self._region is None else self._region.shaped

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_array_attribute(self, name)

        def __setitem__(self, index: Any, value: Any) -> None:
            parameter = f"store[{self.name!r}]"
            raise TypeError(
                f"{parameter}[...] = value writes nothing to the workers; pull the "
                f"parameter, change the copy and give it to {parameter}.assign(...), or "
                f"add a difference with {parameter}.add(...)"
            )

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a parameter without axes")
        return self.shape[0]

    def __repr__(self) -> str:
        return (
            f"<daskps.ParameterArray {self._shown.name!r}: {self.shape} {self.dtype} "
            f"of store {self._store.name!r}>"
        )

    def _repr_html_(self) -> str:
        return array_html(self, self._store.name, self._chunks())

    def _chunks(self) -> tuple[tuple[int, ...], ...]:
        """Return how the shards cut it, to whole rows; nothing where nobody knows."""
        meta = self._store._meta_if_known()
        if meta is None or not self.size or not self.shape or self._region:
            return ()
        chunks = chunks_of(meta.layout, self._parameter)
        rows = tuple(chunk.rows for chunk in chunks)
        return rows, *((length,) for length in self.shape[1:])

    def pull(
        self,
        out: Array | None = None,
        *,
        device: str | None = None,
        timeout: Any = DEFAULT,
    ) -> Array:
        """Read the parameter.

        Parameters
        ----------
        out : ndarray, optional
            Array of this shape and dtype to fill.
        device : str, optional
            Where a new one goes, as in :meth:`daskps.ParameterStore.pull`.
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
        try:
            where = device_for(device, out)
            if self._region is not None:
                name = self._shown.name
                meta = self._store._attached().meta
                outs = Outs({} if out is None else {name: out}, meta, where)
                flat = outs.place(name, self.shape, self._parameter.dtype)
                runs = [(0, self.size)]
                of_region: Array = self._read(
                    runs, flat, lambda: outs.filled()[name], timeout=timeout
                )
                return of_region
            given = None if out is None else {self.name: out}

            def make(meta: StoreMap) -> Request:
                all_of = target_of(meta, [self.name], given, where)
                target = all_of._replace(finish=lambda: all_of.finish()[self.name])
                return routes.read(meta, target)

            values: Array = self._store._do(make, timeout, f"a pull of {self.name!r}")
            return values
        except BaseException as error:
            hide(error)
            raise

    def __getitem__(self, index: Any) -> Any:
        width = int(np.prod(self.shape[1:], dtype=np.int64))
        named, what = named_rows(index, self.shape), "rows"
        if named is not None:
            (rows, inner), runs = named, runs_of_rows(named[0])
            n = len(rows)
        else:
            low, high, inner = split_index(index, self.shape)
            n, runs, what = high - low, [(low, high)], "a slice"
        flat = np.empty(n * width, self.dtype)

        def finish() -> Any:
            return flat.reshape((n, *self.shape[1:]))[inner]

        runs = [(a * width, b * width) for a, b in runs]
        return self._read(runs, flat, finish, what=what)

    def _read(
        self,
        runs: list[tuple[int, int]],
        flat: Array,
        finish: Callable[[], Any],
        *,
        timeout: Any = DEFAULT,
        what: str = "a slice",
    ) -> Any:
        """Read runs of the elements that it shows, one behind the other."""
        first = self._first
        asked = [(first + a, first + b) for a, b in runs if a < b]

        def make(meta: StoreMap) -> Request:
            index = self._parameter.index
            return read_runs(meta, index, asked, flat=flat, finish=finish)

        return self._store._do(make, timeout, f"{what} of {self.name!r}")

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
        LayoutError
            Where a worker has no room for a copy of what it owns; nothing was copied.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Examples
        --------
        >>> store = daskps.create({"w": np.arange(6.0).reshape(3, 2)}, shards=2)
        >>> w = store["w"].to_dask_array()
        >>> w.mean(axis=0).compute()
        array([2., 3.])
        """
        parameter, region = self._parameter, self._region
        return self._store._taken(
            parameter.index,
            lambda taken: _part(dask_array(taken, parameter, alone=True), region),
            timeout,
            f"a copy of {self.name!r}",
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
        if self.nbytes > config.load().warn_pull_nbytes:
            logger.warning("np.asarray pulls %s of %d bytes", self, self.nbytes)
        value = self.pull()
        return value if dtype is None else value.astype(dtype, copy=False)


def _part(array: Any, region: Region | None) -> Any:
    """Return the elements of a region of a dask array, or all of it."""
    return array if region is None else array.reshape(-1)[region.start : region.stop]
