"""Cuts, and processes that act for the owner of a shard."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "cut-holds-nothing",
        "daskps.shards.cuts.cut:Cut.holds",
        "return True",
        "return False",
        (
            "tests/shards/cuts/test_cut.py::test_step_between_two_beginnings_is_in_neither_or_both",
        ),
    ),
    Mutant(
        "cut-holds-what-it-waits-for",
        "daskps.shards.cuts.cut:Cut.holds",
        "if (owner, step.sequence) in self.missing:",
        "if (owner, step.sequence) not in self.missing:",
        ("tests/shards/cuts/test_cut.py::test_cut_waits_for_a_step_on_its_way",),
    ),
    Mutant(
        "cut-waits-where-a-push-does-not-go",
        "daskps.shards.cuts.cut:agree",
        "if (meant is None or _contains(meant, shard)) and not _has(",
        "if not _has(",
        (
            "tests/shards/cuts/test_cut.py::test_partial_push_is_waited_for_only_where_it_goes",
        ),
    ),
    Mutant(
        "cut-at-a-round-not-all-have",
        "daskps.shards.cuts.cut:agree",
        "last = min(r.rounds for r in reports)",
        "last = max(r.rounds for r in reports)",
        ("tests/shards/cuts/test_cut.py::test_bsp_cut_serves_the_last_round_all_have",),
    ),
    Mutant(
        "cut-across-the-beginning-of-a-run",
        "daskps.shards.cuts.cut:agree",
        "if len({(r.run, r.rounds < 0) for r in reports}) > 1:",
        "if len({(r.run, r.rounds < 0) for r in reports}) > 2:",
        ("tests/shards/cuts/test_cut.py::test_run_on_some_shards_only_starts_again",),
    ),
    Mutant(
        "cut-waits-for-what-was-given-up",
        "daskps.shards.cuts.cut:Cut.holds",
        "self.acknowledge(owner, step.floor)",
        "pass",
        (
            "tests/shards/cuts/test_cut.py::test_push_given_up_during_the_cut_is_not_waited_for",
        ),
    ),
    Mutant(
        "doubt-that-is-settled",
        "daskps.shards.cuts.cut:_in_doubt",
        "(floor == newest) & (oldest == newest) & (n == len(reports))",
        "(floor == newest) & (oldest == newest)",
        ("tests/shards/cuts/test_cut.py::test_cut_waits_for_a_step_on_its_way",),
    ),
    Mutant(
        "cut-lets-deputies-push",
        "daskps.shards.cut_requests:begin_cut",
        "shard.set_gate()",
        "pass",
        (
            "tests/shards/test_deputy.py::test_cut_lets_deputies_read_and_hands_their_pushes_back",
        ),
    ),
    Mutant(
        "held-steps-are-lost",
        "daskps.shards.shard:Shard.release_cut",
        "return cut.stop(broken(why)) + self.submit(cut.held)",
        "return cut.stop(broken(why))",
        ("tests/shards/cuts/test_cut.py::test_release_wakes_held_steps_in_order",),
    ),
    Mutant(
        "deputy-of-a-former-owner",
        "daskps.shards.refusals:is_for_owner",
        "if gate in (CLOSED, RELEASED) or segment.header[GENERATION] != generation:",
        "if gate in (CLOSED, RELEASED) or segment.header[GENERATION] < generation:",
        (
            "tests/shards/test_deputy.py"
            "::test_shard_that_has_another_owner_by_now_is_left_to_that",
        ),
    ),
    Mutant(
        "deputy-of-a-released-shard",
        "daskps.shards.refusals:is_for_owner",
        "if gate in (CLOSED, RELEASED) or segment.header[GENERATION] != generation:",
        "if gate == CLOSED or segment.header[GENERATION] != generation:",
        (
            "tests/cluster/host/test_departure.py"
            "::test_a_released_shard_serves_nobody_until_it_is_adopted",
        ),
    ),
    Mutant(
        "deputy-takes-what-the-owner-answers-for",
        "daskps.shards.refusals:is_for_owner",
        "if gate != OPEN or step.touched is not None:",
        "if gate != OPEN:",
        (
            "tests/shards/test_deputy.py::test_what_the_owner_answers_for_is_handed_back_unchanged",
        ),
    ),
    Mutant(
        "deputy-fills-the-table",
        "daskps.shards.refusals:is_for_owner",
        "return producers.lacks_room(segment.current, step.producer)",
        "return False",
        (
            "tests/shards/test_deputy.py::test_push_that_finds_no_room_is_for_the_owner"
            "_who_asks_the_directory",
        ),
    ),
    Mutant(
        "closed-gate-opens-again",
        "daskps.shards.deputy:set_gate",
        "if segment.header[GATE] != CLOSED:",
        "if gate != CLOSED or segment.header[GATE] != CLOSED:",
        (
            "tests/shards/test_deputy.py::test_closed_gate_ends_every_wait_and_stays_closed",
        ),
    ),
    Mutant(
        "wait-that-a-gate-does-not-end",
        "daskps.shards.parked:ParkedTickets._sight",
        "return header[FLIP], header[GATE], header[LIMIT], self._run_state.stopped",
        "return header[FLIP], header[LIMIT], self._run_state.stopped",
        (
            "tests/shards/test_deputy.py::test_closed_gate_ends_every_wait_and_stays_closed",
        ),
    ),
    Mutant(
        "heir-begins-a-run-that-has-ended",
        "daskps.shards.run_state:ShardRun.begin",
        "if run == self._segment.header[ENDED]:",
        "if run == self._ended[0]:",
        ("tests/shards/cuts/test_cut.py::test_heir_refuses_a_run_that_has_ended",),
    ),
    Mutant(
        "floor-that-only-the-owner-knows",
        "daskps.shards.cuts.in_flight:InFlight.raise_floor",
        "self._segment.amend(RECORD, ((at, floor),))",
        "pass",
        ("tests/shards/cuts/test_cut.py::test_heir_knows_what_was_given_up",),
    ),
    Mutant(
        "floor-that-comes-before-a-push-is-forgotten",
        "daskps.shards.cuts.in_flight:InFlight.raise_floor",
        "producers.open_row(self._segment, owner, floor)",
        "pass",
        (
            "tests/shards/cuts/test_cut.py"
            "::test_word_that_a_push_was_given_up_may_come_before_it",
        ),
    ),
    Mutant(
        "floor-of-a-trainer-is-not-noted",
        "daskps.shards.run_record:note_step",
        "row[RANK_FLOOR] = max(row[RANK_FLOOR], step.floor)",
        "pass",
        ("tests/shards/cuts/test_cut.py::test_heir_knows_what_was_given_up",),
    ),
)
