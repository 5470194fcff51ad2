"""What a store takes and what it refuses, through a real one."""

from __future__ import annotations

import threading
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask.base import compute
from dask.delayed import delayed
from distributed import Client, LocalCluster

import daskps
from daskps import ArraySpec, optim

SHARDS = [1, 2, 3, 5, 7]


def same(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], np.asarray(value), strict=True)


# -- accepted --------------------------------------------------------------------


def read_only(a):
    a.flags.writeable = False
    return a


def mapped(a, tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, a)
    return np.load(path, mmap_mode="r")


#: Every layout and byte order of 4 by 6 small numbers, by name.
FORMS = {
    "not contiguous": lambda a, _: np.repeat(a, 2, axis=1)[:, ::2],
    "negative stride": lambda a, _: np.ascontiguousarray(a[::-1, ::-1])[::-1, ::-1],
    "Fortran order": lambda a, _: np.asfortranarray(a),
    "read-only": lambda a, _: read_only(a.copy()),
    "memory-mapped": mapped,
    "big-endian": lambda a, _: a.astype(a.dtype.newbyteorder(">")),
    "broadcast view": lambda a, _: np.broadcast_to(a[:1], a.shape),
    "0-d": lambda a, _: np.asarray(a[1, 2]),
    "scalar": lambda a, _: a[1, 2],
    "zero-size": lambda a, _: a[:0],
    "one axis": lambda a, _: a[1],
    "five axes": lambda a, _: a.reshape(2, 1, 2, 3, 2),
    "list": lambda a, _: a.tolist(),
}


@pytest.mark.parametrize("form", FORMS)
def test_accepted_arrays(client, form, tmp_path):
    """In create, push, add, assign and aggregate; values as NumPy's, input untouched."""
    given = FORMS[form](np.arange(24, dtype="f8").reshape(4, 6), tmp_path)
    value = np.array(given, dtype="f8")
    with daskps.create(
        {"w": given}, optimizer=optim.SGD(0.5), shards=3, client=client
    ) as s:
        same(s.pull(), {"w": value})
        s.push({"w": given})
        same(s.pull(), {"w": value - 0.5 * value})
        s.add({"w": given})
        same(s.pull(), {"w": 1.5 * value})
        s.push_async({"w": given}, lr=1.0).result(timeout=30)
        same(s.pull(), {"w": 0.5 * value})
        s.assign({"w": given})
        same(s.pull(), {"w": value})
        same(s.aggregate([{"w": given}, {"w": given}], reduce="sum"), {"w": 2 * value})
    np.testing.assert_array_equal(given, value)


MIXED = {
    "half": np.arange(5, dtype="f2"),
    "single": np.arange(6, dtype="f4").reshape(2, 3),
    "double": np.linspace(0, 1, 11),
    "one": np.float32(3),
    "few": np.arange(2, dtype="f8"),
    "none": np.zeros((3, 0, 2)),
    **{f"i{n}": np.arange(-2, 3).astype(f"i{n}") for n in (1, 2, 4, 8)},
    **{f"u{n}": np.arange(5).astype(f"u{n}") for n in (1, 2, 4, 8)},
    "yes": np.array([True, False, True]),
}


@pytest.mark.parametrize("shards", SHARDS)
def test_dtypes_side_by_side(client, shards):
    """Every dtype in one store, 0-d, empty, and fewer elements than shards."""
    with daskps.create(MIXED, shards=shards, client=client) as s:
        same(s.pull(), MIXED)
        assert s.layout.n_shards == shards
        numbers = {n: v for n, v in MIXED.items() if n != "yes"}
        s.add({n: np.ones_like(v) for n, v in numbers.items()})
        expected = {n: v + np.ones_like(v) for n, v in numbers.items()}
        same(s.pull(numbers), expected)
        turned = {n: np.flip(np.asarray(v)) for n, v in MIXED.items()}
        s.assign(turned)
        same(s.pull(), turned)


