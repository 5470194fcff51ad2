"""The values that go into a shard and come out of it: plain ones, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.typing import Array

#: Shards, as runs [start, stop).
Intervals = tuple[tuple[int, int], ...]

#: Kinds of the arrays of a step. GRADIENT goes through the optimizer, MODEL is a
#: trainer's own weights for model averaging.
NOTHING: Final = "nothing"
GRADIENT: Final = "gradient"
MODEL: Final = "model"
ADD: Final = "add"
ASSIGN: Final = "assign"
#: Rows of an unbounded table are forgotten: items of ids without data.
REMOVE: Final = "remove"
#: Learning rates of pieces are multiplied by the step's: items without data. Its clock
#: is the run in rounds whose trainers wait for it, 0 for none.
SCALE: Final = "scale"
#: Kinds of the wait of a step after its arrays were accepted.
NO_WAIT: Final = "no"
READ: Final = "read"
BARRIER: Final = "barrier"
#: Stands for the version that a trainer has read that has read none: later than all.
UNREAD: Final = 2**62
#: Said of a step instead of a version: nothing was changed, submit it as a ticket.
ASK: Final = -1


class Item(NamedTuple):
    """Elements [start, start + len(data)) of the piece at `position` in a shard.

    Or rows of a table: the pieces of all tables come after those of the arrays.
    """

    position: int
    start: int
    data: Array
    #: Of rows: which they are, by their numbers in the table; None for elements.
    ids: Array | None = None
    #: The row of `data` that is meant for each, None for one after the other.
    at: Array | None = None


class Step(NamedTuple):
    """One message's part for one shard: arrays to apply, then something to wait for."""

    kind: str = NOTHING
    items: Sequence[Item] = ()
    #: Run and rank of a trainer; 0 and -1 outside a run.
    run: int = 0
    rank: int = -1
    clock: int = 0
    tick: bool = False
    #: Identity outside a run; a step without arrays needs none.
    producer: int = 0
    sequence: int = 0
    weight: float = 1.0
    lr: float | None = None
    wait: str = NO_WAIT
    #: Smallest version a read outside a run may return. With the gradients of a trainer
    #: whose run measures delays, the version that it has read last, or UNREAD.
    at_least: int = 0
    #: Whether the arrays may be kept and changed (they came from another process).
    owned: bool = False
    #: All steps of this producer below this number were answered or given up.
    floor: int = 0
    #: Whether it brings all that its rank pushes at this clock, also what it has
    #: pushed before.
    whole: bool = False
    #: Steps of this producer that its caller has given up, in order, until each shard
    #: that they were meant for has heard of it.
    given_up: tuple[int, ...] = ()
    # From here on what a way to a shard adds to the items. `SplitRoute.try_step` makes
    # steps by position: these three stay the last, and `kind` and `items` the first.
    generation: int = 1
    #: Whether nobody has looked for NaN and infinity in the gradients yet.
    check: bool = False
    #: The shards this step goes to, None for all.
    touched: Intervals | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(item.data.nbytes for item in self.items)


def changes(step: Step) -> bool:
    """Return whether a step does more than read."""
    return step.kind != NOTHING or (bool(step.run) and step.tick)


class Ready(NamedTuple):
    """A step that is done: the flip to read from and what it said."""

    flip: int
    version: int
    duplicate: bool = False
    #: Clocks by which the slowest live trainer is behind the one that reads.
    lag: int = 0
    #: Whether nothing but this flip will do.
    exact: bool = False


class RunPosition(NamedTuple):
    """Where a run stands in one shard."""

    #: Rounds completed, -1 where the run is not in progress.
    rounds: int
    version: int
    #: Whether it cannot go on here, so that it can only be ended.
    is_stuck: bool = False
    #: Whether the last round can be withdrawn.
    has_last: bool = False
    #: Ranks that are no longer waited for.
    finished: Sequence[int] = ()


@dataclass(eq=False, slots=True)
class Ticket:
    """A step under way in a shard; `outcome` is set when it is done."""

    step: Step
    #: None while it is under way; also right after `Pushes.apply` has applied it, until
    #: `ParkedTickets.settle` says what it may read.
    outcome: Ready | Exception | None = None
    applied: bool = False
    duplicate: bool = False
    #: Version right after this step's own update, for its acknowledgement.
    version: int = 0
    #: Where the row of its trainer or producer begins whose next push it is, or -1.
    row: int = -1
    #: Updates since its trainer has pulled, -1 where nobody asks; whether too many.
    delay: int = -1
    dropped: bool = False
    #: For the host: whom to tell, by `one_done`. It is a `LocalShards` at the caller, or at
    #: the host the `CallTickets` of its call. The shard never looks at it.
    owner: Any = field(default=None, repr=False)
