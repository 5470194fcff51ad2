"""Tracebacks as a user is shown them: frames of the user's code, none of ours.

Where a call of the user's enters, errors lose our frames, and those of Dask and of
asyncio between them, as Dask hides its own. Dask's setting ``admin.traceback.shorten``
shows all of them where it is empty.
"""

from __future__ import annotations

import re
from functools import wraps
from inspect import getattr_static, isfunction
from itertools import zip_longest
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from daskps import config
from daskps.errors import DaskPSError, IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

P = ParamSpec("P")
T = TypeVar("T")
#: Packages whose frames say nothing to a user.
_HIDDEN = {"asyncio", "concurrent", "contextlib", "daskps", "distributed", "tornado"}
#: Nobody raises these on purpose: where no frame of the user's is left, it is our bug.
_BUGS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError)


def hide(error: BaseException) -> None:
    """Take our own frames, and Dask's, out of an error and of its causes.

    A cause goes that has no frame of the user's, and whose text the error has too.

    Parameters
    ----------
    error : BaseException
        Is raised again by a bare `raise`, which does not add the frame that it is in.
    """
    patterns = config.traceback_patterns()
    if patterns and not isinstance(error, IllegalStateError):
        _shorten(error, re.compile("|".join(patterns)), set())


def entrance(function: Callable[P, T]) -> Callable[P, T]:
    """Have a function of the public interface hide our frames in what it raises.

    Parameters
    ----------
    function : callable
        Not one that is called at each step: those call :func:`hide` themselves.

    Returns
    -------
    callable
        The same function.
    """

    @wraps(function)
    def entered(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            hide(error)
            raise

    return entered


def shown(function: Callable[[], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
    """Return a coroutine function that hides our frames, for whoever awaits it."""

    async def awaited() -> T:
        try:
            return await function()
        except BaseException as error:
            hide(error)
            raise

    return awaited


def entrances(cls: type[T]) -> type[T]:
    """Have public methods and indexing of a class hide our frames, also as inherited.

    Parameters
    ----------
    cls : type
        Methods of it that call :func:`hide` stay as they are.

    Returns
    -------
    type
        The same class.
    """
    for name in dir(cls):
        method = getattr_static(cls, name)
        is_named = not name.startswith("_") or name == "__getitem__"
        is_public = is_named and isfunction(method)
        if is_public and hide.__name__ not in method.__code__.co_names:
            setattr(cls, name, entrance(method))
    return cls


def _shorten(error: BaseException, files: re.Pattern[str], seen: set[int]) -> None:
    if id(error) in seen:
        return
    seen.add(id(error))
    kept = _kept(error.__traceback__, files)
    if not kept and isinstance(error, _BUGS) and not isinstance(error, DaskPSError):
        return
    for before, after in zip_longest(kept, kept[1:]):
        before.tb_next = after
    error.__traceback__ = kept[0] if kept else None
    cause, context = error.__cause__, error.__context__
    for other in (cause, context):
        if other is not None:
            _shorten(other, files, seen)
    if context is not None and context.__traceback__ is None:
        error.__context__ = None
    if cause is not None and cause.__traceback__ is None and str(cause) in str(error):
        error.__cause__ = None


def _kept(trace: TracebackType | None, files: re.Pattern[str]) -> list[TracebackType]:
    """Return the entries of a traceback that are neither ours nor Dask's."""
    kept = []
    while trace is not None:
        frame = trace.tb_frame
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _HIDDEN and not files.search(frame.f_code.co_filename):
            kept.append(trace)
        trace = trace.tb_next
    return kept
