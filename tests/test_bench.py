"""The benchmarks: their command line, their reports, and every peer that is here."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]  # without type hints
import pytest
from distributed import Client

from daskps import config
from daskps.bench import (
    against,
    busy,
    clusters,
    command,
    cores,
    jobs,
    memory,
    pairs,
    report,
    rounds,
)
from daskps.bench.jobs import LEARNING_RATE, StepJob
from daskps.bench.pairs import Comparison
from daskps.bench.peers import Peer, PeerError, actors, allreduce, dask, gang, limit

SLOW = Comparison("BSP round, 1 KiB, 2 + 2", "Snail", (1e-3, 2e-3, 1e-3), (3e-3,) * 3)
FAST = Comparison(
    "training",
    "Hare",
    (2e-3, 4e-3),
    (1e-3, 1e-3),
    ways=("message", "process"),
    is_rate=True,
)
#: Pairs 0, 2 and 5 met cores at full speed, pair 4 just missed it.
LOOKED = Comparison(
    "get, 256 B, 1 + 1",
    "Chameleon",
    (1e-3, 5e-3, 3e-3, 5e-3, 4e-3, 2e-3),
    (2e-3, 20e-3, 9e-3, 15e-3, 36e-3, 8e-3),
    looks=(1.0e-3, 1.7e-3, 1.1e-3, 1.6e-3, 1.2e-3, 1.05e-3),
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
        assert callable(importlib.import_module(f"daskps.bench.{name}").run)


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
        (["lock", "--seconds", "0"], "'0' is no number of seconds above 0"),
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


def test_a_plot_without_matplotlib_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        command.parser_of("train").parse_args(["--svg", "x.svg"])
    assert "daskps[bench]" in capsys.readouterr().err


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
    assert found == pairs.Samples((1.0,) * 3, (2.0,) * 3, ())
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


def test_only_pairs_at_full_speed_count_where_there_are_enough() -> None:
    assert LOOKED.undisturbed == LOOKED.counted == (0, 2, 5)
    assert LOOKED.ratios == pytest.approx([2.0, 3.0, 4.0])
    assert LOOKED.ratio == pytest.approx(3.0)
    assert LOOKED.spread == pytest.approx((2.0, 4.0))
    assert LOOKED.medians == (2e-3, 8e-3)
    # A better look was seen elsewhere: two pairs are not enough to speak for all.
    later = replace(LOOKED, best=0.9e-3)
    assert later.undisturbed == (0, 5)
    assert later.counted == tuple(range(6))
    assert later.ratios == pytest.approx([2.0, 4.0, 3.0, 3.0, 9.0, 4.0])
    assert later.medians == pytest.approx((3.5e-3, 12e-3))


def test_full_speed_is_085_of_the_best() -> None:
    assert cores.full([1.0, 1 / 0.85, 1.18], 2.0) == (0, 1)
    assert cores.full([1.0, 1.18], 0.5) == ()
    assert cores.full([], 1.0) == ()


def scripted(*seconds: float) -> cores.Looks:
    """Return looks that find these, and the last one for ever."""
    rest = itertools.repeat(seconds[-1])
    return cores.Looks(itertools.chain(seconds, rest).__next__)


def taken(looks: cores.Looks, n: int) -> pairs.Samples:
    """Return samples that are numbered as they are taken."""
    number = itertools.count(1.0)
    return pairs.alternate(number.__next__, number.__next__, n, looks)


def test_looks_surround_every_sample_and_a_pair_gets_its_worst() -> None:
    looks = scripted(1.0, 1.1, 1.02, 1.03, 1.05)
    assert taken(looks, 2) == pairs.Samples((1.0, 4.0), (2.0, 3.0), (1.1, 1.05))
    assert looks.seconds == [1.0, 1.1, 1.02, 1.03, 1.05]


@pytest.mark.parametrize("at", [2, 3, 4])
def test_measuring_goes_on_for_a_pair_that_was_disturbed(at: int) -> None:
    """Before, within or after the second pair of two."""
    looks = [1.0] * 5
    looks[at] = 1.5
    # The look between two pairs is that of both.
    wanted = {2: (1.5, 1.5, 1.0, 1.0), 3: (1.0, 1.5, 1.0), 4: (1.0, 1.5, 1.5, 1.0)}
    assert taken(scripted(*looks, 1.0), 2).looks == wanted[at]


def test_measuring_ends_when_cores_stay_slow() -> None:
    found = taken(scripted(1.0, 1.5), 4)
    assert found.looks == (1.5,) * 12
    assert len(found.ours) == len(found.theirs) == 12


def test_what_was_seen_before_decides_what_is_disturbed() -> None:
    looks = scripted(1.0, 1.5)
    looks()
    assert len(taken(looks, 2).ours) == 6
    assert looks.share == pytest.approx(1 / 14)


def test_a_line_ends_with_the_pairs_that_count() -> None:
    assert report.line(LOOKED).endswith("3.00 (2.00-4.00)  3 of 6 pairs undisturbed")
    later = replace(LOOKED, best=0.9e-3, ways=("machine",))
    said = "3.50 (2.00-9.00)  by machine; all 6 pairs, 2 undisturbed"
    assert report.line(later).endswith(said)


def test_the_table_shows_medians_ratios_and_ways() -> None:
    row = report.line(SLOW)
    assert row.split()[-6:] == ["1", "ms", "3", "ms", "3.00", "(1.50-3.00)"]
    row = report.line(FAST)
    assert "333/s   1,000/s  0.38 (0.25-0.50)  by message, process" in row
    assert [report.duration(s) for s in (12.34, 2e-6)] == ["12.3 s", "2 us"]


def test_json_holds_every_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report.Report("rounds", Namespace(pairs=3))
    found.begin()
    found.add(SLOW)
    found.missing["ray"] = "Traceback\nray is not installed"
    found.end(json_file=str(tmp_path / "found.json"))
    said = capsys.readouterr().out
    assert said.count("left out ray: ray is not installed") == 1
    assert "numpy " + np.__version__ in said
    read = json.loads((tmp_path / "found.json").read_text("utf-8"))
    (row,) = read["comparisons"]
    assert row["ours_samples"] == [1e-3, 2e-3, 1e-3]
    assert row["ratio_range"] == pytest.approx([1.5, 3.0])
    assert read["options"] == {"pairs": 3}
    assert read["missing"] == found.missing
    assert (row["looks"], row["counted"]) == ([], [0, 1, 2])
    assert "looks" not in read["machine"]
    assert "look" not in said


def test_json_holds_every_look_and_what_it_decided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = scripted(*[1e-3] * report._FIRST_LOOKS, 0.9e-3, 2e-3)
    found = report.Report("rounds", Namespace(), looks)
    found.begin()
    assert "best look at the cores so far: 1.00 ms" in capsys.readouterr().out
    found.add(LOOKED)
    found.add(replace(LOOKED, looks=(0.9e-3,) * 6))
    assert "3 of 6 pairs undisturbed" in capsys.readouterr().out
    looks(), looks()
    found.end(json_file=str(tmp_path / "found.json"))
    said = capsys.readouterr().out
    # The first line, and no other, was printed when the best look was yet to come.
    assert said.count("undisturbed") == 1
    assert "all 6 pairs, 2 undisturbed" in said
    assert "cores at full speed in 95% of 22 looks, the best 0.90 ms" in said
    read = json.loads((tmp_path / "found.json").read_text("utf-8"))
    seen = read["machine"]["looks"]
    assert (seen["best"], seen["at_full_speed"]) == (0.9e-3, pytest.approx(21 / 22))
    assert seen["seconds"] == looks.seconds
    for row, counted in zip(read["comparisons"], (range(6), range(6)), strict=True):
        again = Comparison(
            row["job"],
            row["peer"],
            tuple(row["ours_samples"]),
            tuple(row["theirs_samples"]),
            tuple(row["looks"]),
            best=seen["best"],
        )
        assert row["counted"] == list(again.counted) == list(counted)
        assert row["ratio"] == again.ratio


def test_each_core_is_looked_at_until_the_end() -> None:
    before = set(psutil.Process().children())
    with cores.watched() as looks:
        found = [looks(), looks()]
        helpers = set(psutil.Process().children()) - before
        assert len(helpers) == len(cores._cores())
        if hasattr(os, "sched_getaffinity"):
            pinned = sorted(helper.cpu_affinity() for helper in helpers)
            assert pinned == [[core] for core in cores._cores()]
    assert looks.seconds == found
    assert 0 < looks.best == min(found)
    assert not any(helper.is_running() for helper in helpers)


@pytest.mark.parametrize("is_working", [False, True])
def test_a_process_that_looks_ends_with_the_pipe(is_working: bool) -> None:
    with cores._helper(cores._cores()[0]) as helper:
        assert helper.stdin
        assert helper.stdout
        helper.stdin.write(b"0.0\n")
        assert float(helper.stdout.readline()) > 0
        if is_working:
            helper.stdin.write(b"0.0\n")
            helper.stdout.close()
        helper.stdin.close()
        assert helper.wait(30) == 0


def test_processes_that_look_end_when_the_one_that_asks_is_killed() -> None:
    asks = (
        "from daskps.bench import cores",
        "with cores.watched() as looks:",
        "    print(looks(), flush=True)",
        "    while True: looks()",
    )
    command = [sys.executable, "-c", "\n".join(asks)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as asking:
        assert asking.stdout
        assert float(asking.stdout.readline()) > 0
        asking.kill()
        # They hold the same pipe for errors, which ends with the last of them.
        assert asking.communicate(timeout=60)[1] == b""


@pytest.mark.leaky  # matplotlib keeps its fonts open
def test_the_plot_has_a_bar_for_each_comparison(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.plot([SLOW, FAST], str(tmp_path / "a.svg"), "two")
    report.plot([SLOW, FAST], str(tmp_path / "b.svg"), "two")
    svg = (tmp_path / "a.svg").read_text("utf-8")
    assert svg.startswith("<?xml")
    assert "#2ca02c" in svg  # green: three times as fast
    assert "#ff7f0e" in svg  # orange: slower
    assert svg == (tmp_path / "b.svg").read_text("utf-8")


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
    a.close()
    b.close()


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
    peer: Peer = importlib.import_module(f"daskps.bench.peers.{name}").PEER
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
    (found,) = field.compare(client, TINY, pairs.Effort(pairs=2, seconds=0.01))
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
