"""Initial values of parameters, drawn where the shards are.

Values are drawn in blocks of 65,536 elements of the flat (C order) parameter. The
generator of a block is keyed by seed, parameter name and block number alone, so that
a parameter gets the same numbers on any number of shards. The numbers are those of
NumPy's generator: another NumPy release may draw others.

Examples
--------
>>> layer = daskps.ArraySpec((64, 10), "float32", daskps.init.fan_in())
>>> store = daskps.create({"weight": layer, "bias": np.zeros(10, "float32")}, seed=1)
>>> store["weight"].shape
(64, 10)
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from daskps.errors import LayoutError
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array

__all__ = ["constant", "fan_avg", "fan_in", "normal", "uniform", "zeros"]

#: Elements drawn at once.
BLOCK = 65_536

Shape: TypeAlias = tuple[int, ...]
Custom: TypeAlias = "Callable[[Shape, np.dtype[Any], np.random.Generator], Any]"


@dataclass(frozen=True, slots=True)
class constant:
    """Set every element to one value.

    Parameters
    ----------
    value : float, int or bool
        The value. The parameter's dtype must be able to hold it.

    Examples
    --------
    >>> constant(0.5)
    constant(value=0.5)
    """

    value: float


def zeros() -> constant:
    """Set every element to zero.

    Returns
    -------
    constant
        The same as ``constant(0)``.

    Examples
    --------
    >>> zeros() == constant(0)
    True
    """
    return constant(0)


@dataclass(frozen=True, slots=True)
class uniform:
    """Draw from the uniform distribution on [low, high).

    Parameters
    ----------
    low : float
        Smallest value, finite.
    high : float
        Upper border, finite, not below `low`.

    Examples
    --------
    >>> daskps.create({"w": daskps.ArraySpec((2, 2), init=uniform(0, 1))})["w"].dtype
    dtype('float32')
    """

    low: float = -1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not -math.inf < self.low <= self.high < math.inf:
            raise ValueError(f"{self} needs finite borders with low <= high")


@dataclass(frozen=True, slots=True)
class normal:
    """Draw from the normal distribution.

    Parameters
    ----------
    mean : float
        Mean, finite.
    std : float
        Standard deviation, at least 0.

    Examples
    --------
    >>> store = daskps.create({"w": daskps.ArraySpec(10_000, init=normal(std=0.1))})
    >>> store["w"].pull().std().round(2)
    np.float32(0.1)
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and 0 <= self.std < math.inf):
            raise ValueError(f"{self} needs a finite mean and a finite std >= 0")


@dataclass(frozen=True, slots=True)
class _Scaled:
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(f"{self} needs a finite scale above 0")


@dataclass(frozen=True, slots=True)
class fan_in(_Scaled):
    """Draw from the normal distribution with variance ``scale / fan_in``.

    For a parameter of shape (out, in, ...), as in torch, ``fan_in`` is the product of
    all axes but the first; for one axis it is the length, for none 1.

    Parameters
    ----------
    scale : float
        A finite number above 0. 1 keeps the variance through a linear layer; 2 is the
        choice for ReLU of He et al. [1]_, equation 10.

    References
    ----------
    .. [1] K. He, X. Zhang, S. Ren, J. Sun, "Delving deep into rectifiers", ICCV 2015.

    Examples
    --------
    >>> store = daskps.create({"w": daskps.ArraySpec((50, 200), init=fan_in(2.0))})
    >>> store["w"].pull().std().round(2)  # sqrt(2 / 200)
    np.float32(0.1)
    """


@dataclass(frozen=True, slots=True)
class fan_avg(_Scaled):
    """Draw uniformly with variance ``scale / mean(fan_in, fan_out)``.

    For a parameter of shape (out, in, ...), as in torch, ``fan_in`` is the product of
    all axes but the first and ``fan_out`` of all but the second; for one axis both
    are the length, for none 1. The borders are ±sqrt(3 · variance).

    Parameters
    ----------
    scale : float
        A finite number above 0; 1 is the "normalized initialization" of Glorot and
        Bengio [1]_, equation 16.

    References
    ----------
    .. [1] X. Glorot, Y. Bengio, "Understanding the difficulty of training deep
       feedforward neural networks", AISTATS 2010.

    Examples
    --------
    >>> store = daskps.create({"w": daskps.ArraySpec((50, 100), init=fan_avg())})
    >>> bool(abs(store["w"].pull()).max() <= (6 / 150) ** 0.5)
    True
    """


Drawn: TypeAlias = uniform | normal | fan_in | fan_avg
Checked: TypeAlias = "constant | Drawn | Custom"
Initializer: TypeAlias = "float | Checked"


class _Parameter(NamedTuple):
    name: str
    shape: Shape
    dtype: np.dtype[Any]


def fans(shape: Shape) -> tuple[int, int]:
    """Return fan in and fan out of a parameter of shape (out, in, ...)."""
    if len(shape) < 2:
        return math.prod(shape), math.prod(shape)
    return math.prod(shape[1:]), shape[0] * math.prod(shape[2:])


