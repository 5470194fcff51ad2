"""The text of the generated loops over rows of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from daskps.kernels.compiled import module_source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class OfRows(NamedTuple):
    """The parts of a rule that need whole rows: such a rule updates tables only."""

    #: `(w, g, *scalars) -> number` of one weight. `update` takes the mean of it over the
    #: row, after the gradient.
    mean: Callable[..., Any]
    #: Of each slot whether it has one number per row, and shape (n_rows, 1).
    per_row: tuple[bool, ...]


#: Rows that are copied to the log before they count there and are updated: they are in
#: the first-level cache still. 8, 16 and 32 take the same time.
_CHUNK = 16
#: How many rows before its turn a row is fetched from memory. 8 and 16 are alike, and
#: take 0.75 times as long as none. Gradients that have gaps are fetched ahead too:
#: processors do that themselves only for memory without gaps.
_AHEAD = 16

#: Bytes of a log from which on it is written past the caches: it does not stay there, and
#: an ordinary store reads what it replaces. With 2 MiB both take the same time, with 25
#: the whole update takes 0.9 times as long.
_PAST_NBYTES = 8 * 2**20
_LINE = 64

#: An entry of the log counts once the word says so, and its row changes after that.
#: The caller may change its ids meanwhile: each is read once, and checked before it is
#: used. An unsigned number needs no check whether it counts from the end.
_LOGGED = """\

@loop
def {name}({arguments}):
    direct = at.size == 0
    n, given = np.uint64(w.shape[0]), np.uint64(g.shape[0])
    sources = np.empty({chunk}, np.uint64)
{past}{before}    for lo in range(0, ids.size, {chunk}):
        hi = min(lo + {chunk}, ids.size)
        for k in range(lo, hi):
            r = np.uint64(ids[k] - first)
            source = np.uint64(k) if direct else np.uint64(at[k])
            if r >= n or source >= given:
                return -1 - k
            log[begin + k], sources[k - lo] = r, source
            ahead = min(k + {ahead}, ids.size - 1)
            later = ids[ahead] - first
            if not direct:
                fetch_to_read(g, at[ahead])
{keep}        if {any_past}:
            fence()
        store(word.ctypes.data, base + begin + hi)
        hold()
        for k in range(lo, hi):
            r, source = np.uint64(log[begin + k]), sources[k - lo]
{update}{after}    return ids.size

"""

_IS_PAST = """\
    nbytes = {log}.shape[1] * {log}.itemsize
    past_{log} = ids.size * nbytes >= {least} and nbytes % {line} == 0
    past_{log} = past_{log} and {log}.ctypes.data % {line} == 0
"""
_KEEP = """\
            fetch({array}, later)
            if past_{log}:
                copy_row_past({log}, begin + k, {array}, r)
            else:
                copy_row({log}, begin + k, {array}, r)
"""

#: NaN and infinity have the largest bits, but for the sign. That they are looked for in
#: the pass that updates costs a twentieth of it; in one of its own, a sixth.
_BEFORE = """\
    bits, looked, largest = g.view(U), UNSIGNED if check else U(0), U(0)
"""
_LOOK = """\
                largest = max(largest, bits[source, i] & looked)
"""
_UPDATE = """\
            for i in range(w.shape[1]):
{look}                {targets} = {call}
"""
#: Of a rule with one number per row. A row is never cut: the sum has the same bits in all
#: processes, added up in the order of its columns.
_MEAN_UPDATE = """\
            total = T(0)
            for i in range(w.shape[1]):
{look}                total += _mean({averaged})
            mean = total / T(w.shape[1])
{load}            for i in range(w.shape[1]):
                {targets} = _update({given})
{keep}"""
_AFTER = """\
        if largest >= INFINITE:
            return lo
"""

_ROWS = """\
from daskps.kernels.intrinsics import copy_row, copy_row_past, fence
from daskps.kernels.intrinsics import fetch, fetch_to_read, hold, store

INFINITE, UNSIGNED = np.array([np.inf], T).view(U)[0], U(np.iinfo(U).max >> 1)
READ_ROWS, WRITE_ROWS = READ.copy(ndim=2), WRITE.copy(ndim=2)

"""


def _logged(
    name: str,
    slots: Sequence[str],
    update: str,
    *,
    before: str = "",
    after: str = "",
    more: str = "",
) -> str:
    """Return the text of a loop that logs rows and updates them, chunk by chunk."""
    kept = ("w", *slots)
    logs = [f"log_{array}" for array in kept]
    rows = [f"{array}: WRITE_ROWS" for array in (*slots, "log", *logs)]
    rows[len(slots)] = "log: WORDS"
    arguments = ["w: WRITE_ROWS, first: INT, ids: IDS, at: IDS, g: READ_ROWS", *rows]
    lines = [
        _KEEP.format(array=array, log=log)
        for array, log in zip(kept, logs, strict=True)
    ]
    past = [_IS_PAST.format(log=log, line=_LINE, least=_PAST_NBYTES) for log in logs]
    return _LOGGED.format(
        name=name,
        arguments=", ".join([*arguments, f"word: WORDS, begin: INT, base: INT{more}"]),
        chunk=_CHUNK,
        ahead=_AHEAD,
        before=before,
        past="".join(past),
        any_past=" or ".join(f"past_{log}" for log in logs),
        keep="".join(lines),
        update=update,
        after=after,
    )


#: The module that moves rows: as bytes, so that all dtypes have the same loops. The
#: caller may change its ids meanwhile: each is read once, and checked before it is
#: used.
_MOVES = """\
from daskps.kernels.intrinsics import copy_row, copy_row_past, fence
from daskps.kernels.intrinsics import fetch, fetch_to_read, hold, store

