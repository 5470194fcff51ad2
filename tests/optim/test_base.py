"""A rule of one's own."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from daskps import optim

cloudpickle = pytest.importorskip("cloudpickle")


def run(code: str) -> bytes:
    """Run code in a process that imports what this one does."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, env=environment)
    return done.stdout


#: For calls that mypy would refuse.
untyped: Any = optim


class Lion(optim.Rule):
    slots: tuple[str, ...] = ("m",)

    def __init__(self, lr=1e-4, beta1=0.9, beta2=0.99):
        super().__init__(lr)
        self.beta1, self.beta2 = beta1, beta2

    def prepare(self, step, lr):
        return lr, self.beta1, self.beta2

    @staticmethod
    def update(w, g, m, lr, b1, b2):
        return w - lr * np.sign(b1 * m + (1 - b1) * g), b2 * m + (1 - b2) * g


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_own_rule_in_ten_lines_is_compiled(dtype):
    bound = optim.bind(Lion(0.5), dtype)
    w, m = np.ones(3, dtype), np.zeros(3, bound.kernel.compute_dtype)
    bound.inplace(w, np.array([1, -1, 0], dtype), (m,), bound.scalars(1))
    np.testing.assert_array_equal(w, [0.5, 1.5, 1.0])
    np.testing.assert_allclose(m, [0.01, -0.01, 0], atol=1e-7)


def test_own_rule_is_a_value():
    assert Lion(0.1) == Lion(0.1)
    assert Lion(0.1) != Lion(0.1, beta1=0.5)
    assert hash(Lion(0.1)) == hash(Lion(0.1))
    assert repr(Lion(0.1, beta2=0.5)) == "Lion(lr=0.1, beta2=0.5)"
    assert pickle.loads(pickle.dumps(Lion(0.1))) == Lion(0.1)


def test_own_rule_from_main_survives_cloudpickle():
    """A rule of a notebook is pickled by value and compiled elsewhere."""
    define = """
import sys
import cloudpickle
import numpy as np
from daskps import optim
EPS = 1e-8

class Mine(optim.Rule):
    slots = ("s",)
    def prepare(self, step, lr):
        return (lr,)
    @staticmethod
    def update(w, g, s, lr):
        s = s + g * g
        return w - lr * g / (np.sqrt(s) + EPS), s

sys.stdout.buffer.write(cloudpickle.dumps(Mine(0.1)))
"""
    out = run(define)
    bound = optim.bind(pickle.loads(out), "f4")
    w = np.ones(2, "f4")
    bound.inplace(w, np.ones(2, "f4"), (np.zeros(2, "f4"),), bound.scalars(1))
    np.testing.assert_allclose(w, 0.9, rtol=1e-6)


def test_rule_without_update_or_prepare_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        untyped.Rule(0.1)


def test_bind_refuses_a_wrong_number_of_arguments():
    class Wrong(Lion):
        slots = ("m", "v")

    with pytest.raises(TypeError, match="takes 6 arguments"):
        optim.bind(Wrong(), "f4")


def test_bound_scalars_must_fit_the_dtype():
    with pytest.raises(ValueError, match="finite in float32"):
        optim.bind(optim.SGD(1e300), "f4").scalars(1)
    assert optim.bind(optim.SGD(1e300), "f8").scalars(1) == (1e300,)


def test_import_of_optim_and_kernels_is_free_of_numba():
    code = (
        "import sys, daskps.optim, daskps.kernels; "
        "assert not {'numba', 'llvmlite'} & set(sys.modules)"
    )
    run(code)


def test_scalars_keep_the_sign_of_zero():
    """A process that was not asked for the step before gives the same bits."""

    class Signed(optim.SGD):
        def prepare(self, step, lr):
            return (0.0 if step % 2 else -0.0,)

    bound = optim.bind(Signed(0.1), "f8")
    signs = [np.signbit(bound.scalars(step)[0]) for step in (1, 2, 4, 5)]
    assert signs == [False, True, True, False]


def test_scalars_are_asked_of_a_rule_once_for_all_its_parameters():
    asked = []

    def lr(step):
        asked.append(step)
        return 1.0 / (1 + step)

    bound = optim.bind(optim.SGD(lr), "f4")
    del asked[:]  # what binding has asked
    assert [bound.scalars(step)[0] for step in (1, 1, 2, 2, 1)] == [1, 1, 0.5, 0.5, 1]
    assert asked == [0, 1, 0]
    assert bound.scalars(1, 0.25)[0] == 0.25
    assert bound.scalars(1)[0] == 1
