"""Layers import downwards only: all imports, local and typing-only ones too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

import daskps

ROOT = Path(daskps.__file__).parent
#: Layer of each module of the package; a folder stands for all that is in it.
LAYERS = {
    "": 4,  # daskps itself: what users import
    "cli": 5,
    "compat": 5,
    "demo": 5,
    "jax": 5,
    "preload": 5,
    "sklearn": 5,
    "testing": 5,
    "torch": 5,
    "aio": 4,
    "store": 4,
    "training": 4,
    "cluster": 3,
    "checkpoint": 2,
    "shards": 2,
    "codecs": 1,
    "combination": 1,
    "consistency": 1,
    "epochs": 1,
    "init": 1,
    "row_init": 1,
    "kernels": 1,
    "layout": 1,
    "optim": 1,
    "reduction": 1,
    "version": 1,
    "backend": 0,
    "config": 0,
    "errors": 0,
    "limits": 0,
    "tracebacks": 0,
    "typing": 0,
    "usercode": 0,
}
MAY_START_CLUSTERS = {"demo", "testing"}
CONCURRENCY = {
    "_thread",
    "asyncio",
    "concurrent",
    "fcntl",
    "multiprocessing",
    "queue",
    "sched",
    "selectors",
    "signal",
    "threading",
}
INPUT_OUTPUT = {
    "ftplib",
    "glob",
    "http",
    "io",
    "mmap",
    "os",
    "pathlib",
    "shutil",
    "socket",
    "sqlite3",
    "ssl",
    "subprocess",
    "tempfile",
    "urllib",
}
#: Packages beside the standard library and daskps, by layer.
PACKAGES = {
    5: {"dask", "numpy", "sklearn"},
    4: {"dask", "numpy"},
    3: {"dask", "distributed", "numpy"},
    2: {"numpy"},
    1: {"numpy"},
    0: {"numpy"},
}

#: And by module, what it takes where that is installed.
ALSO = {
    "backend.cuda": {"cupy"},
    "checkpoint.storage": {"fsspec"},
    "cluster.seeing.page": {"bokeh"},
    "cluster.seeing.prometheus": {"prometheus_client"},
    "jax": {"jax"},
    "kernels.device.libdevice": {"cuda"},
    "store.picture": {"graphviz"},
    **{f"torch.{of}": {"torch"} for of in ("modules", "optimizer", "training")},
    "testing": {"pytest"},
    "training.callbacks": {"tqdm"},
    "training.result": {"matplotlib", "pandas"},
}


@dataclass(frozen=True)
class Module:
    name: str  # below daskps, "" for itself
    source: str
    is_package: bool

    @property
    def part(self) -> str:
        return self.name.split(".")[0]

    @property
    def layer(self) -> int | None:
        return LAYERS.get(self.part)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All that is in its source."""
        return [*ast.walk(ast.parse(self.source))]

    def imports(self) -> Iterator[tuple[int, str]]:
        """Give line and full name of everything imported, anywhere in the module."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                base = self.base_of(node)
                for alias in node.names:
                    yield node.lineno, f"{base}.{alias.name}"
            elif isinstance(node, ast.Attribute) and is_dask_config(node):
                yield node.lineno, "dask.config"  # after a mere `import dask`

    def base_of(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = ["daskps", *self.name.split(".")] if self.name else ["daskps"]
        up = node.level - self.is_package
        parents = package[: len(package) - up] if up else package
        return ".".join([*parents, *filter(None, [node.module])])


def is_dask_config(node: ast.Attribute) -> bool:
    of = node.value
    return node.attr == "config" and isinstance(of, ast.Name) and of.id == "dask"


def modules(root: Path) -> Iterator[Module]:
    for path in sorted(root.rglob("*.py")):
        if path.name == "conftest.py":
            continue  # pytest's: the installed package is without it
        parts = list(path.relative_to(root).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        if is_package:
            parts.pop()
        yield Module(".".join(parts), path.read_text("utf-8"), is_package)


@cache
def tree() -> dict[str, Module]:
    """Return all modules of the package by name."""
    return {module.name: module for module in modules(ROOT)}


def faults(module: Module) -> list[str]:
    """Return what a module imports and may not."""
    if module.layer is None:
        return [f"daskps.{module.name} has no layer in LAYERS"]
    found = []
    for line, name in module.imports():
        reason = fault(module, name)
        if reason:
            found.append(f"daskps.{module.name}:{line} imports {name}: {reason}")
    return found


def fault(module: Module, name: str) -> str | None:
    package, _, rest = name.partition(".")
    if package == "daskps":
        return own_fault(module, rest)
    if name.startswith("dask.config"):
        # Who starts a cluster says how that is configured.
        may = module.name in ("config", "demo.servers")
        return None if may else "only config reads dask.config"
    if name.startswith("dask.distributed"):
        package = "distributed"
    if package in sys.stdlib_module_names:
        return stdlib_fault(module, package)
    return package_fault(module, package)


def own_fault(module: Module, target: str) -> str | None:
    assert module.layer is not None
    # `from daskps import config` names a module, `from daskps import create` does not.
    part = target.split(".")[0]
    layer = LAYERS.get(part, LAYERS[""])
    if layer > module.layer:
        return f"layer {module.layer} imports layer {layer}"
    if part == "shards" and module.layer >= 4:
        return "only cluster reaches shards"
    if part == "shards" and module.part == "checkpoint":
        return "checkpoints are below shards"
    return None


def stdlib_fault(module: Module, package: str) -> str | None:
    assert module.layer is not None
    compiles = module.part == "kernels" and package == "threading"
    # Of processes that need the same file of its directory one makes it.
    compiles |= module.name == "kernels.cache" and package == "fcntl"
    if package in CONCURRENCY and module.layer in (1, 2) and not compiles:
        return f"layer {module.layer} has no threads, locks or event loop"
    kernels = ("kernels.cache", "kernels.device.libdevice")
    by_name = (*kernels, "checkpoint.storage", "checkpoint.local_files")
    does_files = module.name in by_name
    if package in INPUT_OUTPUT and module.layer in (1, 2) and not does_files:
        return f"layer {module.layer} has no input or output"
    return None


def package_fault(module: Module, package: str) -> str | None:
    assert module.layer is not None
    allowed = set(PACKAGES[module.layer])
    if module.name == "config":
        allowed |= {"dask", "yaml"}
    if module.part == "kernels":
        allowed |= {"llvmlite", "numba"}  # Numba's back end
    if module.name == "checkpoint.digests":
        allowed |= {"xxhash"}
    allowed |= ALSO.get(module.name, set())
    if module.part == "cli":
        allowed |= {"click"}
    if module.part in MAY_START_CLUSTERS:
        allowed |= {"distributed"}
    return None if package in allowed else f"{package} is not for daskps.{module.name}"


def test_imports_go_downwards() -> None:
    assert [fault for module in tree().values() for fault in faults(module)] == []


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("layout", "import daskps.store", "layer 1 imports layer 4"),
        ("layout", "from daskps import store", "layer 1 imports layer 4"),
        ("layout", "from daskps import create", "layer 1 imports layer 4"),
        ("cluster.host", "import daskps", "layer 3 imports layer 4"),
        (
            "cluster.host",
            "def f():\n    from ..store import x",
            "layer 3 imports layer",
        ),
        ("cluster.host", "from .. import training", "layer 3 imports layer 4"),
        (
            "errors",
            "if TYPE_CHECKING:\n    from .layout import Layout",
            "layer 0 imports layer 1",
        ),
        ("store", "from daskps.shards.dense import Shard", "only cluster"),
        ("training.fit", "from ..shards import dense", "only cluster"),
        ("store", "import distributed", "distributed is not for"),
        ("store", "from dask.distributed import Client", "distributed is not for"),
        ("store", "from dask import distributed", "distributed is not for"),
        ("training.fit", "import distributed.utils", "distributed is not for"),
        ("preload", "import distributed", "distributed is not for"),
        ("store", "import dask.config", "only config"),
        ("store", "from dask import config", "only config"),
        ("store", "import dask\ndask.config.get('x')", "only config"),
        ("demo.digits", "import dask\ndask.config.set({})", "only config"),
        ("errors", "import dask", "dask is not for"),
        ("shards.shard", "import dask.array", "dask is not for"),
        ("shards.shard", "import threading", "no threads"),
        ("shards.shard", "import asyncio.locks", "no threads"),
        ("checkpoint.plan", "from daskps.shards import steps", "below shards"),
        ("checkpoint.plan", "import os", "no input or output"),
        ("checkpoint.plan", "import fsspec", "fsspec is not for"),
        ("checkpoint.storage", "import threading", "no threads"),
        ("layout", "import numba", "numba is not for"),
        ("layout", "from pathlib import Path", "no input or output"),
        ("kernels.compiled", "import asyncio", "no threads"),
        ("kernels.compiled", "import fcntl", "no threads"),
        ("kernels.compiled", "import os.path", "no input or output"),
        ("optim.adam", "import torch", "torch is not for"),
        ("config", "import cupy", "cupy is not for"),
        ("demo", "import ray", "ray is not for"),
        ("demo", "from tests.benchmarks import rounds", "tests is not for"),
        ("demo", "from tests import simulator", "tests is not for"),
        ("novelty", "import sys", "has no layer"),
    ],
)
def test_the_checker_finds(name: str, source: str, reason: str) -> None:
    (found,) = faults(Module(name, source, is_package=False))
    assert reason in found


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("", "from .store import create"),
        ("store", "import dask.array\nfrom daskps.cluster import messages"),
        ("store", "from daskps import config, errors"),
        ("training", "from . import data"),
        ("training.fit", "from .data import rows\nfrom ..cluster import client"),
        ("cluster.host", "import asyncio, distributed\nfrom ..shards import dense"),
        ("demo", "from distributed import LocalCluster\nimport daskps"),
        ("config", "import dask.config, os"),
        ("kernels.dense", "import numba\nimport threading"),  # a lock to compile under
        ("kernels.cache", "import os"),
    ],
)
def test_the_checker_allows(name: str, source: str) -> None:
    assert not faults(Module(name, source, is_package="." not in name))


def test_the_checker_reads_relative_imports_of_packages() -> None:
    source = "from .a import b\nfrom ..store import c"
    names = [n for _, n in Module("cluster", source, is_package=True).imports()]
    assert names == ["daskps.cluster.a.b", "daskps.store.c"]


def test_every_file_is_walked() -> None:
    assert {"", "config", "errors", "training", "training.data"} <= tree().keys()


def test_importing_daskps_leaves_heavy_packages_alone() -> None:
    code = "import daskps, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {
        "cupy",
        "fsspec",
        "jax",
        "numba",
        "graphviz",
        "pandas",
        "sklearn",
        "torch",
        "zarr",
    }


# -- circles, and who may change distributed ----------------------------------

#: What a server of Dask's has that changes what it does.
SERVER_PARTS = {
    "handlers",
    "max_shard_size",
    "metrics",
    "monitor",
    "periodic_callbacks",
    "stream_handlers",
}


def edges(tree: dict[str, Module]) -> dict[str, dict[str, int]]:
    """Return for each module the modules it imports, with a line where it does."""
    found: dict[str, dict[str, int]] = {}
    for module in tree.values():
        for line, name in module.imports():
            package, _, target = name.partition(".")
            while target not in tree and target:
                target = target.rpartition(".")[0]
            if package == "daskps" and target and target != module.name:
                found.setdefault(module.name, {}).setdefault(target, line)
    return found


def circles(graph: dict[str, dict[str, int]]) -> list[list[str]]:
    """Return, for each name that leads to itself, a shortest way round; each once."""
    found: dict[frozenset[str], list[str]] = {}
    for start in graph:
        ways, seen = [[start]], {start}
        while ways:
            way = ways.pop(0)
            for target in graph.get(way[-1], ()):
                if target == start:
                    found.setdefault(frozenset(way), way)
                    ways = []
                    break
                if target not in seen:
                    seen.add(target)
                    ways.append([*way, target])
    return [[*way, way[0]] for way in found.values()]


def test_no_two_modules_import_each_other() -> None:
    assert circles(edges(tree())) == []


def patches(module: Module) -> list[str]:
    """Return where a module changes what a server of Dask's does."""
    return [
        f"daskps.{module.name}:{target.lineno} {ast.unparse(target)}"
        for node in module.nodes
        for target in changed(node)
        if any(
            isinstance(n, ast.Attribute) and n.attr in SERVER_PARTS and not is_own(n)
            for n in ast.walk(target)
        )
    ]


