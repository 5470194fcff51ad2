"""Copies, and the text of generated loops, that write past the caches.

An ordinary store reads a cache line before it replaces it, even where all of the line
is replaced. So the loops make blocks in the first-level cache and write them from
there, full lines at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from daskps.kernels.compiled import module_of, module_source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.typing import Array


#: Shards with so many bytes of weights write them past the caches, which do not hold
#: both buffers, a gradient and what readers copy. With a pull after each push 4 MiB
#: gained a little, 2 MiB lost as much, 8 MiB and more gained a quarter.
PAST_NBYTES = 4 * 2**20
#: Elements that are made before they are written. Measured for Adam: 64 and 128 are
#: quickest, 1,024 as slow as stores without blocks.
_BLOCK = 64

_HEAD = """\
from daskps.kernels.intrinsics import fence, stream

LARGEST = T(np.finfo(T).max)
"""

#: From element `first` on, where each array that is written past the caches begins a
#: line. With `check` it stops at a gradient that is not finite.
_LOOP = """\


@loop
def {name}({arguments}, first: INT, check: types.boolean):
{scalars}{scratch}    whole = w.size - (w.size - first) % {block}
    for start in range(first, whole, {block}):
        bad = U(0)
{views}        for i in range({block}):
            {targets} = {call}
            bad |= U(not abs(g_[i]) <= LARGEST)
        if check and bad:
            # These stores must not land on data that others write there next.
            fence()
            return False
{streams}    fence()
    bad = U(0)
    for start, stop in ((0, first), (whole, w.size)):
{rest}        for i in range(w_.size):
            {rest_targets} = {call}
            bad |= U(not abs(g_[i]) <= LARGEST)
    return not (check and bad)
"""


def past_source(slots: Sequence[str], scalars: str, call: str) -> str:
    """Return the text of the loops `past` and `move`, to follow that of the others.

    Parameters
    ----------
    slots, scalars : sequence of str
        Names of the arguments.
    call : str
        The update of one weight, of `w_[i]`, `g_[i]` and so on.

    Returns
    -------
    str
        Python source. `past` writes weights and slots past the caches; `move`, for
        rules with slots, only these.
    """
    text = _HEAD + _loop("past", slots, scalars, call, weights=True)
    return text + _loop("move", slots, scalars, call, weights=False) if slots else text


def _loop(
    name: str, slots: Sequence[str], scalars: str, call: str, *, weights: bool
) -> str:
    outs = ["out", *(f"t{j}" for j in range(len(slots)))]
    # The block that each array is made in, and the array that it is written to.
    pairs = [(f"{out}_made", out) for out in (outs if weights else outs[1:])]
    part = f"[start : start + {_BLOCK}]"
    read, near = ["w", "g", *slots], [] if weights else ["out"]
    made = [f"{out}_[i]" for out in near] + [f"{made}[i]" for made, _ in pairs]
    types = dict.fromkeys(read, "READ") | dict.fromkeys(outs, "WRITE") | {"c": "READ"}
    return _LOOP.format(
        name=name,
        arguments=", ".join(
            f"{a}: {types[a]}" for a in ("w", "out", "g", *slots, *outs[1:], "c")
        ),
        scalars=scalars,
        scratch="".join(f"    {made} = np.empty({_BLOCK}, T)\n" for made, _ in pairs),
        block=_BLOCK,
        views="".join(f"        {a}_ = {a}{part}\n" for a in [*read, *near]),
        targets=", ".join(made),
        call=call,
        streams="".join(
            f"        stream({out}{part}, {made}, {_BLOCK})\n" for made, out in pairs
        ),
        rest="".join(f"        {a}_ = {a}[start:stop]\n" for a in [*read, *outs]),
        rest_targets=", ".join(f"{out}_[i]" for out in outs),
    )


#: Copies of so much together gain by stores past the caches, also where the copy is
#: read at once: 8 MiB and more did, 4 MiB lost (one core with 32 MiB of cache).
LARGE_NBYTES: Final = 8 * 2**20
#: An array that is less is copied as ever: it costs no more than to look at it.
_LEAST_NBYTES = 64 * 2**10
_LINE = 64

_SOURCE: Final = module_source("""\
from daskps.kernels.intrinsics import fence, stream


@loop
def copy(a: read(types.uint8), out: write(types.uint8)):
    stream(out, a, a.size)
    fence()
""")


def copy(out: Array, a: Array, *, cache_dir: str | None = None) -> None:
    """Copy a large array past the caches.

    Parameters
    ----------
    out : ndarray
        Where to.
    a : ndarray
        The array to copy. Where it has another dtype or shape, or one of the two is not
        contiguous, this is `numpy.copyto`.
    cache_dir : str, optional
        Where the compiled loop is kept, as in `build`.
    """
    if (
        a.nbytes < _LEAST_NBYTES
        or a.dtype != out.dtype
        or a.shape != out.shape
        or not (a.flags.c_contiguous and out.flags.carray)
    ):
        np.copyto(out, a)
        return
    source, target = (x.reshape(-1).view(np.uint8) for x in (a, out))
    first = -target.ctypes.data % _LINE
    last = len(target) - (len(target) - first) % _LINE
    for edge in (slice(0, first), slice(last, None)):
        target[edge] = source[edge]
    middle = slice(first, last)
    loop = module_of(_SOURCE, cache_dir).function("copy")
    loop(source[middle], target[middle])


def warm(*, cache_dir: str | None = None) -> None:
    """Compile the loop, so that its first use finds it ready.

    Parameters
    ----------
    cache_dir : str, optional
        Where it is kept, as in `build`.
    """
    module_of(_SOURCE, cache_dir).function("copy")
