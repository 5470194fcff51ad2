"""The text of the generated loop over rows of a table."""

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
