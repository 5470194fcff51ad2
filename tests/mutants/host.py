"""A worker's host: shards, adoption, leaving and copies of cuts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BUDGET = "tests/cluster/host/test_copy_budget.py"

MUTANTS = (
    Mutant(
        "former-owner-opens-the-gate",
        "daskps.cluster.host.hosted:HostedShard.release.let_go",
        "if shard.segment.words[GENERATION] == shard.generation:",
        "if shard.segment is not None:",
        (
            "tests/cluster/host/test_departure.py::test_a_shard_that_has_another_owner_is_left_alone",
        ),
    ),
    Mutant(
        "released-shard-serves-on",
        "daskps.cluster.host.hosted:HostedShard.enqueue.call",
        "if self._released is not None:",
        "if self._released is None and self.shard is None:",
        (
            "tests/cluster/host/test_departure.py"
            "::test_a_released_shard_serves_nobody_until_it_is_adopted",
        ),
    ),
    Mutant(
        "released-shard-has-its-gate-open",
        "daskps.cluster.host.hosted:HostedShard.leave",
        "set_gate(self.shard.segment, RELEASED)",
        "pass",
        (
            "tests/cluster/host/test_departure.py"
            "::test_a_released_shard_serves_nobody_until_it_is_adopted",
        ),
    ),
    Mutant(
        "freed-shard-has-its-gate-open",
        "daskps.cluster.host.hosted:HostedShard.close",
        "set_gate(self.shard.segment, CLOSED)",
        "pass",
        (
            "tests/cluster/host/test_adoption.py::test_a_shard_that_is_taken_over_is_of_the_next_generation",
        ),
    ),
    Mutant(
        "push-before-a-control-call-is-lost",
        "daskps.cluster.host.hosted:HostedShard._serve_once",
        "done += self._submit(tickets)",
        "done += []",
        (
            "tests/cluster/host/test_inbox.py::test_what_came_before_a_control_call_is_applied_before_it",
        ),
    ),
    Mutant(
        "adopted-shard-keeps-its-generation",
        "daskps.cluster.host.adoption:_Adopter.take",
        "segment.words[GENERATION] = generation",
        "pass",
        (
            "tests/cluster/host/test_adoption.py::test_a_shard_that_is_taken_over_is_of_the_next_generation",
        ),
    ),
    Mutant(
        "heir-keeps-what-it-could-not-take",
        "daskps.cluster.host.adoption:_Adopter.take",
        "set_gate(segment, RELEASED)",
        "pass",
        (
            "tests/cluster/host/test_departure.py::test_a_shard_that_could_not_be_taken_over_is_released",
        ),
    ),
    Mutant(
        "freed-shard-is-adopted",
        "daskps.cluster.host.adoption:_Adopter.take",
        "if gate_of(segment) == CLOSED:",
        "if gate_of(segment) > RELEASED:",
        (
            "tests/cluster/host/test_adoption.py::test_a_shard_that_is_about_to_be_freed_is_left_alone",
        ),
    ),
    Mutant(
        "who-leaves-takes-shards",
        "daskps.cluster.host.adoption:adopt",
        'hosted.release(StoreClosedError("its worker has left at once"))',
        "pass",
        (
            "tests/cluster/host/test_adoption.py::test_who_closes_meanwhile_lets_go_of_what_it_has_taken",
        ),
    ),
    Mutant(
        "shards-of-a-freed-store-are-handed-over",
        "daskps.cluster.host.adoption:leave",
        "keys = [k for k in host.shards if wanted is None or k[0] in wanted]",
        "keys = [*host.shards]",
        (
            "tests/cluster/host/test_departure.py::test_nothing_is_handed_over_of_a_store_that_was_freed",
        ),
    ),
    Mutant(
        "late-word-of-an-attempt",
        "daskps.cluster.host.cuts:begin_cut",
        "if attempt < claim.attempt:",
        "if attempt > claim.attempt + 1000:",
        (
            "tests/cluster/caller/test_snapshots.py"
            "::test_a_late_word_of_an_attempt_leaves_the_next_one_alone",
        ),
    ),
    Mutant(
        "copy-that-outlived-its-cut",
        "daskps.cluster.host.cuts:_freeze",
        "if made is None or not is_held:",
        "if made is None:",
        (
            "tests/cluster/caller/test_snapshots.py::test_copy_that_outlives_its_cut_is_made_again",
        ),
    ),
    Mutant(
        "cut-that-was-given-up-holds-on",
        "daskps.cluster.host.snapshot_copies:Copies.claim",
        "if self.is_over(cut):",
        "if not cut:",
        (
            "tests/cluster/caller/test_snapshots.py::test_cut_given_up_while_it_begins_holds_nothing",
        ),
    ),
    Mutant(
        "round-that-is-complete-wakes-nobody",
        "daskps.cluster.host.hosted:HostedShard.try_step",
        "if version != ASK and shard.parked.tickets:",
        "if version == ASK and shard.parked.tickets:",
        (
            "tests/cluster/host/test_inbox.py"
            "::test_a_step_without_a_ticket_ends_the_wait_of_those_that_have_one",
        ),
    ),
    Mutant(
        "restores-without-digests",
        "daskps.checkpoint.reading:read_file",
        "check_content(content, file, of)",
        "pass",
        ("tests/cluster/test_saving.py::test_a_damaged_file_makes_no_store[any.rows]",),
    ),
    Mutant(
        "held-shards-that-went-on",
        "daskps.shards.frozen:HeldShard.get",
        "self.check()",
        "pass",
        (
            "tests/cluster/test_saving.py::test_a_held_shard_that_goes_on_fails_the_save",
        ),
    ),
    Mutant(
        "answers-overtake-who-waits",
        "daskps.cluster.host.copy_budget:CopyBudget.answer",
        "return None if self._waiting else self._try_answer(nbytes)",
        "return self._try_answer(nbytes)",
        (f"{BUDGET}::test_who_gives_up_lets_those_behind_go_on_that_need_less",),
    ),
    Mutant(
        "no-answer-where-nothing-fits",
        "daskps.cluster.host.copy_budget:CopyBudget._try_answer",
        "if self.nbytes and not fits:",
        "if not fits:",
        (f"{BUDGET}::test_one_answer_has_room_whatever_there_is",),
    ),
    Mutant(
        "promised-room-is-promised-twice",
        "daskps.cluster.host.copy_budget:CopyBudget._lack",
        "free = most - self._worker.measure() - self.nbytes",
        "free = most - self._worker.measure()",
        (f"{BUDGET}::test_what_was_promised_and_not_written_yet_counts",),
    ),
    Mutant(
        "silent-reader-keeps-its-answer",
        "daskps.cluster.connections:_taken",
        "comm.abort()",
        "pass",
        (
            "tests/cluster/test_room_for_copies.py::"
            "test_who_takes_nothing_of_an_answer_loses_its_connection[False]",
        ),
    ),
    Mutant(
        "no-room-for-copies",
        "daskps.cluster.host.copy_budget:CopyBudget._lack",
        "if nbytes <= free:",
        "if True:",
        (
            "tests/cluster/test_saving.py::test_where_no_copy_fits_pushes_wait_until_all_is_written",
        ),
    ),
)
