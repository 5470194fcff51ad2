"""Configuration values, parsed once: the only reader of ``dask.config``.

The defaults stand in ``daskps.yaml`` and are described in ``daskps-schema.yaml``.
Layers 0 to 2 receive values as arguments and never come here.
"""

from __future__ import annotations

import enum
import functools
import logging
import math
import os
import platform
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import dask.config
import yaml
from dask.utils import parse_bytes, parse_timedelta

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

with Path(__file__).with_name("daskps.yaml").open(encoding="utf-8") as _file:
    _DEFAULTS: dict[str, Any] = yaml.safe_load(_file)
dask.config.update_defaults(_DEFAULTS)

#: Old names of settings, which hold for one release beside those of today.
_RENAMED = {
    "daskps.ways.process": "daskps.carriers.process",
    "daskps.ways.machine": "daskps.carriers.machine",
    "daskps.ways.lane": "daskps.carriers.socket",
    "daskps.ways.locked-reads": "daskps.carriers.locked-reads",
}
# In files and environments, and by `dask.config.set` from now on, which warns itself.
for _old in dask.config.rename(_RENAMED):
    logger.warning("the setting %s is called %s now", _old, _RENAMED[_old])
dask.config.deprecations.update(_RENAMED)

#: Whether other processors see the stores of one in their order, which reading without
#: a lock relies on.
_ORDERED = platform.machine() in {"x86_64", "AMD64", "i386", "i686"}


class _Default(enum.Enum):
    DEFAULT = "daskps.timeout"

    def __repr__(self) -> str:
        return "<daskps.timeout>"


#: A timeout that was not given: the configured one.
DEFAULT: Final = _Default.DEFAULT
#: The values that a verb takes as ``timeout=``.
Timeout: TypeAlias = float | str | Literal[_Default.DEFAULT] | None


# Cached, as every verb comes here; 1 and True are equal as keys without `typed`.
@functools.lru_cache(typed=True)
def _seconds(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, str):
        # Dask reads ".5s" as 1.5 s and "s" as 1 s; require a leading digit.
        if not value.strip()[:1].isdigit():
            raise ValueError(value)
        try:
            value = parse_timedelta(value.strip())
        except KeyError:
            raise ValueError(value) from None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(value)
    seconds = float(value)
    if not seconds >= 0:
        raise ValueError(value)
    return None if math.isinf(seconds) else seconds


def _positive(value: object) -> float:
    seconds = _seconds(value)
    if not seconds:  # for ever, or not at all
        raise ValueError(value)
    return seconds


@functools.lru_cache(typed=True)
def _nbytes(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | Integral):
        raise TypeError(value)
    nbytes = parse_bytes(value if isinstance(value, str) else int(value))
    if nbytes < 0 or value == "":  # Dask reads "" as one byte
        raise ValueError(value)
    return nbytes


def _one_of(meanings: Mapping[object, Any]) -> Callable[[object], Any]:
    """Return the parser of a value that is one of some, and what each stands for."""

    def parse(value: object) -> Any:
        for allowed, meaning in meanings.items():
            if type(value) is type(allowed) and value == allowed:  # 1 is equal to True
                return meaning
        raise ValueError(value)

    return parse


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(value)
    share = float(value)
    if not 0 < share <= 1:
        raise ValueError(value)
    return share


_flag = _one_of({True: True, False: False})
_finite = _one_of({"reject": True, "allow": False})
_buffers = _one_of({name: name for name in ("none", "parameters")})
_is_locked = _one_of({"auto": False, True: True})


def _locked_reads(value: object) -> bool:
    return _is_locked(value) or not _ORDERED


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(value)
    count = int(value)
    if count < 1:
        raise ValueError(value)
    return count


def _path(value: object) -> Path | None:
    if value == "" or not isinstance(value, str | os.PathLike | None):
        raise TypeError(value)
    return None if value is None else Path(value)


def _directory(value: object) -> Path:
    """Return a directory; the user's cache for None."""
    path = _path(value)
    try:
        if path is not None:
            return path.expanduser()
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not base.is_absolute():  # unset, or to be ignored by its specification
            base = Path.home() / ".cache"
    except RuntimeError as error:  # no home directory
        raise ValueError(value) from error
    return base / "daskps" / "kernels"


