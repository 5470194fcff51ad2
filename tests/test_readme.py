"""What the README and the pages beside it say is run, and their links lead somewhere."""

from __future__ import annotations

import re
import tomllib
from multiprocessing import get_context
from pathlib import Path

import pytest
from distributed import Client

from tests import pages
from tests.support import PATIENCE, adapter

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    p
    for p in [ROOT / "README.md", *ROOT.glob(".github/*.md"), *DOCS.rglob("*.md")]
    if not p.is_relative_to(DOCS / "_build")
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
#: Its blocks need the cluster it starts; tests/test_docs.py runs them.
TUTORIAL = DOCS / "tutorial.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: How pages start their cluster, with some number of threads.
STARTED = re.compile(
    r"Client\(n_workers=2, threads_per_worker=\d, dashboard_\w+=[^)]+\)"
)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)")


def blocks(page: Path, language: str) -> list[str]:
    return [text for of, text in BLOCK.findall(page.read_text()) if of == language]


def with_python(pages: list[Path]) -> list[str]:
    return [str(p.relative_to(ROOT)) for p in pages if blocks(p, "python")]


#: Dask's words, not of an error, where a cluster closes with some on their way.
CLOSING = re.compile(
    r"^.* - INFO - Batched Comm Closed [\s\S]*?CommClosedError.*\n", re.MULTILINE
)


def run_python(code: str, folder: Path) -> str:
    """Run code in one process without a file of its own, as in a notebook."""
    process = get_context("forkserver").Process(target=pages.run, args=(code, folder))
    process.start()
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()
    said, errors = ((folder / name).read_text() for name in pages.STREAMS)
    assert process.exitcode == 0, errors
    assert "Traceback" not in CLOSING.sub("", errors)
    assert "the cluster to lose" not in errors  # what was never closed
    return said


EXAMPLES = with_python([p for p in PAGES if p != TUTORIAL])


def starting() -> set[str]:
    """Return the first page of each way to start a cluster in its own words."""
    first = {}
    for page in reversed(EXAMPLES):
        for words in STARTED.findall((ROOT / page).read_text()):
            first[words] = page
    return {*first.values()}


@pytest.mark.parametrize("page", EXAMPLES)
def test_python_blocks_run_in_order(page: str, client: Client, tmp_path: Path) -> None:
    """On the cluster of the tests where another page starts its own with these words."""
    if (name := Path(page).stem) in ("jax", "torch"):
        adapter(name)
    code = "\n".join(blocks(ROOT / page, "python"))
    if page not in starting():
        address = client.scheduler_info()["address"]
        code = STARTED.sub(f"Client({address!r})", code)
    said = run_python(code, tmp_path)
    if page == "README.md":
        numbers = [float(n) for n in re.findall(r"-?\d+\.\d*(?:e-?\d+)?", said)]
        assert numbers[:3] == pytest.approx([1, -2, 3], abs=1e-3)


def test_pages_with_python_are_found() -> None:
    assert {"README.md", "docs/custom-rules.md"} <= set(with_python(PAGES))
    assert ROOT / ".github" / "CONTRIBUTING.md" in PAGES
    # Of a dozen that start a cluster of processes.
    assert starting() == {"docs/checkpoints.md", "docs/codecs.md"}


def test_first_example_is_short() -> None:
    """Ten lines from the client to a trained model, at most."""
    lines = blocks(ROOT / "README.md", "python")[0].splitlines()
    client = next(i for i, line in enumerate(lines) if "Client()" in line)
    trained = next(i for i, line in enumerate(lines) if "daskps.train(" in line)
    assert trained - client < 10
    assert len([line for line in lines if line]) <= 12


def test_the_two_commands() -> None:
    first, second = blocks(ROOT / "README.md", "bash")
    assert second == "bash tests/run\n"
    assert (ROOT / "tests" / "run").is_file()
    extras = re.findall(r'pip install "\.\[([\w,]+)\]"', first)
    project = PROJECT["project"]
    assert extras == ["demo"]
    assert set(extras) <= set(project["optional-dependencies"])
    assert "daskps demo" in first
    assert "daskps" in project["scripts"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def test_readme_of_the_package_index_has_no_dead_links() -> None:
    """There is nothing there but the text: links to files become their names."""
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    [fragment] = hook["fragments"]
    text = (ROOT / fragment["path"]).read_text()
    assert LINK.findall(text)
    for rule in hook["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    assert not [t for t in LINK.findall(text) if not t.startswith("https://")]
    assert "[Tutorial" not in text
    assert "Tutorial (`docs/tutorial.md`)" in text


def test_extras_name_each_other() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    named = [
        name
        for of in extras.values()
        for need in of
        if need.startswith("daskps[")
        for name in need[len("daskps[") : -1].split(",")
    ]
    assert named
    assert set(named) <= set(extras)
