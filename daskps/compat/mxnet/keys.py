"""Keys of a kvstore, and what is given for each of them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.errors import LayoutError, PushRejectedError
from daskps.store.targets import check_apart
from daskps.store.values import is_finite

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from daskps.typing import Array


#: The least dtype in which numbers of each kind are summed.
_WIDE = {"f": "f4", "i": "i8", "u": "u8"}


class Keys:
    """The keys that a kvstore has, all of one type."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._type: str | None = None

    def __len__(self) -> int:
        return len(self._of)

    def new(self, key: Any) -> list[str]:
        """Return the names of keys that are to begin.

        Raises
        ------
        ValueError, TypeError
            For those that there are, and of another type.
        """
        names, kind = _names_of(key)
        if self._type not in (None, kind):
            raise ValueError(
                f"this kvstore has keys of {self._type}, found {kind}: {key!r:.60}"
            )
        again = [name for name in names if name in self._of or names.count(name) > 1]
        if again:
            raise ValueError(
                f"key {key_of(again[0])!r} is begun already; push replaces it"
            )
        return names

    def known(self, key: Any) -> list[str]:
        """Return the names of keys that there are.

        Raises
        ------
        ValueError, TypeError
            For others.
        """
        names, _ = _names_of(key)
        for name in names:
            if name not in self._of:
                raise ValueError(
                    f"there is no key {key_of(name)!r}; begin it with init"
                )
        return names

    def add(self, names: Sequence[str], store: int) -> None:
        """Note in which store keys are."""
        for name in names:
            self._of[name], self._type = store, _kind(key_of(name))

    def number_of(self, name: str) -> int:
        """Return in which store a key is."""
        return self._of[name]


def key_of(name: str) -> int | str:
    """Return the key that a parameter is named after."""
    return int(name[1:]) if name.startswith("#") else name[1:]


@contextmanager
def in_keys(names: Iterable[str]) -> Iterator[None]:
    """Have errors of values name the keys, and not the parameters that have them."""
    try:
        yield
    except (LayoutError, PushRejectedError) as error:
        text = str(error)
        for name in names:
            text = text.replace(repr(name), repr(key_of(name)))
        raise type(error)(text) from error.__cause__


def per_key(given: Any, names: Sequence[str], key: Any) -> list[Any]:
    """Return what is given for each key.

    Raises
    ------
    ValueError
        For another number of them.
    """
    if not isinstance(key, (list, tuple)):
        return [given]
    if not isinstance(given, (list, tuple)) or len(given) != len(names):
        found = len(given) if isinstance(given, (list, tuple)) else 1
        raise ValueError(f"{len(names)} keys go with as many values, found {found}")
    return list(given)


def arrays_of(value: Any, names: Sequence[str], key: Any) -> list[Array]:
    """Return one array for each key, to begin with."""
    return [
        _array(given, name)
        for given, name in zip(per_key(value, names, key), names, strict=True)
    ]


def copied(
    given: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Array:
    """Return the sum of what devices give for a key, in memory of its own.

    It is wider than the key where that is narrow: the store narrows the value that comes
    of it, or refuses that.
    """
    devices = given if isinstance(given, (list, tuple)) else [given]
    if not devices:
        raise ValueError(f"key {key_of(name)!r} is pushed without a value")
    arrays = [_array(one, name) for one in devices]
    for array in arrays:
        if array.shape != shape:
            raise ValueError(
                f"key {key_of(name)!r} has shape {shape}, not {array.shape}"
            )
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise TypeError(f"key {key_of(name)!r} is {dtype}, found {array.dtype}")
    wide = np.result_type(dtype, _WIDE[dtype.kind])
    total = arrays[0].astype(wide)
    with np.errstate(over="ignore", invalid="ignore"):  # the look says so
        for array in arrays[1:]:
            total += array.astype(wide)
    is_wrong = len(arrays) > 1 and config.check_finite() and not is_finite(total)
    if is_wrong and all(map(is_finite, arrays)):
        raise PushRejectedError(
            f"the sum of what {len(arrays)} devices give for key {key_of(name)!r} is not "
            f"finite as {wide}; scale it down before"
        )
    return total


def outs_of(
    out: Any, names: Sequence[str], key: Any, shapes: Sequence[tuple[int, ...]]
) -> list[list[Array]]:
    """Return the arrays that take each key's value.

    Raises
    ------
    ValueError, TypeError
        For what cannot.
    """
    found = []
    for given, name, shape in zip(per_key(out, names, key), names, shapes, strict=True):
        takers = list(given) if isinstance(given, (list, tuple)) else [given]
        for taker in takers:
            if not isinstance(taker, np.ndarray):
                raise TypeError(f"out is an array, found {type(taker).__name__}")
            if taker.shape != shape or not taker.flags.writeable:
                raise ValueError(
                    f"key {key_of(name)!r} has shape {shape}; out has {taker.shape}, or "
                    f"is read-only"
                )
        # One array may stand for several devices: all of them take the same.
        found.append([*{id(taker): taker for taker in takers}.values()])
    check_apart(
        (key_of(name), taker)
        for name, takers in zip(names, found, strict=True)
        for taker in takers
    )
    return found


def row_ids_of(
    row_ids: Any, names: Sequence[str], key: Any, shapes: Sequence[tuple[int, ...]]
) -> list[Array]:
    """Return the rows that are read of each key, each once.

    Raises
    ------
    ValueError, TypeError, IndexError
        For what are none.
    """
    found = []
    for given, name, shape in zip(
        per_key(row_ids, names, key), names, shapes, strict=True
    ):
        ids = np.unique(given)
        if not ids.size:
            ids = ids.astype("i8")
        if ids.dtype.kind not in "iu":
            raise TypeError(f"row_ids are ints, found {ids.dtype}")
        if not shape:
            raise ValueError(f"key {key_of(name)!r} is one number, and has no rows")
        if ids.size and not 0 <= ids[0] <= ids[-1] < shape[0]:
            raise IndexError(
                f"key {key_of(name)!r} has rows 0 to {shape[0] - 1}, found {ids[0]} to "
                f"{ids[-1]}"
            )
        found.append(ids)
    return found


def _names_of(key: Any) -> tuple[list[str], str]:
    """Return the names of keys, and their type."""
    keys = list(key) if isinstance(key, (list, tuple)) else [key]
    kinds = {_kind(one) for one in keys}
    if len(kinds) > 1:
        raise ValueError(f"keys are all ints or all strings, found {key!r:.60}")
    if not kinds:
        raise ValueError("there is no key in an empty list")
    kind = kinds.pop()
    mark = "#" if kind == "int" else "="
    return [f"{mark}{one}" for one in keys], kind


def _kind(key: Any) -> str:
    if isinstance(key, str):
        return "str"
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return "int"
    raise TypeError(f"a key is an int or a string, found {key!r:.60}")


def _array(given: Any, name: str) -> Array:
    array = np.asarray(given)
    if array.dtype.kind not in "iuf":
        raise TypeError(
            f"key {key_of(name)!r} is given {array.dtype}, which is no number"
        )
    return array
