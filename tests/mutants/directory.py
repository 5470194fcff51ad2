"""The directory: stores, runs, verdicts, adoptions and cuts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "addresses-are-taken-for-memory",
        "daskps.cluster.directory.candidates:Candidates.__init__",
        "self._asked = {row[0]: _Poll(entry.sizes[row[0]]) for row in entry.segments}",
        "self._asked = {row[0]: _Poll(int(row[2])) for row in entry.segments}",
        (
            "tests/cluster/directory/test_departures.py::test_no_room_keeps_a_shard_away",
        ),
    ),
    Mutant(
        "signs-of-life-do-not-count",
        "daskps.cluster.directory.candidates:Verdict.due",
        "is_silent = now >= self._evident_at + self._lost_after",
        "is_silent = now >= self._left_at + self._lost_after",
        ("tests/cluster/directory/test_verdict.py::test_each_sign_counts_anew",),
    ),
    Mutant(
        "lost-before-all-have-looked",
        "daskps.cluster.directory.candidates:Verdict.due",
        "if not self.is_lost and (is_silent or (self._absent and not others)):",
        "if not self.is_lost and (is_silent or self._absent):",
        (
            "tests/cluster/directory/test_verdict.py::test_lost_at_once_where_all_of_its_machine_looked",
        ),
    ),
    Mutant(
        "absent-on-another-machine",
        "daskps.cluster.directory.candidates:_Poll.hear",
        "sight = Sight.UNKNOWN",
        "sight = Sight.ABSENT",
        (
            "tests/cluster/directory/test_departures.py::test_without_a_sign_it_is_lost_and_comes_back_when_found",
        ),
    ),
    Mutant(
        "silent-adopter-is-not-asked-first",
        "daskps.cluster.directory.candidates:_Poll.priority",
        "return (1, 0, 2)[min(self.silent[worker], 2)]",
        "return (0, 1, 2)[min(self.silent[worker], 2)]",
        (
            "tests/cluster/directory/test_departures.py::test_an_adopter_whose_answer_was_lost_is_asked_first",
        ),
    ),
    Mutant(
        "adopter-that-lost-two-answers-is-not-asked-again",
        "daskps.cluster.directory.candidates:_Poll.ask_the_silent",
        "self.silent[worker] = 1",
        "pass",
        (
            "tests/cluster/directory/test_departures.py::test_an_adopter_whose_answers_were_all_lost_is_asked_again",
        ),
    ),
    Mutant(
        "stray-is-forgotten",
        "daskps.cluster.directory.move:Move.ask_to_adopt",
        "entry.strays.add(by)",
        "pass",
        ("tests/cluster/directory/test_departures.py::test_who_broke_off_is_a_stray",),
    ),
    Mutant(
        "adopted-shard-of-a-store-that-has-ended",
        "daskps.cluster.directory.move:Move._install",
        'hosts.spawn(insist(hosts, by, "drop", LATER_SECONDS, store=entry.uid))',
        "pass",
        (
            "tests/cluster/directory/test_departures.py::test_what_was_adopted_of_a_store_that_has_ended_is_freed",
        ),
    ),
    Mutant(
        "generation-stays",
        "daskps.cluster.directory.move:Move.ask_to_adopt",
        "rows = [[*row, entry.generations[row[0]] + 1] for row in entry.rows_of(shards)]",
        "rows = [[*row, entry.generations[row[0]]] for row in entry.rows_of(shards)]",
        (
            "tests/cluster/directory/test_departures.py"
            "::test_an_owner_that_lives_keeps_its_shards_away_until_it_ends",
        ),
    ),
    Mutant(
        "run-goes-on-without-its-mailboxes",
        "daskps.cluster.directory.run:RunState.survives",
        "return {row[0] for row in self.mailboxes_at}.issuperset(shards)",
        "return True",
        (
            "tests/cluster/runs/test_progress.py::test_rounds_go_on_where_others_have_their_mailboxes",
        ),
    ),
    Mutant(
        "runs-end-apart",
        "daskps.cluster.directory.fencing:agree",
        "return Settlement(min(rounds), 1 + max(s.version for s in found) if apart else 0)",
        "return Settlement(max(rounds), 1 + max(s.version for s in found) if apart else 0)",
        ("tests/cluster/directory/test_fencing.py::test_what_shards_agree_on",),
    ),
    Mutant(
        "version-that-a-shard-had-before",
        "daskps.cluster.directory.fencing:agree",
        "return Settlement(min(rounds), 1 + max(s.version for s in found) if apart else 0)",
        "return Settlement(min(rounds), max(s.version for s in found) if apart else 0)",
        ("tests/cluster/directory/test_fencing.py::test_what_shards_agree_on",),
    ),
    Mutant(
        "adopter-is-told-once-of-a-runs-end",
        "daskps.cluster.directory.move:ShardMoves.settle_runs",
        "self.hosts.spawn(self._end_run(entry, by, run))",
        "pass",
        (
            "tests/cluster/directory/test_departures.py::"
            "test_an_adopter_is_told_of_the_end_of_a_run_until_it_answers",
        ),
    ),
    Mutant(
        "word-of-a-shard-that-was-lost",
        "daskps.cluster.directory.fencing:RunEnd._every",
        "return {i: row for i, row in found.items() if i not in entry.lost}",
        "return found",
        (
            "tests/cluster/directory/test_fencing.py::"
            "test_what_a_shard_said_before_it_was_lost_counts_no_more",
        ),
    ),
    Mutant(
        "two-runs-at-once",
        "daskps.cluster.directory.runs:Runs.free_entry",
        "runs = [r for r in self._of(entry) if r.ended or not r.fenced]",
        "runs = [r for r in self._of(entry) if r.ended]",
        ("tests/training/test_train.py::test_two_runs_at_once",),
    ),
    Mutant(
        "end-overtakes-the-beginning",
        "daskps.cluster.directory.runs:Runs._end_late",
        "await asyncio.wait({begun})",
        "pass",
        (
            "tests/cluster/directory/test_run_start.py"
            "::test_client_that_leaves_while_its_run_begins_leaves_no_run",
        ),
    ),
    Mutant(
        "run-of-a-client-that-has-left",
        "daskps.cluster.directory.runs:Runs.on_open_run",
        'if not self._hosts.has_client(who["client"]):',
        'if not who["client"]:',
        (
            "tests/cluster/directory/test_run_start.py::test_client_that_leaves_between_two_tries_leaves_no_run",
        ),
    ),
    Mutant(
        "epoch-without-all-trainers",
        "daskps.cluster.directory.trainers:TrainerMessages._announce",
        "if len(rows.keys() | run.finished) < run.size:",
        "if len(rows.keys() | run.finished) < run.size - 1:",
        (
            "tests/cluster/runs/test_progress.py::test_an_epoch_is_told_when_all_live_trainers_have_ended_it",
        ),
    ),
    Mutant(
        "cut-without-a-shard",
        "daskps.cluster.directory.cuts:Cuts._attempt",
        "is_all = [i for i, *_ in found] == cut.shards and entry.owners == at",
        "is_all = bool(found)",
        (
            "tests/cluster/directory/test_cuts.py::test_a_shard_that_leaves_after_the_cut_began_is_not_left_out",
        ),
    ),
    Mutant(
        "shards-of-who-has-just-adopted-them",
        "daskps.cluster.directory.drains:Drains.on_leaving",
        "stores = [e.uid for e in self._stores.values() if e.without_owner]",
        "stores = [e.uid for e in self._stores.values() if e.away]",
        (
            "tests/cluster/host/test_departure.py::test_who_has_just_adopted_a_shard_lets_go_of_it",
        ),
    ),
    Mutant(
        "absurd-number-of-shards-is-built",
        "daskps.cluster.directory.placement:reserve",
        "check_shards(n_shards)",
        "pass",
        ("tests/test_limits.py::test_an_absurd_store_is_refused_by_the_directory",),
    ),
    Mutant(
        "absurd-number-of-parameters-is-built",
        "daskps.cluster.directory.placement:reserve",
        "check_parameters(of_arrays, len(of_arrays), n_shards, tables)",
        "pass",
        ("tests/test_limits.py::test_an_absurd_store_is_refused_by_the_directory",),
    ),
    Mutant(
        "session-store-outlives-its-client",
        "daskps.cluster.directory.directory:Directory.client_left",
        "if entry.client == client and (entry.session or not entry.ready):",
        "if entry.client == client and not entry.ready:",
        (
            "tests/cluster/test_lifetime.py::test_a_client_that_leaves_takes_its_session_stores_along",
        ),
    ),
    Mutant(
        "name-that-is-taken",
        "daskps.cluster.directory.store_registry:Stores._check_free",
        "if name in self._names and not overwrite:",
        "if name in self._names and overwrite:",
        ("tests/cluster/caller/test_input.py::test_taken_name",),
    ),
    Mutant(
        "slowest-trainer-has-finished",
        "daskps.cluster.directory.run:RunState.live",
        "return [rank for rank in range(self.size) if rank not in self.finished]",
        "return [*range(self.size)]",
        (
            "tests/cluster/runs/test_progress.py::test_slowest_is_the_live_trainer_furthest_behind",
        ),
    ),
    Mutant(
        "barriers-are-passed-with-the-first",
        "daskps.cluster.directory.run:RunState.count_barriers",
        "reached = min((last + 1 for _, _, last, *_ in places), default=0)",
        "reached = max((last + 1 for _, _, last, *_ in places), default=0)",
        (
            "tests/training/test_barrier.py::test_all_read_what_was_added_before_a_barrier",
        ),
    ),
    Mutant(
        "shards-swap-places",
        "daskps.cluster.directory.rebalance:Rebalance._movable",
        "is_better = 1.5 * need <= has - held[target] and held[target] + need <= most",
        "is_better = need <= has - held[target] and held[target] + need <= most",
        ("tests/cluster/test_rebalance.py::test_shards_do_not_swap_places",),
    ),
    Mutant(
        "shards-that-have-moved-move-again",
        "daskps.cluster.directory.rebalance:Rebalance._movable",
        "if may and is_better and (uid, shard) not in self._lately:",
        "if may and is_better:",
        ("tests/cluster/test_rebalance.py::test_no_shard_moves_twice_in_a_minute",),
    ),
    Mutant(
        "worker-that-came-again-has-two-plans",
        "daskps.cluster.directory.rebalance:Rebalance._fill",
        "while tries and self._scheduler.workers.get(target) is joined:",
        "while tries and target in self._scheduler.workers:",
        (
            "tests/cluster/test_rebalance.py::test_a_worker_that_leaves_in_time_gets_nothing",
        ),
    ),
)
