"""How fast the compiled loops are, against torch and against copying memory.

Both sides of a line run in turn, in one process and on the same memory.

Bytes are counted without the cache lines that a store reads first: SGD in place
reads weights and gradient and writes weights, three arrays; a copy reads and writes.
So SGD over n elements is set against `np.copyto` of 1.5 n elements. Adam is set
against the fused Adam of torch on the same n elements.

Then follows what a shard does, against the same update in place: SGD writes the other
buffer of the weights, Adam in durable memory that of its slots too. "Past" writes
weights past the caches, as large shards do; "checked" looks for NaN in the same pass.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from daskps import optim
from daskps.kernels import finite, past
from tests.benchmarks.command import benchmark, number
from tests.benchmarks.samples import Job, seconds

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from daskps.typing import Array

    Action: TypeAlias = Callable[[], object]
    Operands: TypeAlias = list[Array]

COPY, READ, FUSED = "copyto, same bytes", "copyto of n / 2", "torch fused, in place"
#: Ours and what it is set beside.
LINES = (
    ("SGD in place", COPY),
    ("SGD publish", COPY),
    ("copy, past", "copyto"),
    ("finite", READ),
    ("Adam in place", FUSED),
    ("Adam publish", FUSED),
    ("SGD publish", "SGD in place"),
    ("SGD past", "SGD in place"),
    ("SGD past, checked", "SGD in place"),
    ("Adam past", "Adam in place"),
    ("Adam durable", "Adam in place"),
)


def _actions(arrays: Operands, cache_dir: str | None) -> dict[str, Action]:
    """Return what our loops do with the first n elements of each array."""
    n = len(arrays[0]) * 2 // 3
    w, g, m, v, out, m_out, v_out = (a[:n] for a in arrays)
    sgd = optim.bind(optim.SGD(1e-3), np.float32, cache_dir=cache_dir)
    adam = optim.bind(optim.Adam(), np.float32, cache_dir=cache_dir)
    few, many = sgd.scalars(10), adam.scalars(10)
    slots, slots_out = (m, v), (m_out, v_out)
    return {
        "SGD in place": lambda: sgd.inplace(w, g, (), few),
        "SGD publish": lambda: sgd.publish(w, out, g, (), few),
        "SGD past": lambda: sgd.publish(w, out, g, (), few, past=True),
        "SGD past, checked": lambda: sgd.publish(
            w, out, g, (), few, past=True, check=True
        ),
        "Adam in place": lambda: adam.inplace(w, g, slots, many),
        "Adam publish": lambda: adam.publish(w, out, g, slots, many),
        "Adam past": lambda: adam.publish(w, out, g, slots, many, slots_out, past=True),
        "Adam durable": lambda: adam.publish(w, out, g, slots, many, slots_out),
        "copy, past": lambda: past.copy(out, w, cache_dir=cache_dir),
        "finite": lambda: finite(w, cache_dir=cache_dir),
    }


def _peers(arrays: Operands) -> dict[str, Action]:
    """Return what is set beside them; without torch nothing of its."""
    n = len(arrays[0]) * 2 // 3
    w, g, m, v, out, *_ = (a[:n] for a in arrays)
    found = {COPY: _copy(arrays, 3), READ: _copy(arrays, 1)}
    found["copyto"] = lambda: np.copyto(out, w)
    if torch_adam := _torch_adam(w, g, m, v):
        found[FUSED] = torch_adam
    return found


def _arrays(n: int) -> Operands:
    """Return seven arrays cut from one piece of memory that was touched.

    Where they lie decides as much as the code: on one machine, both sides took twice
    as long over arrays of 64 MiB whose starts were 64 MiB and 4 KiB apart, which is
    how an allocator places them, as over arrays with other gaps.
    """
    size, gap = n * 3 // 2, 13 * 16
    arena = np.empty(7 * (size + gap) + 16, np.float32)
    arena[:] = 0.1
    # Cache lines, as in a segment: slots that start elsewhere are copied first.
    arena = arena[-arena.ctypes.data % 64 // 4 :]
    starts = range(0, 7 * (size + gap), size + gap)
    arrays = [arena[start : start + size] for start in starts]
    rng = np.random.default_rng(0)
    for a in arrays[:2]:
        a[:] = rng.standard_normal(size, np.float32)
    return arrays


def _copy(arrays: Operands, moved: int) -> Action:
    """Return a copy that reads and writes as much as `moved` arrays of n elements."""
    half = len(arrays[0]) * 2 // 3 * moved // 2
    source, target = arrays[3][:half], arrays[4][:half]
    return lambda: np.copyto(target, source)


def _torch_adam(w: Array, g: Array, m: Array, v: Array) -> Action | None:
    """Return a step of torch on the same memory."""
    try:
        import torch
    except ImportError:
        print("torch is not installed: Adam is left out")
        return None
    torch.set_num_threads(1)
    weights = torch.nn.Parameter(torch.from_numpy(w))
    weights.grad = torch.from_numpy(g)
    adam = torch.optim.Adam([weights], lr=1e-3, fused=True)
    adam.step()
    adam.state[weights]["exp_avg"] = torch.from_numpy(m)
    adam.state[weights]["exp_avg_sq"] = torch.from_numpy(v)
    step: Action = adam.step
    return step


@benchmark(
    "kernels",
    "compiled loops, beside torch and copying memory",
    number("--elements", 16 << 20),
    ("--cache-dir", {"help": "of compiled kernels [in memory]"}),
    pairs=11,
)
def kernels(options: Namespace) -> Iterator[Job]:
    """Yield each loop beside its peers."""
    arrays = _arrays(options.elements)
    acts = _actions(arrays, options.cache_dir) | _peers(arrays)
    for name, peer in LINES:
        if peer in acts:
            sides = {one: partial(seconds, acts[one]) for one in (name, peer)}
            yield Job(name, sides, warm=2)