def test_nested_mappings_are_flattened(client):
    nested = {"a": {"b": {"c": np.ones(2)}, "d": np.zeros(3)}, "e/f": np.ones(1)}
    with daskps.create(nested, client=client) as s:
        assert s.names == ["a/b/c", "a/d", "e/f"]
        s.add({"a": {"b/c": np.ones(2)}, "e": {"f": np.ones(1)}})
        same(s.pull(), {"a/b/c": [2.0, 2.0], "a/d": [0.0] * 3, "e/f": [2.0]})


NAMES = [
    "/",
    "a//b",
    " ",
    "x y\n",
    "größe-重み-🎈",
    "n" * 10_000,
    "\xe9",
    "__class__",
    "0",
]


def test_any_name(way):
    """Any non-empty str names a parameter, also two that only look alike."""
    names = [*NAMES, "e\u0301"]
    params = {n: np.full(3, i, "f4") for i, n in enumerate(names)}
    with daskps.create(params, optimizer=optim.SGD(1.0), client=way) as s:
        same(s.pull(), params)
        for i, name in enumerate(names):
            s.push({name: np.ones(3, "f4")})
            np.testing.assert_array_equal(s[name].pull(), i - 1.0)
            np.testing.assert_array_equal(s[name][1:2], i - 1.0)
        assert way.submit(names_of, s).result(timeout=30) == names


def names_of(store):
    return list(store.pull())


def halves(shape, dtype, rng):
    return rng.random(shape).astype(dtype) / 2


INITS = {
    "number": ArraySpec((7, 9), "f4", 2.5),
    "zeros": ArraySpec(5, "i4"),
    "constant": ArraySpec((2, 2), "bool", True),
    "uniform": ArraySpec((300, 300), "f4", daskps.init.uniform(-1, 1)),
    "normal": ArraySpec((11,), "f8", daskps.init.normal(std=0.1)),
    "fan in": ArraySpec((8, 4), "f4", daskps.init.fan_in()),
    "fan avg": ArraySpec((8, 4), "f2", daskps.init.fan_avg()),
    "own": ArraySpec((70_000,), "f4", halves),
    "0-d": ArraySpec((), "f8", daskps.init.normal()),
    "empty": ArraySpec((0, 3), "f8", daskps.init.normal()),
}


def test_initializers_give_the_same_numbers_on_any_number_of_shards(client):
    """And others for another seed."""
    found = {}
    for shards in SHARDS:
        with daskps.create(INITS, shards=shards, seed=3, client=client) as s:
            found[shards] = s.pull()
            same(found[shards], found[1])
    for name, spec in INITS.items():
        assert found[1][name].shape == spec.shape
        assert found[1][name].dtype == spec.dtype
    assert (found[1]["number"] == 2.5).all()
    assert 0 <= found[1]["own"].min() < found[1]["own"].max() <= 0.5
    with daskps.create(INITS, seed=4, client=client) as s:
        other = s.pull()
    for name in ("uniform", "normal", "fan in", "fan avg", "own", "0-d"):
        assert (other[name] != found[1][name]).any()


X = np.arange(60, dtype="f8").reshape(12, 5)
ARRAYS = {
    "rows": da.from_array(X, chunks=(5, 5)),
    "columns": da.from_array(X, chunks=(12, 2)),
    "blocks": da.from_array(X, chunks=((3, 9), (1, 4))),
    "elements": da.from_array(X[:3, :2], chunks=1),
    "one chunk": da.from_array(X, chunks=-1),
    "0-d": da.from_array(np.array(3.0), chunks=()),
    "reduced": da.from_array(X, chunks=4).sum(),
    "empty": da.from_array(X[:0], chunks=(5, 5)),
    "empty chunk": da.concatenate([da.zeros((0, 5)), da.from_array(X, chunks=5)]),
    "vector": da.arange(17, chunks=4, dtype="i4"),
    "cube": da.from_array(X.reshape(3, 4, 5), chunks=(2, 3, 2)),
    "transposed": da.from_array(X, chunks=(5, 2)).T,
    "random": da.random.default_rng(1).random((9, 3), chunks=(2, 3)),
    "big-endian": da.from_array(X.astype(">f8"), chunks=(5, 5)),
}


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_dask_arrays(client, shards):
    """Of any chunks, beside NumPy arrays; written by the workers."""
    expected = dict(zip(ARRAYS, compute(*ARRAYS.values()), strict=True))
    expected["big-endian"] = X
    params = {**ARRAYS, "plain": X}
    with daskps.create(params, shards=shards, client=client) as s:
        same(s.pull(), {**expected, "plain": X})
        assert s.version == 0