def _shared_memory(value: object) -> Path:
    path = _path(value) or Path("/dev/shm")
    # Not made absolute by the folder a process happens to be in: each has another.
    if not path.is_absolute():
        raise ValueError(value)
    return path


def _setting(key: str, parse: Callable[[Any], Any], allowed: str) -> Any:
    """Return a field of `Config`: its key, how to read it, and what it may be."""
    return field(metadata={"key": key, "parse": parse, "allowed": allowed})


_SECONDS = 'seconds (at least 0), a string like "30s", or None to wait for ever'
_POSITIVE = 'seconds (above 0) or a string like "30s"'
_CACHE = "a directory, or null with a home"
_FLAG = "true or false"
_COUNT = "a whole number, at least 1"
_NBYTES = 'a number of bytes or a string like "64 KiB"'


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration of daskps at one moment; see ``daskps-schema.yaml``."""

    timeout_seconds: float | None = _setting("timeout", _seconds, _SECONDS)
    register_timeout_seconds: float = _setting("register-timeout", _positive, _POSITIVE)
    lost_after_seconds: float = _setting("lost-after", _positive, _POSITIVE)
    suspect_after_seconds: float = _setting("suspect-after", _positive, _POSITIVE)
    run_away_seconds: float | None = _setting("run-away-timeout", _seconds, _SECONDS)
    check_finite: bool = _setting("finite", _finite, '"reject" or "allow"')
    memory_share: float = _setting(
        "memory-share", _share, "a number above 0, at most 1"
    )
    device_memory_share: float = _setting(
        "device-memory-share", _share, "a number above 0, at most 1"
    )
    rebalance: bool = _setting("rebalance", _flag, _FLAG)
    correct_memory: bool = _setting("correct-memory", _flag, _FLAG)
    process_carrier: bool = _setting("carriers.process", _flag, _FLAG)
    machine_carrier: bool = _setting("carriers.machine", _flag, _FLAG)
    socket_carrier: bool = _setting("carriers.socket", _flag, _FLAG)
    locked_reads: bool = _setting(
        "carriers.locked-reads", _locked_reads, '"auto" or true'
    )
    inline_nbytes: int = _setting("inline-nbytes", _nbytes, _NBYTES)
    warn_pull_nbytes: int = _setting("warn-pull-size", _nbytes, _NBYTES)
    # A field, as those above: not a value that all instances share.
    cache: Path = _setting("cache-directory", _directory, _CACHE)  # noqa: RUF009
    shared_memory: Path = _setting(  # noqa: RUF009
        "shared-memory-directory", _shared_memory, "an absolute path, or null"
    )
    threads: int = _setting("threads", _count, _COUNT)
    double_buffer: str = _setting("double-buffer", _buffers, '"none" or "parameters"')


#: By key: its parser, and what is allowed.
_PARSERS = {
    f.metadata["key"]: (f.metadata["parse"], f.metadata["allowed"])
    for f in fields(Config)
}
#: Settings that every call of a verb reads, and their values that were parsed last.
_OFTEN = ("timeout", "finite")
_PARSED: dict[str, tuple[object, Any]] = {}
#: Values that are not changed in place.
_PLAIN = (str, int, float, NoneType)
#: Values that have no effect any more, by key, and what holds in their place.
_RETIRED: dict[str, tuple[object, object]] = {"double-buffer": ("batches", "none")}
#: Keys that have no effect any more.
_REMOVED = ("update-threads",)


def load() -> Config:
    """Read the configuration as it is now.

    Returns
    -------
    Config
        All values, parsed.

    Raises
    ------
    ValueError
        If a value is not allowed; the message names its key.

    Examples
    --------
    >>> import dask
    >>> with dask.config.set({"daskps.inline-nbytes": "1 kiB"}):
    ...     load().inline_nbytes
    1024
    """
    for key in _REMOVED:
        if dask.config.get(f"daskps.{key}", None) is not None:
            _warn_of(key, "has no effect any more")
    return Config(**{f.name: _read(f.metadata["key"]) for f in fields(Config)})


@functools.cache
def cache_dir() -> str:
    """Return where compiled loops are kept, as it was when that was asked first.

    Values that were made ready are used, and no step reads the configuration.

    Returns
    -------
    str
        The directory.

    Examples
    --------
    >>> from daskps import config
    >>> config.cache_dir() == config.cache_dir()
    True
    """
    return str(load().cache)


def check_finite() -> bool:
    """Tell whether NaN and Inf are refused, as it is now.

    For what is done at every call of a verb: to read all values, which `load` does,
    takes longer than a small push.

    Returns
    -------
    bool
        False where ``daskps.finite`` is "allow".

    Raises
    ------
    ValueError
        If the value is not allowed.

    Examples
    --------
    >>> import dask
    >>> with dask.config.set({"daskps.finite": "allow"}):
    ...     check_finite()
    False
    """
    found: bool = _read("finite")
    return found


def scheduler_address() -> str | None:
    """Return the scheduler that `distributed.Client()` would connect to.

    Returns
    -------
    str or None
        Dask's ``scheduler-address`` (``DASK_SCHEDULER_ADDRESS``); None where unset.

    Examples
    --------
    >>> import dask
    >>> with dask.config.set({"scheduler-address": "tcp://host:8786"}):
    ...     scheduler_address()
    'tcp://host:8786'
    """
    address: str | None = dask.config.get("scheduler-address", None)
    return address or None


def compresses() -> bool:
    """Tell whether Dask compresses what connections send to other machines.

    Returns
    -------
    bool
        False where Dask's own value ``distributed.comm.compression`` is false, as it
        is by default.

    Examples
    --------
    >>> import dask
    >>> with dask.config.set({"distributed.comm.compression": "zlib"}):
    ...     compresses()
    True
    """
    return bool(dask.config.get("distributed.comm.compression", False))


def traceback_patterns() -> list[str]:
    """Return which files Dask leaves out of tracebacks, as patterns.

    Returns
    -------
    list of str
        Dask's ``admin.traceback.shorten``; empty where all frames are shown.

    Examples
    --------
    >>> import dask
    >>> with dask.config.set({"admin.traceback.shorten": []}):
    ...     traceback_patterns()
    []
    """
    return [*(dask.config.get("admin.traceback.shorten", None) or ())]


def deadline(timeout: Timeout = DEFAULT, what: str = "timeout") -> float | None:
    """Return the seconds that a ``timeout=`` argument stands for.

    Parameters
    ----------
    timeout : float, str, None or DEFAULT
        Seconds, a string with a unit, or None to wait for ever. DEFAULT stands for
        the configured ``daskps.timeout``.
    what : str
        Name of the argument, for messages.

    Returns
    -------
    float or None
        Seconds, at least 0; None is for ever.

    Raises
    ------
    ValueError
        If it is negative, NaN or a string that is no duration.
    TypeError
        If it is of another type; a bool is refused too.

    Examples
    --------
    >>> deadline("1.5 minutes")
    90.0
    >>> deadline(None) is None
    True
    """
    if timeout is DEFAULT:
        seconds: float | None = _read("timeout")
        return seconds
    try:
        return _seconds(timeout)
    except (TypeError, ValueError) as error:
        message = f"{what}={timeout!r} is no timeout: give {_SECONDS}"
        raise type(error)(message) from None


def _read(key: str) -> Any:
    """Return the parsed value of one key."""
    # Keys of one word are as Dask keeps them: asked of every call, without `get`.
    default = _DEFAULTS["daskps"][key] if key in _OFTEN else _PARSED
    value = dask.config.config.get("daskps", {}).get(key, default)
    if value is _PARSED:
        # Dask's test helpers set the configuration back to what it was when they were
        # imported, which may have been before the defaults were added.
        default = dask.config.get(f"daskps.{key}", config=_DEFAULTS)
        value = dask.config.get(f"daskps.{key}", default)
    raw, parsed = _PARSED.get(key, (_PARSED, None))
    if raw is value:
        return parsed
    if key in _RETIRED and value == _RETIRED[key][0]:
        old, value = value, _RETIRED[key][1]
        _warn_of(key, f"{old} has no effect any more; {value!r} holds in its place")
    parse, allowed = _PARSERS[key]
    try:
        parsed = parse(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"the configuration value daskps.{key} is {value!r}; give {allowed}"
        ) from error
    if type(value) in _PLAIN and key in _OFTEN:
        _PARSED[key] = value, parsed
    return parsed


@functools.cache
def _warn_of(key: str, said: str) -> None:
    """Write once to the log of this process that a key, or its value, has no effect."""
    logger.warning(
        "the configuration value daskps.%s: %s, and nothing is lost by removing it",
        key,
        said,
    )
