"""The page about deployments: its formula, its commands and its manifests, as they stand."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import dask
import numpy as np
import pytest
import yaml
from dask.utils import parse_bytes
from distributed import Client

import daskps
from daskps import ArraySpec, ProtocolError, TableSpec, optim
from daskps.cluster.protocol import messages
from tests.support import PATIENCE, local_cluster, popen, terminal_cluster
from tests.test_readme import DOCS, ROOT, blocks, run_python

PAGE = DOCS / "deployment.md"


# -- memory ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def formula() -> Callable[..., float]:
    names: dict[str, Any] = {}
    exec(blocks(PAGE, "python")[0], names)
    found: Callable[..., float] = names["store_nbytes"]
    return found


@pytest.fixture(scope="module")
def machine() -> Iterator[Client]:
    """Two workers that share memory."""
    with local_cluster() as client:
        yield client


RULES = (None, 0), (optim.SGD(1.0, momentum=0.9), 1), (optim.Adam(), 2)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("rule", "kept"), RULES)
@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("float16", 2)])
def test_the_formula_is_what_stores_take(
    machine, formula, shared, rule, kept, dtype, itemsize
):
    """Arrays to 2 %, bounded tables to 10 %; `create` charges what segments take."""
    about = {"kept": kept, "itemsize": itemsize, "shared": shared, "shards": 3}
    arrays = {"w": ArraySpec(200_000, dtype, 0.0)}
    for params, more, slack in (
        (arrays, {"weights": 200_000}, 0.02),
        ({"t": TableSpec(60_000, 8, dtype)}, {"rows": 60_000, "dim": 8}, 0.1),
    ):
        with (
            dask.config.set({"daskps.carriers.machine": shared}),
            daskps.create(params, client=machine, optimizer=rule, shards=3) as store,
        ):
            taken = sum(row["segment_nbytes"] for row in store.stats()["shards"])
            assert charged(machine)[store.uid] == taken
        assert taken == pytest.approx(formula(**about, **more), rel=slack)


def charged(client: Client) -> dict[str, int]:
    """Return what the directory counts for each store."""

    def count(dask_scheduler: Any) -> dict[str, int]:
        stores = dask_scheduler.extensions["daskps-directory"].stores
        return {uid: sum(entry.nbytes.values()) for uid, entry in stores.items()}

    found: dict[str, int] = client.run_on_scheduler(count)
    return found


@pytest.mark.parametrize("pushed", [2000, 40_000])
def test_the_formula_bounds_rows_that_come_by_id(machine, formula, pushed):
    ids = np.random.default_rng(0).integers(0, 2**60, 40_000)
    about: dict[str, Any] = {"client": machine, "optimizer": optim.Adam()}
    with daskps.create({"t": TableSpec(None, 8)}, shards=1, **about) as store:
        for start in range(0, len(ids), pushed):
            part = ids[start : start + pushed]
            store["t"].add(part, np.ones((len(part), 8), "f4"))
        taken = sum(row["segment_nbytes"] for row in store.stats()["shards"])
    said = formula(rows=len(ids), dim=8, kept=2, pushed=pushed)
    assert 0.66 * said < taken <= said


@pytest.mark.parametrize(
    ("params", "create", "said"),
    [
        (
            {"w": ArraySpec(200_000, "float16", 0.0, master="float32")},
            {"optimizer": optim.SGD(1.0)},
            {"weights": 200_000, "itemsize": 2, "master": True},
        ),
        (
            {"w": ArraySpec(200_000, "float32", 0.0, master="float64")},
            {"optimizer": optim.Adam()},
            {"weights": 200_000, "kept": 2, "master": True},
        ),
        (
            {"t": TableSpec(60_000, 8)},
            {"optimizer": optim.Adagrad(rowwise=True)},
            {"rows": 60_000, "dim": 8, "kept": 1, "rowwise": True},
        ),
        ({"w": ArraySpec(10**6, init=0.0)}, {"copies": 2}, {"weights": 10**6}),
    ],
)
def test_the_formula_knows_masters_rowwise_state_and_copies(
    machine, formula, params, create, said
):
    with daskps.create(params, shards=2, client=machine, **create) as store:
        taken = charged(machine)[store.uid]
    about = {"shards": 2, "copies": create.get("copies", 1)}
    assert taken == pytest.approx(formula(**said, **about), rel=0.1)


# -- clusters --------------------------------------------------------------------------


@contextmanager
def started(folder: Path, **env: str) -> Iterator[str]:
    """The servers of the page, started by its commands; the address of the scheduler."""
    commands = [line.split() for line in blocks(PAGE, "bash")[0].splitlines()]
    assert [command[1] for command in commands] == ["scheduler", "worker", "worker"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    here = ["--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    with ExitStack() as stack:
        for dask_, role, *options in commands:
            options = [address if o == "scheduler:8786" else o for o in options]
            options += ["--port", address.split(":")[1]] * (role == "scheduler")
            begun = popen([dask_, role, *options, *here], env=env, cwd=folder)
            stack.enter_context(begun)
        yield address


def where(trainer: Any, part: int) -> str:
    trainer.push({"w": np.ones(8)})
    return str(os.getpid())


def gradient(params: Any, X: Any, y: Any) -> Any:
    error = X @ params["w"] - y
    return np.mean(error**2) / 2, {"w": X.T @ error / len(y)}


def script() -> bytes:
    """A program as people write it, which knows nothing of its cluster."""
    X = np.random.default_rng(0).normal(size=(100, 3))
    with daskps.create({"w": np.zeros(3)}, optimizer=optim.SGD(0.1)) as store:
        about: Any = {"epochs": 3, "trainers": 2}
        result = daskps.train(store, gradient, X, X @ [1.0, -2.0, 3.0], **about)
        first, *_, last = [epoch.loss for epoch in result.history]
        assert first is not None
        assert last is not None
        assert last < first
        return bytes(store.snapshot()["w"].compute().tobytes())


def test_a_cluster_with_servers_and_certificates(tmp_path: Path) -> None:
    """The commands of the page, in order: shards are on the servers, all is encrypted.

    A program gets the same bits there as on a `LocalCluster`.
    """
    with local_cluster(n_workers=2, threads=2):
        expected = script()
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with")
    keys, config = blocks(PAGE, "bash")[2], blocks(PAGE, "yaml")[-1]
    subprocess.run(
        ["sh", "-ec", keys], cwd=tmp_path, check=True, capture_output=True, timeout=60
    )
    (tmp_path / "tls.yaml").write_text(config)
    with started(tmp_path, DASK_CONFIG=str(tmp_path)) as address:
        # The client's are not looked for where it runs.
        there = re.sub(r"\b(ca|dask)\.", rf"{tmp_path}/\1.", config)
        ours = yaml.safe_load(there)
        ours = dask.config.merge(dask.config.get("distributed"), ours["distributed"])
        with (
            dask.config.set({"distributed": ours}),
            Client(address, timeout=PATIENCE) as client,
        ):
            client.wait_for_workers(3, PATIENCE)
            workers = client.scheduler_info(n_workers=-1)["workers"]
            servers = {a for a, w in workers.items() if w["resources"].get("PS")}
            params = {"w": np.zeros(8)}
            with daskps.create(params, optimizer=optim.SGD(1.0)) as store:
                assert {*store.placement} == servers
                assert len(servers) == 2
                assert all(a.startswith("tls://") for a in servers)
                (trainer,) = workers.keys() - servers
                daskps.run(store, where, [0], workers=[trainer])
                assert store.pull()["w"].tolist() == [-1.0] * 8
            assert script() == expected


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    """Of a worker whose wheel has another version, though it speaks the same protocol."""
    about = tmp_path / "daskps-9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: daskps\nVersion: 9.9")
    other = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    plain = ["--no-nanny", "--preload", "daskps.preload", "--name"]
    workers: Any = ([*plain, "new"], other), ([*plain, "old"], {})
    with terminal_cluster(tmp_path / "s", workers) as (client, _):
        info = client.scheduler_info(n_workers=-1)["workers"]
        (new,) = [address for address, w in info.items() if w["name"] == "new"]
        said = rf"worker {new} .*daskps 9\.9\).*daskps {re.escape(daskps.__version__)}"
        with pytest.raises(ProtocolError, match=said):
            daskps.create({"w": np.zeros(4)}, client=client)
        old = [address for address in info if address != new]
        with daskps.create({"w": np.zeros(4)}, client=client, servers=old) as store:
            assert store.pull()["w"].tolist() == [0.0] * 4
        with (
            mock.patch.object(messages, "VERSION", "9.9"),
            Client(scheduler_file=str(tmp_path / "s"), set_as_default=False) as newer,
            pytest.raises(ProtocolError, match=r"the client .*daskps 9\.9\)"),
        ):
            daskps.list_stores(client=newer)


# -- manifests -------------------------------------------------------------------------


def package(name: str) -> Path:
    """Return the folder of a package that is not imported; else skip a test."""
    if (spec := find_spec(name)) is None or spec.origin is None:
        pytest.skip(f"{name} is not installed")
    return Path(spec.origin).parent


def test_the_manifests_are_those_of_the_operator() -> None:
    """Against the schemas that dask-kubernetes has the server check them by."""
    jsonschema = pytest.importorskip("jsonschema")
    crds = package("dask_kubernetes") / "operator/deployment/helm"
    crds /= "dask-kubernetes-operator/crds"
    manifests = list(yaml.safe_load_all(blocks(PAGE, "yaml")[0]))
    kinds = [manifest["kind"] for manifest in manifests]
    assert kinds == ["DaskCluster", "DaskWorkerGroup"]
    for manifest in manifests:
        crd = yaml.safe_load((crds / f"{manifest['kind'].lower()}.yaml").read_text())
        assert manifest["apiVersion"] == f"{crd['spec']['group']}/v1"
        (version,) = (v for v in crd["spec"]["versions"] if v["name"] == "v1")
        schema = closed(version["schema"]["openAPIV3Schema"])
        jsonschema.validate(manifest["spec"], schema["properties"]["spec"])
        manifest["spec"]["worker"]["memory"] = "16Gi"
        with pytest.raises(jsonschema.ValidationError, match="memory"):
            jsonschema.validate(manifest["spec"], schema["properties"]["spec"])


def closed(schema: Any) -> Any:
    """Return a schema that refuses fields it does not name: a server drops these."""
    if isinstance(schema, dict):
        schema = {name: closed(value) for name, value in schema.items()}
        is_open = schema.get("x-kubernetes-preserve-unknown-fields")
        if isinstance(schema.get("properties"), dict) and not is_open:
            schema.setdefault("additionalProperties", False)
    return schema


def test_the_compose_file_is_one() -> None:
    """Against the specification's schema, as Compose 1.29 has it."""
    jsonschema = pytest.importorskip("jsonschema")
    file = package("compose") / "config/compose_spec.json"
    schema = jsonschema.Draft201909Validator(json.loads(file.read_text()))
    schema.validate(made := yaml.safe_load(blocks(PAGE, "yaml")[1]))
    made["services"]["server"]["shm"] = "8gb"
    with pytest.raises(jsonschema.ValidationError, match="shm"):
        schema.validate(made)


