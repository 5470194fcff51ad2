"""The page in Dask's dashboard, as a browser gets it."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from typing import Any

import numpy as np
import pytest
from distributed import Client, Scheduler, Worker
from tornado.httpclient import AsyncHTTPClient
from tornado.websocket import websocket_connect

import daskps
from daskps import optim
from daskps.cluster import upstream
from daskps.cluster.plugins import DirectoryPlugin
from daskps.cluster.seeing.overview import MOST_ROWS, Overview
from daskps.cluster.seeing.page import SECTIONS, add_pages
from tests.support import adapter, gen_cluster

Div = adapter("bokeh.models").Div
SHOWN: Any = {"dashboard": True, "dashboard_address": "127.0.0.1:0"}


def at(scheduler, path):
    return f"http://127.0.0.1:{scheduler.http_server.port}/{path}"


async def get(scheduler, path):
    return (await AsyncHTTPClient().fetch(at(scheduler, path))).body.decode()


def document(url):
    """The document of a page, as bokeh's own client gets it."""
    session = adapter("bokeh.client").pull_session(url=url)
    session.close()
    return session.document


async def shown(scheduler, *names, path="daskps"):
    """The tables of some sections as somebody gets them who opens the page now."""
    found = await asyncio.to_thread(document, at(scheduler, path))
    return [found.select_one({"name": f"daskps-{name}"}).data for name in names]


@gen_cluster(client=True, scheduler_kwargs=SHOWN)
async def test_page_from_before_a_store_to_after_its_end(c, s, a, b):
    await upstream.register(c, DirectoryPlugin())
    found = await asyncio.to_thread(document, at(s, "daskps"))
    texts = sorted(model.text for model in found.select({"type": Div}))
    assert texts == sorted(f"{title}: none" for title in SECTIONS.values())
    params = {"w": np.zeros(8), "t": daskps.TableSpec(None, 2)}
    about = {"optimizer": optim.SGD(0.1), "client": c}
    x = await daskps.aio.create(params, name="<x>", **about)
    for _ in range(3):
        await x.push({"w": np.ones(8)})
    await x["t"].push(np.arange(5), np.ones((5, 2)))
    await c.log_event("daskps", "somebody else's")
    await asyncio.gather(a.heartbeat(), b.heartbeat())
    tables, shards, workers = await shown(s, "tables", "shards", "workers")
    assert (tables["store"], tables["rows"]) == (["<x>"], [5])
    assert (tables["admitted"], tables["evicted"]) == ([5], [0])
    assert set(shards["worker"]) == set(workers["worker"]) == {a.address, b.address}
    assert (shards["state"], shards["version"]) == (["here", "here"], [4, 4])
    (entry,) = Overview(s).entries
    entry.lost[1], entry.away[0] = (b.address, "it died"), "process 3 has it"
    stores, shards = await shown(s, "stores", "shards")
    assert (stores["shards"], stores["away"], stores["lost"]) == ([2], [1], [1])
    assert sorted(shards["state"]) == ["LOST: it died", "away: process 3 has it"]
    entry.settle([0, 1])
    await x.delete()
    stores, events = await shown(s, "stores", "events")
    assert stores == {}
    assert (events["event"][0], events["store"][0]) == ("store-deleted", "<x>")


@gen_cluster(client=True, scheduler_kwargs=SHOWN)
async def test_pages_are_linked_and_listed(c, s, a, b):
    status = await get(s, "status")
    assert "daskps" not in status
    await upstream.register(c, DirectoryPlugin())
    # As a preload does, and a client that comes later.
    await s.register_scheduler_plugin(DirectoryPlugin(), idempotent=True)
    assert (await get(s, "status")).count('href="daskps"') == 1
    assert (await get(s, "daskps")).count('href="daskps"') == 1
    listed = json.loads(await get(s, "individual-plots.json"))
    for name in SECTIONS:
        path = listed[f"Individual Daskps {name.title()}"]
        alone = await get(s, path.lstrip("/"))
        assert "<title>Dask: daskps</title>" in alone
        assert "navbar" not in alone
    assert "Individual Task Stream" in listed
    assert 'href="daskps"' in await get(s, "")  # which leads to /status


@gen_cluster(client=True, scheduler_kwargs={**SHOWN, "http_prefix": "/of/us"})
async def test_page_behind_a_prefix(c, s, a, b):
    await upstream.register(c, DirectoryPlugin())
    assert 'href="daskps"' in await get(s, "of/us/daskps")
    assert await shown(s, "stores", path="of/us/daskps") == [{}]


