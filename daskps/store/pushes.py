"""The half of a store's handle that changes parameters: push, add, assign."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.cluster.caller import routes
from daskps.cluster.caller.routes import (
    ADD,
    ASSIGN,
    GRADIENT,
    LOOK_LATER_NBYTES,
    REMOVE,
    FiniteCheck,
    Request,
    Step,
)
from daskps.errors import PushRejectedError, UnknownParameterError
from daskps.layout.ids import as_ids
from daskps.store import intake
from daskps.store.arguments import flag, number
from daskps.store.handle import DEFAULT, Handle
from daskps.store.specs import RowGrad
from daskps.store.targets import device_for, target_of
from daskps.store.values import as_array, times
from daskps.tracebacks import hide

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.cluster.caller.link import CallFuture
    from daskps.cluster.caller.row_routes import RowBatch
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.caller.targets import Target
    from daskps.typing import Array
    from daskps.version import Version


class Writable(Handle):
    """Pushing to the parameters of a store.

    Parameters
    ----------
    uid, name : str
        Id and name of the store.
    """

    def push(
        self,
        grads: Mapping[str, Any],
        *,
        weight: float = 1.0,
        lr: float | None = None,
        timeout: Any = DEFAULT,
    ) -> Version:
        """Apply gradients: one optimizer step, on arrival.

        Parameters
        ----------
        grads : mapping
            Name to gradient, of the parameter's shape; may be nested, or be in lists
            and tuples where the store was made of such. Parameters that are not named
            are not updated and their step count stays.
        weight : float
            Multiplies the gradients; at least 0.
        lr : float, optional
            Learning rate of this step, instead of the optimizer's own.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Version
            The version that each shard reached; pass it as `min_version` to see the
            effect.

        Raises
        ------
        PushRejectedError, UnknownParameterError, NoOptimizerError
            Nothing was changed.
        ConsistencyError
            During a BSP run, which has the store to itself.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says; each shard applied it once or not at all.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(3)}, optimizer=daskps.optim.SGD(0.1))
        >>> version = store.push({"w": np.ones(3)})
        >>> version
        1
        >>> store.pull(min_version=version)["w"]
        array([-0.1, -0.1, -0.1])
        """
        try:
            make = self._pushing(grads, weight, lr)
            version: Version = self._do(make, timeout, "a push", producer=True)
            return version
        except BaseException as error:
            hide(error)
            raise

    def _pushing(
        self,
        grads: Any,
        weight: float,
        lr: float | None,
        target: Callable[[StoreMap], Target | None] = lambda _: None,
    ) -> Callable[[StoreMap], Request]:
        """Check the numbers now; check the gradients once the store is known."""
        rate = None if lr is None else number(lr, "lr", least=0.0)
        step = Step(kind=GRADIENT, lr=rate)
        factor = number(weight, "weight", least=0.0)

        def make(meta: StoreMap) -> Request:
            where = target(meta)
            finite = config.check_finite()
            layout, rules = meta.layout, meta.optimizers
            near = meta if meta.device and factor == 1.0 else None
            dense, named = intake.parted(layout, grads)
            # The shard looks in the pass that applies them, where it gets all of them.
            later = finite and factor == 1.0 and not named and layout.n_shards == 1
            later = later and layout.nbytes >= LOOK_LATER_NBYTES and _are_large(dense)
            arrays: Mapping[int, Array] = {}
            # In this order: the check of the arrays refuses what is no mapping.
            if not named or dense:
                arrays = intake.gradients(
                    layout,
                    rules,
                    dense,
                    finite=finite and not later,
                    near=near,
                )
            if factor != 1.0:
                arrays = {
                    i: times(layout.parameters[i], array, factor, finite=finite)
                    for i, array in arrays.items()
                }
            # Arrays that were not checked for NaN and Inf here are checked by the owner
            # that applies them: to check them twice costs a pass more.
            if not named:
                request = routes.push(meta, arrays, step, target=where)
                look = partial(intake.look, layout, arrays) if later else None
            else:
                # On a device they are waited for in any case.
                now = finite and (factor != 1.0 or near is not None)
                how: dict[str, Any] = {"weight": factor, "finite": now, "near": near}
                rows = intake.row_gradients(layout, rules, named, **how)
                request = routes.push(meta, arrays, step, target=where, rows=rows)
                look = (
                    partial(intake.look_at_rows, rows) if finite and not now else None
                )
            return (
                request if look is None else request._replace(check=FiniteCheck(look))
            )

        return make

    def push_async(
        self,
        grads: Mapping[str, Any],
        *,
        weight: float = 1.0,
        lr: float | None = None,
        timeout: Any = DEFAULT,
    ) -> CallFuture[Version]:
        """Start a push and return its future.

        Parameters
        ----------
        grads, weight, lr, timeout
            As in :meth:`push`. The gradients are copied before this returns.

        Returns
        -------
        Future
            Like one of `concurrent.futures`, and awaitable.

        Raises
        ------
        PushRejectedError, ValueError, TypeError
            For arguments that cannot be, before anything is sent.
        StoreClosedError
            If this handle was closed. All other errors of :meth:`push` are the
            future's.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(3)}, optimizer=daskps.optim.SGD(0.1))
        >>> future = store.push_async({"w": np.ones(3)})
        >>> future.result()
        1
        """
        deadline = self._deadline(timeout, "a push")
        link = self._bind()
        source = self._producer_here(link)
        given = {n: _copied(n, v) for n, v in intake.plain(grads).items()}
        make = self._pushing(given, weight, lr)
        return link.start(lambda: self._do_async(link, make, deadline, source))

    def add(self, deltas: Mapping[str, Any], *, timeout: Any = DEFAULT) -> Version:
        """Add to parameters: a plain ``+=`` that no optimizer sees.

        Parameters
        ----------
        deltas : mapping
            Name to array of the parameter's shape; integers for integers.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Version
            The version that each shard reached.

        Raises
        ------
        PushRejectedError, UnknownParameterError, ConsistencyError
            As for :meth:`push`.

        Examples
        --------
        >>> store = daskps.create({"seen": np.zeros(2, "int64")})
        >>> _ = store.add({"seen": np.array([3, 4])})
        >>> store.pull()["seen"]
        array([3, 4])
        """
        try:
            make = self._placing(ADD, deltas, "delta")
            version: Version = self._do(make, timeout, "an add", producer=True)
            return version
        except BaseException as error:
            hide(error)
            raise

    def assign(
        self,
        values: Mapping[str, Any],
        *,
        allow_extra: bool = False,
        allow_missing: bool = True,
        timeout: Any = DEFAULT,
    ) -> Version:
        """Replace parameters; optimizer state stays.

        Parameters
        ----------
        values : mapping
            Name to array of the parameter's shape.
        allow_extra : bool
            Ignore names the store does not hold.
        allow_missing : bool
            Leave parameters that are not named as they are.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Version
            The version that each shard reached.

        Raises
        ------
        PushRejectedError, UnknownParameterError, ConsistencyError
            As for :meth:`push`.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(2), "b": 1.0})
        >>> _ = store.assign({"w": np.array([5.0, 6.0])})
        >>> store.pull()
        {'w': array([5., 6.]), 'b': array(1.)}
        """
        try:
            make = self._placing(
                ASSIGN,
                values,
                "value",
                extra=flag(allow_extra, "allow_extra"),
                missing=flag(allow_missing, "allow_missing"),
            )
            version: Version = self._do(make, timeout, "an assign", producer=True)
            return version
        except BaseException as error:
            hide(error)
            raise

    def _placing(
        self,
        kind: str,
        given: Any,
        what: str,
        *,
        extra: bool = False,
        missing: bool = True,
    ) -> Callable[[StoreMap], Request]:
        def make(meta: StoreMap) -> Request:
            layout = meta.layout
            named = intake.plain(given)
            if extra:
                held = layout.by_name.keys() | layout.table_by_name.keys()
                named = {n: v for n, v in named.items() if n in held}
            absent = [n for n in layout.by_name if n not in named]
            if absent and not missing:
                raise UnknownParameterError(
                    f"no value for {absent[:8]}; name all parameters or pass "
                    f"allow_missing=True"
                )
            finite, step = config.check_finite(), Step(kind=kind)
            near = meta if meta.device else None
            if not layout.tables:  # in few calls: nearly all that is added
                arrays = intake.values(layout, named, what, finite=finite, near=near)
                return routes.push(meta, arrays, step)
            dense, of_tables = intake.parted(layout, named)
            arrays = intake.values(layout, dense, what, finite=finite, near=near)
            calls = intake.row_values(layout, of_tables, what, finite=finite, near=near)
            return _in_parts(meta, arrays, step, calls)

        return make

    def _remove(self, name: str, ids: Any, timeout: Any) -> Version:
        """Forget rows of a table; see :meth:`ParameterTable.remove`."""

        def make(meta: StoreMap) -> Request:
            table = meta.layout.table_by_name[name]
            calls = intake.removals(meta.layout, table, ids)
            return _in_parts(meta, {}, Step(kind=REMOVE), calls)

        what = f"a remove of {name!r}"
        version: Version = self._do(make, timeout, what, producer=True)
        return version

    def pushpull(
        self,
        grads: Mapping[str, Any],
        *,
        weight: float = 1.0,
        lr: float | None = None,
        out: Mapping[str, Array] | None = None,
        device: str | None = None,
        timeout: Any = DEFAULT,
    ) -> dict[str, Array]:
        """Push gradients and read all parameters in one round trip.

        Parameters
        ----------
        grads, weight, lr
            As in :meth:`push`.
        out, device
            As in :meth:`pull`.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        dict of str to ndarray
            Parameters that contain this push.

        Raises
        ------
        PushRejectedError, UnknownParameterError, NoOptimizerError, ConsistencyError
            As for :meth:`push`.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(3)}, optimizer=daskps.optim.SGD(0.1))
        >>> store.pushpull({"w": np.ones(3)})["w"]
        array([-0.1, -0.1, -0.1])
        """
        where = device_for(device, out)

        def target(meta: StoreMap) -> Target:
            return target_of(meta, None, out, where)

        make = self._pushing(grads, weight, lr, target)
        found: dict[str, Array] = self._do(make, timeout, "a pushpull", producer=True)
        return found


def _in_parts(
    meta: StoreMap,
    arrays: Mapping[int, Array],
    step: Step,
    calls: Sequence[Sequence[RowBatch]],
) -> Request:
    """Return the call with arrays and the first rows, after which come the others."""
    first, *others = calls
    rest = tuple([routes.push(meta, {}, step, rows=rows) for rows in others])
    request = routes.push(meta, arrays, step, rows=first)
    return request._replace(rest=rest) if rest else request


def _are_large(dense: Mapping[str, Any]) -> bool:
    """Return whether gradients are large, all together."""
    return sum([getattr(g, "nbytes", 0) for g in dense.values()]) >= LOOK_LATER_NBYTES


def _copied(name: str, value: Any) -> Array | RowGrad:
    # Checked before it is copied: a copy would have lost a mask.
    what = f"the gradient of {name[:60]!r}"
    if isinstance(value, RowGrad):
        ids, shape = as_ids(value.ids, f"table {name[:60]!r}", PushRejectedError)
        values = as_array(value.values, what, PushRejectedError)
        return RowGrad(ids.copy().reshape(shape), values.copy())
    return as_array(value, what, PushRejectedError).copy()
