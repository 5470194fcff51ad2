"""The benchmarks: how they compare, what they report, and that each of them runs."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client

from daskps import config
from daskps.cluster.sockets.templates import unpack_template
from daskps.layout.arrays import Layout
from tests.benchmarks import (
    checkpoint,
    clusters,
    codecs,
    command,
    crowd,
    jobs,
    memory,
    peers,
    prediction,
    report,
    saves,
    snapshot,
    sockets,
    steps_here,
    tables,
    wire,
    workers,
)
from tests.benchmarks.jobs import LEARNING_RATE, StepJob
from tests.benchmarks.rows import DIM
from tests.benchmarks.samples import Bar, Job, LeftOutError, Sample, lasting, steps_in
from tests.support import cleaned, local_cluster

# -- the command line ----------------------------------------------------------


def test_help_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        command.main(["--help"])
    assert done.value.code == 0
    said = capsys.readouterr().out
    assert len(command.BENCHMARKS) == 22
    for name, of in command.BENCHMARKS.items():
        assert name in said
        assert of.about.split()[0] in said


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "required: NAME"),
        (["nope"], "invalid choice: 'nope'"),
        (["train", "--pairs", "0"], "'0' is no whole number that is at least 1"),
        (["train", "--seconds", "nan"], "'nan' is no number of seconds above 0"),
        (["scaling", "--kib", "1,-1"], "'-1' is no whole number that is at least 1"),
        (["train", "--json", "/no/such/file"], "there is no folder /no/such"),
        (["wire", "--only", "small,nope"], "there is no part nope; there are small, s"),
        (["tree", "/no/such"], "is no checkout of daskps"),
        (["graph", "--peers", "limit"], "unrecognized arguments"),
    ],
)
def test_what_is_unknown_is_refused(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        command.main(argv)
    assert done.value.code == 2
    assert said in capsys.readouterr().err


def test_carriers_are_closed_in_one_place() -> None:
    assert "process" in clusters.CARRIERS
    with clusters.closed(["process"]):
        assert not config.load().process_carrier
    assert config.load().process_carrier


# -- samples, bars and reports -------------------------------------------------


def made(ours: Any = (10.0, 30.0), other: Any = (20.0, 20.0), **how: Any) -> Job:
    """Return a job that gives these seconds in turn, and is measured."""
    taken = {
        name: [Sample(s, {"p99": 2 * s, "by socket": 0.5}) for s in every]
        for name, every in (("ours", ours), ("other", other))
    }
    turns = {name: iter(every) for name, every in taken.items()}
    job = Job("job", {name: partial(next, each) for name, each in turns.items()}, **how)
    job.measure(len(ours))
    return job


def test_sides_alternate_who_begins() -> None:
    order: list[str] = []

    def side(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    sides = {"a": partial(side, "a", 1.0), "b": partial(side, "b", 2.0)}
    job = Job("job", sides, warm=1)
    job.measure(3)
    assert job.found == {"a": [Sample(1.0)] * 3, "b": [Sample(2.0)] * 3}
    assert "".join(order) == "ab" + "abbaab"


@pytest.mark.parametrize(
    ("seconds_of_a_step", "steps"), [(1.0, 3), (0.01, 30), (1e-9, 50_000)]
)
def test_samples_take_about_as_long(seconds_of_a_step: float, steps: int) -> None:
    asked = []

    def measure(n: int) -> float:
        asked.append(n)
        return seconds_of_a_step

    assert steps_in(0.3, measure) == steps
    side = lasting(0.3, measure)
    asked.clear()
    side(), side()
    assert asked[-2:] == [steps] * 2


def test_ratios_are_of_pairs() -> None:
    job = made((1.0, 2.0, 1.0), (3.0, 3.0, 3.0))
    assert job.ratios("other") == pytest.approx([3.0, 1.5, 3.0])
    assert job.median("ours") == 1.0
    assert job.median("other", "p99") == 6.0


@pytest.mark.parametrize(
    ("bar", "reached", "kept"),
    [
        (Bar("ours", "other", 1.0), [0.5, 1.5], True),
        (Bar("ours", "other", 0.9), [0.5, 1.5], False),
        # The other's time over ours: 2 and 2 / 3, in the median 4 / 3.
        (Bar("ours", "other", 1.3, at_least=True), [2.0, 2 / 3], True),
        (Bar("ours", "other", 1.4, at_least=True), [2.0, 2 / 3], False),
        (Bar("ours", "", 19.0), [10.0, 30.0], False),
        (Bar("ours", "", 40.0, "p99"), [20.0, 60.0], True),
        (Bar("ours", "", 41.0, "p99", at_least=True), [20.0, 60.0], False),
    ],
)
def test_a_bar_is_of_the_median_of_the_rounds(
    bar: Bar, reached: list[float], kept: bool
) -> None:
    found = made().found
    assert bar.reached(found) == pytest.approx(reached)
    assert bar.is_kept(found) is kept


def test_the_table_shows_medians_ratios_figures_and_bars() -> None:
    first, second = report.lines(made(bars=[Bar("ours", "other", 2.0)]))
    assert first.split()[:8] == [
        "job",
        "other",
        "20",
        "s",
        "20",
        "s",
        "1.33",
        "(0.67-2.00)",
    ]
    assert first.endswith("p99 40 s, 40 s;  by socket 50%, 50%")
    assert second.strip() == "ours / other: 1 (0.5-1.5), bar <= 2: kept"
    (line,) = report.lines(made((2e-3, 4e-3), (1e-3, 1e-3), is_rate=True))
    assert "333/s   1,000/s  0.38 (0.25-0.50)" in line
    alone = Job("job", {"ours": lambda: 2e-6})
    alone.measure(2)
    assert next(report.lines(alone)).split()[1:] == [
        "2",
        "us",
        "(2",
        "us",
        "to",
        "2",
        "us)",
    ]
    assert report.duration(3e-8) == "30 ns"


def left_out() -> float:
    raise LeftOutError("why\nit is not here")


def test_what_is_found_is_printed_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples, notes and verdicts; jobs that were not asked for are not measured."""
    file = tmp_path / "found.json"
    options = Namespace(pairs=2, job="job", json=str(file))

    def found(_: Namespace) -> Iterator[report.Found]:
        yield Job("job", {"ours": lambda: 1.0, "other": lambda: 2.0})
        yield Job("another job", {"ours": left_out})
        yield Job("not asked for", {"ours": left_out})
        yield "a note"
        yield {"more": 7}
        yield report.Verdict("it holds", True)
        raise LeftOutError("the end")

    assert report.run(options, found) == 0
    said = capsys.readouterr().out
    assert "left out another job: it is not here\na note\nit holds: kept\n" in said
    assert "left out the rest: the end" in said
    assert "asked for" not in said
    assert "numpy " + np.__version__ in said
    read = json.loads(file.read_text("utf-8"))
    (job,) = read["jobs"]
    assert [s["seconds"] for s in job["samples"]["other"]] == [2.0, 2.0]
    assert (read["more"], read["options"]["pairs"]) == (7, 2)
    assert {"cores", "load", "versions"} <= set(read["machine"])


