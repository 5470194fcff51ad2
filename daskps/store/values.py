"""One value of a caller's, made ready for the wire, or refused before it leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import backend, config
from daskps.errors import LayoutError, NoOptimizerError, PushRejectedError
from daskps.kernels import finite as finite_of
from daskps.layout.arrays import DTYPES, FLOATS, compute_dtype
from daskps.layout.parameters import Parameter
from daskps.layout.trees import NO_RESULT, holds_arrays, is_future
from daskps.store.arguments import as_float32

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.layout.tables import Table
    from daskps.typing import Array

#: Each dtype that a store can hold, as arrays have it.
_NATIVE = {name: np.dtype(name) for name in DTYPES}
_HELD = frozenset(_NATIVE.values())
#: The dtype in which gradients of each are computed.
COMPUTED = {name: compute_dtype(name) for name in FLOATS}
ADVICE = (
    "look for them in the data it comes from, lower the learning rate, clip it, or set "
    "the configuration value daskps.finite to 'allow'"
)


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
        there = backend.on_host(value)
        array = np.asarray(value) if there is None else there
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


def _named(of: Parameter | Table, what: str) -> str:
    """Return what errors call a value of a parameter, or the rows of a table."""
    kind = "" if isinstance(of, Parameter) else "table "
    return f"the {what} of {kind}{of.name[:60]!r}"


def takes_none(of: Parameter | Table) -> PushRejectedError | NoOptimizerError:
    """Return why a parameter or a table takes no gradient."""
    is_array = isinstance(of, Parameter)
    if of.dtype not in COMPUTED:
        return PushRejectedError(
            f"{'parameter' if is_array else 'table'} {of.name!r} is {of.dtype} and takes "
            f"no gradient; use add or assign"
        )
    pushed = (
        "a gradient was pushed for" if is_array else "gradients were pushed for table"
    )
    return NoOptimizerError(
        f"{pushed} {of.name!r}, but the store was created without an optimizer for it; "
        f"pass create(..., optimizer=...), or use add for a plain +="
    )


def ready(
    value: Any,
    of: Parameter | Table,
    dtype: str,
    what: str,
    *,
    shape: tuple[int, ...],
    finite: bool,
) -> Array:
    """Return a value checked and flat.

    Parameters
    ----------
    value : array_like
        The value.
    of : Parameter or Table
        The parameter or table that it is for.
    dtype : str
        The dtype that it is to have.
    what : str
        "gradient", "delta" or "value", for messages.
    shape : tuple of int
        Its shape: that of the parameter, or of the ids and a row.
    finite : bool
        Whether NaN and Inf are refused.

    Returns
    -------
    ndarray, shape (n,)
        C order, contiguous.

    Raises
    ------
    PushRejectedError
        For a value that does not fit.
    """
    if (
        type(value) is np.ndarray
        and value.shape == shape
        and value.dtype == _NATIVE[dtype]
        and value.flags.c_contiguous
    ):
        # As in nearly every step of a loop: nothing to look into but the numbers.
        flat = value.reshape(-1)
    else:
        flat = _made_ready(value, of, dtype, what, shape=shape)
    if finite and dtype in FLOATS and not finite_of(flat, cache_dir=config.cache_dir()):
        raise not_finite(flat, of, what)
    return flat


def _made_ready(
    value: Any, of: Parameter | Table, dtype: str, what: str, *, shape: tuple[int, ...]
) -> Array:
    name, is_array = _named(of, what), isinstance(of, Parameter)
    array = as_array(value, name, PushRejectedError)
    if array.shape != shape:
        must = (
            f", the parameter {shape}; shapes must be equal"
            if is_array
            else f" for ids of shape {shape[:-1]}; it must be {shape}"
        )
        raise PushRejectedError(
            f"{name} has shape {array.shape}{must}, nothing is broadcast"
        )
    if array.dtype != dtype:
        kind = "parameter" if is_array else "table"
        array = cast(array, dtype, name, of=f"the {kind} {of.dtype}", given=value)
    return np.ascontiguousarray(array).reshape(-1)


def times(of: Parameter | Table, array: Array, weight: float, *, finite: bool) -> Array:
    """Return a gradient times a weight, or refuse what overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        found: Array = np.multiply(array, weight, dtype=array.dtype)
    if finite and not is_finite(found):
        raise PushRejectedError(
            f"{_named(of, 'gradient')} times weight={weight:g} is not finite as "
            f"{array.dtype}; use a smaller weight"
        )
    return found


def not_finite(
    flat: Array,
    of: Parameter | Table,
    what: str,
    advice: Callable[[], str] = lambda: ADVICE,
) -> PushRejectedError:
    """Return why a value with NaN or Inf is refused."""
    return PushRejectedError(
        f"{_named(of, what)} has NaN or Inf (as {flat.dtype}); {advice()}"
    )


def cast(array: Array, dtype: str, what: str, *, of: str, given: Any) -> Array:
    """Return an array as another dtype, where that loses nothing but digits.

    Parameters
    ----------
    array : ndarray
        The values.
    dtype : str
        The dtype.
    what : str
        Name of the values, for messages.
    of : str
        Name of their destination, with its dtype.
    given : object
        The argument of the caller that they were made from.

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
    return finite_of(array, cache_dir=config.cache_dir())


def spec_of(value: Any, name: str) -> Array:
    """Return an initial value as an array a store can hold, or raise LayoutError."""
    array = as_array(value, f"parameter {name[:60]!r}", LayoutError)
    if array.dtype.name in FLOATS and not is_finite(array):
        raise LayoutError(
            f"the initial value of parameter {name[:60]!r} has NaN or Inf; start "
            f"from finite values"
        )
    return array
