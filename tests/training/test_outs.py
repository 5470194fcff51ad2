"""Reads of a trainer into arrays it gives: known by names, and keeping no array."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import numpy as np
import pytest

import daskps

PARAMS = {"a": np.full(3, 1.0), "b": np.full(3, 2.0), "c": np.float64(3)}


def renamed(trainer, part):
    """Read into one dict, whose names change while the arrays stay."""
    buffer, seen = np.empty(3), []
    out: dict[str, np.ndarray] = {}
    for name in ("a", "b", "a", "b"):
        out.clear()
        out[name] = buffer
        trainer.pull(out=out)
        seen.append(float(buffer[0]))
        trainer.pull((name,), out=out)
        seen.append(float(buffer[0]))
    return seen


def exchanged(trainer, part):
    """Read into one dict, whose arrays change while the names stay."""
    out, seen = {name: np.empty_like(value) for name, value in PARAMS.items()}, []
    for _ in range(3):
        trainer.pull(out=out)
        out = dict(reversed(out.items()))
        out["a"], out["b"] = out["b"], out["a"]
        found = trainer.pushpull({}, out=out)
        seen.append([float(found[name].ravel()[0]) for name in PARAMS])
    return seen


def refused(trainer, part):
    """A read that is known refuses what it would have refused the first time."""
    out = {"a": np.empty(3)}
    for bad in (np.empty(4), np.empty(3, "f4"), np.frombuffer(bytes(24))):
        trainer.pull(out=out)
        with pytest.raises(ValueError, match=r"out\['a'\]"):
            trainer.pull(out={"a": bad})
    strided = np.zeros(6)[::2]
    trainer.pull(out={"a": strided})
    return strided.tolist()


def overlapping(trainer, part):
    """Arrays that share memory are refused, known names or not, read ahead or not."""
    memory = np.zeros(6)
    both, apart = (
        {"a": memory[:3], "b": memory[2:5]},
        {"a": memory[:3], "b": memory[3:]},
    )
    for read_ahead in (False, True):
        if read_ahead:
            trainer.prefetch(("a", "b"))
        pushpull = partial(trainer.pushpull, {})
        for verb in (trainer.pull, trainer.pull_async, pushpull):
            with pytest.raises(ValueError, match=r"out\['a'\] and out\['b'\] share"):
                verb(out=both)
        assert not memory.any()
        trainer.pull(out=apart)
        assert memory.tolist() == [1.0] * 3 + [2.0] * 3
        memory[:] = 0
    return trainer.clock


def dead(trainer, part):
    """Return how many of the arrays that the loop has let go of are still alive."""
    kept = []
    for _ in range(10):
        out = {"a": np.empty(3), "b": np.empty(3)}
        trainer.pull(out=out)
        trainer.pull(("a", "b"), out=out)
        trainer.pushpull({}, out=dict(out))
        kept += [weakref.ref(array) for array in out.values()]
        kept += [weakref.ref(array.base) for array in trainer.pull().values()]
    del out
    gc.collect()
    return sum(reference() is not None for reference in kept)


@pytest.mark.parametrize(
    ("loop", "found"),
    [
        (renamed, [1.0, 1.0, 2.0, 2.0] * 2),
        (exchanged, [[1.0, 2.0, 3.0]] * 3),
        (refused, [1.0] * 3),
        (overlapping, 0),
        (dead, 0),
    ],
)
def test_arrays_that_are_read_into(way, loop, found):
    with daskps.create(PARAMS, client=way, optimizer=daskps.optim.SGD(1.0)) as store:
        assert daskps.run(store, loop, [None]) == [found]
