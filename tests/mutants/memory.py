"""A segment, what is published in it and what is taken back."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "flip-before-the-bytes",
        "daskps.shards.memory.publication:Publication.commit",
        "segment, changed = self.segment, self._operations",
        "(segment := self.segment).flip, changed = self.flip, self._operations",
        (
            "tests/shards/test_shard.py::test_an_update_that_dies_half_way_is_never_seen",
        ),
    ),
    Mutant(
        "bytes-before-the-writing-word",
        "daskps.shards.memory.publication:Publication._begin",
        "header[WRITING] = self.flip",
        "pass",
        (
            "tests/shards/test_shard.py"
            "::test_a_copy_is_good_while_one_publication_is_under_way",
        ),
    ),
    Mutant(
        "copy-that-a-writer-ran-into-is-good",
        "daskps.shards.reader:ShardReader.read_at",
        "return header[WRITING] <= flip + 1 and header[FLIP] >= flip",
        "return header[WRITING] <= flip + 2 and header[FLIP] >= flip",
        (
            "tests/shards/test_shard.py"
            "::test_a_copy_is_good_while_one_publication_is_under_way",
        ),
    ),
    Mutant(
        "buffer-in-force-is-written",
        "daskps.shards.memory.publication:Publication._move",
        "into = 1 - self.old.weight_sides[position]",
        "into = self.old.weight_sides[position]",
        (
            "tests/shards/test_shard.py::test_an_update_that_dies_half_way_is_never_seen",
        ),
    ),
    Mutant(
        "record-does-not-say-where",
        "daskps.shards.memory.publication:Publication._move",
        "self.record.weight_sides[position] = into",
        "pass",
        (
            "tests/shards/memory/test_publication.py"
            "::test_pieces_that_a_publication_leaves_alone_are_not_stale",
        ),
    ),
    Mutant(
        "taken-along-without-a-copy",
        "daskps.shards.memory.publication:Publication._take_along",
        "self.segment.payload.copy(then[dtype], weights)",
        "pass",
        (
            "tests/shards/memory/test_publication.py"
            "::test_pieces_that_a_publication_leaves_alone_are_not_stale",
        ),
    ),
    Mutant(
        "both-buffers-taken-for-one",
        "daskps.shards.memory.publication:Publication.commit",
        "self.record.plain[SIDE] = self.record.side",
        "self.record.plain[SIDE] = self.flip & 1",
        (
            "tests/shards/memory/test_publication.py"
            "::test_what_a_publication_leaves_alone_stays_in_its_buffer",
        ),
    ),
    Mutant(
        "run-begins-with-another-piece",
        "daskps.shards.memory.publication:Publication.gather_weights",
        "self.segment.payload.copy(*pair)",
        "pass",
        (
            "tests/shards/memory/test_publication.py"
            "::test_a_run_begins_with_all_weights_in_one_buffer",
        ),
    ),
    Mutant(
        "pieces-read-from-the-buffer-of-the-first",
        "daskps.shards.reader:runs",
        "while i < n and starts[i] < stop and sides[positions[i]] == side:",
        "while i < n and starts[i] < stop:",
        (
            "tests/shards/memory/test_publication.py::test_a_part_of_a_vector_is_read_in_few_copies",
        ),
    ),
    Mutant(
        "durable-slots-in-place",
        "daskps.shards.memory.publication:Publication._slots",
        "if segment.n_sides == 1 or not slots or new[position] != old[position]:",
        "if segment.n_sides >= 1 or not slots or new[position] != old[position]:",
        (
            "tests/shards/memory/test_publication.py::test_durable_slots_in_force_are_not_written",
        ),
    ),
    Mutant(
        "withdrawn-round-comes-back",
        "daskps.shards.memory.publication:Withdrawal._begin",
        "self.record.take_producers(self.old)",
        "self.record.copy_from(self.old)",
        (
            "tests/shards/memory/test_withdrawal.py"
            "::test_each_publication_after_a_withdrawal_is_without_the_round",
        ),
    ),
    Mutant(
        "withdrawal-that-nobody-can-finish",
        "daskps.shards.memory.publication:Withdrawal._begin",
        "segment.withdraws = flip",
        "pass",
        (
            "tests/shards/memory/test_withdrawal.py"
            "::test_withdrawal_killed_after_any_store_is_done_again",
        ),
    ),
    Mutant(
        "withdrawal-forgets-producers",
        "daskps.shards.memory.publication:Withdrawal._begin",
        "self.record.take_producers(self.old)",
        "pass",
        (
            "tests/shards/memory/test_withdrawal.py"
            "::test_producer_that_ends_during_the_run_stays_ended",
        ),
    ),
    Mutant(
        "withdrawal-of-no-round",
        "daskps.shards.run_state:ShardRun.end",
        "if back not in (0, 1) or (back and not is_possible(self._segment)):",
        "if back not in (0, 1):",
        (
            "tests/shards/memory/test_withdrawal.py::test_no_further_back_than_one_round",
        ),
    ),
    Mutant(
        "one-version-for-two-states",
        "daskps.shards.run_state:ShardRun._publish_end",
        "least = publication.old.version + back",
        "least = publication.old.version",
        (
            "tests/shards/memory/test_withdrawal.py::test_each_publication_after_a_withdrawal_is_without_the_round",
        ),
    ),
    Mutant(
        "memory-of-something-else-is-taken",
        "daskps.shards.memory.format:Identity.is_in",
        "if magic and found[1:] != (n, self.n_sides):",
        "if magic and found[1:2] != (n,):",
        (
            "tests/shards/memory/test_segment.py"
            "::test_memory_that_holds_something_else_is_refused_and_left_alone",
        ),
    ),
    Mutant(
        "fence-of-a-run-that-is-over",
        "daskps.shards.memory.segment:Segment.limit",
        "return header[LIMIT] if run and abs(header[FENCED]) == run else None",
        "return header[LIMIT] if run and header[FENCED] else None",
        (
            "tests/shards/test_deputy.py"
            "::test_fence_hands_deputies_steps_back_until_the_next_run",
        ),
    ),
    Mutant(
        "slots-in-place-taken-for-a-copy",
        "daskps.shards.memory.segment:Segment.copy",
        "return self.writing <= flip + kept",
        "return self.writing <= flip + 1",
        (
            "tests/shards/memory/test_segment.py"
            "::test_copy_that_an_update_ran_into_is_told",
        ),
    ),
)
