"""Functions of a generated module, compiled at their first call."""

from __future__ import annotations

import logging
import pickle
import threading
from typing import TYPE_CHECKING, Any

from daskps.kernels import cache

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

logger = logging.getLogger(__name__)

#: Numba compiles one function at a time anyway; this keeps our own state right too.
_lock = threading.RLock()


class Module:
    """One generated module.

    Parameters
    ----------
    source : str
        Text from `kernels.source`.
    cache_dir : str or None
        See `kernels.cache.load`.

    Notes
    -----
    May be used from several threads at once.
    """

    #: Where it is kept; None in memory, also where that cannot be written.
    cache_dir: str | None

    def __init__(self, source: str, cache_dir: str | None) -> None:
        self._source = source
        self.cache_dir = cache_dir
        self._module: ModuleType | None = None
        #: Those that were asked for, by name: Numba's dispatchers.
        self.functions: dict[str, Callable[..., Any]] = {}
        self._entries: dict[str, Callable[..., Any]] = {}

    def function(self, name: str) -> Callable[..., Any]:
        """Return a compiled function.

        Parameters
        ----------
        name : str
            The name of one of its loops.

        Returns
        -------
        callable
            The function. It takes its one signature and compiles no other.

        Raises
        ------
        TypeError
            If Numba cannot compile it.
        """
        function = self.functions.get(name)
        if function is None:
            with _lock:
                function = self.functions.get(name) or self._compile(name)
                self.functions[name] = function
        return function

    def entry(self, name: str) -> Callable[..., Any]:
        """Return the machine code of a compiled function, which looks at no types.

        For callers whose arguments are known to fit the one signature: Numba's look at
        them takes as long as a short loop.
        """
        code = self._entries.get(name)
        if code is None:
            function: Any = self.function(name)
            [compiled] = function.overloads.values()
            code = self._entries[name] = compiled.entry_point
        return code

    def _compile(self, name: str) -> Callable[..., Any]:
        try:
            return self._compile_here(name)
        except (OSError, EOFError, ImportError, pickle.PickleError) as error:
            if self.cache_dir is None:
                raise
            # A full disk, or a damaged file of Numba's.
            cache.warn_once(self.cache_dir, error)
            self.cache_dir = self._module = None
            return self._compile_here(name)

    def _compile_here(self, name: str) -> Callable[..., Any]:
        from numba.core.errors import NumbaError

        if self._module is None:
            self._module = cache.load(self._source, self.cache_dir)
        dispatcher: Any = getattr(self._module, name)
        try:
            with cache.turn(self._module):
                dispatcher.compile(self._module.__dict__["SIGNATURES"][name])
        except NumbaError as error:
            raise TypeError(
                f"the update function does not compile: {error}. It must be "
                f"arithmetic on numbers with numpy and math functions and return "
                f"(w, *slots)."
            ) from error
        dispatcher.disable_compile()
        compiled: Callable[..., Any] = dispatcher
        return compiled


_modules: dict[tuple[str, str | None], Module] = {}


def module_of(source: str, cache_dir: str | None) -> Module:
    """Return the one module of a source and a directory: its functions compile once.

    Parameters
    ----------
    source : str
        Text from `kernels.source`.
    cache_dir : str or None
        See `kernels.cache.load`.

    Returns
    -------
    Module
        The same for all callers, in whichever threads.
    """
    key = source, cache_dir
    # To make one compiles nothing: where two threads do, one is kept.
    return _modules.get(key) or _modules.setdefault(key, Module(source, cache_dir))
