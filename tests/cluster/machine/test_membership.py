"""Who shares memory on a machine, and who cleans up."""

from __future__ import annotations

import gc
import os
import resource
import stat
import threading
import weakref
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import pytest

from daskps.cluster.machine import folder, sweeping
from daskps.cluster.machine import registry as module
from daskps.cluster.machine.blocks import (
    SPARED_DESCRIPTORS,
    BlockAddress,
    owner_of,
)
from daskps.cluster.machine.folder import CarrierClosed, Inode, folder_of
from daskps.cluster.machine.membership import HERE, Membership
from daskps.cluster.machine.processes import pid_of
from daskps.cluster.machine.registry import Role
from daskps.cluster.machine.sweeping import LEAST_SECONDS, sweep, sweep_abandoned
from tests.cluster.forks import child, left
from tests.seams import registry_of
from tests.support import until

NOFILE = resource.RLIMIT_NOFILE


def make_file(registry: Membership) -> str:
    name = registry.new_name()
    Path(registry.path, name).touch(0o600)
    return name


def member(
    pipe: Connection, base: Path, cluster_id: str = "a", n_files: int = 1
) -> None:
    """Join, make files, and stay until told to go."""
    registry = Membership.join(base, cluster_id)
    pipe.send((registry.owner, [make_file(registry) for _ in range(n_files)]))
    pipe.recv()
    registry.leave()


def maker(pipe: Connection, base: Path) -> None:
    """Join, make a block, and stay until told to go."""
    registry = Membership.join(base, "a")
    block = registry.make(4096)
    pipe.send(tuple(block.address))
    pipe.recv()
    block.free()
    registry.leave()


def test_the_last_leave_removes_everything(tmp_path: Path) -> None:
    before = left(tmp_path)
    outer, inner = Membership.join(tmp_path, "a"), Membership.join(tmp_path, "a")
    assert outer.owner == inner.owner
    assert stat.S_IMODE(os.stat(outer.path).st_mode) == 0o700
    assert Path(outer.path).name.startswith(f"daskps-{os.getuid()}-")
    name = make_file(outer)
    assert outer.names() == [name]
    inner.leave()
    inner.leave()
    assert outer.names() == [name]
    outer.leave()
    assert left(tmp_path) == before
    with pytest.raises(CarrierClosed, match="no member"):
        outer.names()


def test_clusters_of_one_user_are_apart(tmp_path: Path) -> None:
    a, b = Membership.join(tmp_path, "a"), Membership.join(tmp_path, "b")
    name = make_file(b)
    a.leave()
    assert os.listdir(tmp_path) == [Path(b.path).name]
    assert b.names() == [name]
    b.leave()


def test_who_lives(tmp_path: Path) -> None:
    here = Membership.join(tmp_path, "a")
    assert here.lives(here.owner)
    assert not here.lives(here.owner + (1 << 22))
    with child(member, tmp_path) as other:
        owner, (name,) = other.receive()
        assert pid_of(owner) == other.pid
        assert owner_of(name) == owner
        assert here.lives(owner)
        other.kill()
        assert not here.lives(owner)
    here.leave()
    # Its descriptor may be another file's by now.
    with pytest.raises(CarrierClosed, match="it has left"):
        here.lives(owner)


def test_blocks_leave_descriptors_to_the_rest_of_the_process(tmp_path: Path) -> None:
    """Neither a new block nor the memory of another process takes one of the last."""
    here, before = Membership.join(tmp_path, "a"), resource.getrlimit(NOFILE)
    with child(maker, tmp_path) as other, ExitStack() as opened:
        address = BlockAddress(*other.receive())
        resource.setrlimit(NOFILE, (len(os.listdir("/proc/self/fd")) + 90, before[1]))
        opened.callback(resource.setrlimit, NOFILE, before)
        while blocks := here.make_all([4096]):
            opened.callback(blocks[0].free)
        for _ in range(SPARED_DESCRIPTORS - 8):
            opened.enter_context(Path(os.devnull).open())
        with pytest.raises(CarrierClosed, match="Too many open files"):
            here.attach(address)
        opened.close()
        here.map_block(address).free()
    here.leave()


def test_sweep_removes_what_the_dead_left(tmp_path: Path) -> None:
    here = Membership.join(tmp_path, "a")
    mine = make_file(here)
    Path(here.path, "stray").touch()
    with child(member, tmp_path) as one, child(member, tmp_path) as two:
        (_, theirs), (_, alive) = one.receive(), two.receive()
        assert here.orphans() == []
        one.kill()
        assert here.orphans() == theirs
        assert here.sweep([mine, *alive, "stray"]) == []
        assert here.sweep([mine, *theirs, *alive]) == theirs
        assert sorted(here.names()) == sorted([mine, *alive])
        two.send()
        assert two.end() == 0
    # Who leaves in order leaves the others what it has not freed.
    assert sorted(here.names()) == sorted([mine, *alive])
    assert here.orphans() == alive
    assert sorted(here.leave()) == sorted([mine, *alive, "stray"])
    assert not os.listdir(tmp_path)


