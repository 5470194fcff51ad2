"""The benchmarks: their command line, their reports, and every peer that is here."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from daskps import config
from tests.benchmarks import (
    against,
    busy,
    clusters,
    command,
    index,
    jobs,
    memory,
    pairs,
    report,
    rounds,
    rows,
)
from tests.benchmarks import codecs as codecs_bench
from tests.benchmarks.jobs import LEARNING_RATE, StepJob
from tests.benchmarks.pairs import Comparison
from tests.benchmarks.peers import (
    Peer,
    PeerError,
    actors,
    allreduce,
    dask,
    gang,
    limit,
    table_servers,
)
from tests.benchmarks.peers.tables import DIM, RATE, TableJob
from tests.kernels.compiling import kept

SLOW = Comparison("BSP round, 1 KiB, 2 + 2", "Snail", (1e-3, 2e-3, 1e-3), (3e-3,) * 3)
FAST = Comparison(
    "training",
    "Hare",
    (2e-3, 4e-3),
    (1e-3, 1e-3),
    ways=("message", "process"),
    is_rate=True,
)
TINY = [StepJob(kind, 2048, 2, 2) for kind in ("get", "pullpush", "round", "train")]


# -- the command line ----------------------------------------------------------


def test_help_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        command.main(["--help"])
    assert done.value.code == 0
    said = capsys.readouterr().out
    for name in command.NAMES:
        assert f"{name}:" in said
        assert command.parser_of(name).format_help()
        assert callable(importlib.import_module(f"tests.benchmarks.{name}").run)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "required: NAME"),
        (["nope"], "invalid choice: 'nope'"),
        (["train", "--peers", "limit,nope"], "no peer nope; there are limit, mpi"),
        (["train", "--close", "nope"], "invalid choice: 'nope'"),
        (["train", "--pairs", "0"], "'0' is no whole number that is at least 1"),
        (["kernels", "--pairs", "x"], "'x' is no whole number that is at least 1"),
        (["graph", "--rounds", "0"], "'0' is no whole number that is at least 1"),
        (["train", "--seconds", "nan"], "'nan' is no number of seconds above 0"),
        (["memory", "--limit-mib", "0"], "'0' is no whole number that is at least 1"),
        (["memory", "--rounds", "0"], "'0' is no whole number that is at least 1"),
        (["scaling", "--hosts", "0"], "'0' is no whole number that is at least 1"),
        (["scaling", "--kib", "1,-1"], "'-1' is no whole number that is at least 1"),
        (["scaling", "--seconds", "0"], "'0' is no number of seconds above 0"),
        (["train", "--json", "/no/such/file"], "there is no folder /no/such"),
        (["rounds", "--long", "9", "--close", "machine"], "a cluster of its own"),
        (["graph", "--peers", "limit"], "unrecognized arguments"),
        (["scaling", "--close", "process"], "unrecognized arguments"),
    ],
)
def test_what_is_unknown_is_refused(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        command.main(argv)
    assert done.value.code == 2
    assert said in capsys.readouterr().err


def test_ways_of_a_cluster_that_runs_cannot_be_closed() -> None:
    given = ["--scheduler", "tcp://127.0.0.1:1", "--close", "process"]
    options = command.parser_of("train").parse_args(given)
    with pytest.raises(SystemExit, match="DASK_DASKPS__WAYS__"):
        command.cluster(options, 1).__enter__()


def test_ways_are_closed_in_one_place() -> None:
    assert "process" in clusters.WAYS
    with clusters.closed(["process"]):
        assert not config.load().process_way
    assert config.load().process_way


def test_steps_beside_bare_close_what_is_asked() -> None:
    assert rounds._series([]) == {"RPC": clusters.WAYS, "all ways": []}
    assert rounds._series(["machine"])["without machine"] == ["machine"]


def test_a_job_that_does_not_exist_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["rounds", "--job", "nope"]) == 0
    assert "nothing was measured" in capsys.readouterr().out


# -- pairs and reports ---------------------------------------------------------


def test_pairs_alternate_who_begins() -> None:
    order: list[str] = []

    def side(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    found = pairs.alternate(lambda: side("a", 1.0), lambda: side("b", 2.0), 3)
    assert found == ((1.0,) * 3, (2.0,) * 3)
    assert "".join(order) == "abbaab"


@pytest.mark.parametrize(
    ("seconds_of_a_step", "steps"), [(1.0, 3), (0.01, 30), (1e-9, 50_000)]
)
def test_samples_take_about_as_long(seconds_of_a_step: float, steps: int) -> None:
    assert pairs.steps_in(0.3, lambda n: seconds_of_a_step) == steps


def test_ratios_are_of_pairs() -> None:
    assert SLOW.ratios == pytest.approx([3.0, 1.5, 3.0])
    assert SLOW.ratio == pytest.approx(3.0)
    assert SLOW.spread == pytest.approx((1.5, 3.0))
    assert SLOW.medians == (1e-3, 3e-3)


def test_the_table_shows_medians_ratios_and_ways() -> None:
    row = report.line(SLOW)
    assert row.split()[-6:] == ["1", "ms", "3", "ms", "3.00", "(1.50-3.00)"]
    row = report.line(FAST)
    assert "333/s   1,000/s  0.38 (0.25-0.50)  by message, process" in row
    assert [report.duration(s) for s in (12.34, 2e-6)] == ["12.3 s", "2 us"]


def test_json_holds_every_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    found = report.Report("rounds", Namespace(pairs=3, json=str(file)))
    found.add(SLOW)
    found.missing["ray"] = "Traceback\nray is not installed"
    found.end()
    said = capsys.readouterr().out
    assert said.count("left out ray: ray is not installed") == 1
    assert "numpy " + np.__version__ in said
    read = json.loads(file.read_text("utf-8"))
    (row,) = read["comparisons"]
    assert row["ours_samples"] == [1e-3, 2e-3, 1e-3]
    assert row["ratio_range"] == pytest.approx([1.5, 3.0])
    assert read["options"]["pairs"] == 3
    assert read["missing"] == found.missing
    assert {"cores", "load", "versions"} <= set(read["machine"])


# -- jobs ----------------------------------------------------------------------


class Recorder:
    """A side that notes what is called."""

    def __init__(self, elements: int) -> None:
        self.weights, self.gradient = jobs.started(elements), jobs.started(elements)
        self.calls: list[str] = []

    def pull(self) -> None:
        self.calls.append("pull")

    def push(self) -> None:
        self.calls.append("push")

    def round(self) -> None:
        self.calls.append("round")


@pytest.mark.parametrize(
    ("kind", "calls", "title"),
    [
        ("get", ["pull"], "get, 2 KiB, 1 + 2"),
        ("pullpush", ["pull", "push"], "pull + push + apply, 2 KiB, 1 + 2"),
        ("round", ["round"], "BSP round, 2 KiB, 1 + 2"),
        ("train", ["round"], "BSP logistic regression, 512 weights, 1 + 2"),
    ],
)
def test_a_job_says_what_a_step_is(kind: Any, calls: list[str], title: str) -> None:
    job = StepJob(kind, 2048, 1, 2)
    side = Recorder(job.elements)
    jobs.step(job, side, 0)()
    assert side.calls == calls
    assert job.title == title
    assert (side.gradient != 1e-3).any() == (kind == "train")


def test_the_gradient_is_that_of_logistic_regression() -> None:
    learn, out = jobs.Gradient(3, 40), jobs.started(40)
    w = np.linspace(-0.1, 0.1, 40, dtype=np.float32)
    learn(w, out)
    X, y = learn._X.astype("f8"), learn._y

    def loss(w: Any) -> Any:
        return np.mean(np.logaddexp(0, X @ w) - y * (X @ w))

    near = [
        (loss(w + 1e-5 * e) - loss(w - 1e-5 * e)) / 2e-5 for e in np.eye(40)[[0, 7, 39]]
    ]
    np.testing.assert_allclose(out[[0, 7, 39]], near, atol=1e-4)


def test_cuts_are_those_of_shards() -> None:
    assert jobs.cuts(7, 3) == [slice(0, 3), slice(3, 5), slice(5, 7)]
    assert [c.stop - c.start for c in jobs.cuts(1, 2)] == [1, 0]


# -- what peers compute --------------------------------------------------------


def test_a_round_of_the_limit_applies_the_mean(tmp_path: Path) -> None:
    job = StepJob("round", 2048, 2, 2)
    a, b = (limit._Segment(gang.Place(rank, 2, 0, tmp_path), job) for rank in (0, 1))
    a.gradient[:], b.gradient[:] = 1.0, 2.0
    for shard in (0, 1):
        a._deliver(shard, 0)
        assert not a._complete(shard, 0)
        b._deliver(shard, 0)
        assert a._complete(shard, 0)
    np.testing.assert_allclose(b._sides[1], -1.5 * LEARNING_RATE, rtol=1e-6)
    for lock in (*a._locks, *b._locks):
        os.close(lock)


def test_an_actor_waits_for_all_of_a_round() -> None:
    server = actors.Server(3, trainers=2)
    first = server.deliver(np.ones(3, "f4"))
    assert (first, server.after(first)) == (1, None)
    assert server.deliver(np.full(3, 2, "f4")) == 1
    expected = 1e-3 - 1.5 * LEARNING_RATE
    weights: Any = server.after(1)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert server.deliver(np.ones(3, "f4")) == 2


def test_an_allreduce_applies_the_mean_when_it_trains() -> None:
    def sum_up(gradient: Any) -> None:
        gradient *= 3  # as if the other had twice as much

    side = allreduce._Side(StepJob("train", 16, 2, 2), 2, sum_up)
    side.gradient[:] = 1.0
    side.round()
    np.testing.assert_allclose(side.weights, 1e-3 - 1.5 * LEARNING_RATE, rtol=1e-6)
    assert not allreduce.covers(StepJob("get", 16, 2, 2))
    assert not allreduce.covers(StepJob("train", 16, 1, 1))


def test_plain_dask_applies_the_mean() -> None:
    ones = np.ones(2, "f4")
    updated = dask._updated(np.zeros(2, "f4"), ones, 2 * ones)
    np.testing.assert_allclose(updated, -1.5 * LEARNING_RATE, rtol=1e-6)


# -- every peer does every job -------------------------------------------------


def peer_of(name: str) -> Peer:
    peer = against.PEERS[name]
    if reason := peer.missing():
        pytest.skip(reason)
    return peer


def does_all_jobs(peer: Peer, client: Any, n: int = 2) -> None:
    with peer.opened(n, n, client) as measure:
        for job in filter(peer.covers, TINY):
            shaped = replace(job, trainers=n, servers=n)
            assert 0 < measure(shaped, 3) < 60, shaped


MARKS = {
    "ray": [pytest.mark.leaky, pytest.mark.slow],
    "gloo": [pytest.mark.slow],
    "torch_rpc": [pytest.mark.slow],
}


@pytest.mark.parametrize(
    "name",
    [
        # Ray keeps threads of its own; those with torch take five seconds to start.
        pytest.param(name, marks=MARKS.get(name, []))
        for name in against.PEERS
        if name not in against.ON_DASK
    ],
)
def test_processes_do_every_job_and_end(name: str) -> None:
    # Each process imports torch, or takes a core for itself: no more than needed.
    does_all_jobs(peer_of(name), None, 1 if name in {"torch_rpc", "mpi"} else 2)


@pytest.mark.parametrize("name", against.ON_DASK)
def test_dask_does_every_job(name: str, client: Client) -> None:
    does_all_jobs(peer_of(name), client)


def test_an_error_in_a_process_is_told() -> None:
    bad = StepJob("nonsense", 2048, 1, 1)  # type: ignore[arg-type]  # the point
    with (
        gang.launched("limit", 1) as measure,
        pytest.raises(PeerError, match="no job 'nonsense'"),
    ):
        measure(bad, 3)


def test_a_process_that_does_not_start_is_told() -> None:
    with (
        pytest.raises(PeerError, match="No module named"),
        gang.launched("nonsense", 1),
    ):
        pass


# -- side by side --------------------------------------------------------------


def fake(title: str, error: str = "") -> Peer:
    """Return a peer that is always there."""

    @contextmanager
    def opened(trainers: int, servers: int, client: Any) -> Any:
        def measure(job: StepJob, steps: int) -> float:
            if error:
                raise PeerError(error)
            return 0.5

        yield measure

    return Peer(title, opened, covers=lambda job: job.kind == "round")


def test_a_peer_that_fails_is_left_out_and_the_others_go_on(client: Client) -> None:
    field = against.Field({"bad": fake("Bad", "broke"), "good": fake("Good")})
    (found,) = field.compare(client, TINY, Namespace(pairs=2, seconds=0.01))
    assert (found.job, found.peer) == ("BSP round, 2 KiB, 2 + 2", "Good")
    assert found.theirs == (0.5, 0.5)
    assert len(found.ours) == 2
    assert set(found.ways) <= {"process", "message"}
    assert found.ways
    assert (field.missing, list(field.peers)) == ({"bad": "broke"}, ["good"])


def test_peers_are_chosen_by_name_and_what_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = against.chosen(None)
    assert list(found.peers) == ["limit", "actors", "dask"]
    assert found.missing["gloo"] == "torch is not installed"
    assert list(against.chosen(["dask", "ray"]).peers) == ["dask"]
    assert list(against.chosen(None, on_dask=True).peers) == ["actors", "dask"]


def test_a_benchmark_against_the_users_own_cluster(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, address = tmp_path / "found.json", client.scheduler_info()["address"]
    small = ["--weights", "512", "--pairs", "1", "--seconds", "0.01"]
    where = ["--scheduler", address, "--json", str(file)]
    assert command.main(["train", *small, *where, "--job", "1 + 1"]) == 0
    rows = json.loads(file.read_text("utf-8"))["comparisons"]
    assert [row["peer"] for row in rows] == ["Dask Actors", "plain Dask"]
    assert {row["job"] for row in rows} == {
        "BSP logistic regression, 512 weights, 1 + 1"
    }
    assert "/s" in capsys.readouterr().out


def test_pulls_from_a_busy_worker(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, address = tmp_path / "found.json", client.scheduler_info()["address"]
    small = ["--busy", "--mib", "1", "--pairs", "2", "--seconds", "0.01"]
    where = ["--scheduler", address, "--json", str(file)]
    assert command.main(["pullpush", *small, *where]) == 0
    rows = json.loads(file.read_text("utf-8"))["comparisons"]
    assert [(row["job"], row["peer"]) for row in rows] == [
        ("pull of 256 B, owner busy", "owner idle"),
        ("pull of 1,048,576 B, owner busy", "owner idle"),
    ]
    # In this cluster nothing but messages leads from one process to the other.
    assert [row["ways"] for row in rows] == [["message"]] * 2
    assert not any(client.run(busy._is_busy).values())
    assert "owner idle" in capsys.readouterr().out


def test_memory_is_kept_where_the_bound_is_and_nobody_was_paused() -> None:
    found = memory.Found("bsp", 10, 20, blocks=7, bound=7, own=3, shared=4, trouble=[])
    assert found.is_kept
    assert not replace(found, blocks=8).is_kept
    assert not replace(found, trouble=["w: paused"]).is_kept
    assert memory.line(replace(found, trouble=["w: paused"])).endswith("w: paused")


@pytest.mark.slow  # four workers of a gigabyte
@pytest.mark.leaky
def test_a_model_as_large_as_a_workers_memory_pauses_nobody() -> None:
    assert command.main(["memory", "--rounds", "2"]) == 0


def test_rows_are_set_beside_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--rows", "2000", "--named", "50", "--many", "100", "--pairs", "2"]
    large = ["--large", "100000", "--cache-dir", str(config.load().cache)]
    rows.run(command.parser_of("rows").parse_args(small + large))
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 10
    assert said[2].startswith("pull + push ")
    assert " to " in said[-1]


def test_bench_of_rows_by_id(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--rows", "300,40", "--named", "50", "--looks", "2"]
    few += ["--cache-dir", kept()]
    index.run(command.parser_of("index").parse_args(few))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["300", "40"]


def test_servers_of_tables_have_each_row_once() -> None:
    for law in ("uniform", "zipf", "as zipf"):
        job = TableJob(rows=101, named=40, trainers=1, servers=3, ids=law)
        ids = next(job.turns(0))
        assert ids.min() >= 0
        assert ids.max() < job.rows
        assert (law == "zipf") == (len(np.unique(ids)) < len(ids))
        servers = [table_servers.Served(job, i) for i in range(job.servers)]
        out = np.zeros((len(ids), DIM), "f4")
        for part, server in zip(table_servers.parts(job, ids), servers, strict=True):
            server.push(ids[part], np.ones((len(ids[part]), DIM), "f4"))
            out[part] = server.pull(ids[part])
        times = np.array([(ids == one).sum() for one in ids])
        expected = np.repeat(1 - RATE * times[:, None], DIM, axis=1)
        np.testing.assert_allclose(out, expected, rtol=1e-6)


class HashServer:
    """As much of a connection to Redis as rows take."""

    def __init__(self) -> None:
        self.hashes: dict[str, dict[bytes, bytes]] = {}

    def delete(self, name: str) -> None:
        self.hashes.pop(name, None)

    def hset(self, name: str, mapping: dict[int, bytes]) -> None:
        fields = {b"%d" % key: value for key, value in mapping.items()}
        self.hashes.setdefault(name, {}).update(fields)

    def hmget(self, name: str, keys: list[int]) -> list[bytes | None]:
        return [self.hashes[name].get(b"%d" % key) for key in keys]


def test_a_trainer_of_redis_updates_the_rows_that_it_has_read() -> None:
    job = TableJob(rows=101, named=40, trainers=1, servers=3)
    servers = [HashServer() for _ in range(job.servers)]
    trainer = table_servers._ByRedis(job, 0, servers)
    assert [len(server.hashes["rows"]) for server in servers] == [34, 34, 33]
    times, turns = np.zeros(job.rows, int), job.turns(0)
    for _ in range(5):
        ids = next(turns)
        trainer.step()
        np.testing.assert_allclose(trainer.out[:, 0], 1 - 1e-6 * times[ids], rtol=1e-6)
        times[ids] += 1
    held = [server.hashes["rows"].values() for server in servers]
    rows = np.array([np.frombuffer(value, "f4") for part in held for value in part])
    expected = np.repeat(1 - 1e-6 * times[:, None], DIM, axis=1)
    np.testing.assert_allclose(rows, expected, rtol=2e-7)
    assert times.max() > 2


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=MARKS.get(n, [])) for n in ("mpi", "redis", "ray")],
)
def test_peers_pull_and_push_rows(name: str) -> None:
    peer = table_servers.PEERS[name]
    if reason := peer.missing():
        pytest.skip(reason)
    n = 1 if name == "mpi" else 2
    with peer.opened(n, n, None) as measure:
        job: Any = TableJob(rows=101, named=40, trainers=n, servers=n)
        assert 0 < measure(job, 3) < 60


def test_codecs_are_measured_beside_a_copy(capsys: pytest.CaptureFixture[str]) -> None:
    """What they save is exact; a link on which it takes as long as it costs is the last."""
    assert command.main(["codecs", "--mib", "1", "--pairs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    saved = {line[:12].strip(): float(line[12:21]) for line in lines}
    assert saved == {
        "bf16": 0.5,
        "fp16": 0.5,
        "int8": 0.2539,
        "2bit": 0.0625,
        "topk 0.01": 0.02,
        "topk 0.001": 0.002,
    }
    assert codecs_bench.pays_below(10**9, 0.5) == 2e9
