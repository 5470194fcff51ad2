"""Messages are looked at before they are acted on: each value against its annotation.

A handler's parameters say what they take, and that is asked of every message: a value
of another type, or a number that no header word holds, is refused at the door instead
of failing half way.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daskps.errors import DaskPSError, ProtocolError
from daskps.layout.arrays import Layout
from daskps.limits import check_parameters, check_placed, check_shards

if TYPE_CHECKING:
    from collections.abc import Callable

#: The numbers that a word of a segment holds.
LEAST, MOST = -(2**63), 2**63 - 1
#: Stands for all further arguments.
_REST = "**"
#: The longest that a message may have its handler wait.
MOST_SECONDS = 86_400.0
#: Names in annotations beside builtins; modules import these for type checkers only.
_NAMES = {"Any": Any, "Mapping": Mapping, "Sequence": Sequence}


def check(function: Callable[..., Any], message: Mapping[str, Any], what: str) -> None:
    """Refuse a message that its handler does not take.

    Parameters
    ----------
    function : callable
        The handler, or the dataclass that is made of the message.
    message : mapping of str to object
        Its keyword arguments.
    what : str
        The name of the message, for the error.

    Raises
    ------
    ProtocolError
        Naming what is missing, unknown or of another type.
    """
    takes, needs = _parameters(function)
    unknown, missing = message.keys() - takes.keys(), needs - message.keys()
    if (unknown and _REST not in takes) or missing:
        raise ProtocolError(
            f"{what} without {sorted(missing)}, and with {sorted(map(str, unknown))}, "
            f"which it does not have; install the same daskps everywhere"
        )
    for name, value in message.items():
        if not fits(value, takes.get(name, Any)) or (
            name.endswith("seconds") and _is_odd(name, value)
        ):
            raise ProtocolError(
                f"{what} with {name}={value!r:.60}, which is none that it may have"
            )


@functools.cache
def _parameters(function: Callable[..., Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types a handler takes by name, and the names it needs."""
    takes, needs = dict[str, Any](), set[str]()
    names = {**vars(sys.modules[function.__module__]), **_NAMES}
    parameters = [*inspect.signature(function).parameters.values()]
    # The first one is whose handler it is; a dataclass is shown without.
    for parameter in parameters[not isinstance(function, type) :]:
        if parameter.kind is parameter.VAR_KEYWORD:
            takes[_REST] = Any
            continue
        written = parameter.annotation
        # Ours, in the module of the handler.
        try:
            kind = eval(written, names) if isinstance(written, str) else Any
        except NameError:  # a type of ours, which is none of a message
            kind = Any
        takes[parameter.name] = kind
        if parameter.default is parameter.empty:
            needs.add(parameter.name)
    return takes, frozenset(needs)


@dataclass(frozen=True)
class _LayoutWire:
    """A layout as it travels."""

    parameters: Sequence[tuple[str, Sequence[int], str]]
    shards: int
    tables: Sequence[tuple[str, int, int, str]] = ()
    unbounded: Sequence[tuple[str, str, Sequence[float], str, Sequence[int]]] = ()
    placed: Sequence[tuple[Sequence[int], Sequence[int]]] = ()


def layout_of(wire: Mapping[str, Any]) -> Layout:
    """Return the layout that a message has.

    Parameters
    ----------
    wire : mapping
        As `Layout.to_wire` returns it.

    Returns
    -------
    Layout
        The layout.

    Raises
    ------
    ProtocolError, LayoutError
        For what is none, or one of a size that no store has.
    """
    check(_LayoutWire, wire, "the layout of a store")
    check_shards(wire["shards"])
    parameters, tables = wire["parameters"], wire.get("tables", ())
    check_parameters(parameters, len(parameters), wire["shards"], tables)
    check_placed(wire.get("placed", ()), len(parameters) + len(tables))
    try:
        return Layout.from_wire(wire)
    except KeyError as error:
        raise ProtocolError(f"a layout with {error}, which nobody knows") from None


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value of a message is of an annotated type."""
    if isinstance(kind, types.UnionType):
        return any(fits(value, one) for one in kind.__args__)
    origin, of = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is tuple and of[-1] is not Ellipsis:
        return _is_row(value) and len(value) == len(of) and all(map(fits, value, of))
    if origin in (Sequence, list, tuple):
        return _is_row(value) and all(fits(one, of[0]) for one in value)
    if origin in (Mapping, dict):
        return isinstance(value, dict)
    return kind is Any or _is_plain(value, kind)


def _is_odd(name: str, seconds: float | None) -> bool:
    """Return whether a time is none, or a wait as good as without an end."""
    most = MOST_SECONDS if name.endswith("_seconds") else float("inf")
    return seconds is not None and not 0 <= seconds <= most


def _is_row(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_plain(value: Any, kind: Any) -> bool:
    """Return whether it is None, or a bool, int, float, str or bytes as annotated."""
    if kind is None or kind is types.NoneType:
        return value is None
    if kind is int:
        return type(value) is int and LEAST <= value <= MOST
    if kind is float:
        return type(value) in (int, float)
    if kind is str and type(value) is str:
        # Text that cannot be encoded cannot be sent on, logged or shown.
        return value.isascii() or _is_text(value)
    return type(value) is kind


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def refused(error: Exception, what: str) -> Exception:
    """Return what a message is refused with that its handler could not make out.

    Parameters
    ----------
    error : Exception
        The error that the handler raised.
    what : str
        The name of the message.

    Returns
    -------
    Exception
        The error itself where it says what is wrong, else a ProtocolError.
    """
    if isinstance(error, (DaskPSError, ValueError, TypeError, OSError)):
        return error
    return ProtocolError(f"{what} cannot be made out: {type(error).__name__}: {error}")
