"""An update rule for weights of one dtype: what its loops take, wherever these run."""
# ruff: noqa: PLR0917  (table, ids, where their values are, values, log)

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from daskps.kernels.inputs import check_input, check_output
from daskps.kernels.row_log import TableRows, UndoLog, check_log, check_named
from daskps.typing import Array

if TYPE_CHECKING:
    from daskps.kernels.rows import OfRows

Arrays: TypeAlias = tuple[Array, ...]
Scalars: TypeAlias = tuple[float, ...]
#: An update of arrays that stay where they are, given a gradient and scalars.
Fixed: TypeAlias = Callable[[Array, Scalars], None]
#: An update of rows of a table that stays where it is, like its log: given ids, where
#: their gradients are, gradients, scalars, `base` and `begin` of the log, and `check`.
FixedRows: TypeAlias = Callable[
    [Array, Array | None, Array, Scalars, int, int, bool], bool
]
_LARGEST = {
    np.dtype(dtype): float(np.finfo(dtype).max) for dtype in (np.float32, np.float64)
}


#: The compute dtype by the dtype of weights that there are kernels for; then the same
#: for weights with a master.
_COMPUTED: Final = {
    np.dtype(of): np.dtype(wide)
    for of, wide in (("f2", "f4"), ("f4", "f4"), ("f8", "f8"))
}
_WIDER: Final = {
    np.dtype(of): np.dtype(wide) for of, wide in (("f2", "f4"), ("f4", "f8"))
}


class RuleForm(NamedTuple):
    """The arguments that the loops of a rule take."""

    #: Of weights and gradients, and of slots and arithmetic.
    dtype: np.dtype[Any]
    compute_dtype: np.dtype[Any]
    n_slots: int
    n_scalars: int
    #: Of each slot whether it has one number per row; None of a rule for arrays too.
    per_row: tuple[bool, ...] | None = None
    #: The slots of ranks, of which the loops take one; none where it is empty.
    ranks: range = range(0)


def form_of(
    n_slots: int,
    n_scalars: int,
    dtype: Any,
    of_rows: OfRows | None = None,
    *,
    master: bool = False,
    ranks: int = 0,
) -> RuleForm:
    """Return what the loops of a rule take.

    Parameters
    ----------
    n_slots, n_scalars, dtype, of_rows, master, ranks
        As in `build`.

    Returns
    -------
    RuleForm
        It.

    Raises
    ------
    ValueError
        If there is no kernel for `dtype`.
    """
    dtype = np.dtype(dtype)
    wide = _WIDER.get(dtype) if master else _COMPUTED.get(dtype)
    if wide is None:
        known = ", ".join(map(str, _WIDER if master else _COMPUTED))
        raise ValueError(f"no kernel for {dtype}: use one of {known}")
    per_row = None if of_rows is None else of_rows.per_row
    of_ranks = range(master, master + ranks)
    return RuleForm(dtype, wide, n_slots, n_scalars, per_row, of_ranks)


class RuleKernel:
    """The checks of arrays and scalars that the loops of a rule are given.

    Parameters
    ----------
    form : RuleForm
        What they take.
    """

    def __init__(self, form: RuleForm) -> None:
        self.dtype, self.compute_dtype, n_slots, self.n_scalars = form[:4]
        self.per_row, self._ranks = form.per_row, form.ranks
        self.n_slots = n_slots + max(0, len(self._ranks) - 1)
        self._is_wide = self.dtype != self.compute_dtype

    def check_scalars(self, scalars: Scalars) -> None:
        """Refuse scalars that a loop cannot take.

        Parameters
        ----------
        scalars : tuple of float
            What `Bound.scalars` is about to return, from the rule's `prepare`.

        Raises
        ------
        ValueError
            If there are more or fewer, or one does not fit into the dtype.
        """
        if len(scalars) != self.n_scalars:
            raise ValueError(
                f"the rule has {self.n_scalars} scalars, got {len(scalars)}: {scalars}"
            )
        largest = _LARGEST[self.compute_dtype]
        for scalar in scalars:
            if not -largest <= scalar <= largest:
                raise ValueError(
                    f"scalars must be finite in {self.compute_dtype}, got {scalars}. "
                    f"Check what `prepare` returns."
                )

    def _copy(self, out: Array, a: Array) -> None:
        """Copy slots that an update leaves as they are."""
        np.copyto(out, a)

    def _of_rank(
        self, slots: Arrays, outs: Arrays | None, scalars: Scalars
    ) -> tuple[Arrays, Arrays | None, Scalars]:
        """Return the slots of the rank that is named last, with those of all.

        Slots of other ranks are copied where they are to be written too.
        """
        ranks, rank = self._ranks, scalars[-1]
        if not 0 <= rank < len(ranks):
            raise ValueError(
                f"rank {rank:g} is none of the {len(ranks)} that have slots"
            )
        own = ranks[int(rank)]
        for at in ranks:
            if outs is not None and at != own:
                self._copy(outs[at], slots[at])
        kept, to = (
            None if of is None else (*of[: ranks.start], of[own], *of[ranks.stop :])
            for of in (slots, outs)
        )
        return kept or (), to, scalars[:-1]

    def _check_gradient(self, g: Array, shape: tuple[int, ...]) -> None:
        wide = g.dtype == self.compute_dtype
        check_input(g, self.compute_dtype if wide else self.dtype, shape)

    def _check_arrays(
        self, w_in: Array, w_out: Array, slots: Arrays, slots_out: Arrays | None
    ) -> None:
        """Refuse weights and slots that do not fit, and arrays for a rule of rows."""
        shape = (len(w_out),)
        if self.per_row is not None:
            raise ValueError("the rule needs rows: it updates tables, and no arrays")
        for some in (slots, slots if slots_out is None else slots_out):
            if len(some) != self.n_slots:
                raise ValueError(f"the rule has {self.n_slots} slots, got {len(some)}")
        check_output(w_out, self.dtype, shape, "weights")
        for slot in slots if slots_out is None else slots_out:
            check_output(slot, self.compute_dtype, shape, "a slot")
        if w_in is not w_out:
            check_input(w_in, self.dtype, shape)
        for slot in () if slots_out is None else slots:
            check_input(slot, self.compute_dtype, shape)

    def _check_rows(
        self, table: TableRows, ids: Array, at: Array | None, g: Array, log: UndoLog
    ) -> Array:
        """Refuse rows that do not fit; return the positions of their gradients."""
        if self._ranks:
            raise ValueError("a rule with slots of ranks updates arrays, and no tables")
        wide, (n, dim) = self.compute_dtype, table.w.shape
        if table.w.dtype != self.dtype or g.dtype not in (self.dtype, wide):
            raise ValueError(
                f"expected rows of {self.dtype} and gradients of {wide}, got "
                f"{table.w.dtype} and {g.dtype}"
            )
        if [a.dtype for a in table.slots] != [wide] * self.n_slots:
            raise ValueError(
                f"the rule has {self.n_slots} slots of {wide}, got "
                f"{[str(a.dtype) for a in table.slots]}"
            )
        per_row = self.per_row or (False,) * self.n_slots
        for slot, of_row in zip(table.slots, per_row, strict=True):
            if slot.shape != (shape := (n, 1 if of_row else dim)):
                raise ValueError(f"expected a slot of {shape}, got {slot.shape}")
        places = check_named(table, ids, at, g)
        check_log(table, log, len(ids))
        return places
