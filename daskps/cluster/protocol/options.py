"""Options of filesystems as they travel: they may hold secrets, which no error tells."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from daskps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping


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
