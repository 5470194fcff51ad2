"""Rows of tables: what is changed in place, taken back, and read meanwhile."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_ROUNDS = "tests/shards/rounds/test_row_rounds.py"
_LOG = "tests/kernels/test_row_log.py"
_ANY = "tests/shards/test_unbounded_rows.py"
_FEED = "tests/shards/memory/test_feed.py"
_POLICY = "tests/shards/test_row_policy.py"
_CHANGED = "tests/shards/test_row_changes.py"
_CHANGES = "tests/cluster/test_changes.py"
_ANY_CRASHES = "tests/shards/test_unbounded_row_crashes.py"
_READS = "tests/cluster/caller/test_row_reads.py"
_ROWS, _CRASHES = "tests/shards/test_rows.py", "tests/shards/test_row_crashes.py"

MUTANTS = (
    Mutant(
        "rows-found-before-a-change",
        "daskps.shards.arrays.unbounded_rows:UnboundedRows.find_again",
        "and looked.sequence == sequence",
        "",
        (f"{_READS}::test_a_push_of_the_ids_of_a_read_knows_where_their_rows_are",),
    ),
    Mutant(
        "rows-found-of-an-array-that-is-written",
        "daskps.shards.reader:_look_up",
        "ids = scratch.empty(len(ids), np.int64)",
        "pass",
        (f"{_READS}::test_a_push_of_the_ids_of_a_read_knows_where_their_rows_are",),
    ),
    Mutant(
        "copies-of-rows-that-change",
        "daskps.shards.frozen_rows:copy_all_rows",
        "return found if rest.holds() else None",
        "return found",
        ("tests/shards/test_frozen.py::test_no_copy_is_made_of_rows_that_change",),
    ),
    Mutant(
        "copies-of-rows-by-number",
        "daskps.shards.frozen_rows:_copy_all",
        "gather(rows, numbers, array, cache_dir=segment.cache_dir)",
        "array[:] = rows[: len(ids)]",
        (
            "tests/shards/test_frozen.py::test_a_copy_has_all_rows_by_id_also_those_that_came_meanwhile",
        ),
    ),
    Mutant(
        "rows-of-a-round-over-those-of-others",
        "daskps.shards.rounds.arena:Arena.place",
        "start = max((span.start + span.n for span in taken), default=0)",
        "start = 0",
        (f"{_ROUNDS}::test_any_order_at_any_of_two_gives_the_bits_of_the_tree",),
    ),
    Mutant(
        "rows-of-a-round-are-no-mean",
        "daskps.shards.rounds.round:Round._merge",
        "if is_mean:",
        "if not spans:",
        (f"{_ROUNDS}::test_the_mean_is_of_the_ranks_that_brought_the_table",),
    ),
    Mutant(
        "rows-are-noted-in-the-table-in-force",
        "daskps.shards.rounds.round:Round._keep",
        "other.note_rows(step.rank, step.weight, came.spans)",
        "(table.note_rows(*(it := (step.rank, step.weight, came.spans))), other.note_rows(*it))",
        (f"{_ROUNDS}::test_what_died_on_its_way_into_a_round_is_not_in_it",),
    ),
    Mutant(
        "rounds-take-rows-without-room",
        "daskps.shards.rounds.arena:Arena.check",
        "if others + n > self.room:",
        "if n > self.room:",
        (f"{_ROUNDS}::test_rows_without_room_are_refused_before_anything_is_stored",),
    ),
    Mutant(
        "arrays-of-all-pieces-leave-rows-behind",
        "daskps.shards.rounds.round:Round._publish",
        "has_rows = bool(came.spans or table.words[words.N_BROUGHT])",
        "has_rows = bool(came.spans)",
        (f"{_ROUNDS}::test_rows_beside_arrays_of_all_pieces",),
    ),
    Mutant(
        "pushes-of-rows-lent-before-the-tick",
        "daskps.shards.rounds.unticked:join_rows",
        "if known is None and not (step.tick or step.owned):",
        "if known is None and step.weight < 0:",
        (f"{_ROUNDS}::test_pushes_of_a_clock_have_the_bits_of_one[False]",),
    ),
    Mutant(
        "node-that-is-not-complete",
        "daskps.kernels.row_merge:is_within",
        "return lo <= rank < hi",
        "return rank < lo",
        (
            "tests/kernels/test_row_merge.py::test_sums_have_the_bits_of_the_tree[8-float32]",
        ),
    ),
    Mutant(
        "feed-written-over-without-a-word",
        "daskps.shards.memory.feed:Feed.note",
        "head[LOST_IDS] = max(head[LOST_IDS], stop - room)",
        "pass",
        (
            f"{_FEED}::test_any_pushes_are_told_or_said_to_be_gone[0]",
            f"{_FEED}::test_what_was_written_over_by_a_push_that_is_refused_is_gone",
        ),
    ),
    Mutant(
        "feed-counts-what-is-rolled-back",
        "daskps.shards.memory.feed:Feed.note",
        "n = told[self._at]",
        "n = self._n = getattr(self, '_n', -1) + 1",
        (
            f"{_FEED}::test_any_pushes_are_told_or_said_to_be_gone[0]",
            f"{_CRASHES}::test_killed_after_any_store[several]",
        ),
    ),
    Mutant(
        "feed-forgets-a-round-that-is-withdrawn",
        "daskps.shards.memory.publication:Withdrawal.commit",
        "table.feed.again(self.old, self.record)",
        "self.record.told[0] = self.old.told[0]",
        (f"{_CRASHES}::test_killed_while_a_publication_of_rows_is_withdrawn[batch0]",),
    ),
    Mutant(
        "feed-knows-of-a-round-from-before-it-began",
        "daskps.shards.memory.publication:Withdrawal.commit",
        "if table.since(self.old) or table.feed.began == self.flip - 1:",
        "if table.since(self.old):",
        (
            f"{_FEED}::test_nothing_is_told_where_a_round_is_withdrawn_from_before_it_"
            "began",
        ),
    ),
    Mutant(
        "feed-takes-the-rest-for-all-of-it",
        "daskps.shards.memory.feed:Feed._newer",
        "return entries if after <= since else None",
        "return entries",
        (f"{_FEED}::test_any_pushes_are_told_or_said_to_be_gone[0]",),
    ),
    Mutant(
        "changes-without-a-look-at-what-ran-into-them",
        "daskps.shards.row_changes:changes",
        "return found if is_read and rest.holds() else None",
        "return found",
        (f"{_CHANGED}::test_a_look_that_an_update_runs_into_finds_nothing[0]",),
    ),
    Mutant(
        "changes-said-later-are-left-out",
        "daskps.store.changes:find_changes",
        "parts[shard].take(_Part.of(meta, table, shard, one))",
        "parts[shard].version = one.version",
        (f"{_CHANGES}::test_who_hears_of_changes_has_the_table[few]",),
    ),
    Mutant(
        "one-shard-that-has-forgotten-tells-all-alone",
        "daskps.store.changes:find_changes",
        "if others:",
        "if not others:",
        (f"{_CHANGES}::test_a_shard_that_has_forgotten_has_all_told_anew",),
    ),
    Mutant(
        "changes-without-rows-whose-time-is-over",
        "daskps.shards.row_changes:_changed",
        "return np.union1d(ids, unbounded.keys[: unbounded.end][is_over])",
        "return ids",
        (f"{_CHANGED}::test_rows_whose_time_is_over_are_told[policy0]",),
    ),
    Mutant(
        "log-of-rows-goes-on-from-the-last",
        "daskps.shards.memory.undo:begin",
        "segment.tables[ordinal].begin(flip)",
        "pass",
        (f"{_CRASHES}::test_killed_after_any_store[rows]",),
    ),
    Mutant(
        "rows-in-force-are-rolled-back",
        "daskps.shards.memory.undo:_roll_back",
        "if flip_of(table.buffers.undo[0]) == flip:",
        "if flip_of(table.buffers.undo[0]) >= flip - 1:",
        (f"{_CRASHES}::test_killed_after_any_store",),
    ),
    Mutant(
        "what-was-begun-is-not-gone-on-with",
        "daskps.shards.memory.undo:roll_back",
        "if word >> _KIND_BITS == flip + 1:",
        "if word >> _KIND_BITS == flip + 2:",
        (f"{_CRASHES}::test_killed_while_slots_get_their_first_values",),
    ),
    Mutant(
        "what-never-began-is-gone-on-with",
        "daskps.shards.memory.undo:begin",
        "segment.header[FORWARD] = 0",
        "pass",
        (f"{_CRASHES}::test_killed_before_a_reset_began_and_then_in_a_push",),
    ),
    Mutant(
        "end-of-a-run-before-its-beginning-is-settled",
        "daskps.shards.run_state:ShardRun.end",
        "roll_back(self._segment)",
        "pass",
        (f"{_CRASHES}::test_the_end_of_a_run_does_not_come_before_its_beginning",),
    ),
    Mutant(
        "slots-of-rows-keep-their-values",
        "daskps.shards.memory.publication:Publication.commit",
        "if (self._resets or self.withdraws) and segment.tables:",
        "if self.withdraws and segment.tables:",
        (f"{_CRASHES}::test_killed_while_slots_get_their_first_values",),
    ),
    Mutant(
        "rows-that-were-refused-stay",
        "daskps.shards.pushes:Pushes._commit",
        "roll_back(self._segment)",
        "pass",
        (f"{_ROWS}::test_rows_that_are_not_finite_change_nothing",),
    ),
    Mutant(
        "slots-that-an-add-leaves-alone-are-not-in-the-log",
        "daskps.shards.arrays.row_operations:RowUpdate.apply",
        "payload.gather(slot, self.ids, out, **where)",
        "pass",
        (f"{_ROWS}::test_slots_come_back_with_rows_whatever_has_changed_these",),
    ),
    Mutant(
        "log-that-is-full-takes-more",
        "daskps.shards.pushes:Pushes.apply",
        "and not publication.has_room(planned)",
        "and not planned",
        (
            f"{_ROWS}"
            "::test_pushes_that_queue_up_share_a_publication_as_far_as_the_log_reaches",
        ),
    ),
    Mutant(
        "rows-of-another-shard",
        "daskps.shards.arrays.row_planning:_are_distinct",
        "return are_distinct(ids, piece.first_row, piece.n_rows, cache_dir=cache_dir)",
        "return are_distinct(ids, piece.first_row, 2**40, cache_dir=cache_dir)",
        (f"{_ROWS}::test_rows_that_do_not_fit_are_refused",),
    ),
    Mutant(
        "rows-that-a-writer-ran-into-are-good",
        "daskps.shards.reader:ShardReader._copy_rows",
        "return is_still or is_logged(sequence, header[ROWS_SEQUENCE])",
        "return True",
        (f"{_ROWS}::test_a_read_that_an_update_runs_into_is_told_so",),
    ),
    Mutant(
        "rows-that-a-writer-is-at-are-as-they-are",
        "daskps.shards.memory.table_memory:TableMemory.put_back",
        "if flip_of(word) > flip and (n := entries_of(word)):",
        "if flip_of(word) > flip + 1 and (n := entries_of(word)):",
        (f"{_ROWS}::test_what_a_writer_has_changed_is_read_as_it_was",),
    ),
    Mutant(
        "rows-that-are-taken-back-are-in-the-log",
        "daskps.shards.memory.undo:_roll_back",
        "segment.header[ROWS_SEQUENCE] |= UNTOLD",
        "pass",
        (
            f"{_ROWS}::test_a_reader_is_told_of_a_writer_that_is_being_taken_back",
            f"{_ROWS}::test_what_a_writer_has_changed_is_read_as_it_was",
        ),
    ),
    Mutant(
        "rows-that-were-taken-back-are-in-the-log",
        "daskps.shards.memory.undo:roll_back",
        "further = 4 if sequence & UNTOLD == UNTOLD else 0",
        "further = 0",
        (f"{_ROWS}::test_what_a_writer_has_changed_is_read_as_it_was",),
    ),
    Mutant(
        "rows-that-are-not-finite-stay-without-a-ticket",
        "daskps.shards.pushes:Pushes._commit",
        "roll_back(self._segment)",
        "pass",
        (
            "tests/shards/test_row_steps.py"
            "::test_rows_after_rows_that_are_not_finite_are_undone",
        ),
    ),
    Mutant(
        "rows-after-a-dead-writer-without-a-ticket",
        "daskps.shards.shard:Shard.step",
        "or header[ROWS_SEQUENCE] & 1  # who came before died at rows",
        "or False",
        (
            "tests/shards/test_row_steps.py"
            "::test_what_there_is_something_to_say_about_is_asked",
        ),
    ),
    Mutant(
        "rows-near-that-a-writer-ran-into-are-good",
        "daskps.shards.reader:ShardReader._copy_rows",
        "is_still = header[ROWS_SEQUENCE] == sequence and not sequence & LOGGED",
        "is_still = True",
        (
            "tests/cluster/caller/test_row_reads.py"
            "::test_a_copy_that_an_update_runs_into_is_made_again",
            "tests/cluster/caller/test_row_reads.py"
            "::test_what_one_update_has_changed_meanwhile_comes_from_its_log",
        ),
    ),
    Mutant(
        "rows-that-are-being-taken-back-are-good",
        "daskps.shards.memory.undo:is_logged",
        "return now & UNTOLD != UNTOLD and now <= (began | UNTOLD) + 1",
        "return now <= (began | UNTOLD) + 1",
        (f"{_ROWS}::test_a_reader_is_told_of_a_writer_that_is_being_taken_back",),
    ),
    Mutant(
        "publication-before-is-that-in-force",
        "daskps.shards.reader:ShardReader._copy_rows",
        "if is_still and not is_before:",
        "if is_still:",
        (f"{_ROWS}::test_the_publication_before_is_there",),
    ),
    Mutant(
        "second-of-repeats-is-lost",
        "daskps.shards.arrays.row_planning:each_once",
        "return found.ids, payload.sum_rows(found, rows, at, empty=empty), None, numbers",
        "return found.ids, rows, found.last(at), numbers",
        (f"{_ROWS}::test_repeats_are_one_update_and_in_assign_the_last_holds",),
    ),
    Mutant(
        "repeats-have-the-rows-of-others",
        "daskps.shards.arrays.row_planning:each_once",
        "numbers = numbers[found.last()]",
        "numbers = numbers[: len(found.ids)]",
        (f"{_ANY}::test_unbounded_rows_are_those_of_a_plain_dict",),
    ),
    Mutant(
        "rows-of-any-ids-that-repeat",
        "daskps.shards.arrays.row_planning:_are_distinct",
        "return are_distinct(numbers, 0, end, cache_dir=cache_dir)",
        "return True",
        (f"{_ANY}::test_unbounded_rows_are_those_of_a_plain_dict",),
    ),
    Mutant(
        "rows-changed-in-blocks-do-not-count-in-the-log",
        "daskps.kernels.row_log:in_blocks",
        "mark(log.word, log.base + entries.stop)",
        "pass",
        (f"{_LOG}::test_several_updates_are_undone_and_read_as_before",),
    ),
    Mutant(
        "ids-of-rows-are-read-twice",
        "daskps.kernels.row_log:in_blocks",
        "part = np.array(ids[lo : lo + step])",
        "part = ids[lo : lo + step]",
        (f"{_LOG}::test_ids_that_their_owner_changes_meanwhile_leave_a_whole_log",),
    ),
    Mutant(
        "publication-before-is-read-from-the-newest-entry",
        "daskps.kernels.row_log:find_oldest",
        "if not table[at]:",
        "if n:",
        (f"{_LOG}::test_several_updates_are_undone_and_read_as_before",),
    ),
    Mutant(
        "words-of-ids-are-not-rolled-back",
        "daskps.shards.memory.table_memory:TableMemory.roll_back",
        "self.unbounded.roll_back()",
        "pass",
        (f"{_ANY_CRASHES}::test_killed_after_any_store[more rows]",),
    ),
    Mutant(
        "a-row-that-nobody-had-begins-with-zeros",
        "daskps.shards.arrays.unbounded_rows:UnboundedRows._fill",
        "slot[rows] = value",
        "pass",
        (f"{_ANY}::test_unbounded_rows_are_those_of_a_plain_dict[1]",),
    ),
    Mutant(
        "second-push-takes-what-was-found-before-the-first",
        "daskps.shards.memory.publication:Publication._write_rows",
        "known = update if not i else update._replace(rows=None)",
        "known = update",
        (f"{_ANY}::test_a_push_that_queued_up_behind_a_removal_begins_its_rows_anew",),
    ),
    Mutant(
        "a-deputy-takes-memory",
        "daskps.shards.shard:Shard.as_deputy",
        "segment.memory = None",
        "pass",
        (f"{_ANY}::test_a_deputy_hands_over_what_needs_memory",),
    ),
    Mutant(
        "a-row-that-went-just-now-was-nobodys",
        "daskps.kernels.index_changes:vacant",
        "book[_KEPT] = book[BEGIN] > 0",
        "book[_KEPT] = 0",
        (f"{_ANY_CRASHES}::test_killed_after_any_store[rows that go and come]",),
    ),
    Mutant(
        "the-clock-of-a-table-stands-still",
        "daskps.shards.memory.publication:Publication.add",
        "record.clocks[ordinal] += not operation.forget",
        "pass",
        (
            f"{_POLICY}::test_rows_are_those_of_a_plain_dict_on_any_number_of_shards[time-1]",
        ),
    ),
    Mutant(
        "who-was-too-late-goes-on-with-its-row",
        "daskps.shards.arrays.unbounded_rows:UnboundedRows._insert",
        "log = self._forget_old(ids[rows < 0], log)",
        "pass",
        (
            f"{_POLICY}::test_rows_are_those_of_a_plain_dict_on_any_number_of_shards[time-1]",
        ),
    ),
)
