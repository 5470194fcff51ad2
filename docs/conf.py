"""Sphinx's configuration: ``sphinx-build -n -W docs docs/_build/html``.

It needs the extra ``docs`` and no network: names of other projects are no links.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import daskps

project = "daskps"
author = "The daskps developers"
copyright = author  # noqa: A001 - Sphinx's name
version = release = daskps.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
]
exclude_patterns = ["_build"]
nitpicky = True

# What it shows comes from the site itself: fonts, styles and scripts.
html_theme = "sphinx_book_theme"
html_theme_options = {
    # One search box: the other one is in the side bar.
    "navbar_persistent": [],
    "use_download_button": False,
    # Only where the reader is: each page had a list of all decisions.
    "collapse_navbar": True,
}
html_static_path = ["_static"]
html_css_files = ["daskps.css"]
# Decisions are no first answer.
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_title = "daskps"
html_copy_source = False

myst_heading_anchors = 3

autodoc_typehints = "none"
# Pages are the same without it.
autodoc_mock_imports = [n for n in ("jax", "torch") if not find_spec(n)]
autodoc_member_order = "bysource"
# The reference lists what is public; a handle's wiring is not.
autosummary_generate = False
numpydoc_show_class_members = False

# What docstrings refer to elsewhere.
nitpick_ignore = [("py:func", "numpy.asarray")]


def _modules() -> str:
    """Return a table of each room's modules, by the first lines of their docstrings."""
    root, lines = Path(daskps.__file__).parent, list[str]()
    for package in sorted(root.rglob("__init__.py")):
        paths = [p for p in sorted(package.parent.glob("*.py")) if p != package]
        if not paths:
            continue
        room = package.parent.relative_to(root.parent).as_posix()
        lines += ["", f"`{room}/`", "", "| module | |", "|---|---|"]
        for path in paths:
            told = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            lines.append(f"| `{path.stem}` | {told.partition(chr(10))[0]} |")
    return "\n".join(lines)


def _add_modules(_: Any, page: str, source: list[str]) -> None:
    if page == "architecture":
        source[0] = source[0].replace("<!-- modules -->", _modules())


def setup(app: Any) -> None:
    """Have the page of the architecture list all modules."""
    app.connect("source-read", _add_modules)
