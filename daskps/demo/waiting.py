"""Lines that the demo prints while it waits."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

#: Between two lines. A machine with nothing else to do begins to train before the first.
SAY_SECONDS = 10.0


class WaitNotice:
    """Prints every ten seconds what the demo waits for, until that is there.

    Parameters
    ----------
    what : str
        The thing that the demo waits for.
    say : callable, optional
        The function that prints a line.
    """

    def __init__(self, what: str, say: Callable[[str], object] | None = None) -> None:
        self._what, self._say = what, say or _print
        self._began, self._over = time.monotonic(), threading.Event()
        self._thread = threading.Thread(
            target=self._speak, name="daskps-demo-waiting", daemon=True
        )

    def __enter__(self) -> WaitNotice:
        """Begin to wait."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Say no more."""
        self.end()

    def end(self) -> None:
        """Say no more; it is there. May be called twice."""
        self._over.set()
        self._thread.join()

    def _speak(self) -> None:
        while not self._over.wait(SAY_SECONDS):
            seconds = time.monotonic() - self._began
            self._say(f"waiting for {self._what}, for {seconds:.0f} s so far")


def _print(line: str) -> None:
    print(line, flush=True)
