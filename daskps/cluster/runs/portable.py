"""Errors of tasks as those who wait for them can be given them."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from daskps.cluster.upstream import dumps, loads

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_T = TypeVar("_T")


def sends_errors(task: Callable[_P, _T]) -> Callable[_P, _T]:
    """Have a task raise errors that can be sent, with their notes and tracebacks.

    Of one that cannot be pickled, or be made again, Dask would send the text alone, as an
    `Exception`, and so of all that it has caused: a refusal would not be one any more,
    and nothing would say in which trainer it was. A RuntimeError with its name and text
    takes its place.

    Parameters
    ----------
    task : callable
        The task, which may raise errors of the user's code.

    Returns
    -------
    callable
        The same task.
    """

    @wraps(task)
    def sending(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return task(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - raised below
            found = _portable(error, set())
        # Not above, where the one that is replaced would be the context of this one.
        raise found

    return sending


def _portable(error: BaseException, seen: set[int]) -> BaseException:
    """Return an error, or what takes its place, causes likewise; `seen` are done."""
    seen.add(id(error))
    cause, context = error.__cause__, error.__context__
    suppresses = error.__suppress_context__
    if context is not None and id(context) not in seen:
        context = _portable(context, seen)
    if cause is error.__context__:
        cause = context
    elif cause is not None and id(cause) not in seen:
        cause = _portable(cause, seen)
    error.__cause__, error.__context__ = cause, context
    error.__suppress_context__ = suppresses
    try:
        loads(dumps(error))
    except Exception:  # noqa: BLE001 - a user's, whatever it raises
        made = RuntimeError(f"{type(error).__name__}: {error}")
        made.__cause__, made.__context__ = cause, context
        made.__suppress_context__ = suppresses
        for note in getattr(error, "__notes__", ()):
            made.add_note(note)
        return made.with_traceback(error.__traceback__)
    return error
