"""Runs in a shard: rounds, mailboxes, fences and what a trainer waits for."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "step-of-a-run-that-is-over",
        "daskps.shards.refusals:find_refusal",
        "if step.run and step.run != record.plain[RUN]:",
        "if step.run and step.run > record.plain[RUN]:",
        ("tests/shards/test_shard.py::test_a_step_of_the_run_before_is_refused",),
    ),
    Mutant(
        "run-that-has-ended-begins-again",
        "daskps.shards.run_state:ShardRun.begin",
        "if run == self._segment.header[ENDED]:",
        "if run < self._segment.header[ENDED]:",
        ("tests/shards/test_shard.py::test_a_run_that_has_ended_does_not_begin_again",),
    ),
    Mutant(
        "end-that-overtakes-the-beginning",
        "daskps.shards.run_state:ShardRun.end",
        "if not self.run and run != self._segment.header[ENDED]:",
        "if self.run and run != self._segment.header[ENDED]:",
        (
            "tests/shards/test_shard.py::test_a_run_whose_end_comes_first_does_not_begin",
        ),
    ),
    Mutant(
        "finished-rank-is-waited-for",
        "daskps.shards.reader:Visibility.find_slowest",
        "if words[at + LIVE]",
        "if True",
        (
            "tests/shards/test_shard.py"
            "::test_ssp_waits_for_the_slowest_live_rank_and_no_longer",
        ),
    ),
    Mutant(
        "rank-counts-twice-in-a-round",
        "daskps.shards.run_record:judge_step",
        "return REPEAT if has_ticked else NEW",
        "return NEW",
        (
            "tests/shards/rounds/test_rounds.py"
            "::test_a_rank_counts_once_in_a_round_whatever_it_sends",
        ),
    ),
    Mutant(
        "step-of-a-round-before-is-an-error",
        "daskps.shards.run_record:judge_step",
        "if step.clock < now:",
        "if step.clock < now - 1:",
        (
            "tests/shards/rounds/test_rounds.py::test_a_step_of_a_round_that_is_complete_is_a_repeat_under_any_number",
        ),
    ),
    Mutant(
        "round-without-what-was-lost",
        "daskps.shards.rounds.round:Round._judge",
        "if held is None and not step.whole and table.has_pushed(rank):",
        "if held is None and step.whole and table.has_pushed(rank):",
        (
            "tests/shards/rounds/test_mailbox.py"
            "::test_pushes_before_the_tick_are_asked_for_again",
        ),
    ),
    Mutant(
        "kinds-in-one-round",
        "daskps.shards.rounds.unticked:Unticked.find_other_kind",
        "if kind not in (NOTHING, step.kind) or step.kind not in KINDS:",
        "if step.kind not in KINDS:",
        (
            "tests/shards/rounds/test_kinds.py"
            "::test_trainers_that_mix_kinds_complete_no_round_on_any_shard",
        ),
    ),
    Mutant(
        "round-of-nobody",
        "daskps.shards.rounds.round:Round.finish_rank",
        "if not table.words[words.N_TICKED]:",
        "if False:",
        (
            "tests/shards/rounds/test_rounds.py::test_ranks_that_finish_without_a_tick_make_no_round",
        ),
    ),
    Mutant(
        "caller-may-not-change-its-arrays",
        "daskps.shards.rounds.unticked:join_pushes",
        "arrays[item.position] = payload.duplicate(data)",
        "arrays[item.position] = data",
        (
            "tests/shards/rounds/test_rounds.py::test_what_was_sent_before_the_tick_stays_the_callers",
        ),
    ),
    Mutant(
        "round-that-is-held-is-applied",
        "daskps.shards.shard:Shard._apply_complete",
        "if (open_round := self.round) is not None and self._may_apply:",
        "if (open_round := self.round) is not None:",
        (
            "tests/shards/rounds/test_mailbox.py::test_round_that_a_fence_held_back_is_not",
        ),
    ),
    Mutant(
        "round-of-one-accepted-too-soon",
        "daskps.shards.rounds.round:Round._judge",
        "if step.tick and not may_apply and self.size == 1:",
        "if step.tick and not may_apply and self.size == 0:",
        (
            "tests/shards/rounds/test_mailbox.py::test_round_of_one_is_accepted_when_it_is_applied",
        ),
    ),
    Mutant(
        "cut-does-not-hold-rounds",
        "daskps.shards.shard:Shard._may_apply",
        "return self.cut is None and not self._is_held and self.run_state.may_apply",
        "return not self._is_held and self.run_state.may_apply",
        ("tests/shards/cuts/test_cut.py::test_bsp_cut_serves_the_last_round_all_have",),
    ),
    Mutant(
        "fence-one-round-late",
        "daskps.shards.run_state:ShardRun.may_apply",
        "is_open = limit is None or self._segment.current.plain[ROUNDS] < limit",
        "is_open = limit is None or self._segment.current.plain[ROUNDS] <= limit",
        (
            "tests/shards/rounds/test_mailbox.py::test_round_that_a_fence_held_back_is_not",
        ),
    ),
    Mutant(
        "rank-that-sits-out-is-in-the-mean",
        "daskps.shards.rounds.sums:divide",
        "total.divisor = total.weight",
        "total.divisor = float(len(total.others) + 2)",
        (
            "tests/shards/rounds/test_rounds.py::test_a_rank_that_sits_out_is_not_in_the_mean",
        ),
    ),
    Mutant(
        "round-without-weight-is-an-update",
        "daskps.shards.rounds.words:note",
        "if table.view(np.float64)[WEIGHT] + weight <= 0:",
        "if table.view(np.float64)[WEIGHT] + weight < 0:",
        (
            "tests/shards/rounds/test_rounds.py::test_a_round_without_weight_raises_no_version",
        ),
    ),
    Mutant(
        "push-before-the-tick-is-overlooked",
        "daskps.shards.rounds.words:look",
        "or table[bits] & (1 << (rank & MASK)) != 0",
        "or table[bits] & (1 << (rank & MASK)) < 0",
        ("tests/shards/test_try_step.py::test_shard_decides_about_a_step_after",),
    ),
    Mutant(
        "delivery-before-its-arrays",
        "daskps.shards.rounds.round:Round._keep",
        "table, other = self._table, mailbox.tables[self._table is mailbox.tables[0]]",
        "table, other = self._table, mailbox.tables[self._table is mailbox.tables[1]]",
        (
            "tests/shards/rounds/test_mailbox.py::test_step_killed_after_any_store_counts_once[0-followed]",
        ),
    ),
    Mutant(
        "mailboxes-of-another-run",
        "daskps.shards.rounds.mailbox:Mailbox.check",
        "if found != wanted:",
        "if found[0] != wanted[0]:",
        (
            "tests/shards/rounds/test_mailbox.py::test_memory_that_holds_something_else_is_refused",
        ),
    ),
    Mutant(
        "mean-without-the-others-weights",
        "daskps.shards.rounds.sums:gather",
        "known.weight += other",
        "known.weight += 1.0",
        ("tests/shards/rounds/test_sums.py::test_sums_have_the_bits_of_numpy",),
    ),
    Mutant(
        "sum-of-what-lacks-a-piece",
        "daskps.shards.rounds.sums:gather",
        "if isnan(other):",
        "if other < 0:",
        ("tests/shards/rounds/test_sums.py::test_rounds_of_both_have_the_same_bits",),
    ),
    Mutant(
        "step-without-a-ticket-of-a-run-that-is-over",
        "daskps.shards.shard:Shard.step",
        "or record[RUN] != run != 0",
        "or False",
        (
            "tests/shards/test_try_step.py"
            "::test_shard_decides_about_an_asynchronous_step_with",
        ),
    ),
    Mutant(
        "step-without-a-ticket-goes-past-a-gate",
        "daskps.shards.shard:Shard.step",
        "header[GATE] != OPEN",
        "header[GATE] < OPEN",
        ("tests/shards/test_try_step.py::test_no_step_completes_a_round_that_is_held",),
    ),
    Mutant(
        "step-without-a-ticket-beside-parked-ones",
        "daskps.shards.shard:Shard.step",
        "or (alone and self.parked.tickets)",
        "or False",
        ("tests/shards/test_try_step.py::test_shard_decides_about_a_step_after",),
    ),
    Mutant(
        "reader-is-told-of-the-round-before",
        "daskps.shards.parked:_outcome_in_run",
        "reads, clock = Visibility(segment, step.run, step.rank), step.clock + step.tick",
        "reads, clock = Visibility(segment, step.run, step.rank), step.clock",
        (
            "tests/shards/test_try_step.py"
            "::test_readers_that_wait_are_told_when_their_round_is_complete",
        ),
    ),
    Mutant(
        "reader-is-thought-to-have-been-asked",
        "daskps.shards.parked:ParkedTickets.is_stale",
        "return bool(self.tickets) and self.asked != self._sight()",
        "return False",
        (
            "tests/shards/test_try_step.py"
            "::test_who_waits_is_asked_again_after_what_another_process_published",
        ),
    ),
    Mutant(
        "step-of-a-rank-that-is-none",
        "daskps.shards.shard:Shard.step",
        "or (run and not 0 <= step.rank < record[N_RANKS])",
        "or False",
        ("tests/shards/test_try_step.py::test_rank_that_is_none_joins_no_round",),
    ),
    Mutant(
        "part-of-a-piece-is-taken-for-all-of-it",
        "daskps.shards.rounds.round:Round.take_step",
        "if len(arrays) == len(step.items):",
        "if arrays or not step.items:",
        ("tests/shards/rounds/test_rounds.py::test_a_piece_twice_in_a_step_is_summed",),
    ),
    Mutant(
        "restarted-rank-keeps-half-a-step",
        "daskps.shards.rounds.round:Round.restart_rank",
        "self._unticked.pop(rank, None)",
        "pass",
        (
            "tests/shards/rounds/test_rounds.py::test_a_restarted_rank_drops_what_it_had_not_ticked",
        ),
    ),
    Mutant(
        "step-of-a-trainer-that-was-replaced-counts",
        "daskps.shards.run_record:judge_step",
        "if step.sequence >> _STEP_BITS < following >> _STEP_BITS:",
        "if False:",
        (
            "tests/shards/rounds/test_rounds.py"
            "::test_what_a_trainer_sends_whose_place_was_taken_counts_for_nothing",
        ),
    ),
    Mutant(
        "place-is-taken-twice",
        "daskps.shards.rounds.round:Round.restart_rank",
        "if table.next[rank] < first:",
        "if True:",
        ("tests/shards/rounds/test_rounds.py::test_place_is_taken_once",),
    ),
    Mutant(
        "trainer-that-was-replaced-ends-its-rank",
        "daskps.cluster.directory.trainers:TrainerMessages._taking_part",
        "if entry.ranks.get(rank) != worker or not self._hosts.has_worker(worker):",
        "if not self._hosts.has_worker(worker):",
        (
            "tests/cluster/directory/test_run_start.py"
            "::test_trainer_that_was_replaced_does_not_end_its_rank",
        ),
    ),
    Mutant(
        "trainer-of-a-worker-that-has-left-ends-a-run",
        "daskps.cluster.directory.runs:Runs.on_fence_run",
        "if worker and not self._hosts.has_worker(worker):",
        "if False:",
        (
            "tests/cluster/directory/test_run_start.py"
            "::test_trainer_of_a_worker_that_has_left_ends_no_run",
        ),
    ),
    Mutant(
        "read-beyond-the-bound",
        "daskps.shards.reader:Visibility.find_bound",
        "if words[POLICY] == SSP and lag > words[STALENESS]:",
        "if words[POLICY] == SSP and lag > words[STALENESS] + 1:",
        (
            "tests/shards/test_reads.py::test_it_waits_for_the_slowest_live_rank_and_no_longer",
        ),
    ),
    Mutant(
        "staleness-of-one-more",
        "daskps.shards.reader:Visibility.find_bound",
        "lag = clock - self.find_slowest(flip, clock)",
        "lag = clock - self.find_slowest(flip, clock) - 1",
        ("tests/shards/test_reads.py::test_ssp_never_reads_more_than_s_clocks_ahead",),
    ),
    Mutant(
        "read-ahead-of-its-round",
        "daskps.shards.reader:Visibility.find_bound",
        "if ahead > 0:",
        "if ahead > 1:",
        ("tests/shards/test_reads.py::test_in_rounds_it_is_exactly_that_of_the_clock",),
    ),
    Mutant(
        "read-of-half-a-copy",
        "daskps.shards.reader:ShardReader.read_at",
        "return header[WRITING] <= flip + 1 and header[FLIP] >= flip",
        "return header[FLIP] >= flip",
        (
            "tests/shards/test_reads.py::test_a_copy_is_whole_until_a_second_publication_begins[copied]",
        ),
    ),
    Mutant(
        "copy-of-a-flip-to-come",
        "daskps.shards.reader:ShardReader.read_at",
        "return header[WRITING] <= flip + 1 and header[FLIP] >= flip",
        "return header[WRITING] <= flip + 1",
        (
            "tests/shards/test_reads.py::test_a_copy_of_a_flip_that_was_taken_back_is_not_whole[copied]",
        ),
    ),
    Mutant(
        "read-of-another-generation",
        "daskps.shards.reader:Visibility.find_flip",
        "if header[GATE] == CLOSED or header[GENERATION] != self._generation:",
        "if header[GATE] == CLOSED:",
        (
            "tests/shards/test_reads.py::test_outside_runs_a_shard_that_is_gone_is_asked[adopt]",
        ),
    ),
    Mutant(
        "read-of-a-shard-that-is-freed",
        "daskps.shards.reader:Visibility.find_flip",
        "if header[GATE] == CLOSED or header[GENERATION] != self._generation:",
        "if header[GENERATION] != self._generation:",
        (
            "tests/shards/test_reads.py::test_outside_runs_a_shard_that_is_gone_is_asked[close]",
        ),
    ),
    Mutant(
        "ticks-before-all-know-who-has-finished",
        "daskps.shards.run_state:ShardRun.takes_ticks",
        "return self.may_apply or not self._segment.awaits_word",
        "return True",
        (
            "tests/shards/rounds/test_mailbox.py::test_next_round_takes_no_tick_before_all_shards_know_who_has_finished",
        ),
    ),
    Mutant(
        "words-of-fewer-ranks-are-enough",
        "daskps.shards.run_state:ShardRun.hear_finished",
        "if open_round.n_finished <= n_ranks:",
        "if open_round.n_finished:",
        (
            "tests/shards/rounds/test_mailbox.py::test_next_round_takes_no_tick_before_all_shards_know_who_has_finished",
        ),
    ),
    Mutant(
        "rounds-go-on-where-one-shard-has-heard-of-an-end",
        "daskps.shards.run_state:ShardRun.finish_rank",
        "if is_news and self._segment.limit is None:",
        "if False:",
        (
            "tests/shards/test_state_machine.py::test_a_fence_where_one_shard_has_heard_that_a_rank_finished",
        ),
    ),
)
