"""Ways to break the code that a simulation must find: they show that it can.

Each replaces something in the process that simulates, as an error would have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from daskps.shards import producers
from daskps.testing.ground import put

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Variant:
    """One way to break the code."""

    install: Callable[[], None]


def _repeats_are_new() -> None:
    put(producers, repeats=lambda *args: False)


VARIANTS: dict[str, Variant] = {"no-deduplication": Variant(_repeats_are_new)}
