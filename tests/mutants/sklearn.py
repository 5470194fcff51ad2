"""Estimators in scikit-learn's words: their store, their means, their lazy predictions."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "partial-fits-keep-no-store",
        "daskps.sklearn.linear:_Linear._learn",
        "self._store = store",
        "self._store = None",
        (
            "tests/sklearn/test_estimators.py"
            "::test_fit_frees_its_store_and_partial_fit_keeps_one",
        ),
    ),
    Mutant(
        "a-store-that-failed-is-kept",
        "daskps.sklearn.linear:_Linear._learn",
        "self._store = None",
        "pass",
        (
            "tests/sklearn/test_estimators.py"
            "::test_a_partial_fit_that_fails_changes_no_coefficients",
        ),
    ),
    Mutant(
        "means-count-parts-alike",
        "daskps.sklearn.averaged:_epochs",
        "trainer.assign(_averaged(local), weight=len(y))",
        "trainer.assign(_averaged(local))",
        ("tests/sklearn/test_estimators.py::test_averaged_is_the_mean_by_rows",),
    ),
    Mutant(
        "empty-blocks-are-predicted",
        "daskps.sklearn.estimator:_of_block",
        "if block.shape[0]:",
        "if True:",
        ("tests/sklearn/test_estimators.py::test_empty_blocks_and_weights",),
    ),
    Mutant(
        "new-labels-are-taken",
        "daskps.sklearn.estimator:coded",
        "if (is_new := classes[places] != labels).any():",
        "if not (is_new := classes[places] != labels).size:",
        (
            "tests/sklearn/test_estimators.py"
            "::test_labels_that_the_first_call_did_not_name",
        ),
    ),
)
