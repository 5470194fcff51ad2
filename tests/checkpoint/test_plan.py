"""The files of one state: the same from any cut, read by Zarr, and into any other cut."""

from __future__ import annotations

import json
from typing import Any

import dask.array as da
import numpy as np
import pytest

from daskps.checkpoint import grid
from daskps.checkpoint.arrays import Counts, key, stored_arrays
from daskps.checkpoint.manifest import MANIFEST
from daskps.checkpoint.plan import (
    chunks_read,
    chunks_written,
    hash_range,
    rows_local,
    rows_read,
)
from daskps.errors import IllegalStateError
from daskps.init import constant
from daskps.kernels.id_hash import hashes
from daskps.layout.arrays import Layout
from daskps.layout.slots import PerRow
from daskps.layout.spans import CANDIDATES, COUNTS, IDS, ROWS, slot_area
from daskps.layout.tables import UnboundedIds, UnboundedTable
from tests.checkpoint.writing import State, mixed_state, write

zarr = pytest.importorskip("zarr", minversion="3")
SHARDS = [1, 2, 3, 5]


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 64 bytes, so that small arrays have many."""
    monkeypatch.setattr(grid, "CHUNK_NBYTES", 64)


POLICIES = [(0, 0, 1), (1000, 0, 1), (0, 50, 3), (1000, 50, 2)]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("policy", POLICIES)
def test_files_are_the_same_from_any_number_of_shards(policy):
    state = mixed_state(*policy)
    first, *others = (state.files(n) for n in SHARDS)
    assert len(first) > 400
    for files in others:
        assert files == first


@pytest.mark.leaky  # Zarr's own event loop
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[3]])
def test_zarr_and_dask_read_them(policy, tmp_path):
    state = mixed_state(*policy)
    write(tmp_path, state.files(3))
    root = zarr.open_group(tmp_path, mode="r")
    assert root.attrs["daskps"] == {"format": 1}
    arrays, names = state.arrays(), state.layout(1).names
    for array in arrays:
        found = root[array.path]
        (source,) = array.members
        expected = state.values[source.index, array.area]
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert (found[...] == expected).all()
        assert found.attrs["daskps"]["name"] == names[source.index]
        if array.area == ROWS:
            again = da.from_zarr(str(tmp_path), component=array.path)
            assert (again.compute(scheduler="sync") == expected).all()
    # Zarr says which there are without a warning of the file beside them.
    (tmp_path / MANIFEST).write_bytes(b"{}")
    members = dict(zarr.open_group(tmp_path, mode="r").members(max_depth=None))
    groups = {array.path.partition("/")[0] for array in arrays}
    assert {*members} == {array.path for array in arrays} | groups
    assert all((members[a.path][...] == root[a.path][...]).all() for a in arrays)
    # Nothing beside them, and all on one level.
    assert sum(1 for _ in tmp_path.rglob("zarr.json")) == len(arrays) + 4
    assert {len(array.path.split("/")) for array in arrays} == {2}


@pytest.mark.leaky
def test_chunks_of_16_mib(tmp_path):
    """At their real size: a row across shards, and an array whose rows are too long."""
    shapes = {"x": ((5, 1_000_000), "float32"), "y": ((2, 5_000_000), "float32")}
    state = State(shapes)
    files = state.files(3)
    assert files == state.files(1)
    chunks = [path for path in files if not path.endswith("zarr.json")]
    assert chunks == [
        *("weights/x/c/0/0", "weights/x/c/1/0"),
        *(f"weights/y/c/{i}/{j}" for i in range(2) for j in range(2)),
    ]
    write(tmp_path, files)
    for i, name in enumerate(shapes):
        found = zarr.open_array(tmp_path / "weights" / name, mode="r")[...]
        assert np.array_equal(found, state.values[i, "weights"])


def test_the_home_of_a_chunk_has_its_first_element():
    layout = Layout.build({"a": ((10,), "float32"), "b": ((10,), "float32")}, 3)
    chunks = [*chunks_written(layout, stored_arrays(layout, {}))]
    assert [c.path for c in chunks] == ["weights/a/c/0", "weights/b/c/0"]
    assert [c.home for c in chunks] == [0, 1]
    assert [[s for s, _ in c.parts] for c in chunks] == [[0, 1], [1, 2]]


def test_shards_that_do_not_have_it_all_are_found():
    state = mixed_state()
    with pytest.raises(IllegalStateError, match=r"tables/any\.ids"):
        [*chunks_written(state.layout(2), state.arrays(), Counts())]


def restored(state, files, n_shards):
    """What shards of another cut read of files, beside what they should have."""
    layout, arrays = state.layout(n_shards), state.arrays()
    for shard in range(n_shards):
        got: dict[Any, Any] = {}
        for read in chunks_read(layout, arrays, shard):
            content = np.frombuffer(files[read.path], f"{read.dtype}")
            assert content.nbytes == read.nbytes
            for start, stop, span in read.parts:
                key_ = span.position, span.area
                got.setdefault(key_, {})[span.start] = content[start:stop], span.stop
        yield layout, shard, {at: joined(parts) for at, parts in got.items()}


def joined(parts):
    stops = [0]
    for start in sorted(parts):
        values, stop = parts[start]
        assert start == stops[-1]
        assert len(values) == stop - start
        stops.append(stop)
    return np.concatenate([parts[start][0] for start in sorted(parts)])


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("n_shards", SHARDS)
def test_arrays_and_bounded_tables_come_back_in_any_cut(n_shards):
    state = mixed_state()
    n = 0
    for layout, shard, got in restored(state, state.files(2), n_shards):
        for (position, area), values in got.items():
            expected = state.piece(layout, shard, position, area)
            assert np.array_equal(values, expected)
            n += len(values)
    unbounded_table = state.layout(1).table_by_name["any"].index
    whole = sum(
        a.grid.size for a in state.arrays() if a.members[0].index != unbounded_table
    )
    assert n == whole


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("n_shards", SHARDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_unbounded_rows_come_back_in_any_cut(policy, n_shards):
    state = mixed_state(*policy)
    files, layout, table = state.files(2), state.layout(n_shards), "any"
    table = layout.table_by_name[table]
    arrays = {a.area: a for a in state.arrays() if a.path.startswith("tables/any.")}
    most = 0
    for shard in range(n_shards):
        low, high = hash_range(table, n_shards, shard)
        for ids_area in {IDS, CANDIDATES} & arrays.keys():
            array, own = arrays[ids_area], {IDS: [*arrays], CANDIDATES: [COUNTS]}
            first, stop = rows_local(array, begins(array, files, table), low, high)
            ids = read_rows(array, files, first, stop)
            found = hashes(ids, table.hash_seed)
            a, b = np.searchsorted(found, np.array([low, high - 1], np.uint64))
            b += b < len(found) and int(found[b]) == high - 1
            expected = state.piece(layout, shard, *at(layout, shard, ids_area))
            assert np.array_equal(ids[a:b], expected)
            most = max(most, first + a - first, stop - (first + b))
            for area in {*own[ids_area]} - {CANDIDATES, COUNTS, IDS}:
                rows = read_rows(arrays[area], files, first + a, first + b)
                of = state.piece(layout, shard, *at(layout, shard, area))
                assert np.array_equal(rows, of)
    # No more is read than to the next chunk.
    assert most <= arrays[IDS].chunk[0] == 8


def at(layout, shard, area):
    return layout.table_position(shard, layout.table_by_name["any"].index), area


def begins(array, files, table):
    """The hash that each chunk begins with, as a manifest has it."""
    paths = [array.path_of(chunk) for chunk in array.grid.chunks()]
    firsts = [np.frombuffer(files[path], np.int64)[:1] for path in paths]
    return [int(hashes(first, table.hash_seed)[0]) for first in firsts]


def read_rows(array, files, first, stop):
    parts = [
        np.frombuffer(files[read.path], array.dtype)[start:stop_]
        for read in rows_read(array, 0, first, stop)
        for start, stop_, _ in read.parts
    ]
    return np.concatenate([*parts, np.empty(0, array.dtype)])


def test_hash_ranges_are_those_of_buckets():
    """For every hash at an edge: the shard by its bucket is the shard by its range."""
    for max_rows in (0, 1, 1000, 10_000):
        of = UnboundedIds(constant(0.0), 7, 0, max_rows)
        (table,) = Layout.build({}, 1, {"t": (0, 1, "float32", of)}).tables
        assert isinstance(table, UnboundedTable)
        for n_shards in SHARDS:
            ranges = [hash_range(table, n_shards, s) for s in range(n_shards)]
            assert ranges[0][0] == 0
            assert ranges[-1][1] == 2**64
            assert [low for low, _ in ranges[1:]] == [high for _, high in ranges[:-1]]
            for shard, (low, high) in enumerate(ranges):
                first, stop = table.edges(n_shards)[shard : shard + 2].tolist()
                for h in {low, high - 1} if low < high else ():
                    assert first <= (h >> 32) * table.n_buckets >> 32 < stop


@pytest.mark.leaky
def test_ten_thousand_small_parameters_are_few_files(tmp_path):
    """Of 30,000 arrays: weights and Adam's two slots, each in one."""
    shapes = {f"block{i}/w": ((i % 40, 3), "float32") for i in range(10_000)}
    state = State(shapes, slots=dict.fromkeys(shapes, (0.0, 0.0)))
    files = state.files(3)
    # One group above, one of the three; metadata and one chunk of each.
    assert len(files) == 2 + 3 + 3
    write(tmp_path, files)
    found = zarr.open_array(tmp_path / "packed" / "weights.float32", mode="r")
    whole = found[...]
    for i in (0, 1, 39, 9_999):
        said = found.attrs["daskps"]["members"][i]
        assert said["name"] == f"block{i}/w"
        size = int(np.prod(said["shape"]))
        values = whole[said["start"] : said["start"] + size].reshape(said["shape"])
        assert np.array_equal(values, state.values[i, "weights"])
    for layout, shard, got in restored(state, files, 2):
        for (position, area), values in got.items():
            assert np.array_equal(values, state.piece(layout, shard, position, area))