def test_dask_arrays_of_what_is_drawn_belong_together(client):
    drawn = delayed(lambda: np.random.default_rng().normal(size=6))()
    x = da.from_delayed(drawn, (6,), "f8")
    with daskps.create({"x": x, "y": 2 * x, "s": x.sum()}, client=client) as s:
        found = s.pull()
        np.testing.assert_array_equal(found["y"], 2 * found["x"])
        assert found["s"] == found["x"].sum()


def test_persisted_dask_array_is_not_pulled_to_the_client(client):
    """Its chunks are written from where they are."""
    x = da.from_array(X, chunks=(3, 5)).map_blocks(where_it_ran).persist()
    with daskps.create({"x": x}, client=client) as s:
        workers = client.run(pid)
        assert set(s["x"].pull().ravel()) <= set(map(float, workers.values()))


def where_it_ran(block):
    return np.full_like(block, pid())


def pid():
    import os

    return os.getpid()


# -- refused: arrays ---------------------------------------------------------------


W = np.arange(12, dtype="f4").reshape(3, 4)
Rejected = daskps.PushRejectedError


def structured():
    return np.zeros((3, 4), [("a", "f4"), ("b", "f4")])


def masked():
    return np.ma.MaskedArray(W, W > 3)


class Tensor:
    """What a torch tensor with grad shows of itself."""

    requires_grad = True
    shape = (3, 4)

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


#: What no array verb takes: value, error, and the fix that the message names.
BAD_ARRAYS = {
    "one axis less": (lambda: W[0], "shapes must be equal"),
    "broadcastable": (lambda: W[:1], "nothing is broadcast"),
    "scalar": (lambda: 1.0, "nothing is broadcast"),
    "one axis more": (lambda: W[None], "shapes must be equal"),
    "transposed": (lambda: W.T, "shapes must be equal"),
    "complex": (lambda: W.astype("c8"), "convert it to one of"),
    "object": (lambda: W.astype(object), "convert it to one of"),
    "string": (lambda: W.astype(str), "convert it to one of"),
    "bytes": (lambda: W.astype("S4"), "convert it to one of"),
    "date": (lambda: W.astype("M8[s]"), "convert it to one of"),
    "structured": (structured, "convert it to one of"),
    "masked": (masked, r"\.filled\(0\)"),
    "tensor with grad": (Tensor, r"\.detach\(\)"),
    "ragged": (lambda: [[1.0], [1.0, 2.0]], "cannot be made a NumPy array"),
    "none": (lambda: None, "convert it to one of"),
    "dask array": (lambda: da.zeros((3, 4)), r"\.compute\(\)"),
    "NaN": (lambda: np.where(W == 5, np.nan, W), "daskps.finite"),
    "Inf": (lambda: np.where(W == 11, np.inf, W), "NaN or Inf"),
    "-Inf": (lambda: np.where(W == 0, -np.inf, W), "NaN or Inf"),
    "too large": (lambda: W.astype("f8") * 1e300, "NaN or Inf"),
}
BAD_MAPPINGS = {
    "unknown": (lambda: {"typo": W}, daskps.UnknownParameterError, "'w'"),
    "one extra": (lambda: {"w": W, "x": W}, daskps.UnknownParameterError, "'x'"),
    "int name": (lambda: {0: W}, TypeError, r"str\(\.\.\.\)"),
    "bytes name": (lambda: {b"w": W}, TypeError, r"str\(\.\.\.\)"),
    "empty name": (lambda: {"": W}, daskps.LayoutError, "name it"),
    "no mapping": (lambda: W, TypeError, "pass {'w': array}"),
    "pairs": (lambda: [("w", W)], TypeError, "pass {'w': array}"),
}
VERBS = {
    "push": lambda s, g: s.push(g),
    "pushpull": lambda s, g: s.pushpull(g),
    "push_async": lambda s, g: s.push_async(g).result(timeout=30),
    "add": lambda s, g: s.add(g),
    "assign": lambda s, g: s.assign(g),
    "aggregate": lambda s, g: s.aggregate([{"w": W}, g]),
}


