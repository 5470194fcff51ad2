"""Protocols between the threads that serve sockets and the calls in their frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.sockets.frames import Head


class ParkedCall(Protocol):
    """A call that waits for other callers; its owner finishes or cancels it, once.

    It is `Parked` of :mod:`daskps.cluster.host.calls`.
    """

    #: The latest time to finish it, by `time.monotonic`.
    end: float

    @property
    def done(self) -> bool:
        """Whether none of its tickets waits any more."""

    def then(self, callback: Callable[[], None]) -> None:
        """Call a function when it is done, in the thread that completes it."""

    def finish(self, seconds: float) -> list[Any]:
        """Return the frame that answers it.

        Raises
        ------
        ShardBusyError
            If the answer takes longer than that; the caller may ask again.
        """

    def cancel(self) -> None:
        """Forget it: its answer is not sent."""


class Calls(Protocol):
    """The calls in the frames of one socket: `SocketCalls`, and `HostTemplate` in it."""

    def read_now(self, data: memoryview) -> bytearray | None:
        """Return the answer to a frame without a body that only reads; None for others.

        The buffer is valid until the next call: the caller sends it before.
        """

    def wanted(self, head: Head) -> list[Any]:
        """Return the buffers for the body of a frame."""

    def is_long(self, head: Head) -> bool:
        """Return whether its answer takes long, or has many bytes."""

    def begin(
        self, head: Head, body: Sequence[Any], seconds: float
    ) -> list[Any] | ParkedCall:
        """Return the frame that answers one, or the call that waits."""
