"""What policies do about old gradients, scaled rates, retries, monitors, and placing."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_DELAYS = "tests/shards/test_delays.py::"
_ON_HOSTS = "tests/training/test_delays.py::"
_RATES = "tests/shards/test_scaled_rates.py::"
_RETRIES = "tests/training/test_retries.py::"
_MONITOR = "tests/training/test_monitor.py::"
_WORKERS = "tests/training/test_workers.py::"

MUTANTS = (
    Mutant(
        "delay-one-too-few",
        "daskps.shards.run_record:find_delay",
        "return max(0, record.version - step.at_least)",
        "return max(0, record.version - step.at_least - 1)",
        (_DELAYS + "test_above_the_bound_it_is_counted_and_not_applied",),
    ),
    Mutant(
        "deltas-have-a-delay",
        "daskps.shards.run_record:find_delay",
        "if record.plain[POLICY] != MEASURED or not step.run or step.kind != GRADIENT:",
        "if record.plain[POLICY] != MEASURED or not step.run:",
        (_DELAYS + "test_deltas_and_pushes_from_outside_have_none",),
    ),
    Mutant(
        "bound-that-is-too-much-itself",
        "daskps.shards.run_record:dampen",
        "if 0 <= bound < delay:",
        "if 0 <= bound <= delay:",
        (_DELAYS + "test_above_the_bound_it_is_counted_and_not_applied",),
    ),
    Mutant(
        "damping-by-the-delay-alone",
        "daskps.shards.run_record:dampen",
        "return step._replace(weight=step.weight * (1.0 + delay) ** -damping)",
        "return step._replace(weight=step.weight * max(1.0, delay) ** -damping)",
        (_DELAYS + "test_damping_multiplies_by_the_delay",),
    ),
    Mutant(
        "damping-in-place-of-the-weight",
        "daskps.shards.run_record:dampen",
        "return step._replace(weight=step.weight * (1.0 + delay) ** -damping)",
        "return step._replace(weight=(1.0 + delay) ** -damping)",
        (_DELAYS + "test_damping_multiplies_by_the_delay",),
    ),
    Mutant(
        "too-old-is-applied",
        "daskps.shards.pushes:Pushes._planned",
        "planned = []  # it was fine, as an error should not depend on its age",
        "pass",
        (_DELAYS + "test_above_the_bound_it_is_counted_and_not_applied",),
    ),
    Mutant(
        "too-old-is-a-version",
        "daskps.shards.pushes:Pushes.apply",
        "if planned or ticket.step.kind == SCALE:",
        "if True:",
        (_ON_HOSTS + "test_above_the_bound_nothing_is_applied[inside-False]",),
    ),
    Mutant(
        "too-old-counts-as-a-push",
        "daskps.shards.pushes:Pushes._commit",
        "header[N_DROPPED] += 1",
        "header[N_DROPPED] += 1; header[N_APPLIED] += 1",
        (_ON_HOSTS + "test_above_the_bound_nothing_is_applied[inside-False]",),
    ),
    Mutant(
        "delays-of-the-run-before",
        "daskps.shards.run_state:ShardRun._forget_delays",
        "self._segment.header[at] = 0",
        "pass",
        (_DELAYS + "test_a_new_run_counts_anew_and_a_plain_one_nothing",),
    ),
    Mutant(
        "push-is-a-pull",
        "daskps.cluster.caller.session:Session._call",
        "seen.update(row for row in reply.versions if target.reads(row[0]))",
        "seen.clear()",
        (_ON_HOSTS + "test_delays_are_since_the_last_pull[inside-pushpull]",),
    ),
    Mutant(
        "read-by-socket-that-is-not-noted",
        "daskps.cluster.caller.reads:NamedRead.read_remote",
        "self._seen.update(reply.versions)",
        "pass",
        (_ON_HOSTS + "test_a_read_that_is_known_counts[socket]",),
    ),
    Mutant(
        "socket-without-what-was-read",
        "daskps.cluster.caller.call_template:least_in",
        "found = [seen.get(shard, UNREAD) for shard in frame.shards]",
        "found = [UNREAD for shard in frame.shards]",
        (_ON_HOSTS + "test_a_read_that_is_known_counts[socket]",),
    ),
    Mutant(
        "factor-in-place-of-that-before",
        "daskps.shards.pushes:_scaled",
        "found[position] = to_word(before * times)",
        "found[position] = to_word(times)",
        (_RATES + "test_a_push_has_the_rate_of_its_place",),
    ),
    Mutant(
        "factor-that-runs-over",
        "daskps.shards.pushes:_scaled",
        "if not 0 < before * times < math.inf:",
        "if not 0 < times < math.inf:",
        ("tests/training/test_plateau.py::test_factors_that_cannot_be[inside]",),
    ),
    Mutant(
        "factor-that-outlives-a-reset",
        "daskps.shards.memory.publication:Publication.reset",
        "self.record.steps[position] = self.record.factors[position] = 0",
        "self.record.steps[position] = 0",
        (_RATES + "test_within_rounds_only_for_the_run_that_waits",),
    ),
    Mutant(
        "plateau-that-cools-too-long",
        "daskps.training.plateau:ReduceOnPlateau._look",
        "self.cooldown_counter -= 1",
        "self.cooldown_counter -= 0",
        ("tests/training/test_plateau.py::test_the_same_rates_as_torch",),
    ),
    Mutant(
        "one-retry-too-many",
        "daskps.training.early_end:Retries.fail",
        "return len(self._failures) <= self.most",
        "return len(self._failures) <= self.most + 1",
        (_RETRIES + "test_only_so_many_within_the_window",),
    ),
    Mutant(
        "failures-that-never-age",
        "daskps.training.early_end:Retries.fail",
        "recent = [then for then in self._failures if now - then < self.window]",
        "recent = list(self._failures)",
        (_RETRIES + "test_only_so_many_within_the_window",),
    ),
    Mutant(
        "refusals-are-accidents",
        "daskps.training.early_end:is_users",
        "if is_ours or isinstance(error, TimeoutError):",
        "if isinstance(error, TimeoutError):",
        (_RETRIES + "test_whose_error_it_is",),
    ),
    Mutant(
        "tried-again-before-the-first-tick",
        "daskps.training.job:Job._has_ticked",
        "return await self._progress(link) > self._began_at",
        "return await self._progress(link) >= self._began_at",
        (_RETRIES + "test_otherwise_the_error_surfaces",),
    ),
    Mutant(
        "optimizer-reset-with-each-retry",
        "daskps.training.job:Job._again",
        "self.reset = False",
        "pass",
        (_RETRIES + "test_with_a_fresh_optimizer_it_is_reset_once",),
    ),
    Mutant(
        "data-for-a-worker-that-has-gone",
        "daskps.cluster.upstream:scatter",
        "if error.args != (worker,):",
        "if error.args == (worker,):",
        (
            "tests/training/test_retries_in_processes.py"
            "::test_data_for_a_worker_that_has_gone_is_sent_to_another",
        ),
    ),
    Mutant(
        "monitor-of-a-rank-alone",
        "daskps.training.monitoring:Watcher.gradients",
        "arrays = self._reduced(named, arrays, weight) if named else {}",
        "pass",
        (_MONITOR + "test_every_tensor_once_per_step[inside-mean]",),
    ),
    Mutant(
        "monitor-of-means-without-weights",
        "daskps.training.monitoring:Watcher._reduced",
        "given[str(index)] = array * scale",
        "given[str(index)] = array",
        (_MONITOR + "test_every_tensor_once_per_step[inside-mean]",),
    ),
    Mutant(
        "monitors-of-one-interval",
        "daskps.training.monitoring:Watcher._due",
        "return [(i, w) for i, w in enumerate(self._watches) if step % w.interval == 0]",
        "return [(i, w) for i, w in enumerate(self._watches) if step % 3 == 0]",
        (_MONITOR + "test_interval_pattern_and_statistic_of_several",),
    ),
    Mutant(
        "data-that-draws-trainers-elsewhere",
        "daskps.cluster.runs.parts:homes",
        "can = [w for w in workers if w in nbytes] if only else workers",
        "can = workers",
        (_WORKERS + "test_data_elsewhere_travels",),
    ),
    Mutant(
        "workers-that-are-no-list",
        "daskps.cluster.runs.parts:threads_of",
        "return {w: found[w] for w in only if w in found} if only else found",
        "return found",
        (_WORKERS + "test_as_many_trainers_as_workers[resident]",),
    ),
    Mutant(
        "workers-that-are-not-there",
        "daskps.cluster.runs.parts:check_workers",
        "if absent := [worker for worker in only if worker not in there]:",
        "if absent := [worker for worker in only if worker == '']:",
        (_WORKERS + "test_what_is_no_worker_is_refused_at_once",),
    ),
)
