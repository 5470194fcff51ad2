"""Steps that name some parameters of a shard: reads find each where it was left."""

from __future__ import annotations

import numpy as np
import pytest

import daskps
from daskps import optim

#: More than a shard keeps in one buffer.
SIZES = {"a": 3, "w": 20_000, "b": 5}
STEPS = [
    ("a",),
    ("w",),
    ("a", "b"),
    ("w", "a"),
    (),
    ("b",),
    ("a", "w", "b"),
    ("b", "w"),
]


def loop(trainer, sync):
    wanted, out = dict.fromkeys(SIZES, 0.0), trainer.pull()
    for names in STEPS:
        views = trainer.pull(copy=False)
        before = {name: view.copy() for name, view in views.items()}
        trainer.push({name: np.full(SIZES[name], -1.0, "f4") for name in names})
        for name in names:
            wanted[name] += 1.0
        for found in (
            trainer.pull(out=out),
            trainer.pull(copy=False),
            trainer.pull(),
            trainer.pull(["b", "a"]),
        ):
            for name, array in found.items():
                assert array.shape == (SIZES[name],)
                assert set(array) == {wanted[name]}
        for name, view in views.items():
            # Of the round before, to which nothing was written since.
            np.testing.assert_array_equal(view, before[name])
    return wanted


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_reads_of_pieces_in_both_buffers(way, sync):
    here, _ = way.nthreads()
    params = {name: np.zeros(n, "f4") for name, n in SIZES.items()}
    options = {"servers": [here], "optimizer": optim.SGD(1.0), "client": way}
    with daskps.create(params, **options) as store:
        ranks = [sync] * (2 if sync == "bsp" else 1)
        wanted = daskps.run(store, loop, ranks, sync=sync, callbacks=())[0]
        assert set(wanted.values()) != {8.0}
        for name in SIZES:
            store.push({name: np.full(SIZES[name], -1.0, "f4")})
            wanted[name] += 1.0
            found, snapshot = store.pull(), store.snapshot()
            for other in SIZES:
                assert set(found[other]) == {wanted[other]}
                assert set(snapshot[other].compute()) == {wanted[other]}
