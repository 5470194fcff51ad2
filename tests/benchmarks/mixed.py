"""Small pushes to a shard that holds much: after a large push, and after a small one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps import optim
from tests.benchmarks import clusters
from tests.benchmarks.options import number
from tests.benchmarks.pairs import Comparison, alternate, seconds
from tests.benchmarks.report import line

if TYPE_CHECKING:
    from argparse import Namespace


def _after(store: Any, before: Any, small: Any) -> float:
    """Return the seconds of a small push right after another one."""
    store.push(before)
    return seconds(partial(store.push, small))


OPTIONS = (number("--mib", 64, "of the large push"), number("--pairs", 31))


def run(options: Namespace) -> None:
    """Measure and print."""
    large = {"large": np.ones(options.mib * 2**18, "f4")}
    small = {"small": np.ones(16, "f4")}
    params = {"large": daskps.ArraySpec(large["large"].shape, "float32"), **small}
    with (
        clusters.local(2),
        daskps.create(params, optimizer=optim.SGD(1e-3), shards=1) as store,
    ):
        for before in (large, small, small):  # warm
            store.push(before)
        after_large = partial(_after, store, large, small)
        found = alternate(
            after_large, partial(_after, store, small, small), options.pairs
        )
    print(line(Comparison(f"64 B after {options.mib} MiB", "after 64 B", *found)))
