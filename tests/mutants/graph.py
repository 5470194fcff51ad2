"""Rounds of the task graph: contributions, windows and what is begun anew."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_ROWS: Final = (
    "tests/cluster/host/test_contributed_rows.py"
    "::test_sums_have_the_bits_of_an_arena[13-3-True]"
)
MUTANTS = (
    Mutant(
        "state-of-the-gradient-of-another-rank",
        "daskps.cluster.runs.graph.tasks:TaskContext.own",
        'return self.shared(("own", rank), partial(loads, self.work.body))',
        'return self.shared("own", partial(loads, self.work.body))',
        (
            "tests/training/test_functions.py"
            "::test_a_gradient_keeps_its_state_for_each_rank[graph]",
        ),
    ),
    Mutant(
        "task-of-an-attempt-that-was-given-up",
        "daskps.cluster.host.contributions:Contributions._here",
        "if place < here.place:",
        "if place > here.place and here.place == place:",
        (
            "tests/cluster/runs/graph/test_graph.py"
            "::test_a_task_of_an_attempt_that_was_given_up_changes_nothing",
        ),
    ),
    Mutant(
        "contribution-of-another-round",
        "daskps.cluster.host.contributions:Contributions.sums",
        "kept = dict(here.by_rank) if here and here.place == place else {}",
        "kept = dict(here.by_rank) if here else {}",
        (
            "tests/cluster/runs/graph/test_graph.py::test_a_later_round_frees_what_came_before",
        ),
    ),
    Mutant(
        "sum-without-a-rank",
        "daskps.cluster.host.contributions:Contributions.sums",
        "of = {rank: kept[rank] for rank in ranks}",
        "of = {rank: kept[rank] for rank in ranks[1:]}",
        (
            "tests/cluster/runs/graph/test_graph.py::test_a_later_round_frees_what_came_before",
        ),
    ),
    Mutant(
        "lost-contribution-is-left-out",
        "daskps.cluster.host.contributions:Contributions.sums",
        "lost = [rank for rank in ranks if rank not in kept]",
        "lost, ranks = [], [rank for rank in ranks if rank in kept]",
        (
            "tests/cluster/runs/graph/test_graph.py"
            "::test_a_contribution_that_is_not_there_is_never_left_out_of_a_sum",
        ),
    ),
    Mutant(
        "later-round-is-freed",
        "daskps.cluster.host.contributions:Contributions.free",
        "if here and here.place <= RoundId(run, attempt, last):",
        "if here:",
        (
            "tests/cluster/runs/graph/test_graph.py::test_contributions_are_freed_with_their_tasks_and_their_run",
        ),
    ),
    Mutant(
        "contribution-without-its-weight",
        "daskps.cluster.host.contributions:contribution",
        "if scale != 1.0:",
        "if scale == 1.0:",
        (
            "tests/cluster/runs/graph/test_graph.py::test_a_later_round_frees_what_came_before",
        ),
    ),
    Mutant(
        "window-past-a-decision",
        "daskps.cluster.runs.graph.epochs:Schedule.window",
        "if self.gated:",
        "if not self.gated:",
        (
            "tests/cluster/runs/graph/test_graph.py"
            "::test_windows_end_at_the_border_of_an_epoch_where_somebody_decides",
        ),
    ),
    Mutant(
        "rank-without-a-batch-has-a-task",
        "daskps.cluster.runs.graph.epochs:Schedule.ranks",
        "return [rank for rank, n in enumerate(self.groups) if within < n]",
        "return [rank for rank, n in enumerate(self.groups) if within <= n]",
        (
            "tests/cluster/runs/graph/test_graph.py::test_ranks_without_a_batch_left_have_no_task",
        ),
    ),
    Mutant(
        "lost-round-names-no-shard",
        "daskps.cluster.runs.graph.driver:GraphDriver._begin_anew",
        "raise lost from error",
        "raise error",
        (
            "tests/cluster/runs/graph/test_graph.py::test_a_round_that_is_lost_each_time_is_an_error",
        ),
    ),
    Mutant(
        "round-is-applied-before-its-receipts-are-kept",
        "daskps.cluster.runs.graph.tasks:reduce_round",
        "noted.result()",
        "pass",
        (
            "tests/cluster/runs/graph/test_graph.py"
            "::test_a_round_is_not_applied_before_its_receipts_are_with_the_directory",
        ),
    ),
    Mutant(
        "receipts-that-nobody-has-entered-are-dropped",
        "daskps.cluster.directory.trainers:TrainerMessages.on_receipts",
        "kept = {n: of for n, of in entry.receipts.items() if n >= since}",
        "kept = {n: of for n, of in entry.receipts.items() if n > since}",
        (
            "tests/cluster/runs/test_progress.py"
            "::test_receipts_are_kept_until_the_client_has_entered_them",
        ),
    ),
    Mutant(
        "run-ends-with-the-only-owner",
        "daskps.cluster.directory.run:RunState.survives",
        "return bool(self.mailboxes)",
        "return False",
        (
            "tests/cluster/runs/test_progress.py"
            "::test_rounds_go_on_where_others_have_their_mailboxes",
        ),
    ),
    Mutant(
        "rows-of-a-subtree-along-the-whole-tree",
        "daskps.cluster.host.contributions:_sum",
        "nodes = {(r - lo, r - lo + 1): node for r, node in of.items()}",
        "nodes = {(i, i + 1): node for i, node in enumerate(of.values())}",
        (_ROWS,),
    ),
    Mutant(
        "mean-of-rows-without-ranks-that-brought-none",
        "daskps.cluster.host.partial_sums:reduced",
        "weight = tree_sum({rank: w for rank, (_, _, w) in brought.items()}, 0, size)",
        "weight = tree_sum({r: w for r, (i, _, w) in brought.items() if len(i)}, 0, size)",
        (_ROWS,),
    ),
    Mutant(
        "rows-that-were-not-asked-for-take-memory",
        "daskps.cluster.host.partial_sums:SumsRequest.sizes",
        "if nbytes > self.row_nbytes:",
        "if nbytes < 0:",
        (
            "tests/cluster/host/test_contributed_rows.py"
            "::test_sums_that_were_not_asked_for_take_no_memory",
        ),
    ),
    Mutant(
        "rows-of-a-subtree-are-forgotten",
        "daskps.cluster.host.partial_sums:reduced",
        "found[position] = PartialSum(data, weight, ids)",
        "pass",
        (_ROWS,),
    ),
    Mutant(
        "all-ranks-draw-the-same-ids",
        "daskps.training.steps:GraphStepper.__call__",
        "key = self.plan.key(number, self.plan.rounds, rank)",
        "key = self.plan.key(number, self.plan.rounds, 0)",
        (
            "tests/training/test_graph_rows.py"
            "::test_executions_have_the_same_bits_with_rows[inside-3-sum]",
        ),
    ),
    Mutant(
        "rows-of-a-batch-of-another-round",
        "daskps.cluster.runs.graph.tasks:TaskContext.read_rows",
        "self._read(place, target)",
        "self._read(type(place)(place.run, 0, max(0, place.round - 1)), target)",
        (
            "tests/training/test_graph_rows.py"
            "::test_executions_have_the_same_bits_with_rows[inside-1-mean]",
        ),
    ),
)
