"""From what a caller gives as `codec=` to a codec, and from what messages call it."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any, Final

from daskps.codecs.base import DTYPES, Codec
from daskps.codecs.halves import BFloat16, Float16
from daskps.codecs.int8 import Int8

#: Those that a name chooses.
_NAMED: Final[dict[str, Codec]] = {
    codec.name: codec for codec in (BFloat16(), Float16(), Int8())
}
#: Those that every process knows by their names.
_PLAIN: Final[dict[str, Codec]] = {
    codec.name: codec for codec in (BFloat16(), BFloat16(truncate=True), Float16())
}
#: Those that runs have told of here, by the names in their messages, and how many: more
#: than a process takes part in runs at once. Those used last are kept.
_known: dict[str, Codec] = {}
_used: dict[str, int] = {}
_turns: Final = itertools.count()
_MOST_KNOWN: Final = 256


def choose(value: Any) -> Codec | None:
    """Return the codec that `value` names or is; None for none.

    Parameters
    ----------
    value : str, Codec or None
        The caller's argument.

    Returns
    -------
    Codec or None
        The codec.

    Raises
    ------
    ValueError
        For a name that no codec has, and for a codec of a user's whose words are of a
        dtype that does not travel.
    TypeError
        For anything else.
    """
    if isinstance(value, str):
        if value not in _NAMED:
            raise ValueError(
                f"codec={value!r} is not known; choose one of {', '.join(_NAMED)}, or "
                f"None"
            )
        return _NAMED[value]
    if value is None:
        return None
    if not isinstance(value, Codec):
        raise TypeError(
            f"codec is None, a name or a codec of daskps.codecs, found {value!r}; names "
            f"are {', '.join(map(repr, _NAMED))}"
        )
    if value.dtype not in DTYPES:
        raise ValueError(
            f"words of codec={value.name!r} are {value.dtype!r:.60}; choose one of "
            f"{', '.join(DTYPES)}"
        )
    return value


def is_plain(codec: Codec) -> bool:
    """Return whether every process knows a codec by its name, which says all of it.

    Parameters
    ----------
    codec : Codec
        Any.

    Returns
    -------
    bool
        Whether it is one of 16 bits, and none of a user's.
    """
    known = _PLAIN.get(codec.name)
    return type(known) is type(codec) and known == codec


def why_not_plain(what: str, codec: Codec) -> str:
    """Return why weights that are read do not travel in a codec, "" where they may.

    Parameters
    ----------
    what : str
        The argument that it was given for.
    codec : Codec
        Any.

    Returns
    -------
    str
        With the choices that there are.
    """
    if is_plain(codec):
        return ""
    return (
        f"{what} takes codecs of 16 bits alone, found {codec.name!r}: no weights wait for "
        f"what another one leaves over; choose 'bf16', 'fp16' or None"
    )


def name_of(codec: Codec, pickled: bytes) -> str:
    """Return what messages of a run call its codec.

    Parameters
    ----------
    codec : Codec
        The run's.
    pickled : bytes
        The bytes that hosts and trainers make it of.

    Returns
    -------
    str
        The same for the same bytes, at most 100 characters.
    """
    if is_plain(codec):
        return codec.name
    digest = hashlib.blake2b(pickled, digest_size=16).hexdigest()
    return f"{codec.name[:60]}:{digest}"


def keep(name: str, codec: Codec) -> None:
    """Know a codec by the name that messages call it.

    Parameters
    ----------
    name : str
        As `name_of` returns it.
    codec : Codec
        The codec.
    """
    if name in _PLAIN:
        return
    _known[name], _used[name] = codec, next(_turns)
    # Threads do the same at any time: each of these steps is one of the interpreter's.
    for old in sorted([*_used], key=lambda n: _used.get(n, 0))[:-_MOST_KNOWN]:
        _known.pop(old, None)
        _used.pop(old, None)


def named(name: str) -> Codec:
    """Return the codec that messages call so.

    Parameters
    ----------
    name : str
        As `name_of` returns it.

    Returns
    -------
    Codec
        The codec.

    Raises
    ------
    ValueError
        If no run has told of it here.
    """
    if name in _PLAIN:
        return _PLAIN[name]
    found = _known.get(name)
    if found is None:
        raise ValueError(
            f"codec={name[:100]!r} is not known here; the run that uses it has not begun "
            f"in this process, or is over"
        )
    _used[name] = next(_turns)
    return found
