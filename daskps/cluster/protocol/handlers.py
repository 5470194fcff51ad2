"""Tables of the functions that serve messages: one for hosts, one for the directory.

A handler stands where its subject is, under the name that its message has::

    @HOST.handles("name")
    async def name(host, *, store, run): ...

Its signature says what it takes, see :mod:`daskps.cluster.protocol.wellformed`. A name
that two handlers have is found when the second one's module is imported.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from daskps.cluster.protocol.packing import refusal
from daskps.cluster.protocol.wellformed import check, refused
from daskps.errors import DaskPSError, IllegalStateError, ProtocolError

logger = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Handler:
    """The function that serves one message."""

    #: Takes the host, or the part of the directory that has it, and keyword arguments.
    function: Callable[..., Any]
    user_code: bool = False

    @property
    def place(self) -> str:
        """Module and name of the function, as in an import."""
        return f"{self.function.__module__}.{self.function.__qualname__}"


class Handlers:
    """The messages that one kind of receiver takes.

    Parameters
    ----------
    whose : str
        The receiver, as errors name it.
    to : str
        Text that errors put behind the name of a message.
    expected : tuple of type
        Errors that refuse a message and are not worth a line in the log.
    """

    def __init__(
        self, whose: str, to: str = "", *, expected: tuple[type[Exception], ...]
    ) -> None:
        self.by_name: dict[str, Handler] = {}
        self._whose, self._to, self._expected = whose, to, expected

    def handles(self, name: str, *, user_code: bool = False) -> Callable[[F], F]:
        """Return what registers a function, or a method of a part of the directory.

        Parameters
        ----------
        name : str
            The message's.
        user_code : bool
            Whether it calls code of the user's, or tells why a run cannot go on, which
            may be an error of such code: its errors pass as they are.

        Raises
        ------
        IllegalStateError
            If another function has the name.
        """

        def register(function: F) -> F:
            made = Handler(function, user_code)
            if before := self.by_name.get(name):
                raise IllegalStateError(
                    f"{before.place} and {made.place} both serve the message {name!r} "
                    f"to {self._whose}"
                )
            self.by_name[name] = made
            return function

        return register

    async def serve(
        self, method: object, message: Mapping[str, Any], owner: Callable[[str], Any]
    ) -> dict[str, Any]:
        """Return the reply to one message, a refusal where it cannot be served.

        Parameters
        ----------
        method : object
            The message's name.
        message : mapping of str to object
            Its keyword arguments.
        owner : callable
            Returns by name of the message what its handler is to be given first.
        """
        what = f"a message {method!r:.60}{self._to}"
        handler = None
        try:
            handler = self.by_name.get(str(method))
            if handler is None:
                raise ProtocolError(f"{self._whose} knows no message {method!r:.60}")
            check(handler.function, message, what)
            value = handler.function(owner(str(method)), **message)
            if inspect.isawaitable(value):
                value = await value
        except Exception as error:
            if not (isinstance(error, self._expected) or _has_left(error)):
                logger.exception("%s failed", what)
            passes = handler is not None and handler.user_code
            return refusal(error if passes else refused(error, what))
        return {"status": "OK", "value": value}

    def owners(self, *parts: object) -> dict[str, object]:
        """Return by name of a message which of these objects its handler is a method of.

        Raises
        ------
        IllegalStateError
            If a handler is a method of none of them.
        """
        found = {}
        for name, handler in self.by_name.items():
            of = [part for part in parts if _has(type(part), handler.function)]
            if len(of) != 1:
                raise IllegalStateError(
                    f"{handler.place} is a method of {len(of)} parts"
                )
            found[name] = of[0]
        return found


def _has_left(error: Exception) -> bool:
    """Return whether code of the user's would have left the process, as by `sys.exit`."""
    cause = error.__cause__
    return cause is not None and not isinstance(cause, Exception)


def _has(kind: type, function: Callable[..., Any]) -> bool:
    return any(vars(base).get(function.__name__) is function for base in kind.__mro__)


#: Messages to the host of a worker, from clients, trainers and the directory.
HOST = Handlers("a host", expected=(DaskPSError, ValueError, TypeError))
#: Fetches over sockets from a host; these functions are no coroutines.
FETCHES = Handlers("a host", expected=())
#: Messages to the directory; its handlers are methods of its parts.
DIRECTORY = Handlers(
    "the directory",
    " to the directory",
    expected=(DaskPSError, ValueError, TypeError, OSError),
)
