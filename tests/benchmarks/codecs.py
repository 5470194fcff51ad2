"""What codecs cost and save: bytes, seconds to encode and decode, and where that pays.

Each is measured beside np.copyto of the same array and np.partition of its absolute
values, in one thread, in turn with them; the figures are medians. A codec pays on links
that take longer for the bytes it saves than it takes at both ends: the fastest such link
is worked out from that.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from daskps import codecs
from daskps.config import cache_dir
from tests.benchmarks.options import number
from tests.benchmarks.pairs import seconds

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from daskps.typing import Array

#: Calls per measurement.
CALLS = 3
OPTIONS = (number("--mib", 16, "of the gradient"), number("--pairs", 9))


def _chosen(scale: float) -> Iterator[tuple[str, codecs.Codec]]:
    """Yield codecs with their names, for gradients of such a size."""
    for codec in (codecs.BFloat16(), codecs.Float16(), codecs.Int8()):
        yield codec.name, codec
    yield "2bit", codecs.TwoBit(scale)
    for ratio in (0.01, 0.001):
        yield f"topk {ratio}", codecs.TopK(ratio=ratio)


def _encode(codec: codecs.Codec, array: Array, left: Array, out: list[Array]) -> None:
    cuts, before = [(0, len(array))], left if codec.feedback else None
    made = codec.encode_pieces(array, cuts, before, cache_dir=cache_dir())
    out[:] = made.words


def pays_below(saved: int, spent: float) -> float:
    """Return the bytes per second of the fastest link on which a codec pays.

    Parameters
    ----------
    saved : int
        Bytes that do not travel.
    spent : float
        Seconds to encode and to decode.
    """
    return saved / spent


def run(options: Namespace) -> None:
    """Measure and print."""
    n = options.mib * 2**20 // 4
    array = np.random.default_rng(1).normal(scale=1e-3, size=n).astype("f4")
    out, left, sizes = np.empty_like(array), np.zeros_like(array), np.abs(array)
    copy, part = (
        partial(np.copyto, out, array),
        partial(np.partition, sizes, n - n // 100),
    )
    print(
        f"{f'{options.mib} MiB':<12}{'of bytes':>9}{'encode':>9}{'decode':>9}"
        f"{'/copyto':>9}{'/copyto':>9}{'x partition':>12}{'pays below':>13}"
    )
    for name, codec in _chosen(1e-3):
        words: list[Array] = []
        encode = partial(_encode, codec, array, left, words)
        encode()
        decode = partial(codec.decode_piece, words[0], out, cache_dir=cache_dir())
        actions: list[Callable[[], object]] = [copy, part, encode, decode]
        rows = [[seconds(a, CALLS) for a in actions] for _ in range(options.pairs)]
        base, sort, there, back = map(statistics.median, zip(*rows, strict=True))
        sent, given = words[0].nbytes, array.nbytes
        link = pays_below(given - sent, there + back)
        print(
            f"{name:<12}{sent / given:>9.4f}{given / there / 1e9:>9.2f}"
            f"{given / back / 1e9:>9.2f}{base / there:>9.2f}{base / back:>9.2f}"
            f"{there / sort:>12.2f}{8 * link / 1e9:>8.1f} Gb/s"
        )
