"""Rows of a table between machines, beside bare sockets whose servers know no shard.

One does the same work with the loops of a shard: it looks for ids that repeat and for NaN,
and keeps what was there in a log. The other one has the loops of the limit, which do none
of that and ask for rows ahead of their turn. Their buffers, and those of their callers,
are used again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps import optim
from daskps.cluster.lane.channel import flat
from daskps.config import cache_dir
from tests.benchmarks import clusters
from tests.benchmarks.between.calls import WARM, WARM_SECONDS, timed, with_lanes
from tests.benchmarks.between.rows import Bar, Row, WaySample
from tests.benchmarks.between.sockets import ANSWER_NBYTES, fill
from tests.benchmarks.peers.tables import DIM
from tests.benchmarks.rows import LoopTable

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from daskps.typing import Array
    from tests.benchmarks.between.calls import Pair
    from tests.benchmarks.between.rows import TakesSample

#: Rows of the table; rows of a call, and how many fewer calls of them are made.
ROWS = 1_000_000
NAMED = {64: 1, 10_000: 10}
#: Sets of ids that are used in turn.
_SETS = 31
#: What is asked: ids that follow with rows, and ids of rows to answer with.
_HEAD = struct.Struct("<qq48x")


def sets_of(named: int) -> Iterator[Array]:
    """Return ids for call after call, none of them twice in one."""
    rng = np.random.default_rng(0)
    return itertools.cycle(
        [rng.choice(ROWS, named, replace=False) for _ in range(_SETS)]
    )


@functools.cache
def table() -> LoopTable:
    """Return the table of this process, which every connection to it is served from.

    One for each would be given back while the next way is measured: half a gigabyte,
    60 ms of CPU time.
    """
    return LoopTable(ROWS, max(NAMED), cache_dir())


def serve(named: int, is_limit: bool, *, dask_worker: Any) -> tuple[str, int]:
    """Have a thread of a worker serve one connection; return where."""
    listener = socket.create_server((dask_worker.ip, 0))
    table()

    def run() -> None:
        with listener:
            here, _ = listener.accept()
        here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with here:
            _answer(here, table(), named, is_limit=is_limit)

    threading.Thread(target=run, name="bare-socket", daemon=True).start()
    host, port = listener.getsockname()[:2]
    return host, port


def _answer(
    here: socket.socket, served: LoopTable, named: int, *, is_limit: bool
) -> None:
    """Answer requests until the caller has gone."""
    head = memoryview(bytearray(_HEAD.size))
    ids, rows = np.empty(named, np.int64), np.empty((named, DIM), np.float32)
    pull = served.limit_pull if is_limit else served.pull
    push = served.limit_push if is_limit else served.push
    said = bytes(ANSWER_NBYTES)
    with contextlib.suppress(EOFError):
        while True:
            fill(here, head)
            come, go = _HEAD.unpack(head)
            n = come or go
            fill(here, flat(ids[:n]))
            if come:
                fill(here, flat(rows[:n]))
                push(ids[:n], rows[:n])
                here.sendall(said)
            else:
                pull(ids[:n])
                _send(here, [said, served.out[:n]])


def _send(here: socket.socket, buffers: list[Any]) -> None:
    """Send buffers in one call, where the kernel takes them."""
    sent = here.sendmsg(buffers)
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        here.sendall(view[sent:])
        sent = max(0, sent - len(view))


class BareRows:
    """The caller's end of such a connection."""

    def __init__(self, where: tuple[str, int], named: int) -> None:
        self._here = socket.create_connection(where)
        self._here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sets = sets_of(named)
        self._rows = np.full((named, DIM), 1e-3, np.float32)
        # The answer's head comes before the rows, in the same array.
        self._answer = memoryview(bytearray(ANSWER_NBYTES + self._rows.nbytes))
        self._pull, self._push = _HEAD.pack(0, named), _HEAD.pack(named, 0)

    def both(self) -> None:
        """Read rows, and deliver gradients that were looked at for NaN."""
        ids = next(self._sets)
        _send(self._here, [self._pull, ids])
        fill(self._here, self._answer)
        if not np.isfinite(np.add.reduce(self._rows, axis=None)):
            raise ValueError("not finite")
        _send(self._here, [self._push, ids, self._rows])
        fill(self._here, self._answer[:ANSWER_NBYTES])

    def close(self) -> None:
        """End it, and the thread that serves it."""
        self._here.close()


def bare(where: tuple[str, int], named: int, calls: int, *, peer: int) -> WaySample:
    """Measure the pull and push of rows over a bare socket."""
    with contextlib.closing(BareRows(where, named)) as caller:
        for _ in range(min(WARM, 1 + calls // 4)):
            caller.both()
        return timed(caller.both, calls, peer)


def handle(
    store: daskps.ParameterStore, named: int, calls: int, *, lane: bool, peer: int
) -> WaySample:
    """Measure the same by a handle, in a task of one worker on a shard of another."""

    def counted() -> tuple[int, int]:
        found = store.stats()["handle"]
        return found["lane_calls"], found["messages"]

    with clusters.configured({"daskps.ways.lane": lane}):
        emb, sets = store["emb"], sets_of(named)
        out = np.empty((named, DIM), np.float32)
        g = np.full((named, DIM), 1e-3, np.float32)

        def both() -> None:
            ids = next(sets)
            emb.pull(ids, out=out)
            emb.push(ids, g)

        end = time.monotonic() + WARM_SECONDS
        both()
        while lane and not counted()[0] and time.monotonic() < end:
            both()
        for _ in range(min(WARM, 1 + calls // 4)):
            both()
        before = counted()
        return with_lanes(timed(both, calls, peer), before, counted())


def rows(pair: Pair, options: Namespace) -> Iterator[Row]:
    """Yield pulls and pushes of few rows and of many."""
    spec = {"emb": daskps.TableSpec(ROWS, DIM, init=1.0)}
    with daskps.create(
        spec, client=pair.client, optimizer=optim.SGD(1e-3), servers=[pair.there]
    ) as store:
        for named, fewer in NAMED.items():
            calls = max(5, options.calls // fewer)
            call = functools.partial(handle, store, named, calls, peer=pair.pids[1])
            sides: dict[str, TakesSample] = {
                "lane": functools.partial(pair.run, call, lane=True),
                "bare socket": functools.partial(_bare, pair, named, calls),
                "bare socket, limit": functools.partial(
                    _bare, pair, named, calls, is_limit=True
                ),
                "message": functools.partial(pair.run, call, lane=False),
            }
            yield Row(
                f"pull + push (SGD) of {named:,} rows of {ROWS:,} x {DIM} float32",
                sides,
                [Bar("lane", "bare socket", 1.2)],
            )


def _bare(pair: Pair, named: int, calls: int, *, is_limit: bool = False) -> WaySample:
    server = functools.partial(serve, named, is_limit)
    where = pair.client.run(server, workers=[pair.there])[pair.there]
    sample: WaySample = pair.run(
        functools.partial(bare, where, named, calls, peer=pair.pids[1])
    )
    return sample
