"""Sphinx's configuration: ``sphinx-build -n -W docs docs/_build/html``.

The build needs no network. With DASKPS_DOCS_LINKS=1 names of Python, NumPy and Dask
become links to their documentation, whose inventories are then downloaded.
"""

from __future__ import annotations

import os

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
templates_path = ["_templates"]
nitpicky = True

html_theme = "dask_sphinx_theme"
html_title = "daskps"
html_copy_source = False

myst_heading_anchors = 3

autodoc_typehints = "none"
autodoc_member_order = "bysource"
# The reference lists what is public; a handle's wiring is not.
autosummary_generate = False
numpydoc_show_class_members = False

if os.environ.get("DASKPS_DOCS_LINKS"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "dask": ("https://docs.dask.org/en/stable", None),
        "distributed": ("https://distributed.dask.org/en/stable", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "python": ("https://docs.python.org/3", None),
    }
else:
    # What docstrings refer to elsewhere.
    nitpick_ignore = [("py:func", "numpy.asarray")]
