"""Contracts of the verbs on rows of tables; `test_verbs.py` has them everywhere."""

from __future__ import annotations

import inspect
import pickle
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import RowGrad, TableSpec, init
from daskps.row_init import initial_rows
from tests.seams import push_as_another

ROWS, DIM, LR = 50, 3, 0.5
#: In no order, with repeats and in all shards of three.
IDS = np.array([[49, 0, 17], [17, 3, 33]])
#: What unbounded rows begin with, and some of these, in all shards of three.
FIRST = init.normal(1.0, 0.5)
UNBOUNDED_IDS = np.array([[2**62, -1, 17], [17, -(2**63), 0]])


def tables():
    """What a store has beside its arrays."""
    return {
        "emb": TableSpec(ROWS, DIM, init=rows_at_first()),
        "seen": TableSpec(ROWS, 1, "int64"),
        "two": TableSpec(2, 2, "float64", init=1.5),
        "any": TableSpec(None, DIM, init=FIRST),
    }


def rows_at_first():
    return np.arange(ROWS * DIM, dtype="f4").reshape(ROWS, DIM)


def quarters(ids):
    """Return values for ids that are exact, of other numbers for each."""
    n = np.asarray(ids).size
    return np.arange(n * DIM, dtype="f4").reshape((*np.shape(ids), DIM)) / 4


async def check(s, get, expected):
    """All rows of a table are as they should be, also those that nobody named."""
    found = await get(s["emb"].pull(np.arange(ROWS)))
    np.testing.assert_array_equal(found, expected, strict=True)


async def pulls_rows(s, get):
    """A pull has the rows in the order of the ids, with repeats, in their shape."""
    rows, emb = rows_at_first(), s["emb"]
    np.testing.assert_array_equal(await get(emb.pull(IDS)), rows[IDS], strict=True)
    some: Any = (7, [], [[]], [5], np.array([49, 49], "u1"), list(range(50)))
    for ids in some:
        expected = rows[np.asarray(ids, "i8")]
        np.testing.assert_array_equal(await get(emb.pull(ids)), expected, strict=True)
    out = np.empty((2, 3, DIM), "f4")
    assert await get(emb.pull(IDS, out=out)) is out
    np.testing.assert_array_equal(out, rows[IDS])
    strided = np.empty((2, 3, 2 * DIM), "f4")[..., ::2]
    assert await get(emb.pull(IDS, out=strided)) is strided
    np.testing.assert_array_equal(strided, rows[IDS])
    np.testing.assert_array_equal(
        await get(s["two"].pull([1, 0])), np.full((2, 2), 1.5)
    )


async def pulls_rows_with_arrays(s, get):
    """`rows=` reads the rows and all arrays; a plain pull leaves tables out."""
    rows = {"emb": IDS, "two": [1]}
    found = await get(s.pull(rows=rows))
    assert [*found] == [*s.layout.by_name, "emb", "two"]
    np.testing.assert_array_equal(found["emb"], rows_at_first()[IDS])
    assert found["two"].tolist() == [[1.5, 1.5]]
    assert found["b"] == 2
    assert [*await get(s.pull((), rows=rows))] == ["emb", "two"]
    assert [*await get(s.pull("b", rows={"two": 0}))] == ["b", "two"]
    assert not s.layout.table_by_name.keys() & (await get(s.pull())).keys()
    out = {"b": np.empty(()), "emb": np.empty((2, 3, DIM), "f4")}
    found = await get(s.pull(rows={"emb": IDS}, out=out))
    assert [*found] == ["b", "emb"]
    assert all(found[n] is out[n] for n in out)
    np.testing.assert_array_equal(out["emb"], rows_at_first()[IDS])
    assert out["b"] == 2