def changed(node: ast.AST) -> Iterator[ast.expr]:
    """Give what a node assigns to, deletes, or updates by a method."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            for target in targets:
                yield from target.elts if isinstance(target, ast.Tuple) else [target]
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            yield target
        case ast.Call(func=ast.Attribute(attr="update" | "setdefault" | "pop") as call):
            yield call


def is_own(node: ast.Attribute) -> bool:
    """Tell whether it is an attribute of the object whose method it is in."""
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def test_only_upstream_changes_distributed() -> None:
    in_cluster = [m for m in tree().values() if m.part == "cluster"]
    assert [m.name for m in in_cluster if patches(m)] == ["cluster.upstream"]


@pytest.mark.parametrize(
    "source",
    [
        "worker.handlers['x'] = f",
        "worker.handlers.update(x=f)",
        "self.server.metrics['x'] = f",
        "comm.max_shard_size = 1",
        "monitor = worker.monitor\nworker.monitor.get_process_memory = f",
        "nanny.periodic_callbacks['x'].callback = f",
        "del worker.handlers['x']",
    ],
)
def test_a_patch_of_distributed_is_found(source: str) -> None:
    assert len(patches(Module("cluster.host.host", source, is_package=False))) == 1


@pytest.mark.parametrize(
    ("sources", "way"),
    [
        ({"a": "import daskps.b", "b": "from daskps import a"}, ["a", "b", "a"]),
        (
            {
                "a": "from daskps.b import x",
                "b": "if TYPE_CHECKING:\n    from daskps.c import x",
                "c": "def f():\n    from daskps.a import x",
            },
            ["a", "b", "c", "a"],
        ),
        ({"a": "import daskps.b", "b": "import daskps.c", "c": ""}, None),
    ],
)
def test_a_circle_is_found(sources: dict[str, str], way: list[str] | None) -> None:
    made = {n: Module(n, s, is_package=False) for n, s in sources.items()}
    assert circles(edges(made)) == ([] if way is None else [way])


# -- rooms: no circles, and in the cluster one direction -----------------------

#: What each room of the cluster may import of the others; a room is a module there or
#: a folder with all that is in it.
ROOMS: dict[str, set[str]] = {
    "keys": set(),
    "connections": set(),
    "counters": set(),
    "upstream": set(),
    "protocol": {"keys", "upstream"},
    "machine": {"keys", "upstream"},
    "sockets": {"keys", "upstream", "protocol"},
    "directory": {"keys", "upstream", "protocol"},
    "host": {
        "keys",
        "connections",
        "counters",
        "upstream",
        "protocol",
        "sockets",
        "machine",
    },
    "seeing": {"keys", "counters", "upstream", "protocol", "host", "directory"},
    "plugins": {
        "keys",
        "upstream",
        "protocol",
        "machine",
        "host",
        "directory",
        "seeing",
    },
    "caller": {
        "keys",
        "connections",
        "counters",
        "upstream",
        "protocol",
        "sockets",
        "machine",
        "host",
        "plugins",
    },
    "runs": {"keys", "upstream", "protocol", "machine", "host", "plugins", "caller"},
}
#: The scheduler's part knows of shards their sizes, their reports and where runs stand.
DIRECTORY_SEES = {"shards.memory.segment", "shards.cuts.cut", "shards.steps"}


def rooms(graph: dict[str, dict[str, int]]) -> dict[str, dict[str, dict[str, int]]]:
    """Return for each package how its modules and packages import each other."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for name, targets in graph.items():
        for target in targets:
            a, b = name.split("."), target.split(".")
            n = 0
            while n < min(len(a), len(b)) and a[n] == b[n]:
                n += 1
            # Where one is the package of the other there are no two rooms.
            if n < len(a) and n < len(b):
                of = found.setdefault(".".join(a[:n]), {})
                of.setdefault(a[n], {})[b[n]] = targets[target]
    return found


