"""Draw how both kinds of tables lie on shards, for docs/tables.md.

Run it from a checkout with ``python docs/figures/tables.py``; it writes ``tables.svg``
beside itself. Which shard has what is asked of the layout and the index themselves;
bytes a row are those of the table on that page.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from daskps.init import constant
from daskps.kernels import id_hash
from daskps.kernels.index_probe import home
from daskps.layout.tables import Table, UnboundedIds, UnboundedTable

N_SHARDS, DIM, ENTRIES = 3, 4, 8
NUMBERED = Table(0, "emb", 100, DIM, "float32")
ANY = UnboundedTable(
    0, "words", 0, DIM, "float32", of=UnboundedIds(constant(0.0), seed=1)
)
#: Ids of shard 1 in the order in which they came, and those that were removed since.
IDS, REMOVED = (1000, 2**62, 123_456_789, 31, 99), (123_456_789,)
#: Bytes a row of 64 float32 with Adagrad, of 1,000,000 rows in one shard.
BYTES: dict[str, dict[str, int]] = {
    "n rows": {"row": 256, "Adagrad": 256, "to take a push back, and changes": 71},
    "unbounded": {
        "row": 256,
        "Adagrad": 256,
        "id and state": 16,
        "index": 33,
        "to take a push back, changes, rows to come": 62,
    },
}
INK, FAINT, MARK = "#222222", "#777777", "#b3362f"
MARKED: dict[str, Any] = {"stroke": MARK, "stroke_width": 2}
FILLS = {
    "row": "#a9cce8",
    "Adagrad": "#f3cf8e",
    "id and state": "#b9dfc6",
    "index": "#8cc6a3",
    "log": "#dddddd",
}
WIDTH, HEIGHT = 960, 668
#: Where unbounded tables begin.
LEFT = 496
#: The height of a row, and of a cell of it the width.
ROW, CELL = 18, 16


class Drawing:
    """The elements of a picture, in the order in which they are drawn."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def add(self, name: str, text: str = "", **attributes: Any) -> None:
        """Add an element; underscores in names of attributes stand for hyphens."""
        said = "".join(
            f' {key.replace("_", "-")}="{value}"' for key, value in attributes.items()
        )
        self.parts.append(f"<{name}{said}>{escape(text)}</{name}>")

    def box(
        self, at: tuple[float, float, float, float], fill: str, **more: Any
    ) -> None:
        """Draw a rectangle: left, top, width, height."""
        x, y, width, height = at
        more = {"stroke": INK, "stroke_width": 1} | more
        self.add("rect", x=x, y=y, width=width, height=height, fill=fill, **more)

    def text(self, x: float, y: float, said: str, **more: Any) -> None:
        """Write a line; `y` is where it stands."""
        self.add("text", said, x=x, y=y, **{"font_size": 12, "fill": INK} | more)

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line to its last point, with a head there."""
        at = " ".join(f"{x},{y}" for x, y in points)
        line = {"fill": "none", "stroke": MARK, "stroke_width": 1.5}
        self.add("polyline", points=at, marker_end="url(#head)", **line)

    def cells(self, x: float, y: float, kind: str, n: int = DIM, **more: Any) -> None:
        """Draw the cells of one row."""
        for i in range(n):
            self.box((x + i * CELL, y, CELL, ROW), FILLS[kind], **more)

    def svg(self) -> str:
        """Return the whole file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'font-family="DejaVu Sans, Verdana, Arial, sans-serif">'
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" '
            'markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{MARK}"/></marker></defs>'
        )
        return "\n".join([head, marker, *self.parts, "</svg>"]) + "\n"


def numbered(d: Drawing) -> None:
    """Draw a table of n rows: shards have ranges, a row its place in them."""
    d.text(24, 62, "A table of 100 rows: by range", font_size=16, font_weight="bold")
    d.text(24, 82, "row 40 is in shard 1, which begins at 34: place 6", fill=MARK)
    d.text(138, 108, "rows", fill=FAINT)
    d.text(218, 108, "slots", fill=FAINT)
    d.text(302, 108, "log: to take a push back", fill=FAINT)
    edges = NUMBERED.edges(N_SHARDS).tolist()
    for shard, (first, stop) in enumerate(itertools.pairwise(edges)):
        top = 116 + 118 * shard
        d.box((24, top, 440, 108), "none", rx=6, stroke=FAINT)
        d.text(34, top + 20, f"shard {shard}", font_weight="bold")
        marked, shown = shard == 1, [first, first + 6, stop - 1]
        for i, row in enumerate(shown):
            y = top + 14 + 29 * i
            d.text(128, y + 13, f"{row}", text_anchor="end")
            edge: dict[str, Any] = MARKED if row == 40 else {}
            d.cells(138, y, "row", **edge)
            d.cells(218, y, "Adagrad", **edge)
            if i < 2:
                d.text(170, y + 26, "···", fill=FAINT, text_anchor="middle")
                d.text(250, y + 26, "···", fill=FAINT, text_anchor="middle")
        if marked:
            y = top + 43
            d.text(314, y + 13, "40", text_anchor="end")
            d.cells(320, y, "log", 2 * DIM)
            d.text(320, y + 36, "what row 40 was", fill=FAINT)


