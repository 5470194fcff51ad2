"""Updates that a user's function makes of whole arrays, where a rule has none of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.errors import PushRejectedError
from daskps.optim import BoundFunction
from daskps.shards.arrays.operations import PieceUpdate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from daskps.layout.parameters import Piece
    from daskps.optim import Bound
    from daskps.shards.arrays.payload import Payload
    from daskps.typing import Array


def are_called(bindings: Iterable[Bound | None]) -> bool:
    """Return whether one of some rules is a function of whole arrays."""
    return any(isinstance(rule, BoundFunction) for rule in bindings)


def update_of(
    binding: BoundFunction,
    piece: Piece,
    given: PieceUpdate,
    *,
    weights: Array,
    step: int,
    payload: Payload,
) -> PieceUpdate:
    """Return what replaces the weights of a piece: what the function makes of a gradient.

    It is asked here, where nothing was changed yet: whatever it raises is a refusal. The
    update has the rule all the same, as one that counts.

    Parameters
    ----------
    binding : BoundFunction
        The function.
    piece : Piece
        The piece, all of its parameter.
    given : PieceUpdate
        The gradient, maybe not formed yet.
    weights : ndarray, shape (n,)
        The weights that this update follows.
    step : int
        Number of this update, from 1.
    payload : Payload
        The functions of the memory of these arrays.

    Raises
    ------
    PushRejectedError
        For a part of a parameter, and a gradient with NaN or infinity.
    """
    parameter = piece.parameter
    if piece.size < parameter.size or len(given.data) < piece.size:
        raise PushRejectedError(
            f"{binding.rule!r} takes all of {parameter.name[:60]!r}, and this is a part "
            f"of it; nothing was applied"
        )
    gradient = given.formed(payload)[0 : piece.size]
    if not binding.is_finite(gradient):
        payload.wait()  # a sum that was formed has been looked at too
        raise PushRejectedError(
            f"the gradient of {parameter.name[:60]!r} has NaN or Inf; nothing was applied"
        )
    arrays = weights, gradient
    try:
        made = binding.apply(parameter.name, parameter.shape, arrays, step)
    except Exception as error:
        error.add_note(
            f"raised by {binding.rule!r} for {parameter.name[:60]!r}; its shard has taken "
            f"nothing of the push. Outside of BSP runs shards of other parameters may have"
        )
        raise
    return PieceUpdate(made, 0, binding, replace=True)
