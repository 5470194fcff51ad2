"""Verbs of a trainer beside pull and push."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from daskps.cluster.caller.routes import ADD, MODEL
from daskps.cluster.caller.trainer_step import TrainerStep
from daskps.combination import check_rows, check_together
from daskps.errors import ConsistencyError, PushRejectedError
from daskps.layout.arrays import FLOATS
from daskps.store import intake
from daskps.store.arguments import number
from daskps.training.allreduce import brought_by
from daskps.training.left import LeftValues
from daskps.training.overlap.ahead import Ahead
from daskps.training.row_ids import deltas_of_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.typing import Array
    from daskps.version import Version


class Verbs(Ahead):
    """Verbs of a trainer beside pushing gradients: add, assign and all-reduce."""

    _left: LeftValues | None = None

    def add(self, deltas: Mapping[str, Any], *, timeout: Any = None) -> Version:
        """Add to parameters, past the optimizer, and end the step.

        Under BSP what all trainers add in a round is summed, along the tree over the
        ranks, and added once; under SSP and ASP each is added on arrival. Optimizer
        state stays. A round has one kind: where another trainer pushes or assigns in
        the same one, nothing of it is applied and the run ends with the error.

        Parameters
        ----------
        deltas : mapping
            Name to array of the parameter's shape, integers for integers, or for rows
            of a table to a :class:`daskps.RowGrad`; may be nested.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits until the run ends.

        Returns
        -------
        Version
            The version that each shard is at.

        Raises
        ------
        PushRejectedError, UnknownParameterError
            Nothing was changed and the clock stays.
        ConsistencyError
            Where gradients were pushed at this clock without a tick, or others send
            another kind in this round.
        RunCancelledError, ShardLostError, TimeoutError
            As in :meth:`push`.

        Examples
        --------
        >>> def loop(trainer, part):
        ...     trainer.add({"seen": part})
        ...     return trainer.pull()["seen"].tolist()
        >>> store = daskps.create({"seen": np.zeros(2, "int64")})
        >>> daskps.run(store, loop, [np.array([1, 2]), np.array([10, 20])])
        [[11, 22], [11, 22]]
        """
        meta = self._live().meta
        dense, named = intake.parted(meta.layout, deltas)
        arrays: Mapping[int, Array] = {}
        if not named or dense:
            arrays = intake.values(meta.layout, dense, "delta", finite=self._finite)
        chosen = replace(self._chosen, verb="add")
        rows = deltas_of_rows(meta, named, chosen, finite=self._finite)
        step = TrainerStep(arrays, 1.0, rows, of=ADD)
        return self._end_step("add", step, timeout)

    def assign(
        self, values: Mapping[str, Any], *, weight: float = 1.0, timeout: Any = None
    ) -> Version:
        """Replace parameters by the mean of what trainers assign, and end the step.

        Of each parameter the weighted mean of the trainers that name it in this round,
        formed in its compute dtype along the tree over the ranks. Optimizer state
        stays, and the version rises by one. A round has one kind, as for :meth:`add`.
        Only under BSP.

        Parameters
        ----------
        values : mapping
            Name to array of the parameter's shape; may be nested. Of floats: no mean
            of integers need be one. Not of tables.
        weight : float
            Weight of these values in the mean; 0 sits the round out.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits until the run ends.

        Returns
        -------
        Version
            The version that each shard is at.

        Raises
        ------
        ValueError
            Under SSP and ASP, and for a weight below 0.
        PushRejectedError, UnknownParameterError, ConsistencyError
            As in :meth:`add`.
        RunCancelledError, ShardLostError, TimeoutError
            As in :meth:`push`.

        Examples
        --------
        >>> def loop(trainer, part):
        ...     trainer.assign({"w": np.full(2, part)}, weight=part)
        ...     return trainer.pull()["w"].tolist()
        >>> store = daskps.create({"w": np.zeros(2)})
        >>> daskps.run(store, loop, [1.0, 3.0])
        [[2.5, 2.5], [2.5, 2.5]]
        """
        meta = self._live().meta
        chosen = replace(self._chosen, verb="assign")
        check_together(chosen)
        factor = number(weight, "weight", least=0.0)
        dense, named = intake.parted(meta.layout, values)
        check_rows(chosen, named)
        for name in intake.plain(dense):
            parameter = meta.layout.by_name.get(name)
            if parameter is not None and parameter.dtype not in FLOATS:
                raise PushRejectedError(
                    f"parameter {name[:60]!r} is {parameter.dtype}, and the mean of what "
                    f"trainers assign need not be; add differences, or assign it by the "
                    f"store's handle outside of the run"
                )
        how: Any = {"finite": self._finite, "model": True}
        arrays = intake.gradients(meta.layout, meta.optimizers, dense, **how)
        step = TrainerStep(arrays if factor else {}, factor, of=MODEL)
        return self._end_step("assign", step, timeout)

    def leave(self, values: Mapping[str, Any], *, weight: float = 1.0) -> None:
        """Leave values in the store once the loops of all trainers have returned.

        For statistics that trainers gather and no gradient changes, such as those of a
        batch normalization. The last call holds; the values are read when the loop
        returns. Where the run fails, the store gets none of them.

        Parameters
        ----------
        values : mapping
            Name to array of the parameter's shape; may be nested. Not of tables.
        weight : float
            Weight in the mean over trainers, in rank order, of parameters of floats. Of
            others the store gets those of the first trainer; of a trainer of weight 0
            nothing.

        Raises
        ------
        ValueError, TypeError
            For a weight that is none. For values that the store does not take the loop
            ends with a PushRejectedError or UnknownParameterError.

        Examples
        --------
        >>> def loop(trainer, part):
        ...     trainer.leave({"mean": part.mean()}, weight=len(part))
        >>> store = daskps.create({"mean": 0.0})
        >>> _ = daskps.run(store, loop, [np.array([1.0, 2.0, 3.0]), np.array([8.0])])
        >>> store.pull()
        {'mean': array(3.5)}
        """
        self._left = LeftValues(values, number(weight, "weight", least=0.0))

    def _end_step(self, verb: str, step: TrainerStep, timeout: Any) -> Version:
        """Deliver what is no gradient, with the tick."""
        session = self._session
        seconds = self._wait_background(timeout, f"an {verb}")
        if session.bsp and session.has_unticked:
            raise ConsistencyError(
                f"gradients were pushed at this clock without a tick, and {verb} is "
                f"another kind: a round has one; call tick() before it"
            )
        self._overtaken()
        version: Version = session.deliver(step, seconds)
        return version

    def allreduce(
        self,
        arrays: Mapping[str, Any] | Any,
        op: str = "sum",
        *,
        timeout: Any = None,
    ) -> Any:
        """Combine arrays over the trainers; all of them get the result.

        All trainers call it, as often as each other and in the same order. The arrays
        are any, not parameters of the store, and no trainer's clock changes. Elements
        are combined along one fixed binary tree over the ranks: the bits are the same
        on any number of shards and workers, in any order of arrival. The hosts of the
        store each reduce a part, so that no node gets everything: a trainer sends and
        receives each element once. A trainer that has finished is not waited for, and
        skipped in place.

        Where the run is resumable a trainer that was started again gets the same
        result of what the others have done already. It must call it as its predecessor
        has since its clock: let a resumable loop reduce before the push that ends the
        step, for what comes after that push is left out where it starts again, which
        under BSP is an error of all trainers. Results are kept until all have ticked.

        Parameters
        ----------
        arrays : array_like or mapping of str to array_like
            Of numbers; may be nested. Names, shapes and dtypes must be those of all
            trainers.
        op : {"sum", "mean", "max", "min"}
            "mean" divides the sum once, by the number of trainers that take part. Sums
            and means of float16 are formed in float32. Sums of integers wrap around as
            NumPy's do, and their mean is float64. NaN spreads.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits until the run ends.

        Returns
        -------
        ndarray or dict of str to ndarray
            As the arrays were given, in new memory.

        Raises
        ------
        ValueError
            In all trainers, where one brings other names, shapes, dtypes or another op
            than the first that came, or under BSP in a resumable run has another clock;
            and for an `op` that is none, or arrays that cannot be combined.
        LayoutError
            In all trainers, where a host has no room for it.
        ConsistencyError
            Where a trainer has finished after its own call ended with an error, and
            where all workers died that kept a result, which a trainer that was started
            again needs.
        ClockError
            If this trainer has finished.
        RunCancelledError, ShardLostError
            For what its name says.
        TimeoutError
            The next call of this trainer is the same all-reduce: parts of these
            arrays that have arrived count.

        Examples
        --------
        >>> def loop(trainer, part):
        ...     found = trainer.allreduce({"rows": part, "worst": part * 1.5}, "max")
        ...     return int(trainer.allreduce(1)), found["worst"].tolist()
        >>> store = daskps.create({"w": np.zeros(1)})
        >>> daskps.run(store, loop, [np.array([1, 4]), np.array([3, 2])])
        [(2, [4.5, 6.0]), (2, [4.5, 6.0])]
        """
        brought, flats = brought_by(arrays, op)
        session = self._live()
        seconds = self._wait_background(timeout, "an allreduce")
        found = session.allreduce(brought, flats, seconds)
        named: dict[str, Array] = {
            name: flat.reshape(shape)
            for (name, shape, _), flat in zip(brought.arrays, found, strict=True)
        }
        return named.get("", named)
