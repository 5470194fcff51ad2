"""What the process has ready that worker processes of tests are forked from.

A worker imports most of it before it is there, and the rest for the first store: 700
modules and Numba's registries, which took 1.6 of the 2 s of processor time of a worker.
"""

from __future__ import annotations

import gc
import importlib
import threading

from daskps import kernels

for name in (
    "dask.array",
    "dask.dataframe",
    "daskps.cluster.plugins",
    "distributed.http.health",
    "distributed.http.prometheus",
    "distributed.http.statics",
    "distributed.http.worker",
    "distributed.http.worker.prometheus",
    "distributed.protocol.numpy",
    "distributed.shuffle",
    "hypothesis",
    "pytest",
):
    importlib.import_module(name)
# Numba reads its registries when it compiles for the first time. No rule is like this.
kernels.build(lambda w, g: w + g, 0, 0, "f4").warm()
# A thread is not forked, and a pool whose thread is gone waits for it for ever: so does
# `distributed.utils_test`, which is not among these.
assert threading.active_count() == 1, threading.enumerate()
# Collections in a child would look at all this again, and so copy its pages.
gc.collect()
gc.freeze()
