"""Shards on a device: waits, events, looks and launches."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_LOST = (
    "tests/cluster/test_device.py::test_shards_are_lost_once_a_device_does_no_more_work"
)
_ROWS = "tests/shards/test_device.py"
_BITS = (
    "tests/shards/test_device.py::test_states_have_the_same_bits_as_in_host_memory[0]"
)

MUTANTS = (
    Mutant(
        "flip-before-the-device-is-done",
        "daskps.shards.memory.publication:Publication._await_device",
        "if payload.wait():",
        "if payload:",
        (_BITS,),
    ),
    Mutant(
        "no-wait-after-a-delivery",
        "daskps.shards.rounds.round:Round._keep",
        "if self._is_on_device:",
        "if False:",
        (_BITS,),
    ),
    Mutant(
        "no-wait-after-a-push-before-the-tick",
        "daskps.shards.rounds.round:Round._judge",
        "self._segment.payload.wait()",
        "self._segment.payload.device",
        (_BITS,),
    ),
    Mutant(
        "programs-stream-is-not-waited-for",
        "daskps.shards.arrays.device:DeviceMemory.bring",
        "self.stream.follow()",
        "self.flush()",
        (
            "tests/shards/test_device.py::test_programs_own_work_comes_before_that_of_the_shard",
        ),
    ),
    Mutant(
        "pinned-memory-is-used-too-early",
        "daskps.backend.stream:Stream._turn",
        "self.await_event(event)",
        "self.record()",
        (
            "tests/shards/test_device.py::test_large_arrays_go_through_pinned_memory_in_parts",
        ),
    ),
    Mutant(
        "steps-of-one-sum-share-a-launch",
        "daskps.shards.arrays.device:DeviceMemory.update",
        "if following is None or not following.takes(loop, scalars, spans):",
        "if following is None or not following.takes(loop, scalars, ()):",
        (_BITS,),
    ),
    Mutant(
        "update-before-the-looks",
        "daskps.shards.memory.publication:Publication._look_first",
        "self._queue_looks()",
        "_NONE.copy()",
        (
            "tests/shards/test_device.py::test_gradient_that_is_not_finite_changes_nothing[1-nan]",
        ),
    ),
    Mutant(
        "flag-stays-up",
        "daskps.shards.arrays.device:DeviceMemory.wait",
        "self.fill(self.flag, 0)",
        "self.fill(self.flag, 1)",
        (
            "tests/shards/test_device.py::test_gradient_that_is_not_finite_changes_nothing[0-nan]",
        ),
    ),
    Mutant(
        "large-read-takes-half-that-is-under-way",
        "daskps.backend.stream:Stream.download",
        "_give_out(held[self._half])",
        "held[self._half].clear()",
        (
            "tests/shards/test_device.py::test_large_arrays_go_through_pinned_memory_in_parts",
        ),
    ),
    Mutant(
        "log-is-read-before-the-device-has-written-it",
        "daskps.shards.reader:ShardReader._copy_rows",
        "if not is_written or (looked and not is_still):",
        "if looked and not is_still:",
        (f"{_ROWS}::test_rows_are_read_before_and_after_an_update_but_not_meanwhile",),
    ),
    Mutant(
        "rows-are-not-put-back-yet",
        "daskps.shards.arrays.row_operations:RowBuffers.roll_back",
        "self.payload.wait()",
        "pass",
        (
            f"{_ROWS}::test_rows_of_the_first_table_are_put_back_where_the_second_is_refused[1]",
        ),
    ),
    Mutant(
        "slots-of-rows-are-not-filled-yet",
        "daskps.shards.memory.undo:_reset",
        "segment.payload.wait()",
        "pass",
        (f"{_ROWS}::test_slots_of_rows_begin_anew",),
    ),
    Mutant(
        "rows-of-other-shards-go-up-too",
        "daskps.shards.planning:UpdatePlanner._rows",
        "data, at = where.bring(data if at is None else data[at]), None",
        "data = where.bring(data)",
        (f"{_ROWS}::test_of_rows_in_host_memory_those_of_the_shard_go_to_the_device",),
    ),
    Mutant(
        "hosts-do-not-hear-that-a-device-has-ended",
        "daskps.backend.stream:Device.lose",
        "watcher(what, why)",
        "pass",
        (f"{_LOST}[inside-pull]",),
    ),
    Mutant(
        "cut-holds-calls-though-a-device-has-ended",
        "daskps.cluster.host.host:ShardHost._lose_memory",
        "self._lose(key, why)",
        "pass",
        (f"{_LOST}[inside-save]",),
    ),
    Mutant(
        "shard-goes-on-after-half-an-update",
        "daskps.shards.memory.publication:Publication._update_on_device",
        "raise segment.payload.give_up(error) from error",
        "pass",
        (
            "tests/cluster/test_device.py"
            "::test_update_that_stops_midway_loses_the_slots_of_its_shard[rule1]",
        ),
    ),
    Mutant(
        "reads-without-the-owner-raise-what-the-device-does",
        "daskps.shards.reader:ShardReader.read",
        "return REFER  # its device has ended",
        "raise",
        (f"{_LOST}[inside-pull]",),
    ),
)
