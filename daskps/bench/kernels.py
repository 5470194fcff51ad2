"""How fast the compiled loops are, against torch and against copying memory.

Both sides of a line run in turn, in one process and on the same memory; the ratio is
the median over the pairs of our time over the peer's, with its smallest and largest
value.

What moves is counted without the cache lines that a store reads first: SGD in place
reads weights and gradient and writes weights, three arrays; a copy reads and writes.
So SGD over n elements is set against `np.copyto` of 1.5 n elements. Adam is set
against the fused Adam of torch on the same n elements.

Then follows what a shard does, against the same update in place: SGD writes the other
buffer of the weights, Adam in durable memory that of its slots too. "Past" writes
weights past the caches, as large shards do; "checked" looks for NaN in the same pass.
Then come several threads (`--threads`) against one; in all other lines there is one.
At the end are rows of a table; see `row_kernels`.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import numpy as np

from daskps import kernels, optim
from daskps.bench import command, row_kernels
from daskps.bench.pairs import seconds
from daskps.kernels import copying, threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from daskps.typing import Array

    Operands: TypeAlias = list[Array]
    _Action: TypeAlias = Callable[[], object]
    _Line: TypeAlias = tuple[str, _Action, str, _Action]

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table.

    Parameters
    ----------
    argv : sequence of str, optional
        Command line without the program's name.

    Returns
    -------
    int
        Exit status: 0, whatever was measured.
    """
    parser = command.plain("kernels")
    add = parser.add_argument
    add("--elements", type=command.count, default=16 << 20, help="[%(default)s]")
    add("--rows", type=command.count, default=1_000_000, help="[%(default)s]")
    add("--pairs", type=command.count, default=11, help="[%(default)s]")
    add("--threads", type=command.count, default=2, help="[%(default)s]")
    add("--cache-dir", help="of compiled kernels [in memory]")
    options = parser.parse_args(argv)
    n = options.elements
    print(f"{n:,} float32 elements, medians of {options.pairs} pairs")
    print(f"{'ours':<22}{'ms':>8}  {'peer':<22}{'ms':>8}  {'ratio':>5}  range")
    arrays = _arrays(n)
    for line in _lines(arrays, options.cache_dir):
        print(_compare(line, options.pairs))
    many = options.threads
    for name, action in _large(arrays, options.cache_dir).items():
        line = f"{name}, x{many}", action, "one thread", action
        print(_compare(line, options.pairs, many))
    print(f"a tenth of {options.rows:,} rows of {row_kernels.DIM} float32")
    for line in row_kernels.lines(options.rows, options.cache_dir):
        print(_compare(line, options.pairs))
    return 0


def _lines(arrays: Operands, cache_dir: str | None) -> list[_Line]:
    n = len(arrays[0]) * 2 // 3
    w, g, m, v, out, m_out, v_out = (a[:n] for a in arrays)
    sgd = optim.bind(optim.SGD(1e-3), np.float32, cache_dir=cache_dir)
    adam = optim.bind(optim.Adam(), np.float32, cache_dir=cache_dir)
    few, many = sgd.scalars(10), adam.scalars(10)
    copied, fused = "copyto, same bytes", "torch fused, in place"
    lines: list[_Line] = [
        ("SGD in place", lambda: sgd.inplace(w, g, (), few), copied, _copy(arrays, 3)),
        (
            "SGD publish",
            lambda: sgd.publish(w, out, g, (), few),
            copied,
            _copy(arrays, 3),
        ),
        (
            "copy, past",
            lambda: copying.copy(out, w, cache_dir=cache_dir),
            "copyto",
            lambda: np.copyto(out, w),
        ),
        (
            "finite",
            lambda: kernels.finite(w, cache_dir=cache_dir),
            copied,
            _copy(arrays, 1),
        ),
    ]
    torch_adam = _torch_adam(w, g, m, v)
    if torch_adam is not None:
        lines += [
            (
                "Adam in place",
                lambda: adam.inplace(w, g, (m, v), many),
                fused,
                torch_adam,
            ),
            (
                "Adam publish",
                lambda: adam.publish(w, out, g, (m, v), many),
                fused,
                torch_adam,
            ),
        ]
    return [
        *lines,
        (
            "SGD publish",
            lambda: sgd.publish(w, out, g, (), few),
            "SGD in place",
            lambda: sgd.inplace(w, g, (), few),
        ),
        (
            "SGD past",
            lambda: sgd.stream(w, out, g, (), few),
            "SGD in place",
            lambda: sgd.inplace(w, g, (), few),
        ),
        (
            "SGD past, checked",
            lambda: sgd.stream(w, out, g, (), few, check=True),
            "SGD in place",
            lambda: sgd.inplace(w, g, (), few),
        ),
        (
            "Adam past",
            lambda: adam.stream(w, out, g, (m, v), many, (m_out, v_out)),
            "Adam in place",
            lambda: adam.inplace(w, g, (m, v), many),
        ),
        (
            "Adam durable",
            lambda: adam.publish(w, out, g, (m, v), many, (m_out, v_out)),
            "Adam in place",
            lambda: adam.inplace(w, g, (m, v), many),
        ),
    ]


def _large(arrays: Operands, cache_dir: str | None) -> dict[str, _Action]:
    """Return what large shards do, and updates in place beside it."""
    n = len(arrays[0]) * 2 // 3
    w, g, m, v, out, m_out, v_out = (a[:n] for a in arrays)
    sgd = optim.bind(optim.SGD(1e-3), np.float32, cache_dir=cache_dir)
    adam = optim.bind(optim.Adam(), np.float32, cache_dir=cache_dir)
    few, many = sgd.scalars(10), adam.scalars(10)
    return {
        "SGD in place": lambda: sgd.inplace(w, g, (), few),
        "SGD past": lambda: sgd.stream(w, out, g, (), few),
        "SGD past, checked": lambda: sgd.stream(w, out, g, (), few, check=True),
        "Adam in place": lambda: adam.inplace(w, g, (m, v), many),
        "Adam past": lambda: adam.stream(w, out, g, (m, v), many, (m_out, v_out)),
        "copy, past": lambda: copying.copy(out, w, cache_dir=cache_dir),
    }


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


def _copy(arrays: Operands, moved: int) -> _Action:
    """Return a copy that reads and writes as much as `moved` arrays of n elements."""
    half = len(arrays[0]) * 2 // 3 * moved // 2
    source, target = arrays[3][:half], arrays[4][:half]
    return lambda: np.copyto(target, source)


def _torch_adam(w: Array, g: Array, m: Array, v: Array) -> _Action | None:
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
    step: _Action = adam.step
    return step


def _compare(line: _Line, pairs: int, many: int = 1) -> str:
    """Return a line of the table; ours runs in so many threads."""
    name, ours, peer_name, peer = line
    for action in (ours, peer, ours, peer):
        action()
    times = [(_milliseconds(ours, many), _milliseconds(peer)) for _ in range(pairs)]
    threads.allow(1)
    ratios = [a / b for a, b in times]
    a, b = (statistics.median(column) for column in zip(*times, strict=True))
    return (
        f"{name:<22}{a:8.2f}  {peer_name:<22}{b:8.2f}  "
        f"{statistics.median(ratios):5.2f}  {min(ratios):.2f} to {max(ratios):.2f}"
    )


def _milliseconds(action: Callable[[], object], n: int = 1) -> float:
    if n != threads.allowed():
        threads.allow(n)
        # Starts the threads, which a worker keeps.
        action()
    return 1e3 * seconds(action)
