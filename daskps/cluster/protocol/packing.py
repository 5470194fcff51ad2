"""The contents of messages: arrays, and answers.

Small arrays travel inside a message, large ones as frames of their own. An answer is an
acknowledgement, or an error by its name, arguments and notes. Options of filesystems
travel as text: they may hold secrets, which no error tells.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import errors
from daskps.cluster.upstream import frame, unframe
from daskps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.typing import Array


#: Arrays up to this size travel inside the message, larger ones as frames of their
#: own without a copy. (Wrapping an array costs about as much as copying 16 kB.)
INLINE_NBYTES = 16_384
#: The answer of a host that lacks the template of a call.
UNKNOWN = "unknown"


def pack_array(array: Array) -> Any:
    """Return an array as bytes, or wrapped to travel as a frame of its own."""
    return array.tobytes() if array.nbytes <= INLINE_NBYTES else frame(array)


def unpack_array(data: Any, dtype: str) -> Array:
    """Rebuild an array, 1-D where it was small, from :func:`pack_array`."""
    if isinstance(data, bytes):
        return np.frombuffer(data, dtype=dtype)
    data = unframe(data)
    if not isinstance(data, np.ndarray) or data.dtype != dtype:
        raise errors.PushRejectedError(
            f"expected an array of {dtype}, found {getattr(data, 'dtype', type(data))}"
        )
    return data


def bytes_of(data: Any) -> Array:
    """Return the bytes of an array of any dtype, from :func:`pack_array`."""
    if isinstance(data, bytes):
        return np.frombuffer(data, np.uint8)
    data = unframe(data)
    if not isinstance(data, np.ndarray) or data.dtype.hasobject:
        raise errors.ProtocolError(f"an array that is none: {type(data)}")
    return data.reshape(-1).view(np.uint8)


def unpack_reply(reply: Any, where: str) -> Any:
    """Return the value of a reply that acknowledges, raise what it says otherwise.

    Raises
    ------
    ProtocolError
        When the other side knows no such message: Dask answers None then.
    """
    if not isinstance(reply, dict) or reply.get("status") not in ("OK", "refused"):
        raise errors.ProtocolError(
            f"{where} does not answer as a daskps host (it said {reply!r:.60}); is "
            f"daskps installed there, in the same version? Start workers with "
            f"--preload daskps.preload, or call daskps.create from a client first"
        )
    if reply["status"] == "refused":
        raise unpack_error(reply["error"])
    return reply["value"]


def refusal(error: Exception) -> dict[str, Any]:
    """Return the reply that carries an error."""
    return {"status": "refused", "error": pack_error(error)}


def pack_error(error: Exception) -> list[Any]:
    """Return an error as its class name, arguments and notes."""
    name = type(error).__name__
    notes = [sendable(note) for note in getattr(error, "__notes__", ())]
    if name in errors.__all__ or name in _BUILTINS:
        args = [a if _is_small(a) else sendable(str(a)) for a in error.args]
        return [name, args, notes]
    return ["DaskPSError", [sendable(f"{name}: {error}")], notes]


def _is_small(value: object) -> bool:
    """Whether it is an integer that msgpack has."""
    return isinstance(value, int) and -(2**63) <= value < 2**63


def sendable(text: str) -> str:
    """Return a text of the user's so that it can be sent.

    Half of a character (a lone surrogate) cannot: the whole message would not be, and
    the caller that waits for it would go on waiting.
    """
    return text.encode(errors="backslashreplace").decode()


def unpack_error(packed: Sequence[Any]) -> Exception:
    """Rebuild an error from :func:`pack_error`."""
    name, args, notes = packed
    cls = _BUILTINS.get(name) or getattr(errors, name)
    error: Exception = cls(*args)
    for note in notes:
        error.add_note(note)
    return error


#: Errors of Python's own that keep their type: what a reduce function may raise.
_BUILTINS: dict[str, type[Exception]] = {
    c.__name__: c
    for c in (
        ArithmeticError,
        AssertionError,
        AttributeError,
        FloatingPointError,
        IndexError,
        KeyError,
        MemoryError,
        NameError,
        NotImplementedError,
        OverflowError,
        RuntimeError,
        TimeoutError,
        TypeError,
        ValueError,
        ZeroDivisionError,
    )
}


def pack_options(options: Mapping[str, Any]) -> str:
    """Return options as text.

    Raises
    ------
    TypeError
        Naming the option that is no plain value.
    """
    found = {}
    for name, value in options.items():
        try:
            found[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            raise TypeError(
                f"storage_options[{name!r:.60}] is a {type(value).__name__}, which "
                f"cannot be sent to the workers; give plain values, or have the workers "
                f"configure it themselves"
            ) from None
    return json.dumps(found)


def unpack_options(text: str) -> dict[str, Any]:
    """Return options from :func:`pack_options`.

    Raises
    ------
    ProtocolError
        For what that never returns.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ProtocolError(
            "options of a filesystem that are none; install the same daskps everywhere"
        )
    return found
