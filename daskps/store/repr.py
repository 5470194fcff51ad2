"""Text and HTML of stores and parameters, made without asking anybody."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import numpy as np
from dask.utils import format_bytes
from dask.widgets.widgets import TEMPLATE_PATHS, get_template

from daskps.layout.arrays import counted
from daskps.layout.tables import UnboundedTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.layout.arrays import Layout
    from daskps.layout.parameters import Parameter
    from daskps.layout.tables import Table, TablePiece

_TEMPLATES = str(Path(__file__).parent / "widgets")
if _TEMPLATES not in TEMPLATE_PATHS:
    TEMPLATE_PATHS.append(_TEMPLATES)
T = TypeVar("T")
#: Rows of a table before it is cut.
MOST_ROWS = 30


def store_line(name: str, meta: StoreMap | None, ends: str = "") -> str:
    """Return the one-line form of a store; `ends` says when it is freed."""
    if meta is None:
        return f"<daskps.ParameterStore {name!r}>"
    layout = meta.layout
    k, w = layout.n_shards, len(set(meta.owners))
    return (
        f"<daskps.ParameterStore {name!r}: {_counted(layout)}, "
        f"{_held(layout, layout.nbytes, range(k))}, {counted(k, 'shard')} on "
        f"{counted(w, 'worker')}{f' ({meta.device})' if meta.device else ''}{ends}>"
    )


def _held(layout: Layout, nbytes: int, shards: Sequence[int]) -> str:
    """Return these bytes of shards, in words; of unbounded tables nobody has asked."""
    grows = any(
        not t.is_bounded and (t.shards is None or set(t.shards).intersection(shards))
        for t in layout.tables
    )
    said = [format_bytes(nbytes)] if nbytes or not grows else []
    return " + ".join([*said, "unbounded rows"] if grows else said)


def _counted(layout: Layout) -> str:
    """Return how many parameters and tables there are, in words."""
    arrays, tables = len(layout.parameters), len(layout.tables)
    said = [counted(arrays, "parameter")] if arrays or not tables else []
    return ", ".join([*said, counted(tables, "table")] if tables else said)


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay rows out in columns as wide as their longest entry.

    Parameters
    ----------
    heads : sequence of str
        Names of the columns.
    rows : sequence of sequence of str
        An entry for each of them.

    Returns
    -------
    list of str
        A line for the heads and one for each row.
    """
    lines = [[printable(entry) for entry in row] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(e.ljust(w) for e, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def printable(text: str) -> str:
    r"""Return a text of somebody's that leaves a terminal and its lines as they are.

    Parameters
    ----------
    text : str
        A name, or what a file says.

    Returns
    -------
    str
        With escapes in place of control characters.

    Examples
    --------
    >>> print(printable("red\x1b[31m"))
    red\x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


#: Heads of the columns, and an entry for each of them in every row.
HtmlTable: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]]]


def html_tables(line: str, *tables: HtmlTable, notes: Iterable[str] = ()) -> str:
    """Return tables below a line that says what they are of.

    Parameters
    ----------
    line : str
        That line.
    *tables : tuple
        Heads and rows; of many rows the first and the last are shown. One without rows
        is left out.
    notes : iterable of str
        Lines between the first one and the tables.

    Returns
    -------
    str
        HTML, all of it escaped.
    """
    shown = [(heads, _cut(rows, len(heads))) for heads, rows in tables if rows]
    return get_template("daskps_tables.html.j2").render(
        line=line, notes=[*notes], tables=shown
    )


class TableList(list[T]):
    """A list that shows itself as a table."""

    #: Its name for one entry, and the heads of the columns.
    _noun: ClassVar[str]
    _heads: ClassVar[tuple[str, ...]]

    def _row(self, entry: T) -> tuple[str, ...]:
        raise NotImplementedError

    def _notes(self) -> list[str]:
        return []

    def __repr__(self) -> str:
        rows = [self._row(entry) for entry in self]
        shown = text_table(self._heads, rows) if rows else [f"no {self._noun}s"]
        return "\n".join([*shown, *self._notes()])

    def _repr_html_(self) -> str:
        table = self._heads, [self._row(entry) for entry in self]
        return html_tables(counted(len(self), self._noun), table, notes=self._notes())


def _cut(rows: Sequence[Sequence[str]], n_columns: int) -> Sequence[Sequence[str]]:
    """Return rows as they are, or of many the first and the last."""
    if len(rows) <= MOST_ROWS:
        return rows
    half = MOST_ROWS // 2
    more = f"… {len(rows) - 2 * half} more"
    return [*rows[:half], [more, *[""] * (n_columns - 1)], *rows[-half:]]


def snapshot_html(
    name: str, version: int, layout: Layout, n_rows: Mapping[int, int]
) -> str:
    """Return the table of a snapshot's parameters; see :func:`snapshot_line`."""
    line = snapshot_line(name, version, layout, n_rows)
    return html_tables(line, *_held_tables(layout, n_rows))


def _held_tables(
    layout: Layout,
    n_rows: Mapping[int, int],
    optimizers: Mapping[int, str] | None = None,
) -> Iterator[HtmlTable]:
    """Give the table of arrays and that of tables, with optimizers and shards if told."""
    arrays, tables = layout.parameters, layout.tables
    of_tables = [_about_table(t, n_rows.get(t.index)) for t in tables]
    for heads, rows, of in (
        (("parameter", "shape", "dtype", "bytes"), map(_about, arrays), arrays),
        (("table", "rows", "dim", "dtype", "bytes"), of_tables, tables),
    ):
        cells = [*rows]
        if optimizers is not None:
            heads = *heads, "optimizer"
            rules = [optimizers.get(one.index, "none") for one in of]
            cells = [(*row, rule) for row, rule in zip(cells, rules, strict=True)]
            if any(one.shards is not None for one in of):
                heads = *heads, "shards"
                on = [shards_line(one.shards) for one in of]
                cells = [(*row, at) for row, at in zip(cells, on, strict=True)]
        yield heads, cells


def _about(p: Parameter) -> tuple[str, str, str, str]:
    return p.name, str(p.shape), p.dtype, format_bytes(p.nbytes)


def _about_table(t: Table, n_rows: int | None = None) -> tuple[str, ...]:
    """Return what is said of a table, in which there are so many rows if that is known."""
    if n_rows is None and t.is_bounded:
        n_rows = t.rows
    if n_rows is None:
        rows, nbytes = "unbounded", f"{format_bytes(t.row_nbytes)} a row"
    else:
        rows, nbytes = f"{n_rows:,}", format_bytes(n_rows * t.row_nbytes)
    return t.name, rows, str(t.dim), t.dtype, nbytes


def snapshot_line(
    name: str, version: int, layout: Layout, n_rows: Mapping[int, int]
) -> str:
    """Return the one-line form of a snapshot.

    `n_rows` says by index how many rows it has of unbounded tables.
    """
    of_rows = sum(t.row_nbytes * n_rows.get(t.index, 0) for t in layout.tables)
    return (
        f"<daskps.Snapshot of store {name!r} at version {version}: "
        f"{_counted(layout)}, {format_bytes(layout.nbytes + of_rows)}>"
    )


def shards_line(shards: Sequence[int] | None) -> str:
    """Return over which shards something is cut, in words."""
    if shards is None:
        return "all"
    more = f" and {len(shards) - 8} more" if len(shards) > 8 else ""
    return ", ".join(map(str, shards[:8])) + more


def store_html(
    name: str, meta: StoreMap | None, versions: Sequence[int], ends: str = ""
) -> str:
    """Return the tables of a store's parameters and shards; see :func:`store_line`."""
    line = store_line(name, meta, ends)
    if meta is None:
        return html_tables(line)
    layout = meta.layout
    told = dict(enumerate(versions))
    shards = [
        (
            str(i),
            owner,
            _held(layout, layout.shard_nbytes(i), [i]),
            str(told.get(i, "not asked yet")),
        )
        for i, owner in enumerate(meta.owners)
    ]
    tables = _held_tables(layout, {}, meta.optimizers)
    heads = "shard", "worker", "bytes", "version"
    return html_tables(line, *tables, (heads, shards))


def table_html(t: Table, store: str, meta: StoreMap | None) -> str:
    """Return the table of a table of rows, and which shard has which of them.

    Parameters
    ----------
    t : Table
        The table.
    store : str
        Name of its store.
    meta : StoreMap or None
        The store, as far as it is known.

    Returns
    -------
    str
        HTML.
    """
    *_, nbytes = _about_table(t)
    line = f"<daskps.ParameterTable {t.name!r}: {t.told}, {nbytes}, of store {store!r}>"
    if meta is None:
        return html_tables(line)
    heads: tuple[str, ...] = ("first row", "rows", "bytes")
    cells: list[tuple[str, ...]]
    if isinstance(t, UnboundedTable):
        heads = ("share",)
        n_buckets = np.diff(t.edges(meta.layout.n_shards)).tolist()
        cells = [(f"{n / t.n_buckets:.1%} of all ids",) for n in n_buckets]
    else:
        pieces = [
            of[t.index - len(meta.layout.parameters)] for of in meta.layout.table_pieces
        ]
        cells = [_cells(p) for p in pieces]
    owners = enumerate(meta.owners)
    shards = [(str(i), w, *of) for (i, w), of in zip(owners, cells, strict=True)]
    return html_tables(line, (("shard", "worker", *heads), shards))


def _cells(p: TablePiece) -> tuple[str, ...]:
    return f"{p.first_row:,}", f"{p.n_rows:,}", format_bytes(p.nbytes)


def array_html(array: Any, store: str, chunks: tuple[tuple[int, ...], ...]) -> str:
    """Return the table of one parameter, with dask.array's picture of its shards.

    Parameters
    ----------
    array : ParameterArray
        The parameter.
    store : str
        Name of its store.
    chunks : tuple of tuple of int
        Lengths of its shards' parts along each axis; empty where nobody knows.

    Returns
    -------
    str
        HTML.
    """
    return get_template("daskps_array.html.j2").render(
        shards=len(chunks[0]) if chunks else 0,
        picture=_picture(chunks),
        name=array.name,
        shape=array.shape,
        dtype=str(array.dtype),
        nbytes=format_bytes(array.nbytes),
        store=store,
    )


def _picture(chunks: tuple[tuple[int, ...], ...]) -> str:
    """Return how dask.array draws these chunks; nothing where it cannot."""
    if not chunks or not all(map(all, chunks)):
        return ""
    try:
        from dask.array.svg import svg
    except ImportError:  # Dask without its arrays
        return ""
    return str(svg(chunks, size=120))


def counted_tables(
    layout: Layout, shards: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return what is known of each table.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    shards : iterable of mapping
        A row of counters per shard; one that has not answered has no "tables".

    Returns
    -------
    dict of str to dict
        By name: rows, dim, dtype, nbytes of all rows, and steps; of an unbounded table
        also how many ids are counted without a row, how many were given one, and how
        many lost it to others.
    """
    answered = [of for row in shards if (of := row.get("tables")) is not None]
    found: dict[str, dict[str, Any]] = {}
    for t in layout.tables:
        steps = max((of[t.name]["steps"] for of in answered), default=None)
        there = sum(of[t.name]["rows"] for of in answered)
        rows = t.rows if t.is_bounded else there
        found[t.name] = {
            "rows": rows,
            "dim": t.dim,
            "dtype": t.dtype,
            "nbytes": rows * t.row_nbytes,
            "steps": steps,
        }
        if not t.is_bounded:
            for what in ("candidates", "admissions", "evictions"):
                found[t.name][what] = sum(of[t.name][what] for of in answered)
    return found
