"""A store as a graph."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

import daskps
from daskps.layout.arrays import Layout
from daskps.store.picture import node_link

OWNERS = ("tcp://a:1", "tcp://b:2", "tcp://a:1", "tcp://c:3")


def built() -> Layout:
    return Layout.build(
        {"w": ((5, 2), "float32"), "b": ((), "float64"), "on": ((4,), "float32")},
        4,
        {"emb": (6, 3, "float32")},
        placed=[((1, 3), (2,))],
    )


def test_s16_every_shard_has_one_owner() -> None:
    """Nodes are 4 parameters, 4 shards and 3 workers; edges say who has what."""
    graph = json.loads(json.dumps(node_link(built(), OWNERS, "s")))
    kinds = Counter(node["kind"] for node in graph["nodes"])
    assert kinds == {"array": 3, "table": 1, "shard": 4, "worker": 3}
    ids = [node["id"] for node in graph["nodes"]]
    assert len(set(ids)) == len(ids) == 11
    owners = {e["source"]: e["target"] for e in graph["edges"] if e["kind"] == "owner"}
    assert owners == {f"shard:{i}": f"worker:{at}" for i, at in enumerate(OWNERS)}
    assert sum(e["kind"] == "owner" for e in graph["edges"]) == 4
    assert all({e["source"], e["target"]} <= set(ids) for e in graph["edges"])
    sizes = Counter[str]()
    for edge in graph["edges"]:
        if edge["kind"] == "piece":
            sizes[edge["source"]] += edge["stop"] - edge["start"]
    assert sizes == {
        "parameter:w": 10,
        "parameter:b": 1,
        "parameter:on": 4,
        "parameter:emb": 6,
    }
    on = {e["target"] for e in graph["edges"] if e["source"] == "parameter:on"}
    assert on == {"shard:1", "shard:3"}
    assert sum(n.get("nbytes", 0) for n in graph["nodes"] if n["kind"] == "shard") == (
        built().nbytes
    )


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_networkx_reads_it(way) -> None:
    networkx = pytest.importorskip("networkx")
    params = {"w": np.zeros(5), "any": daskps.TableSpec(None, 2)}
    with daskps.create(params, shards=2) as store:
        found = networkx.node_link_graph(json.loads(store.to_json()), edges="edges")
        n_workers = len({*store.placement})
    assert found.is_directed()
    assert found.number_of_nodes() == 2 + 2 + n_workers
    assert found.out_degree("shard:0") == found.out_degree("shard:1") == 1
    assert [*found.successors("parameter:any")] == ["shard:0", "shard:1"]
