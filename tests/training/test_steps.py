"""What a trainer of `train` makes of what the user's function returns."""

from __future__ import annotations

import numpy as np

from daskps.combination import Combination
from daskps.training.steps import FitPlan, Stepper
from tests.store.test_repr import meta


def own_params(params, X, y):
    return {"p0": params["p0"][:]}


def test_a_gradient_that_is_its_params_is_copied():
    """What is read after the push would land in it, on its way to the other hosts."""
    plan = FitPlan(
        gradient=own_params,
        chosen=Combination("train"),
        epochs=1,
        batch_size=2,
        shuffle=False,
        seed=0,
    )
    stepper = Stepper(plan, meta(1, 1))
    stepper.params["p0"][:] = 3.0
    [array] = stepper.step(np.zeros((2, 1)), None, [slice(0, 2)]).arrays.values()
    stepper.params["p0"][:] = 4.0
    assert array.tolist() == [3.0, 3.0]
