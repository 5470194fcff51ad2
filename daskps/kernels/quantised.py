"""Loops of codecs that keep the rest they do not send: 8 bits, 2 bits, largest ones.

A loop encodes a gradient `a` plus the rest of the gradients before, `before`, and
writes the new rest to `left`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from daskps.kernels.compiled import module_of, module_source

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from daskps.typing import Array

_LOOPS: Final = """\
F, U, SMALL = np.{float}, np.{bits}, np.float32
MAGNITUDE, INFINITY = U({magnitude}), U({infinity})
# Adding it, and taking it away again, leaves no bits behind the point.
WHOLE, LARGEST = F({whole}), np.finfo(F).max
BYTE, TWO = np.uint8, np.uint64(2)
R, W, N = read(types.{float}), write(types.{float}), types.{float}
BITS, WORD = read(types.{bits}), write(types.{bits})
QUARTER, SCALES = write(types.int8), write(types.float32)


@loop
def int8(
    a: R, before: R, left: W, bits: BITS, words: QUARTER, scales: SCALES, word: WORD,
    number: R, block: INT
):
    # `bits` are those of `left`, `word` and `number` are of the same memory.
    finite = True
    k = 0
    for start in range(0, a.size, block):
        given, kept = a[start : start + block], before[start : start + block]
        x, of, q = left[start : start + block], bits[start : start + block], words[
            start : start + block
        ]
        for i in range(x.size):
            x[i] = given[i] + kept[i]
        most = U(0)
        for i in range(x.size):
            size = U(of[i] & MAGNITUDE)
            most = size if size > most else most
        word[0] = most
        scale = SMALL(number[0] / F(127))
        if most >= INFINITY or SMALL(scale - scale) != SMALL(0):
            finite = False
        # Of numbers so small that 1 / scale is infinite nothing is said yet.
        back = F(1) / F(scale) if scale > SMALL(1e-37) else F(0)
        scale = scale if back > F(0) else SMALL(0)
        scales[k] = scale
        wide = F(scale)
        for i in range(x.size):
            v = F(F(x[i] * back) + WHOLE) - WHOLE
            # The scale was rounded too.
            v = F(127) if v > F(127) else (F(-127) if v < F(-127) else v)
            q[i] = np.int8(np.int32(v))
            x[i] = x[i] - v * wide
        k += 1
    return finite


@loop
def int8_back(
    words: read(types.int8), scales: read(types.float32), out: W, first: INT, block: INT
):
    # Of the first block there are `first` numbers.
    k, start, stop = 0, 0, min(first, out.size)
    while start < out.size:
        q, o, scale = words[start:stop], out[start:stop], F(scales[k])
        for i in range(o.size):
            o[i] = F(q[i]) * scale
        start, stop, k = stop, min(stop + block, out.size), k + 1


@loop
def two_bit(a: R, before: R, left: W, words: write(types.uint8), t: N):
    bad = np.uint32(0)
    last = words.size - 1
    for k in range(last):
        word = np.uint32(0)
        for j in range(4):
            i = np.uint64(4 * k + j)
            v = a[i] + before[i]
            up, down = v >= t, v <= -t
            code = np.uint32(np.uint32(up) | np.uint32(np.uint32(down) << np.uint32(1)))
            word |= np.uint32(code << np.uint32(2 * j))
            left[i] = v - t if up else (v + t if down else v)
            bad |= np.uint32(abs(v) > LARGEST) | np.uint32(v != v)
        words[k] = word
    word = np.uint32(0)
    for i in range(4 * last, a.size):
        v = a[i] + before[i]
        up, down = v >= t, v <= -t
        code = np.uint32(np.uint32(up) | np.uint32(np.uint32(down) << np.uint32(1)))
        word |= np.uint32(code << np.uint32(2 * (i - 4 * last)))
        left[i] = v - t if up else (v + t if down else v)
        bad |= np.uint32(abs(v) > LARGEST) | np.uint32(v != v)
    words[last] = word
    return bad == 0


@loop
def two_bit_back(words: read(types.uint8), out: W, table: R):
    # Four numbers at a time, as the table has them for each byte.
    last = words.size - 1
    for k in range(last):
        c, o = np.uint64(words[k]) << TWO, np.uint64(k) << TWO
        out[o] = table[c]
        out[o + np.uint64(1)] = table[c + np.uint64(1)]
        out[o + TWO] = table[c + TWO]
        out[o + np.uint64(3)] = table[c + np.uint64(3)]
    for i in range(4 * last, out.size):
        out[i] = table[4 * np.int64(words[last]) + i - 4 * last]


@loop
def select(total: W, t: N, ties: INT, indices: WORDS, values: W):
    # All above `t`, and the first so many that are equal to it.
    n = 0
    for i in range(total.size):
        size = abs(total[i])
        if size >= t and (size > t or ties > 0):
            ties -= np.int64(size == t)
            indices[n] = i
            values[n] = total[i]
            total[i] = F(0)
            n += 1
    return n


@loop
def count(total: R, t: N):
    n = 0
    for i in range(total.size):
        n += np.int64(abs(total[i]) >= t)
    return n
"""

#: The unsigned integer of a float's size, and what its bits mean.
_BITS: Final = {
    "float32": ("uint32", "0x7FFFFFFF", "0x7F800000", "1.5 * 2.0**23"),
    "float64": (
        "uint64",
        "0x7FFFFFFFFFFFFFFF",
        "0x7FF0000000000000",
        "1.5 * 2.0**52",
    ),
}
_SOURCES: Final = {
    kind: module_source(
        _LOOPS.format(
            float=kind, bits=bits, magnitude=size, infinity=infinity, whole=whole
        )
    )
    for kind, (bits, size, infinity, whole) in _BITS.items()
}


def loop(
    name: str, dtype: np.dtype[np.generic], cache_dir: str | None
) -> Callable[..., int]:
    """Return a compiled loop, which looks at no length.

    Parameters
    ----------
    name : str
        "int8", "int8_back", "two_bit", "two_bit_back", "select" or "count".
    dtype : dtype
        float32 or float64.
    cache_dir : str or None
        Where the compiled loops are kept, as in `build`.

    Returns
    -------
    callable
        The loop.

    Raises
    ------
    TypeError
        For another dtype.
    """
    if dtype.name not in _SOURCES:
        raise TypeError(f"no codec for {dtype}: use float32 or float64")
    return module_of(_SOURCES[dtype.name], cache_dir).function(name)


def bits_of(array: Array) -> Array:
    """Return the bits of an array, in the same memory.

    Parameters
    ----------
    array : ndarray, float32 or float64

    Returns
    -------
    ndarray, uint32 or uint64
        A view.
    """
    return array.view(_BITS[array.dtype.name][0])