AHEAD = {ahead}
READ_ROWS = read(types.uint8).copy(ndim=2)
WRITE_ROWS = write(types.uint8).copy(ndim=2)


@loop
def gather(w: READ_ROWS, first: INT, ids: IDS, at: IDS, out: WRITE_ROWS):
    direct = at.size == 0
    n, room = np.uint64(w.shape[0]), np.uint64(out.shape[0])
    # Else a wrong id would be found when rows before it have been written.
    least, most = first, first + w.shape[0] - 1
    lowest, highest = least, least
    for k in range(ids.size):
        lowest, highest = min(lowest, ids[k]), max(highest, ids[k])
    for k in range(ids.size if lowest < least or highest > most else 0):
        if ids[k] < least or ids[k] > most:
            return k
    for k in range(ids.size):
        r = np.uint64(ids[k] - first)
        to = np.uint64(k) if direct else np.uint64(at[k])
        if r >= n or to >= room:
            return k
        fetch_to_read(w, ids[min(k + AHEAD, ids.size - 1)] - first)
        copy_row(out, to, w, r)
    return ids.size


@loop
def scatter(w: WRITE_ROWS, first: INT, ids: IDS, at: IDS, rows: READ_ROWS):
    direct = at.size == 0
    n, given = np.uint64(w.shape[0]), np.uint64(rows.shape[0])
    for k in range(ids.size):
        r = np.uint64(ids[k] - first)
        source = np.uint64(k) if direct else np.uint64(at[k])
        if r >= n or source >= given:
            return k
        fetch(w, ids[min(k + AHEAD, ids.size - 1)] - first)
        copy_row(w, r, rows, source)
    return ids.size


{assign}

@loop
def mark(word: WORDS, value: INT):
    store(word.ctypes.data, value)
    hold()
"""


#: The text of the module that moves rows as they are.
MOVES_SOURCE = module_source(
    _MOVES.format(
        ahead=_AHEAD,
        assign=_logged("assign", (), "            copy_row(w, r, g, source)\n"),
    )
)


def weights_text(slots: Sequence[str], call: str) -> str:
    """Return the text that updates a row, one weight at a time.

    Parameters
    ----------
    slots : sequence of str
        Names of the arguments.
    call : str
        The update of one weight, of `w[r, i]`, `g[source, i]` and so on.

    Returns
    -------
    str
        Lines of Python, with a place for what else looks at gradients.
    """
    targets = ", ".join(f"{name}[r, i]" for name in ("w", *slots))
    return _UPDATE.format(look="{look}", targets=targets, call=call)


def row_text(per_row: Sequence[bool], scalars: Sequence[str]) -> str:
    """Return the text that updates a row with the mean of something over it.

    Parameters
    ----------
    per_row : sequence of bool
        Of each slot whether it has one number per row.
    scalars : sequence of str
        Names of the arguments.

    Returns
    -------
    str
        Lines of Python, with a place for what else looks at gradients.
    """
    read, made, load, keep = [], [], "", ""
    for j, of_row in enumerate(per_row):
        # Read once: each weight is given what the slot was before them all.
        read.append(f"old{j}" if of_row else f"s{j}[r, i]")
        made.append(f"new{j}" if of_row else f"s{j}[r, i]")
        if of_row:
            load += f"            old{j} = s{j}[r, 0]\n            new{j} = old{j}\n"
            keep += f"            s{j}[r, 0] = new{j}\n"
    both = "w[r, i]", "g[source, i]"
    return _MEAN_UPDATE.format(
        look="{look}",
        averaged=", ".join([*both, *scalars]),
        load=load,
        targets=", ".join(["w[r, i]", *made]),
        given=", ".join([*both, "mean", *read, *scalars]),
        keep=keep,
    )


def rows_source(slots: Sequence[str], scalars: str, row: str) -> str:
    """Return the text of the loop `rows`, to follow that of the others.

    Parameters
    ----------
    slots, scalars : sequence of str
        Names of the arguments.
    row : str
        The update of row `r` with the gradient `source`.

    Returns
    -------
    str
        Python source.
    """
    update = row.format(look=_LOOK)
    more = ", check: types.boolean, c: READ"
    before = scalars + _BEFORE
    loop = _logged("rows", slots, update, before=before, after=_AFTER, more=more)
    return _ROWS + loop
