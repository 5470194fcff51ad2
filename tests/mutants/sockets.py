"""Sockets: what is taken for a frame, and what goes on by message."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FRAMES = "tests/cluster/sockets/test_frames.py"
ENDS = "tests/cluster/sockets/test_ends.py"
CONNECTION = "tests/cluster/sockets/test_connection.py"
SERVING = "tests/cluster/sockets/test_serving.py"
SOCKETS = "tests/cluster/sockets/test_sockets.py"
FETCHES = "tests/cluster/sockets/test_fetches.py"
TLS = "tests/cluster/sockets/test_tls.py"
CALLS = "tests/cluster/sockets/test_socket_calls.py"
TAIL = "tests/cluster/sockets/test_tail.py"
SAME = "tests/cluster/sockets/test_same_answers.py"
SMALL = "tests/cluster/sockets/test_small_reads.py"
ROWS = "tests/cluster/sockets/test_row_templates.py"

MUTANTS = (
    Mutant(
        "marks-lie-between-rows-by-socket",
        "daskps.cluster.caller.socket_route:HostCalls._asked",
        'marks.append(ReadSlice(("uint8", 0, n), *one.marks))',
        'found.append(ReadSlice(("uint8", 0, n), *one.marks))',
        (f"{ROWS}::test_marks_come_behind_the_rows_of_all_tables",),
    ),
    Mutant(
        "torn-rows-by-socket",
        "daskps.shards.reader:ShardReader._copy_rows",
        "return is_still or is_logged(sequence, header[ROWS_SEQUENCE])",
        "return True",
        (f"{ROWS}::test_a_read_that_an_update_runs_into_is_left_to_the_shard",),
    ),
    Mutant(
        "ids-of-another-shard-reach-this-one",
        "daskps.cluster.sockets.templates:FrameTemplate._cut",
        "if n and not (len(some) == n and piece.holds(some, cache_dir=cache_dir())):",
        "if n < 0:",
        (f"{ROWS}::test_numbers_and_ids_of_no_call_are_refused",),
    ),
    Mutant(
        "rows-that-make-up-no-frame",
        "daskps.cluster.sockets.templates:FrameTemplate._check_counts",
        "if found != nbytes:",
        "if found > 2 * nbytes:",
        (f"{ROWS}::test_numbers_and_ids_of_no_call_are_refused",),
    ),
    Mutant(
        "slow-caller-keeps-threads",
        "daskps.cluster.sockets.connection:Connection._gather",
        "waits = not self.is_slow and (seconds or (self.is_long and leave())) > 0",
        "waits = (seconds or (self.is_long and leave())) > 0",
        (
            "tests/cluster/sockets/test_serving.py::"
            "test_no_thread_waits_twice_for_a_slow_caller",
        ),
    ),
    Mutant(
        "who-takes-little-keeps-a-thread",
        "daskps.cluster.sockets.served:ServedChannel.try_send",
        "if waits and sent < sum(map(len, some)):",
        "if False:",
        (
            f"{SERVING}::"
            "test_a_thread_is_given_back_after_one_wait_for_who_takes_little",
        ),
    ),
    Mutant(
        "sockets-of-dead-hosts-stay",
        "daskps.cluster.caller.socket_pool:SocketPool._close_hung_up",
        "if call_socket.has_hung_up:",
        "if not call_socket.is_open:",
        (f"{ENDS}::test_sockets_of_hosts_that_are_gone_end_when_the_next_is_opened",),
    ),
    Mutant(
        "host-at-fault-for-its-caller",
        "daskps.cluster.caller.socket_pool:SocketPool.end",
        "if not by_caller:",
        "if worker:",
        (f"{ENDS}::test_only_a_host_that_fails_is_left_alone_for_a_while[True]",),
    ),
    Mutant(
        "end-of-a-socket-in-the-clear",
        "daskps.cluster.sockets.channel:Channel.shut",
        "socket.socket.shutdown(self._socket, socket.SHUT_RDWR)",
        "self._socket.shutdown(socket.SHUT_RDWR)",
        (f"{TLS}::test_what_ends_says_nothing_in_the_clear",),
    ),
    Mutant(
        "small-frame-in-many-records",
        "daskps.cluster.sockets.channel:Channel.send",
        "if sum(map(len, views)) <= BUFFER_NBYTES:",
        "if not views:",
        (f"{TLS}::test_a_small_frame_is_one_record",),
    ),
    Mutant(
        "any-bytes-are-a-head",
        "daskps.cluster.sockets.frames:unpack_head",
        "if magic != MAGIC:",
        "if magic < 0:",
        (f"{FRAMES}::test_bytes_are_no_head",),
    ),
    Mutant(
        "frames-have-numbers-of-their-own",
        "daskps.cluster.sockets.templates:FrameTemplate.parts",
        "head.sequence,",
        "head.number,",
        (
            "tests/cluster/sockets/test_cuts.py::"
            "test_a_push_counts_once_wherever_its_socket_is_cut[adds]",
        ),
    ),
    Mutant(
        "body-shorter-than-its-template",
        "daskps.cluster.sockets.templates:FrameTemplate.check",
        "if not self.least_nbytes <= rest <= self.most_nbytes:",
        "if rest > self.most_nbytes:",
        (f"{FRAMES}::test_a_body_of_another_length_is_refused",),
    ),
    Mutant(
        "error-of-a-shard-is-an-answer",
        "daskps.cluster.sockets.frames:pack_answers",
        "if answer.error is not None:",
        "if answer.error is not None and answer.parked:",
        (f"{FRAMES}::test_an_error_of_one_shard_refuses_the_call",),
    ),
    Mutant(
        "template-without-its-generation",
        "daskps.cluster.protocol.messages:pack_parts",
        "p.step.generation,",
        "1,",
        (f"{FRAMES}::test_what_no_head_says_makes_another_template",),
    ),
    Mutant(
        "old-answer-of-a-socket",
        "daskps.cluster.caller.call_socket:CallSocket._receive_own",
        "if head.number != self._number:",
        "if head.number > self._number:",
        (f"{ENDS}::test_what_answers_nothing_is_found",),
    ),
    Mutant(
        "bytes-that-nobody-asked-for",
        "daskps.cluster.sockets.channel:Channel.end_frame",
        "if self._to > self._from:",
        "if self._to < self._from:",
        (f"{ENDS}::test_what_answers_nothing_is_found",),
    ),
    Mutant(
        "socket-of-another-protocol",
        "daskps.cluster.host.sockets:HostSockets._check",
        "if protocol != PROTOCOL:",
        "if protocol is None:",
        (f"{SOCKETS}::test_a_socket_that_nobody_can_have_is_refused_as_a_message",),
    ),
    Mutant(
        "lost-answer-is-success",
        "daskps.cluster.caller.socket_carrier:SocketCarrier._fall_back",
        "self.left.append((self._make(), frame.asked))",
        "self.left.append((self._make().waiting(), frame.asked))",
        (f"{SOCKETS}::test_a_socket_that_is_cut_anywhere_applies_each_push_once",),
    ),
    Mutant(
        "fetched-arrays-of-another-length",
        "daskps.cluster.sockets.fetches:check_fetched",
        "if head.nbytes != wanted:",
        "if head.nbytes < wanted:",
        (f"{FETCHES}::test_what_answers_no_fetch_is_found",),
    ),
    Mutant(
        "text-longer-than-its-answer",
        "daskps.cluster.sockets.fetches:text_nbytes",
        "if not 0 < head.sequence <= min(head.nbytes, MOST_TEXT):",
        "if not 0 < head.sequence <= MOST_TEXT:",
        (f"{FETCHES}::test_what_answers_no_fetch_is_found",),
    ),
    Mutant(
        "template-knows-its-shards-for-ever",
        "daskps.cluster.host.host_template:HostTemplate._is_current",
        "if shards.get(key) is not hosted or hosted.is_released:",
        "if hosted.is_released:",
        (f"{CALLS}::test_a_shard_of_the_same_name_is_read_and_not_the_one_before",),
    ),
    Mutant(
        "released-shard-is-read-by-socket",
        "daskps.cluster.host.host_template:HostTemplate._is_current",
        "if shards.get(key) is not hosted or hosted.is_released:",
        "if shards.get(key) is not hosted:",
        (f"{CALLS}::test_a_released_shard_serves_nobody",),
    ),
    Mutant(
        "template-of-another-generation-is-tried",
        "daskps.cluster.host.host_template:HostTemplate._find",
        "or hosted.shard.generation != part.step.generation",
        "or hosted.shard.generation < part.step.generation",
        (f"{CALLS}::test_a_shard_that_came_back_is_asked_under_its_generation",),
    ),
    Mutant(
        "templates-keep-shards-that-are-gone",
        "daskps.cluster.host.socket_calls:SocketCalls.let_go",
        "if template.has_gone:",
        "if template.has_gone and number < 0:",
        (f"{CALLS}::test_the_memory_of_a_shard_that_is_gone_is_kept_by_no_template",),
    ),
    Mutant(
        "torn-copy-is-answered",
        "daskps.cluster.host.socket_answers:TemplateAnswers._copy",
        "if version < 0:",
        "if version == -1:",
        (f"{CALLS}::test_a_read_that_an_update_runs_into_begins_again",),
    ),
    Mutant(
        "accepted-step-is-said-again",
        "daskps.cluster.host.host_template:HostTemplate._left",
        "if version == ASK",
        "if version >= ASK",
        (f"{SAME}::test_calls_of_trainers",),
    ),
    Mutant(
        "question-that-reads-nothing-is-a-read",
        "daskps.cluster.host.host_template:HostTemplate.__init__",
        "bool(template.read) or all(part.ranges for part in parts)",
        "True",
        (f"{SAME}::test_calls_of_trainers",),
    ),
    Mutant(
        "two-threads-claim-a-call",
        "daskps.cluster.sockets.connection:Connection.claim",
        "self.is_owned, self.waiting = True, None",
        "self.waiting = waiting",
        (f"{CONNECTION}::test_who_claims_a_call_is_alone_with_its_socket",),
    ),
    Mutant(
        "two-threads-hear-of-a-socket",
        "daskps.cluster.sockets.connection:Connection.own",
        "is_free, self.is_owned = not self.is_owned, True",
        "is_free, self.is_owned = True, True",
        (f"{CONNECTION}::test_a_socket_has_one_event_and_one_owner",),
    ),
    Mutant(
        "call-of-another-frame-is-claimed",
        "daskps.cluster.sockets.connection:Connection.claim",
        "if self.is_owned or self.waiting is not waiting:",
        "if self.is_owned:",
        (f"{CONNECTION}::test_who_claims_a_call_is_alone_with_its_socket",),
    ),
    Mutant(
        "missed-event-does-not-come-again",
        "daskps.cluster.sockets.connection:Connection.own",
        "self._event = 0",
        "self._event = self._event or 0",
        (f"{CONNECTION}::test_an_event_that_its_owner_has_missed_comes_again",),
    ),
    Mutant(
        "call-that-is-done-while-it-is-parked-waits",
        "daskps.cluster.sockets.serving:SocketServer._serve",
        "if waiting is not None and waiting.done:",
        "if waiting is not None and not waiting:",
        (f"{SERVING}::test_what_is_done_while_it_is_parked_is_answered",),
    ),
    Mutant(
        "who-stays-with-a-socket-forgets-others",
        "daskps.cluster.sockets.serving:SocketServer._serve",
        "self._finish_done(mine)",
        "mine.done",
        (f"{SERVING}::test_a_thread_that_stays_with_a_socket_answers_others",),
    ),
    Mutant(
        "late-event-ends-a-call",
        "daskps.cluster.sockets.serving:SocketServer._hear",
        "elif connection.channel.has_come:",
        "elif connection.channel.is_open:",
        (f"{SERVING}::test_an_event_of_another_socket_with_that_number_ends_no_call",),
    ),
    Mutant(
        "nobody-leads-after-a-long-frame",
        "daskps.cluster.sockets.serving:SocketServer._follow",
        "mine.leads = has_lead or self._lead.acquire(blocking=False)",
        "mine.leads = has_lead",
        (f"{SERVING}::test_a_thread_whose_time_is_over_leads_where_it_is_counted_on",),
    ),
    Mutant(
        "last-thread-waits",
        "daskps.cluster.sockets.serving:SocketServer._let_lead",
        "return 0.0",
        "return LOCK_SECONDS",
        (f"{SERVING}::test_the_last_thread_waits_for_nobody",),
    ),
    Mutant(
        "push-is-taken-for-a-read",
        "daskps.cluster.host.socket_calls:SocketCalls.read_now",
        "if known is None or said != _READ or min(clock, sequence, floor) < -1:",
        "if known is None or min(clock, sequence, floor) < -1:",
        (f"{SMALL}::test_a_frame_that_is_no_plain_read_is_looked_at_closely",),
    ),
    Mutant(
        "released-shard-is-read-at-once",
        "daskps.cluster.host.host_template:HostTemplate.read_now",
        "if not (self._may_read_now and self._is_current() and self._tries):",
        "if not (self._may_read_now and self._tries):",
        (f"{CALLS}::test_a_released_shard_serves_nobody",),
    ),
    Mutant(
        "second-socket-before-each-has-one",
        "daskps.cluster.host.sockets:HostSockets._check",
        "if 2 * n >= most and self._has(token):",
        "if n >= most and self._has(token):",
        (f"{SOCKETS}::test_each_process_has_a_socket_before_any_has_a_second",),
    ),
    Mutant(
        "rest-of-an-answer-is-forgotten",
        "daskps.cluster.sockets.served:ServedChannel.send_some",
        "return None if self.try_send(views, waits=waits) else views",
        "return None",
        (f"{SERVING}::test_a_slow_caller_has_no_thread_to_itself[True]",),
    ),
    Mutant(
        "leader-serves-what-takes-long",
        "daskps.cluster.sockets.serving:SocketServer._let_lead",
        "if not mine.leads:",
        "if mine.leads:",
        (f"{SERVING}::test_what_takes_long_keeps_no_other_socket",),
    ),
    Mutant(
        "ended-socket-leaves-its-call-behind",
        "daskps.cluster.sockets.connection:Connection.end",
        "waiting.cancel()",
        "waiting.done",
        (f"{CONNECTION}::test_the_end_of_a_socket_takes_its_call_back",),
    ),
    Mutant(
        "records-that-openssl-has-are-left",
        "daskps.cluster.sockets.served:ServedChannel.has_more",
        "return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0",
        "return False",
        (f"{SERVING}::test_what_openssl_has_received_is_seen",),
    ),
    Mutant(
        "slow-caller-is-never-late",
        "daskps.cluster.sockets.connection:Connection.is_late",
        "late = min(self._until, self.channel.moved + patience)",
        "late = self.channel.moved + patience",
        (f"{SERVING}::test_how_long_a_frame_may_take",),
    ),
    Mutant(
        "who-takes-nothing-keeps-its-answer",
        "daskps.cluster.sockets.connection:Connection.is_late",
        "patience = TAKE_SECONDS if self._unsent else PATIENCE_SECONDS",
        "patience = PATIENCE_SECONDS",
        (f"{SERVING}::test_who_takes_nothing_of_an_answer_is_cut_sooner",),
    ),
    Mutant(
        "end-of-an-answer-comes-with-the-rest",
        "daskps.cluster.sockets.served:ServedChannel.try_send",
        "some = [view for view in few if not isinstance(view, Tail)]",
        "some = [_made(view) for view in few]",
        (f"{TAIL}::test_the_end_comes_after_all_else_is_sent",),
    ),
    Mutant(
        "end-of-a-torn-answer",
        "daskps.cluster.sockets.frames:Tail.made",
        "if not self._is_whole():",
        "if not found:",
        (f"{TAIL}::test_an_answer_that_is_not_whole_has_no_end",),
    ),
    Mutant(
        "one-shard-of-an-answer-is-looked-at",
        "daskps.cluster.host.socket_answers:TemplateAnswers._read_straight.is_whole",
        "if not read.holds(flip):",
        "if not read.holds(flip) and read is shown[0][0]:",
        (f"{TAIL}::test_an_answer_that_updates_run_into_does_not_end",),
    ),
    Mutant(
        "torn-shard-is-sent-again",
        "daskps.cluster.host.socket_answers:TemplateAnswers._read_straight",
        "copies |= time.monotonic() < segment.copied_until",
        "pass",
        (f"{TAIL}::test_after_an_answer_without_an_end_copies_are_sent_for_a_while",),
    ),
    Mutant(
        "weights-are-sent-while-others-push",
        "daskps.cluster.host.socket_answers:TemplateAnswers._read_straight",
        "copies |= flip > self._seen[i] + 1",
        "pass",
        (f"{TAIL}::test_where_others_push_between_two_reads_a_copy_is_sent",),
    ),
    Mutant(
        "calls-never-end",
        "daskps.cluster.sockets.serving:SocketServer._look_around",
        "elif waiting.end > now:",
        "elif waiting.end > 0:",
        (f"{SERVING}::test_a_call_whose_time_is_up_is_told_so[set]",),
    ),
    Mutant(
        "burst-excuses-a-stall",
        "daskps.cluster.sockets.connection:Connection.lag",
        "return max(late, now - self.channel.moved)",
        "return late",
        (f"{SERVING}::test_who_is_slow_is_behind_its_bytes",),
    ),
)