@pytest.fixture(scope="module")
def kept(cluster):
    """A store that all refusals must leave as it is."""
    params = {"w": W, "n": np.arange(4), "yes": np.array([True, False])}
    with daskps.create(
        params, optimizer=optim.Adam(), shards=3, client=cluster
    ) as store:
        store.push({"w": np.ones_like(W)})
        yield store


@pytest.fixture
def unchanged(kept):
    before, versions = kept.pull(), kept.versions
    yield kept
    same(kept.pull(), before)
    assert kept.versions == versions


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("bad", BAD_ARRAYS)
def test_refused_arrays(unchanged, verb, bad):
    make, fix = BAD_ARRAYS[bad]
    with pytest.raises(Rejected, match=fix):
        VERBS[verb](unchanged, {"w": make()})


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("bad", BAD_MAPPINGS)
def test_refused_mappings(unchanged, verb, bad):
    make, error, fix = BAD_MAPPINGS[bad]
    with pytest.raises(error, match=fix):
        VERBS[verb](unchanged, make())


@pytest.mark.parametrize(
    ("verb", "given", "fix"),
    [
        ("push", {"n": np.ones(4)}, "add or assign"),
        ("push", {"n": np.ones(4, int)}, "add or assign"),
        ("push", {"yes": np.ones(2, bool)}, "add or assign"),
        ("add", {"n": np.ones(4)}, r"\.astype\('int64'\)"),
        ("assign", {"n": np.ones(4)}, r"\.astype\('int64'\)"),
        ("assign", {"yes": np.ones(2, int)}, r"\.astype\('bool'\)"),
        ("add", {"n": [1.5, 0, 0, 0]}, "same_kind"),
        ("assign", {"n": [2**70, 0, 0, 0]}, "convert it"),
    ],
)
def test_refused_dtypes(unchanged, verb, given, fix):
    with pytest.raises(Rejected, match=fix):
        VERBS[verb](unchanged, given)


def test_one_bad_array_refuses_the_whole_push(unchanged):
    """Also on the shards that only the good one touches."""
    for verb in ("assign", "add"):
        with pytest.raises(Rejected, match="'n'"):
            VERBS[verb](unchanged, {"w": W, "n": np.ones(4)})


@pytest.mark.parametrize(
    ("options", "error", "fix"),
    [
        ({"weight": np.nan}, ValueError, "weight must be a finite number"),
        ({"weight": "1"}, TypeError, "weight is a number"),
        ({"weight": True}, TypeError, "weight is a number"),
        ({"weight": -1}, ValueError, "weight must be at least 0, found -1"),
        ({"lr": -0.1}, ValueError, "lr must be at least 0"),
        ({"lr": np.inf}, ValueError, "lr must be a finite number"),
        ({"learning_rate": 1.0}, TypeError, "learning_rate"),
        ({"timeout": -1}, ValueError, "timeout=-1"),
        ({"timeout": "soon"}, ValueError, "'30s'|\"30s\""),
        ({"timeout": True}, TypeError, "seconds"),
        ({"timeout": np.nan}, ValueError, "seconds"),
        ({"timeout": []}, TypeError, "seconds"),
    ],
)
def test_refused_options_of_push(unchanged, options, error, fix):
    with pytest.raises(error, match=fix):
        unchanged.push({"w": W}, **options)
    with pytest.raises(error, match=fix):
        unchanged["w"].region(0, 1).push([1.0], **options)


