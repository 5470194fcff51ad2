"""What the frames of a lane ask for, as those see it who serve lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.lane.frames import Head


class Waiting(Protocol):
    """A call that waits for what others do; it is finished or cancelled, once."""

    #: When it is to be finished at the latest, by `time.monotonic`.
    end: float

    @property
    def done(self) -> bool:
        """Whether nothing of it waits any more."""

    def then(self, callback: Callable[[], None]) -> None:
        """Have a function called when it is done, from whichever thread does that."""

    def finish(self, seconds: float) -> list[Any]:
        """Return the frame that answers it.

        Raises
        ------
        ShardBusyError
            Where it takes longer than that; it can be asked again.
        """

    def cancel(self) -> None:
        """Forget it: nobody hears its answer."""


class Calls(Protocol):
    """What the frames of one lane ask for."""

    def read_now(self, data: memoryview) -> bytearray | None:
        """Return what answers a frame without a body that only reads, if it is one.

        It is sent before this is asked again.
        """

    def wanted(self, head: Head) -> list[Any]:
        """Return the buffers for the body of a frame."""

    def is_long(self, head: Head) -> bool:
        """Return whether its answer takes long, or has many bytes."""

    def begin(
        self, head: Head, body: Sequence[Any], seconds: float
    ) -> list[Any] | Waiting:
        """Return the frame that answers one, or the call that waits."""
