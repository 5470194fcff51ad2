"""Numbers, flags and names that a caller hands over, or the error that says what is one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from daskps.limits import STORE_NAME_NBYTES
from daskps.version import Version

#: The largest number that the word of a version holds.
_LARGEST = 2**63 - 1


def number(value: Any, what: str, least: float | None = None) -> float:
    """Return a finite float, or refuse what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"{what} is a number, found {value!r}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"{what} must be a finite number, found {value!r:.60}")
    if least is not None and found < least:
        raise ValueError(f"{what} must be at least {least:g}, found {value!r}")
    return found


def whole(value: Any, what: str, least: int | None = None) -> int:
    """Return a whole number, or refuse what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{what} is an int, found {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{what} must be at least {least}, found {value}")
    return int(value)


def flag(value: Any, what: str) -> bool:
    """Return a bool, or refuse what is none: "no" would mean yes."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{what} is True or False, found {value!r}")
    return bool(value)


def as_float32(value: Any) -> str:
    """Return how what holds bfloat16 is converted, in the words of its own library."""
    is_tensor = type(value).__module__.partition(".")[0] == "torch"
    how = ".float()" if is_tensor else ".astype('float32')"
    return f"convert it to float32 first, with {how}"


def checked_name(name: Any) -> str:
    """Return the name of a store, or refuse what can be none."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a store is a str, found {name!r:.60}")
    if not name:
        raise ValueError("name is empty; create a store without name= for a session")
    nbytes = len(encoded(name, "name", ValueError))
    if nbytes > STORE_NAME_NBYTES:
        raise ValueError(
            f"name has {nbytes} bytes, at most {STORE_NAME_NBYTES} are "
            f"allowed; choose a shorter one"
        )
    return name


def encoded(name: str, what: str, error: type[ValueError]) -> bytes:
    """Return a name as it travels."""
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise error(
            f"{what} {name[:60]!r} has half of a character (a lone surrogate) and "
            f"cannot be sent; decode it with errors='replace' where it comes from"
        ) from None


def addresses(value: Any, what: str) -> tuple[str, ...]:
    """Return addresses of workers, none of them twice, or refuse what is none.

    Raises
    ------
    TypeError, ValueError
        For what are no strings, and for an empty list.
    """
    if value is None:
        return ()
    given = [value] if isinstance(value, str) else value
    named = isinstance(given, Iterable) and not isinstance(given, (bytes, Mapping))
    found = tuple(given) if named else ()
    if not named or not all(isinstance(one, str) for one in found):
        raise TypeError(
            f"{what} is the address of a worker or a list of them, found {value!r:.80}"
        )
    if not found:
        raise ValueError(f"{what} names no worker; leave it out for all of them")
    return tuple(dict.fromkeys(found))


def least_version(value: Any) -> int | None:
    """Return the version that a pull waits for, or refuse what is none."""
    if value is None or isinstance(value, Version):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"min_version is a Version that a push returned, or an int, found {value!r}"
        )
    if not 0 <= value <= _LARGEST:
        raise ValueError(
            f"min_version must be from 0 to {_LARGEST}, found {value!r:.60}; a store "
            f"begins at 0 and each update adds 1"
        )
    return int(value)
