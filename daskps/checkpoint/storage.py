"""Files of checkpoints, wherever fsspec reaches.

Reads and writes all of them; those of this machine are written by `local_files`.

All calls block; they are for threads that may, never for an event loop. An instance is for
one thread: it has a filesystem of its own, whose listings are not remembered. Options may
hold secrets, and an URL too: neither these nor what a filesystem says of them is ever in an
error or a repr.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    NamedTuple,
    NoReturn,
    ParamSpec,
    TypeVar,
)

from daskps.checkpoint import local_files
from daskps.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from daskps.checkpoint.digests import Content
    from daskps.typing import Array

P = ParamSpec("P")
T = TypeVar("T")
#: User and password in an URL; a password may have "/" and "@", as keys of buckets
#: have.
_CREDENTIALS = re.compile(r"(?<=://)(?:[^/@:]*:.*|[^/@]*)@")
_LOCAL = "file://"


def full_url(url: Any) -> str:
    """Return an URL that means the same in every process of a machine.

    Parameters
    ----------
    url : str or path-like
        With a scheme, or a local path.

    Returns
    -------
    str
        Local paths are absolute; no slash at the end.

    Raises
    ------
    TypeError, ValueError
        For what is no URL.

    Examples
    --------
    >>> full_url("s3://bucket/model/")
    's3://bucket/model'
    """
    try:
        text = os.fspath(url)
    except TypeError:
        text = url
    if not isinstance(text, str):
        raise TypeError(f"a URL is a str or a path, found {text!r:.60}")
    path = text.removeprefix(_LOCAL)
    # Nothing behind the scheme is what an empty variable leaves there.
    if not path.strip() or "\0" in path or path.rstrip("/").endswith(":"):
        raise ValueError(
            f"expected a URL such as s3://bucket/model, found {shown(text)!r:.60}"
        )
    if "://" in path:
        return path.rstrip("/")
    if "::" in path:
        raise ValueError(
            f"{path!r:.60} has '::', which filesystems take for a chain of theirs; "
            f"choose another folder"
        )
    return str(Path(path).expanduser().absolute())


def shown(url: str) -> str:
    """Return an URL without its secrets: user and password, and the part behind "?".

    A local path is no URL: it is shown as it is.
    """
    if "://" not in url:
        return url
    # The query first: it may hold an "@" too.
    return _CREDENTIALS.sub("***@", url.partition("?")[0])


def options_of(options: Any) -> dict[str, Any]:
    """Return the options of a filesystem; none for None.

    Raises
    ------
    TypeError
        For what are none, without a word of what is in them.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise TypeError(
            f"storage_options is a mapping such as {{'key': ...}}, found a "
            f"{type(options).__name__}"
        )
    for name in options:
        if not isinstance(name, str):
            raise TypeError(
                f"storage_options has a name that is a {type(name).__name__}; names of "
                f"options are str"
            )
    return dict(options)


class Complaint(NamedTuple):
    """The part of a filesystem's error that may be shown."""

    text: str
    is_gone: bool


