"""Blocks of memory: made, attached, adopted, and what they leave behind."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import dask
import numpy as np
import pytest

from daskps.cluster.machine import registry as registries
from daskps.cluster.machine import warnings
from daskps.cluster.machine.blocks import Block, BlockAddress
from daskps.cluster.machine.folder import CarrierClosed
from daskps.cluster.machine.mapping import FILES
from daskps.cluster.machine.membership import HERE, Membership
from daskps.errors import IllegalStateError, LayoutError
from daskps.shards.memory.format import FORMAT_AT, MAGIC_AT, NONCE
from tests.cluster.forks import child, left

N = 3 * 4096 + 64


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Membership]:
    """Shared memory below a folder of the test's, which is empty afterwards."""
    before = left(tmp_path)
    # What a test before this one left in cycles is mapped still.
    gc.collect()
    found = Membership.join(tmp_path, "a")
    yield found
    found.leave()
    assert left(tmp_path) == before
    assert FILES.nbytes() == FILES.nbytes(owned=True) == 0


def test_a_file_that_closes_while_bytes_are_counted_has_none(
    memory: Membership,
) -> None:
    """Workers count in a thread of their own, beside calls that end the last views."""
    (block,) = memory.make_all([N])
    (file,) = FILES._files.values()
    assert file.held_nbytes == N
    block.free()
    del block
    gc.collect()
    assert FILES.nbytes() == file.held_nbytes == 0


def test_a_block_is_a_zeroed_file_of_its_own(memory: Membership) -> None:
    block, other = memory.make_all([N, 1])
    assert block.nbytes == block.buffer.nbytes == N
    assert block.buffer.dtype == np.uint8
    assert block.buffer.flags.writeable
    assert not block.buffer.any()
    assert block.buffer.ctypes.data % 4096 == 0
    status = os.stat(Path(memory.path, block.name))
    assert (status.st_size, status.st_mode & 0o7777) == (N, 0o600)
    # Allocated, not sparse: a later write cannot fail.
    assert status.st_blocks * 512 >= N
    assert (FILES.nbytes(), FILES.nbytes(owned=True)) == (N + 1, N + 1)
    assert 0 <= block.nonce < 2**63
    assert block.nonce != other.nonce
    for each in (block, other):
        each.free()
        each.free()
    assert memory.names() == []
    with pytest.raises(IllegalStateError, match="given back"):
        _ = block.buffer


def test_views_outlive_their_block(memory: Membership) -> None:
    block = memory.make(N)
    view = block.buffer[64:128].view("f4")
    block.free()
    del block
    assert memory.names() == []
    view[:] = 3
    assert view.sum() == 48
    assert FILES.nbytes(owned=True) == N
    del view
    assert FILES.nbytes(owned=True) == 0


def test_many_blocks_leave_nothing(tmp_path: Path, memory: Membership) -> None:
    before = left(tmp_path)
    blocks = [memory.make(N) for _ in range(200)]
    assert len(left(tmp_path)[1]) == 200
    for block in blocks:
        block.buffer[:] = 1
        block.free()
    del block, blocks
    assert left(tmp_path) == before