@pytest.mark.parametrize(
    ("call", "error", "fix"),
    [
        (lambda s: s.pull("typo"), daskps.UnknownParameterError, "it holds"),
        (lambda s: s.pull(["w", 3]), TypeError, "are str"),
        (lambda s: s.pull("w", copy=False), TypeError, "copy"),
        (lambda s: s.aggregate([{"w": W}], reduce="most"), ValueError, "'most'"),
        (lambda s: s.aggregate([]), ValueError, "at least one"),
        (lambda s: s.assign({"w": W}, allow=True), TypeError, "allow"),
        (lambda s: s.assign({"w": W}, allow_missing="no"), TypeError, "allow_missing"),
        (lambda s: s.assign({"v": W}, allow_extra=1), TypeError, "True or False"),
        (lambda s: s.close(timeout="soon"), ValueError, "seconds"),
        (lambda s: s.stats(timeout=-1), ValueError, "seconds"),
        (lambda s: s["w"].pull(out=W[0]), ValueError, "must be equal"),
    ],
)
def test_refused_calls(unchanged, call, error, fix):
    with pytest.raises(error, match=fix):
        call(unchanged)


def test_not_finite_is_taken_where_configured(client):
    with (
        dask.config.set({"daskps.finite": "allow"}),
        daskps.create({"w": W}, client=client) as s,
    ):
        s.assign({"w": np.full_like(W, np.inf)})
        assert np.isinf(s["w"].pull()).all()


def test_push_without_an_optimizer(client):
    with daskps.create({"w": W}, client=client) as s:
        for verb in ("push", "pushpull", "push_async"):
            with pytest.raises(daskps.NoOptimizerError, match="optimizer="):
                VERBS[verb](s, {"w": W})
        assert s.version == 0


# -- refused: create and open ------------------------------------------------------


def lock_in_a_closure():
    lock = threading.Lock()
    return lambda shape, dtype, rng: (lock, np.zeros(shape))[1]


def nan_block(shape, dtype, rng):
    return np.full(shape, np.nan)


def two_blocks(shape, dtype, rng):
    return np.zeros((2, *shape))


def raises(shape, dtype, rng):
    raise ZeroDivisionError("no luck")


def unknown_chunks():
    x = da.from_array(X, chunks=4)
    return x[x[:, 0] > 3]


Layout = daskps.LayoutError
BAD_PARAMS: dict[str, tuple[Any, Any, str]] = {
    "nothing": (dict, Layout, "at least one"),
    "no mapping": (lambda: W, TypeError, "pass {'w': array}"),
    "numbers": (lambda: [1.0, 2.0], TypeError, "pass {'w': array}"),
    "pairs": (lambda: [("w", W)], TypeError, "pass {'w': array}"),
    "int name": (lambda: {1: W}, TypeError, "str"),
    "empty name": (lambda: {"a": {"": W}}, Layout, "name it"),
    "twice": (lambda: {"a/b": W, "a": {"b": W}}, Layout, "rename"),
    "complex": (lambda: {"w": W + 1j}, Layout, "convert it"),
    "object": (lambda: {"w": W.astype(object)}, Layout, "convert it"),
    "string": (lambda: {"w": W.astype(str)}, Layout, "convert it"),
    "structured": (lambda: {"w": structured()}, Layout, "convert it"),
    "masked": (lambda: {"w": masked()}, Layout, "filled"),
    "NaN": (lambda: {"w": W * np.nan}, Layout, "finite"),
    "Inf": (lambda: {"w": np.array(np.inf)}, Layout, "finite"),
    "tensor with grad": (lambda: {"w": Tensor()}, Layout, "detach"),
    "unknown chunks": (lambda: {"w": unknown_chunks()}, Layout, "compute_chunk_sizes"),
    "complex dask": (lambda: {"w": da.ones(3, dtype="c8")}, Layout, "use one of"),
    "delayed": (lambda: {"w": delayed(W)}, Layout, "to_dask_array"),
    "NaN init": (lambda: {"w": ArraySpec(3, init=np.nan)}, Layout, "finite"),
    "NaN from init": (lambda: {"w": ArraySpec(3, init=nan_block)}, Layout, "finite"),
    "shape of init": (lambda: {"w": ArraySpec(3, init=two_blocks)}, Layout, "return"),
    "dtype of init": (
        lambda: {"w": ArraySpec(3, "i4", daskps.init.normal())},
        Layout,
        "float dtype",
    ),
    "no init": (lambda: {"w": ArraySpec(3, init="zero")}, TypeError, "daskps.init"),
    "init raises": (
        lambda: {"w": ArraySpec(3, init=raises)},
        ZeroDivisionError,
        "no luck",
    ),
    "init with a lock": (
        lambda: {"w": ArraySpec(3, init=lock_in_a_closure())},
        Layout,
        "module level",
    ),
    "NaN in dask": (lambda: {"w": da.full(9, np.nan, chunks=2)}, Layout, "finite"),
    "masked dask": (
        lambda: {"w": da.ma.masked_greater(da.arange(9.0, chunks=2), 3)},
        Layout,
        "filled",
    ),
    "failing dask": (
        lambda: {"w": da.zeros(4, chunks=2).map_blocks(divide, dtype="f8")},
        ZeroDivisionError,
        "division",
    ),
}


