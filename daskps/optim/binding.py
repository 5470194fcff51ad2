"""A rule bound to a dtype: what a shard calls."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from daskps.backend import returned, stacked
from daskps.errors import PushRejectedError
from daskps.optim.factors import of_word
from daskps.optim.function import Function
from daskps.optim.master import WithMaster
from daskps.usercode import user_code

if TYPE_CHECKING:
    from daskps.kernels import Kernel
    from daskps.kernels.device import Launcher
    from daskps.optim.base import Rule
    from daskps.typing import Array

#: The number of an update, a learning rate given for once, the epoch, and the word of
#: the store's factor of learning rates.
Asked: TypeAlias = tuple[int, float | None, int | None, int]


class Bound:
    """Scalars once per update, and the compiled loops: those of the kernel.

    Parameters
    ----------
    rule : Rule
        The rule.
    kernel : Kernel
        Its loops for one dtype.
    """

    def __init__(self, rule: Rule, kernel: Kernel) -> None:
        self.rule, self.kernel = rule, kernel
        # The methods of :class:`~daskps.kernels.dense.Kernel`, by the same names.
        self.inplace, self.publish = kernel.inplace, kernel.publish
        self.fixed, self.fixed_rows = kernel.fixed, kernel.fixed_rows
        self.rows, self.is_finite = kernel.rows, kernel.is_finite
        #: The last request for scalars, and the answer: the parameters of a rule ask
        #: for the same one after the other.
        self._latest: tuple[Asked, tuple[float, ...]] | None = None
        self.goes_by_epoch = rule.goes_by_epoch
        #: How many trainers have slots of their own; 0 where all are alike.
        self.ranks = len(rule.rank_slots)

    def scalars(
        self,
        step: int,
        lr: float | None = None,
        epoch: int | None = None,
        factor: int = 0,
    ) -> tuple[float, ...]:
        """Return the scalars of update number `step`, counted from 1, in an epoch.

        `factor` is the word of the factor of all learning rates, 0 where it is 1.
        """
        latest, asked = self._latest, (step, lr, epoch, factor)
        if latest is not None and latest[0] == asked:
            return latest[1]
        if factor:
            scalars = self.rule.scalars(step, lr, epoch, of_word(factor))
        else:
            scalars = self.rule.scalars(step, lr, epoch)
        if latest is not None and _same(latest[1], scalars):
            # Checked, and cast by the caller that has kept them.
            scalars = latest[1]
        else:
            self.kernel.check_scalars(scalars)
        self._latest = asked, scalars
        return scalars

    def of_rank(self, scalars: tuple[float, ...], rank: int) -> tuple[float, ...]:
        """Return what a rule with slots of ranks is given for one; -1 outside of runs."""
        if rank < 0:
            raise PushRejectedError(
                f"{self.rule!r} keeps state for each trainer of a run, and a push from "
                f"outside has none; nothing was applied, push by a Trainer under "
                f"sync='asp' or 'ssp', or use add or assign"
            )
        return *scalars, float(rank)


class BoundFunction(Bound):
    """A function of whole arrays, for parameters of one dtype."""

    def __init__(self, rule: Function, kernel: Kernel) -> None:
        super().__init__(rule, kernel)
        self._f = user_code(f"the function of {rule!r}")(rule.f)

    def apply(
        self, name: str, shape: tuple[int, ...], arrays: tuple[Array, Array], step: int
    ) -> Array:
        """Return new weights.

        Parameters
        ----------
        name : str
            Of the parameter.
        shape : tuple of int
            Its shape.
        arrays : (ndarray, ndarray), shape (n,)
            Weights and gradient; the function has copies of them.
        step : int
            Number of this update, from 1.

        Returns
        -------
        ndarray, shape (n,)
            Memory of its own, of the dtype of the weights.

        Raises
        ------
        TypeError, ValueError
            For a result of another kind, shape, or that is not finite, naming the
            parameter.
        """
        w, g = (stacked([a])[0].reshape(shape) for a in arrays)
        result, like = self._f(name, w, g, step), arrays[0].reshape(shape)
        about = repr(self.rule), f" for {name[:60]!r}"
        return returned(result, like, *about).reshape(-1)


def _same(some: tuple[float, ...], others: tuple[float, ...]) -> bool:
    """Return whether scalars have the same bits: 0.0 and -0.0 are equal."""
    return some == others and (0.0 not in some or _bits(some) == _bits(others))


def _bits(scalars: tuple[float, ...]) -> bytes:
    return array("d", scalars).tobytes()


def bind(
    rule: Rule,
    dtype: Any,
    *,
    cache_dir: str | None = None,
    launcher: Launcher | None = None,
) -> Bound:
    """Return `rule` with its kernels for parameters of `dtype`.

    Nothing is compiled before the first use, or `Bound.kernel.warm()`.

    Parameters
    ----------
    rule : Rule
        The rule.
    dtype : dtype
        float16, float32 or float64.
    cache_dir : str, optional
        Where compiled kernels are kept between processes.
    launcher : Launcher, optional
        The device that the arrays are on, where its loops are launched.

    Returns
    -------
    Bound
        The rule, ready to apply.

    Raises
    ------
    TypeError
        If the rule's `update` cannot be compiled, or takes another number of
        arguments than its slots and scalars need; ValueError for another dtype.
    """
    # Here, so that `import daskps.optim` on a client stays free of kernels.
    from daskps import kernels

    n_scalars = len(rule.scalars(1, epoch=0))
    with user_code(f"the optimizer {type(rule).__name__}"):
        per_row = tuple(name in rule.row_slots for name in rule.slots)
        # Of the slots of ranks there is one at a time.
        ranks = len(rule.rank_slots)
        n_slots = len(per_row) - max(ranks - 1, 0)
        mean, sizes = rule.row_mean, (n_slots, n_scalars)
        if mean is None and any(per_row):
            raise TypeError(f"{rule!r} has row_slots, but no row_mean")
        of_rows = None if mean is None else kernels.OfRows(mean, per_row)
        given = rule.update, *sizes, dtype, cache_dir, of_rows
        before, master = tuple(rule.before), isinstance(rule, WithMaster)
        how: dict[str, Any] = {"before": before, "master": master, "ranks": ranks}
        kernel: Kernel
        if launcher is None:
            kernel = kernels.build(*given, **how)
        else:
            from daskps.kernels import device

            of = rule.update, *sizes, dtype, of_rows
            made = device.build(*of, launcher=launcher, what=repr(rule), **how)
            kernel = cast("Kernel", made)  # it has the methods that are called
    if isinstance(rule, Function):
        return BoundFunction(rule, kernel)
    return Bound(rule, kernel)
