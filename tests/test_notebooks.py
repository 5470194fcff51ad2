"""The notebooks run from top to bottom, quietly, and are kept without outputs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.support import PATIENCE, adapter

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# In a process of its own: Jupyter's libraries leave sockets and warnings behind.
EXECUTE = """
import sys
import matplotlib.font_manager  # makes its cache, which notebooks would be told of
import nbformat
from nbclient import NotebookClient
source, target = sys.argv[1:]
notebook = nbformat.read(source, as_version=4)
NotebookClient(notebook, timeout=200, kernel_name="python3").execute(cwd=".")
nbformat.write(notebook, target)
"""


#: Dask's words where a cluster closes just as a worker tells that it lives.
CLOSING = re.compile(
    r"^.* - distributed.worker - ERROR - Failed to communicate with scheduler during "
    r"heartbeat\.\n[\s\S]*?closing\.\n",
    re.MULTILINE,
)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(source: Path, folder: Path) -> Any:
    """Run a copy of a notebook as a person does; return it with its outputs."""
    target = folder / source.name
    own = {
        "JUPYTER_RUNTIME_DIR": "runtime",
        "IPYTHONDIR": "ipython",
        # A worker that starts removes what killed ones of other tests have left.
        "DASK_TEMPORARY_DIRECTORY": "dask",
    }
    ours = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(source), str(target)],
        cwd=folder,
        env={
            **ours,
            **{name: str(folder / path) for name, path in own.items()},
            # Without it Jupyter warns of the directories it will use.
            "JUPYTER_PLATFORM_DIRS": "1",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return nbformat.read(target, as_version=4)


def printed(notebook: Any, stream: str) -> str:
    outputs = [o for cell in code_cells(notebook) for o in cell.outputs]
    said = "".join(o.text for o in outputs if o.get("name") == stream)
    return CLOSING.sub("", said)


def n_figures(notebook: Any) -> int:
    outputs = [o for cell in code_cells(notebook) for o in cell.outputs]
    return sum("image/png" in o.get("data", {}) for o in outputs)


def test_quickstart(tmp_path: Path) -> None:
    done = execute(ROOT / "notebooks" / "01-quickstart.ipynb", tmp_path)
    said = printed(done, "stdout")
    found = re.search(r"has not seen: ([\d.]+)", said)
    assert found is not None
    assert float(found[1]) > 0.85
    step = re.search(r"loss ([\d.]+) became ([\d.]+)", said)
    assert step is not None
    assert float(step[2]) < float(step[1])
    assert n_figures(done) == 3
    # The bar, and nothing else: one line that was written over.
    *_, last, end = re.split(r"[\r\n]+", printed(done, "stderr"))
    assert re.match(r"epoch 20/20: 100%.* 480/480 .* rounds/s, loss 0\.", last)
    assert end == ""
    assert printed(done, "stderr").count("\n") == 1


def test_sync_modes(tmp_path: Path) -> None:
    done = execute(ROOT / "notebooks" / "02-sync-modes.ipynb", tmp_path)
    behind = [int(n) for n in re.findall(r"at most (\d+)", printed(done, "stdout"))]
    assert len(behind) == 3
    assert behind[0] == 0  # BSP
    assert behind[1] <= 10  # SSP(10)
    assert n_figures(done) == 1
    assert printed(done, "stderr") == ""


def test_embeddings(tmp_path: Path) -> None:
    done = execute(ROOT / "notebooks" / "03-embeddings.ipynb", tmp_path)
    said = printed(done, "stdout")
    assert re.search(r"^day:.*\b(month|year|week)\b", said, re.MULTILINE)
    assert re.findall(r"^there: (\w+)$", said, re.MULTILINE) == ["False", "True"]
    assert n_figures(done) == 1
    assert printed(done, "stderr").count("\n") == 1  # the bar


def test_failure(tmp_path: Path) -> None:
    done = execute(ROOT / "notebooks" / "04-failure.ipynb", tmp_path)
    said = printed(done, "stdout")
    again = re.search(r"started again: (\d)", said)
    assert again is not None
    assert int(again[1]) >= 1
    assert re.search(r"^ended with \w*Error$", said, re.MULTILINE)
    assert "restored at version 120 in 2 shards" in said
    # After the deaths of a worker, of a machine and of the scheduler.
    assert re.findall(r"the same bits: (\w+)", said) == ["True"] * 3
    assert "shards-promoted" in said
    events = re.findall(r"^ *[\d.]+ s  ([\w-]+)", said, re.MULTILINE)
    first = events.index("run-ended")
    assert events[:2] == ["store-created", "run-begun"]
    assert set(events[2:first]) == {"trainer-lost", "shards-adopted"}
    assert events[-3:] == ["store-created", "run-begun", "run-ended"]


def test_torch(tmp_path: Path) -> None:
    adapter("torch")
    done = execute(ROOT / "notebooks" / "05-torch.ipynb", tmp_path)
    said = printed(done, "stdout")
    found = re.search(r"has not seen: ([\d.]+)", said)
    assert found is not None
    assert float(found[1]) > 0.9
    step = re.search(r"batches: ([\d.]+) became ([\d.]+)", said)
    assert step is not None
    assert float(step[2]) < float(step[1])
    assert n_figures(done) == 2


SETUP = """
import numpy as np, daskps
from distributed import Client
client = Client(processes=False, n_workers=2, threads_per_worker=2, dashboard_address="127.0.0.1:0")
params, rule = {"w": np.zeros(3), "e": daskps.TableSpec(9, 2)}, daskps.optim.SGD(0.1)
store, named = daskps.create(params, optimizer=rule), daskps.create(params, name="n")
closed = daskps.create(params); closed.close()
X, bad = np.ones((8, 3)), np.array([1, np.nan, 2])
def gradient(params, X, y):
    return {"w": np.ones(2) @ X}
