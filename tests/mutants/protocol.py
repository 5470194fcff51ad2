"""Messages: who may say what, and what an answer is."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "another-protocol-is-understood",
        "daskps.cluster.protocol.messages:check_protocol",
        "if protocol != PROTOCOL or version not in (None, VERSION):",
        "if protocol > PROTOCOL or version not in (None, VERSION):",
        (
            "tests/cluster/protocol/test_protocol.py::test_refused_messages_change_nothing[older protocol]",
        ),
    ),
    Mutant(
        "any-mapping-is-success",
        "daskps.cluster.protocol.packing:unpack_reply",
        'if not isinstance(reply, dict) or reply.get("status") not in ("OK", "refused"):',
        "if not isinstance(reply, dict):",
        (
            "tests/cluster/protocol/test_protocol.py::test_only_an_acknowledgement_is_success",
        ),
    ),
    Mutant(
        "shard-that-is-named-twice",
        "daskps.cluster.protocol.messages:_check_parts",
        "if len(set(shards)) < len(shards):",
        "if len(set(shards)) > len(shards):",
        (
            "tests/cluster/protocol/test_saying.py::test_a_call_that_no_caller_makes_is_refused",
        ),
    ),
    Mutant(
        "elements-of-another-shard",
        "daskps.cluster.protocol.messages:_range",
        "if 0 <= start <= stop <= n:",
        "if 0 <= start <= stop:",
        (
            "tests/cluster/protocol/test_saying.py::test_a_call_that_no_caller_makes_is_refused",
        ),
    ),
    Mutant(
        "weight-that-is-no-number",
        "daskps.cluster.sockets.frames:unpack_head",
        "or not -math.inf < weight < math.inf",
        "or abs(weight) == math.inf",
        (
            "tests/cluster/protocol/test_saying.py::test_a_call_that_no_caller_makes_is_refused",
        ),
    ),
    Mutant(
        "true-is-a-number",
        "daskps.cluster.protocol.wellformed:_is_plain",
        "return type(value) is int and LEAST <= value <= MOST",
        "return isinstance(value, int) and LEAST <= value <= MOST",
        (
            "tests/cluster/protocol/test_saying.py::test_a_message_that_its_handler_does_not_take",
        ),
    ),
    Mutant(
        "wait-without-an-end",
        "daskps.cluster.protocol.wellformed:_is_odd",
        "return seconds is not None and not 0 <= seconds <= most",
        "return seconds is not None and not 0 <= seconds",
        (
            "tests/cluster/protocol/test_saying.py::test_a_message_that_its_handler_does_not_take",
        ),
    ),
    Mutant(
        "errors-of-the-user-under-a-name-of-ours",
        "daskps.cluster.protocol.packing:pack_error",
        'return ["DaskPSError", [sendable(f"{name}: {error}")], notes]',
        'return ["DaskPSError", [sendable(f"{error}")], notes]',
        ("tests/cluster/protocol/test_saying.py::test_an_error_of_the_users_is_named",),
    ),
    Mutant(
        "call-that-waits-ticks-again",
        "daskps.cluster.caller.routes:Request.waiting",
        "step = step._replace(kind=NOTHING, clock=clock, tick=False, floor=clock)",
        "step = step._replace(kind=NOTHING, clock=clock, floor=clock)",
        (
            "tests/cluster/protocol/test_saying.py::test_a_call_that_waits_on_ticks_no_second_time",
        ),
    ),
    Mutant(
        "large-array-is-cut",
        "daskps.cluster.upstream:frame",
        "if array.nbytes <= _tcp.TCP.max_shard_size or config.compresses():",
        "if array.nbytes > 0 or config.compresses():",
        (
            "tests/cluster/protocol/test_frames.py::test_no_array_of_a_message_is_joined",
        ),
    ),
)
