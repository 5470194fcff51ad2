"""Generated modules: on disk where that is possible, else in memory.

Layout of a cache directory, which processes of several versions may share::

    daskps_<content hash>.py                  the generated source
    __pycache__/daskps_<content hash>.*.nbi   Numba's index of compiled signatures
    __pycache__/daskps_<content hash>.*.nbc   the machine code of one signature
    daskps_<content hash>.ptx                 a loop for devices

A name never gets another content, so nothing goes stale; anything may be deleted at
any time. Of several processes that need the same at the same time one compiles it. The
text that runs is the one made here, never what a file says. Numba unpickles its own
files: the directory must be as trusted as a Python path.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

#: Raised whenever the generated code, or `intrinsics.py` and what else makes machine code
#: of it, changes its meaning.
_FORMAT = 5
#: How long a process waits for what another compiles, in seconds: many times what it
#: takes. The process that compiles may have been stopped; then each one compiles
#: itself.
_PATIENCE = 60.0
_EVERY = 0.02

_warned: set[str] = set()


def content_name(source: str) -> str:
    """Return the module name of a generated source.

    Parameters
    ----------
    source : str
        The text without its name in it.

    Returns
    -------
    str
        "daskps_" and 32 hexadecimal digits: a hash of the text and of the versions
        of Python, NumPy and Numba and the name of the CPU. Compiled code for one of
        them is of no use to another.
    """
    # Numba's own dependency, without type hints.
    import llvmlite.binding  # type: ignore[import-untyped]
    import numba

    about = (
        _FORMAT,
        sys.implementation.cache_tag,
        sys.version_info[:3],
        np.__version__,
        numba.__version__,
        llvmlite.binding.get_host_cpu_name(),
        source,
    )
    return f"daskps_{hashlib.sha256(repr(about).encode()).hexdigest()[:32]}"


def load(source: str, cache_dir: str | None) -> ModuleType:
    """Return the generated module of `source`.

    Parameters
    ----------
    source : str
        Text from `kernels.source`.
    cache_dir : str or None
        Where to keep it and what Numba compiles of it. None, or a directory that
        cannot be written (one warning in the log): in memory.

    Returns
    -------
    ModuleType
        The module, its functions not yet compiled.
    """
    name = content_name(source)
    if cache_dir is not None:
        path = os.path.join(os.path.abspath(cache_dir), f"{name}.py")
        try:
            _write(source, path)
            return _execute(source, name, path, cached=True)
        # Numba says RuntimeError when it finds no directory to write to.
        except (OSError, RuntimeError) as error:
            warn_once(cache_dir, error)
    return _execute(source, name, f"<{name}>", cached=False)


def text_of(key: object, make: Callable[[], str], cache_dir: str | None) -> str:
    """Return a text that takes long to make, from the disk where it is there.

    Parameters
    ----------
    key : object
        What it is made of; its repr says all.
    make : callable
        Makes it.
    cache_dir : str or None
        As in `load`. A file that is damaged is made again.

    Returns
    -------
    str
        The text.
    """
    if cache_dir is None:
        return make()
    path = os.path.join(os.path.abspath(cache_dir), f"{content_name(repr(key))}.ptx")
    with suppress(OSError, UnicodeDecodeError), open(path, encoding="utf-8") as file:
        head, text = file.readline(), file.read()
        if head == _head(text):
            return text
    text = make()
    try:
        _write(_head(text) + text, path)
    except OSError as error:
        warn_once(cache_dir, error)
    return text


def _head(text: str) -> str:
    return f"// {hashlib.sha256(text.encode()).hexdigest()}\n"


@contextmanager
def turn(module: ModuleType) -> Iterator[None]:
    """Wait while another process compiles functions of a module that is on disk.

    Workers of a machine that begin together all need the same loops: the first compiles
    and keeps them, the others find them.

    Parameters
    ----------
    module : ModuleType
        From `load`.
    """
    try:
        fd = os.open(str(module.__file__), os.O_RDONLY)
    except OSError:  # In memory, or deleted.
        yield
        return
    try:
        _wait_for(fd)
        yield
    finally:
        # Said, as a process that was forked meanwhile has the lock's file open too.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _wait_for(fd: int) -> None:
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_EVERY)
        except OSError:
            return  # No file system for locks.
        else:
            return


def warn_once(cache_dir: str, error: Exception) -> None:
    """Log, once per directory, that kernels are compiled in memory.

    Parameters
    ----------
    cache_dir : str
        The directory that failed.
    error : Exception
        Why.
    """
    if cache_dir not in _warned:
        _warned.add(cache_dir)
        logger.warning(
            "cannot keep compiled kernels in %s: %r. They are compiled again in "
            "every process, which takes about half a second per update rule. Make "
            "the directory writable or choose another one.",
            cache_dir,
            error,
        )


def _write(text: str, path: str) -> None:
    """Write atomically, unless it is there: Numba's files depend on the text."""
    data = text.encode()
    try:
        with open(path, "rb") as file:
            if file.read() == data:
                return
    except FileNotFoundError:
        pass
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _execute(source: str, name: str, path: str, *, cached: bool) -> ModuleType:
    module = ModuleType(name)
    module.__file__ = path
    module.__dict__["CACHE"] = cached
    # Numba looks the module up by name when it loads machine code.
    sys.modules[name] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    return module
