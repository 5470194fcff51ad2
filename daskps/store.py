"""What a user holds: the verbs of a store."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config, intake
from daskps.array import ParameterArray
from daskps.cluster import plans
from daskps.cluster.aggregate import aggregate
from daskps.cluster.client import Deadline
from daskps.cluster.plans import ADD, ASSIGN, GRADIENT, Plan, Target
from daskps.errors import PushRejectedError, UnknownParameterError
from daskps.handle import Handle
from daskps.reduction import check_reduce
from daskps.targets import number, target_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from daskps.cluster.link import Pending
    from daskps.cluster.meta import Meta
    from daskps.layout import Layout
    from daskps.version import Version

Array = np.ndarray[Any, np.dtype[Any]]
DEFAULT = config.DEFAULT


class ParameterStore(Handle):
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
    """

    # -- pulls ---------------------------------------------------------------

    def pull(
        self,
        names: str | Iterable[str] | None = None,
        *,
        out: Mapping[str, Array] | None = None,
        min_version: int | None = None,
        timeout: Any = DEFAULT,
    ) -> Any:
        """Read parameters.

        Parameters
        ----------
        names : str or iterable of str, optional
            Which parameters; all by default.
        out : mapping of str to ndarray, optional
            Arrays of the parameters' shapes and dtypes to fill; they are returned.
        min_version : int or Version, optional
            Wait until this version is reached: exactly the shards and versions of a
            :class:`Version`, or by every shard the pull touches.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        dict of str to ndarray
            What each shard held at one version; shards may differ in theirs.

        Raises
        ------
        UnknownParameterError, ShardLostError, StoreClosedError, TimeoutError
            For what its name says.
        """
        target: list[Target] = []

        def make(meta: Meta) -> Plan:
            target.append(target_of(meta, names, out))
            return plans.read(meta, target[0], min_version, self.call_of())

        return self.do(make, timeout, "a pull", finish=lambda _: target[0].finish())

    def pull_async(
        self,
        names: str | Iterable[str] | None = None,
        *,
        out: Mapping[str, Array] | None = None,
        min_version: int | None = None,
        timeout: Any = DEFAULT,
    ) -> Pending[dict[str, Array]]:
        """Start a pull and return its future.

        Parameters
        ----------
        names, out, min_version, timeout
            As in :meth:`pull`. `out` belongs to the pull until it is done.

        Returns
        -------
        Future
            Like one of `concurrent.futures`, and awaitable.
        """
        seconds = config.deadline(timeout)
        link = self.bind()

        async def work() -> dict[str, Array]:
            what = f"a pull of store {self.name!r}"
            shards = await link.within(self.attach(link), seconds, what)
            target = target_of(shards.meta, names, out)
            plan = plans.read(shards.meta, target, min_version, self.call_of())
            await shards.call_async(plan.calls, plan.outs, seconds, what)
            found: dict[str, Array] = target.finish()
            return found

        return link.start(work)

    # -- pushes --------------------------------------------------------------

    def push(
        self,
        grads: Mapping[str, Any],
        *,
        weight: float = 1.0,
        lr: float | None = None,
        timeout: Any = DEFAULT,
    ) -> Any:
        """Apply gradients: one optimizer step, on arrival.

        Parameters
        ----------
        grads : mapping
            Name to gradient, of the parameter's shape; may be nested. Parameters
            that are not named are not updated and their step count stays.
        weight : float
            Multiplies the gradients.
        lr : float, optional
            Learning rate of this step, instead of the optimizer's own.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Version
            What the shards reached; pass it as `min_version` to see the effect.

        Raises
        ------
        PushRejectedError, UnknownParameterError, NoOptimizerError
            Nothing was changed.
        ConsistencyError
            During a BSP run, which has the store to itself.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says; each shard applied it once or not at all.
        """
        make = self._pushing(grads, weight, lr)
        return self.do(make, timeout, "a push", finish=self._seen, producer=True)

    def _pushing(
        self, grads: Any, weight: float, lr: float | None, copy: bool = False
    ) -> Callable[[Meta], Plan]:
        head = {"kind": GRADIENT, "weight": number(weight, "weight")}
        head["lr"] = None if lr is None else number(lr, "lr", least=0.0)

        def make(meta: Meta) -> Plan:
            arrays = self._gradients(meta, grads)
            if copy:
                arrays = {i: a.copy() for i, a in arrays.items()}
            return plans.push(meta, arrays, self.call_of(**head))

        return make

    def _gradients(self, meta: Meta, grads: Any) -> dict[int, Array]:
        finite = config.load().check_finite
        return intake.gradients(meta.layout, meta.optimizers, grads, finite=finite)

    def push_async(
        self,
        grads: Mapping[str, Any],
        *,
        weight: float = 1.0,
        lr: float | None = None,
        timeout: Any = DEFAULT,
    ) -> Pending[Version]:
        """Start a push and return its future.

        Parameters
        ----------
        grads, weight, lr, timeout
            As in :meth:`push`. The gradients are copied before this returns.

        Returns
        -------
        Future
            Like one of `concurrent.futures`, and awaitable.
        """
        seconds = config.deadline(timeout)
        link = self.bind()
        source = self.producer_here(link)
        given = {n: _copied(n, v) for n, v in intake.plain(grads).items()}
        make = self._pushing(given, weight, lr)
        what = f"a push of store {self.name!r}"
        return link.start(
            lambda: self.do_async(
                link,
                make,
                Deadline(seconds, what),
                finish=self._seen,
                source=source,
            )
        )

    def add(self, deltas: Mapping[str, Any], *, timeout: Any = DEFAULT) -> Any:
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
            What the shards reached.

        Raises
        ------
        PushRejectedError, UnknownParameterError, ConsistencyError
            As for :meth:`push`.
        """
        make = self._placing(ADD, deltas, "delta")
        return self.do(make, timeout, "an add", finish=self._seen, producer=True)

    def assign(
        self,
        values: Mapping[str, Any],
        *,
        allow_extra: bool = False,
        allow_missing: bool = True,
        timeout: Any = DEFAULT,
    ) -> Any:
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
            What the shards reached.

        Raises
        ------
        PushRejectedError, UnknownParameterError, ConsistencyError
            As for :meth:`push`.
        """
        make = self._placing(
            ASSIGN, values, "value", extra=allow_extra, missing=allow_missing
        )
        return self.do(make, timeout, "an assign", finish=self._seen, producer=True)

    def _placing(
        self,
        kind: str,
        given: Any,
        what: str,
        *,
        extra: bool = False,
        missing: bool = True,
    ) -> Callable[[Meta], Plan]:
        def make(meta: Meta) -> Plan:
            named = intake.plain(given)
            if extra:
                named = {n: v for n, v in named.items() if n in meta.layout.by_name}
            absent = [n for n in meta.layout.by_name if n not in named]
            if absent and not missing:
                raise UnknownParameterError(
                    f"no value for {absent[:8]}; name all parameters or pass "
                    f"allow_missing=True"
                )
            finite = config.load().check_finite
            arrays = intake.values(meta.layout, named, what, finite=finite)
            return plans.push(meta, arrays, self.call_of(kind=kind))

        return make

    def pushpull(
        self,
        grads: Mapping[str, Any],
        *,
        weight: float = 1.0,
        lr: float | None = None,
        out: Mapping[str, Array] | None = None,
        timeout: Any = DEFAULT,
    ) -> Any:
        """Push gradients and read all parameters in one round trip.

        Parameters
        ----------
        grads, weight, lr
            As in :meth:`push`.
        out : mapping of str to ndarray, optional
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
        """
        target: list[Target] = []
        head = {"kind": GRADIENT, "weight": number(weight, "weight")}
        head["lr"] = None if lr is None else number(lr, "lr", least=0.0)

        def make(meta: Meta) -> Plan:
            target.append(target_of(meta, None, out))
            arrays = self._gradients(meta, grads)
            return plans.push(meta, arrays, self.call_of(**head), target=target[0])

        return self.do(
            make,
            timeout,
            "a pushpull",
            finish=lambda _: target[0].finish(),
            producer=True,
        )

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
        PushRejectedError, UnknownParameterError, ValueError
            For arrays that do not fit, or an unknown `reduce`.
        """
        check_reduce(reduce)
        given = list(contributions)
        if not given:
            raise ValueError("aggregate needs at least one contribution")
        seconds = config.deadline(timeout)
        link = self.bind()

        async def work() -> dict[str, Array]:
            shards = await self.attach(link)
            layout = shards.meta.layout
            finite = config.load().check_finite
            arrays = [
                intake.gradients(layout, {}, g, finite=finite, model=True)
                for g in given
            ]
            return await aggregate(shards, arrays, reduce)

        what = f"an aggregate of store {self.name!r}"
        return link.run(lambda: link.within(work(), seconds, what))

    def _seen(self, version: Version) -> Version:
        # For `_repr_html_`, which must not ask anybody.
        known = dict(enumerate(self._last_versions)) | dict(version.pairs)
        if self._shards is not None:
            n = self._shards.meta.layout.n_shards
            self._last_versions = tuple(known.get(i, 0) for i in range(n))
        return version

    def _told(self, rows: Iterable[Iterable[tuple[int, int]]]) -> tuple[int, ...]:
        pairs = sorted((shard, v) for row in rows for shard, v in row)
        self._last_versions = tuple(v for _, v in pairs)
        return self._last_versions

    # -- what it is ----------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Names of the parameters, in order."""
        return [p.name for p in self.layout.parameters]

    @property
    def layout(self) -> Layout:
        """Names, shapes, dtypes and how they are cut into shards."""
        return self.attached().meta.layout

    @property
    def placement(self) -> tuple[str, ...]:
        """Address of the worker that owns each shard."""
        return self.attached().meta.owners

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of all values."""
        return self.layout.nbytes

    @property
    def optimizer(self) -> dict[str, str]:
        """For each parameter with an update rule, the rule's repr."""
        meta = self.attached().meta
        return {
            meta.layout.parameters[i].name: rule for i, rule in meta.optimizers.items()
        }

    @property
    def version(self) -> Any:
        """Smallest version of all shards; awaitable with an asynchronous client."""
        return self.ask("versions", lambda rows: min(self._told(rows)))

    @property
    def versions(self) -> Any:
        """Version of each shard; awaitable with an asynchronous client."""
        return self.ask("versions", self._told)

    def stats(self, *, timeout: Any = DEFAULT) -> Any:
        """Return counters.

        Parameters
        ----------
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        dict
            "shards": one row per shard with its worker, generation, version, bytes,
            pushes, duplicates and parked calls; "handle": messages, calls in the
            process, bytes and retries of this handle.
        """
        shards = self._shards

        def finish(rows: list[list[dict[str, Any]]]) -> dict[str, Any]:
            found = sorted((r for rs in rows for r in rs), key=lambda r: r["shard"])
            handle = asdict(shards.counters) if shards else {}
            return {"shards": found, "handle": handle}

        return self.ask("stats", finish, timeout)

    def __getitem__(self, name: str) -> ParameterArray:
        return ParameterArray(self, self.layout[name])

    def __contains__(self, name: object) -> bool:
        return name in self.layout.by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.layout.parameters)


def _copied(name: str, value: Any) -> Array:
    # Checked before it is copied: a copy would have lost a mask.
    what = f"the gradient of {name[:60]!r}"
    return intake.as_array(value, what, PushRejectedError).copy()
