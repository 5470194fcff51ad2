"""Rounds of the task graph: contributions, windows and what is begun anew."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
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
        'if reduce == "mean" and weight != 1.0:',
        'if reduce == "mean" and weight == 1.0:',
        (
            "tests/cluster/runs/graph/test_graph.py::test_a_later_round_frees_what_came_before",
        ),
    ),
    Mutant(
        "window-past-a-decision",
        "daskps.cluster.runs.graph.windows:Schedule.window",
        "if self.gated:",
        "if not self.gated:",
        (
            "tests/cluster/runs/graph/test_graph.py"
            "::test_windows_end_at_the_border_of_an_epoch_where_somebody_decides",
        ),
    ),
    Mutant(
        "rank-without-a-batch-has-a-task",
        "daskps.cluster.runs.graph.windows:Schedule.ranks",
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
)
