"""Shards for tests: a small layout, a rule whose effect is easy to predict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from daskps.backend.fake import FakeArray
from daskps.consistency import BSP
from daskps.layout.arrays import Layout
from daskps.shards.arrays.payload import NUMPY, Payload
from daskps.shards.memory.format import GENERATION, N_APPLIED, N_DUPLICATES
from daskps.shards.memory.segment import Segment
from daskps.shards.reader import RowsRead, ShardReader
from daskps.shards.shard import Shard
from daskps.shards.steps import GRADIENT, READ, Item, Ready, Step, Ticket
from tests.invariants import validate

#: Positions in a store of one shard; "c" has no rule.
A, B, C = 0, 1, 2
LAYOUT = Layout.build(
    {
        "a": ((5,), "float64"),
        "b": ((), "float64"),
        "c": ((4,), "int64"),
        "z": ((0,), "float64"),
    },
    1,
)
RULED = (0, 1)


#: Makes the payload of shards, the last one: of host memory, or of the fake device.
MEMORY: list[Callable[[], Payload]] = [lambda: NUMPY]


class Loops(Any):
    """The loops of a rule for the arrays of a test: `write` is all it says."""

    write: Any
    goes_by_epoch = False
    ranks = 0

    def __new__(cls, *_: Any) -> Any:
        """Make one: that of `Any` takes no arguments."""
        return object.__new__(cls)

    def is_finite(self, g):
        return bool(np.isfinite(g).all())

    def fixed(self, w_in, w_out, slots, slots_out=None):
        return lambda g, scalars: self.write(w_in, w_out, g, slots, scalars, slots_out)

    def publish(
        self, w_in, w_out, g, slots, scalars, slots_out=None, *, past=False, check=False
    ):
        if check and not self.is_finite(g):
            return False
        self.write(w_in, w_out, g, slots, scalars, slots_out)
        return True

    def inplace(self, w, g, slots, scalars):
        self.write(w, w, g, slots, scalars, None)


class OnDevice(Loops):
    """The same loops for arrays of the fake device, in the queue of a shard."""

    def __init__(self, rule: Any, payload: Payload) -> None:
        self.rule, self.payload = rule, payload
        self.goes_by_epoch, self.ranks = rule.goes_by_epoch, rule.ranks
        self.scalars = rule.scalars

    def is_finite(self, g):
        return self.payload.is_finite(g)

    def publish(
        self, w_in, w_out, g, slots, scalars, slots_out=None, *, past=False, check=False
    ):
        launcher: Any = self.payload.launcher
        launcher.flush()
        arrays = w_in, w_out, g, tuple(slots), scalars, slots_out and tuple(slots_out)

        def write():
            self.rule.write(*[raw(a) for a in arrays])

        written = [w_out, *(slots_out or slots)]
        launcher.stream.queue(write, [w_in, g, *slots], written)
        return True

    def fixed(self, w_in, w_out, slots, slots_out=None):
        return lambda g, scalars: self.publish(
            w_in, w_out, g, slots, scalars, slots_out
        )

    def inplace(self, w, g, slots, scalars):
        self.publish(w, w, g, slots, scalars)


def raw(given: Any) -> Any:
    """What arrays of the fake device hold, once its queue has come so far."""
    if isinstance(given, tuple):
        return tuple(map(raw, given))
    return given.held if isinstance(given, FakeArray) else given


class Adding(Loops):
    """A rule that adds the gradient; its slot adds up the step numbers.

    `lr=0.25` makes it raise, as a schedule or a user's `prepare` may.
    """

    def scalars(
        self, step: int, lr: float | None, epoch: int | None, factor: int = 0
    ) -> tuple[float, ...]:
        if lr == 0.25:
            raise ArithmeticError("this prepare raises")
        return (float(step),)

    def write(self, w_in, w_out, g, slots, scalars, slots_out):
        np.add(w_in, g, out=w_out)
        np.add(slots[0], scalars[0], out=(slots_out or slots)[0])


class Momentum(Loops):
    """A rule whose result depends on the order of the updates, in every bit."""

    def scalars(
        self, step: int, lr: float | None, epoch: int | None, factor: int = 0
    ) -> tuple[float, ...]:
        return (0.3 / step if lr is None else lr, 0.7)

    def write(self, w_in, w_out, g, slots, scalars, slots_out):
        out = (slots_out or slots)[0]
        out[:] = scalars[1] * slots[0] + g
        w_out[:] = w_in - scalars[0] * out


def make(
    layout: Layout = LAYOUT,
    index: int = 0,
    rule: Any = None,
    ruled: Iterable[int] = RULED,
    initial: float = 0.0,
    durable: bool = False,
) -> Shard:
    """A shard whose parameters of the given indices have a rule with one slot."""
    ruled = list(ruled)
    slots = dict.fromkeys(ruled, (initial,))
    payload = MEMORY[-1]()
    rule = rule or Adding()
    if payload.device is not None:
        durable, rule = False, OnDevice(rule, payload)
    segment = Segment(layout, index, slots, durable=durable, payload=payload)
    segment.words[GENERATION] = 1
    return Shard(segment, dict.fromkeys(ruled, rule))


def items(values: dict[int, Any], dtype: Any = np.float64) -> tuple[Item, ...]:
    """Whole arrays by position."""
    return tuple(Item(p, 0, np.array(v, dtype, ndmin=1)) for p, v in values.items())


def send(shard: Shard, *steps: Step) -> list[Ticket]:
    """Submit steps in one batch and return their tickets, done or not."""
    tickets = [Ticket(step) for step in steps]
    shard.submit(tickets)
    validate(shard)
    return tickets


def weights(shard: Shard, flip: int | None = None) -> list[list[float]]:
    """Weights by position, of the current flip or another."""
    return [w.tolist() for w in held(shard.segment, flip)]


def held(segment: Segment, flip: int | None = None) -> list[Any]:
    """Views of the weights by position, of the current flip or another."""
    record = segment.record(segment.flip if flip is None else flip)
    found = [segment.weights_of(record, p) for p in range(len(segment.pieces))]
    return [here(segment, array) for array in found]


def slots_of(segment: Segment) -> list[Any]:
    """Slots by position, of the current flip."""
    record = segment.current
    found = [segment.slots_of(record, p) for p in range(len(segment.pieces))]
    return [tuple(here(segment, array) for array in of) for of in found]


def here(segment: Segment, array: Any) -> Any:
    """An array of a segment, copied where it is on a device."""
    on_device = segment.payload.device is not None
    return segment.payload.fetch(array) if on_device else array


def counts(shard: Shard) -> tuple[int, int]:
    """Pushes that were applied, and those that were repeats."""
    header = shard.segment.header
    return header[N_APPLIED], header[N_DUPLICATES]


def contents(shard: Shard) -> tuple[Any, ...]:
    """Everything a refused or repeated call must leave as it is."""
    segment = shard.segment
    record = segment.current
    return (
        weights(shard),
        [[s.tolist() for s in slots] for slots in slots_of(segment)],
        record.fixed.tolist(),
        record.ranks[: record.fixed[5]].tolist(),
        record.producers[: record.fixed[6]].tolist(),
    )


def failed(tickets: Sequence[Ticket], error: type[Exception]) -> bool:
    """Whether all tickets ended with an error of that class."""
    return all(isinstance(t.outcome, error) for t in tickets)


def done(ticket: Ticket) -> Ready:
    """What a ticket ended with, which must not be an error."""
    assert isinstance(ticket.outcome, Ready), ticket.outcome
    return ticket.outcome


RUN = 7


def hot(i, value=1.0):
    """A gradient of "a" with one element."""
    data = np.zeros(5)
    data[i] = value
    return items({A: data})


def step(rank, clock, value=1.0, **kwargs):
    """A trainer's one push of a clock: element `rank` of "a"."""
    options = {"tick": True, "sequence": clock, **kwargs}
    return Step(GRADIENT, hot(rank, value), run=RUN, rank=rank, clock=clock, **options)