BAD_PARAMS |= {
    "chunks that lie": (
        lambda: {"w": da.zeros(9, chunks=3).map_blocks(np.sum, dtype="f8")},
        Layout,
        "chunks=",
    ),
    "dtype that lies": (
        lambda: {"w": da.zeros(9, chunks=3).map_blocks(np.sqrt, dtype="i8")},
        Layout,
        "dtype=",
    ),
}


def divide(block):
    return block + 1 // 0


@pytest.mark.parametrize("bad", BAD_PARAMS)
def test_refused_params_leave_nothing(client, bad):
    make, error, fix = BAD_PARAMS[bad]
    before = daskps.list_stores()
    with pytest.raises(error, match=fix):
        daskps.create(make(), client=client)
    assert daskps.list_stores() == before


@pytest.mark.parametrize(
    ("options", "error", "fix"),
    [
        ({"name": "n" * 201}, ValueError, "at most 200"),
        ({"name": "é" * 101}, ValueError, "at most 200"),
        ({"name": ""}, ValueError, "without name= for a session"),
        ({"name": 5}, TypeError, "str"),
        ({"shards": 0}, ValueError, "at least 1"),
        ({"shards": 1.5}, TypeError, "int"),
        ({"shards": True}, TypeError, "int"),
        ({"servers": "some"}, ValueError, "'auto', 'all', 'resource:NAME'"),
        ({"servers": []}, TypeError, "addresses"),
        ({"servers": [3]}, TypeError, "addresses"),
        ({"servers": 3}, TypeError, "addresses"),
        ({"seed": -1}, ValueError, "at least 0"),
        ({"seed": "1"}, TypeError, "int"),
        ({"overwrite": "no"}, TypeError, "overwrite is True or False"),
        ({"timeout": -1}, ValueError, "seconds"),
        ({"timeout": "soon"}, ValueError, "seconds"),
        ({"device": "cpu"}, ValueError, "device"),
        ({"replicas": 2}, TypeError, "replicas"),
        ({"optimizer": "sgd"}, TypeError, "optim"),
        ({"optimizer": {"v*": optim.SGD(0.1)}}, Layout, "v\\*"),
        ({"optimizer": {}}, Layout, "'w'"),
    ],
)
def test_refused_options_of_create(client, options, error, fix):
    before = daskps.list_stores()
    with pytest.raises(error, match=fix):
        daskps.create({"w": W}, client=client, **options)
    assert daskps.list_stores() == before


def test_longest_name(client):
    name = "é" * 100
    s = daskps.create({"w": W}, name=name, client=client)
    same(daskps.open(name).pull(), {"w": W})
    assert name in [info.name for info in daskps.list_stores()]
    s.delete()


def test_taken_name(client):
    """S6, M12: refused, and the store that has the name is as it was."""
    s = daskps.create({"w": W}, name="taken", client=client)
    s.add({"w": np.ones_like(W)})
    with pytest.raises(daskps.StoreExistsError, match=r"daskps.open\('taken'\)"):
        daskps.create({"w": W * 0}, name="taken", client=client)
    same(s.pull(), {"w": W + 1})
    assert s.version == 1
    replaced = daskps.create({"w": W * 0}, name="taken", client=client, overwrite=True)
    same(daskps.open("taken").pull(), {"w": W * 0})
    with pytest.raises(daskps.StoreClosedError, match="overwrite"):
        s.pull()
    replaced.delete()


