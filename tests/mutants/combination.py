"""What goes with what: choices that would be accepted, and rows that would not be."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_PAGE = (
    "tests/training/test_combinations.py::test_every_combination_is_as_the_page_says",
)
_WATCHED = (
    "tests/training/test_monitor.py"
    "::test_what_it_does_not_go_with_is_refused_at_once[inside]",
)
_WHERE = "daskps.combination"

MUTANTS = (
    Mutant(
        "a-refusal-of-rows-is-no-refused-push",
        f"{_WHERE}:find_refusal",
        "return PushRejectedError(",
        "return ValueError(",
        (
            "tests/training/test_combinations.py"
            "::test_rows_that_are_refused_are_refused_as_a_push_is",
        ),
    ),
    Mutant(
        "rows-are-refused-with-what-refuses-none",
        f"{_WHERE}:check_rows",
        "if not of.takes_rows:",
        "if of.takes_rows:",
        (
            "tests/training/test_combinations.py"
            "::test_rows_that_are_refused_are_refused_as_a_push_is",
        ),
    ),
    Mutant(
        "rows-are-refused-by-no-name",
        f"{_WHERE}:check_rows",
        "check_together(replace(of, table=name))",
        'check_together(replace(of, table="any"))',
        (
            "tests/training/test_combinations.py"
            "::test_rows_that_are_refused_are_refused_as_a_push_is",
        ),
    ),
    Mutant(
        "weights-are-pulled-in-any-words",
        f"{_WHERE}:_clashes",
        'if of.pull_codec and (why := codecs.why_not_plain("pull_codec", of.pull_codec)):',
        "if of.pull_codec and (why := of.pull_codec.feedback * 'no'):",
        _PAGE,
    ),
    Mutant(
        "the-graph-takes-any-codec",
        f"{_WHERE}:_clashes",
        'if of.execution == "graph" and of.codec and not codecs.is_plain(of.codec):',
        'if of.execution == "graph" and of.codec and of.codec.feedback:',
        _PAGE,
    ),
    Mutant(
        "a-mean-of-models-is-pulled-in-words",
        f"{_WHERE}:_clashes",
        'for what, codec in (("codec", of.codec), ("pull_codec", of.pull_codec)):',
        'for what, codec in (("codec", of.codec),):',
        _PAGE,
    ),
    Mutant(
        "a-function-takes-the-mean-of-models",
        f"{_WHERE}:_clashes",
        'if of.reduce != "mean":',
        'if of.reduce == "sum":',
        _PAGE,
    ),
    Mutant(
        "a-monitor-watches-the-graph",
        f"{_WHERE}:_clashes_with_monitor",
        'if of.monitored and of.execution == "graph":',
        'if of.monitored and of.execution == "auto":',
        _WATCHED,
    ),
    Mutant(
        "a-monitor-watches-a-function",
        f"{_WHERE}:_clashes_with_monitor",
        'if of.monitored and of.reduce == "function":',
        'if of.monitored and of.reduce == "functions":',
        _WATCHED,
    ),
    Mutant(
        "functions-reduce-without-rounds",
        f"{_WHERE}:_of_rounds",
        'if of.reduce == "function":',
        'if of.reduce == "function" and of.execution == "graph":',
        _PAGE,
    ),
    Mutant(
        "models-are-averaged-without-rounds",
        f"{_WHERE}:_of_rounds",
        'if of.average == "models":',
        'if of.average == "model":',
        _PAGE,
    ),
    Mutant(
        "assign-goes-without-rounds",
        f"{_WHERE}:_of_rounds",
        'if of.verb == "assign":',
        'if of.verb == "assigned":',
        _PAGE,
    ),
    Mutant(
        "rows-go-to-a-function",
        f"{_WHERE}:_clashes_with_rows",
        'if of.reduce == "function" and of.verb in (*GRADIENTS, "add"):',
        'if of.reduce == "function" and of.verb in GRADIENTS:',
        _PAGE,
    ),
    Mutant(
        "rows-that-are-added-meet-a-codec",
        f"{_WHERE}:_clashes_with_rows",
        "if of.codec is not None and of.verb in GRADIENTS:",
        "if of.codec is not None:",
        _PAGE,
    ),
    Mutant(
        "rows-leave-something-over",
        f"{_WHERE}:_clashes_with_rows",
        "if not of.codec.takes_rows:",
        'if of.codec.name == "2bit":',
        _PAGE,
    ),
    Mutant(
        "rows-wait-for-an-epoch",
        f"{_WHERE}:_clashes_with_rows",
        "if of.sync_every != 1:",
        "if of.sync_every > 1:",
        _PAGE,
    ),
    Mutant(
        "rows-are-aggregated",
        f"{_WHERE}:_clashes_with_rows",
        'if of.verb == "aggregate":',
        'if of.verb == "aggregates":',
        _PAGE,
    ),
)
