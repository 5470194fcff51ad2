"""The picture of tables: it is what its script draws, and nothing in it overlaps."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
#: Of letters beside their height, at most about.
WIDTH, BOLD = 0.56, 0.65


def box_of(text: Any) -> tuple[float, float, float, float]:
    """Where a line is: left, top, right, bottom."""
    size = float(text.get("font-size"))
    wide = BOLD if text.get("font-weight") else WIDTH
    long = wide * size * len(text.text)
    shares = {None: 0.0, "middle": 0.5, "end": 1.0}
    x = float(text.get("x")) - long * shares[text.get("text-anchor")]
    y = float(text.get("y"))
    return x, y - 0.75 * size, x + long, y + 0.2 * size


def test_the_picture_of_tables_is_what_its_script_draws() -> None:
    drawn = runpy.run_path(str(FIGURES / "tables.py"))["draw"]()
    assert drawn == (FIGURES / "tables.svg").read_text(encoding="utf-8")
    root: Any = ET.fromstring(drawn)
    wide, high = float(root.get("width")), float(root.get("height"))
    texts = [e for e in root if e.tag.endswith("text") and e.text]
    boxes = [(e.text, box_of(e)) for e in texts]
    assert len(boxes) > 60
    for said, (left, top, right, bottom) in boxes:
        assert left >= 0 <= top, said
        assert right <= wide, said
        assert bottom <= high, said
    for (said, a), (other, b) in itertools.combinations(boxes, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, (said, other)