def test_what_does_not_hold_is_the_exit_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = Namespace(pairs=1, job="", json=None)
    found = [report.Verdict("it holds", True), report.Verdict("this does not", False)]
    assert report.run(options, lambda _: iter(found)) == 1
    assert "this does not: MISSED" in capsys.readouterr().out
    assert report.run(options, lambda _: iter([])) == 0
    assert "nothing was measured" in capsys.readouterr().out


# -- what is measured ----------------------------------------------------------


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
    job.step(side, 0)()
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


def test_a_round_of_the_limit_applies_the_mean(tmp_path: Path) -> None:
    job = StepJob("round", 2048, 2, 2)
    a, b = (peers.LimitTrainer(job, peers.Place(i, 2, tmp_path)) for i in (0, 1))
    a.gradient[:], b.gradient[:] = 1.0, 2.0
    for shard in (0, 1):
        a.deliver(shard, 0)
        assert not a.is_complete(shard, 0)
        b.deliver(shard, 0)
        assert a.is_complete(shard, 0)
    np.testing.assert_allclose(b._sides[1], -1.5 * LEARNING_RATE, rtol=1e-6)
    for lock in (*a._locks, *b._locks):
        lock.close()


@pytest.mark.parametrize("law", ["uniform", "zipf", "as zipf"])
def test_trainers_of_tables_change_each_row_that_they_name(law: str) -> None:
    job = tables.TableJob(rows=101, named=40, trainers=1, servers=1, ids=law)
    limit = tables.LimitTable(np.ones((job.rows, DIM), np.float32))
    job.step(limit, 0)()
    ids = next(job.turns(0))
    assert (law == "zipf") == (len(np.unique(ids)) < len(ids))
    times = np.bincount(ids, minlength=job.rows)[:, None]
    expected = np.repeat(1 - 1e-6 * times, DIM, axis=1)
    np.testing.assert_allclose(limit._w, expected, rtol=1e-6)