async def pushes_rows(s, get):
    """One step for each row: repeats are summed before; others stay as they are."""
    expected, grads = rows_at_first(), quarters(IDS)
    assert await get(s["emb"].push(IDS, grads)) == 1
    for row, grad in zip(IDS.ravel(), grads.reshape(-1, DIM), strict=True):
        expected[row] -= LR * grad
    await check(s, get, expected)
    await get(s["emb"].push([4], quarters([4]), weight=2.0, lr=0.25))
    expected[4] -= 0.5 * quarters([4])[0]
    version = await get(s["emb"].push(np.zeros(0, "i8"), np.zeros((0, DIM))))
    assert len(version.pairs) == s.layout.n_shards
    await check(s, get, expected)
    counted = await get(s.stats())
    assert [row["pushes"] for row in counted["shards"]] == [3] * s.layout.n_shards
    told = counted["tables"]["emb"]
    assert told == {
        "rows": ROWS,
        "dim": DIM,
        "dtype": "float32",
        "nbytes": s["emb"].nbytes,
        "steps": 3,
    }
    assert sum(row["tables"]["emb"]["rows"] for row in counted["shards"]) == ROWS
    assert counted["tables"]["two"]["steps"] == 0
    assert counted["handle"]["rows_pushed"] == IDS.size + 1
    assert counted["handle"]["rows_pulled"] == 2 * ROWS


async def pushes_rows_with_arrays(s, get):
    """A mapping may have both; the shards take them in one step."""
    expected, w = rows_at_first(), await get(s["w"].pull())
    rows = RowGrad(IDS, np.ones((2, 3, DIM)))
    assert await get(s.push({"w": np.ones((5, 3), "f4"), "emb": rows})) == 1
    np.subtract.at(expected, IDS.ravel(), np.float32(LR))
    await check(s, get, expected)
    np.testing.assert_array_equal(await get(s["w"].pull()), w - np.float32(LR))
    found = await get(s.pushpull({"emb": rows}))
    assert "emb" not in found
    np.testing.assert_array_equal(found["w"], w - np.float32(LR))
    future = s.push_async({"emb": rows}, weight=0.5)
    assert isinstance(future, Future)
    version = await get(future)
    assert version == 3
    np.subtract.at(expected, IDS.ravel(), np.float32(1.5 * LR))
    ids = np.arange(ROWS)
    found = await get(s.pull_async((), rows={"emb": ids}, min_version=version))
    np.testing.assert_array_equal(found["emb"], expected)


async def adds_and_assigns_rows(s, get):
    """`add` sums repeats, also of integers; in `assign` the last one holds."""
    expected, values = rows_at_first(), quarters(IDS)
    await get(s["emb"].add(IDS, values))
    np.add.at(expected, IDS.ravel(), values.reshape(-1, DIM))
    await check(s, get, expected)
    await get(s["emb"].assign(IDS, values))
    expected[IDS.ravel()] = values.reshape(-1, DIM)
    await check(s, get, expected)
    ones = np.ones((2, 3, 1), "i8")
    await get(s.add({"seen": RowGrad(IDS, ones), "n": [1, 1, 1, 1]}))
    assert (await get(s["seen"].pull([17, 49, 1]))).ravel().tolist() == [2, 1, 0]
    await get(s.assign({"seen": RowGrad([17], [[7]]), "nix": 0}, allow_extra=True))
    assert (await get(s["seen"].pull(17))).tolist() == [7]


async def tells_changes(s, get):
    """What others have changed since the call before, in one copy of the table."""
    emb, expected = s["emb"], rows_at_first()
    first = await get(emb.pull_changed())
    assert first.ids.tolist() == [*range(ROWS)]
    assert not first.complete
    np.testing.assert_array_equal(first.rows, expected, strict=True)
    others = s.bound()
    push_as_another(others)
    await get(emb.add([3, 49], quarters([3, 49])))
    expected[[3, 49]] += quarters([3, 49])
    await get(others["emb"].add(IDS, quarters(IDS)))
    np.add.at(expected, IDS.ravel(), quarters(IDS).reshape(-1, DIM))
    await get(others["emb"].assign([], np.zeros((0, DIM))))
    since = pickle.loads(pickle.dumps(first.since))
    for handle, ids in ((s, [0, 3, 17, 33, 49]), (others, [3, 49])):
        found = await get(handle["emb"].pull_changed(since))
        assert found.complete
        assert found.ids.tolist() == ids
        np.testing.assert_array_equal(found.rows, expected[ids], strict=True)
    # Of what only this process has pushed it is told nothing.
    await get(emb.add([5], quarters([5])))
    nothing = await get(emb.pull_changed(found.since))
    assert (nothing.ids.shape, nothing.rows.shape) == ((0,), (0, DIM))
    assert nothing.complete
    with pytest.raises(ValueError, match=r"is of table 'emb' of this store, .* 'two'"):
        await get(s["two"].pull_changed(since))
    with pytest.raises(TypeError, match="found int; begin with since=None"):
        await get(emb.pull_changed(7))


