"""What ranks have pushed in the open round before their ticks.

It is with one process alone, and goes with it: a rank's table says that there was some.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from daskps.shards.steps import Step, Tick
    from daskps.typing import Array


class Unticked(dict[int, "tuple[Tick, dict[int, Array]]"]):
    """By rank what its pushes are together, as the tick says it, and their arrays.

    What belongs to another round than `now` counts for nothing.
    """

    def find(self, rank: int, now: int) -> tuple[Tick, dict[int, Array]] | None:
        """Return what a rank has pushed."""
        held = self.get(rank)
        return held if held is not None and held[0].clock == now else None

    def find_kinds(self, now: int) -> list[str]:
        """Return of which kinds that is, for all ranks."""
        return [tick.kind for tick, _ in self.values() if tick.clock == now]


def join_pushes(arrays: dict[int, Array], step: Step) -> dict[int, Array]:
    """Return the arrays of a rank's earlier pushes with those of one more.

    Before the tick they are kept: in place, and what came is copied. With the tick
    they are used up at once, and nothing changes that a refusal would have to undo.
    """
    if step.tick:
        arrays = dict(arrays)
    for item in step.items:
        known = arrays.get(item.position)
        if step.tick:
            data = item.data
            arrays[item.position] = data if known is None else known + data
        elif known is None:
            arrays[item.position] = _own(item.data, step.owned)
        else:
            known += item.data
    return arrays


def _own(data: Array, owned: bool) -> Array:
    if owned and data.flags.writeable:
        return data
    return data.copy()
