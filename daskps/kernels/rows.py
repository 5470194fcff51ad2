"""The text of the generated loops over rows of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: How many rows before its turn memory is asked for a row. Measured for random rows of
#: 8 to 256 weights: 4 to 16 are alike and take 0.7 to 0.9 times as long as none; rows of
#: 1,000 and 4,096 weights 0.83 to 1.04.
_AHEAD = 8

#: An unsigned number needs no look whether it counts from the end: a tenth of the time
#: of rows of 8 weights.
_LOOP = """\
from daskps.kernels.ahead import fetch


@njit(error_model="numpy", nogil=True, cache=CACHE)
def rows({arguments}):
{scalars}    for k in range(ids.size):
        r = np.uint64(ids[k])
        later = ids[min(k + {ahead}, ids.size - 1)]
{fetches}        for i in range(w.shape[1]):
            {targets} = {call}


IDS = read(types.int64)
READ_ROWS, WRITE_ROWS = READ.copy(ndim=2), WRITE.copy(ndim=2)
SIGNATURES["rows"] = ({types})
"""


#: The module that moves rows: as bytes, so that all dtypes have the same loops. Whoever
#: gave ids may change them meanwhile: each is read once, and looked at before it is used.
MOVES = """\
from daskps.kernels.ahead import fetch, fetch_to_read, move

AHEAD = 16
READ_ROWS = read(types.uint8).copy(ndim=2)
WRITE_ROWS = write(types.uint8).copy(ndim=2)
IDS = read(types.int64)


@njit(nogil=True, cache=CACHE)
def gather(w, first, ids, at, out, ask):
    direct = at.size == 0
    n, room = np.uint64(w.shape[0]), np.uint64(out.shape[0])
    for k in range(ids.size):
        r = np.uint64(ids[k] - first)
        to = np.uint64(k) if direct else np.uint64(at[k])
        if r >= n or to >= room:
            return k
        if ask:
            fetch_to_read(w, ids[min(k + AHEAD, ids.size - 1)] - first)
        move(out, to, w, r)
    return ids.size


@njit(nogil=True, cache=CACHE)
def scatter(w, first, ids, at, rows, ask):
    direct = at.size == 0
    n, given = np.uint64(w.shape[0]), np.uint64(rows.shape[0])
    for k in range(ids.size):
        r = np.uint64(ids[k] - first)
        source = np.uint64(k) if direct else np.uint64(at[k])
        if r >= n or source >= given:
            return k
        if ask:
            fetch(w, ids[min(k + AHEAD, ids.size - 1)] - first)
        move(w, r, rows, source)
    return ids.size


SIGNATURES["gather"] = READ_ROWS, types.int64, IDS, IDS, WRITE_ROWS, types.boolean
SIGNATURES["scatter"] = WRITE_ROWS, types.int64, IDS, IDS, READ_ROWS, types.boolean
"""


_SUMS = """\
T = types.{dtype}
ROWS = read(T).copy(ndim=2), write(T).copy(ndim=2)


@njit(nogil=True, cache=CACHE)
def sums(rows, at, where, out):
    n, given = 0, np.uint64(rows.shape[0])
    for k in range(where.size):
        source, to = np.uint64(at[k]), np.uint64(where[k])
        if source >= given:
            return False
        if to == n:
            n += 1
            for i in range(rows.shape[1]):
                out[to, i] = rows[source, i]
        else:
            for i in range(rows.shape[1]):
                out[to, i] {operator} rows[source, i]
    return True


SIGNATURES["sums"] = ROWS[0], read(types.int64), read(types.int64), ROWS[1]
"""


def sums_text(dtype: str, operator: str) -> str:
    """Return the text of the loop that adds up rows with one id.

    Parameters
    ----------
    dtype : str
        Of the rows.
    operator : str
        What adds one in place.

    Returns
    -------
    str
        Python source.
    """
    return _SUMS.format(dtype=dtype, operator=operator)


def rows_source(slots: Sequence[str], scalars: str, call: str) -> str:
    """Return the text of the loop `rows`, to follow that of the others.

    Parameters
    ----------
    slots, scalars : sequence of str
        Names of the arguments.
    call : str
        The update of one weight, of `w[r, i]`, `g[k, i]` and so on.

    Returns
    -------
    str
        Python source.
    """
    types = ["WRITE_ROWS", "IDS", "READ_ROWS", *["WRITE_ROWS"] * len(slots)]
    return _LOOP.format(
        ahead=_AHEAD,
        fetches="".join(f"        fetch({name}, later)\n" for name in ("w", *slots)),
        arguments=", ".join(["w", "ids", "g", *slots, "c"]),
        scalars=scalars,
        targets=", ".join(f"{name}[r, i]" for name in ("w", *slots)),
        call=call,
        types=", ".join([*types, "READ"]),
    )
