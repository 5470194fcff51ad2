"""A look for NaN and infinity that may wait until the gradients are on their way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from daskps.shards.memory.publication import PAST_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable

#: Gradients of less are looked at before they leave: no shard writes it past the caches.
LOOK_LATER_NBYTES = PAST_NBYTES


@dataclass(slots=True)
class FiniteCheck:
    """A look for NaN and infinity in gradients that nobody has had yet.

    Called, it raises PushRejectedError where there are any.
    """

    function: Callable[[], None]
    done: bool = False

    def __call__(self) -> None:
        """Look, unless somebody has."""
        if not self.done:
            self.function()
            self.done = True
