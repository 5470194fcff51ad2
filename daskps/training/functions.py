"""Arguments of a run: what single ones say, and what functions of the user's must take."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.utils import funcname

from daskps import codecs
from daskps.consistency import ASP, SSP, Policy, encoded, measures_delay
from daskps.reduction import check_reduce
from daskps.store.arguments import whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def described(chosen: Policy) -> str:
    """Return the name of a policy, with what it is bound to."""
    if isinstance(chosen, SSP):
        return f"ssp({chosen.staleness})"
    if measures_delay(chosen):
        _, bound, damping = encoded(chosen)
        return f"asp({'none' if bound < 0 else bound}, {damping:g})"
    return chosen.name


def rows_ahead(chosen: Policy) -> float:
    """Return how far ahead of the slowest a trainer no longer reads early; 0 for never.

    Not where a gradient says which parameters it was computed from.
    """
    if isinstance(chosen, SSP):
        return chosen.staleness
    return math.inf if isinstance(chosen, ASP) and not measures_delay(chosen) else 0


def reduced_by(reduce: Any) -> str:
    """Return how contributions are reduced, in a word; refuse what is no way to.

    Raises
    ------
    ValueError, TypeError
        As :func:`daskps.reduction.check_reduce` says.
    """
    check_reduce(reduce)
    return "function" if callable(reduce) else reduce


def pulled_by(value: Any) -> codecs.Codec | None:
    """Return how weights travel to trainers, as `pull_codec` says.

    Raises
    ------
    ValueError, TypeError
        For what is no codec.
    """
    try:
        return codecs.choose(value)
    except (ValueError, TypeError) as error:
        raise type(error)(f"pull_{error}") from None


def check_choice(what: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse an argument that is none of its choices."""
    if value not in choices:
        raise ValueError(f"{what}={value!r} is not known; choose one of {choices}")


def batches_between(value: Any) -> int:
    """Return how many batches `sync_every` says; 0 for all of an epoch."""
    if value == "batch":
        return 1
    if value == "epoch":
        return 0
    if isinstance(value, str):
        raise ValueError(
            f"sync_every={value!r} is not known; choose 'batch', 'epoch' or a number "
            f"of batches"
        )
    return whole(value, "sync_every", least=1)


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
        The argument to check.
    call : str
        How it is called, where `CALLS` does not say it.

    Raises
    ------
    TypeError
        If it is no function, or does not take as many arguments.
    """
    if not callable(function):
        raise TypeError(f"{what} must be a function, found {function!r:.60}")
    call = call or CALLS[what]
    if (signature := signature_of(function)) is None:
        return
    if error := cannot_take(signature, call.count(",") + 1):
        without = "; without labels y_batch is None" if what == "gradient" else ""
        raise TypeError(
            f"{what} is called as {call}, but {funcname(function)}{signature} "
            f"does not take that ({error}){without}"
        )


def signature_of(function: Any) -> inspect.Signature | None:
    """Return what a function takes; None for compiled ones that do not tell."""
    try:
        # The signature of a wrapper itself, not of the function that it wraps.
        return inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None


def cannot_take(signature: inspect.Signature, n: int) -> TypeError | None:
    """Return why a function cannot be called with `n` arguments, if it cannot."""
    try:
        signature.bind(*[None] * n)
    except TypeError as error:
        return error
    return None


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