def room_faults(module: Module) -> list[str]:
    """Return what a module of the cluster imports of rooms that it may not see."""
    parts = module.name.split(".")
    if parts[0] != "cluster" or len(parts) < 2:
        return []
    room, found = parts[1], []
    if room not in ROOMS:
        return [f"daskps.{module.name} has no room in ROOMS"]
    for line, name in module.imports():
        _, *target = name.split(".")
        door = target[1] if target[:1] == ["cluster"] and len(target) > 1 else room
        may = door not in ROOMS or door in ROOMS[room] | {room}
        if room == "directory" and target[:1] == ["shards"]:
            may = any(
                target[: m.count(".") + 1] == m.split(".") for m in DIRECTORY_SEES
            )
        if not may:
            found.append(f"daskps.{module.name}:{line} imports {name}")
    return found


def test_no_two_rooms_import_each_other() -> None:
    of = rooms(edges(tree()))
    assert {"", "cluster", "shards"} <= of.keys()
    # What users import is all of it; it is nobody's room.
    assert {package: found for package in of if (found := circles(of[package]))} == {}


def test_rooms_of_the_cluster_import_downwards() -> None:
    assert [fault for module in tree().values() for fault in room_faults(module)] == []


def test_a_circle_of_rooms_is_found_where_modules_have_none() -> None:
    made = {
        "x.a.one": "from daskps.x.b import one",
        "x.b.one": "",
        "x.b.two": "from daskps.x.a import two",
        "x.a.two": "",
    }
    tree = {n: Module(n, s, is_package=False) for n, s in made.items()}
    graph = edges(tree)
    assert circles(graph) == []
    assert circles(rooms(graph)["x"]) == [["a", "b", "a"]]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("cluster.directory.runs", "from daskps.cluster.host import host"),
        ("cluster.host.host", "from daskps.cluster.caller.link import Link"),
        ("cluster.protocol.messages", "import daskps.cluster.machine.locks"),
        ("cluster.directory.cuts", "from daskps.shards import shard"),
        ("cluster.directory.cuts", "from daskps.shards.steps2 import x"),
        ("cluster.novelty", "import sys"),
    ],
)
def test_a_wrong_door_is_found(name: str, source: str) -> None:
    assert len(room_faults(Module(name, source, is_package=False))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("cluster.caller.local", "from daskps.cluster.host.hosted import HostedShard"),
        ("cluster.directory.cuts", "from daskps.shards.cuts.cut import agree"),
        ("cluster.runs.graph.tasks", "from daskps.cluster.host import contributions"),
        ("cluster.protocol.messages", "from daskps.cluster import upstream"),
    ],
)
def test_an_open_door_is_found(name: str, source: str) -> None:
    assert not room_faults(Module(name, source, is_package=False))
