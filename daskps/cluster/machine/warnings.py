"""Warnings that would be repeated with every call."""

from __future__ import annotations

import logging

_logger = logging.getLogger(__name__)
_said: set[tuple[str, str]] = set()


def warn_once(logger: logging.Logger, key: str, text: str, *args: object) -> None:
    """Log a warning, unless this process has logged one of this key.

    Parameters
    ----------
    logger : logging.Logger
        The logger that warns; keys of others are other keys.
    key : str
        The reason or the like: warnings with the same key count as one.
    text : str
        The text to log, with the places of `args`.
    *args : object
        The values that go there.
    """
    if (found := (logger.name, key)) not in _said:
        _said.add(found)
        logger.warning(text, *args)


def warn_private(reason: str) -> None:
    """Say once why what was to be shared is in private memory."""
    warn_once(
        _logger,
        # Whatever it was first: memory is asked for in many sizes.
        "",
        "%s; what was to be there is in private memory, and other processes of "
        "this machine reach it by messages. This is said once",
        reason,
    )
