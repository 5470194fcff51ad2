"""Checks of hyper-parameters: what was given, and what would have been right."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def in_range(name: str, value: Any, interval: str = "[0, inf)") -> float:
    """Return `value` as a float if it lies in `interval`.

    Parameters
    ----------
    name : str
        Name of the argument, for the message.
    value : float
        The caller's value.
    interval : str
        Two ends in mathematical notation: "[0, 1)" holds 0 and not 1.

    Returns
    -------
    float
        The value.

    Raises
    ------
    TypeError
        If `value` is no real number; a bool is none.
    ValueError
        If it is NaN or outside of the interval.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name} must be a number in {interval}, not {type(value).__name__}: "
            f"{value!r}"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = number >= low if interval[0] == "[" else number > low
    below = number <= high if interval[-1] == "]" else number < high
    if not (above and below):
        raise ValueError(f"{name} must lie in {interval}, got {value!r:.60}")
    return number


def whole(name: str, value: Any) -> int:
    """Return `value` as an int if it is a whole number of at least 1.

    Parameters
    ----------
    name : str
        Name of the argument, for the message.
    value : int
        The caller's value.

    Returns
    -------
    int
        The value.

    Raises
    ------
    TypeError
        If `value` is no integer; a bool is none.
    ValueError
        If it is smaller than 1.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}: {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")
    return int(value)


def store(instance: object, **values: object) -> None:
    """Set checked arguments of a frozen dataclass under construction.

    Parameters
    ----------
    instance : object
        A rule or a schedule.
    **values : object
        Attributes and their values.
    """
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def check_numbers(instance: object, interval: str, *names: str) -> None:
    """Check arguments of a frozen dataclass under construction and make them floats.

    Parameters
    ----------
    instance : object
        A rule or a schedule.
    interval : str
        Where they must lie, as :func:`in_range` takes it.
    *names : str
        The arguments.

    Raises
    ------
    TypeError
        If one is no number.
    ValueError
        If one lies elsewhere.
    """
    store(instance, **{n: in_range(n, getattr(instance, n), interval) for n in names})
