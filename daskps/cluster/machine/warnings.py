"""Warnings that would be repeated with every call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

_said: set[tuple[str, str]] = set()


def warn_once(logger: logging.Logger, key: str, text: str, *args: object) -> None:
    """Log a warning, unless this process has logged one of this key.

    Parameters
    ----------
    logger : logging.Logger
        Whose warning it is; keys of others are other keys.
    key : str
        What counts as the same, such as the reason.
    text : str
        What to log, with the places of `args`.
    *args : object
        What goes there.
    """
    if (found := (logger.name, key)) not in _said:
        _said.add(found)
        logger.warning(text, *args)
