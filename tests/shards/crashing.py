"""Processes that are killed while they update a shard in a mapped file.

``python -m tests.shards.crashing CACHE_DIR`` reads one case per line, as JSON, and
forks a child for it: starting Python for each would take a second. It has no threads;
a child has some where it writes past the caches.
Where the child dies is decided here, around the code under test: by a store that is
watched, or by its parent's clock.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from daskps import optim
from daskps.consistency import ASP, BSP
from daskps.epochs import Epochs
from daskps.layout.arrays import Layout, compute_dtype
from daskps.shards.arrays.operations import TILE
from daskps.shards.memory import publication
from daskps.shards.memory.format import FLIP, WITHDRAWS, WRITING, Record
from daskps.shards.memory.publication import Publication
from daskps.shards.memory.segment import Segment
from daskps.shards.rounds import words
from daskps.shards.rounds.mailbox import Mailbox
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, GRADIENT, Item, Step, Ticket

N = TILE + 100
LAYOUT = Layout.build(
    {"w": ((N,), "float32"), "h": ((300,), "float16"), "c": ((7,), "int64")}, 1
)
SLOTS = {0: (0.0, 0.5), 1: (0.0, 0.5)}
RUN = 5
#: Pushes that were acknowledged before the update in which a child is killed.
ACKNOWLEDGED = 4
#: Where its epochs begin.
EPOCHS = Epochs(1, 2)
#: Rounds of a run whose last one is withdrawn, and the version that leads to.
ROUNDS, VERSION = 3, 9
PARTIAL = ("half of a tile", "weights without slots", "weights and one slot")
LABELS = (
    "writing word",
    "record copied",
    "push noted",
    "piece noted 1",
    "piece noted 2",
    *PARTIAL,
    "call 1",
    "call 2",
    "all but the flip",
    "flip",
    "applied",
)
WITHDRAW_LABELS = (
    "withdraws word",
    "writing word",
    "producers taken",
    "all but the flip",
    "flip",
)
RESET_LABELS = (
    "writing word",
    "slots 1",
    "slots 2",
    "weights gathered",
    "all but the flip",
    "flip",
)


def bindings(cache: str) -> dict[int, Any]:
    """Adam for the floating-point parameters."""
    rule = optim.Adam(0.01)
    return {i: optim.bind(rule, d, cache_dir=cache) for i, d in ((0, "f4"), (1, "f2"))}


def step(sequence: int) -> Step:
    """The push of a number: of whole pieces, of a part, an add, of one piece."""

    def item(position: int, start: int, n: int) -> Item:
        dtype = compute_dtype(["float32", "float16", "int64"][position])
        data = (np.arange(n) * (sequence + 3) % 11).astype(dtype)
        return Item(position, start, data)

    kind, found = [
        (GRADIENT, [item(0, 0, N), item(1, 0, 300)]),
        (GRADIENT, [item(0, 50, TILE)]),
        (ADD, [item(0, 0, N), item(2, 0, 7)]),
        (GRADIENT, [item(1, 0, 300)]),
    ][sequence % 4]
    return Step(kind, found, producer=1, sequence=sequence)


def at(path: str, kind: type[Segment] = Segment) -> Segment:
    """The segment in a file."""
    buffer = np.asarray(np.memmap(path, np.uint8, "r+"))
    return kind(LAYOUT, 0, SLOTS, buffer, durable=True)


def push(shard: Shard, *sequences: int) -> list[Ticket]:
    tickets = [Ticket(step(s)) for s in sequences]
    shard.submit(tickets)
    return tickets


def delivery(number: int) -> Step:
    """The step number so and so of two trainers who take turns."""
    clock, rank = divmod(number, 2)
    items = tuple(
        Item(position, 0, (np.arange(n) * (number + 3) % 13).astype("f4"))
        for position, n in ((0, N), (1, 300))
    )
    return Step(
        GRADIENT,
        items,
        run=RUN,
        rank=rank,
        clock=clock,
        tick=True,
        sequence=clock,
        weight=1.0 + rank,
    )


def deliver(shard: Shard, number: int) -> Ticket:
    ticket = Ticket(delivery(number))
    shard.submit([ticket])
    return ticket


def mailboxes(path: str) -> Any:
    """The memory of the mailboxes beside a segment in a file."""
    return np.asarray(np.memmap(f"{path}.box", np.uint8, "r+"))


#: The store after which this process dies.
armed: str | None = None


def passed(label: str) -> None:
    if armed == label:
        os.kill(os.getpid(), signal.SIGKILL)


class Header:
    """The control words of a segment, watched as they are written."""

    def __init__(self, words: memoryview[int]) -> None:
        self.words = words

    def __getitem__(self, index: int) -> int:
        return self.words[index]

    def __setitem__(self, index: int, value: int) -> None:
        if index == FLIP:
            passed("all but the flip")
        self.words[index] = value
        labels = {WITHDRAWS: "withdraws word", WRITING: "writing word", FLIP: "flip"}
        if index in labels:
            passed(labels[index])


class Watched(Segment):
    """A segment whose control words are watched."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.header: Any = Header(self.header)


