"""One parameter of a store, seen as an array."""

from __future__ import annotations

from typing import Any

from daskps.cluster.caller.routes import ADD, ASSIGN
from daskps.store.array_measures import MeasurableArray
from daskps.store.handle import DEFAULT
from daskps.store.mistaken import refuses_arithmetic
from daskps.store.regions import Region
from daskps.tracebacks import entrances, hide


@refuses_arithmetic
@entrances
class ParameterArray(MeasurableArray):
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
        try:
            if (region := self._region) is not None:
                make = region.pushing(grad, weight, lr)
                return self._store._do(make, timeout, "a push", producer=True)
            grads = {self.name: grad}
            return self._store.push(grads, weight=weight, lr=lr, timeout=timeout)
        except BaseException as error:
            hide(error)
            raise

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
        try:
            if (region := self._region) is not None:
                make = region.placing(ADD, delta, "delta")
                return self._store._do(make, timeout, "an add", producer=True)
            return self._store.add({self.name: delta}, timeout=timeout)
        except BaseException as error:
            hide(error)
            raise

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
        try:
            if (region := self._region) is not None:
                make = region.placing(ASSIGN, value, "value")
                return self._store._do(make, timeout, "an assign", producer=True)
            return self._store.assign({self.name: value}, timeout=timeout)
        except BaseException as error:
            hide(error)
            raise

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
        element by itself, so this is exact; what a whole push does to elements whose
        gradient is 0 (momentum, decay of weights and of moments) is not done to those that
        are not named. A :class:`daskps.optim.Function` takes whole arrays: a push to a
        part of its parameter is a `PushRejectedError`. `add` and `assign` concern the
        named elements alone. As any verb of a store, those of a region are refused during
        a BSP run.

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