def _told(
    verb: str,
) -> Callable[
    [Callable[Concatenate[Storage, P], T]], Callable[Concatenate[Storage, P], T]
]:
    """Have a method raise our errors in place of a filesystem's, which may tell secrets."""

    def changed(
        method: Callable[Concatenate[Storage, P], T],
    ) -> Callable[Concatenate[Storage, P], T]:
        @wraps(method)
        def call(self: Storage, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return method(self, *args, **kwargs)
            except CheckpointError:
                raise
            except Exception as error:  # noqa: BLE001 - filesystems raise whatever they like
                said = self._said(error)
            # Out of `except`: what was raised there is no context of this one.
            path = args[0] if args and isinstance(args[0], str) else ""
            raise self._failed(verb, path, said)

        return call

    return changed


class Storage:
    """Files below an URL.

    Parameters
    ----------
    url : str
        From :func:`full_url`.
    options : mapping, optional
        For the filesystem, such as keys and endpoints.

    Raises
    ------
    CheckpointError
        Here where there is no such filesystem, and in all methods where it fails.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url, self._is_open = shown(url), not options and shown(url) == url
        self._fs, self._root = self._opened(url=url, options=options_of(options))
        protocol = self._fs.protocol
        self._is_local = "file" in ([protocol] if type(protocol) is str else protocol)

    @_told("reach")
    def _opened(self, *, url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
        """Return the filesystem, and where the URL is in it."""
        # A heavy import, which only saving needs.
        import fsspec

        given = {"use_listings_cache": False, **options}
        found: tuple[Any, str] = fsspec.core.url_to_fs(
            url, skip_instance_cache=True, **given
        )
        return found

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("storage is of one thread; make another one where it is needed")

    def _at(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}".rstrip("/")

    def _failed(self, verb: str, path: str, said: Complaint) -> CheckpointError:
        where = f"{self.url}/{path}".rstrip("/")
        if said.is_gone and verb == "read":
            return CheckpointError(
                f"{where} is missing: the checkpoint was deleted, or is torn; restore "
                f"another one",
                path,
            )
        return CheckpointError(f"cannot {verb} {where}: {said.text}", path)

    def _said(self, error: Exception) -> Complaint:
        """Return what may be said of an error."""
        name, is_gone = type(error).__name__, isinstance(error, FileNotFoundError)
        text = " ".join(str(error).split())
        if isinstance(error, ImportError):
            scheme = self.url.partition(":")[0]
            return Complaint(f"the package for {scheme}:// is not installed", is_gone)
        if isinstance(error, OSError) and error.errno:
            return Complaint(f"{name}: {os.strerror(error.errno)}", is_gone)
        said = f"{name}: {text:.200}" if self._is_open and text else name
        return Complaint(said, is_gone)

    # -- writing ---------------------------------------------------------------

    @_told("write")
    def write(self, path: str, content: Content) -> None:
        """Write a file, which counts for nothing before something written last says so.

        Parameters
        ----------
        path : str
            Below the URL, with "/".
        content : bytes-like
            All of it, contiguous. It is on the disk after that; :meth:`sync_names` sees
            to the name.
        """
        if self._is_local:
            local_files.write(Path(self._root), path, content)
            return
        data = content if type(content) is bytes else bytes(content)
        try:
            self._fs.pipe_file(self._at(path), data)
        except FileNotFoundError:
            # Of filesystems that have folders.
            self._fs.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(self._at(path), data)

    @_told("write")
    def sync_names(self, paths: Iterable[str]) -> None:
        """Have the names of local files on the disk, and those of their folders."""
        if self._is_local:
            local_files.sync_names(Path(self._root), paths)

    @_told("write")
    def put_last(self, path: str, content: bytes) -> None:
        """Write the file that makes all others count: by one rename, or one put."""
        if self._is_local:
            local_files.put(Path(self._root), path, content)
        else:
            self.write(path, content)

    @_told("remove")
    def remove(self, path: str = "") -> None:
        """Remove a file, or a folder with all that is in it; none is no error."""
        with suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            self._fs.rm(self._at(path), recursive=True)

    # -- reading ---------------------------------------------------------------

    @_told("read")
    def read(
        self, path: str, start: int | None = None, stop: int | None = None
    ) -> bytes:
        """Return the content of a file, or bytes [start, stop) of it."""
        return bytes(self._fs.cat_file(self._at(path), start=start, end=stop))

    @_told("read")
    def read_into(self, path: str, room: Array) -> Content:
        """Return the content of a file, where it is local and as long in `room`.

        Parameters
        ----------
        path : str
            Below the URL.
        room : ndarray, shape (nbytes,), uint8
            Memory that was used before costs half of what new memory does.
        """
        if not self._is_local:
            return bytes(self._fs.cat_file(self._at(path)))
        with Path(self._at(path)).open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != room.nbytes:
                return file.readall()
            at = 0
            while at < room.nbytes and (n := file.readinto(room.data[at:])):
                at += n
        return room.data[:at]

    @_told("look for")
    def has(self, path: str) -> bool:
        """Return whether there is a file; what cannot be looked at is an error."""
        self._fs.invalidate_cache()
        # Its `exists` says no to whatever fails.
        with suppress(FileNotFoundError):
            self._fs.info(self._at(path))
            return True
        return False

    @_told("list")
    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return the bytes of all files below a folder, by path below it."""
        self._fs.invalidate_cache()
        root = self._at(prefix)
        found = self._fs.find(root, detail=True)
        # Some filesystems give paths with a slash before them, and some do not.
        cut = len(root.strip("/")) + 1
        return {p.strip("/")[cut:]: int(of["size"] or 0) for p, of in found.items()}

    @_told("list")
    def folders(self) -> list[str]:
        """Return the names of the folders right below the URL, in order."""
        self._fs.invalidate_cache()
        found: list[Any] = []
        with suppress(FileNotFoundError):
            found = self._fs.ls(self._root, detail=True)
        if [of["type"] for of in found] == ["file"] and self._is_at(found[0]["name"]):
            raise CheckpointError(f"{self.url} is a file, not a folder of checkpoints")
        names = (of["name"].rstrip("/") for of in found if of["type"] == "directory")
        return sorted(name.rpartition("/")[2] for name in names)

    def _is_at(self, name: str) -> bool:
        """Return whether a filesystem's name is that of the URL itself."""
        return name.strip("/") == self._root.strip("/")

    @_told("list")
    def age(self, folder: str, now: float) -> float | None:
        """Return for how many seconds nothing of a folder was written.

        None where the filesystem does not say, or there is nothing.
        """
        self._fs.invalidate_cache()
        root = self._at(folder)
        times = [self._modified(path) for path in self._fs.find(root) or [root]]
        known = [at.timestamp() for at in times if at is not None]
        return now - max(known) if len(known) == len(times) else None

    def _modified(self, path: str) -> datetime | None:
        """Return when a file was written; None where nobody says."""
        try:
            at = self._fs.modified(path)
        except (NotImplementedError, FileNotFoundError, KeyError):
            # Of filesystems that keep no times; of files that went meanwhile; of folders
            # in buckets, whose description lacks the time.
            return None
        return at if isinstance(at, datetime) else None
