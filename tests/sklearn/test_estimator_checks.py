"""scikit-learn's own checks of estimators, on all of ours, in a cluster in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sklearn import linear_model
from sklearn.utils.estimator_checks import estimator_checks_generator

from daskps.sklearn import Averaged, SGDClassifier, SGDRegressor
from tests import inprocess

pytestmark = pytest.mark.leaky  # the cluster, of all tests here

#: One trainer, since most checks have a dozen rows, and as few rounds as will do.
FEW: dict[str, Any] = {"tol": None, "batch_size": 8, "trainers": 1}
ESTIMATORS = [
    SGDClassifier(max_iter=5, **FEW),
    # Columns of hundreds: a loss with bounded slopes.
    SGDRegressor("huber", max_iter=15, eta0=1.0, **FEW),
    Averaged(linear_model.SGDClassifier(random_state=0), epochs=2, trainers=1),
    Averaged(linear_model.SGDRegressor(random_state=0), epochs=2, trainers=1),
]
#: Checks that do not apply, by name, with the reason; all others pass.
LEFT_OUT = {
    "check_array_api_input": "needs SCIPY_ARRAY_API before SciPy is imported, and asks "
    "that NumPy gives with it what it gives without",
}


def name_of(check: Any) -> str:
    return str(getattr(check, "func", check).__name__)


CHECKS = [
    pytest.param(
        estimator,
        check,
        id=f"{type(estimator).__name__}-{i}-{name_of(check)}",
    )
    for i, one in enumerate(ESTIMATORS)
    for estimator, check in estimator_checks_generator(one)
    if name_of(check) not in LEFT_OUT
]


@pytest.fixture(scope="module")
def inside() -> Iterator[None]:
    with inprocess.cluster():
        yield


@pytest.mark.parametrize(("estimator", "check"), CHECKS)
def test_check_of_scikit_learn(inside: None, estimator: Any, check: Any) -> None:
    check(estimator)


def test_there_are_checks_of_each() -> None:
    assert len(CHECKS) > 40 * len(ESTIMATORS)