def read(rank, clock, wait=READ):
    return Step(run=RUN, rank=rank, clock=clock, wait=wait)


def bsp(n_ranks, reduce="sum", **kwargs) -> Shard:
    shard = make(**kwargs)
    shard.begin_run(RUN, BSP(), n_ranks, reduce)
    return shard


def copy_parts(segment: Segment, ready: Ready, parts: Any) -> Ready | None:
    """Copy (dtype, start, stop, out) of a shard; None where an update ran into it."""
    asked = [(part[:3], i, slice(0, part[2] - part[1])) for i, part in enumerate(parts)]
    outs = [out for *_, out in parts]
    return ready if ShardReader(segment, asked).read_at(ready.flip, outs) else None


def copy_rows(segment: Segment, flip: int, wanted: Sequence[RowsRead]) -> bool:
    """Copy rows without the lock; return whether they are whole."""
    return ShardReader(segment).read_at(flip, (), wanted)


def copy_rows_locked(segment: Segment, flip: int, wanted: Sequence[RowsRead]) -> bool:
    """Copy rows under the lock; return whether that flip's are still there."""
    return ShardReader(segment).read_at(flip, (), wanted, locked=True)


def seen(shard: Shard, ticket: Ticket):
    """Element by element what a ticket of a reader may copy of "a"."""
    out = np.empty(5)
    ready = done(ticket)
    assert copy_parts(shard.segment, ready, [("float64", 0, 5, out)]) is ready
    return out.tolist()


def leaf(arrays: Sequence[tuple[int, Any]], weight: float, reduce: Any) -> Any:
    """Make one rank's contribution, scaling its own arrays in place for a mean."""
    if reduce == "mean" and weight != 1.0:
        for _, value in arrays:
            np.multiply(value, weight, out=value)
    return dict(arrays), dict.fromkeys((key for key, _ in arrays), weight)
