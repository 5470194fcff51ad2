"""What a caller hands over, and what a store gives back."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "cast-that-loses-the-meaning",
        "daskps.store.values:cast",
        'np.can_cast(array.dtype, dtype, "same_kind")',
        'np.can_cast(array.dtype, dtype, "unsafe")',
        ("tests/store/test_intake.py::test_casts_that_lose_the_meaning_are_refused",),
    ),
    Mutant(
        "shape-that-broadcasts",
        "daskps.store.values:_made_ready",
        "if array.shape != shape:",
        "if array.size != np.prod(shape):",
        ("tests/store/test_intake.py::test_everything_else_is_refused_with_the_fix",),
    ),
    Mutant(
        "infinity-is-sent",
        "daskps.store.values:ready",
        "if finite and dtype in FLOATS and not finite_of(flat, cache_dir=config.cache_dir()):",
        "if finite and dtype not in FLOATS and not is_finite(flat):",
        ("tests/store/test_intake.py::test_one_bad_array_refuses_them_all",),
    ),
    Mutant(
        "integer-that-does-not-fit",
        "daskps.store.values:cast",
        "if dtype not in FLOATS and not np.array_equal(found, array):",
        "if dtype in FLOATS and not np.array_equal(found, array):",
        ("tests/store/test_intake.py::test_casts_that_lose_the_meaning_are_refused",),
    ),
    Mutant(
        "weight-that-overflows",
        "daskps.store.values:times",
        "if finite and not is_finite(found):",
        "if finite and not is_finite(array):",
        (
            "tests/cluster/caller/test_input.py::test_a_weight_that_overflows_is_refused",
        ),
    ),
    Mutant(
        "gradient-without-an-optimizer",
        "daskps.store.intake:gradients",
        "if dtype is None or (not model and p.index not in optimizers):",
        "if dtype is None or (model and p.index not in optimizers):",
        (
            "tests/store/test_intake.py::test_a_parameter_without_an_optimizer_takes_no_gradient",
        ),
    ),
    Mutant(
        "element-in-two-chunks",
        "daskps.layout.chunks:chunks_of",
        "last = rows if piece is pieces[-1] else round(piece.stop / width)",
        "last = rows if piece is pieces[-1] else -(-piece.stop // width)",
        ("tests/layout/test_chunks.py::test_chunks_end_near_the_borders",),
    ),
    Mutant(
        "name-below-a-name",
        "daskps.layout.trees:flatten",
        'name = f"{prefix}{key}"',
        'name = f"{key}"',
        ("tests/layout/test_trees.py::test_nested_mappings_flatten_with_a_slash",),
    ),
)
