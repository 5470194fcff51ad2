"""The cost model: exact numbers, by arithmetic and as counted on the wire."""

from __future__ import annotations

import json
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

import daskps
from daskps import optim
from daskps.cluster import connections
from tests.benchmarks import clusters, command, counting, model
from tests.benchmarks.model import RoundWork, StoreShape, Times


def test_messages_and_payload_of_a_round() -> None:
    shape = StoreShape(trainers=6, hosts=4, elements=10)
    assert (shape.messages, shape.graph_tasks) == (24, 10)
    assert shape.sizes == [len(part) for part in np.array_split(np.empty(10), 4)]
    assert shape.payload == 2 * 6 * 10 * 4


def test_a_host_has_a_message_of_each_trainer_whatever_their_number() -> None:
    times = Times(1e-3, 8e-4, 0.0, 0.0)
    found = [
        model.apart(times, StoreShape(1000, hosts, 4000)) for hosts in (1, 16, 1000)
    ]
    assert [each.host for each in found] == pytest.approx([0.401] * 3)
    assert [each.trainer for each in found] == pytest.approx([1.4e-3, 7.4e-3, 0.401])
    assert found[1].round == found[1].host


def test_bytes_are_spread_over_the_hosts() -> None:
    times = Times(0.0, 0.0, 0.0, 1e-9)
    found = model.apart(times, StoreShape(1000, 10, 10**6))
    assert found.host == pytest.approx(1000 * 2 * 4 * 10**5 * 0.5e-9)
    assert found.trainer == pytest.approx(2 * 4 * 10**6 * 0.5e-9)


def test_what_is_fitted_gives_the_measurements_back() -> None:
    times = Times(1e-3, 8e-4, 7e-4, 2e-9)
    works = [
        RoundWork(1, 0, 10),
        RoundWork(4, 4, 10**5),
        RoundWork(64, 64, 10**6),
        RoundWork(256, 0, 99),
    ]
    found = model.fitted([(work, times.round(work)) for work in works])
    assert astuple(found) == pytest.approx(astuple(times))


def test_messages_with_frames_of_a_round() -> None:
    """16 KiB travel inside a message; on two hosts of three there is one more."""
    shape = StoreShape(trainers=5, hosts=3, elements=3 * 4096 + 2)
    assert shape.framed == 5 * 2
    assert shape.work == RoundWork(15, 10, 2 * 5 * 4 * (3 * 4096 + 2))


def test_no_cost_is_below_nothing() -> None:
    rows = [(1, 0, 1.0), (2, 10, 2.1), (4, 20, 3.9), (8, 90, 7.0)]
    found = model.fitted([(RoundWork(m, 0, b), seconds) for m, b, seconds in rows])
    assert min(astuple(found)) >= 0
    assert found.round(RoundWork(4, 0, 20)) == pytest.approx(3.9, rel=0.1)


@pytest.mark.leaky  # a cluster in this process
def test_what_is_counted_on_the_wire_is_what_the_model_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    # 96 KiB on four hosts: the arrays are frames of their own.
    given = ["--workers", "2,4", "--kib", "1,96", "--pairs", "1", "--seconds", "1e-9"]
    assert command.main(["scaling", *given, "--json", str(file)]) == 0
    rows = json.loads(file.read_text("utf-8"))["resident"]
    assert [(r["shape"]["trainers"], r["shape"]["elements"]) for r in rows] == [
        (2, 256),
        (2, 24_576),
        (4, 256),
        (4, 24_576),
    ]
    assert [r["steps"] for r in rows] == [3] * 4
    # A pull, then two steps to warm up and three that are measured.
    assert [r["requests"] for r in rows] == [6 * 4, 6 * 4, 6 * 16, 6 * 16]
    assert [r["replies"] for r in rows] == [6 * 4, 6 * 4, 6 * 16, 6 * 16]
    assert all(r["is_exact"] for r in rows)
    # Nothing of a step reaches the scheduler: it is asked where one takes seconds, and
    # a trainer that is done says so while others take their last step.
    asked = {method for r in rows for method in r["asked"]}
    assert asked <= {"locate", "finishes", "finished"}
    assert [r["events"] for r in rows] == [0] * 4
    assert "NO" not in capsys.readouterr().out