def test_manifests_give_shards_their_memory() -> None:
    """As the page says: the limit is for the workers of a pod, with their /dev/shm."""
    cluster, _ = yaml.safe_load_all(blocks(PAGE, "yaml")[0])
    pod = cluster["spec"]["worker"]["spec"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    words = container["args"]
    said = dict(zip(words[2::2], words[3::2], strict=True))
    shm = parse_bytes(volume["emptyDir"]["sizeLimit"])
    limit = parse_bytes(container["resources"]["limits"]["memory"])
    assert 0.5 * parse_bytes(said["--memory-limit"]) < shm
    assert shm < parse_bytes(said["--memory-limit"]) < limit
    # The operator deletes pods by that, see the page.
    assert said["--name"] == "$(DASK_WORKER_NAME)"
    assert "--nworkers" not in words
    assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert pod["terminationGracePeriodSeconds"] > 4
    assert said["--resources"] == "PS=1"


def test_the_job_of_slurm(tmp_path: Path) -> None:
    """Its script has what a worker of daskps needs, as dask-jobqueue writes it."""
    pytest.importorskip("dask_jobqueue")
    (code,) = blocks(PAGE, "py")
    script = run_python(f"{code}\ncluster.close()", tmp_path)
    (line,) = (
        of for of in script.splitlines() if "dask_worker" in of or "dask worker" in of
    )
    for words in ("--preload daskps.preload", "--nworkers 2", "--lifetime 230m"):
        assert words in line


SSHD = """\
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
StrictModes no
PidFile none
SetEnv PYTHONPATH={root}
"""


def test_a_cluster_by_ssh(tmp_path: Path) -> None:
    """Of a server on loopback; scheduler and workers have the preload of the page."""
    pytest.importorskip("asyncssh")
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if sshd is None:
        pytest.skip("there is no sshd")
    for name in ("host", "user"):
        made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
        subprocess.run([*made, str(tmp_path / name)], check=True, timeout=60)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = tmp_path / "config"
    config.write_text(SSHD.format(port=port, folder=tmp_path, root=ROOT))
    run = [sys.executable, "-c", BY_SSH, str(port), str(tmp_path / "user")]
    preload = re.findall("export (.*)='(.*)'", blocks(PAGE, "bash")[1])
    here = os.pathsep.join([str(ROOT), *sys.path])
    env = {**os.environ, "PYTHONPATH": here, **dict(preload)}
    with subprocess.Popen([sshd, "-D", "-f", str(config)]) as server:
        try:
            done = subprocess.run(
                run, env=env, capture_output=True, text=True, timeout=60
            )
        finally:
            server.terminate()
    assert done.stdout == "[True, True] [-1.0, -1.0]\n", done.stderr


BY_SSH = """\
import getpass, sys
import numpy as np
from distributed import Client, SSHCluster
import daskps

def has_host(dask_worker):
    return "daskps_call" in dask_worker.handlers

about = {"port": int(sys.argv[1]), "client_keys": [sys.argv[2]], "known_hosts": None}
with SSHCluster(
    ["127.0.0.1"] * 3,
    connect_options={**about, "username": getpass.getuser()},
    scheduler_options={"port": 0, "dashboard_address": "127.0.0.1:0"},
    worker_options={"nthreads": 1},
    remote_python=sys.executable,
) as cluster, Client(cluster) as client:
    client.wait_for_workers(2)
    has = list(client.run(has_host).values())
    params = {"w": np.zeros(2)}
    with daskps.create(params, optimizer=daskps.optim.SGD(1.0)) as store:
        store.push({"w": np.ones(2)})
        print(has, store.pull()["w"].tolist())
"""