@gen_cluster(nthreads=[])
async def test_two_schedulers_of_a_process_each_show_their_own(s):
    for name in ("one", "two"):
        async with (
            Scheduler(port=0, host="127.0.0.1", **SHOWN) as of,
            Worker(of.address, host="127.0.0.1"),
            Client(of.address, asynchronous=True) as client,
        ):
            await daskps.aio.create({"w": np.zeros(2)}, name=name, client=client)
            (stores,) = await shown(of, "stores")
            assert stores["store"] == [name]


@gen_cluster(client=True)
async def test_no_dashboard_is_one_line(c, s, a, b):
    with Records() as said:
        await upstream.register(c, DirectoryPlugin())
        await upstream.register(c, DirectoryPlugin())
    assert said == [
        "no page /daskps: the scheduler has no dashboard, which needs bokeh"
    ]


@gen_cluster(client=True, scheduler_kwargs=SHOWN)
async def test_a_bokeh_that_does_not_fit_is_one_line(c, s, a, b):
    def fails(*args):
        raise ImportError("Dask needs another bokeh")

    with pytest.MonkeyPatch.context() as patch, Records() as said:
        patch.setattr(upstream, "add_pages", fails)
        async with await daskps.aio.create({"w": np.zeros(2)}, client=c) as x:
            assert await x.version == 0
    assert len(said) == 1
    assert "Dask needs another bokeh" in said[0]


class Records(logging.Handler):
    """The records of the module, while the block lasts."""

    def __enter__(self):
        self.said: list[str] = []
        self.of = logging.getLogger(add_pages.__module__)
        self.of.addHandler(self)
        self.level_before = self.of.level
        self.of.setLevel(logging.INFO)
        return self.said

    def __exit__(self, *error):
        self.of.removeHandler(self)
        self.of.setLevel(self.level_before)

    def emit(self, record):
        self.said.append(record.getMessage())


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_many_shards_are_a_hundred_rows_the_busiest_first(c, s, a):
    about = {"optimizer": optim.SGD(0.1), "client": c}
    async with (
        await daskps.aio.create({"w": np.zeros(200)}, shards=200, **about) as idle,
        await daskps.aio.create({"w": np.zeros(1)}, **about) as busy,
    ):
        a.periodic_callbacks["heartbeat"].stop()
        await a.heartbeat()
        await busy.push({"w": np.ones(1)})
        await a.heartbeat()
        rows = Overview(s).rows("shards")
        assert len(rows) == MOST_ROWS
        assert (rows[0]["store"], rows[0]["version"]) == (busy.name, 1)
        assert rows[0]["pushes/s"] > 0 == rows[1]["pushes/s"]
        assert {row["store"] for row in rows[1:]} == {idle.name}
        (worker,) = Overview(s).rows("workers")
        assert worker["shards"] == 201


#: All text of a page, also that of custom elements.
TEXT = """(() => {
    const found = [document.title]
    const walk = node => {
        if (node.nodeType === 3) found.push(node.textContent)
        for (const of of [...node.childNodes, node.shadowRoot]) if (of) walk(of)
    }
    walk(document)
    return found
})()"""


@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="needs a browser: chromium"
)
def test_a_browser_renders_it(tmp_path):
    """The name of a store is text there, and no HTML."""
    name = "<img src=x onerror=document.title='bad'>"

    @gen_cluster(client=True, scheduler_kwargs=SHOWN)
    async def test(c, s, a, b):
        x = await daskps.aio.create({"w": np.zeros(2)}, name=name, client=c)
        browser = await asyncio.create_subprocess_exec(
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu"),
            *("--remote-debugging-port=0", f"--user-data-dir={tmp_path}"),
            at(s, "daskps"),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            wire = await connected(browser)
            texts = await texts_in(wire, name)
            assert texts[0] == "Dask: daskps"
            assert texts.count(name) >= 3  # stores, shards, events
            await x.delete()
            # The page that is open hears of it.
            assert name in await texts_in(wire, "Stores: none")
            wire.close()
        finally:
            browser.terminate()
            await browser.wait()

    test()


async def connected(browser):
    """A connection to the only page of a browser."""
    async for line in browser.stderr:
        if line.startswith(b"DevTools listening on ws://"):
            host = line.split(b"/")[2].decode()
            break
    pages = json.loads((await AsyncHTTPClient().fetch(f"http://{host}/json")).body)
    (page,) = [of for of in pages if of["type"] == "page"]
    return await websocket_connect(page["webSocketDebuggerUrl"])


async def texts_in(wire, awaited):
    """All texts of the page of a browser, once one of them is there."""
    about = {"expression": TEXT, "returnByValue": True}
    call = json.dumps({"id": 1, "method": "Runtime.evaluate", "params": about})
    texts: list[str] = []
    async with asyncio.timeout(60):
        while awaited not in texts:
            await wire.write_message(call)
            answer: Any = json.loads(str(await wire.read_message()))
            texts = answer["result"]["result"]["value"]
    return texts
