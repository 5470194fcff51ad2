"""What the user's functions must take and return, and what they may have been given."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.utils import funcname

if TYPE_CHECKING:
    from collections.abc import Mapping

#: How each of them is called.
CALLS = {
    "gradient": "gradient(params, X_batch, y_batch)",
    "loop": "loop(trainer, part)",
    "validate": "validate(params)",
    "stop": "stop(history)",
}


def check_function(what: str, function: Any, call: str = "") -> None:
    """Refuse what cannot be called as it will be, before anything is started.

    Parameters
    ----------
    what : str
        One of `CALLS`, or what it is called in `call`.
    function : object
        What was given for it.
    call : str
        How it is called, where `CALLS` does not say it.

    Raises
    ------
    TypeError
        If it is no function, or does not take as many arguments.
    """
    if not callable(function):
        raise TypeError(f"{what} must be a function, found {function!r:.60}")
    try:
        # What a wrapper takes, not what it wraps.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some compiled functions do not tell
        return
    call = call or CALLS[what]
    try:
        signature.bind(*[None] * (call.count(",") + 1))
    except TypeError as error:
        without = "; without labels y_batch is None" if what == "gradient" else ""
        raise TypeError(
            f"{what} is called as {call}, but {funcname(function)}{signature} "
            f"does not take that ({error}){without}"
        ) from None


def metrics_of(found: Any) -> dict[str, float]:
    """Return what `validate` has returned as numbers by name.

    Raises
    ------
    TypeError
        Where it is something else.
    """
    wanted = "return a dict of names to numbers, such as {'accuracy': 0.9}"
    try:
        pairs = dict(found)
    except (TypeError, ValueError):
        raise TypeError(
            f"validate returned {found!r:.60} ({type(found).__name__}); {wanted}"
        ) from None
    metrics = {}
    for name, value in pairs.items():
        try:
            metrics[str(name)] = float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"validate returned {value!r:.60} for {name!r:.60}; {wanted}"
            ) from None
    return metrics


def note_arguments(error: Exception, params: Mapping[str, Any], y: Any) -> None:
    """Note at an error of the gradient what it may have taken its arguments for."""
    if (name := next(iter(params), "")).partition("/")[0].isdecimal():
        error.add_note(
            f"the store was made of a list, and params is a dict of the places in it, such "
            f"as params[{name!r}]; daskps.unflatten(params) makes a list of it again"
        )
    if y is None and "None" in str(error):
        error.add_note(
            "train was called without y, so gradient(params, X_batch, y_batch) got None "
            "for y_batch; pass train(store, gradient, X, y)"
        )


def advice(X: Any, y: Any) -> str:
    """Return what may mend a gradient that is not finite, by a look at its batch."""
    for name, array in (("X", X), ("y", y)):
        if where := _not_finite(array):
            return (
                f"so has {name} of its batch, {where}: drop or fill such rows before "
                f"training, or leave them out in the gradient"
            )
    return (
        "X and y of its batch are finite: lower the learning rate, clip the gradient, "
        "or set the configuration value daskps.finite to 'allow'"
    )


def _not_finite(array: Any) -> str:
    """Return where a batch has NaN or Inf; "" where it has none, or no numbers."""
    if hasattr(array, "toarray"):  # SciPy's sparse matrices
        array = array.toarray()
    try:
        found = ~np.isfinite(np.asarray(array))
    except (TypeError, ValueError, RuntimeError):
        return ""
    if not found.any() or not found.ndim:
        return ""
    rows = found.reshape(len(found), -1).any(axis=1)
    where = f"in {rows.sum()} of {len(rows)} rows"
    if found.ndim == 2:
        where += f", first in column {int(found.any(axis=0).argmax())}"
    return where
