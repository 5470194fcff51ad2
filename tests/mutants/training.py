"""Trainers: their rows and batches, what goes on beside their loop, their result."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "rows-that-a-step-changed-stay-as-read-before-it",
        "daskps.training.resident:BatchRows._read_again",
        "rows.reshape(-1, rows.shape[-1])[again] = fresh[name]",
        "rows.reshape(-1, rows.shape[-1])[again[:0]] = fresh[name][:0]",
        (
            "tests/training/test_train_rows.py"
            "::test_what_a_step_changes_of_rows_that_were_read_before_is_read_again",
        ),
    ),
    Mutant(
        "rows-are-read-ahead-as-at-this-clock",
        "daskps.training.resident:BatchRows.begin",
        "session.read_all(targets, seconds, ahead=1)",
        "session.read_all(targets, seconds)",
        (
            "tests/training/test_train_rows.py"
            "::test_what_a_step_changes_of_rows_that_were_read_before_is_read_again",
        ),
    ),
    Mutant(
        "a-trainer-at-its-bound-reads-rows-ahead",
        "daskps.training.resident:BatchRows.may_begin",
        "return self._lag < self._plan.rows_ahead",
        "return self._lag <= self._plan.rows_ahead",
        (
            "tests/training/test_train_rows.py"
            "::test_rows_are_read_ahead_where_that_would_not_wait",
        ),
    ),
    Mutant(
        "ranks-shuffle-alike",
        "daskps.training.data.rows:batches",
        "order = _permutation(n, seed, epoch, rank)",
        "order = _permutation(n, seed, epoch)",
        (
            "tests/training/data/test_rows.py"
            "::test_batches_are_a_function_of_seed_epoch_and_rank",
        ),
    ),
    Mutant(
        "epochs-shuffle-alike",
        "daskps.training.data.rows:batches",
        "order = _permutation(n, seed, epoch, rank)",
        "order = _permutation(n, seed, rank)",
        (
            "tests/training/data/test_rows.py"
            "::test_batches_are_a_function_of_seed_epoch_and_rank",
        ),
    ),
    Mutant(
        "short-batch-is-dropped",
        "daskps.training.data.rows:batches",
        "parts = (slice(a, min(a + size, n)) for a in range(0, n, size))",
        "parts = (slice(a, a + size) for a in range(0, n - size + 1, size))",
        ("tests/training/data/test_rows.py::test_batches_cover_exactly_once",),
    ),
    Mutant(
        "smallest-remainder-gets-the-row",
        "daskps.training.data.rows:split_batch",
        "order = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))",
        "order = sorted(range(len(shares)), key=lambda i: (shares[i] - counts[i], i))",
        ("tests/training/data/test_rows.py::test_split_batch_by_largest_remainder",),
    ),
    Mutant(
        "features-beside-other-labels",
        "daskps.training.data.rows:rows",
        "order = _permutation(n, entropy)",
        "order = _permutation(n, None)",
        (
            "tests/training/data/test_rows.py::test_d3_random_is_one_permutation_of_both",
        ),
    ),
    Mutant(
        "pushes-of-one-parameter-change-places",
        "daskps.training.overlap.background:_first",
        "free = before.isdisjoint(operation.passing)",
        "free = not before.isdisjoint(operation.passing) or not before",
        (
            "tests/training/overlap/test_backlog.py::test_only_pushes_that_commute_change_places",
        ),
    ),
    Mutant(
        "what-was-issued-after-a-failure-goes-on",
        "daskps.training.overlap.background:Backlog.fail",
        "failed += self.waiting",
        "pass",
        (
            "tests/training/overlap/test_backlog.py::test_failure_takes_along_what_was_issued_after",
        ),
    ),
    Mutant(
        "prefetch-of-another-clock",
        "daskps.training.overlap.ahead:_Begun.is_for",
        "(self.clock, self.device) == (clock, device)",
        "self.device == device",
        (
            "tests/training/overlap/test_ahead.py::test_prefetch_is_what_the_next_pull_would_read",
        ),
    ),
    Mutant(
        "prefetch-without-the-own-step",
        "daskps.training.overlap.ahead:Ahead._overtaken",
        "if self._prefetch is not None and not self._session.bsp:",
        "if self._prefetch is not None and self._session.bsp:",
        (
            "tests/training/overlap/test_ahead.py::test_prefetch_is_what_the_next_pull_would_read",
        ),
    ),
    Mutant(
        "gradient-that-changes-on-its-way",
        "daskps.training.resident:_Loop._copied",
        "np.copyto(copies[index], array)",
        "copies[index] = array",
        (
            "tests/training/test_resident.py::test_read_ahead_sends_what_the_function_returned",
        ),
    ),
    Mutant(
        "own-parameters-as-a-gradient",
        "daskps.training.steps:Stepper._checked",
        "{i: a.copy() if self._is_ours(a) else a for i, a in arrays.items()},",
        "{i: a for i, a in arrays.items()},",
        ("tests/training/test_steps.py::test_a_gradient_that_is_its_params_is_copied",),
    ),
    Mutant(
        "loss-is-not-over-rows",
        "daskps.training.early_end:EarlyEnd.entry",
        "loss=sum(losses) / rows if losses and rows else None,",
        "loss=sum(losses) / len(losses) if losses and rows else None,",
        ("tests/training/test_train.py::test_history",),
    ),
    Mutant(
        "bar-in-a-task",
        "daskps.training.callbacks:chosen",
        "if current_task() or _in_tests() or not is_watched(sys.stderr):",
        "if _in_tests() or not is_watched(sys.stderr):",
        (
            "tests/training/test_callbacks.py::test_auto_is_silent_in_tests_and_in_tasks",
        ),
    ),
    Mutant(
        "callback-that-never-hears-anything",
        "daskps.training.callbacks:check",
        "if isinstance(callback, type):",
        "if callback is type:",
        (
            "tests/training/test_callbacks.py::test_check_refuses_a_class_and_a_lone_callback",
        ),
    ),
    Mutant(
        "each-call-begins-with-epoch-0",
        "daskps.training.steps:FitPlan.groups",
        "epoch=self.first + epoch,",
        "epoch=epoch,",
        (
            "tests/training/test_epochs.py"
            "::test_batches_after_a_fence_are_those_of_the_next_epoch[inside]",
        ),
    ),
    Mutant(
        "a-round-that-is-withdrawn-is-one-of-its-epoch",
        "daskps.shards.run_state:ShardRun._publish_end",
        "epochs = epochs._replace(clock=epochs.clock - back)",
        "epochs = epochs._replace(clock=epochs.clock)",
        ("tests/shards/test_epochs.py::test_a_round_that_is_withdrawn_does_not_count",),
    ),
    Mutant(
        "rounds-of-a-run-that-has-ended-are-forgotten",
        "daskps.shards.run_record:end_run",
        "record.fixed[[EPOCH, PER_EPOCH, TICKS]] = epochs",
        "record.fixed[[EPOCH, PER_EPOCH]] = epochs[:2]",
        (
            "tests/shards/test_epochs.py"
            "::test_rounds_count_and_another_process_finds_them",
        ),
    ),
    Mutant(
        "a-run-that-goes-on-begins-its-epoch-anew",
        "daskps.training.steps:FitPlan.place",
        "start = min(self.start, self.passed * per_epoch)",
        "start = 0",
        (
            "tests/training/test_resume.py"
            "::test_another_store_with_the_same_state_goes_on[inside]",
        ),
    ),
    Mutant(
        "a-checkpoint-of-another-store-that-is-further-is-passed-over",
        "daskps.training.saves:last_round",
        "elif saved.progress.epochs.place > found.place:",
        "elif saved.progress.epochs.place < (0, 0):",
        (
            "tests/training/test_checkpoints.py"
            "::test_a_store_with_a_push_is_loaded_from_none[inside]",
        ),
    ),
    Mutant(
        "half-of-a-damaged-checkpoint-is-loaded",
        "daskps.cluster.caller.recovery:_verified",
        "raise error",
        "pass",
        (
            "tests/training/test_checkpoints.py"
            "::test_nothing_is_loaded_of_what_does_not_fit[inside]",
        ),
    ),
)
