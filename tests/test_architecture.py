"""What the pages say of files: those they name exist, and the tree has all of them."""

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
#: The packages whose files the tree of the page lists.
LISTED = (
    *("store", "training", "cluster", "shards", "checkpoint"),
    *("layout", "optim", "kernels", "codecs"),
    *("cli", "compat", "demo"),
)
NAMED = re.compile(r"`((?:[a-z_]+/)*[a-z_0-9]+\.(?:py|yaml))(?:::\w+)?`")
FOLDER = re.compile(r"`((?:[a-z_]+/)+)`")


def tree(text: str) -> dict[str, list[str]]:
    """Return the modules that the page's tree lists, by their folder."""
    found: dict[str, list[str]] = {}
    for line in text.split("```")[1].strip().splitlines():
        if line.startswith(" "):
            found[[*found][-1]] += line.split()
        else:
            found[line.split()[0].rstrip("/")] = []
    return found


def files() -> dict[str, list[str]]:
    """Return the modules that there are, by their folder."""
    found: dict[str, list[str]] = {}
    for package in LISTED:
        for path in sorted((ROOT / "daskps" / package).rglob("*.py")):
            folder = path.parent.relative_to(ROOT / "daskps").as_posix()
            found.setdefault(folder, [])
            if path.stem != "__init__":
                found[folder].append(path.stem)
    return {folder: names for folder, names in found.items() if names}


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


def test_the_tree_has_all_files() -> None:
    assert tree(PAGE.read_text()) == files()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_pages_name_exist(page: Path) -> None:
    assert missing(page.read_text()) == []


def test_a_file_that_is_gone_is_found() -> None:
    text = "`cluster/upstream.py`, `gone.py`, `keys.py`, `shards/gone/`, `errors.py`"
    assert missing(text) == ["gone.py", "shards/gone/"]
