"""Parameters and tables that are cut over the shards of some workers only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import daskps
from daskps import LayoutError, optim
from tests.cluster.saved import RULES, chunks, filled, push, save
from tests.inprocess import cluster


@pytest.fixture(scope="module")
def here() -> Any:
    with cluster(3) as made:
        yield made


def workers(here: Any) -> list[str]:
    return [host.worker.address for host in here.hosts]


def test_what_matches_first_decides_and_one_worker_keeps_it_whole(here):
    a, b, c = workers(here)
    params = {
        "net": {"w": np.arange(12.0), "b": np.arange(2.0)},
        "big": np.arange(7.0),
        "emb": daskps.TableSpec(5, 2),
        "any": daskps.TableSpec(None, 2),
        "rest": np.arange(6.0),
    }
    on = {"net/w": b, "net*": [c], "big": [a, c], "emb": [b, c], "a?y": c}
    with daskps.create(params, shards=6, placement=on) as store:
        assert store.placement == (a, a, b, b, c, c)
        layout = store.layout
        held: Any = (*layout.parameters, *layout.tables)
        found = {p.name: p.shards for p in held}
        assert found == {
            "net/w": (2,),
            "net/b": (4,),
            "big": (0, 1, 4, 5),
            "emb": (2, 3, 4, 5),
            "any": (4,),
            "rest": None,
        }
        assert [p.size for p in layout.pieces_of[layout["net/w"].index]] == [12]
        assert [p.size for p in layout.pieces_of[layout["big"].index]] == [2, 2, 2, 1]
        rows = [of[0].n_rows for of in layout.table_pieces]
        assert rows == [0, 0, 2, 1, 1, 1]
        html = store._repr_html_()
        for cell in ("<th>shards</th>", "<td>0, 1, 4, 5</td>", "<td>all</td>"):
            assert cell in html


def test_every_verb_reaches_what_is_placed(here):
    a, _, c = workers(here)
    on = {"w": a, "emb": c, "b": [c, a]}
    rules = {"w": optim.Adam(0.1), "*": optim.SGD(0.5)}
    params = {
        "w": np.zeros((3, 2)),
        "b": np.zeros(5),
        "r": np.zeros(3),
        "emb": daskps.TableSpec(4, 2),
        "n": np.zeros(3, "i8"),
    }
    placed = daskps.create(params, placement=on, optimizer=rules)
    plain = daskps.create(params, optimizer=rules)
    ids = [3, 0, 3]
    seen = []
    for store in (placed, plain):
        store.push({"w": np.ones((3, 2)), "b": np.arange(5.0)})
        store.add({"r": np.ones(3), "n": np.arange(3)})
        store.assign({"b": np.full(5, 2.0)})
        store["emb"].push(ids, np.ones((3, 2), "f4"))
        seen.append(
            {
                **store.pull(),
                **store.pull(["b", "w"]),
                "emb": store["emb"].pull([0, 1, 3]),
                "part": store["b"][1:4],
                "of": store["w"][1:],
            }
        )
    assert seen[0].keys() == seen[1].keys()
    for name, value in seen[0].items():
        np.testing.assert_array_equal(value, seen[1][name])
    assert seen[0]["emb"].tolist() == [[-0.5] * 2, [0] * 2, [-1] * 2]
    for store in (placed, plain):
        store.delete()


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_complete_round_raises_the_version_of_every_shard(here, sync):
    """Also of those that have nothing of what the trainers push."""
    *_, c = workers(here)
    X = np.arange(12.0).reshape(6, 2)
    store = daskps.create(
        {"w": np.zeros(2), "v": np.zeros(3)},
        placement={"*": c},
        optimizer=optim.SGD(0.1),
    )
    assert [len(row) for row in store.layout.pieces] == [0, 0, 2]

    def gradient(params: Any, X: Any, y: Any) -> Any:
        return {"w": X.mean(axis=0)}

    daskps.train(
        store, gradient, X, trainers=1, batch_size=3, epochs=2, sync=sync, shuffle=False
    )
    np.testing.assert_allclose(store["w"].pull(), -0.1 * 2 * (X[:3] + X[3:]).mean(0))
    assert store.versions == ((4, 4, 4) if sync == "bsp" else (0, 0, 4))
    store.delete()


def test_checkpoints_do_not_depend_on_placement(here, tmp_path):
    """The same files, and the same state in a store that is placed in another way."""
    a, b, c = workers(here)
    first = filled(6, placement={"w": b, "a*": [c, a], "emb": a, "b": [c, b]})
    plain = filled(4)
    folder, manifest = save(first, tmp_path / "first")
    written = chunks(folder)
    assert written == chunks(save(plain, tmp_path / "plain")[0])
    others = [
        daskps.restore(tmp_path / "first"),
        daskps.restore(tmp_path / "first", shards=5, placement={"*": c}),
        daskps.restore(tmp_path / "plain", shards=2, placement={"any": b, "w": [a, b]}),
    ]
    assert [p.shards for p in others[0].layout.parameters] == [None] * 3
    assert [p.shards for p in others[1].layout.parameters] == [(4,)] * 3
    assert [t.shards for t in others[2].layout.tables] == [None, (1,), None]
    for number in range(8, 10):
        for store in (first, plain, *others):
            push(store, number)
    later = chunks(save(first, tmp_path / "first")[0])
    assert later != written
    for n, store in enumerate((plain, *others)):
        assert chunks(save(store, tmp_path / str(n))[0]) == later
    assert manifest.version == 24
    for store in (first, plain, *others):
        store.delete()


@pytest.mark.parametrize(
    ("placement", "error", "said"),
    [
        ({"x*": "tcp://a:1"}, LayoutError, r"placement pattern 'x\*' matches no"),
        ({"w": "tcp://a:1"}, LayoutError, "names 'tcp://a:1', which owns no shard"),
        ({"w": ["tcp://a:1", 2]}, TypeError, r"placement\['w'\] is a worker address"),
        ({"w": []}, TypeError, r"placement\['w'\] is a worker address or a list"),
        ({"w": 3}, TypeError, "worker address or a list of them"),
        ({3: "tcp://a:1"}, TypeError, "its key a pattern of names"),
        ("tcp://a:1", TypeError, "placement is a mapping of patterns"),
        ({"w": "\ud800"}, ValueError, "half of a character"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_and_leaves_nothing(
    here, placement, error, said
):
    with pytest.raises(error, match=said):
        daskps.create({"w": np.zeros(3)}, placement=placement)
    assert daskps.list_stores() == []
    assert not any(host.shards for host in here.hosts)


def test_a_worker_that_owns_no_shard_is_none_to_place_on(here):
    a, b, c = workers(here)
    for more in ({"shards": 2}, {"servers": [b, a]}):
        with pytest.raises(LayoutError, match=f"'{c}', which owns no shard of this"):
            daskps.create({"w": np.zeros(3)}, placement={"w": c}, **more)


def test_rules_and_placement_are_matched_apart(here):
    assert set(RULES) == {"w", "b", "emb", "any"}
    a, *_ = workers(here)
    with daskps.create(
        {"w": np.zeros(2), "b": np.zeros(2)},
        optimizer={"w": optim.SGD(1.0), "*": optim.SGD(0.5)},
        placement={"b": a},
    ) as store:
        store.push({"w": np.ones(2), "b": np.ones(2)})
        assert [v.tolist() for v in store.pull().values()] == [[-1, -1], [-0.5, -0.5]]