def unnumbered(d: Drawing) -> None:
    """Draw an unbounded table: from a hash to a shard, an index, a row."""
    the_hash = int(id_hash.hashes(np.array([99]), ANY.hash_seed)[0])
    bucket, half = the_hash >> 32, f"{the_hash:016x}"
    low, high = ANY.edges(N_SHARDS)[1:3].tolist()
    if not low <= bucket < high:
        raise ValueError("this id is of another shard: draw another one")
    entries, rows = _index()
    d.text(LEFT, 62, "An unbounded table: by hash", font_size=16, font_weight="bold")
    d.text(LEFT, 82, f"id 99, hash {half[:8]} {half[8:]}:", fill=MARK)
    d.text(LEFT, 100, f"upper half: bucket {bucket:,}, of shard 1", fill=MARK)
    d.box((LEFT, 116, 440, 262), "none", rx=6, stroke=FAINT)
    d.text(LEFT + 10, 136, "shard 1", font_weight="bold")
    d.text(LEFT + 74, 136, f"has buckets {low:,} to {high - 1:,}", fill=FAINT)
    d.text(LEFT + 10, 158, "lower half: the home in the index", fill=MARK)
    start = _draw_index(d, entries, rows)
    end = _draw_rows(d)
    middle = start[0] + 20
    d.arrow(start, (middle, start[1]), (middle, end[1]), end)
    for y, said in (
        (396, "the log has rows, and words: ids, states, entries, what is free"),
        (414, "with max_rows a bucket has up to 128 places; its oldest row goes"),
    ):
        d.text(LEFT, y, said, fill=FAINT)


def _draw_index(
    d: Drawing, entries: list[int | None], rows: dict[int, int]
) -> tuple[float, float]:
    """Return where the entry of id 99 ends."""
    x, y = LEFT + 26, 192
    d.text(x, y - 6, "index: id", fill=FAINT)
    d.text(x + 68, y - 6, "row", fill=FAINT)
    for at, one in enumerate(entries):
        line = y + ROW * at
        d.text(x - 6, line + 13, f"{at}", text_anchor="end", fill=FAINT)
        fill = "none" if one is None else FILLS["index"]
        for box in ((x, line, 64, ROW), (x + 64, line, 26, ROW)):
            d.box(box, fill, stroke=FAINT if one is None else INK)
        if one is not None:
            d.text(x + 60, line + 13, _id(one), text_anchor="end")
            d.text(x + 77, line + 13, f"{rows[one]}", text_anchor="middle")
    return x + 92, y + ROW * (entries.index(99) + 0.5)


def _draw_rows(d: Drawing) -> tuple[float, float]:
    """Return where the row of id 99 begins."""
    x, y = LEFT + 170, 212
    for at, said in ((0, "id"), (70, "state"), (112, "rows"), (184, "slots")):
        d.text(x + at, y - 6, said, fill=FAINT)
    for row, one in enumerate(IDS):
        line, is_free = y + ROW * row, one in REMOVED
        marked: dict[str, Any] = MARKED if one == 99 else {}
        d.text(x - 6, line + 13, f"{row}", text_anchor="end", fill=FAINT)
        d.box((x, line, 64, ROW), "none" if is_free else FILLS["id and state"])
        if not is_free:
            d.text(x + 60, line + 13, _id(one), text_anchor="end")
        state = ("free", FAINT) if is_free else ("there", INK)
        d.text(x + 70, line + 13, state[0], fill=state[1])
        for at, kind in ((112, "row"), (184, "Adagrad")):
            d.cells(x + at, line, "log" if is_free else kind, **marked)
    line = y + ROW * len(IDS)
    d.box((x, line, 248, ROW), "none", stroke=FAINT, stroke_dasharray="3 3")
    coming = "memory for rows to come"
    d.text(x + 124, line + 13, coming, fill=FAINT, text_anchor="middle")
    d.text(x, line + 40, "first free row: 2; a new id gets it", fill=FAINT)
    return x - 18, y + ROW * (IDS.index(99) + 0.5)


def _id(one: int) -> str:
    return "2**62" if one == 2**62 else str(one)


def _index() -> tuple[list[int | None], dict[int, int]]:
    """Return who has which entry of a small index, and the row of each id."""
    entries: list[int | None] = [None] * ENTRIES
    rows = {one: row for row, one in enumerate(IDS) if one not in REMOVED}
    with np.errstate(over="ignore"):
        for one in rows:
            at = int(home(np.int64(one), np.uint64(ANY.hash_seed), ENTRIES))
            while entries[at] is not None:
                at = (at + 1) % ENTRIES
            entries[at] = one
    return entries, rows


def bars(d: Drawing) -> None:
    """Draw bytes a row."""
    top, scale = 508, 1.06
    d.text(24, top, "Bytes a row", font_size=16, font_weight="bold")
    d.text(152, top, "64 float32 with Adagrad, 1,000,000 rows in one shard", fill=FAINT)
    for i, (kind, parts) in enumerate(BYTES.items()):
        x, y = 100.0, top + 16 + 64 * i
        d.text(24, y + 18, kind, font_weight="bold")
        for name, n in parts.items():
            fill = FILLS.get(name, FILLS["log"])
            d.box((round(x, 1), y, round(n * scale, 1), 26), fill)
            inside = n > 200
            if inside:
                d.text(
                    round(x + n * scale / 2, 1),
                    y + 18,
                    f"{name}: {n}",
                    text_anchor="middle",
                )
            x += n * scale
        d.text(round(x + 10, 1), y + 18, f"{sum(parts.values())} bytes")
        small = [f"{name} {n}" for name, n in parts.items() if n <= 200]
        d.text(100, y + 44, "then " + ", ".join(small), fill=FAINT)


def draw() -> str:
    """Return the picture."""
    d = Drawing()
    # A ground of its own: pages may be light or dark.
    d.box((0, 0, WIDTH, HEIGHT), "#ffffff", stroke="none", rx=8)
    d.text(24, 30, "How tables lie on shards", font_size=19, font_weight="bold")
    numbered(d)
    unnumbered(d)
    bars(d)
    return d.svg()


if __name__ == "__main__":
    Path(__file__).with_name("tables.svg").write_text(draw(), encoding="utf-8")
