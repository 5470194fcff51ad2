"""Fetching from other hosts, in the thread of a task: by sockets, else by message.

A question that gets no answer over a socket is asked once more by message; fetching
changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from daskps.cluster.caller.call_socket import SocketRefusedError, reason_of
from daskps.cluster.caller.call_template import PATIENCE_SECONDS, SLOW_NBYTES
from daskps.cluster.counters import Counters
from daskps.errors import DaskPSError, IllegalStateError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.cluster.caller.call_socket import CallSocket
    from daskps.cluster.caller.link import CallFuture
    from daskps.cluster.caller.socket_pool import SocketPool
    from daskps.typing import Array

#: How long an answer by socket may take to come in full, even if bytes keep coming.
_MOST_SECONDS = 20.0


class Fetched(NamedTuple):
    """The description of arrays by a host, in plain values, and the arrays."""

    said: Any
    arrays: Sequence[Array]


@dataclass(eq=False, slots=True)
class Fetch:
    """One request to one host, and its answer.

    One thread begins and ends it.
    """

    worker: str
    #: The name of the request, and its arguments.
    what: str
    about: Mapping[str, Any]
    #: Returns arrays to receive into, by their description, or raises.
    make: Callable[[Any], Sequence[Array]]
    #: Starts the same by message.
    ask: Callable[[], CallFuture[Fetched]]
    #: About how many bytes come: a host may take longer for more.
    nbytes: int = 0
    _pool: SocketPool | None = field(init=False, default=None)
    _counters: Counters = field(init=False, default_factory=Counters)
    _socket: CallSocket | None = field(init=False, default=None)
    _asked: CallFuture[Fetched] | None = field(init=False, default=None)

    def begin(self, pool: SocketPool | None, counters: Counters, store: str) -> None:
        """Ask the host; the answer is waited for later."""
        self._pool, self._counters = pool, counters
        if pool is None or (socket := pool.take(self.worker, store)) is None:
            self._asked = self.ask()
            return
        self._socket = socket
        try:
            slow = self.nbytes / SLOW_NBYTES
            socket.set_limits(PATIENCE_SECONDS + slow, _MOST_SECONDS + slow)
            socket.fetch(self.what, self.about)
        except (OSError, ProtocolError) as error:
            self._fall_back(pool, socket, error)

    def result(self) -> Fetched:
        """Return the answer of the host.

        Raises
        ------
        Exception
            The refusal of the host by message, or that it cannot be reached.
        """
        pool, socket = self._pool, self._socket
        if pool is not None and socket is not None:
            try:
                found = Fetched(*socket.fetched(self._made))
            except (OSError, ProtocolError, SocketRefusedError) as error:
                self._fall_back(pool, socket, error)
            else:
                self._socket = None
                pool.give_back(self.worker, socket)
                self._counters.socket_calls += 1
                self._counters.socket_nbytes += sum(a.nbytes for a in found.arrays)
                return found
        if self._asked is None:
            raise IllegalStateError(f"a fetch of {self.what} was never begun")
        return self._asked.result()

    def end(self) -> None:
        """Let go of a fetch whose result nobody takes any more; twice is fine."""
        if self._pool is not None and self._socket is not None:
            # An answer may come by it yet.
            self._pool.end(self.worker, self._socket, by_caller=True)
            self._socket = None
        if self._asked is not None:
            self._asked.stop()

    def _made(self, said: Any) -> Sequence[Array]:
        try:
            return self.make(said)
        except (DaskPSError, ValueError, TypeError, LookupError) as error:
            raise ProtocolError(
                f"an answer to a fetch of {self.what} that is none: {error}"
            ) from error

    def _fall_back(
        self, pool: SocketPool, socket: CallSocket, error: Exception
    ) -> None:
        self._socket = None
        if isinstance(error, SocketRefusedError):
            pool.give_back(self.worker, socket)
        else:
            pool.end(self.worker, socket, by_caller=False)
        self._counters.fell_back(reason_of(error))
        self._asked = self.ask()


def fetch_all(
    fetches: Sequence[Fetch],
    pool: SocketPool | None,
    meanwhile: Callable[[], None],
    *,
    counters: Counters | None = None,
    store: str = "",
) -> list[Fetched]:
    """Fetch from several hosts at once, from a thread that may wait.

    Parameters
    ----------
    fetches : sequence of Fetch
        One for each host.
    pool : SocketPool, optional
        The sockets to them.
    meanwhile : callable
        Called before the answers are waited for.
    counters : Counters, optional
        Counts the calls.
    store : str
        A store that has shards there, for which a socket may be opened.

    Returns
    -------
    list of Fetched
        The answers, in the same order.

    Raises
    ------
    Exception
        The first error of any; the others are called off.
    """
    counters = counters or Counters()
    try:
        for one in fetches:
            one.begin(pool, counters, store)
        meanwhile()
        return [one.result() for one in fetches]
    finally:
        for one in fetches:
            one.end()