def test_a_visitor_makes_nothing_and_removes_nothing(tmp_path: Path) -> None:
    with pytest.raises(CarrierClosed, match="No such file"):
        Membership.visit(tmp_path, "a")
    assert not os.listdir(tmp_path)
    with child(member, tmp_path) as other:
        _, names = other.receive()
        guest = Membership.visit(tmp_path, "a")
        assert guest.names() == names
        other.kill()
        # It has no place among the members for what it took.
        with pytest.raises(CarrierClosed, match="leaving"):
            guest.rename(names[0])
        guest.leave()
    # Somebody may come and adopt it.
    here = Membership.join(tmp_path, "a")
    assert here.names() == names
    here.leave()
    assert not os.listdir(tmp_path)


def test_a_directory_goes_with_its_members_whoever_visits(tmp_path: Path) -> None:
    with child(member, tmp_path) as other, child(member, tmp_path) as crashed:
        owner, _ = other.receive()
        crashed.receive()
        guest = Membership.visit(tmp_path, "a")
        crashed.kill()
        other.send()
        assert other.end() == 0
    assert not os.listdir(tmp_path)
    assert not guest.lives(owner)
    guest.leave()


def test_a_visitor_becomes_a_member_and_a_visitor_again(tmp_path: Path) -> None:
    with child(member, tmp_path) as other:
        other.receive()
        guest, here = Membership.visit(tmp_path, "a"), Membership.join(tmp_path, "a")
        other.send()
        assert other.end() == 0
        assert len(os.listdir(tmp_path)) == 1
        here.leave()
        assert not os.listdir(tmp_path)
        guest.leave()


def test_what_a_crashed_cluster_left_goes_when_the_next_begins(tmp_path: Path) -> None:
    with child(member, tmp_path, "a", 3) as crashed:
        crashed.receive()
        with child(member, tmp_path, "b") as alive:
            alive.receive()
            with child(keeper, tmp_path, "a") as scheduler:
                scheduler.receive()
                crashed.kill()
                # Its workers may come back.
                assert not sweep_abandoned(tmp_path, seconds=0).removed
            assert len(os.listdir(tmp_path)) == 2
            with dask.config.set({"daskps.shared-memory-directory": str(tmp_path)}):
                memory = HERE.join("c")
            assert memory is not None
            found = {Path(folder_of(tmp_path, "c")), Path(folder_of(tmp_path, "b"))}
            assert set(tmp_path.iterdir()) == found
            # And a directory that was just made, or half removed.
            Path(folder_of(tmp_path, "d")).mkdir(0o700)
            assert sweep_abandoned(tmp_path).removed == [folder_of(tmp_path, "d")]
            alive.send()
            assert alive.end() == 0
    memory.leave()
    assert not os.listdir(tmp_path)


def keeper(pipe: Connection, base: Path, cluster_id: str) -> None:
    """Keep a folder until told to go, as a scheduler does."""
    kept = Membership.keep(base, cluster_id)
    pipe.send(None)
    pipe.recv()
    kept.leave()


def test_workers_without_a_scheduler_here_may_be_away_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, path = [1000.0], Path(folder_of(tmp_path, "a"))
    monkeypatch.setattr(
        folder, "time", SimpleNamespace(monotonic_ns=lambda: int(now[0] * 1e9))
    )

    def sweep_after(seconds: float) -> tuple[bool, bool]:
        now[0] += seconds
        found = sweep_abandoned(tmp_path)
        return found.removed == [str(path)], found.waits

    with child(member, tmp_path) as worker:
        worker.receive()
        assert sweep_after(0) == (False, False)
        assert sweep_after(10 * LEAST_SECONDS) == (False, False)
    assert sweep_after(10 * LEAST_SECONDS) == (False, True)
    assert sweep_after(LEAST_SECONDS - 1) == (False, True)
    # Whoever comes back begins that anew.
    with child(member, tmp_path) as worker:
        worker.receive()
        assert sweep_after(LEAST_SECONDS) == (False, False)
    assert sweep_after(0) == (False, True)
    # So does a start of the machine.
    now[0] = 10.0
    assert sweep_after(0) == (False, True)
    assert sweep_after(LEAST_SECONDS - 1) == (False, True)
    assert len(list(path.iterdir())) == 3
    with dask.config.set({"daskps.lost-after": "40s"}):
        assert sweep_after(2) == (False, True)
        assert sweep_after(20) == (True, False)
    assert not os.listdir(tmp_path)


