"""Metrics of schedulers and workers, as Prometheus reads them; the board, the alarms."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy as np
import pytest
import yaml
from distributed import Client, Scheduler, Worker
from tornado.httpclient import AsyncHTTPClient

import daskps
from daskps import optim
from daskps.cluster.seeing import prometheus
from daskps.cluster.seeing.prometheus import SCHEDULERS, Collector
from tests.support import adapter, gen_cluster, until

parse = adapter("prometheus_client.parser").text_string_to_metric_families
DOCS = Path(__file__).parents[3] / "docs"
BOARD = json.loads((DOCS / "monitoring" / "grafana.json").read_text())
ALARMS = yaml.safe_load((DOCS / "monitoring" / "alarms.yaml").read_text())
BOARD_EXPRS = [of["expr"] for panel in BOARD["panels"] for of in panel["targets"]]
ALARM_EXPRS = [rule["expr"] for group in ALARMS["groups"] for rule in group["rules"]]
NAME = re.compile(r"dask_daskps_\w+")


async def samples(server):
    """By name, with its labels in order, each sample of ours at /metrics."""
    url = f"http://127.0.0.1:{server.http_server.port}/metrics"
    text = (await AsyncHTTPClient().fetch(url)).body.decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in parse(text)
        for sample in family.samples
        if "daskps" in sample.name
    }


def gained(before, after):
    """By how much samples have grown: other clusters of the session have some too."""
    return {key: value - before.get(key, 0) for key, value in after.items()}


async def used(c, a, b, folder):
    """A store that has been pushed to and saved, and heartbeats that say so."""
    params = {"w": np.zeros(8), "t": daskps.TableSpec(None, 2)}
    about = {"optimizer": optim.SGD(0.1), "client": c, "name": "a store's name"}
    x = await daskps.aio.create(params, **about)
    for _ in range(3):
        await x.push({"w": np.ones(8)})
    await x["t"].push(np.arange(5), np.ones((5, 2)))
    await x.save(str(folder))
    await asyncio.gather(a.heartbeat(), b.heartbeat())
    return x


def test_metrics_say_what_stats_say(tmp_path):
    """Workers have them too, here without a dashboard; all are in one process."""

    @gen_cluster(client=True)
    async def test(c, s, a, b):
        before = await samples(s)
        x = await used(c, a, b, tmp_path)
        found, stats = await samples(s), (await x.stats())["shards"]
        new = gained(before, found)
        pushes = sum(row["pushes"] for row in stats)
        assert new["dask_daskps_worker_pushes_total",] == pushes == 8
        nbytes = sum(row["segment_nbytes"] for row in stats)
        assert new["dask_daskps_worker_bytes",] == nbytes
        assert new["dask_daskps_worker_rows",] == 5
        shards = [new["dask_daskps_shards", of] for of in ("here", "away", "lost")]
        assert (new["dask_daskps_stores",], shards) == (1, [2, 0, 0])
        assert new["dask_daskps_events_total", "store-saved"] == 1
        assert new["dask_daskps_events_total", "save-failed"] == 0
        assert found["dask_daskps_checkpoint_bytes", x.name] > 0
        assert set(await samples(a)) == set(found)
        # One label at most, of few values; and the store's is of two metrics only.
        assert max(map(len, found)) == 2
        assert len(found) < 80
        assert {key[0] for key in found if x.name in key[1:]} == {
            "dask_daskps_checkpoint_bytes",
            "dask_daskps_checkpoint_timestamp_seconds",
        }
        names = {key[0] for key in found}
        for expression in [*BOARD_EXPRS, *ALARM_EXPRS]:
            assert NAME.findall(expression)
            assert set(NAME.findall(expression)) <= names, expression
            # A first event that begins a series is no rise.
            for event in re.findall(r'event="([\w-]+)"\}\[', expression):
                assert ("dask_daskps_events_total", event) in found
        page = (DOCS / "watching.md").read_text()
        assert set(re.findall(r"^\| `(dask_daskps_\w+)`", page, re.MULTILINE)) == names
        await x.delete()
        after = gained(before, await samples(s))
        assert after["dask_daskps_stores",] == 0

    test()


@gen_cluster(client=True)
async def test_two_schedulers_in_a_process(c, s, a, b):
    stores = ("dask_daskps_stores",)
    before = (await samples(s)).get(stores, 0)
    async with await daskps.aio.create({"w": np.zeros(4)}, client=c):
        assert (await samples(s))[stores] - before == 1
        async with (
            Scheduler(port=0, host="127.0.0.1", dashboard_address="127.0.0.1:0") as t,
            Worker(t.address, host="127.0.0.1"),
            Client(t.address, asynchronous=True) as other,
        ):
            await daskps.aio.create({"w": np.zeros(2)}, name="other", client=other)
            assert (await samples(t))[stores] - before == 2
        assert (await samples(s))[stores] - before == 1


@pytest.mark.parametrize("missing", [True, False])
def test_without_the_client_of_prometheus_one_line_is_said(
    missing, monkeypatch, caplog
):
    """Also where it takes no more collectors, as one of another version may."""
    if missing:
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
    else:
        monkeypatch.setattr("prometheus_client.REGISTRY.register", None)
    collector = Collector("daskps", prometheus.of_schedulers)
    with caplog.at_level(logging.INFO, prometheus.__name__):
        collector.add(logging.getLogger("one"))
        collector.add(logging.getLogger("two"))
    (record,) = caplog.records
    assert record.getMessage().startswith("no metrics of daskps at /metrics: ")


@pytest.mark.parametrize("value", ["no number", None])
def test_an_error_costs_our_metrics_alone_and_is_said_once(value, caplog):
    """Those of other collectors stay, and ours come back as soon as they can."""
    from prometheus_client import REGISTRY, generate_latest

    def families(_: Any) -> Any:
        yield "one", "gauge", "Comes before the error", [({}, 1)]
        yield "two", "counter", "Is none, maybe", [({}, given[0])]

    given, collector = [value], Collector("daskps_tried", families)
    user = logging.getLogger("user")
    try:
        collector.add(user)
        pages = [generate_latest().decode() for _ in range(3)]
        given[0] = 2
        pages.append(generate_latest().decode())
    finally:
        REGISTRY.unregister(collector)
    ours = ["dask_daskps_tried" in page for page in pages]
    assert ours == [False, False, False, True]
    assert all("python_info" in page for page in pages)
    assert len(caplog.records) == 1


def test_a_second_registration_is_none():
    before = len([*SCHEDULERS.collect()])
    user = logging.getLogger("user")
    try:
        SCHEDULERS.add(user)
        SCHEDULERS.add(user)
    finally:
        SCHEDULERS.discard(user)
    assert len([*SCHEDULERS.collect()]) == before


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs Debian's prometheus"
)
def test_alarms_are_rules():
    file = DOCS / "monitoring" / "alarms.yaml"
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert f"SUCCESS: {len(ALARM_EXPRS)} rules found".encode() in done.stdout


@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs Debian's prometheus"
)
def test_a_real_prometheus_has_data_for_the_whole_board(tmp_path):
    @gen_cluster(client=True)
    async def test(c, s, a, b):
        x = await used(c, a, b, tmp_path / "saved")
        at = [f"127.0.0.1:{of.http_server.port}" for of in (s, a)]
        jobs = [{"job_name": "dask", "static_configs": [{"targets": at}]}]
        settings = {"global": {"scrape_interval": "500ms"}, "scrape_configs": jobs}
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(settings))
        server = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            "--web.listen-address=127.0.0.1:0",
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert server.stderr is not None
            async for line in server.stderr:
                if found := re.search(rb"Listening on.*address=(127\S+)", line):
                    url = f"http://{found[1].decode()}/api/v1/query"
                if b"Server is ready" in line:
                    break
            for expression in BOARD_EXPRS:
                await asyncio.to_thread(until, partial(ask, url, expression), 25)
            for expression in ALARM_EXPRS:
                await asyncio.to_thread(ask, url, expression)
        finally:
            server.terminate()
            await server.wait()
        await x.delete()

    test()


def ask(url, expression):
    """What a Prometheus answers to a question."""
    with urlopen(f"{url}?{urlencode({'query': expression})}", timeout=10) as answer:
        found: Any = json.load(answer)
    return found["data"]["result"]
