"""Processes that are killed at moments of chance while they push rows, by the real loops.

``python -m tests.shards.killing_rows FOLDER N SEED`` forks N children, one after the
other, each of which pushes without a pause, kills each after a while, and looks at what
it has left. It prints what it found.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from daskps import optim
from daskps.init import constant
from daskps.layout.arrays import Layout
from daskps.layout.tables import UnboundedIds
from daskps.shards.memory import feed
from daskps.shards.memory.format import ROWS_SEQUENCE, VERSION
from daskps.shards.memory.room import Own
from daskps.shards.memory.segment import Segment
from daskps.shards.memory.undo import roll_back
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, GRADIENT, Item, Step, Ticket
from tests.invariants import validate
from tests.kernels.compiling import kept

N, DIM, K = 5_000, 16, 700
LAYOUT = Layout.build(
    {},
    1,
    {
        "emb": (N, DIM, "float32"),
        "num": (N, 4, "int64"),
        # Room for 4,000 pushes, or the last ones would be refused and kill nobody.
        "any": (0, 2, "float32", UnboundedIds(constant(3.0), 5, 120_000)),
    },
)
#: Of an unbounded table: how many a push names, and after how many pushes others come.
K_ANY, CYCLE = 60, 8
#: So many different pushes, in turn. SGD at a rate of 1 takes ones away, exactly.
MANY = 16
IDS = [np.random.default_rng(i).permutation(N)[:K] for i in range(MANY)]
#: How often each row is named by the first pushes.
NAMED = np.cumsum([np.bincount(ids, minlength=N) for ids in IDS], axis=0)
ONES, INTEGERS = np.ones(K * DIM, "f4"), np.ones(K * 4, "i8")


def push(shard: Shard, n: int) -> None:
    """The push of a number: a gradient or an `add`, each to both tables in turn."""
    ids = IDS[n % MANY]
    kind = GRADIENT if n % 2 else ADD
    items = [Item(0, 0, ONES, ids)]
    if kind == ADD:
        items.append(Item(1, 0, INTEGERS, ids))
        items.append(Item(2, 0, ONES[: 2 * K_ANY], unbounded(n)))
    ticket = Ticket(Step(kind, items, producer=1, sequence=n))
    shard.submit([ticket])
    if isinstance(ticket.outcome, Exception):
        raise ticket.outcome


def expected(n: int) -> tuple[Any, Any]:
    """What each row of both tables holds after so many pushes."""
    emb, num = np.zeros(N), np.zeros(N, "i8")
    full, rest = divmod(n, MANY)
    for i in range(MANY):
        times = full + (i < rest)
        named = NAMED[i] - (NAMED[i - 1] if i else 0)
        emb += (-1 if i % 2 else 1) * times * named
        num += (i % 2 == 0) * times * named
    return emb, num


def unbounded(n: int) -> Any:
    """Which unbounded ids a push names: others every few pushes, some of them again."""
    return (IDS[n % MANY][:K_ANY] - N // 2) * 7919 + n // CYCLE


def is_right(shard: Shard, n: int) -> bool:
    """Whether all tables hold exactly what that many pushes come to."""
    emb, num, _ = (table.rows for table in shard.segment.tables)
    wanted = expected(n)
    return bool(
        (emb == wanted[0][:, None]).all() and (num == wanted[1][:, None]).all()
    ) and has_any(shard, n)


def has_any(shard: Shard, n: int) -> bool:
    """Whether the unbounded table has the rows of that many pushes, and no others."""
    named = [unbounded(i) for i in range(0, n, 2)] or [np.empty(0, np.int64)]
    wanted, times = np.unique(np.concatenate(named), return_counts=True)
    table = shard.segment.tables[2]
    assert table.unbounded is not None
    ids, rows = table.unbounded.index.ids()
    return np.array_equal(ids, wanted) and bool(
        (table.rows[rows] == 3 + times[:, None]).all()
    )


def follow(shard: Shard) -> None:
    """Have the feeds of all tables on."""
    for table in shard.segment.tables:
        table.feed.follow(shard.segment.current, table.n_rows, shard.segment.memory)


def tells(shard: Shard, since: int) -> bool:
    """Whether the feeds tell just what the pushes after a version have changed."""
    record = shard.segment.current
    after = range(since, record.plain[VERSION])
    named = [
        [IDS[i % MANY] for i in after],
        [IDS[i % MANY] for i in after if i % 2 == 0],
        [unbounded(i) for i in after if i % 2 == 0],
    ]
    told = [table.feed.read(record, since, 0) for table in shard.segment.tables]
    return all(
        ids is None or set(ids.tolist()) == set(np.concatenate([*of, ids[:0]]).tolist())
        for ids, of in zip(told, named, strict=True)
    )


def main() -> None:
    path, n, seed = Path(sys.argv[1]) / "segment", int(sys.argv[2]), int(sys.argv[3])
    # Of many pushes, or nothing would be left of the first.
    vars(feed)["_FEWEST_IDS"] = 2**15
    path.write_bytes(bytes(Segment.extent(LAYOUT, 0, {})[0]))
    buffer = np.asarray(np.memmap(path, np.uint8, "r+"))
    bound = {0: optim.bind(optim.SGD(1.0), "float32", cache_dir=kept())}
    segment = Segment(LAYOUT, 0, {}, buffer, durable=True)
    # The file is there from end to end.
    segment.memory = Own()
    shard = Shard(segment, bound, cache_dir=kept())
    # Compiled here and not in each child.
    for i in range(2):
        push(shard, i)
    rng = np.random.default_rng(seed)
    found = {"kills": n, "half-way": 0, "torn before": 0, "wrong": 0, "told": 0}
    follow(shard)
    # So is what feeds write.
    for i in range(2, 4):
        push(shard, i)
    for _ in range(n):
        before = version = shard.segment.current.plain[VERSION]
        told, tell = os.pipe()
        child = os.fork()
        if not child:
            push(shard, version)
            os.write(tell, b"1")
            while True:
                version += 1
                push(shard, version)
        os.close(tell)
        os.read(told, 1)
        os.close(told)
        # No event to wait for: a moment of chance is what is tried.
        time.sleep(rng.uniform(0, 4e-3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        version = shard.segment.current.plain[VERSION]
        found["half-way"] += shard.segment.header[ROWS_SEQUENCE] & 1
        found["torn before"] += not is_right(shard, version)
        roll_back(shard.segment)
        validate(shard)
        right = (
            is_right(shard, version) and shard.segment.current.steps[0] == version // 2
        )
        right = right and tells(shard, before)
        found["wrong"] += not right
        record = shard.segment.current
        found["told"] += (
            shard.segment.tables[0].feed.read(record, before, 0) is not None
        )
        follow(shard)
    found["pushes"] = shard.segment.current.plain[VERSION]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
