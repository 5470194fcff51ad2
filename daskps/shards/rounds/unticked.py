"""The pushes of ranks in the open round before their ticks.

They are with one process alone, and go with it: the bit of a rank in the table says
that there were some.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps.shards.arrays.payload import NUMPY
from daskps.shards.rounds import words
from daskps.shards.rounds.arena import RankRows
from daskps.shards.rounds.sums import KINDS
from daskps.shards.steps import NOTHING, Item

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.shards.arrays.payload import Payload
    from daskps.shards.planning import UpdatePlanner
    from daskps.shards.rounds.mailbox import MailboxTable
    from daskps.shards.steps import Step
    from daskps.typing import Array


class Pushed(NamedTuple):
    """The pushes of a rank in the open round."""

    #: All its pushes as one step.
    step: Step
    arrays: dict[int, Array]
    #: By position.
    rows: dict[int, RankRows]


class Unticked(dict[int, Pushed]):
    """By rank its pushes. Those that belong to another round count for nothing."""

    def find(self, rank: int, now: int) -> Pushed | None:
        """Return what a rank has pushed."""
        held = self.get(rank)
        return held if held is not None and held.step.clock == now else None

    def find_next(self, rank: int, table: MailboxTable) -> int:
        """Return the next sequence number of a rank, for the table of the open round."""
        held = self.find(rank, table.words[words.ROUND])
        return table.next[rank] if held is None else held.step.sequence + 1

    def find_other_kind(
        self, step: Step, table: MailboxTable
    ) -> tuple[str, int] | None:
        """Return another kind than a step's that the round has, and who sent that.

        None where its arrays may join; -1 for a rank that is in.
        """
        now = table.words[words.ROUND]
        sent = [(KINDS[table.words[words.KIND]], -1)]
        sent += [(of.step.kind, r) for r, of in self.items() if of.step.clock == now]
        for kind, rank in sent:
            if kind not in (NOTHING, step.kind) or step.kind not in KINDS:
                return kind, rank
        return None


def widened(step: Step, payload: Payload) -> Step:
    """Return a step with float16 as sums have it: gradients come so, deltas do not."""
    narrow = [item.data.dtype == np.float16 for item in step.items]
    if not any(narrow):
        return step
    items = []
    for item, is_narrow in zip(step.items, narrow, strict=True):
        if is_narrow:
            # Rows of rounds are in host memory.
            of = payload if item.ids is None else NUMPY
            wide = of.empty(item.data.size, np.float32)
            of.round(wide, item.data.reshape(-1))
            item = item._replace(data=wide.reshape(item.data.shape))
        items.append(item)
    return step._replace(items=items)


def join_rows(
    rows: Mapping[int, RankRows], step: Step, planner: UpdatePlanner
) -> dict[int, RankRows]:
    """Return the rows of a rank's earlier pushes with those of one more, by position.

    Those of one id are added up in the order in which they come: what is kept so far is
    what a single push of all of them would begin with. Nothing that was kept changes.
    """
    joined = dict(rows)
    for item in step.items:
        if item.ids is None:
            continue
        if (known := rows.get(item.position)) is not None:
            item = _after(known, item)
        found = RankRows(*planner.each_once(item))
        if known is None and not (step.tick or step.owned):
            found = RankRows(found.ids.copy(), _in_order(found.data, found.at).copy())
        joined[item.position] = found
    return joined


def _after(known: RankRows, item: Item) -> Item:
    """Return rows that were kept and those of an item as one item."""
    dim = known.data.shape[1]
    ids = np.concatenate([known.ids, item.ids])
    data = [_in_order(known.data, known.at)]
    data.append(_in_order(item.data.reshape(-1, dim), item.at))
    return Item(item.position, 0, np.concatenate(data).reshape(-1), ids)


def _in_order(data: Array, at: Array | None) -> Array:
    return data if at is None else data[at]


def join_pushes(
    arrays: dict[int, Array], step: Step, payload: Payload
) -> dict[int, Array]:
    """Return the arrays of a rank's earlier pushes with those of one more.

    Before the tick they are kept: in place, and what came is copied. With the tick
    they are used up at once, and nothing changes that a refusal would have to undo.
    """
    if step.tick:
        arrays = dict(arrays)
    for item in step.items:
        if item.ids is not None:
            continue
        known, data = arrays.get(item.position), item.data
        if known is not None:
            total = payload.empty(len(data), data.dtype) if step.tick else known
            payload.add(known, data, total)
            arrays[item.position] = total
        elif step.tick or (step.owned and data.flags.writeable):
            arrays[item.position] = data
        else:
            arrays[item.position] = payload.duplicate(data)
    return arrays