@pytest.mark.parametrize("call", [lambda: daskps.create({"w": W}), daskps.list_stores])
def test_no_client(call):
    """Dask's own error, from a process that has never had a client."""
    found = []

    def alone():
        try:
            call()
        except ValueError as error:
            found.append(error)

    import contextvars

    from distributed import client as dask_client

    clients = dask_client._global_clients
    before = clients.copy()
    clients.clear()
    try:
        thread = threading.Thread(target=contextvars.Context().run, args=(alone,))
        thread.start()
        thread.join()
    finally:
        clients.update(before)
    assert "client" in str(found[0]).lower()


@pytest.mark.parametrize(
    "servers",
    [["tcp://127.0.0.1:1"], "resource:TPU"],
)
def test_not_enough_workers(client, servers):
    """Naming who is missing."""
    before = daskps.list_stores()
    missing = servers[0] if isinstance(servers, list) else servers
    with (
        dask.config.set({"daskps.register-timeout": "100ms"}),
        pytest.raises(daskps.NotEnoughWorkersError, match=f"{missing}.*Start workers"),
    ):
        daskps.create({"w": W}, servers=servers, client=client)
    assert daskps.list_stores() == before


def test_no_workers():
    with (
        LocalCluster(
            n_workers=0, processes=False, dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster) as client,
        dask.config.set({"daskps.register-timeout": "100ms"}),
        pytest.raises(daskps.NotEnoughWorkersError, match="has 0"),
    ):
        daskps.create({"w": W}, client=client)


def test_too_little_memory():
    """Refused by name of the worker, with the need and the limit; a small one fits."""
    off = {
        f"distributed.worker.memory.{name}": False
        for name in ("target", "spill", "pause", "terminate")
    }
    with (
        dask.config.set(off),
        LocalCluster(
            n_workers=1,
            processes=False,
            memory_limit="4 MB",
            dashboard_address="127.0.0.1:0",
        ) as cluster,
        Client(cluster) as client,
    ):
        [worker] = client.nthreads()
        with pytest.raises(daskps.LayoutError) as caught:
            daskps.create({"w": np.zeros(10**6)}, client=client)
        assert worker in str(caught.value)
        assert "4,000,000" in str(caught.value)
        assert "memory-share" in str(caught.value)
        for _ in range(5):
            # Two buffers of 0.2 of the limit; what was closed does not count.
            with daskps.create({"w": np.zeros(10**5)}, client=client) as s:
                assert s.add({"w": np.ones(10**5)}) == 1
        with daskps.create({"w": np.zeros(10**4)}, client=client) as s:
            # What is held counts: many small ones do not fit either.
            with pytest.raises(daskps.LayoutError, match="it holds"):
                [daskps.create({"w": np.zeros(10**4)}) for _ in range(100)]
            same(s.pull(), {"w": np.zeros(10**4)})


def test_unknown_store(client):
    with pytest.raises(daskps.StoreNotFoundError, match=r"daskps\.create"):
        daskps.open("nobody")


def test_store_of_no_cluster(client):
    with pytest.raises(daskps.StoreNotFoundError, match="create it again"):
        daskps.ParameterStore("0" * 32, "gone").pull()


def test_a_weight_that_overflows_is_refused(client):
    """The product is checked, not only the gradient."""
    s = daskps.create({"w": np.zeros(10, "f4")}, optimizer=optim.SGD(0.1))
    before = s.version
    with pytest.raises(daskps.PushRejectedError, match="smaller weight"):
        s.push({"w": np.full(10, 1e30, "f4")}, weight=1e30)
    assert s.version == before
    assert s.push({"w": np.ones(10, "f4")}, weight=2.0) == before + 1
    np.testing.assert_allclose(s["w"].pull(), -0.2, rtol=1e-6)