def test_a_bare_server_does_the_work_of_a_shard() -> None:
    weights, (here, there) = sockets.BareWeights(4), socket.socketpair()
    with here, there:
        serving = threading.Thread(target=sockets.answer, args=(there, weights, True))
        serving.start()
        caller = sockets.BareCaller(4, here)
        caller.push()
        caller.both()
        here.shutdown(socket.SHUT_RDWR)
        serving.join()
    found = np.frombuffer(caller.answer, np.float32, offset=sockets.ANSWER_NBYTES)
    np.testing.assert_allclose(found, -1e-6, rtol=1e-6)
    np.testing.assert_allclose(weights.read(), -2e-6, rtol=1e-6)


def test_hosts_know_the_template_of_what_a_crowd_pushes() -> None:
    layout = Layout.build({"w": ((crowd.ELEMENTS,), "float32")}, 1)
    template = unpack_template(crowd._template("s", 7), lambda *_: layout)
    [part] = template.call.parts
    assert (part.step.kind, part.step.producer) == ("gradient", 7)
    assert template.most_nbytes == 4 * crowd.ELEMENTS


def test_memory_is_kept_where_the_bound_is_and_nobody_was_paused() -> None:
    found = memory.Found("bsp", 10, 20, blocks=7, bound=7, own=3, shared=4, trouble=[])
    assert found.is_kept
    assert not replace(found, blocks=8).is_kept
    assert not replace(found, trouble=["w: paused"]).is_kept


# -- each of them runs ---------------------------------------------------------