@pytest.mark.leaky
def test_two_thousand_small_tables_are_few_files(tmp_path):
    """With slots of a row and of an element, beside parameters and a large table."""
    tables = {f"t{i}": (1 + i % 20, 3, "float32") for i in range(2_000)}
    tables["large"] = (30_000, 3, "float32")
    first = (0.0, PerRow(0.0))
    slots = {**dict.fromkeys(tables, first), "w": (0.0,)}
    state = State({"w": ((7,), "float32")}, tables, slots)
    files = state.files(3)
    # Groups; w and large alone, each with slots; rows and two slots of all others.
    assert len(files) == 5 + 2 * (2 + 3) + 2 * 3
    assert files == state.files(5)
    write(tmp_path, files)
    found = zarr.open_array(tmp_path / "packed" / "tables.slot1.float32", mode="r")
    layout = state.layout(1)
    for i in (0, 19, 1_999):
        said = found.attrs["daskps"]["members"][i]
        assert (said["name"], said["shape"]) == (f"t{i}", [1 + i % 20, 1])
        stop = said["start"] + 1 + i % 20
        values = state.values[layout.tables[i].index, slot_area(1)].reshape(-1)
        assert np.array_equal(found[said["start"] : stop], values)
    for cut, shard, got in restored(state, files, 2):
        for (position, area), values in got.items():
            assert np.array_equal(values, state.piece(cut, shard, position, area))


def test_few_small_parameters_and_large_ones_are_arrays_of_their_own():
    shapes = {f"w{i}": ((100,), "float32") for i in range(64)}
    layout = Layout.build(shapes, 2)
    assert [a.path for a in stored_arrays(layout, {})] == [
        f"weights/w{i}" for i in range(64)
    ]
    more = shapes | {"b": ((3,), "int8"), "large": ((128, 128), "float32")}
    layout = Layout.build(more, 2)
    found = stored_arrays(layout, {65: (0.0,)})
    assert [a.path for a in found] == [
        *("weights/large", "packed/weights.float32", "packed/weights.int8"),
        "slots/large.0",
    ]
    assert key("large") == "large"


def test_metadata_is_ascii_with_true_names():
    files = mixed_state().files(1)
    for path, content in files.items():
        if path.endswith("zarr.json"):
            assert path.isascii()
            assert content.isascii()
    told = {
        json.loads(c)["attributes"]["daskps"]["name"]
        for path, c in files.items()
        if path.startswith("weights/") and path.count("/") == 2 and c[:1] == b"{"
    }
    assert told == {*mixed_state().shapes}
