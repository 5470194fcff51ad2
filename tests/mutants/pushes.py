"""Pushes that are updates of their own: each once, in order, or refused."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "repeat-is-applied",
        "daskps.shards.producers:repeats",
        "return ahead <= 0 and bool(row[SEEN] & (1 << -ahead))",
        "return ahead == 0",
        (
            "tests/shards/test_producers.py"
            "::test_each_number_is_new_once_and_nothing_new_below_the_window",
        ),
    ),
    Mutant(
        "window-is-one-too-long",
        "daskps.shards.producers:repeats",
        "if ahead <= -WINDOW:",
        "if ahead < -WINDOW:",
        (
            "tests/shards/test_producers.py"
            "::test_each_number_is_new_once_and_nothing_new_below_the_window",
        ),
    ),
    Mutant(
        "what-was-given-up-is-a-repeat",
        "daskps.shards.producers:repeats",
        "return not _is_kept(record, row, sequence)",
        "return True",
        (
            "tests/shards/test_producers.py"
            "::test_a_push_that_was_given_up_is_applied_once_however_late",
        ),
    ),
    Mutant(
        "what-was-applied-is-kept",
        "daskps.shards.producers:note_push",
        "if leaves and (number > high or not seen >> high - number & 1):",
        "if leaves:",
        (
            "tests/shards/test_producers.py"
            "::test_a_push_that_was_given_up_is_applied_once_however_late",
        ),
    ),
    Mutant(
        "given-up-is-forgotten-too-soon",
        "daskps.cluster.caller.producer:Producer._heard",
        "if behind <= number - WINDOW:",
        "if behind < number:",
        (
            "tests/cluster/caller/test_tries.py"
            "::test_each_push_of_a_task_counts_once_however_often_it_is_tried",
        ),
    ),
    Mutant(
        "window-does-not-move",
        "daskps.shards.producers:_note",
        "row[SEEN] = _signed(((seen << ahead) | 1) & _MASK if ahead < WINDOW else 1)",
        "row[SEEN] = _signed((seen | 1) & _MASK if ahead < WINDOW else 1)",
        (
            "tests/shards/test_producers.py"
            "::test_each_number_is_new_once_and_nothing_new_below_the_window",
        ),
    ),
    Mutant(
        "producer-that-lost-its-row-comes-back",
        "daskps.shards.producers:_refuse_expired",
        "if forgotten or (record.expired[:n] == producer).any():",
        "if forgotten:",
        (
            "tests/shards/test_producers.py::test_the_producer_that_was_closed_first"
            "_makes_room_and_cannot_come_back",
        ),
    ),
    Mutant(
        "forgotten-producers-come-back",
        "daskps.shards.producers:_refuse_expired",
        "forgotten = 0 < producer <= record.fixed[FORGOTTEN]",
        "forgotten = False",
        (
            "tests/shards/test_producers.py"
            "::test_thousands_of_tasks_push_once_each_and_none_twice",
        ),
    ),
    Mutant(
        "row-of-a-producer-is-its-for-ever",
        "daskps.shards.producers:_find",
        "if at < n and record.plain[record.start_of(at) + PRODUCER] == producer:",
        "if at < n:",
        (
            "tests/shards/test_producers.py::test_the_producer_that_was_closed_first"
            "_makes_room_and_cannot_come_back",
        ),
    ),
    Mutant(
        "newest-closed-producer-makes-room",
        "daskps.shards.producers:_open",
        "at = int(closed[np.argmin(record.producers[closed, CLOSED])])",
        "at = int(closed[np.argmax(record.producers[closed, CLOSED])])",
        (
            "tests/shards/test_producers.py::test_the_producer_that_was_closed_first"
            "_makes_room_and_cannot_come_back",
        ),
    ),
    Mutant(
        "repeat-costs-a-reader-its-copy",
        "daskps.shards.pushes:Pushes.apply",
        "publication: Publication | None = None",
        "publication: Publication | None = Publication(self._segment)",
        (
            "tests/shards/test_shard.py"
            "::test_a_repeat_changes_nothing_and_costs_no_reader_its_copy",
        ),
    ),
    Mutant(
        "push-that-was-overtaken-is-taken-for-new",
        "daskps.shards.producers:find_new",
        "return at if step.sequence > record.plain[at + HIGH] else -1",
        "return at",
        (
            "tests/shards/test_shard.py"
            "::test_a_repeat_changes_nothing_and_costs_no_reader_its_copy",
        ),
    ),
    Mutant(
        "asynchronous-step-is-taken-again",
        "daskps.shards.run_record:find_new",
        "is_new = words[at + NEXT] <= step.sequence and words[at + LIVE]",
        "is_new = words[at + LIVE]",
        (
            "tests/shards/test_try_step.py"
            "::test_repeat_of_an_asynchronous_step_counts_once",
        ),
    ),
    Mutant(
        "push-without-a-ticket-into-rounds",
        "daskps.shards.shard:Shard.step",
        "or joins != (record[POLICY] == _BSP)",
        "or False",
        ("tests/shards/test_try_step.py::test_shard_decides_about_a_push_after",),
    ),
    Mutant(
        "what-is-amended-is-not-copied",
        "daskps.shards.memory.segment:Segment.amend",
        "self.header[CHANGED_ROW] = 0",
        "pass",
        ("tests/shards/test_try_step.py::test_record_is_whole_after",),
    ),
    Mutant(
        "what-stopped-half-way-is-not-copied-over",
        "daskps.shards.memory.publication:Publication._begin",
        "row = header[CHANGED_ROW] if header[WRITING] == header[FLIP] else 0",
        "row = header[CHANGED_ROW]",
        ("tests/shards/test_try_step.py::test_record_is_whole_after",),
    ),
    Mutant(
        "row-of-the-publication-before",
        "daskps.shards.memory.publication:Publication._begin",
        "header[CHANGED_ROW] = 0",
        "pass",
        ("tests/shards/test_try_step.py::test_record_is_whole_after",),
    ),
    Mutant(
        "repeat-in-one-batch-is-applied",
        "daskps.shards.pushes:Pushes._planned",
        "record = publication.record if publication else now",
        "record = now",
        ("tests/shards/test_shard.py::test_a_repeat_in_the_same_batch_is_a_repeat",),
    ),
    Mutant(
        "asynchronous-step-counts-twice",
        "daskps.shards.run_record:note_step",
        "row[NEXT] = step.sequence + 1",
        "row[NEXT] = step.sequence",
        (
            "tests/shards/rounds/test_rounds.py::test_under_ssp_a_restarted"
            "_rank_repeats_the_pushes_of_its_open_clock",
        ),
    ),
    Mutant(
        "step-of-a-finished-rank",
        "daskps.shards.run_record:repeats",
        "if not row[LIVE]:",
        "if False:",
        (
            "tests/shards/test_shard.py"
            "::test_a_repeat_after_the_end_of_its_rank_is_a_repeat",
        ),
    ),
    Mutant(
        "push-from-outside-into-rounds",
        "daskps.shards.refusals:_find_misplacement",
        'elif changes(step) and record.fixed[POLICY] == POLICY_CODES["bsp"]:',
        'elif changes(step) and record.fixed[POLICY] == POLICY_CODES["ssp"]:',
        (
            "tests/shards/test_shard.py::test_a_run_in_rounds_has_the_store_to_itself[gradient]",
        ),
    ),
    Mutant(
        "array-of-another-dtype",
        "daskps.shards.planning:UpdatePlanner.check",
        "or data.dtype != dtypes[position]",
        "or data.dtype.kind != dtypes[position].kind",
        (
            "tests/shards/test_shard.py::test_an_array_that_does_not_fit_is_refused"
            "_before_anything_is_written",
        ),
    ),
    Mutant(
        "array-of-another-shape-by-a-kept-plan",
        "daskps.shards.planning:UpdatePlanner._plan_kept",
        "or data.shape != shape",
        "or False",
        (
            "tests/shards/test_shard.py::test_an_array_that_does_not_fit_is_refused"
            "_before_anything_is_written",
        ),
    ),
    Mutant(
        "part-of-a-piece-in-a-round",
        "daskps.shards.planning:UpdatePlanner.check",
        "or (whole and len(data) != sizes[position])",
        "or len(data) > sizes[position]",
        (
            "tests/shards/test_shard.py"
            "::test_a_gradient_of_a_part_is_refused_in_a_round",
        ),
    ),
    Mutant(
        "nan-is-applied",
        "daskps.shards.planning:UpdatePlanner.plan",
        "if step.check and not fused:",
        "if step.check and fused:",
        (
            "tests/shards/test_finite_checks.py::test_a_bad_gradient_changes_nothing[past the caches-0-v-Adam-False]",
        ),
    ),
    Mutant(
        "a-bad-push-takes-others-along",
        "daskps.shards.pushes:Pushes._planned",
        "fused = may and alone and checks(segment, step.items)",
        "fused = may and checks(segment, step.items)",
        (
            "tests/shards/test_finite_checks.py::test_of_pushes_in_one_pass_the_bad_ones_alone_are_refused[past the caches-queued0]",
        ),
    ),
    Mutant(
        "steps-are-not-counted",
        "daskps.shards.memory.publication:Publication.add",
        "if operation.binding is not None and position not in counted:",
        "if operation.binding is None and position not in counted:",
        (
            "tests/shards/memory/test_publication.py"
            "::test_pushes_that_queued_up_are_bit_for_bit_those_one_by_one",
        ),
    ),
    Mutant(
        "read-before-its-version",
        "daskps.shards.parked:find_outcome",
        "return None if step.wait == READ and ready.version < step.at_least else ready",
        "return None if step.wait == READ and ready.version < step.at_least - 1 else ready",
        ("tests/shards/test_shard.py::test_a_pull_waits_for_the_version_it_asks_for",),
    ),
    Mutant(
        "message-for-another-generation",
        "daskps.shards.refusals:find_refusal",
        "if step.generation != generation:",
        "if step.generation > generation:",
        ("tests/shards/test_shard.py::test_a_stale_generation_is_refused",),
    ),
)