def absent(ids):
    """Return what rows read as that nobody has made."""
    flat = np.asarray(ids, "i8").reshape(-1)
    rows = initial_rows(flat, (DIM, "float32"), FIRST, name="any", seed=0)
    return rows.reshape((*np.shape(ids), DIM))


async def check_any(s, get, expected):
    """The rows of an unbounded table are these, and all others are absent."""
    table, ids = s["any"], [*expected, 5, -(2**40)]
    rows = np.array([expected.get(i, absent([i])[0]) for i in ids], "f4")
    np.testing.assert_array_equal(await get(table.pull(ids)), rows, strict=True)
    there = await get(table.contains([ids]))
    assert there.tolist() == [[True] * len(expected) + [False] * 2]
    assert (await get(table.ids())).tolist() == sorted(expected)


async def keeps_unbounded_rows(s, get):
    """A pull makes no row; each verb that changes rows makes those that it names."""
    table = s["any"]
    np.testing.assert_array_equal(
        await get(table.pull(UNBOUNDED_IDS)), absent(UNBOUNDED_IDS)
    )
    assert (await get(table.pull([]))).shape == (0, DIM)
    expected: dict[int, Any] = {}
    await check_any(s, get, expected)
    grads = quarters(UNBOUNDED_IDS)
    version = await get(table.push(UNBOUNDED_IDS, grads))
    assert version == 1
    assert len(version.pairs) == 3
    for i, grad in zip(UNBOUNDED_IDS.flat, grads.reshape(-1, DIM), strict=True):
        expected[i] = expected.get(i, absent(i)) - np.float32(LR) * grad
    await check_any(s, get, expected)
    ones = np.ones((2, DIM), "f4")
    await get(s.add({"any": RowGrad([17, 99], ones), "n": [1, 1, 1, 1]}))
    expected |= {17: expected[17] + 1, 99: absent(99) + 1}
    await get(table.assign([-3, -3], np.array([[1] * DIM, [2] * DIM])))
    expected[-3] = np.full(DIM, 2, "f4")
    await check_any(s, get, expected)
    await get(table.remove([[17, 99], [17, 1234]]))
    await get(table.remove([]))
    del expected[17], expected[99]
    await get(s.push({"any": RowGrad([17], ones[:1]), "emb": RowGrad([1], ones[:1])}))
    expected[17] = absent(17) - np.float32(LR)
    await check_any(s, get, expected)
    out = np.full((2, 3, 2 * DIM), np.nan, "f4")[..., ::2]
    rows = {"any": UNBOUNDED_IDS, "two": [1]}
    found = await get(s.pull("b", rows=rows, out={"any": out, "b": np.empty(())}))
    assert found["any"] is out
    wanted = np.array([expected[i] for i in UNBOUNDED_IDS.flat]).reshape(2, 3, DIM)
    np.testing.assert_array_equal(out, wanted)
    found = await get(s.pull_async((), rows=rows))
    np.testing.assert_array_equal(found["any"], wanted)
    assert found["two"].tolist() == [[1.5, 1.5]]