def run(tmp_path: Path, *argv: str) -> dict[str, Any]:
    """Return what a benchmark writes, by the titles of its jobs the sides."""
    file = tmp_path / "found.json"
    assert command.main([*argv, "--pairs", "1", "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    for job in found["jobs"]:
        for side, samples in job["samples"].items():
            # Of a copy they are the difference of two, which may be below zero.
            is_time = side == "copy" or all(sample["seconds"] > 0 for sample in samples)
            assert is_time, job["job"]
    return found


def sides(found: dict[str, Any]) -> dict[str, list[str]]:
    return {job["job"]: [*job["samples"]] for job in found["jobs"]}


def hide_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave gloo out: each process that imports torch takes five seconds."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (name != "torch" and found(name)) or None,
    )


@pytest.fixture
def here(client: Client, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Have benchmarks measure on the shared cluster, small models and tables."""

    @contextmanager
    def local(workers: int, **how: Any) -> Iterator[Client]:
        yield client

    monkeypatch.setattr(clusters, "local", local)
    hide_torch(monkeypatch)
    monkeypatch.setattr(snapshot, "BIG", 1000)
    monkeypatch.setattr(prediction, "BIG", 2000)
    monkeypatch.setattr(saves, "ROWS", 2000)
    monkeypatch.setattr(saves, "PUSHED", 1000)
    monkeypatch.setattr(checkpoint, "CHUNK_NBYTES", 4000)
    monkeypatch.setattr(tables, "_PULLS", 3)
    monkeypatch.setattr(tables, "_PUSHES", 3)
    monkeypatch.setattr(steps_here, "CALLS", 40)
    monkeypatch.setattr(steps_here, "HUGE", (2**12, 1))
    monkeypatch.setattr(steps_here, "WARM_SECONDS", 0)
    return client


LIMIT = ["ours", peers.LIMIT]


def test_steps_of_trainers(here: Client, tmp_path: Path) -> None:
    few = ["--seconds", "0.001"]
    found = sides(run(tmp_path, "pullpush", *few, "--mib", "1"))
    assert [*found.values()] == [LIMIT] * 4
    found = sides(run(tmp_path, "rounds", *few, "--mib", "1"))
    assert [*found.values()] == [LIMIT] * 2
    found = sides(run(tmp_path, "train", *few, "--weights", "512", "--job", "2 + 2"))
    assert found == {"BSP logistic regression, 512 weights, 2 + 2": LIMIT}


@pytest.mark.slow  # each process imports torch, which takes five seconds
def test_gloo_makes_rounds_and_trains(client: Client) -> None:
    pytest.importorskip("torch")
    for kind in ("round", "train"):
        job = StepJob(kind, 2048, 2, 2)
        with peers.opened(client, peers.GLOO, job) as measure:
            assert 0 < measure(3) < 60


def test_rows_of_tables(here: Client, tmp_path: Path) -> None:
    few = ["--rows", "2000", "--named", "50", "--large", "5000", "--seconds", "0.001"]
    found = sides(run(tmp_path, "tables", *few))
    assert len(found) == 8
    assert found["50 of 2,000 rows, 1 + 1, unbounded"] == LIMIT
    assert found["pull of 64 rows"] == ["ours", "loop alone"]


def test_rounds_of_the_task_graph(here: Client, tmp_path: Path) -> None:
    found = run(tmp_path, "graph", "--rounds", "2")
    assert sides(found)["round of 8 parts, 1 MB"] == ["graph", "plain Dask"]
    assert len(found["jobs"]) == 4
    assert {*found["jobs"][0]["samples"]["graph"][0]["more"]} == {
        "scheduler",
        "workers",
    }


def test_saves_and_snapshots(here: Client, tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    # Shards are held by a limit that pauses workers: not those of others.
    parts = ["--only", "peers,tables"]
    found = run(tmp_path, "checkpoint", *parts, "--nbytes", "40000")
    assert len(found["jobs"]) == 2 * 2 * 3 + 4
    few = ["--pushes", "40", "--producers", "1"]
    found = run(tmp_path, "snapshot", *few)
    assert found["verdicts"] == [["snapshots are consistent: []", True]]
    assert sides(found) == {
        "longest push of a second, snapshots": ["beside snapshots", "alone"]
    }


def test_tasks_that_predict(here: Client, tmp_path: Path) -> None:
    found = sides(run(tmp_path, "prediction", "--tasks", "2"))
    assert found == {"a task of 5 ms, 0 MB": ["a view", "at hand", "a pull each"]}


def test_what_else_runs_on_workers(here: Client, tmp_path: Path) -> None:
    found = sides(run(tmp_path, "overlap", "--mib", "1", "--steps", "1", "--device"))
    assert found["bsp, prefetch"] == ["prefetch", "in a row"]
    assert found["asp, train, double-buffer"] == ["parameters", "none"]
    assert len(run(tmp_path, "startup")["jobs"]) == 3


def test_estimators(here: Client, tmp_path: Path) -> None:
    found = run(tmp_path, "estimators", "--rows", "2000", "--chunks", "4")
    [names] = sides(found).values()
    assert names[:4] == [*(f"batch_size={n}" for n in (64, 256, 1024)), "Averaged"]
    assert names[-1] == "scikit-learn, one process"
    assert found["verdicts"][0][0].startswith("accuracies within 0.5%")


def test_shards_of_a_device(tmp_path: Path) -> None:
    """On the fake device, whose times say nothing; without one nothing is measured."""
    found = run(tmp_path, "gpu", "--device", "fake", "--mib", "1")
    assert [kept for _, kept in found["verdicts"]] == [True] * 4
    assert len(found["jobs"]) == 9
    found = run(tmp_path, "gpu", "--device", "cuda:99")
    assert found["jobs"] == []
    assert "left out the rest: no cuda:99" in found["notes"][0]


def test_loops_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of rows, of rows by id, of arrays and of codecs, whose savings are exact."""
    monkeypatch.setitem(sys.modules, "torch", None)  # five seconds to import
    cached = ["--cache-dir", str(config.load().cache)]
    few = ["--rows", "2000", "--named", "50", "--many", "100", "--large", "100000"]
    assert len(run(tmp_path, "rows", *few, *cached)["jobs"]) == 6
    found = run(tmp_path, "index", "--rows", "300,40", "--named", "50", *cached)
    ours = ["found", "bare read", "absent", "later push"]
    assert sides(found) == {"an id of 300": ours, "an id of 40": ours}
    assert len(found["notes"]) == 2
    found = run(tmp_path, "kernels", "--elements", "4096", *cached)
    assert sides(found)["SGD publish"][0] == "SGD publish"
    notes = run(tmp_path, "codecs", "--mib", "1")["notes"]
    assert [note.split(",")[0].strip() for note in notes] == [
        f"{name} sends {part} of the bytes"
        for name, part in (
            ("bf16", "0.5000"),
            ("fp16", "0.5000"),
            ("int8", "0.2539"),
            ("2bit", "0.0625"),
            ("topk 0.01", "0.0200"),
            ("topk 0.001", "0.0020"),
        )
    ]
    assert codecs.pays_below(10**9, 0.5) == 2e9


@pytest.mark.slow  # four workers of a gigabyte
@pytest.mark.leaky
def test_a_model_as_large_as_a_workers_memory_pauses_nobody() -> None:
    assert command.main(["memory", "--rounds", "2"]) == 0


@pytest.mark.slow  # a new worker comes after a kill
@pytest.mark.leaky
def test_kills_lose_no_push() -> None:
    assert command.main(["ends", "--kills", "2"]) == 0


def test_steps_of_checkouts(here: Client) -> None:
    with ExitStack() as stack:
        found = {name: job() for name, job in steps_here.jobs(here, stack).items()}
    assert len(found) == 26
    # No bound: timings decide no test, and a short job beside others may come to 0.
    assert all(isinstance(seconds, float) for seconds, _ in found.values())
    carriers = {way for _, carriers in found.values() for way in carriers}
    assert carriers <= {"process", "machine", "socket", "message"}


# -- calls between machines ----------------------------------------------------


@pytest.fixture(scope="module")
def apart() -> Iterator[Client]:
    settings = {"daskps.carriers.machine": False, "daskps.carriers.socket": True}
    with (
        dask.config.set({**settings, "distributed.worker.profile.enabled": False}),
        local_cluster(processes=False, protocol="tcp", threads=1) as client,
    ):
        yield client


@pytest.fixture
def machines(apart: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Have benchmarks measure in this process, where no way but a socket is open."""
    settings = {"daskps.carriers.process": False, "daskps.carriers.socket": True}
    monkeypatch.setattr(wire, "CROWD", 3)
    monkeypatch.setattr(wire, "LEAST", 1)
    monkeypatch.setattr(workers, "WARM_STEPS", 3)
    hide_torch(monkeypatch)

    @contextmanager
    def local(n: int, **how: Any) -> Iterator[Client]:
        yield apart

    monkeypatch.setattr(clusters, "local", local)
    with dask.config.set(settings), cleaned(apart):
        yield apart


@pytest.mark.leaky
def test_calls_between_machines(machines: Client, tmp_path: Path) -> None:
    parts = ["--only", "small,step,large,busy,many"]
    found = run(tmp_path, "wire", *parts, "--calls", "3", "--seconds", "0.01")
    carriers = sides(found)
    assert carriers["get, 1 KiB"] == ["socket", "message", "bare socket"]
    assert [*carriers] == [
        "get, 1 KiB",
        "push, 1 KiB",
        "BSP step, 1 KiB, 2 hosts, push + pull",
        "BSP step, 1 KiB, 2 hosts, pushpull",
        "pull + push + apply, 1 MiB",
        "pull + push + apply, 16 MiB",
        "get, 1 KiB, server busy",
        "3 connections push 64 B: longest calls",
        "get, 1 KiB, beside 3 idle sockets",
    ]
    assert sum("left out" in note for note in found["notes"]) == 2  # gloo
    for job in found["jobs"]:
        for sample in job["samples"].get("message", []):
            assert sample["more"]["by socket"] == 0


@pytest.mark.leaky
def test_what_a_second_copy_adds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @contextmanager
    def local(n: int, **how: Any) -> Iterator[Client]:
        with (
            clusters.inside(n, by_socket=True) as cluster,
            Client(cluster) as client,
        ):
            yield client

    monkeypatch.setattr(clusters, "local", local)
    monkeypatch.setattr(workers, "WARM_STEPS", 3)
    found = run(tmp_path, "copies", "--fewer", "100")
    assert sides(found) == {
        "added to a push, 0 kB, SGD": ["copy", "on one core", "a core each"],
        "added to a push, 10 kB, SGD": ["copy", "on one core", "a core each"],
        "added to a push, 83 kB, SGD": ["copy", "on one core", "a core each"],
        "added to a push, 83 kB, Adam": ["copy", "on one core", "a core each"],
        "8 pushes of 83 kB at once": ["two copies", "one copy"],
        "BSP step, 1 kB, 2 trainers": ["two copies", "one copy"],
    }
    for sample in found["jobs"][0]["samples"]["copy"]:
        assert sample["more"]["two copies"] > 0


@pytest.mark.leaky
def test_calls_by_socket_are_counted(machines: Client) -> None:
    pair = workers.Pair.of(machines)
    with pair.store(8) as store:
        assert pair.call(store, "get", 10, True).more["by socket"] == 1
        assert pair.call(store, "get", 10, False).more["by socket"] == 0


@pytest.mark.leaky
def test_a_host_with_too_few_sockets_is_told(
    machines: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*args: Any) -> Any:
        return {"status": "error"}, None

    monkeypatch.setattr("daskps.cluster.connections.ask_for_socket", refused)
    pair = workers.Pair.of(machines)
    with pair.store(8) as store, pytest.raises(LeftOutError, match="0 sockets of 3"):
        pair.run(crowd.by_socket, store, pair.there, 3, 0.01, pair.pids[1])
