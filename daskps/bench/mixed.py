"""Small pushes to a shard that holds much: after a large push, and after a small one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps import optim
from daskps.bench import bare, command
from daskps.bench.pairs import Comparison, alternate, seconds
from daskps.bench.report import line

if TYPE_CHECKING:
    from collections.abc import Sequence


def _after(store: Any, before: Any, small: Any) -> float:
    """Return the seconds of a small push right after another one."""
    store.push(before)
    return seconds(partial(store.push, small))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Parameters
    ----------
    argv : sequence of str, optional
        Command line without the program's name.

    Returns
    -------
    int
        Exit status: 0, whatever was measured.
    """
    parser = command.plain("mixed")
    add, count = parser.add_argument, command.count
    add("--mib", type=count, default=64, help="of the large push [%(default)s]")
    add("--pairs", type=count, default=31, help="[%(default)s]")
    options = parser.parse_args(argv)
    large = {"large": np.ones(options.mib * 2**18, "f4")}
    small = {"small": np.ones(16, "f4")}
    params = {"large": daskps.ArraySpec(large["large"].shape, "float32"), **small}
    with (
        bare.cluster(rpc_only=False),
        daskps.create(params, optimizer=optim.SGD(1e-3), shards=1) as store,
    ):
        for before in (large, small, small):  # warm
            store.push(before)
        found = alternate(
            partial(_after, store, large, small),
            partial(_after, store, small, small),
            options.pairs,
        )
    name = f"64 B after {options.mib} MiB"
    print(line(Comparison(name, "after 64 B", found.ours, found.theirs)))
    return 0