def check(initializer: object, *, name: str, dtype: Any) -> Checked:
    """Refuse what can be no initializer of a parameter, before anything is drawn.

    Parameters
    ----------
    initializer : float, initializer or callable
        The initializer of a specification.
    name : str
        Name of the parameter, for the message.
    dtype : dtype
        Its dtype.

    Returns
    -------
    float, initializer or callable
        The same; a number as `constant`.

    Raises
    ------
    TypeError
        If it is neither a number nor callable nor one of this module.
    LayoutError
        If the dtype cannot hold the number, or is not one of floats for random ones.
    """
    if isinstance(initializer, Real | np.bool_):
        initializer = constant(initializer)  # type: ignore[arg-type]  # float() would round it
    if isinstance(initializer, constant):
        _number(initializer.value, name, np.dtype(dtype))
        return initializer
    if isinstance(initializer, Drawn):
        if np.dtype(dtype).kind != "f":
            raise LayoutError(
                f"parameter {name!r} is {np.dtype(dtype)} and cannot be drawn from "
                f"{initializer}: give it a float dtype, a number or your own "
                f"(shape, dtype, rng) callable"
            )
        return initializer
    if initializer is zeros or isinstance(initializer, type):
        raise TypeError(
            f"parameter {name!r}: make the initializer by a call, as in zeros()"
        )
    if not callable(initializer):
        raise TypeError(
            f"parameter {name!r}: {initializer!r} is no initializer; give a number, "
            f"one of daskps.init or a callable (shape, dtype, rng)"
        )
    return initializer


def fill(
    out: Array,
    initializer: Initializer,
    *,
    name: str,
    shape: Shape,
    seed: int,
    start: int = 0,
) -> None:
    """Write the elements from `start` on of a new parameter.

    Parameters
    ----------
    out : ndarray, shape (n,)
        Where flat elements ``start`` to ``start + n`` of the parameter are written.
        Its dtype is that of the parameter.
    initializer : float, initializer or callable
        A number, one of this module, or ``(shape, dtype, rng) -> array``, called for
        each block with ``shape=(n,)``, n at most 65,536.
    name : str
        Name of the parameter; part of the key of each block.
    shape : tuple of int
        Shape of the whole parameter.
    seed : int
        Seed of the store, at least 0.
    start : int
        Index of the first element.

    Raises
    ------
    LayoutError
        If the dtype cannot hold the values, or a callable returns another shape or
        NaN or Inf.

    Examples
    --------
    The same numbers in one piece and in two:

    >>> import numpy as np
    >>> whole, halves = np.empty(10), np.empty(10)
    >>> fill(whole, uniform(), name="w", shape=(2, 5), seed=7)
    >>> fill(halves[:4], uniform(), name="w", shape=(2, 5), seed=7)
    >>> fill(halves[4:], uniform(), name="w", shape=(2, 5), seed=7, start=4)
    >>> bool((whole == halves).all())
    True
    """
    parameter = _Parameter(name, shape, out.dtype)
    size, stop = math.prod(shape), start + len(out)
    if not 0 <= start <= stop <= size:
        raise ValueError(f"elements {start} to {stop} of {name!r} of {size}")
    chosen = check(initializer, name=name, dtype=out.dtype)
    if isinstance(chosen, constant):
        out[...] = _number(chosen.value, name, out.dtype)
        return
    for block in range(start // BLOCK, -(-stop // BLOCK) if len(out) else 0):
        first = block * BLOCK
        rng = _generator(seed, name, block)
        n = min(BLOCK, size - first)
        values = _draw(chosen, rng, n, parameter)
        low, high = max(start, first), min(stop, first + n)
        out[low - start : high - start] = values[low - first : high - first]


def _draw(
    initializer: Drawn | Custom, rng: np.random.Generator, n: int, to: _Parameter
) -> Array:
    """Return one block of `n` numbers in the parameter's dtype."""
    if isinstance(initializer, Drawn):
        drawn = _draw_known(initializer, rng, n, to.shape)
    else:
        try:
            with user_code(f"the initializer of parameter {to.name!r:.60}"):
                drawn = np.asarray(initializer((n,), to.dtype, rng))
        except Exception as error:
            error.add_note(f"raised by the initializer of parameter {to.name!r}")
            raise
        if drawn.shape != (n,) or not np.can_cast(drawn.dtype, to.dtype, "same_kind"):
            raise LayoutError(
                f"the initializer of parameter {to.name!r} returned shape "
                f"{drawn.shape} and dtype {drawn.dtype}; return shape {(n,)}, "
                f"castable to {to.dtype}"
            )
    with np.errstate(over="ignore"):
        values = drawn.astype(to.dtype, copy=False)
    if to.dtype.kind == "f" and not np.isfinite(values).all():
        raise LayoutError(
            f"the initializer of parameter {to.name!r} gives NaN or Inf in "
            f"{to.dtype}; return finite values in its range"
        )
    return values


def _draw_known(
    initializer: Drawn, rng: np.random.Generator, n: int, shape: Shape
) -> Array:
    """Return `n` numbers, float64."""
    match initializer:
        case uniform(low, high):
            return rng.uniform(low, high, n)
        case normal(mean, std):
            return rng.normal(mean, std, n)
        case fan_in(scale):
            return rng.normal(0.0, math.sqrt(scale / fans(shape)[0]), n)
        case fan_avg(scale):
            border = math.sqrt(6.0 * scale / sum(fans(shape)))
            return rng.uniform(-border, border, n)


def _generator(seed: int, name: str, block: int) -> np.random.Generator:
    """Return the generator of one block; `hash` would differ between processes."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    words = np.frombuffer(digest, "<u4").tolist()
    entropy = np.random.SeedSequence(seed, spawn_key=(*words, block))
    return np.random.Generator(np.random.Philox(entropy))


def _number(value: float, name: str, dtype: np.dtype[Any]) -> Any:
    """Return a number in a dtype that holds it: exactly, or rounded for floats."""
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            made = np.array(value).astype(dtype) if dtype.kind == "f" else value
        held = bool(np.isfinite(made))
        if dtype.kind != "f" and held:
            made = dtype.type(int(value))
            held = bool(made == value)
    except (OverflowError, TypeError, ValueError):
        held = False
    if not held:
        raise LayoutError(
            f"parameter {name!r} is {dtype} and cannot start at {value!r}: give a "
            f"finite number that {dtype} can hold, or another dtype"
        )
    return made