def pushes(trainer, part):
    trainer.push({"w": bad})
"""
#: What fails, and the line of the user's cell above that must be shown.
FAILING = {
    "daskps.create(params, name='n')": (),
    "closed.pull()": (),
    "closed['w']": (),
    "closed.version": (),
    "closed.names": (),
    "store.push({'w': bad})": (),
    "store['w'].push(bad)": (),
    "store['e'].add([1], np.full((1, 2), np.nan))": (),
    "store.pull('v')": (),
    "store.snapshot(timeout=-1)": (),
    "daskps.train(store, gradient, X, X[:, 0], trainers=2, callbacks=[])": (">:9\n",),
    "daskps.train(store, gradient, X, X[:, 0], execution='graph', callbacks=[])": (
        ">:9\n",
    ),
    "daskps.run(store, pushes, [0, 1])": (">:11\n",),
}


def test_errors_take_twenty_lines_and_show_the_users_own(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook()
    for source in (SETUP, *FAILING, "store.close(); client.close()"):
        cell = nbformat.v4.new_code_cell(source)
        cell.metadata["tags"] = ["raises-exception"]
        notebook.cells.append(cell)
    nbformat.write(notebook, tmp_path / "errors.ipynb")
    (tmp_path / "there").mkdir()
    first, *cells, last = execute(tmp_path / "errors.ipynb", tmp_path / "there").cells
    assert not any(o.output_type == "error" for c in (first, last) for o in c.outputs)
    for cell, lines in zip(cells, FAILING.values(), strict=True):
        [error] = [o for o in cell.outputs if o.output_type == "error"]
        shown = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
        assert len(shown.splitlines()) <= 20, shown
        assert f"----> 1 {cell.source}" in shown
        assert all(line in shown for line in lines), shown
        assert "daskps/" not in shown, shown


def test_every_notebook_is_run() -> None:
    assert [n.name for n in NOTEBOOKS] == [
        *("01-quickstart.ipynb", "02-sync-modes.ipynb", "03-embeddings.ipynb"),
        *("04-failure.ipynb", "05-torch.ipynb"),
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    kept = {c.id for c in code_cells(notebook) if c.outputs or c.execution_count}
    assert not kept, "clear the outputs of these cells before you commit"
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
