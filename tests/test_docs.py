"""The site builds without a warning, names all that is public, and its tutorial works."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from distributed import Client

from tests.support import PATIENCE, until
from tests.test_docstrings import shown_names
from tests.test_readme import DOCS, ROOT, TUTORIAL, blocks, run_python

BIN = Path(sys.executable).parent


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Build a site as CI does; it may not reach the network."""
    proxies = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "sphinx", "-nWq", "--keep-going"]
    return subprocess.run(
        [*command, "-d", str(target / "doctrees"), str(source), str(target / "html")],
        env={**os.environ, **proxies, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_site_builds_and_has_every_public_name(tmp_path: Path) -> None:
    done = build(DOCS, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = inventory(tmp_path / "html" / "objects.inv")
    missing = set(shown_names()) - found
    # Errors and callbacks are shown as names of daskps.
    missing = {n for n in missing if f"daskps.{n.rpartition('.')[2]}" not in found}
    assert not missing, f"add them to docs/reference.md: {sorted(missing)}"
    scripts = "".join(p.read_text() for p in (tmp_path / "html").rglob("*.html"))
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=.https?:", scripts)
    assert "googletagmanager" not in scripts


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
    accuracy = re.search(r"not seen: ([\d.]+)", said)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.85
    assert re.search(r"\[ ?1\.\s+-2\.\s+3\. ?\]", said)


def n_workers(address: str) -> int:
    """Return how many workers a cluster has, 0 where there is none yet."""
    try:
        with Client(address, timeout=1, set_as_default=False) as client:
            return len(client.nthreads())
    except OSError:
        return 0
