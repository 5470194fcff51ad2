"""A look for NaN and infinity that may wait until the gradients are on their way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from daskps.kernels.past import PAST_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable

#: Smaller gradients are looked at before they leave: shards do not write these past the
#: caches.
LOOK_LATER_NBYTES = PAST_NBYTES


@dataclass(slots=True)
class FiniteCheck:
    """A look for NaN and infinity in gradients, still to be done.

    Called, it raises PushRejectedError where there are any.
    """

    function: Callable[[], None]
    done: bool = False

    def __call__(self) -> None:
        """Look, unless a thread has looked already."""
        if not self.done:
            self.function()
            self.done = True
