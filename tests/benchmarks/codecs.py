"""Costs and savings of codecs: bytes, seconds to encode and decode, and where that pays.

Each is measured beside np.copyto of the same array and np.partition of its absolute
values, in one thread, in turn with them; the figures are medians. A codec pays on links
that take longer for the bytes it saves than it takes at both ends: the fastest such link
is worked out from that.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from daskps import codecs as ours
from daskps.config import cache_dir
from tests.benchmarks.command import benchmark, number
from tests.benchmarks.samples import Job, seconds

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from daskps.typing import Array

#: Calls per measurement.
CALLS = 3


def _chosen(scale: float) -> Iterator[tuple[str, ours.Codec]]:
    """Yield codecs with their names, for gradients of such a size."""
    for codec in (ours.BFloat16(), ours.Float16(), ours.Int8()):
        yield codec.name, codec
    yield "2bit", ours.TwoBit(scale)
    for ratio in (0.01, 0.001):
        yield f"topk {ratio}", ours.TopK(ratio=ratio)


def _encode(codec: ours.Codec, array: Array, left: Array, out: list[Array]) -> None:
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


@benchmark(
    "codecs",
    "codecs beside np.copyto and np.partition, and where they pay",
    number("--mib", 16, "of the gradient"),
    pairs=9,
)
def codecs(options: Namespace) -> Iterator[Job | str]:
    """Yield what each codec takes to encode and to decode."""
    n = options.mib * 2**18
    array = np.random.default_rng(1).normal(scale=1e-3, size=n).astype("f4")
    out, left, sizes = np.empty_like(array), np.zeros_like(array), np.abs(array)
    beside: dict[str, Callable[[], object]] = {
        "np.copyto": partial(np.copyto, out, array),
        "np.partition": partial(np.partition, sizes, n - n // 100),
    }
    for name, codec in _chosen(1e-3):
        words: list[Array] = []
        encode = partial(_encode, codec, array, left, words)
        encode()
        decode = partial(codec.decode_piece, words[0], out, cache_dir=cache_dir())
        found: list[float] = []
        for what, act in (("encode", encode), ("decode", decode)):
            acts = {what: act} | beside
            sides = {of: partial(seconds, one, CALLS) for of, one in acts.items()}
            job = Job(f"{name}, {what}", sides)
            yield job
            found += [job.median(what)] if job.found else []
        sent = words[0].nbytes / array.nbytes
        if len(found) == 2:
            link = pays_below(array.nbytes - words[0].nbytes, sum(found))
            yield f"  {name} sends {sent:.4f} of the bytes, pays below {8e-9 * link:.1f} Gb/s"
