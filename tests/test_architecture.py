"""Files that the pages name exist, and the page of the architecture has all rooms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE = DOCS / "architecture.md"
#: History may name what is gone.
HISTORY = {DOCS / "changelog.md"}
PAGES = sorted({ROOT / "README.md", *DOCS.glob("*.md")} - HISTORY)
#: The packages whose folders that page lists.
LISTED = (
    "backend",
    *("store", "training", "cluster", "shards", "checkpoint"),
    *("layout", "optim", "kernels", "codecs"),
    *("cli", "compat", "demo", "sklearn", "torch"),
)
NAMED = re.compile(r"`((?:[a-z_]+/)*[a-z_0-9]+\.(?:py|yaml))(?:::\w+)?`")
FOLDER = re.compile(r"`((?:[a-z_]+/)+)`")


def rooms(text: str) -> list[str]:
    """Return the rooms that the page lists."""
    lines = text.split("```")[1].strip().splitlines()
    return sorted(line.split()[0].rstrip("/") for line in lines)


def folders() -> list[str]:
    """Return the folders of modules that there are."""
    paths = [p for of in LISTED for p in (ROOT / "daskps" / of).rglob("*.py")]
    found = {p.parent for p in paths if p.name != "__init__.py"}
    return sorted(p.relative_to(ROOT / "daskps").as_posix() for p in found)


def missing(text: str) -> list[str]:
    """Return the files and folders that a page names and that are not there.

    A path begins at the top of the project, of the package, or in the folder of the
    path named before it.
    """
    found, folder = [], ROOT
    for name in [*NAMED.findall(text), *FOLDER.findall(text)]:
        places = [ROOT / name, ROOT / "daskps" / name, folder / name]
        there = [place for place in places if place.exists()]
        if there:
            folder = there[0].parent
        else:
            found.append(name)
    return found


def test_the_page_has_all_rooms() -> None:
    assert rooms(PAGE.read_text()) == folders()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_pages_name_exist(page: Path) -> None:
    assert missing(page.read_text()) == []


def test_a_file_that_is_gone_is_found() -> None:
    text = "`cluster/upstream.py`, `gone.py`, `keys.py`, `shards/gone/`, `errors.py`"
    assert missing(text) == ["gone.py", "shards/gone/"]
