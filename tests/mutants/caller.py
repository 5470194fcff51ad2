"""A caller: its plans, retries, reads without a message and snapshots."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "a-view-is-new-for-ever",
        "daskps.cluster.caller.views:ViewRequest.takes",
        "if age is not None and view.newest_at < asked_at - age:",
        "if age is not None and view.newest_at > asked_at:",
        ("tests/cluster/test_views.py::test_ages",),
    ),
    Mutant(
        "a-view-waits-for-no-version",
        "daskps.cluster.caller.views:_reached",
        "if slices:",
        "if not flats:",
        ("tests/cluster/test_views.py::test_least_versions_are_waited_for",),
    ),
    Mutant(
        "a-worker-that-nobody-reaches-is-out-of-our-reach",
        "daskps.cluster.caller.liveness:Reach._find",
        "if not await self._answers_scheduler(worker):",
        "if await self._answers_scheduler(worker) is None:",
        (
            "tests/cluster/caller/test_reach.py::test_a_worker_that_is_only_slow_is_waited_for",
        ),
    ),
    Mutant(
        "absent-rows-go-where-they-stand-by-shard",
        "daskps.cluster.caller.row_reads:AbsentRows.fill",
        "where = absent if given is None else given[absent]",
        "where = absent",
        ("tests/store/test_row_targets.py::test_rows_are_read_in_parts",),
    ),
    Mutant(
        "rows-go-to-their-shards-alone",
        "daskps.cluster.caller.routes:push",
        "everywhere = everywhere or bool(rows)",
        "everywhere = bool(everywhere)",
        (
            "tests/cluster/caller/test_row_routes.py::test_a_push_of_rows_is_meant_for_all_shards",
        ),
    ),
    Mutant(
        "rows-are-answered-in-the-order-of-shards",
        "daskps.cluster.caller.row_routes:RowSlice.fill",
        "here[self.at] = rows.reshape(-1, dim)",
        "here[: len(self.asked.ids)] = rows.reshape(-1, dim)",
        (
            "tests/cluster/caller/test_row_routes.py::test_answers_go_where_they_were_asked_for",
        ),
    ),
    Mutant(
        "rows-of-other-shards-are-taken",
        "daskps.layout.tables:TablePiece.holds",
        "return self.first_row <= low and high < self.first_row + self.n_rows",
        "return low >= 0 and high < self.table.rows",
        (
            "tests/cluster/protocol/test_row_messages.py::test_a_read_of_rows_that_are_not_there_is_refused",
        ),
    ),
    Mutant(
        "pushes-ahead-of-the-window",
        "daskps.cluster.caller.producer:Producer._begin",
        "if number - self._floor >= self.SPREAD:",
        "if number - self._floor >= 1000 * self.SPREAD:",
        (
            "tests/cluster/protocol/test_saying.py::test_no_push_leaves_while_one_is_far_behind",
        ),
    ),
    Mutant(
        "what-was-given-up-is-not-said",
        "daskps.cluster.caller.producer:Producer.end",
        "if told and self.id:",
        "if not told and self.id:",
        (
            "tests/cluster/caller/test_snapshots.py::test_producer_announces_what_it_gave_up",
        ),
    ),
    Mutant(
        "push-that-is-under-way-is-settled",
        "daskps.cluster.caller.producer:Producer._begin",
        "return Turn(number, self._floor, self._listed)",
        "return Turn(number, number, self._listed)",
        (
            "tests/cluster/caller/test_snapshots.py::test_producer_announces_what_it_gave_up",
        ),
    ),
    Mutant(
        "partial-push-says-it-goes-everywhere",
        "daskps.cluster.caller.routes:_made",
        "touched = None if len(slices) == n else runs_of(sorted(slices))",
        "touched = None",
        (
            "tests/cluster/protocol/test_saying.py::test_a_push_says_which_shards_it_goes_to",
        ),
    ),
    Mutant(
        "tick-only-where-arrays-go",
        "daskps.cluster.caller.routes:_made",
        "for shard in range(n) if shards is None else shards:",
        "for shard in shards or ():",
        ("tests/cluster/protocol/test_saying.py::test_a_tick_goes_to_all_shards",),
    ),
    Mutant(
        "version-of-another-shard",
        "daskps.cluster.caller.targets:at_least",
        "return dict(min_version.pairs).get(shard, 0)",
        "return int(min_version)",
        (
            "tests/cluster/protocol/test_saying.py::test_a_read_waits_for_the_versions_of_its_shards_alone",
        ),
    ),
    Mutant(
        "read-that-an-update-ran-into",
        "daskps.shards.reader:ShardReader.read",
        "if self.read_at(flip, outs, rows):",
        "if self.read_at(flip, outs, rows) or flip:",
        (
            "tests/cluster/caller/test_local.py::test_a_read_that_updates_ran_into_is_repeated",
        ),
    ),
    Mutant(
        "read-of-one-buffer-where-both-hold-weights",
        "daskps.shards.reader:ShardReader._find",
        "if side != MIXED:",
        "if True:",
        (
            "tests/cluster/caller/test_local.py::test_a_read_of_pieces_in_both_buffers_takes_each_from_its_own",
        ),
    ),
    Mutant(
        "reads-where-the-shards-were",
        "daskps.cluster.caller.shard_map:Prepared.find",
        "return self._known.get(key) if self._where is self._meta.where else None",
        "return self._known.get(key)",
        (
            "tests/cluster/caller/test_local.py::test_what_was_prepared_is_forgotten_when_a_shard_has_moved",
        ),
    ),
    Mutant(
        "push-handed-back-is-forgotten",
        "daskps.cluster.caller.local_shards:LocalShards.begin",
        "self.leave(request, self._back)",
        "self.leave(request.waiting(), self._back)",
        (
            "tests/cluster/caller/test_local.py::test_what_only_the_owner_can_do_goes_by_message_as_it_is",
        ),
    ),
    Mutant(
        "push-that-was-accepted-is-sent-again",
        "daskps.cluster.caller.local_shards:LocalShards._take_outcome",
        "(self._waiting if ticket.applied else self._back).append(part.shard)",
        "self._back.append(part.shard)",
        (
            "tests/cluster/caller/test_local.py::test_what_was_accepted_is_not_sent_again",
        ),
    ),
    Mutant(
        "step-to-the-memory-of-the-dead",
        "daskps.cluster.caller.local:SplitRoute.is_live",
        "if not all(serving.is_live() for serving in self._mapped):",
        "if not self._mapped:",
        (
            "tests/cluster/caller/test_local.py::test_no_step_goes_to_the_memory_of_a_worker_that_is_gone",
        ),
    ),
    Mutant(
        "call-under-way-to-a-worker-that-is-gone",
        "daskps.cluster.caller.liveness:Liveness._ask_for",
        "call.task.cancel()",
        "pass",
        (
            "tests/cluster/caller/test_liveness.py::test_late_calls_of_a_handle_ask_together",
        ),
    ),
    Mutant(
        "large-run-floods-the-scheduler",
        "daskps.cluster.caller.liveness:Liveness.__init__",
        "self.pause = max(SUSPECT_SECONDS, size / _MOST_QUESTIONS)",
        "self.pause = SUSPECT_SECONDS",
        ("tests/cluster/caller/test_liveness.py::test_a_large_run_asks_more_rarely",),
    ),
    Mutant(
        "clock-of-the-shard-that-is-ahead",
        "daskps.cluster.caller.session:Session.resume",
        "self.clock, self.sequence = min(places)",
        "self.clock, self.sequence = max(places)",
        (
            "tests/cluster/protocol/test_saying.py::test_who_starts_again_goes_on_where_the_last_shard_is",
        ),
    ),
    Mutant(
        "number-that-a-shard-has-seen",
        "daskps.cluster.caller.session:Session.resume",
        "self.sequence = max(sequence for _, sequence in places)",
        "pass",
        (
            "tests/cluster/protocol/test_saying.py::test_who_starts_again_goes_on_where_the_last_shard_is",
        ),
    ),
    Mutant(
        "task-that-runs-again-has-the-copy",
        "daskps.cluster.caller.snapshots:_take_copies",
        "if copy is None:",
        "if host is None and copy:",
        ("tests/cluster/caller/test_snapshots.py::test_lost_worker_is_named",),
    ),
    Mutant(
        "charged-worker-maps-what-is-anothers",
        "daskps.cluster.caller.carriers:Carriers._mapped_of",
        "if worker not in self._mapped and not accounting.may_map():",
        "if worker is None:",
        (
            "tests/cluster/caller/test_charged.py::test_the_log_says_once_what_lasts_and_how_to_allow_it",
        ),
    ),
    Mutant(
        "manifests-of-files-nobody-saw",
        "daskps.cluster.caller.saving:_seal",
        "if there.get(path) != nbytes:",
        "if False:",
        ("tests/cluster/test_saving.py::test_a_url_that_is_not_shared_is_found_out",),
    ),
    Mutant(
        "calls-of-all-are-made-again-at-later-clocks",
        "daskps.cluster.caller.allreduce:CallCount.at",
        "self.number = max(self.number, self._from(clock))",
        "pass",
        (
            "tests/training/test_barrier.py::test_who_starts_again_makes_the_calls_of_its_clock_again",
        ),
    ),
    Mutant(
        "calls-behind-a-lost-step-are-not-made-again",
        "daskps.cluster.caller.allreduce:CallCount._from",
        "made = (first for at, first in self._firsts.items() if at >= clock)",
        "made = (first for at, first in self._firsts.items() if at == clock)",
        (
            "tests/training/test_barrier.py::test_a_trainer_that_makes_a_step_again_repeats_its_calls",
        ),
    ),
    Mutant(
        "a-barrier-waits-for-a-step-that-its-trainer-lacks",
        "daskps.cluster.caller.session:Session.barrier",
        "step = self._step()._replace(clock=min(clock, self.clock))",
        "step = self._step()._replace(clock=clock)",
        (
            "tests/cluster/test_copies_in_rounds.py::test_a_trainer_that_was_started_again_makes_a_step_once_more",
        ),
    ),
    Mutant(
        "epochs-are-reported-before-copies-have-their-rounds",
        "daskps.cluster.caller.session:Session.report",
        "if self._keeps_last:",
        "if False:",
        (
            "tests/cluster/test_copies_in_rounds.py::test_an_epoch_is_reported_once_copies_have_its_rounds",
        ),
    ),
    Mutant(
        "barriers-do-not-wait-for-rounds-that-a-cut-holds",
        "daskps.cluster.caller.session:Session.barrier",
        "if self.bsp:",
        "if not self.bsp:",
        (
            "tests/training/test_barrier.py::test_a_round_that_a_cut_holds_back_is_waited_for",
        ),
    ),
    Mutant(
        "stolen-copies-are-lost",
        "daskps.cluster.caller.snapshots:_take_copies",
        "if link.node.address != owner and link.run(ask):",
        "if not link.node.address:",
        (
            "tests/cluster/caller/test_snapshots.py::test_snapshot_of_a_busy_owner_waits_for_it",
        ),
    ),
)
