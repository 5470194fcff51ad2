"""Without any of the extras all that needs none of them works, in every process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from tests.support import PATIENCE
from tests.test_readme import PROJECT, ROOT

#: A module that Python imports at the start of each process, if it is found.
START = '''
import os
import sys


class Gone:
    """Has what is not installed with daskps alone look as if it were not there."""

    gone = set(os.environ["GONE"].split())

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.gone:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Gone())
'''

PROGRAM = """
import sys
import tempfile

import dask
import numpy as np
from distributed import Client

import daskps


def gradient(params, X, y):
    return float((params["w"] ** 2).sum()), {"w": params["w"] - X.mean(axis=0)}


def loop(trainer, part):
    return trainer.allreduce(np.full(2, part))[0]


def missing(use):
    try:
        use()
    except ImportError as error:
        return "; ".join([str(error), *getattr(error, "__notes__", ())])


if __name__ == "__main__":
    HERE = "127.0.0.1:0"
    with Client(n_workers=2, threads_per_worker=2, dashboard_address=HERE) as client:
        params = {"w": np.zeros(3), "emb": daskps.TableSpec(None, 2)}
        store = daskps.create(params, optimizer=daskps.optim.Adam(0.1), name="core")
        store.push({"w": np.ones(3)})
        store["emb"].push([1, 2], np.ones((2, 2)))
        result = daskps.train(store, gradient, np.eye(3), epochs=2, codec="bf16")
        for execution in ("resident", "graph"):
            daskps.train(store, gradient, np.eye(3), execution=execution)
        assert daskps.run(store, loop, [1.0, 2.0]) == [3.0, 3.0]
        snapshot = store.snapshot()
        assert np.array_equal(snapshot["w"].compute(), store.view()["w"])
        with store.replica() as replica:
            replica.step({"w": np.ones(3)})
        with tempfile.TemporaryDirectory() as folder:
            store.save(folder)
            again = daskps.restore(folder)
            assert np.array_equal(again["emb"].pull([1]), store["emb"].pull([1]))
            assert len(daskps.list_checkpoints(folder)) == 1
        assert client.submit(lambda s: s.pull("w")["w"].shape, store).result() == (3,)
        print(store, store._repr_html_(), daskps.list_stores(), result, store.stats())
        print(missing(result.to_frame))
        print(missing(result.plot))
        for name in ("jax", "sklearn", "torch"):
            print(missing(lambda: getattr(daskps, name)))
        loaded = {module.partition(".")[0] for module in sys.modules}
        everywhere = client.run(lambda: {m.partition(".")[0] for m in __import__("sys").modules})
        print("LOADED", *loaded.union(*everywhere.values()))
"""


def installed_with(names: list[str]) -> set[str]:
    """Return the distributions that come with some, without their extras."""
    found, left = set[str](), list(names)
    while left:
        name = normal(left.pop())
        if name in found:
            continue
        try:
            needs = requires(name) or []
        except PackageNotFoundError:  # for another system, or an older Python
            continue
        found.add(name)
        left += [need for need in needs if "extra ==" not in need]
    return found


def normal(requirement: str) -> str:
    """Return the name of a distribution in a requirement, as it is compared."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def beside() -> set[str]:
    """Return the modules of this environment that daskps alone does not bring."""
    core = installed_with(PROJECT["project"]["dependencies"]) | {"daskps"}
    return {
        module
        for module, of in packages_distributions().items()
        if not core & {normal(name) for name in of}
    }


def test_what_comes_with_daskps_is_known() -> None:
    gone = beside()
    assert {"pandas", "pytest", "sklearn", "tqdm", "zarr"} <= gone
    assert not {"dask", "distributed", "numba", "numpy", "psutil", "yaml"} & gone


def test_core_works_without_any_extra(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(START)
    (tmp_path / "program.py").write_text(PROGRAM)
    gone = beside()
    done = subprocess.run(
        [sys.executable, "-Werror", "program.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            "GONE": " ".join(gone),
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    text, _, loaded = done.stdout.partition("LOADED")
    # Files `.pth` of an environment import theirs before `sitecustomize`.
    assert not [name for name in gone & set(loaded.split()) if name[0] != "_"]
    assert "pip install pandas" in text
    assert "pip install matplotlib" in text
    for name in ("jax", "sklearn", "torch"):
        assert f"install daskps[{name}]" in text
