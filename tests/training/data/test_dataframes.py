"""Tables become arrays of one dtype, or the column that cannot is named."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from dask.base import compute

import daskps
from daskps import optim
from daskps.training.data.dataframes import LazyTable, array_of
from tests.support import gen_cluster

F8 = np.arange(6.0) + 0.5
FRAME = pd.DataFrame({"a": F8, "b": F8.astype("f4") + 1, "c": np.arange(6, dtype="i1")})
VALUES = np.column_stack([F8, F8 + 1, np.arange(6.0)])


@pytest.mark.parametrize(
    ("table", "dtype"),
    [
        (FRAME, "f8"),
        (FRAME[["b", "c"]], "f4"),
        (FRAME[["c", "c"]], "i1"),
        (FRAME.convert_dtypes(), "f8"),
        (FRAME.convert_dtypes(dtype_backend="pyarrow"), "f8"),
        (FRAME.astype(pd.SparseDtype("float64")), "f8"),
        (FRAME.assign(b=FRAME["a"] > 2), "f8"),
        (pa.table(dict(FRAME.items())), "f8"),
        (pa.record_batch(dict(FRAME.items())), "f8"),
        (FRAME["b"], "f4"),
        (FRAME["c"].convert_dtypes(dtype_backend="pyarrow"), "i1"),
        (pd.RangeIndex(6), "i8"),
        (pa.array([True, False]), "?"),
        (pa.chunked_array([[1.5], [2.5, 3.5]]), "f8"),
        (FRAME[:0], "f8"),
    ],
)
def test_a_table_is_an_array_of_the_dtype_that_holds_all(
    table: Any, dtype: str
) -> None:
    found = array_of(table, "X")
    assert type(found) is np.ndarray
    assert found.dtype == np.dtype(dtype)
    assert found.flags.c_contiguous
    plain = table.to_pandas() if hasattr(table, "to_pandas") else table
    assert found.tolist() == np.asarray(plain, dtype).tolist()


@pytest.mark.parametrize("data", [VALUES, VALUES.tolist(), np.array(["a"]), 3, None])
def test_what_is_no_table_stays_as_it_is(data: Any) -> None:
    assert array_of(data, "X") is data


@pytest.mark.parametrize("dtype", ["float32[pyarrow]", "Float32"])
def test_missing_floats_are_nan(dtype: str) -> None:
    found = array_of(pd.DataFrame({"a": pd.array([1.0, None], dtype)}), "X")
    assert found.dtype == np.float32
    assert np.isnan(found[1, 0])
    assert np.isnan(array_of(pa.array([1.0, None]), "y")[1])


TEXT = pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]})
REFUSED = {
    "text": (TEXT, TypeError, "column 'b' of X is str.*get_dummies"),
    "text of Arrow": (pa.table(TEXT), TypeError, "column 'b' of X is .*string"),
    "objects": (TEXT.astype(object), TypeError, "column 'a' of X is object"),
    "categories": (TEXT.astype({"b": "category"}), TypeError, "'b' of X is category"),
    "dates": (TEXT.assign(b=pd.Timestamp(0)), TypeError, "'b' of X is datetime64"),
    "a column of no name": (TEXT.set_axis([0, 0], axis=1), TypeError, "column 0 of X"),
    "labels": (TEXT["b"], TypeError, "^X is str, and training takes numbers"),
    "ids beside floats": (
        pd.DataFrame({"n": [1, -(2**53) - 1], "a": [1.0, 2.0]}),
        ValueError,
        r"column 'n' of X holds -9007199254740993,.*float64.*astype",
    ),
    "ids of Arrow beside floats": (
        pa.table({"a": pa.array([1.0], "float32"), "n": [2**62]}),
        ValueError,
        "column 'n' of X holds 4611686018427387904,",
    ),
    "unsigned beside signed": (
        pd.DataFrame({"n": np.array([2**64 - 1], "u8"), "m": [1]}),
        ValueError,
        "column 'n' of X holds 18446744073709551615,",
    ),
    "missing integers": (
        pd.DataFrame({"n": pd.array([1, None], "Int64")}),
        ValueError,
        r"column 'n' of X is Int64 and has 1 missing values; fill.*float",
    ),
    "missing bools": (pa.array([True, None]), ValueError, "X is bool and has 1 miss"),
    "no columns": (TEXT[[]], ValueError, "X is a table without columns"),
    "dask text": (dd.from_pandas(TEXT, 2), TypeError, "column 'b' of X is str"),
    "dask labels": (dd.from_pandas(TEXT, 2)["b"], TypeError, "^X is str"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_column_that_cannot_be_is_named(case: str) -> None:
    table, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        array_of(table, "X")


@pytest.mark.parametrize("table", [FRAME, pa.table(TEXT), TEXT["b"], pa.array(F8)])
def test_a_list_of_tables_is_not_stacked(table: Any) -> None:
    with pytest.raises(TypeError, match=r"X is a list of .*join them.*scatter"):
        array_of([table, table], "X")


def test_a_partition_that_is_not_what_its_table_says() -> None:
    lying = dd.from_pandas(FRAME[["c"]], 1).map_partitions(
        lambda part: part + 0.5, meta=FRAME[["c"]][:0]
    )
    with pytest.raises(TypeError, match=r"partition of X holds float64, .* says int8"):
        converted(array_of(lying, "X"))


def test_a_lazy_table_is_of_the_dtype_that_holds_all() -> None:
    found = array_of(dd.from_pandas(FRAME, 3), "X")
    assert isinstance(found, LazyTable)
    assert found.meta.dtype == np.float64
    np.testing.assert_array_equal(converted(found), VALUES)
    series = array_of(dd.from_pandas(FRAME, 3)["c"], "y")
    assert (series.meta.dtype, series.meta.ndim) == (np.int8, 1)


def converted(table: LazyTable) -> Any:
    [partitions] = compute(table.partitions.to_delayed(), scheduler="sync")
    assert [names.n for _, names in partitions] == [len(one) for one, _ in partitions]
    return np.concatenate([one for one, _ in partitions])


def test_daskps_imports_no_library_of_tables() -> None:
    code = (
        "import sys, daskps; "
        "print({'pandas', 'pyarrow', 'dask.dataframe'} & set(sys.modules))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert found.stdout.strip() == "set()"


# -- in a run --------------------------------------------------------------------------

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 2)), RNG.normal(size=60)
WIDE = pd.DataFrame(X, columns=["a", "b"])


def gradient(params: Any, X: Any, y: Any) -> Any:
    assert (type(X), type(y)) == (np.ndarray, np.ndarray)
    error = X @ params["w"] - y
    return float(error @ error) / len(y), {"w": X.T @ error / len(y)}


def fresh(**options: Any) -> Any:
    options = {"optimizer": optim.SGD(0.1), **options}
    return daskps.create({"w": np.zeros(2)}, **options)


def test_every_kind_of_table_trains_to_the_same_bits(client: Any) -> None:
    lazy = dd.from_pandas(WIDE.assign(y=Y), npartitions=2)
    kinds = {
        "arrays": (X, Y),
        "pandas": (WIDE, pd.Series(Y)),
        "arrow": (pa.table(dict(WIDE.items())), pa.array(Y)),
        "dask": (lazy[["a", "b"]], lazy["y"]),
        "dask and NumPy": (lazy[["a", "b"]], Y),
    }
    found = {}
    for kind, (features, labels) in kinds.items():
        with fresh() as store:
            result = daskps.train(store, gradient, features, labels, trainers=2)
            found[kind] = result.weights["w"].tobytes()
    assert set(found.values()) == {found["arrays"]}


def test_partitions_train_where_they_lie_and_uneven_ones_are_counted(
    train: Any, client: Any
) -> None:
    lazy = client.persist(dd.from_pandas(WIDE, npartitions=4))
    kept = lazy[lazy["a"] > 0]  # of lengths that nobody knows
    with fresh() as store:
        labels = np.ones(int((X[:, 0] > 0).sum()))
        result = train(store, gradient, kept, labels, trainers=4)
        assert result.stats.moved_parts == 0
        with pytest.raises(ValueError, match=r"X has .* rows and y 60; they must be"):
            train(store, gradient, kept, Y)


def drawn(i: int, columns: Any = None) -> Any:
    """Return rows that are others each time, of the columns that are asked for."""
    X = np.random.default_rng().normal(size=(40, 2))
    table = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": X @ [1.0, -2.0]})
    return table if columns is None else table[list(columns)]


def some(partition: Any) -> Any:
    return partition.sample(frac=0.5)


DRAWN = dd.from_map(drawn, range(4), meta=drawn(0)[:0])
CUT = {
    "as it is drawn": DRAWN,
    "a sample": DRAWN.map_partitions(some, meta=DRAWN),
    "a filter": DRAWN[DRAWN["a"] > -1],
}
#: Its labels are worked out of what the features are of, and not of another column.
OF_BOTH = DRAWN["a"] - 2 * DRAWN["b"]


SCHEMES: list[Any] = [{}, {"scheme": "round_robin"}]


@pytest.mark.parametrize(
    ("train", "cut", "options"),
    [
        (execution, cut, SCHEMES[(i + j) % 2])
        for i, execution in enumerate(("resident", "graph"))
        for j, cut in enumerate(CUT)
    ],
    indirect=["train"],
)
def test_features_and_labels_of_one_lazy_table_belong_together(
    train: Any, client: Any, cut: str, options: Any
) -> None:
    labels = OF_BOTH if cut == "as it is drawn" else CUT[cut]["y"]
    options = {"epochs": 5, "batch_size": 8, **options}
    with fresh(optimizer=optim.SGD(0.5)) as store:
        found = train(store, gradient, CUT[cut][["a", "b"]], labels, **options)
        np.testing.assert_allclose(found.weights["w"], [1, -2], atol=1e-2)
        assert found.history[-1].loss < 1e-3


def test_parts_that_are_tables_are_converted_on_their_workers(
    train: Any, client: Any
) -> None:
    halves = [WIDE[:30], WIDE[30:]]
    parts = [client.submit(lambda x: x, half, pure=False) for half in halves]
    labels = [
        client.submit(pd.Series, y, half.index, pure=False)
        for y, half in zip((Y[:30], Y[30:]), halves, strict=True)
    ]
    with fresh() as store, fresh() as other:
        found = train(store, gradient, parts, labels)
        expected = train(other, gradient, X, Y, trainers=2)
        assert found.weights["w"].tobytes() == expected.weights["w"].tobytes()
        made = [pa.Table.from_pandas(half) for half in halves]
        made += [pa.chunked_array([Y[:30]]), pa.array(Y[30:])]
        # Dask takes slices of one Arrow buffer for the same data.
        arrow = client.scatter(made, hash=False)
        with fresh() as third:
            found = train(third, gradient, arrow[:2], arrow[2:])
        assert found.weights["w"].tobytes() == expected.weights["w"].tobytes()
        bad = client.submit(lambda x: x.assign(t="x"), halves[0], pure=False)
        with pytest.raises(TypeError, match="column 't' of part 0 of X is str"):
            train(store, gradient, [bad], labels[:1])
        with pytest.raises(ValueError, match="part 1 of y has another index than X"):
            train(store, gradient, parts, [labels[0], client.submit(pd.Series, Y[30:])])
        column = client.submit(lambda y: y.to_frame(), labels[1])
        with pytest.raises(ValueError, match=r"part 1 of y has the shape \(n, 1\)"):
            train(store, gradient, parts, [labels[0], column])
        column = client.scatter(Y[30:, None])
        with pytest.raises(ValueError, match=r"part 1 of y has the shape \(n, 1\)"):
            train(store, gradient, parts, [labels[0], column])
        assert store.version == found.version == 1


def test_labels_of_another_index_are_refused_and_rows_in_another_order_are_not(
    train: Any, client: Any
) -> None:
    mixed = WIDE.sample(frac=1, random_state=0)
    labels = pd.Series(Y)
    with fresh() as store, fresh() as other:
        for wrong in (labels, labels.to_frame("y").assign(z=Y), labels.rename(str)):
            with pytest.raises(ValueError, match="y has another index than X"):
                train(store, gradient, mixed, wrong)
            with pytest.raises(ValueError, match="y has another index than X"):
                daskps.partition(mixed, wrong, 2)
        assert store.version == 0
        found = train(store, gradient, mixed, labels.loc[mixed.index], trainers=1)
        y = Y[mixed.index.to_numpy()]
        expected = train(other, gradient, mixed, y, trainers=1)
        assert found.weights["w"].tobytes() == expected.weights["w"].tobytes()


#: Shuffled before it is cut, and cut into partitions of its own.
MIXED = pd.Series(Y).sample(frac=1, random_state=0)


def lazy(table: Any, n: int = 2) -> Any:
    return dd.from_pandas(table, npartitions=n, sort=False)


def read(n: int) -> Any:
    """Return a table as of n files: each partition has an index of its own, from 0 on."""
    whole = WIDE.assign(y=Y)
    cuts = [whole[i * 60 // n : (i + 1) * 60 // n] for i in range(n)]
    return dd.from_map(pd.DataFrame.reset_index, cuts, drop=True, meta=whole[:0])


@pytest.mark.parametrize(
    ("features", "labels"),
    [
        (lazy(WIDE), lazy(MIXED)),
        (lazy(WIDE), lazy(MIXED, 3)),
        (lazy(WIDE), MIXED),
        (WIDE, lazy(MIXED)),
        (read(2)[["a", "b"]], MIXED),
        (lazy(WIDE.set_index(-np.arange(60.0)), 3), lazy(pd.Series(Y), 2)),
        (lazy(WIDE), dd.concat([lazy(pd.Series(Y)[30:]), lazy(pd.Series(Y)[:30])])),
    ],
)
def test_lazy_labels_of_another_index_are_refused(
    train: Any, client: Any, features: Any, labels: Any
) -> None:
    with fresh() as store:
        with pytest.raises(ValueError, match="y has another index than X"):
            train(store, gradient, features, labels)
        assert store.version == 0


@pytest.mark.parametrize(
    ("features", "labels"),
    [
        (lazy(WIDE, 3), lazy(pd.Series(Y), 2)),
        (lazy(WIDE, 3), pd.Series(Y, pd.Index(range(60), dtype="int64"))),
        (lazy(WIDE.loc[MIXED.index], 3), lazy(MIXED)),
        (WIDE.loc[MIXED.index], lazy(MIXED)),
        (lazy(WIDE.rename(str)), lazy(pd.Series(Y).rename(str), 3)),
        (read(3)[["a", "b"]], read(2)["y"]),
        (read(3)[["a", "b"]], lazy(pd.Series(Y))),
        (read(3)[["a", "b"]], read(3)["y"].compute()),
        (read(3)[["a", "b"]], lazy(MIXED).to_dask_array(lengths=True)),
    ],
)
def test_lazy_labels_are_paired_where_rows_are_named_alike(
    train: Any, client: Any, features: Any, labels: Any
) -> None:
    with fresh() as store, fresh() as other:
        found = train(store, gradient, features, labels, trainers=1)
        known = [
            d.compute() if hasattr(d, "compute") else d for d in (features, labels)
        ]
        X, y = (one if isinstance(one, np.ndarray) else one.to_numpy() for one in known)
        expected = train(other, gradient, X, y, trainers=1)
        np.testing.assert_allclose(found.weights["w"], expected.weights["w"])


def test_a_bad_column_is_refused_before_anything_starts(client: Any) -> None:
    with fresh() as store:
        with pytest.raises(TypeError, match="column 't' of X is str"):
            daskps.train(store, gradient, WIDE.assign(t="x"), Y)
        assert store.version == 0


@gen_cluster(client=True)
async def test_a_lazy_table_with_an_asynchronous_client(c, s, a, b):
    lazy = dd.from_pandas(WIDE, npartitions=3)
    async with await fresh(client=c) as store:
        result = await daskps.aio.train(store, gradient, lazy, Y)
    assert result.version == 1
