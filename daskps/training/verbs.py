"""Verbs of a trainer beside pull and push."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.training.gathering import brought_by, check_op
from daskps.training.overlap.ahead import Ahead

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.typing import Array


class Verbs(Ahead):
    """What a trainer does with the others beside pushing gradients."""

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
        has since its clock; results are kept until all trainers have ticked.

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
            than the first that came; and for an `op` that is none, or arrays that
            cannot be combined.
        LayoutError
            In all trainers, where a host has no room for it.
        ConsistencyError
            Where a trainer has finished after its own call ended with an error.
        ClockError
            If this trainer has finished.
        RunCancelledError, ShardLostError
            For what its name says.
        TimeoutError
            The next call of this trainer is the same all-reduce: what has arrived of
            these arrays counts.

        Examples
        --------
        >>> def loop(trainer, part):
        ...     found = trainer.allreduce({"rows": part, "worst": part * 1.5}, "max")
        ...     return int(trainer.allreduce(1)), found["worst"].tolist()
        >>> store = daskps.create({"w": np.zeros(1)})
        >>> daskps.run(store, loop, [np.array([1, 4]), np.array([3, 2])])
        [(2, [4.5, 6.0]), (2, [4.5, 6.0])]
        """
        check_op(op)
        brought, flats = brought_by(arrays, op)
        session = self._live()
        seconds = self._settled(timeout, "an allreduce")
        found = session.allreduce(brought, flats, seconds)
        named: dict[str, Array] = {
            name: flat.reshape(shape)
            for (name, shape, _), flat in zip(brought.arrays, found, strict=True)
        }
        return named.get("", named)
