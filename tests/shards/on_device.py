"""Shards on the fake device, and the same ones in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from daskps import optim
from daskps.backend import checked, fake, find
from daskps.cluster.host.rules import initial_slots
from daskps.consistency import ASP, BSP
from daskps.layout.arrays import Layout
from daskps.shards.arrays.device import DeviceMemory
from daskps.shards.arrays.payload import NUMPY, Payload
from daskps.shards.memory.format import GENERATION
from daskps.shards.memory.segment import Segment
from daskps.shards.reader import RowsRead, ShardReader
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, ASSIGN, GRADIENT, Item, Step, Ticket


def payload_of(device: str | None) -> Payload:
    """Return the functions of new memory for a shard."""
    if device is None:
        return NUMPY
    return DeviceMemory(find(checked(device))).payload()


def asarray(values: Any, device: str) -> Any:
    """Return an array of a device with the numbers of a NumPy array."""
    of = find(checked(device))
    out = of.array(values.shape, values.dtype)
    of.put(out, values)
    return out


def make(
    layout: Layout, index: int, rules: Mapping[int, Any], device: str | None
) -> Shard:
    """A shard whose parameters of some indices have rules."""
    payload = payload_of(device)
    slots = {i: initial_slots(rule) for i, rule in rules.items()}
    segment = Segment(layout, index, slots, payload=payload)
    segment.words[GENERATION] = 1
    bindings = {
        i: optim.bind(r, layout.dtype_of(i), launcher=payload.launcher)
        for i, r in rules.items()
    }
    segment.begin_copies()
    payload.wait()
    return Shard(segment, bindings)


def bits(shard: Shard) -> tuple[Any, ...]:
    """All that a shard holds: weights, slots, record and the counts of its header."""
    segment, found = shard.segment, []
    record = segment.current
    for position in range(len(segment.pieces)):
        weights = segment.weights_of(record, position)
        arrays = weights, *segment.slots_of(record, position)
        found += [read(segment, array).tobytes() for array in arrays]
    for table in segment.tables:
        arrays = table.rows, *table.slots
        found += [read(segment, array).tobytes() for array in arrays]
        found.append(int(table.buffers.undo[0]))
        # Every row twice, in another order, as readers of this flip and of that before.
        ids = table.piece.first_row + np.arange(2 * table.piece.n_rows) // 2
        at = np.random.default_rng(len(ids)).permutation(len(ids))
        for flip in (segment.flip, segment.flip - 1):
            out = np.zeros((len(ids), table.piece.table.dim), table.rows.dtype)
            where = len(segment.pieces) + table.ordinal
            wanted = [RowsRead(where, ids, out.reshape(-1), at)]
            reader = ShardReader(segment)
            is_whole = reader.read_at(flip, (), wanted, locked=flip != segment.flip)
            found.append((is_whole, out.tobytes() if is_whole else b""))
    return found, record.words.tolist(), segment.header[0:4].tolist()


def read(segment: Segment, array: Any) -> Any:
    """Copy an array of a segment to host memory."""
    out = np.empty(array.shape, array.dtype)
    segment.payload.read([(out, array)])
    return out


SHAPES = {
    "a": ((7, 11), "float32"),
    "b": ((), "float32"),
    "c": ((40,), "float64"),
    "d": ((13,), "float32"),
    "e": ((9,), "float16"),
    "f": ((5,), "int64"),
}
TABLES: dict[str, Any] = {
    "emb": (40, 3, "float32"),
    "num": (7, 2, "int64"),
    "half": (20, 4, "float16"),
    "rowwise": (30, 5, "float64"),
}
LAYOUT = Layout.build(SHAPES, 2, TABLES)
RULES = {
    0: optim.Adam(0.01),
    1: optim.SGD(0.1, momentum=0.9),
    2: optim.RMSprop(0.01, centered=True, momentum=0.5),
    3: optim.Adam(0.01),
    4: optim.SGD(0.5, momentum=0.5),
    6: optim.Adam(0.05),
    8: optim.SGD(0.1, momentum=0.9),
    9: optim.Adagrad(0.1, rowwise=True),
}


class Program:
    """The same random events for shards of either memory; all bits after each."""

    def __init__(self, seed: int, device: str | None) -> None:
        self.rng, self.device = np.random.default_rng(seed), device
        if device == "fake":
            fake.device().seed(seed)
        self.shards = [make(LAYOUT, i, RULES, device) for i in range(2)]
        self.given: list[Any] = []
        self.in_rounds = self.ruled = False
        self.seen = [self.bits()]
        self.sequence = 0

    def bits(self) -> list[Any]:
        return [bits(shard) for shard in self.shards]

    def values(self, *, ruled: bool) -> dict[int, Any]:
        found, self.ruled = {}, ruled
        for index, (shape, dtype) in enumerate(SHAPES.values()):
            value = 10 * self.rng.normal(size=shape)
            if ruled and index in RULES:
                found[index] = value.astype("f8" if dtype == "float64" else "f4")
            elif not ruled:
                found[index] = value.astype(dtype)
        return found

    def items(self, shard: Any, values: dict[int, Any]) -> tuple[Item, ...]:
        """Parts of arrays, on the device every second time."""
        found = []
        for position, piece in enumerate(shard.segment.pieces):
            if piece.parameter.index in values:
                flat = values[piece.parameter.index].reshape(-1)
                mine: Any = np.array(flat[piece.start : piece.stop])
                is_there = self.rng.random() < 0.5  # drawn for both memories
                if self.device and is_there:
                    mine = asarray(mine, self.device)
                self.given.append(mine)
                found.append(Item(position, 0, mine))
        return (*found, *self.rows(shard))

    def rows(self, shard: Any) -> Iterator[Item]:
        """Some rows of some tables, some twice, in order or not."""
        n, ruled = len(shard.segment.pieces), self.ruled
        for position, table in enumerate(shard.segment.tables, n):
            piece, of = table.piece, table.piece.table
            named, twice, mixed, is_there = self.rng.random(4) < 0.5
            no_rounds = self.in_rounds and of.dtype == "int64"
            if (ruled and of.index not in RULES) or not named or no_rounds:
                continue
            ids = (
                piece.first_row
                + self.rng.permutation(piece.n_rows)[: piece.n_rows // 2]
            )
            if twice:
                ids = np.concatenate([ids, ids[::2]])
            at = self.rng.permutation(2 * len(ids))[: len(ids)] if mixed else None
            values = 10 * self.rng.normal(size=(len(ids) * (1 + mixed), of.dim))
            wide = "f4" if ruled and of.dtype == "float16" else of.dtype
            mine: Any = values.astype(wide).reshape(-1)
            if self.device and is_there:
                mine = asarray(mine, self.device)
            self.given.append(mine)
            yield Item(position, 0, mine, ids, at)

    def take(self) -> None:
        """Overwrite what was given: it was taken."""
        for mine in self.given:
            mine[...] = -77
        self.given.clear()

    def send(self, shard: Any, step: Step) -> None:
        ticket = Ticket(step)
        shard.submit([ticket])
        assert not isinstance(ticket.outcome, Exception), ticket.outcome
        self.take()

    def push(self, kind: str, weight: float = 1.0, *, check: bool = False) -> None:
        values = self.values(ruled=kind == GRADIENT)
        for shard in self.shards:
            self.send(
                shard,
                Step(
                    kind,
                    self.items(shard, values),
                    producer=1,
                    sequence=self.sequence,
                    weight=weight,
                    check=check,
                ),
            )
        self.sequence += 1
        self.seen.append(self.bits())

    def rounds(self, run: int, reduce: str, n: int, *, kind: str = GRADIENT) -> None:
        self.in_rounds = True
        for shard in self.shards:
            shard.begin_run(run, BSP(), 3, reduce)
        for clock in range(n):
            grads = [self.values(ruled=kind == GRADIENT) for _ in range(3)]
            weights = self.rng.uniform(0.5, 2, 3)
            leaves_out, early = self.rng.random(2) < 0.3
            if leaves_out:
                grads[1].pop(0)
            for shard in self.shards:
                for rank in self.rng.permutation(3).tolist():
                    of = {
                        "run": run,
                        "rank": rank,
                        "clock": clock,
                        "weight": float(weights[rank]),
                    }
                    if early and rank == 2:
                        items = self.items(shard, grads[0])
                        self.send(shard, Step(kind, items, sequence=2 * clock, **of))
                    items = self.items(shard, grads[rank])
                    step = Step(kind, items, sequence=2 * clock + 1, tick=True, **of)
                    if shard.step(step) < 0:
                        self.send(shard, step)
                    self.take()
            self.seen.append(self.bits())
        for shard in self.shards:
            # As a fence does where another shard does not have the last round.
            shard.hold_run(run)
            shard.end_run(run, "over", rounds=n - 1, version=1000 * run)
        self.in_rounds = False
        self.seen.append(self.bits())


def program(seed: int, device: str | None) -> list[Any]:
    """Run a program of pushes and rounds; return all bits after each step."""
    run = Program(seed, device)
    run.push(ASSIGN)
    run.push(GRADIENT, check=True)
    run.push(ADD, check=True)
    run.push(GRADIENT, 0.5)
    run.push(GRADIENT, 3.0, check=True)
    run.rounds(7, "mean", 4)
    run.rounds(8, "sum", 3)
    run.rounds(9, "sum", 2, kind=ADD)
    for shard in run.shards:
        shard.begin_run(10, ASP(), 2)
    run.push(GRADIENT)
    return run.seen