class Partly:
    """A binding that may die with some of its arrays written, in any order."""

    calls = 0

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.scalars, self.is_finite = inner.scalars, inner.is_finite
        self.goes_by_epoch, self.ranks = inner.goes_by_epoch, inner.ranks

    def inplace(self, w, g, slots, scalars):
        self._die_within(w, (w, *slots), g, slots, scalars)
        self.inner.inplace(w, g, slots, scalars)
        self._count()

    def publish(
        self, w_in, w_out, g, slots, scalars, slots_out=None, *, past=False, check=False
    ):
        outs = (w_out, *(slots if slots_out is None else slots_out))
        self._die_within(w_in, outs, g, slots, scalars)
        done = self.inner.publish(
            w_in, w_out, g, slots, scalars, slots_out, past=past, check=check
        )
        self._count()
        return done

    def fixed(self, w_in, w_out, slots, slots_out=None):
        return lambda g, scalars: self.publish(
            w_in, w_out, g, slots, scalars, slots_out
        )

    def _die_within(self, w, outs, g, slots, scalars):
        if armed not in PARTIAL:
            return
        new = [w.copy(), *(s.copy() for s in slots)]
        self.inner.inplace(new[0], g, tuple(new[1:]), scalars)
        n = {"half of a tile": 3, "weights without slots": 1}.get(armed, 2)
        k = len(w) // 2 if n == 3 else len(w)
        for out, array in list(zip(outs, new, strict=True))[:n]:
            out[:k] = array[:k]
        passed(armed)

    def _count(self) -> None:
        Partly.calls += 1
        passed(f"call {Partly.calls}")


def watch(owner: Any, name: str, label: str) -> None:
    """Pass a label after each call of a method, "%d" in it is their number."""
    method, calls = getattr(owner, name), []

    def watched(*args: Any) -> Any:
        result = method(*args)
        calls.append(1)
        passed(label.replace("%d", str(len(calls))))
        return result

    setattr(owner, name, watched)


def die_at(case: dict[str, Any], bound: dict[int, Any]) -> None:
    """Apply some pushes, then one batch, or begin a run, and die on the way."""
    global armed
    partly: Any = {i: Partly(b) for i, b in bound.items()}
    shard = Shard(at(case["path"], Watched), partly, cache_dir=sys.argv[1])
    for sequence in range(ACKNOWLEDGED):
        push(shard, sequence)
    if case.get("withdraw"):
        rounds: Any = {"memory": mailboxes(case["path"]), "epochs": EPOCHS}
        shard.begin_run(RUN, BSP(), 2, "mean", **rounds)
        for number in range(2 * ROUNDS):
            deliver(shard, number)
        shard.hold_run(RUN)
        watch(Record, "take_producers", "producers taken")
        armed = case["label"]
        shard.end_run(RUN, "over", rounds=ROUNDS - 1, version=VERSION)
        passed("applied")
    watch(Record, "copy_from", "record copied")
    watch(Publication, "add", "push noted")
    watch(Publication, "_move", "piece noted %d")
    watch(Publication, "_slots", "slots %d")
    watch(Publication, "gather_weights", "weights gathered")
    Partly.calls = 0
    shard.segment.is_together = case.get("together", False)
    armed = case["label"]
    if case["reset"]:
        shard.begin_run(RUN, ASP(), 1, reset=True)
    else:
        push(shard, *case["batch"])
    passed("applied")


def run_on(case: dict[str, Any], bound: dict[int, Any], ready: int) -> None:
    """Apply one push after the other, and acknowledge each in a second file.

    Of a run in rounds the steps of its two trainers.
    """
    shard = Shard(at(case["path"]), bound, cache_dir=sys.argv[1])
    acknowledged = np.memmap(case["path"] + ".ack", np.int64, "r+")
    one: Callable[[Shard, int], object] = push
    if case.get("rounds"):
        shard.begin_run(RUN, BSP(), 2, "mean", memory=mailboxes(case["path"]))
        one = deliver
    os.write(ready, b"!")
    for sequence in range(case["pushes"]):
        one(shard, sequence)
        acknowledged[0] = sequence + 1
    signal.pause()


def main() -> None:
    bound = bindings(sys.argv[1])
    for binding in bound.values():
        binding.kernel.warm(durable=True, past=True)
    # Here and not in each child.
    words.compiled(sys.argv[1])
    for line in sys.stdin:
        sys.stdout.write(f"{fork(json.loads(line), bound)}\n")
        sys.stdout.flush()


def fork(case: dict[str, Any], bound: dict[int, Any]) -> int:
    """Run a case in a child and return its exit code, or minus the signal's number."""
    reader, ready = os.pipe()
    child = os.fork()
    if not child:
        if case.get("past"):
            publication.PAST_NBYTES = 0  # type: ignore[attr-defined]
        if "label" in case:
            die_at(case, bound)
        else:
            run_on(case, bound, ready)
        os._exit(3)
    if "delay" in case:
        os.read(reader, 1)
        time.sleep(case["delay"])
        os.kill(child, signal.SIGKILL)
    os.close(reader)
    os.close(ready)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def new_file(path: Path) -> str:
    """A file for a segment, and one for acknowledgements."""
    path.write_bytes(bytes(Segment.needed_nbytes(LAYOUT, 0, SLOTS, durable=True)))
    Path(f"{path}.ack").write_bytes(bytes(8))
    box = Mailbox.nbytes_of(LAYOUT.pieces[0], 2, "mean")
    Path(f"{path}.box").write_bytes(bytes(box))
    return str(path)


if __name__ == "__main__":
    main()