async def counts_unbounded_rows(s, get):
    """Attributes ask the shards; what changes rows refuses what it does for others."""
    table, few = s["any"], s["two"]
    await get(s.pull((), rows={"any": [7]}))
    asks = inspect.isawaitable(counted := table.n_rows)
    assert (table.rows, table.dim, await get(counted)) == (None, DIM, 0)
    await get(table.assign([3, -4], quarters([3, -4])))
    assert (await get(table.n_rows), await get(table.nbytes)) == (2, 2 * DIM * 4)
    told = (await get(s.stats()))["tables"]["any"]
    expected = {"rows": 2, "dim": DIM, "dtype": "float32", "nbytes": 24, "steps": 0}
    assert told == {**told, **expected}
    if asks:
        with pytest.raises(TypeError, match=r"await store\['any'\].n_rows"):
            len(table)
    else:
        assert len(table) == 2
    assert repr(table) == (
        f"<daskps.ParameterTable 'any': unbounded rows, 3 float32 each, of store "
        f"{s.name!r}>"
    )
    assert "33.3% of all ids" in table._repr_html_()
    assert "unbounded" in s._repr_html_()
    for ids in ([1.0], [True], ["1"], np.array([2**63], "u8"), [None], "any"):
        for verb in (table.pull, table.contains):
            with pytest.raises(ValueError, match="table 'any'"):
                await get(verb(ids))
        with pytest.raises(daskps.PushRejectedError, match="table 'any'"):
            await get(table.remove(ids))
    with pytest.raises(daskps.PushRejectedError, match="is a table of unbounded rows"):
        await get(s.push({"any": np.ones(DIM)}))
    with pytest.raises(daskps.PushRejectedError, match="use assign to replace"):
        await get(few.remove([1]))
    ids, rows = (await get(s.snapshot()))["any"]
    await get(table.assign([3], quarters([3]) + 1))
    ids = (await computed(ids, get)).tolist()
    assert sorted(ids) == [-4, 3]
    wanted = dict(zip([3, -4], quarters([3, -4]).tolist(), strict=True))
    assert (await computed(rows, get)).tolist() == [wanted[i] for i in ids]


async def refuses_rows(s, get):
    """What fits no table is refused before anything is sent, and changes nothing."""
    ones, emb = np.ones((1, DIM)), s["emb"]
    wrong = [50], [-1], [1.0], [True], ["1"], np.array([2**63], "u8"), [None], "emb"
    for ids in wrong:
        with pytest.raises(ValueError, match="table 'emb'"):
            await get(emb.pull(ids))
        for verb in (emb.push, emb.add, emb.assign):
            with pytest.raises(daskps.PushRejectedError, match="table 'emb'"):
                await get(verb(ids, ones))
    for values in (np.ones(DIM), np.ones((1, DIM + 1)), ones + 1j, 1.0):
        with pytest.raises(daskps.PushRejectedError, match="table 'emb'"):
            await get(emb.push([1], values))
    with pytest.raises(daskps.PushRejectedError, match="NaN or Inf"):
        await get(emb.push([1], ones * np.nan))
    with pytest.raises(ValueError, match="weight must be at least 0"):
        await get(emb.push([1], ones, weight=-1.0))
    with pytest.raises(daskps.PushRejectedError, match="int64 and takes no gradient"):
        await get(s["seen"].push([1], [[1]]))
    rows = RowGrad([1], ones)
    for grads, said in [
        ({"emb": np.ones((ROWS, DIM))}, r"RowGrad\(ids, values\)"),
        ({"w": rows}, r"'w', which is an array of shape \(5, 3\)"),
        ({"w": np.ones((5, 3)), "emb": RowGrad([50], ones)}, "found id 50"),
    ]:
        for verb in (s.push, s.add, s.assign, s.pushpull):
            with pytest.raises(daskps.PushRejectedError, match=said):
                await get(verb(grads))
    with pytest.raises(daskps.UnknownParameterError, match="'nix'"):
        await get(s.push({"nix": rows}))
    with pytest.raises(daskps.UnknownParameterError, match=r"is a table.*pull\(rows="):
        await get(s.pull("emb"))
    with pytest.raises(ValueError, match="'w', which is an array"):
        await get(s.pull(rows={"w": [1]}))
    with pytest.raises(TypeError, match="rows is a mapping"):
        await get(s.pull(rows=[1]))
    with pytest.raises(ValueError, match=r"out\['emb'\] has shape"):
        await get(emb.pull([1], out=np.empty(DIM, "f4")))
    memory, asked = np.zeros(6 * DIM, "f4"), {"emb": [1, 2], "any": [1, 2]}
    one, other = memory[: 2 * DIM], memory[DIM : 3 * DIM]
    out = {"emb": one.reshape(2, DIM), "any": other.reshape(2, DIM)}
    with pytest.raises(ValueError, match=r"out\['emb'\] and out\['any'\] share"):
        await get(s.pull((), rows=asked, out=out))
    out = {"emb": out["emb"], "w": memory[DIM - 1 :][:15].reshape(5, 3)}
    with pytest.raises(ValueError, match=r"out\['emb'\] and out\['w'\] share"):
        await get(s.pull(rows={"emb": [1, 2]}, out=out))
    assert not memory.any()
    with pytest.raises(daskps.PushRejectedError, match=r"'emb'.*takes no rows"):
        await get(s.aggregate([{"emb": rows}]))
    await check(s, get, rows_at_first())
    assert await get(s.version) == 0


