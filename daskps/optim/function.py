"""A user's function of whole arrays in place of an update rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daskps.errors import PushRejectedError
from daskps.optim.base import Rule
from daskps.optim.checks import store

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, repr=False)
class Function(Rule):
    """Have a function of your own make the new weights of a parameter, as a whole.

    It runs where the parameter is, once per push, in a BSP run once per round with the
    reduced gradient. Nothing is compiled, and nothing is kept between two calls.

    Parameters
    ----------
    f : callable
        ``f(name, weights, gradient, step)``: name of the parameter, copies of its
        weights and of the gradient, both of the parameter's shape, and the number of
        this update, from 1. Gradients of float16 come in float32. Returns the new
        weights, of the same shape, finite, of a dtype that can be cast "same_kind".

    Raises
    ------
    TypeError
        If `f` cannot be called.
    LayoutError
        From `create`, for a parameter that is cut over several shards, and for tables:
        keep it whole, with `placement` or on one shard.

    Notes
    -----
    Whatever it raises, `SystemExit` too, ends the push or the run as an error of a rule
    does, and changes nothing on its shard. A BSP run takes back what other shards have of
    that round; elsewhere they may have taken their parts of the push. Every process that
    acts for the shard has its own copy of the function: what it notes outside of its result
    is not found again.

    Examples
    --------
    >>> def twice(name, weights, gradient, step):
    ...     return weights + 2 * gradient
    >>> store = daskps.create(
    ...     {"w": np.full(3, 4.0)}, optimizer=daskps.optim.Function(twice), shards=1
    ... )
    >>> _ = store.push({"w": np.ones(3)})
    >>> store["w"].pull()
    array([6., 6., 6.])
    """

    f: Callable[[str, Any, Any, int], Any]

    def __post_init__(self) -> None:
        given: object = self.f
        if not callable(given) or isinstance(given, type):
            raise TypeError(
                f"Function takes a function (name, weights, gradient, step) -> weights, "
                f"not {given!r:.80}"
            )
        # It has no learning rate: asking for one is refused below.
        store(self, lr=0.0)

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        """Return no scalars."""
        return ()

    @property
    def update(self) -> Callable[..., Any]:
        """A function to compile in its place, which is never called."""
        return _unchanged

    def scalars(
        self,
        step: int,
        lr: float | None = None,
        epoch: int | None = None,
        factor: float = 1.0,
    ) -> tuple[float, ...]:
        """Return no scalars.

        Parameters
        ----------
        step : int
            Number of this update.
        lr : float, optional
            Refused.
        epoch : int, optional
            The epoch under way.
        factor : float, default 1.0
            Of learning rates, which functions do not have.

        Returns
        -------
        tuple
            Empty.

        Raises
        ------
        PushRejectedError
            If a learning rate is given.

        Examples
        --------
        >>> daskps.optim.Function(print).scalars(1)
        ()
        """
        if lr is not None:
            raise PushRejectedError(
                f"{self!r} has no learning rate that lr={lr!r} could take the place of; "
                f"nothing was applied, leave lr= out"
            )
        return ()

    def __repr__(self) -> str:
        name = getattr(self.f, "__qualname__", type(self.f).__name__)
        return f"Function({name})"


def _unchanged(w: Any, g: Any) -> Any:
    return w
