"""From what a caller gives as `codec=` to a codec."""

from __future__ import annotations

from typing import Any, TypeAlias

from daskps.codecs.bfloat16 import BFloat16

#: Every codec there is.
Codec: TypeAlias = BFloat16

_CODECS: dict[str, type[Codec]] = {BFloat16.name: BFloat16}


def choose(value: Any) -> Codec | None:
    """Return the codec that `value` names or is; None for none.

    Parameters
    ----------
    value : str, Codec or None
        What a caller gave.

    Returns
    -------
    Codec or None
        The codec.

    Raises
    ------
    ValueError
        For a name that no codec has.
    TypeError
        For anything else.
    """
    if isinstance(value, str):
        return named(value)
    for kind in _CODECS.values():
        if isinstance(value, kind):
            return value
    if value is None:
        return None
    raise TypeError(
        f"codec is None, a name or a codec of daskps.codecs, found {value!r}; codecs "
        f"are {', '.join(map(repr, _CODECS))}"
    )


def named(name: str) -> Codec:
    """Return the codec of a name.

    Parameters
    ----------
    name : str
        Its `name`.

    Returns
    -------
    Codec
        The codec.

    Raises
    ------
    ValueError
        If no codec has this name.
    """
    if name not in _CODECS:
        raise ValueError(
            f"codec={name!r} is not known; choose one of {', '.join(_CODECS)}, or None"
        )
    return _CODECS[name]()
