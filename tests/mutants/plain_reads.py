"""Reads that a lane answers without Python: what is torn, and what is no read."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ALONE = "tests/cluster/lane/test_alone.py"
PLAIN = "tests/cluster/lane/test_plain_reads.py"
ADDRESSED = "tests/shards/test_addressed.py"

MUTANTS = (
    Mutant(
        "torn-copy-is-an-answer",
        "daskps.shards.addressed:is_whole",
        "done = load(header + 8 * WRITING) <= flip + 1",
        "done = load(header + 8 * WRITING) <= flip + 2",
        (f"{ADDRESSED}::test_a_copy_that_updates_run_into_is_made_again",),
    ),
    Mutant(
        "copy-of-a-flip-to-come",
        "daskps.shards.addressed:is_whole",
        "return done and load(header + 8 * FLIP) >= flip",
        "return done",
        (f"{ADDRESSED}::test_a_copy_of_a_flip_that_came_back_is_none",),
    ),
    Mutant(
        "torn-answer-has-an-end",
        "daskps.cluster.lane.plain_answers:send_straight",
        "return push_out(fd, desk) if is_unhurt(desk, entry) else TORN",
        "return push_out(fd, desk)",
        (f"{PLAIN}::test_a_long_answer_that_updates_run_into_has_no_end",),
    ),
    Mutant(
        "nothing-of-an-answer-is-held-back",
        "daskps.cluster.lane.plain_answers:send_straight",
        "held = min(TAIL_NBYTES, nbytes) if is_last else 0",
        "held = 0",
        (f"{PLAIN}::test_a_long_answer_that_updates_run_into_has_no_end",),
    ),
    Mutant(
        "what-is-left-of-a-long-answer-is-begun-anew",
        "daskps.cluster.lane.plain_answers:keep_rest",
        "copy(to, at + nbytes - left, left)",
        "copy(to, at, left)",
        (f"{PLAIN}::test_what_is_not_taken_of_a_long_answer_is_copied",),
    ),
    Mutant(
        "long-answers-are-sent-while-others-push",
        "daskps.shards.addressed:look_straight",
        "return flip <= seen + 1 and milliseconds >= load(load(part + 8 * COPIED_AT))",
        "return milliseconds >= load(load(part + 8 * COPIED_AT))",
        (f"{PLAIN}::test_only_the_end_of_a_long_answer_is_copied",),
    ),
    Mutant(
        "torn-shard-is-sent-again-without-python",
        "daskps.shards.addressed:look_straight",
        "return flip <= seen + 1 and milliseconds >= load(load(part + 8 * COPIED_AT))",
        "return flip <= seen + 1",
        (f"{PLAIN}::test_a_long_answer_that_updates_run_into_has_no_end",),
    ),
    Mutant(
        "read-of-another-generation",
        "daskps.shards.addressed:find_flip",
        "if load(header + 8 * GENERATION) != load(part + 8 * GENERATION_OF):",
        "if load(header + 8 * GENERATION) < load(part + 8 * GENERATION_OF):",
        (f"{ADDRESSED}::test_outside_runs_a_shard_that_is_gone_is_asked",),
    ),
    Mutant(
        "read-of-a-shard-that-is-freed",
        "daskps.shards.addressed:find_flip",
        "if load(header + 8 * GATE) in (CLOSED, RELEASED):",
        "if load(header + 8 * GATE) == RELEASED:",
        (f"{ADDRESSED}::test_outside_runs_a_shard_that_is_gone_is_asked",),
    ),
    Mutant(
        "rank-beyond-its-run",
        "daskps.shards.addressed:find_flip",
        "if not 0 <= rank < load(record + 8 * N_RANKS):",
        "if not 0 <= rank:",
        (f"{ADDRESSED}::test_the_shard_says_whatever_else_there_is_to_say",),
    ),
    Mutant(
        "more-ranks-than-a-record-has",
        "daskps.shards.addressed:find_lag",
        "n_ranks = min(load(record + 8 * N_RANKS), MAX_RANKS)",
        "n_ranks = load(record + 8 * N_RANKS)",
        (
            f"{ADDRESSED}::test_words_of_a_record_that_is_being_written_lead_nowhere_else",
        ),
    ),
    Mutant(
        "side-that-there-is-none",
        "daskps.shards.addressed:copy_ranges",
        "if not 0 <= one <= 1:",
        "if one < 0:",
        (
            f"{ADDRESSED}::test_words_of_a_record_that_is_being_written_lead_nowhere_else",
        ),
    ),
    Mutant(
        "push-is-taken-for-a-read",
        "daskps.cluster.lane.plain_answers:find_entry",
        "if load(head + 8 * NBYTES_AT) != nbytes:",
        "if load(head + 8 * NBYTES_AT) < nbytes:",
        (f"{PLAIN}::test_a_frame_that_is_no_plain_read_is_left_as_it_came",),
    ),
    Mutant(
        "half-a-read-is-answered",
        "daskps.cluster.lane.plain_reads:answer_next",
        "if seen < asked:",
        "if seen < HEAD_NBYTES:",
        (f"{PLAIN}::test_reads_wait_for_versions",),
    ),
    Mutant(
        "frame-that-waits-for-a-read",
        "daskps.cluster.lane.connection:Connection.alone",
        "if not self._calls.has_alone or self._head is not None or self.is_within:",
        "if not self._calls.has_alone or self.is_within:",
        (f"{ALONE}::test_a_frame_that_takes_long_is_not_left_for_reads",),
    ),
    Mutant(
        "idle-lane-that-never-looks",
        "daskps.cluster.host.lane_calls:LaneCalls.alone",
        "if reads.is_wanted:",
        "if not reads.is_wanted:",
        (f"{ALONE}::test_an_idle_lane_lets_go_of_a_shard_that_is_gone",),
    ),
    Mutant(
        "another-lane-is-at-fault",
        "daskps.cluster.lane.plain_reads:serve_many",
        "store(desk + 8 * WHOSE, fd)",
        "store(desk + 8 * WHOSE, i)",
        (f"{PLAIN}::test_the_lane_at_fault_is_named",),
    ),
    Mutant(
        "answer-longer-than-its-room",
        "daskps.cluster.lane.plain_reads:answer_next",
        "if entry == 0 or load(entry + 16) > load(desk + 8 * MOST_NBYTES):",
        "if entry == 0:",
        (f"{PLAIN}::test_a_long_answer_is_for_others",),
    ),
    Mutant(
        "memory-that-an-idle-lane-keeps",
        "daskps.cluster.host.compiled_reads:CompiledReads.keep",
        "if not all(map(is_there, hosted_shards)):",
        "if not any(map(is_there, hosted_shards)):",
        (f"{PLAIN}::test_a_thread_that_is_wanted_comes_and_lets_go",),
    ),
)
