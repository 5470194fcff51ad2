"""What Dask counts as a worker's memory where processes share blocks."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Nanny, get_worker

from daskps.cluster import upstream
from daskps.cluster.machine import accounting
from daskps.cluster.machine.accounting import (
    GRACE,
    NannyMemory,
    foreign_nbytes,
)
from daskps.cluster.machine.blocks import BlockAddress
from daskps.cluster.machine.mapping import FILES
from daskps.cluster.machine.membership import Membership
from daskps.cluster.machine.processes import THIS
from daskps.cluster.plugins import DirectoryPlugin
from tests.cluster.forks import child
from tests.support import gen_cluster

MB = 2**20
#: What a limited worker may have, and a block that is too much beside the interpreter.
LIMIT, BLOCK = 256 * MB, 200 * MB
_SHM = Path("/dev/shm")
pytestmark = pytest.mark.skipif(
    not _SHM.is_dir() or shutil.disk_usage(_SHM).free < 2 * BLOCK,
    reason="needs memory in /dev/shm",
)


@pytest.fixture
def base() -> Iterator[Path]:
    """Only pages of tmpfs count as shared."""
    with TemporaryDirectory(dir=_SHM) as path:
        yield Path(path)


def resident(pid: int | str = "self") -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def corrected() -> Any:
    """A monitor that measures what this test adds, whatever others left mapped."""
    monitor = SimpleNamespace(get_process_memory=resident)
    worker: Any = SimpleNamespace(monitor=monitor)
    upstream.measure_memory_by(worker, accounting._corrected)
    measure = monitor.get_process_memory
    gc.collect()
    others = measure() - resident()
    monitor.get_process_memory = lambda: measure() - others
    return monitor


def test_a_block_counts_for_its_owner_alone(base: Path) -> None:
    monitor = corrected()
    memory = Membership.join(base, "a")
    assert abs(monitor.get_process_memory() - resident()) < MB
    alone = resident()
    block = memory.make(40 * MB)
    block.stamp()
    # Once, and not in vain: the pages are there.
    assert abs(monitor.get_process_memory() - resident()) < MB
    assert resident() - alone > 30 * MB
    assert foreign_nbytes(os.getpid(), THIS.number) == 0
    # In a container another process may have this process id.
    namesake = THIS.number ^ 1 << 60
    assert abs(foreign_nbytes(os.getpid(), namesake) - 40 * MB) < MB

    def reads(pipe: Connection) -> None:
        # A fork has the pages of its parent.
        pipe.send((resident(), monitor.get_process_memory()))
        pipe.recv()

    def attaches(pipe: Connection) -> None:
        own = Membership.visit(base, "a").attach(block.address)
        before = resident(), monitor.get_process_memory()
        own.buffer[::4096] = 1
        pipe.send((before, (resident(), monitor.get_process_memory())))
        pipe.send(THIS.number)
        pipe.recv()

    with child(attaches) as other:
        before, after = other.receive()
        assert after[0] - before[0] > 30 * MB
        assert abs(after[1] - before[1]) < 4 * MB
        # As its nanny sees it, also when the block has no name any more.
        number = other.receive()
        assert abs(foreign_nbytes(other.pid, number) - 40 * MB) < MB
        block.free()
        assert abs(foreign_nbytes(other.pid, number) - 40 * MB) < MB
    memory.leave()


def test_shared_memory_of_others_stays_charged(base: Path) -> None:
    monitor = corrected()
    with (base / "users").open("w+b") as file:
        file.truncate(40 * MB)
        users = np.memmap(file, np.uint8, "r+")
        users[::4096] = 1
        memory = Membership.join(base, "a")
        block = memory.make(MB)
        assert abs(monitor.get_process_memory() - resident()) < 4 * MB
        assert foreign_nbytes(os.getpid(), THIS.number) == 0
        block.free()
        memory.leave()
        del users, block


def fake_nanny(pid: int | None, limit: float) -> Any:
    return SimpleNamespace(
        pid=pid,
        memory_manager=SimpleNamespace(memory_limit=limit, memory_terminate_fraction=1),
        periodic_callbacks={},
    )


def test_a_nanny_asks_its_monitor_only_above_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    nanny = fake_nanny(os.getpid(), resident() * 2)
    plugin = NannyMemory(1)
    plugin.setup(nanny)  # one that watches nothing
    monitor = lambda: calls.append(1)  # noqa: E731 - its identity counts
    timer = nanny.periodic_callbacks["memory_monitor"] = SimpleNamespace(
        callback=monitor
    )
    plugin.setup(nanny)
    plugin.setup(nanny)
    timer.callback()
    assert calls == []
    nanny.memory_manager.memory_limit = resident() / 2
    timer.callback()
    assert calls == [1]
    found = [resident() * 2 // 3]
    monkeypatch.setattr(accounting, "foreign_nbytes", lambda *_: found[0])
    timer.callback()
    assert calls == [1]
    # A block that is being unmapped is listed no more, but charged for.
    found[0] = 0
    for _ in range(GRACE):
        timer.callback()
    assert calls == [1]
    timer.callback()
    assert calls == [1, 1]
    plugin.teardown(nanny)
    plugin.teardown(nanny)
    assert timer.callback is monitor
    # What cannot be told is left to Dask.
    for pid in (None, 2**22 + 1):
        accounting._Watch(fake_nanny(pid, 1e15), monitor, 1)()
    assert calls == [1] * 4


@pytest.mark.parametrize("text", [None, ""])
def test_a_nanny_that_may_not_look_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    """It would end its worker for blocks of others, which only `smaps` tells."""
    monkeypatch.setattr(accounting, "_PROC", tmp_path)
    (tmp_path / "1").mkdir()
    if text is not None:
        (tmp_path / "1" / "smaps").write_text(text)
    nanny = fake_nanny(1, 1)
    timer = nanny.periodic_callbacks["memory_monitor"] = SimpleNamespace(callback=print)
    with pytest.raises(OSError, match="smaps"):
        NannyMemory(1).setup(nanny)
    assert timer.callback is print
    # One that never ends its worker need not look.
    NannyMemory(1).setup(fake_nanny(1, 1))


@pytest.mark.parametrize(
    ("mapped", "shared", "own"),
    [
        ([4, 4], [4, 4], 6),
        ([4, 0], [4, 0], 6),  # unmapped while the system was asked
        ([0, 4], [0, 4], 6),
        ([4, 4], [9, 9], 6),  # a user's own memory stays charged
        ([0, 0], [9, 9], 10),
    ],
)
def test_a_block_that_comes_or_goes_meanwhile_is_not_charged(
    monkeypatch: pytest.MonkeyPatch, mapped: list[int], shared: list[int], own: int
) -> None:
    """What a worker counts that the system charges for 10, before and after."""
    asked: list[int] = []
    now = lambda of: of[min(len(asked), 1)]  # noqa: E731 - two of them, of one line

    def nbytes(owned: bool = False) -> int:
        return 0 if owned else now(mapped)

    monkeypatch.setattr(FILES, "nbytes", nbytes)
    monkeypatch.setattr(accounting, "_shared_nbytes", lambda: now(shared))

    def measure() -> int:
        asked.append(1)
        return 10

    assert accounting._corrected(measure) == own


def touch(base: Path, name: str, nonce: int) -> tuple[int, int, str, int]:
    """In a worker: use all of another process's block, and keep it."""
    # Not before its nanny knows.
    assert not accounting.charged()
    worker: Any = get_worker()
    worker.block = Membership.visit(base, "a").attach(BlockAddress(name, BLOCK, nonce))
    worker.block.buffer[::4096] = 1
    figure, status = worker.monitor.get_process_memory(), worker.status.name
    return resident(), figure, status, THIS.number


@gen_cluster(
    client=True,
    Worker=Nanny,
    nthreads=[("127.0.0.1", 1)],
    worker_kwargs={"memory_limit": LIMIT},
    config={"distributed.worker.memory.monitor-interval": "20ms"},
)
async def test_a_worker_survives_blocks_of_others(c: Any, s: Any, a: Any) -> None:
    await s.register_scheduler_plugin(
        DirectoryPlugin(), name=DirectoryPlugin.name, idempotent=True
    )
    with TemporaryDirectory(dir=_SHM) as base:
        memory, pid = Membership.join(base, "a"), a.pid
        block = memory.make(BLOCK)
        block.stamp()
        found = await c.submit(touch, base, block.name, block.nonce)
        raw, figure, status, number = found
        assert raw > LIMIT
        assert figure < raw - 0.95 * BLOCK
        assert status == "running"
        assert NannyMemory.name in a.plugins
        assert abs(foreign_nbytes(pid, number) - BLOCK) < MB
        look = a.periodic_callbacks["memory_monitor"].callback
        assert look.number == number
        look()
        assert await c.submit(os.getpid, pure=False) == pid
        assert not s.get_events("worker-restart-memory")
        block.free()
        memory.leave()
        del block
