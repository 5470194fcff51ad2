"""Memory that processes of a machine share, its members and its locks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "last-holder-takes-every-turn",
        "daskps.cluster.machine.locks:FileLock.try_acquire",
        "if self._is_turn_of_other() and not self._has_passed:",
        "if self._is_turn_of_other() and self._has_passed:",
        (
            "tests/cluster/machine/test_locks.py::test_the_last_holder_passes_the_turn_on",
        ),
    ),
    Mutant(
        "forked-child-holds-the-lock",
        "daskps.cluster.machine.locks:FileLock._is_turn_of_other",
        "if self._me != THIS.number:",
        "if self._me is None:",
        ("tests/cluster/machine/test_locks.py::test_a_forked_child_is_refused",),
    ),
    Mutant(
        "processes-of-one-id-are-one",
        "daskps.cluster.machine.processes:are_one",
        "return not (number ^ other) & ~_COUNT",
        "return pid_of(number) == pid_of(other)",
        (
            "tests/cluster/machine/test_accounting.py::test_a_block_counts_for_its_owner_alone",
        ),
    ),
    Mutant(
        "threads-share-a-lock",
        "daskps.cluster.machine.locks:FileLock._try",
        "if not self._file.mutex.acquire(blocking=False):",
        "if not self._file.mutex.acquire(blocking=False) and self._file is None:",
        ("tests/cluster/machine/test_locks.py::test_one_thread_at_a_time",),
    ),
    Mutant(
        "memory-of-an-owner-that-lives",
        "daskps.cluster.machine.membership:Membership.take_over",
        "if not released and self.lives(owner_of(name)):",
        "if released and self.lives(owner_of(name)):",
        (
            "tests/cluster/machine/test_blocks.py::test_adoption_of_what_a_dead_process_left",
        ),
    ),
    Mutant(
        "memory-without-its-nonce",
        "daskps.cluster.machine.membership:Membership.attach",
        "if (found := block.proof) != (meant := block.meant):",
        "if (found := block.proof)[:2] != (meant := block.meant[:2]):",
        (
            "tests/cluster/machine/test_blocks.py::test_what_is_not_the_segment_is_refused",
        ),
    ),
    Mutant(
        "half-of-the-memory-stays",
        "daskps.cluster.machine.membership:Membership.make_all",
        "if len(made) < len(sizes):",
        "if len(made) > len(sizes):",
        (
            "tests/cluster/machine/test_blocks.py::test_a_full_directory_gives_private_memory",
        ),
    ),
    Mutant(
        "sparse-memory",
        "daskps.cluster.machine.blocks:allocate",
        "os.posix_fallocate(fd, start, stop - start)",
        "pass",
        (
            "tests/cluster/machine/test_blocks.py::test_a_full_directory_gives_private_memory",
        ),
    ),
    Mutant(
        "nobody-else-lives",
        "daskps.cluster.machine.membership:Membership.lives",
        "return owner == here.owner or not try_lock(here.fd, owner, fcntl.LOCK_SH)",
        "return owner == here.owner",
        ("tests/cluster/machine/test_membership.py::test_who_lives",),
    ),
    Mutant(
        "sweep-of-what-is-needed",
        "daskps.cluster.machine.membership:Membership.sweep",
        "return [n for n in self.orphans() if n in names and self.remove(n)]",
        "return [n for n in self.orphans() if self.remove(n)]",
        (
            "tests/cluster/machine/test_membership.py::test_sweep_removes_what_the_dead_left",
        ),
    ),
    Mutant(
        "memory-goes-with-the-first-who-leaves",
        "daskps.cluster.machine.folder:remove_without_members",
        "if not try_lock(fd, PRESENT_AT, fcntl.LOCK_EX, keep=True):",
        "if try_lock(fd, PRESENT_AT, fcntl.LOCK_EX, keep=True) is None:",
        (
            "tests/cluster/machine/test_membership.py::test_sweep_removes_what_the_dead_left",
        ),
    ),
    Mutant(
        "who-leaves-adopts",
        "daskps.cluster.machine.membership:Membership.rename",
        "if not self._here().n[Role.MEMBER]:",
        "if not self._here().is_open:",
        (
            "tests/cluster/machine/test_membership.py::test_a_visitor_makes_nothing_and_removes_nothing",
        ),
    ),
    Mutant(
        "views-are-mapped-for-all",
        "daskps.cluster.machine.mapping:_map",
        "access = mmap.ACCESS_COPY if private else mmap.ACCESS_DEFAULT",
        "access = mmap.ACCESS_DEFAULT",
        ("tests/cluster/test_views.py::test_what_a_process_writes_no_other_one_sees",),
    ),
    Mutant(
        "views-of-two-at-a-time",
        "daskps.cluster.machine.views:ViewFiles.take_turn",
        "if self.members and not self.members.take_turn(self._turn):",
        "if self.members and self.members.take_turn(self._turn) is None:",
        (
            "tests/cluster/test_views.py::test_a_worker_killed_while_it_copies_leaves_nothing",
        ),
    ),
    Mutant(
        "older-views-stay",
        "daskps.cluster.machine.views:Making.done",
        "self._files.drop(but=self._block.name)",
        "self._files.drop(but=self._block.name) if self._body is None else None",
        ("tests/cluster/test_views.py::test_a_view_never_shows_two_versions",),
    ),
    Mutant(
        "views-stay-with-workers",
        "daskps.cluster.directory.store_registry:Stores.free",
        "every = [*entry.owners, *entry.strays, *entry.viewers]",
        "every = [*entry.owners, *entry.strays]",
        ("tests/cluster/test_views.py::test_workers_without_shards_let_go_of_views",),
    ),
    Mutant(
        "file-that-others-may-open",
        "daskps.cluster.machine.folder:check_file",
        "if not regular or status.st_uid != os.getuid() or mode != 0o600:",
        "if not regular or status.st_uid != os.getuid():",
        (
            "tests/cluster/machine/test_blocks.py::test_what_is_not_the_segment_is_refused",
        ),
    ),
    Mutant(
        "memory-without-workers-goes-at-once",
        "daskps.cluster.machine.sweeping:sweep",
        "if not try_lock(fd, KEPT_AT, fcntl.LOCK_EX, keep=True):",
        "if try_lock(fd, KEPT_AT, fcntl.LOCK_EX, keep=True) is None:",
        (
            "tests/cluster/machine/test_membership.py::test_a_keeper_leaves_the_folder_to_its_members",
        ),
    ),
    Mutant(
        "who-comes-back-has-been-away-for-long",
        "daskps.cluster.machine.registry:Registry.add",
        "mark_joined(self.fd) if role is Role.MEMBER else mark_kept(self.fd)",
        "role is Role.MEMBER or mark_kept(self.fd)",
        (
            "tests/cluster/machine/test_membership.py::test_workers_without_a_scheduler_here_may_be_away_for_a_while",
        ),
    ),
)