def test_what_waits_goes_though_no_other_cluster_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "LEAST_SECONDS", 0.01)
    with child(member, tmp_path) as crashed:
        crashed.receive()
    conf = {"daskps.shared-memory-directory": str(tmp_path), "daskps.lost-after": "1ms"}
    with dask.config.set(conf):
        memory = HERE.join("c")
        assert memory is not None
        until(lambda: os.listdir(tmp_path) == [Path(memory.path).name])
    memory.leave()


def test_a_keeper_leaves_the_folder_to_its_members(tmp_path: Path) -> None:
    with pytest.raises(CarrierClosed, match="No such file"):
        Membership.keep(tmp_path, "a")
    with child(member, tmp_path) as worker:
        worker.receive()
        kept, again = Membership.keep(tmp_path, "a"), Membership.keep(tmp_path, "a")
        kept.leave()
        worker.kill()
        with child(sweeps, tmp_path) as other:
            assert other.receive() == []
        again.leave()
        with child(sweeps, tmp_path) as other:
            assert other.receive() == [folder_of(tmp_path, "a")]
    with child(member, tmp_path) as worker:
        worker.receive()
        kept = Membership.keep(tmp_path, "a")
        worker.send()
        assert worker.end() == 0
    assert not os.listdir(tmp_path)
    kept.leave()


def sweeps(pipe: Connection, base: Path) -> None:
    pipe.send(sweep_abandoned(base).removed)


def test_unsafe_directories_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before = Path(folder_of(tmp_path, "a")), left(tmp_path)[2]
    path.mkdir(0o755)
    with pytest.raises(CarrierClosed, match="mode 755"):
        Membership.join(tmp_path, "a")
    path.rmdir()
    (tmp_path / "elsewhere").mkdir(0o700)
    path.symlink_to(tmp_path / "elsewhere")
    for enter in (Membership.join, Membership.visit):
        with pytest.raises(CarrierClosed):
            enter(tmp_path, "a")
    path.unlink()
    path.touch(0o700)
    with pytest.raises(CarrierClosed, match="no directory"):
        Membership.join(tmp_path, "a")
    path.unlink()
    path.mkdir(0o700)
    (path / "registry").touch(0o644)
    with pytest.raises(CarrierClosed, match="mode 644"):
        Membership.join(tmp_path, "a")
    # Whoever the files belong to, this user is another one.
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    path.rename(folder_of(tmp_path, "a"))
    with pytest.raises(CarrierClosed, match=f"belongs to user {uid} "):
        Membership.join(tmp_path, "a")
    assert not sweep_abandoned(tmp_path, seconds=0).removed
    assert left(tmp_path)[2] == before


def test_a_base_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CarrierClosed, match=r"no shared memory in .*/nowhere"):
        Membership.join(tmp_path / "nowhere", "a")


def test_a_forked_child_is_no_member(tmp_path: Path) -> None:
    here = Membership.join(tmp_path, "a")

    def forked(pipe: Connection) -> None:
        assert not here.is_open
        with pytest.raises(CarrierClosed, match="forked"):
            here.new_name()
        here.leave()
        own = Membership.join(tmp_path, "a")
        pipe.send((own.owner, own.lives(registry_of(here).owner)))
        own.leave()

    with child(forked) as other:
        owner, parent_lives = other.receive()
        assert other.end() == 0
    assert owner != here.owner
    assert parent_lives
    assert here.names() == []
    with child(member, tmp_path) as other:
        other.receive()
    here.leave()
    # Once more, as the last one was killed.
    sweep_abandoned(tmp_path, seconds=0)
    assert not os.listdir(tmp_path)


def test_joining_keeps_the_locks_of_a_process(tmp_path: Path) -> None:
    """Closing any descriptor of the registry would drop all of them."""
    here = Membership.join(tmp_path, "a")
    (tmp_path / "same").symlink_to(tmp_path)
    Membership.visit(tmp_path / "same", "a").leave()
    sweep_abandoned(tmp_path / "same", seconds=0)
    Membership.join(tmp_path / "same", "a").leave()

    with child(lives_here, tmp_path, here.owner) as other:
        assert other.receive()
    here.leave()