async def copies_tables(s, get):
    """A snapshot has all rows of a table, at the version of everything else."""
    await get(s["emb"].assign([7], np.full((1, DIM), -1)))
    expected = rows_at_first()
    expected[7] = -1
    taken = await get(s.snapshot())
    await get(s["emb"].assign([8], np.full((1, DIM), -2)))
    assert set(taken) == set(s.names)
    emb = taken["emb"]
    assert emb.chunks == ((17, 17, 16), (DIM,))
    np.testing.assert_array_equal(await computed(emb, get), expected, strict=True)
    assert (await computed(taken["two"], get)).tolist() == [[1.5, 1.5]] * 2
    expected[8] = -2
    alone = await get(s["emb"].to_dask_array())
    np.testing.assert_array_equal(await computed(alone, get), expected, strict=True)


async def computed(array, get):
    """Return what a dask array holds, from wherever this is."""
    from distributed import get_client

    found = get_client().compute(array)
    return await found if get_client().asynchronous else found.result()


async def says_what_tables_are(s, get):
    """Attributes, ids and representations tell of tables as of arrays."""
    await get(s.pull("w"))
    emb = s["emb"]
    assert (emb.name, emb.rows, emb.dim, emb.dtype) == ("emb", ROWS, DIM, "float32")
    assert len(emb) == emb.n_rows == ROWS
    assert emb.nbytes == ROWS * DIM * 4
    assert (await get(emb.ids())).tolist() == [*range(ROWS)]
    assert (await get(emb.contains([[0, 49], [50, -1]]))).tolist() == [
        [True, True],
        [False, False],
    ]
    assert s.names == [*s] == [*s.layout.by_name, "emb", "seen", "two", "any"]
    assert len(s) == len(s.names)
    assert "emb" in s
    assert s.optimizer["emb"] == s.optimizer["two"] == "SGD(lr=0.5)"
    assert "seen" not in s.optimizer
    assert repr(emb) == (
        f"<daskps.ParameterTable 'emb': 50 rows of 3 float32, of store {s.name!r}>"
    )
    assert "8 parameters, 4 tables" in repr(s)
    for html in (s._repr_html_(), emb._repr_html_()):
        assert "emb" in html
        assert "float32" in html
    with pytest.raises(TypeError, match=r"store\['emb'\]\.pull\(ids\)"):
        emb[3]
    with pytest.raises(TypeError, match=r"\.assign\(ids, values\)"):
        emb[3] = 1
    with pytest.raises(TypeError, match=r"store\['emb'\]\.pull\(ids\)"):
        np.asarray(emb)


ROW_CONTRACTS = [
    pulls_rows,
    pulls_rows_with_arrays,
    pushes_rows,
    pushes_rows_with_arrays,
    adds_and_assigns_rows,
    tells_changes,
    keeps_unbounded_rows,
    counts_unbounded_rows,
    refuses_rows,
    copies_tables,
    says_what_tables_are,
]
