"""What all else stands on: layout, initial values, sums, policies, limits."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "mean-over-those-who-come",
        "daskps.reduction:merge",
        "weights[key] += right[1][key]",
        "weights[key] += 1.0",
        (
            "tests/test_reduction.py::test_a_mean_divides_once_by_the_weights_of"
            "_those_who_deliver_the_key",
        ),
    ),
    Mutant(
        "sum-in-another-order",
        "daskps.reduction:fold",
        "border = split(lo, hi)",
        "border = (lo + hi) // 2",
        (
            "tests/test_reduction.py"
            "::test_the_sum_has_the_same_bits_in_whatever_order_ranks_come",
        ),
    ),
    Mutant(
        "reduction-of-another-shape",
        "daskps.backend:returned",
        "if found.shape != like.shape or not is_kind:",
        "if found.size != like.size or not is_kind:",
        (
            "tests/test_reduction.py::test_a_callable_that_returns_something_else_is_refused",
        ),
    ),
    Mutant(
        "same-numbers-in-each-block",
        "daskps.init:fill",
        "rng = _generator(seed, name, block)",
        "rng = _generator(seed, name, 0)",
        ("tests/test_init.py::test_blocks_of_one_parameter_differ",),
    ),
    Mutant(
        "same-numbers-for-each-name",
        "daskps.init:_generator",
        "entropy = np.random.SeedSequence(seed, spawn_key=(*words, block))",
        "entropy = np.random.SeedSequence(seed, spawn_key=(block,))",
        ("tests/test_init.py::test_seed_and_name_decide_the_numbers",),
    ),
    Mutant(
        "shards-of-another-cut",
        "daskps.layout.bounds:bounds",
        "start = i * size + min(i, longer)",
        "start = i * size + max(0, i - k + longer)",
        ("tests/layout/test_arrays.py::test_bounds_are_those_of_array_split",),
    ),
    Mutant(
        "held-memory-does-not-count",
        "daskps.layout.placement:check_memory",
        "total = nbytes + held.get(worker, 0)",
        "total = nbytes",
        ("tests/layout/test_placement.py::test_memory_is_counted_with_what_is_held",),
    ),
    Mutant(
        "too-many-resident-trainers",
        "daskps.limits:check_trainers",
        "most = MOST_PARTS if graph else MOST_TRAINERS",
        "most = MOST_PARTS",
        ("tests/test_limits.py::test_trainers_that_are_too_many_are_refused",),
    ),
    Mutant(
        "sys-exit-ends-the-worker",
        "daskps.usercode:user_code.__exit__",
        "if error is None or isinstance(error, Exception):",
        "if error is None or not isinstance(error, KeyboardInterrupt):",
        ("tests/test_usercode.py::test_what_is_no_error_becomes_one",),
    ),
    Mutant(
        "version-of-the-shard-behind",
        "daskps.version:Version.of",
        "version = cls(max(map(_version_of, found), default=0))",
        "version = cls(min(map(_version_of, found), default=0))",
        (
            "tests/test_version.py::test_it_is_the_largest_shard_version_and_knows_the_rest",
        ),
    ),
)