def test_joining_while_the_last_one_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was opened just before it lost its name is no place to be."""
    with child(member, tmp_path) as last:
        last.receive()
        check = folder.check_file

        def leaves_meanwhile(*args: Any) -> None:
            check(*args)
            if last.is_running:
                last.send()
                assert last.end() == 0

        monkeypatch.setattr(module, "check_file", leaves_meanwhile)
        here = Membership.join(tmp_path, "a")
    with child(member, tmp_path) as other:
        owner, names = other.receive()
        assert here.lives(owner)
        assert here.names() == names
    here.leave()


def test_joining_by_a_registry_that_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when somebody else joins between the removal of file and directory."""
    path = Path(folder_of(tmp_path, "a"))
    times: list[int] = []
    check = folder.check_file

    def replaces(*args: Any) -> None:
        check(*args)
        if not times:
            times.append(1)
            (path / "registry").unlink()
            (path / "registry").touch(0o600)

    monkeypatch.setattr(module, "check_file", replaces)
    here = Membership.join(tmp_path, "a")
    with child(member, tmp_path) as other:
        owner, _ = other.receive()
        assert here.lives(owner)
        other.send()
        assert other.end() == 0
    here.leave()


def clears(pipe: Connection, base: Path) -> None:
    """Remove a directory, and stop between its last file and itself."""
    rmdir = os.rmdir

    def stops(path: str) -> None:
        pipe.send("no file is left")
        pipe.recv()
        rmdir(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rmdir", stops)
        sweep(folder_of(base, "a"), 0)
    pipe.send("done")


def test_a_visitor_of_a_registry_that_was_replaced(tmp_path: Path) -> None:
    """Somebody joins in the same directory just before it would have gone."""
    with child(member, tmp_path) as first:
        first.receive()
        guest = Membership.visit(tmp_path, "a")
        first.kill()
    with child(clears, tmp_path) as remover:
        remover.receive()
        with child(member, tmp_path) as second:
            owner, _ = second.receive()
            remover.send()
            assert remover.receive() == "done"
            here, other = (
                Membership.join(tmp_path, "a"),
                Membership.visit(tmp_path, "a"),
            )
            guest.leave()
            assert here.lives(owner)
            assert other.lives(owner)
            with child(lives_here, tmp_path, here.owner) as asking:
                assert asking.receive()
    other.leave()
    here.leave()
    assert not os.listdir(tmp_path)


def lives_here(pipe: Connection, base: Path, owner: int) -> None:
    pipe.send(Membership.visit(base, "a").lives(owner))


def test_the_last_two_leave_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Membership.join(tmp_path, "a")
    with child(member, tmp_path) as other:
        other.receive()
        remove = folder.remove_without_members

        def other_follows(*args: Any) -> list[str] | None:
            removed = remove(*args)
            if other.is_running:
                other.send()
                assert other.end() == 0
            return removed

        monkeypatch.setattr(module, "remove_without_members", other_follows)
        here.leave()
    assert not os.listdir(tmp_path)


class Guest:
    """A visitor that only the garbage collector ends, as a mapped in a cycle."""

    def __init__(self, base: Path) -> None:
        registry = Membership.visit(base, "a")
        weakref.finalize(self, registry.leave)
        self.itself = self


def test_a_visitor_is_collected_while_somebody_enters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = left(tmp_path)
    here = Membership.join(tmp_path, "a")
    inode_of, guests = folder.inode_of, list[Membership]()

    def collects(fd: int) -> Inode:
        gc.collect()
        return inode_of(fd)

    gc.disable()
    try:
        Guest(tmp_path)
        assert registry_of(here).n[Role.VISITOR] == 1
        monkeypatch.setattr(module, "inode_of", collects)
        # A thread, so that a deadlock ends this test and not the session.
        thread = threading.Thread(
            target=lambda: guests.append(Membership.visit(tmp_path, "a")), daemon=True
        )
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
    finally:
        gc.enable()
    # The one who entered is there, and the one that was collected is not.
    assert registry_of(here).n[Role.VISITOR] == 1
    guests.pop().leave()
    here.leave()
    assert left(tmp_path) == before


def comes_and_goes(pipe: Connection, base: Path, times: int) -> None:
    for _ in range(times):
        registry = Membership.join(base, "a")
        name = make_file(registry)
        assert name in registry.names()
        assert registry.lives(registry.owner)
        registry.leave()
    pipe.send(times)


def test_joining_while_others_remove_the_directory(tmp_path: Path) -> None:
    with (
        child(comes_and_goes, tmp_path, 300) as one,
        child(comes_and_goes, tmp_path, 300) as two,
    ):
        assert (one.receive(), two.receive()) == (300, 300)
        assert (one.end(), two.end()) == (0, 0)
    assert not os.listdir(tmp_path)
