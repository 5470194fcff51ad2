"""What a caller hands over, made ready for the wire, or refused before it leaves.

Everything that can be wrong with an array is found here, before any shard has seen
anything, so that a refused call changes nothing anywhere.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.combination import Combination, check_together
from daskps.errors import LayoutError, NoOptimizerError, PushRejectedError
from daskps.kernels import finite as finite_of
from daskps.layout.arrays import (
    DTYPES,
    FLOATS,
    Layout,
    compute_dtype,
)
from daskps.layout.trees import (
    NO_RESULT,
    flatten,
    holds_arrays,
    is_future,
    is_tree,
)
from daskps.store.arguments import as_float32
from daskps.store.row_grad import RowGrad

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from daskps.layout.parameters import Parameter
    from daskps.typing import Array

#: Each dtype that a store can hold, as arrays have it.
_NATIVE = {name: np.dtype(name) for name in DTYPES}
_HELD = frozenset(_NATIVE.values())
#: What gradients of each are computed in.
_COMPUTED = {name: compute_dtype(name) for name in FLOATS}


def as_array(value: Any, what: str, error: type[ValueError]) -> Array:
    """Return `value` as an array of a native dtype that a store can hold.

    Raises
    ------
    LayoutError or PushRejectedError
        As `error` says: for masked arrays, dtypes no store holds, and what NumPy
        cannot make an array of.
    """
    if type(value) is np.ndarray and value.dtype in _HELD:
        return value
    if why := _why_not(value):
        raise error(f"{what} {why}")
    try:
        array = np.asarray(value)
    except Exception as cause:
        raise error(f"{what} cannot be made a NumPy array: {cause}") from cause
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.name not in DTYPES:
        raise error(
            f"{what} has dtype {array.dtype}, which a store cannot hold; convert it "
            f"to one of {', '.join(DTYPES)}"
        )
    return array


def _why_not(value: Any) -> str:
    """Return why something is not taken for an array, in words that end with a way."""
    kind, why = type(value).__name__, ""
    if isinstance(value, np.ma.MaskedArray):
        why = (
            "is a masked array and a store has no mask; fill it first, for example with "
            ".filled(0)"
        )
    elif hasattr(value, "__dask_graph__"):
        why = "is a dask collection; call .compute() on it first"
    elif is_future(value):
        why = NO_RESULT
    elif isinstance(value, (list, tuple)) and any(map(is_future, value)):
        why = f"is a {kind}, of which one element {NO_RESULT}"
    elif hasattr(value, "toarray"):
        why = f"is a {kind}, and stores hold dense arrays; pass .toarray()"
    elif getattr(value, "requires_grad", False):
        why = "is a tensor that requires grad; pass .detach().numpy()"
    elif isinstance(value, (list, tuple)) and holds_arrays(value):
        why = (
            f"is a {kind} of arrays, which are not stacked to one; give each a name of its "
            f"own, or pass numpy.stack(...) if they are one array"
        )
    elif "bfloat16" in str(getattr(value, "dtype", "")):
        why = f"is a {kind} of bfloat16, which a store cannot hold; {as_float32(value)}"
    return why


def gradients(
    layout: Layout,
    optimizers: Mapping[int, str],
    given: Any,
    *,
    finite: bool,
    model: bool = False,
) -> dict[int, Array]:
    """Check a mapping of gradients.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    optimizers : mapping of int to str
        The parameters that have an optimizer.
    given : mapping
        Nested mapping of name to array of the parameter's shape.
    finite : bool
        Whether NaN and Inf are refused.
    model : bool
        Whether the arrays are weights to average, which needs no optimizer.

    Returns
    -------
    dict of int to ndarray, shape (n,)
        By parameter index, C order, contiguous, in the parameter's compute dtype.

    Raises
    ------
    UnknownParameterError, NoOptimizerError, PushRejectedError
        For what its name says. Nothing has been changed anywhere.
    """
    found, by_name = {}, layout.by_name
    for name, value in plain(given).items():
        parameter = by_name.get(name)
        if parameter is None or type(value) is RowGrad:
            raise _not_taken(layout, name)
        dtype = _COMPUTED.get(parameter.dtype)
        if dtype is None or (not model and parameter.index not in optimizers):
            raise _takes_none(parameter)
        found[parameter.index] = _ready(
            value, parameter, dtype, "gradient", finite=finite
        )
    return found


def _takes_none(p: Parameter) -> PushRejectedError | NoOptimizerError:
    """Return why a parameter takes no gradient."""
    if p.dtype not in _COMPUTED:
        return PushRejectedError(
            f"parameter {p.name!r} is {p.dtype} and takes no gradient; use add or assign"
        )
    return NoOptimizerError(
        f"a gradient was pushed for {p.name!r}, but the store was created without an "
        f"optimizer for it; pass create(..., optimizer=...), or use add for a plain +="
    )


def check_gradient(p: Parameter, optimizers: Mapping[int, str]) -> None:
    """Refuse gradients of a parameter that takes none, as :func:`gradients` does."""
    if p.dtype not in _COMPUTED or p.index not in optimizers:
        raise _takes_none(p)


def gradient_of(p: Parameter, value: Any, *, finite: bool) -> Array:
    """Return one gradient checked and flat, as :func:`gradients` does."""
    return _ready(value, p, _COMPUTED[p.dtype], "gradient", finite=finite)


def value_of(p: Parameter, value: Any, what: str, *, finite: bool) -> Array:
    """Return one delta or value checked and flat, as :func:`values` does."""
    return _ready(value, p, p.dtype, what, finite=finite)


def values(layout: Layout, given: Any, what: str, *, finite: bool) -> dict[int, Array]:
    """Check a mapping of deltas or new values, kept in the parameters' dtypes.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    given : mapping
        Nested mapping of name to array of the parameter's shape.
    what : str
        "delta" or "value", for messages.
    finite : bool
        Whether NaN and Inf are refused.

    Returns
    -------
    dict of int to ndarray, shape (n,)
        By parameter index, C order, contiguous.

    Raises
    ------
    UnknownParameterError, PushRejectedError
        For what its name says. Nothing has been changed anywhere.
    """
    found, by_name = {}, layout.by_name
    for name, value in plain(given).items():
        p = by_name.get(name)
        if p is None or type(value) is RowGrad:
            raise _not_taken(layout, name)
        found[p.index] = _ready(value, p, p.dtype, what, finite=finite)
    return found


def _not_taken(layout: Layout, name: str) -> ValueError:
    """Return why rows are refused where arrays alone are taken, or raise for a name.

    Handles and trainers push rows apart from arrays: what comes here is of an aggregate.
    """
    if name in layout.table_by_name:
        check_together(Combination("aggregate", table=name))
    # Says which names there are, where this is none.
    shape = layout[name].shape
    return PushRejectedError(
        f"rows were given for {name[:60]!r}, which is an array of shape {shape}; give it "
        f"an array of that shape"
    )


def scaled(
    layout: Layout, arrays: Mapping[int, Array], weight: float, *, finite: bool
) -> dict[int, Array]:
    """Multiply checked gradients by a weight, refusing what overflows.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    arrays : mapping of int to ndarray, shape (n,)
        Gradients by parameter index; they stay as they are.
    weight : float
        The factor.
    finite : bool
        Whether NaN and Inf are refused.

    Returns
    -------
    dict of int to ndarray, shape (n,)
        New arrays of the same dtypes.

    Raises
    ------
    PushRejectedError
        If a product is not finite. Nothing has been changed anywhere.
    """
    return {
        index: times(layout.parameters[index], array, weight, finite=finite)
        for index, array in arrays.items()
    }


def times(p: Parameter, array: Array, weight: float, *, finite: bool) -> Array:
    """Return one gradient times a weight, as :func:`scaled` does."""
    with np.errstate(over="ignore", invalid="ignore"):
        found: Array = np.multiply(array, weight, dtype=array.dtype)
    if finite and not is_finite(found):
        raise PushRejectedError(
            f"the gradient of {p.name[:60]!r} times weight={weight:g} is not finite "
            f"as {array.dtype}; use a smaller weight"
        )
    return found


def check_sums(made: Mapping[str, Array]) -> None:
    """Refuse sums of finite arrays that are not finite.

    Raises
    ------
    PushRejectedError
        Naming the first of them.
    """
    for name, array in made.items():
        if not is_finite(array):
            raise PushRejectedError(
                f"the sum of the contributions to {name[:60]!r} overflows {array.dtype}; "
                f"scale them down, or set the configuration value daskps.finite to 'allow'"
            )


def plain(given: Any) -> dict[str, Any]:
    """Return a flat mapping of names to what was given for them."""
    # A dict first: an abstract class takes ten times as long to say yes.
    if not isinstance(given, dict) and not is_tree(given):
        raise TypeError(
            f"expected a mapping of parameter names to arrays, or a list or tuple of "
            f"arrays, found {type(given).__name__}; pass {{'w': array}}"
        )
    return flatten(given)


def _ready(value: Any, p: Parameter, dtype: str, what: str, *, finite: bool) -> Array:
    if (
        type(value) is np.ndarray
        and value.shape == p.shape
        and value.dtype == _NATIVE[dtype]
        and value.flags.c_contiguous
    ):
        # As in nearly every step of a loop: nothing to look into but the numbers.
        flat = value.reshape(-1)
    else:
        flat = _made_ready(value, p, dtype, what)
    if finite and dtype in FLOATS and not finite_of(flat, cache_dir=_cache()):
        raise _not_finite(flat, p, what)
    return flat


def look(
    layout: Layout,
    arrays: Mapping[int, Array],
    advice: Callable[[], str] = lambda: ADVICE,
) -> None:
    """Look for NaN and Inf in gradients that were checked with ``finite=False``.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    arrays : mapping of int to ndarray, shape (n,)
        Gradients by parameter index.
    advice : callable
        Returns what may mend it, for whoever knows more.

    Raises
    ------
    PushRejectedError
        Where there are any. Nothing has been changed anywhere.
    """
    for index, array in arrays.items():
        if not is_finite(array):
            raise _not_finite(array, layout.parameters[index], "gradient", advice)


ADVICE = (
    "look for them in the data it comes from, lower the learning rate, clip it, or set "
    "the configuration value daskps.finite to 'allow'"
)


def _not_finite(
    flat: Array, p: Parameter, what: str, advice: Callable[[], str] = lambda: ADVICE
) -> PushRejectedError:
    return PushRejectedError(
        f"the {what} of {p.name[:60]!r} has NaN or Inf (as {flat.dtype}); {advice()}"
    )


def _made_ready(value: Any, p: Parameter, dtype: str, what: str) -> Array:
    array = as_array(value, f"the {what} of {p.name[:60]!r}", PushRejectedError)
    if array.shape != p.shape:
        raise PushRejectedError(
            f"the {what} of {p.name[:60]!r} has shape {array.shape}, the parameter "
            f"{p.shape}; shapes must be equal, nothing is broadcast"
        )
    if array.dtype != dtype:
        name = f"the {what} of {p.name[:60]!r}"
        array = cast(array, dtype, name, of=f"the parameter {p.dtype}", given=value)
    return np.ascontiguousarray(array).reshape(-1)


def cast(array: Array, dtype: str, what: str, *, of: str, given: Any) -> Array:
    """Return an array as another dtype, where that loses nothing but digits.

    Parameters
    ----------
    array : ndarray
        The values.
    dtype : str
        The dtype.
    what : str
        What they are, for messages.
    of : str
        What they go to, with its dtype.
    given : object
        What the caller has given for them.

    Raises
    ------
    PushRejectedError
        If that cast is not "same_kind".
    """
    if not (
        np.can_cast(array.dtype, dtype, "same_kind")
        or _python_ints(given, array, dtype)
    ):
        wanted = of.rsplit(" ", 1)[-1]
        raise PushRejectedError(
            f"{what} has dtype {array.dtype} and {of}; that cast is not 'same_kind', "
            f"convert it yourself with .astype({wanted!r}) if you mean it"
        )
    with np.errstate(over="ignore"):
        found = array.astype(dtype)
    if dtype not in FLOATS and not np.array_equal(found, array):
        raise PushRejectedError(f"{what} has values that {dtype} cannot hold")
    return found


def _python_ints(value: Any, array: Array, dtype: str) -> bool:
    """Whether these are Python ints for an integer: NumPy looks at their values too."""
    plain = not hasattr(value, "dtype") and array.dtype.kind in "iu"
    return plain and np.dtype(dtype).kind in "iu"


def is_finite(array: Array) -> bool:
    """Return whether no element is NaN or Inf."""
    return finite_of(array, cache_dir=_cache())


@functools.cache
def _cache() -> str:
    # Without it every process compiles the loop anew, in its first push of a large
    # array. Once: no push reads the configuration for it.
    return str(config.load().cache)


def spec_of(value: Any, name: str) -> Array:
    """Return an initial value as an array a store can hold, or raise LayoutError."""
    array = as_array(value, f"parameter {name[:60]!r}", LayoutError)
    if array.dtype.name in FLOATS and not is_finite(array):
        raise LayoutError(
            f"the initial value of parameter {name[:60]!r} has NaN or Inf; start "
            f"from finite values"
        )
    return array