def fail_at(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the n-th block find the directory full."""
    calls = iter(range(1, 100))
    allocate = os.posix_fallocate

    def limited(fd: int, offset: int, nbytes: int) -> None:
        if next(calls) >= n:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", limited)


def test_a_full_directory_gives_private_memory(
    tmp_path: Path,
    memory: Membership,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(warnings, "_said", set())
    # A cluster that silences its logs has raised the level of pytest's handler.
    caplog.set_level(logging.WARNING)
    before = left(tmp_path)
    fail_at(3, monkeypatch)
    for _ in range(2):
        assert memory.make_all([N, N, N, N]) == []
        assert left(tmp_path) == before
        assert FILES.nbytes() == 0
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "No space left" in record.getMessage()
    assert f"no room for {4 * N:,} bytes" in record.getMessage()


def held(block: Block) -> int:
    return os.fstat(block.file.fd).st_blocks * 512


def test_some_pages_may_come_later(memory: Membership) -> None:
    (block,) = memory.make_all([(4 * N, [(0, 3 * N)])], [[(4096, 2 * 4096)]])
    before = held(block)
    block.buffer[:4096] = 1
    assert (held(block), block.later) == (before, [(4096, 2 * 4096)])
    block.take_later()
    assert (held(block), block.later) == (before + 4096, [])
    assert not block.buffer[4096 : 3 * N].any()
    block.take_later()
    block.free()


def test_pages_that_come_later_and_cannot(
    memory: Membership,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    block = memory.make(N, later=[(4096, 2 * 4096)])
    with monkeypatch.context() as patch:
        fail_at(1, patch)
        with pytest.raises(LayoutError, match=r"no 4,096 bytes .* No space left"):
            block.take_later()
    assert block.later
    # Whoever lets the store go meanwhile does not wait for it.
    block.free()
    block.take_later()
    assert block.later
    # Not even begun where there is no room for all of it: private memory is had then.
    monkeypatch.setattr(warnings, "_said", set())
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(**room(10)))
    assert memory.make_all([N, N], [[], []]) == []
    assert f"no room for {2 * N:,} bytes" in caplog.text
    # A limit that is none.
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(**room(0)))
    (block,) = memory.make_all([N], [[]])
    block.free()


def room(blocks: int) -> dict[str, int]:
    """What a filesystem says of itself, of which less than two blocks are free."""
    return {"f_blocks": blocks, "f_bavail": blocks // 10, "f_frsize": N}


def test_a_base_that_is_not_there_gives_private_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warnings, "_said", set())
    # A cluster that silences its logs has raised the level of pytest's handler.
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        with dask.config.set({"daskps.shared-memory-directory": f"{tmp_path}/nowhere"}):
            assert HERE.join("a") is None
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith(f"no shared memory in {tmp_path}/nowhere: ")
    assert said.count("no shared memory") == 1


def user(pipe: Connection, base: Path, block: Block) -> None:
    """Attach in another process, add one, and stay."""
    registry = Membership.visit(base, "a")
    own = registry.attach(block.address)
    pipe.send((int(own.buffer[200]), FILES.nbytes(), FILES.nbytes(owned=True)))
    pipe.recv()
    own.buffer[200] += 1
    own.free()
    pipe.send(None)


def test_another_process_sees_the_same_memory(
    tmp_path: Path, memory: Membership
) -> None:
    block = memory.make(N)
    block.stamp()
    block.buffer[200] = 7
    # The child has the parent's mapping, too; it is the same file.
    with child(user, tmp_path, block) as other:
        assert other.receive() == (7, N, 0)
        block.buffer[200] = 9
        other.send()
        other.receive()
        assert block.buffer[200] == 10
        assert other.end() == 0
    block.free()


def test_one_descriptor_for_all_of_a_process(
    tmp_path: Path, memory: Membership
) -> None:
    block = memory.make(N)
    block.stamp()
    files = left(tmp_path)
    again = memory.attach(block.address)
    assert left(tmp_path) == files
    assert again.file is block.file
    again.buffer[300] = 5
    assert block.buffer[300] == 5
    again.free()
    # Who attached removes nothing.
    assert memory.names() == [block.name]
    block.free()


def set_word(at: int, value: int) -> Callable[[Path, Block], None]:
    def change(path: Path, block: Block) -> None:
        block.buffer[:128].view(np.int64)[at] = value

    return change


def replace(path: Path, block: Block) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    path.chmod(0o640)


def link(path: Path, block: Block) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_word(NONCE, 5), "not the segment that was meant"),
        (set_word(MAGIC_AT, 5), "not the segment that was meant"),
        (set_word(FORMAT_AT, 77), "not the segment that was meant"),
        (lambda path, block: os.truncate(path, N + 1), f"{N + 1} bytes, not {N}"),
        (lambda path, block: path.chmod(0o644), "mode 644"),
        (lambda path, block: path.unlink(), "No such file"),
        (replace, "mode 640"),
        (link, "not this user's own file"),
    ],
)
def test_what_is_not_the_segment_is_refused(
    memory: Membership, change: Callable[..., None], reason: str
) -> None:
    block = memory.make(N)
    block.stamp()
    change(Path(memory.path, block.name), block)

    def stranger(pipe: Connection) -> None:
        own = Membership.visit(Path(memory.path).parent, "a")
        before = FILES.nbytes(), len(os.listdir("/proc/self/fd"))
        with pytest.raises(CarrierClosed, match=reason):
            own.attach(block.address)
        assert (FILES.nbytes(), len(os.listdir("/proc/self/fd"))) == before

    for refused in (stranger, lambda pipe: in_new_process(stranger, pipe)):
        with child(refused) as other:
            assert other.end() == 0
    block.free()


def in_new_process(function: Callable[..., None], pipe: Connection) -> None:
    """As one that has not inherited any mapping."""
    FILES._files.clear()
    function(pipe)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "registry",
        "../x",
        "a/b",
        "0" * 16 + "-" + "0" * 15,
        "G" * 16 + "-" + "0" * 16,
    ],
)
def test_other_names_are_refused(memory: Membership, name: str) -> None:
    with pytest.raises(CarrierClosed, match="no name of shared memory"):
        memory.attach(BlockAddress(name, N, 0))


def test_files_of_another_user_are_refused(
    memory: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = memory.make(N)
    block.stamp()
    uid = os.getuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: uid + 1)
        with pytest.raises(CarrierClosed, match=f"user {uid}, mode 600"):
            memory.attach(block.address)
    block.free()


def owner(pipe: Connection, base: Path) -> None:
    block = Membership.join(base, "a").make(N)
    block.stamp()
    block.buffer[200] = 42
    pipe.send((block.name, block.nonce))
    pipe.recv()


def test_adoption_of_what_a_dead_process_left(
    memory: Membership, tmp_path: Path
) -> None:
    with child(owner, tmp_path) as other:
        name, nonce = other.receive()
        seen = memory.attach(BlockAddress(name, N, nonce))
        with pytest.raises(CarrierClosed, match="an owner that lives"):
            memory.take_over(BlockAddress(name, N, nonce))
        other.kill()
    assert FILES.nbytes(owned=True) == 0
    block = memory.take_over(BlockAddress(name, N, nonce))
    assert (block.buffer[200], block.nonce, FILES.nbytes(owned=True)) == (42, nonce, N)
    # Ours: nobody sweeps it, nobody else adopts it, old views stay.
    assert memory.names() == [block.name]
    assert memory.orphans() == []
    with pytest.raises(CarrierClosed, match="No such file"):
        memory.take_over(BlockAddress(name, N, nonce))
    block.buffer[200] = 43
    assert seen.buffer[200] == 43
    seen.free()
    block.free()
    assert memory.names() == []


def test_what_the_dead_left_outlasts_the_last_one_to_close(tmp_path: Path) -> None:
    """One that comes can adopt it, as after the death of all."""
    last = Membership.join(tmp_path, "a")
    with child(owner, tmp_path) as other:
        name, nonce = other.receive()
        other.kill()
    assert last.leave(keeps=True) == []
    heir = Membership.join(tmp_path, "a")
    block = heir.take_over(BlockAddress(name, N, nonce))
    assert block.buffer[200] == 42
    assert heir.leave() == [block.name]
    assert not os.listdir(tmp_path)


def adopter(pipe: Connection, base: Path, name: str, nonce: int) -> None:
    pipe.send(Membership.join(base, "a").take_over(BlockAddress(name, N, nonce)).name)
    pipe.recv()


def test_what_an_adopter_has_renamed_is_found_again(
    memory: Membership, tmp_path: Path
) -> None:
    """It died before it could say so, and the directory knows the old name."""
    others = memory.make_all([N, 2 * N])
    others[0].stamp()
    with child(owner, tmp_path) as one:
        name, nonce = one.receive()
        assert memory.find(BlockAddress(name, N, nonce)).name == name
        one.kill()
    with child(adopter, tmp_path, name, nonce) as two:
        new = two.receive()
        two.kill()
    assert memory.find(BlockAddress(name, N, nonce)).name == new != name
    assert memory.find(BlockAddress(name, 2 * N, nonce)).name == name
    assert memory.find(BlockAddress(name, N, nonce + 1)).name == name
    block = memory.take_over(BlockAddress(new, N, nonce))
    assert block.buffer[200] == 42
    for taken in (block, *others):
        taken.free()


def test_a_forked_child_removes_nothing(memory: Membership) -> None:
    block, spare = memory.make_all([N, N])

    def forked(pipe: Connection) -> None:
        assert (FILES.nbytes(), FILES.nbytes(owned=True)) == (2 * N, 0)
        block.buffer[5] = 6
        block.free()
        memory.leave()

    with child(forked) as other:
        assert other.end() == 0
    assert sorted(memory.names()) == sorted([block.name, spare.name])
    assert block.buffer[5] == 6
    assert memory.lives(memory.owner)
    block.free()
    spare.free()


def test_what_was_not_freed_goes_with_the_last_leave(tmp_path: Path) -> None:
    one, two = Membership.join(tmp_path, "a"), Membership.join(tmp_path, "a")
    block, other = one.make(N), two.make(N)
    one.leave()
    with pytest.raises(CarrierClosed, match="no member"):
        one.make(N)
    # The membership it came from was left, this process is still there.
    block.free()
    assert two.names() == [other.name]
    two.leave()
    other.free()
    assert not os.listdir(tmp_path)


def test_threads_attach_and_let_go(memory: Membership) -> None:
    block = memory.make(N)
    block.stamp()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(200):
                own = memory.attach(block.address)
                memory.make(64).free()
                own.free()
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert (FILES.nbytes(), FILES.nbytes(owned=True)) == (N, N)
    assert memory.names() == [block.name]
    block.free()


def test_a_member_that_exits_removes_its_blocks(tmp_path: Path) -> None:
    def exits(pipe: Connection) -> None:
        registry = Membership.join(tmp_path, "a")
        registry.make(N)
        assert len(registry.names()) == 1
        # As the interpreter does when it ends.
        registries._leave_all()

    with child(exits) as other:
        assert other.end() == 0
    assert not os.listdir(tmp_path)
