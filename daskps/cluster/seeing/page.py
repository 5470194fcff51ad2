"""A page of Dask's dashboard: stores, shards, runs and events of its scheduler.

Bokeh is imported where a dashboard is, and so is it. A page asks nobody: all it shows is
in the scheduler already.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps.cluster import upstream
from daskps.cluster.seeing.overview import Overview

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Scheduler

logger = logging.getLogger(__name__)
#: Milliseconds between two looks of an open page.
PAUSE_MS = 1000
#: Titles of the sections of :class:`Overview`.
SECTIONS = {
    "stores": "Stores",
    "workers": "Workers",
    "shards": "Shards (away and lost ones first, then the busiest)",
    "runs": "Runs",
    "trainers": "Trainers (those furthest behind)",
    "tables": "Tables",
    "events": "Events",
}
_BYTES = "bytes", "checkpoint bytes"
_WIDE = "worker", "copy", "state", "waits", "more", "fallbacks to messages"
_ROW, _MOST_ROWS = 25, 20


class Section:
    """One table of the page; hidden while it is empty."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        from bokeh.layouts import column
        from bokeh.models import ColumnDataSource, DataTable, Div

        self._scheduler, self._name = scheduler, name
        self.source = ColumnDataSource(name=f"daskps-{name}")
        self._title = Div(styles={"font-size": "14px"})
        of = {
            "index_position": None,
            "reorderable": False,
            "sizing_mode": "stretch_width",
        }
        self._table = DataTable(source=self.source, **of)
        self.root = column(self._title, self._table, sizing_mode="stretch_width")
        self.update()

    def update(self) -> None:
        """Show what there is now."""
        rows = Overview(self._scheduler).rows(self._name)
        if rows and not self._table.columns:
            self._table.columns = [*map(_column, rows[0])]
        self.source.data = {
            name: ["" if row[name] is None else row[name] for row in rows]
            for name in (rows[0] if rows else ())
        }
        title = SECTIONS[self._name]
        self._title.text = f"<b>{title}</b>" if rows else f"{title}: none"
        self._table.height = _ROW * (min(len(rows), _MOST_ROWS) + 2)
        self._table.visible = bool(rows)


def _column(name: str) -> Any:
    """Return a column of a table; what is in its cells is shown as text."""
    from bokeh.models import NumberFormatter, TableColumn

    of = {"formatter": NumberFormatter(format="0.0 b")} if name in _BYTES else {}
    return TableColumn(
        field=name, title=name, width=300 if name in _WIDE else 100, **of
    )


def _page(names: tuple[str, ...], scheduler: Scheduler, extra: Any, doc: Any) -> None:
    """Fill a document with some sections."""
    from bokeh.layouts import column

    sections = [Section(scheduler, name) for name in names]
    for section in sections:
        upstream.update_page(doc, section, PAUSE_MS)
    doc.add_root(column([s.root for s in sections], sizing_mode="stretch_width"))
    # JupyterLab shows one alone, without the navigation.
    upstream.dress_page(doc, "daskps", extra if len(names) > 1 else None)


def pages() -> dict[str, Callable[[Any, Any, Any], None]]:
    """Return the pages by path; JupyterLab lists those that begin with "individual-"."""
    alone = {f"/individual-daskps-{name}": partial(_page, (name,)) for name in SECTIONS}
    return {"/daskps": partial(_page, tuple(SECTIONS)), **alone}


def add_pages(scheduler: Scheduler) -> None:
    """Add the pages to the dashboard of a scheduler, if it has one.

    Parameters
    ----------
    scheduler : Scheduler
        One that listens already.
    """
    try:
        if not upstream.add_pages(scheduler, pages(), "daskps"):
            logger.info(
                "no page /daskps: the scheduler has no dashboard, which needs bokeh"
            )
    except Exception as error:  # noqa: BLE001 - stores do without
        logger.warning("no page /daskps in the dashboard: %r", error)
