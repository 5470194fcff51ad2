"""Lines of states, and of copies that install them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_STATES = "tests/shards/test_states.py"
_ARRAYS = f"{_STATES}::test_arrays_have_the_bits_of_their_shard"
_ROWS = f"{_STATES}::test_rows_have_the_bits_of_their_shard"
_COPIES = "tests/cluster/test_copies.py"
_BACKED = "tests/cluster/host/test_backed.py"
_DRAIN = "tests/cluster/test_drain.py"
_RESHARD = "tests/cluster/test_reshard.py"
_KILLED = f"{_STATES}::test_killed_after_any_store_of_an_install"

MUTANTS = (
    Mutant(
        "reset-that-no-copy-hears-of",
        "daskps.shards.memory.publication:Publication.reset",
        "self.record.changed[:] = self.flip",
        "pass",
        (_ARRAYS,),
    ),
    Mutant(
        "withdrawal-that-no-copy-hears-of",
        "daskps.shards.memory.publication:Withdrawal._begin",
        "self.record.changed[self.old.changed == flip - 1] = flip",
        "pass",
        (_ARRAYS,),
    ),
    Mutant(
        "slots-of-rows-reset-and-no-copy-hears-of-it",
        "daskps.shards.memory.undo:_reset",
        "table.feed.stop()",
        "pass",
        (f"{_STATES}::test_a_reset_of_rows_sends_all_of_them",),
    ),
    Mutant(
        "part-of-a-piece-that-was-changed-elsewhere-too",
        "daskps.shards.memory.publication:Publication._note_parts",
        "if last != before:",
        "if False:",
        (_ARRAYS,),
    ),
    Mutant(
        "part-that-was-noted-after-the-copy-was-here",
        "daskps.shards.memory.segment:Segment.part_since",
        "if since <= flip and last == self.current.changed[position]:",
        "if last == self.current.changed[position]:",
        (_ARRAYS,),
    ),
    Mutant(
        "part-of-a-piece-without-the-rest",
        "daskps.shards.states:_Successor.commit",
        "segment.payload.copy(into[part.stop :], before[part.stop :])",
        "pass",
        (_ARRAYS,),
    ),
    Mutant(
        "round-that-a-copy-may-go-back-to-is-written-over",
        "daskps.shards.states:receive",
        "if segment.is_together or state.goes_back or not state.pieces:",
        "if segment.is_together or not state.pieces:",
        (_ARRAYS,),
    ),
    Mutant(
        "places-that-nobody-knows-of",
        "daskps.shards.states:receive",
        "record, segment.writing = segment.current, segment.flip + 1",
        "record = segment.current",
        (_ARRAYS,),
    ),
    Mutant(
        "slots-in-force-are-written-over",
        "daskps.shards.states:receive",
        "if segment.n_sides > 1:",
        "if True:",
        (_ARRAYS,),
    ),
    Mutant(
        "pushes-write-over-a-state-that-is-sent",
        "daskps.cluster.host.moving:_NextState.take",
        "done += owner.hold_updates(last_flip, pushes=True)",
        "done += owner.hold_updates(last_flip)",
        (f"{_BACKED}::test_pushes_wait_while_a_large_state_is_sent_from_the_shard",),
    ),
    Mutant(
        "pushes-wait-where-rounds-alone-have-to",
        "daskps.shards.shard:Shard._apply",
        "if self.holds_pushes and self._is_held:",
        "if self._is_held:",
        ("tests/shards/test_shard.py::test_pushes_go_on_where_rounds_alone_are_held",),
    ),
    Mutant(
        "state-in-part-ends-whole",
        "daskps.cluster.host.moving:_next_here.begin.answer",
        "return held_back(frame, lambda: segment.writing <= flip)",
        "return frame",
        (f"{_BACKED}::test_a_large_state_that_something_has_written_over_has_no_end",),
    ),
    Mutant(
        "copy-that-takes-its-time-is-struck-off",
        "daskps.cluster.host.moving:_NextState.take",
        "backing.n_silent = -(self.state.nbytes // _LOOK_NBYTES)",
        "backing.n_silent = 0",
        (f"{_COPIES}::test_a_large_state_takes_longer_than_one_may_be_silent",),
    ),
    Mutant(
        "state-that-takes-its-time-is-asked-for-again",
        "daskps.cluster.host.copies:_answer",
        "await _say_silent(host, of)",
        "raise TimeoutError",
        (f"{_COPIES}::test_a_large_state_takes_longer_than_one_may_be_silent",),
    ),
    Mutant(
        "state-in-part-keeps-its-copy",
        "daskps.cluster.host.coming:Asking.closed",
        "if self._receiving is not None:",
        "if False:",
        (f"{_BACKED}::test_a_large_state_goes_where_nothing_is_in_force",),
    ),
    Mutant(
        "state-without-producers",
        "daskps.shards.states:take",
        "words = [(part.start, np.array(record.words[part])) for part in record.used()]",
        "words = [(part.start, np.array(record.words[part])) for part in record.used()[:1]]",
        (_ARRAYS,),
    ),
    Mutant(
        "state-without-the-header",
        "daskps.shards.states:install",
        "segment.amend(HEADER, [*zip(_HEADER, state.header.tolist(), strict=True)])",
        "pass",
        (f"{_STATES}::test_a_fence_comes_along",),
    ),
    Mutant(
        "buffers-of-the-owner-in-a-copy",
        "daskps.shards.states:_Successor._begin",
        "record.words[part] = self.old.words[part]",
        "pass",
        (_ARRAYS,),
    ),
    Mutant(
        "slots-of-rows-before-their-log",
        "daskps.shards.states:_Successor._put_rows",
        "update = RowUpdate(numbers, of.rows, replace=True)",
        "update = RowUpdate(numbers[:0], of.rows[:0], replace=True)",
        (_KILLED,),
    ),
    Mutant(
        "counts-that-no-copy-has",
        "daskps.shards.arrays.unbounded_rows:UnboundedRows.bring",
        "n = index.set_counts(known.counted, known.counts, log)",
        "n = log.begin",
        (_ROWS,),
    ),
    Mutant(
        "removed-candidates-stay-in-a-copy",
        "daskps.shards.arrays.unbounded_rows:UnboundedRows.change",
        "return update._replace(ids=_NOBODY), update.ids[rows != -1]",
        "return update._replace(ids=_NOBODY), update.ids[rows >= 0]",
        (_ROWS,),
    ),
    Mutant(
        "ids-that-went-unseen-stay-in-a-copy",
        "daskps.shards.states:_with_all_gone",
        "without = np.union1d(of.known.without, gone)",
        "without = of.known.without",
        (f"{_STATES}::test_ids_that_went_unseen_go",),
    ),
    Mutant(
        "marks-of-an-owner-cost-a-copy-its-last-round",
        "daskps.shards.states:install",
        "if state.now.flip > state.since.flip:",
        "if state.now.flip >= state.since.flip:",
        (_ARRAYS,),
    ),
    Mutant(
        "rows-that-were-freed-meanwhile-in-a-copy",
        "daskps.shards.frozen:LiveShard.get",
        "return np.maximum(found, 1) if span.area == TOUCHED else found",
        "return found",
        (_ROWS,),
    ),
    Mutant(
        "rounds-that-their-copy-lacks",
        "daskps.cluster.host.moving:_NextState._hear",
        "last_flip = backing.flip + 1 if owner.run_state.is_bsp else None",
        "last_flip = None",
        (f"{_BACKED}::test_a_round_waits_until_the_copy_has_the_one_before",),
    ),
    Mutant(
        "promotion-under-the-number-of-an-adopter",
        "daskps.cluster.directory.copies:SecondCopies._promote",
        "runs, number = self._moves.runs.for_owner(entry), entry.generations[shard] + 2",
        "runs, number = self._moves.runs.for_owner(entry), entry.generations[shard] - 1",
        (
            "tests/cluster/directory/test_departures.py"
            "::test_an_adopter_that_is_asked_as_a_copy_takes_over_hears_that_it_has",
        ),
    ),
    Mutant(
        "late-state-of-a-former-owner",
        "daskps.cluster.host.coming:Coming.begin",
        "if self.turn is not turn:",
        "if False:",
        (f"{_COPIES}::test_a_late_state_of_a_former_owner_changes_nothing",),
    ),
    Mutant(
        "last-state-before-the-owner-stops",
        "daskps.cluster.host.moving:_last.attempt",
        "return hosted.hand_over(generation)",
        "return []",
        (f"{_DRAIN}::test_acknowledged_pushes_count_once",),
    ),
    Mutant(
        "reads-go-on-at-the-former-owner",
        "daskps.cluster.host.hosted:HostedShard.hand_over",
        "self.shard.segment.header[GENERATION] = generation",
        "pass",
        (
            "tests/cluster/host/test_moving.py::test_a_handed_over_shard_is_read_by_nobody",
        ),
    ),
    Mutant(
        "deliveries-of-an-open-round-stay-behind",
        "daskps.cluster.host.moving:_last",
        'answer["mailbox"] = pack_array(np.array(box.mailbox.memory))',
        'answer["mailbox"] = pack_array(np.zeros_like(box.mailbox.memory))',
        (f"{_DRAIN}::test_runs_go_on",),
    ),
    Mutant(
        "rounds-go-on-before-the-last",
        "daskps.shards.shard:Shard._is_held",
        "return self.last_flip is not None and self.segment.flip >= self.last_flip",
        "return False",
        ("tests/cluster/host/test_moving.py::test_the_last_state_is_one_round",),
    ),
    Mutant(
        "owner-that-does-not-take-back",
        "daskps.cluster.host.moving:_back",
        "hosted.resume(generation)",
        "pass",
        (f"{_DRAIN}::test_an_owner_goes_on_where_the_answer_is_lost",),
    ),
    Mutant(
        "host-answers-for-the-shards-that-it-has-left",
        "daskps.cluster.host.host:ShardHost.handle_control",
        "if type(shard) is int and (store, shard) not in self.shards:",
        "if type(shard) is str:",
        (
            "tests/cluster/host/test_moving.py::test_a_host_answers_for_all_it_should_have",
        ),
    ),
    Mutant(
        "other-shards-know-no-pushes",
        "daskps.cluster.host.installation:_Relaying.count",
        "take_over(hosted.shard.segment.current, self.applied)",
        "pass",
        (f"{_RESHARD}::test_a_push_whose_answer_is_lost_counts_once",),
    ),
    Mutant(
        "push-to-other-shards-under-a-new-number",
        "daskps.store.handle:Handle._again",
        "turn = Turn(step.sequence, step.floor, step.given_up)",
        "turn = Turn(step.sequence + 1, step.floor, step.given_up)",
        (f"{_RESHARD}::test_a_push_whose_answer_is_lost_counts_once",),
    ),
    Mutant(
        "shards-that-went-on-are-left-behind",
        "daskps.cluster.host.moving:_stop.stop",
        "going.live.check()",
        "pass",
        (f"{_RESHARD}::test_a_shard_that_went_on_is_not_left_behind",),
    ),
    Mutant(
        "old-shards-read-on",
        "daskps.cluster.host.moving:_stop.stop",
        "return going.hosted.hand_over(generation)",
        "return []",
        (f"{_RESHARD}::test_reads_wait_for_the_new_layout",),
    ),
)
