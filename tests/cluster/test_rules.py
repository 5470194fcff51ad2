"""The rules of a store in one process."""

from __future__ import annotations

import pickle

from daskps import optim
from daskps.cluster.rules import Rules
from daskps.layout import Layout


def test_parameters_share_the_kernels_and_scalars_of_their_rule():
    shapes = {"a": ((3,), "float32"), "b": ((2,), "float32"), "c": ((2,), "float64")}
    one, other = optim.SGD(0.1), optim.SGD(0.1)
    pickled = pickle.dumps({0: one, 1: one, 2: one})
    rules = Rules(Layout.build(shapes, 1), pickled)
    a, b, c = (rules.get(i) for i in range(3))
    assert a is b
    assert a is not c
    assert c is not None
    assert c.kernel.dtype == "f8"
    apart = Rules(Layout.build(shapes, 1), pickle.dumps({0: one, 1: other}))
    assert apart.get(0) is not apart.get(1)
    assert apart.get(2) is None