@pytest.mark.leaky  # a cluster in this process
def test_bytes_of_calls_by_socket_are_what_the_model_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[socket.socket] = []
    take = connections._take_socket

    def noted(comm: Any) -> socket.socket:
        found = take(comm)
        taken.append(found.dup())
        return found

    def came() -> int:
        """Return the bytes that have come to both ends, as the kernel counts them."""
        ask = (socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        infos = [end.getsockopt(*ask) for end in taken]
        return sum(int.from_bytes(info[128:], sys.byteorder) for info in infos)

    def of_a_call(call: Callable[[], object]) -> int:
        """Return the bytes of one by socket; a socket hears of a template before the first."""
        by_socket = 0
        while by_socket < 3:
            before, handle = came(), store.stats()["handle"]
            call()
            by_socket += (
                store.stats()["handle"]["socket_calls"] - handle["socket_calls"]
            )
        return came() - before

    monkeypatch.setattr(connections, "_take_socket", noted)
    with clusters.inside(1, by_socket=True) as cluster, Client(cluster) as client:
        spec, sgd = {"w": daskps.ArraySpec((999,), "float32")}, optim.SGD(1e-3)
        with daskps.create(spec, client=client, optimizer=sgd) as store:
            out, grads = store.pull(), {"w": np.ones(999, np.float32)}
            pull = of_a_call(lambda: store.pull(out=out))
            push = of_a_call(lambda: store.push(grads))
    for end in taken:
        end.close()
    shape = StoreShape(trainers=1, hosts=1, elements=999, by_socket=True)
    assert pull == shape.nbytes([None])
    # A push and the pull after it take one call more than `pushpull`.
    assert push + pull == shape.nbytes([0]) + model.PER_FRAMES_NBYTES
    assert shape.framed == 0


@pytest.mark.leaky  # a cluster in this process
def test_rounds_by_socket_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    given = ["--workers", "2", "--kib", "1", "--pairs", "1", "--seconds", "1e-9"]
    command.main(["scaling", "--sockets", *given, "--json", str(file)])
    (row,) = json.loads(file.read_text("utf-8"))["resident"]
    assert row["shape"]["by_socket"]
    # A socket leaves a call to messages where the machine is slow: then there are more.
    assert 0 < row["replies"] <= row["requests"]
    assert row["steps"] * 4 <= row["requests"]
    assert row["nbytes"] == row["replies"] * (model.PER_FRAMES_NBYTES + 1024)


def test_too_many_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 1024))
    with pytest.raises(SystemExit, match=r"64 workers .* need 5576 open files"):
        command.main(["scaling"])


def ones(params: Any, X: Any, y: Any) -> Any:
    return {"w": np.ones_like(params["w"])}


@pytest.mark.leaky  # a cluster in this process
@pytest.mark.parametrize("elements", [1000, 24_576])
def test_bytes_of_rounds_in_words_are_what_the_model_says(elements: int) -> None:
    """Gradients and pulls, inside messages and as frames of their own."""
    cases = [("", ""), ("bf16", ""), ("fp16", "bf16"), ("", "fp16")]
    with clusters.inside(2) as cluster, Client(cluster) as client:
        servers = list(client.nthreads())
        spec = {"w": daskps.ArraySpec((elements,), "float32")}
        store = daskps.create(spec, optimizer=optim.SGD(0.5), servers=servers)
        store.pull()  # the hosts learn the template of the client's reads
        for run, (codec, read_codec) in enumerate(cases, start=1):
            how: dict[str, Any] = {"codec": codec or None, "callbacks": ()}
            shape = StoreShape(1, 2, elements, run, store.version)
            shape = replace(shape, codec=codec, read_codec=read_codec)
            with counting.wire() as found:
                daskps.train(
                    store,
                    ones,
                    np.zeros((3, 1)),
                    trainers=1,
                    batch_size=1,
                    pull_codec=read_codec or None,
                    reset_optimizer=True,
                    **how,
                )
            # A pull, three rounds, and what the client reads in the end: as it is.
            assert found["requests"] == 4 * 2 + 2
            sent = shape.nbytes([None, 0, 1, 2])
            end = found["nbytes"] - sent
            if run == 1:
                usual = end
            assert end == usual
            assert shape.payload == (shape.pushed + shape.pulled) * elements
        store.delete()
