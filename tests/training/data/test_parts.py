"""Data that is on the cluster: trained on where it lies, computed once, let go."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections import Counter
from concurrent.futures import CancelledError
from typing import Any

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.delayed import delayed
from distributed import Client, futures_of, get_worker, wait

import daskps
from daskps import optim
from daskps.cluster.runs.parts import DataLostError
from daskps.training.data.parts import parts_of
from daskps.training.data.rows import SCHEMES, partition
from tests.support import gen_cluster, local_cluster, until

sparse = pytest.importorskip("scipy.sparse")
RNG = np.random.default_rng(11)
N = 48
X = np.column_stack([np.arange(N, dtype="f8"), RNG.normal(size=(N, 2))])
Y = RNG.normal(size=N)
START = {"w": np.linspace(-1, 1, 3), "b": np.array(0.25)}


def sgd_store(**kwargs: Any) -> Any:
    return daskps.create(START, optimizer=optim.SGD(0.001), **kwargs)


def regression(params, X, y):
    residual = X @ params["w"] + params["b"] - y
    grads = {"w": 2 * X.T @ residual / len(X), "b": np.array(2 * residual.mean())}
    return float((residual**2).mean()), grads


def bits(weights):
    return b"".join(weights[name].tobytes() for name in sorted(weights))


class Spy:
    """A gradient that tells the scheduler which rows were seen on which worker."""

    def __init__(self):
        self.topic = f"spy-{uuid.uuid4().hex}"

    def __call__(self, params, X, y):
        worker = get_worker()
        assert type(X) is np.ndarray
        rows = [int(row) for row in X[:, 0]]
        if y is not None:
            np.testing.assert_array_equal(y, Y[rows])
        worker.log_event(self.topic, {"worker": worker.address, "rows": rows})
        return regression(params, X, 0.0 if y is None else y)

    def seen(self, client: Client) -> dict[int, str]:
        """Return the worker of each row; each was seen once."""
        events = [event for _, event in client.get_events(self.topic)]
        found = [(row, e["worker"]) for e in events for row in e["rows"]]
        assert len(found) == len(dict(found))
        return dict(found)


def load(i, topic=None):
    """Return rows 16 i to 16 i + 16 of X and Y, and tell that it was run."""
    if topic is not None:
        get_worker().log_event(topic, i)
    return X[16 * i : 16 * i + 16], Y[16 * i : 16 * i + 16]


def first(pair):
    return pair[0]


def second(pair):
    return pair[1]


def parts_on(client, *args, trainers=None, scheme="contiguous", weights=None, seed=0):
    link = daskps.cluster.caller.link.link_of(client)
    split = {"scheme": scheme, "weights": weights, "seed": seed}
    return client.sync(parts_of, link, *args, trainers=trainers, split=split)


def fetched(client, parts):
    """Return `(X_i, y_i)` of each part."""

    def whole(blocks):
        if blocks is None:
            return None
        found = [b if isinstance(b, np.ndarray) else b.result() for b in blocks]
        return np.concatenate(found)

    return [(whole(part.X), whole(part.y)) for part in parts]


@pytest.fixture(scope="module")
def four():
    """Four workers, for tests that break nothing; none steals what another waits with.

    Dask takes half a second for each piece that is cut: on a busy machine an idle
    worker would take one, and its chunk.
    """
    config = {"distributed.scheduler.work-stealing": False}
    with dask.config.set(config), local_cluster(n_workers=4, threads=1) as client:
        yield client


@pytest.fixture
def spread(four):
    """X and Y in eight chunks, dealt out to four workers out of turn."""
    workers = sorted(four.nthreads())
    with four.as_current():
        blocks = [
            [
                four.scatter(
                    a[6 * i : 6 * i + 6], workers=[workers[(3 * i + 2) % 4]], hash=False
                )
                for i in range(8)
            ]
            for a in (X, Y)
        ]
        yield [
            da.concatenate(
                [da.from_delayed(b, (6, *a.shape[1:]), a.dtype) for b in of]
            ).persist()
            for a, of in zip((X, Y), blocks, strict=True)
        ]


def held(client, array):
    wait(array)
    return client.who_has(futures_of(array))


# -- where it is trained -------------------------------------------------------


def test_every_chunk_is_trained_where_it_lies(train, four, spread):
    """One trainer per chunk: nothing moves, no chunk gets a second copy."""
    X_far, y_far = spread
    before = held(four, X_far), held(four, y_far)
    spy = Spy()
    with sgd_store(client=four) as store:
        result = train(store, spy, X_far, y_far, trainers=8, batch_size=4)
    seen = spy.seen(four)
    assert sorted(seen) == list(range(N))
    assert result.stats.moved_parts == 0
    for i in range(8):
        (home,) = before[0][X_far.__dask_keys__()[i][0]]
        assert {seen[row] for row in range(6 * i, 6 * i + 6)} == {home}
    assert (held(four, X_far), held(four, y_far)) == before
    assert len({seen[row] for row in range(N)}) == 4


def test_blocks_that_lie_elsewhere_are_counted(four, spread):
    """Two chunks per trainer lie on two workers: one of X and one of y move."""
    parts = parts_on(four, *spread)
    assert [part.rows for part in parts] == [12] * 4
    assert [part.moved for part in parts] == [2] * 4
    # Each part could be on either of two workers; none has more than its share.
    assert max(Counter(part.worker for part in parts).values()) == 1
    spy = Spy()
    with sgd_store(client=four) as store:
        result = daskps.train(store, spy, *spread, batch_size=4)
    assert result.stats.moved_parts == 4 * 2
    seen = spy.seen(four)
    assert [seen[row] for row in range(N)] == [parts[r // 12].worker for r in range(N)]


def test_chunks_are_cut_where_they_lie(train, four):
    """Three chunks for seven trainers: no row leaves its chunk's worker."""
    with four.as_current():
        data = da.from_array(X, chunks=(16, 3)).persist()
    before = held(four, data)
    spy = Spy()
    with sgd_store(client=four) as store:
        result = train(store, spy, data, trainers=7, batch_size=2)
    seen = spy.seen(four)
    assert sorted(seen) == list(range(N))
    assert result.stats.moved_parts == 0
    for i in range(3):
        (home,) = before[data.__dask_keys__()[i][0]]
        assert {seen[row] for row in range(16 * i, 16 * i + 16)} == {home}
    assert held(four, data) == before
    assert [part.rows for part in parts_on(four, data, None, trainers=7)] == [
        *[6, 5, 5],
        *[8, 8],
        *[8, 8],
    ]


@pytest.mark.parametrize(("chunks", "expected"), [(16, 3), (12, 4), (6, 4)])
def test_default_number_of_trainers(four, chunks, expected):
    """One per worker, but none without a chunk."""
    with four.as_current():
        data = da.from_array(X, chunks=(chunks, 2))
        parts = parts_on(four, data, da.from_array(Y, chunks=7))
    assert len(parts) == expected
    assert sum(part.rows for part in parts) == N


def test_futures_are_trained_where_they_lie(train, four):
    workers = sorted(four.nthreads())
    pairs = [
        four.submit(load, i, workers=[workers[i + 1]], pure=False) for i in range(3)
    ]
    features = [four.submit(first, p, pure=False) for p in pairs]
    labels = [four.submit(second, p, pure=False) for p in pairs]
    spy = Spy()
    with sgd_store(client=four) as store:
        result = train(store, spy, features, tuple(labels), batch_size=5)
    seen = spy.seen(four)
    assert [seen[row] for row in range(N)] == [workers[1 + r // 16] for r in range(N)]
    assert result.stats.moved_parts == 0
    assert all(f.status == "finished" for f in [*pairs, *features, *labels])


def test_labels_elsewhere_are_counted(four):
    a, b, *_ = sorted(four.nthreads())
    features = [four.scatter(X[:16], workers=[a], hash=False)]
    labels = [four.scatter(Y[:16], workers=[b], hash=False)]
    (part,) = parts_on(four, features, labels)
    # X has more bytes than y.
    assert (part.rows, part.worker, part.moved) == (16, a, 1)


# -- the same numbers ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["lazy", "persisted", "numpy y", "numpy X", "list"])
@pytest.mark.parametrize("shuffle", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_bits_are_those_of_numpy(train, client, kind, shuffle):
    """Equal parts of several blocks each: the same batches, the same bits."""
    X_lazy, y_lazy = da.from_array(X, chunks=(8, 2)), da.from_array(Y, chunks=8)
    data: Any = {
        "lazy": (X_lazy, y_lazy),
        "persisted": (X_lazy.persist(), y_lazy.persist()),
        "numpy y": (X_lazy, Y),
        "numpy X": (X.tolist(), y_lazy),
        "list": (
            [client.scatter(X[i : i + 16], hash=False) for i in (0, 16, 32)],
            [delayed(second)(delayed(load)(i)) for i in range(3)],
        ),
    }[kind]
    with sgd_store() as store:
        options = {"batch_size": 5, "epochs": 2, "seed": 4, "shuffle": shuffle}
        size = None if kind == "list" else 3
        result = train(store, regression, *data, trainers=size, **options)
    assert bits(result.weights) == of_numpy(train.execution, **options)


#: Bits after training on NumPy arrays in three parts, by execution and options.
OF_NUMPY: dict[Any, bytes] = {}


def of_numpy(execution, **options):
    key = (execution, *options.items())
    if key not in OF_NUMPY:
        with sgd_store() as store:
            result = daskps.train(
                store, regression, X, Y, trainers=3, execution=execution, **options
            )
        OF_NUMPY[key] = bits(result.weights)
    return OF_NUMPY[key]


@pytest.mark.parametrize(
    ("scheme", "weights"),
    [*((s, None) for s in SCHEMES), ("contiguous", [3, 1, 2]), ("random", [3, 1, 2])],
)
def test_parts_are_those_of_partition(client, scheme, weights):
    split: Any = {"scheme": scheme, "weights": weights, "seed": 5}
    lazy = da.from_array(X, chunks=(8, 2)), da.from_array(Y, chunks=6)
    parts = parts_on(client, *lazy, trainers=3, **split)
    expected = partition(X, Y, 3, **split)
    assert [part.rows for part in parts] == [len(X_i) for X_i, _ in expected]
    for got, want in zip(fetched(client, parts), expected, strict=True):
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])


def test_rows_that_are_dealt_out_are_counted(four, spread):
    """Trainer r takes row r of every four: six blocks of eight lie elsewhere."""
    parts = parts_on(four, *spread, trainers=4, scheme="round_robin")
    assert len({part.worker for part in parts}) == 4
    assert [part.moved for part in parts] == [2 * 6] * 4


@pytest.mark.parametrize(
    "empty",
    [
        lambda client: X[:0],
        lambda client: [],
        lambda client: da.from_array(X, chunks=(8, 3))[:0],
        lambda client: dd.from_array(X, chunksize=8, columns=list("abc")).query(
            "a < 0"
        ),
        lambda client: [delayed(X[:0]), client.scatter(X[:0])],
    ],
)
def test_data_without_a_row_is_refused(train, client, empty):
    with sgd_store() as store:
        with pytest.raises(ValueError, match="X has no rows in any part"):
            train(store, regression, empty(client))
        assert store.version == 0


@pytest.mark.parametrize(
    "column",
    [
        Y[:, None],
        Y[:, None].tolist(),
        pd.DataFrame({"y": Y}),
        da.from_array(Y[:, None], chunks=8),
        dd.from_pandas(pd.DataFrame({"y": Y}), npartitions=3),
    ],
)
def test_labels_in_a_column_are_refused(train, client, column):
    """Minus predictions of shape (n,) they would be (n, n)."""
    with sgd_store() as store:
        with pytest.raises(ValueError, match=r"y has the shape \(n, 1\)"):
            train(store, regression, X, column)
        assert store.version == 0


def test_chunks_without_rows(train, client):
    lazy = da.from_array(X, chunks=(8, 3))
    some = (lazy[:, 0] < 8) | ((lazy[:, 0] >= 20) & (lazy[:, 0] < 40))
    gaps = lazy[some].compute_chunk_sizes()
    assert gaps.chunks[0] == (8, 0, 4, 8, 8, 0)
    parts = parts_on(client, gaps, None, trainers=3)
    assert [part.rows for part in parts] == [8, 12, 8]
    got = np.concatenate([X_i for X_i, _ in fetched(client, parts)])
    np.testing.assert_array_equal(got[:, 0], [*range(8), *range(20, 40)])


# -- computed once, let go -----------------------------------------------------


def test_delayed_parts_are_computed_once(train, client):
    """Features and labels come of one load each, also over two epochs."""
    topic = f"load-{uuid.uuid4().hex}"
    pairs = [delayed(load)(i, topic) for i in range(3)]
    spy = Spy()
    with sgd_store() as store:
        result = train(
            store, spy, [delayed(first)(p) for p in pairs], [p[1] for p in pairs]
        )
    assert sorted(i for _, i in client.get_events(topic)) == [0, 1, 2]
    assert sorted(spy.seen(client)) == list(range(N))
    assert result.version == 1


def logged(block, topic):
    get_worker().log_event(topic, len(block))
    return block


@pytest.mark.parametrize("scheme", SCHEMES)
def test_lazy_chunks_are_computed_once(train, client, scheme):
    topic = f"chunk-{uuid.uuid4().hex}"
    meta = np.empty((0, 3))
    lazy = da.from_array(X, chunks=(8, 3)).map_blocks(logged, topic, meta=meta)
    with sgd_store() as store:
        train(store, regression, lazy, Y, trainers=3, epochs=3, scheme=scheme)
    assert [n for _, n in client.get_events(topic)] == [8] * 6


def kinds_of_data(client):
    lazy = da.from_array(X, chunks=(8, 2))
    return {
        "numpy": (X, Y),
        "lazy": (lazy, da.from_array(Y, chunks=7)),
        "persisted": (lazy.persist(), Y),
        "delayed": ([delayed(first)(delayed(load)(i)) for i in range(3)], None),
        "futures": ([client.scatter(X[:16], hash=False)], None),
    }


def fails(params, X, y):
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("gradient", [regression, fails])
@pytest.mark.parametrize("kind", ["numpy", "lazy", "persisted", "delayed", "futures"])
def test_nothing_of_ours_stays(train, client, kind, gradient):
    """Neither after a run nor after an error that somebody holds."""
    if kind in ("delayed", "futures") and gradient is regression:
        gradient = Spy()
    with sgd_store() as store:
        data = kinds_of_data(client)[kind]
        mine = [f for f in futures_of(data) if not f.cancelled()]
        wait(mine)
        before = set(client.who_has())
        error = None
        try:
            train(store, gradient, *data, trainers=None)
        except ZeroDivisionError as caught:
            error = caught
        assert (error is None) == (gradient is not fails)
        until(lambda: not set(client.who_has()) - before)
        assert all(f.status == "finished" for f in mine)
        for f in mine:
            f.result()


def test_shuffled_rows_do_not_stay(client):
    with sgd_store() as store:
        before = set(client.who_has())
        lazy = da.from_array(X, chunks=(8, 2))
        daskps.train(store, regression, lazy, Y, scheme="random")
        until(lambda: not set(client.who_has()) - before)


# -- faults --------------------------------------------------------------------


def slow(params, X, y):
    # Nothing is waited for: the kill must find the trainer at work.
    threading.Event().wait(0.002)
    return regression(params, X, y)


class KillHolder:
    """Kill a worker that holds data while the run is on, but not the store's."""

    def __init__(self, client, spare, match):
        self.client, self.spare, self.match = client, spare, match
        self.keys: list[Any] = []

    def on_round(self, run):
        if run.clock < 10 or self.keys:
            return
        holders = self.client.who_has()
        for key, worker in ((key, w) for key, of in holders.items() for w in of):
            if self.match in str(key) and worker != self.spare:
                has = self.client.has_what([worker])[worker]
                self.keys = [k for k in has if self.match in str(k)]
                pid = self.client.run(os.getpid, workers=[worker])[worker]
                os.kill(pid, signal.SIGKILL)
                return


@pytest.mark.parametrize(
    "train", ["resident", pytest.param("graph", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.parametrize(
    "kind",
    [
        "dask",
        pytest.param("delayed", marks=pytest.mark.slow),
        pytest.param("numpy y", marks=pytest.mark.slow),
    ],
)
def test_parts_are_computed_again_when_their_worker_dies(train, kind):
    # A round of the graph takes ten times as long.
    epochs = 6 if train.execution == "resident" else 2
    with local_cluster(n_workers=3, threads=1) as client:
        a, *_ = client.nthreads()
        found, loads = [], []
        for kill in (False, True):
            topic = f"load-{uuid.uuid4().hex}"
            # A name of its own, lest the second run finds what the first one made.
            name = f"part{uuid.uuid4().hex}"
            if kind == "delayed":
                pairs = [
                    delayed(load)(i, topic, dask_key_name=f"{name}-{i}")
                    for i in range(3)
                ]
                data: Any = [p[0] for p in pairs], [p[1] for p in pairs]
            else:
                lazy = da.from_array(X, chunks=(16, 3), name=name).map_blocks(
                    logged, topic, meta=np.empty((0, 3)), name=f"{name}-logged"
                )
                y = da.from_array(Y, chunks=16) if kind == "dask" else Y
                data = lazy, y
            match = "getitem" if kind == "delayed" else f"{name}-logged"
            killer = KillHolder(client, a, match)
            with sgd_store(client=client, servers=[a]) as store:
                result = train(
                    store,
                    slow,
                    *data,
                    batch_size=1,
                    epochs=epochs,
                    callbacks=[killer] if kill else [],
                )
            assert bool(killer.keys) == kill
            assert (result.stats.lost_trainers > 0) == kill
            assert result.version == epochs * 16
            found.append(bits(result.weights))
            loads.append(len(client.get_events(topic)))
        assert found[0] == found[1]
        assert loads[0] == 3
        assert loads[1] > 3


def test_scattered_part_that_is_lost_says_so(train):
    """Nobody can compute it again: the run ends, and names the part."""
    with local_cluster(n_workers=2, threads=1) as client:
        a, b = client.nthreads()
        parts = [client.scatter(X[:16], workers=[w], hash=False) for w in (a, b)]
        killer = KillHolder(client, a, parts[1].key)
        with sgd_store(client=client, servers=[a]) as store:
            lost = f"trainer 1 lost its data, part 1 with '{parts[1].key}'.*scattered"
            with pytest.raises(DataLostError, match=lost):
                train(
                    store,
                    slow_without_labels,
                    parts,
                    batch_size=1,
                    epochs=10**6,
                    callbacks=[killer],
                )
            assert killer.keys == [parts[1].key]


def slow_without_labels(params, X, y):
    return slow(params, X, 0.0)


# -- refusals ------------------------------------------------------------------


def rows_of(client, *lengths):
    return [client.scatter(np.ones((n, 3)), hash=False) for n in lengths]


def values(client, *given):
    return [client.submit(lambda v: v, v, pure=False) for v in given]


REFUSED: dict[str, Any] = {
    "lengths of lists": (
        lambda c: (rows_of(c, 3, 3), rows_of(c, 3)),
        {},
        ValueError,
        "X has 2 parts and y 1",
    ),
    "rows of a part": (
        lambda c: (rows_of(c, 3, 3), rows_of(c, 3, 4)),
        {},
        ValueError,
        "part 1 has 3 rows of X and 4 of y",
    ),
    "a number": (
        lambda c: (values(c, np.ones(2), 5.0), None),
        {},
        TypeError,
        "part 1 of X is float",
    ),
    "a scalar array": (
        lambda c: ([delayed(np.float64)(1)], None),
        {},
        TypeError,
        "part 0 of X is float64",
    ),
    "pairs": (
        lambda c: ([delayed(load)(0), delayed(load)(1)], None),
        {},
        TypeError,
        "part 0 of X is tuple.*two lists",
    ),
    "labels without rows": (
        lambda c: (rows_of(c, 3), values(c, {"a": 1})),
        {},
        TypeError,
        "part 0 of y is a dict of columns",
    ),
    "mixed": (
        lambda c: ([*rows_of(c, 3), np.ones((3, 3))], None),
        {},
        TypeError,
        "part 1 of X is ndarray",
    ),
    "labels in memory": (
        lambda c: (rows_of(c, 3), np.ones(3)),
        {},
        TypeError,
        "both or neither; y is ndarray",
    ),
    "features in memory": (
        lambda c: (np.ones((3, 3)), rows_of(c, 3)),
        {},
        TypeError,
        "both or neither; X is ndarray",
    ),
    "trainers": (
        lambda c: (rows_of(c, 3, 3), None),
        {"trainers": 3},
        ValueError,
        "trainers=3 for 2 parts",
    ),
    "scheme": (
        lambda c: (rows_of(c, 3, 3), None),
        {"scheme": "random"},
        ValueError,
        "dealt out already",
    ),
    "weights": (
        lambda c: (rows_of(c, 3, 3), None),
        {"weights": [1, 2]},
        ValueError,
        "dealt out already",
    ),
    "one future": (
        lambda c: (rows_of(c, 3)[0], None),
        {},
        TypeError,
        "X is one Future",
    ),
    "one delayed": (
        lambda c: (X, delayed(second)(load(0))),
        {},
        TypeError,
        "y is one Delayed",
    ),
    "the name of a column": (
        lambda c: (X, "clicked"),
        {},
        TypeError,
        r"y is the str 'clicked'; pass the rows themselves, such as frame\['clicked'\]",
    ),
    "columns": (
        lambda c: ({"a": X[:, 0]}, Y),
        {},
        TypeError,
        r"X is a dict of columns; ",
    ),
    "labels by name": (
        lambda c: (X, {"y": Y}),
        {},
        TypeError,
        "y is a dict of columns; ",
    ),
    "no rows to take": (
        lambda c: (sparse.coo_matrix(X), Y),
        {},
        TypeError,
        r"X is a coo_matrix, which has no rows to take out; pass \.tocsr\(\)",
    ),
    "a mapping of elements": (
        lambda c: (sparse.dok_matrix(X), Y),
        {},
        TypeError,
        r"X is a dok_matrix, which has no rows to take out; pass \.tocsr\(\)",
    ),
    "rows of unequal length": (
        lambda c: ([np.zeros(2), *np.zeros((N - 1, 3))], Y),
        {},
        TypeError,
        "X is a list of rows of unequal shapes; pad",
    ),
    "a part of unequal rows": (
        lambda c: ([delayed([[1], [2, 3]], traverse=False)], None),
        {},
        TypeError,
        "part 0 of X is a list of rows of unequal shapes",
    ),
    "rows of sparse matrices": (
        lambda c: ([sparse.csr_matrix(row) for row in X], Y),
        {},
        TypeError,
        r"X is a list of csr_matrix; join them, .* scipy\.sparse\.vstack",
    ),
    "named fields": (
        lambda c: (np.zeros(N, [("a", "f4"), ("b", "f8")]), Y),
        {},
        TypeError,
        r"X has dtype \[\('a', .*fields with numpy.*structured_to_unstructured",
    ),
    "text": (lambda c: (X.astype("U"), Y), {}, TypeError, "X has dtype <U32, which"),
    "objects": (lambda c: (X, Y.astype(object)), {}, TypeError, "y has dtype object,"),
    "dates in chunks": (
        lambda c: (da.from_array(X.astype("M8[s]")), Y),
        {},
        TypeError,
        r"X has dtype datetime64\[s\], which holds no numbers; encode it",
    ),
    "a part of text": (
        lambda c: ([delayed(X), delayed(X.astype("U"))], None),
        {},
        TypeError,
        "part 1 of X has dtype <U32, which holds no numbers",
    ),
    "a part without rows to take": (
        lambda c: ([delayed(X)], [delayed(sparse.coo_matrix(X))]),
        {},
        TypeError,
        "part 0 of y is a coo_matrix, which",
    ),
    "rows of dask arrays": (
        lambda c: (da.ones((6, 3), chunks=2), da.ones(5, chunks=2)),
        {},
        ValueError,
        "X has 6 rows and y 5",
    ),
    "unknown chunks": (
        lambda c: (da.ones((6, 3), chunks=2)[da.ones(6, chunks=2) > 0], None),
        {},
        ValueError,
        r"compute_chunk_sizes\(\)",
    ),
    "unknown chunks of y": (
        lambda c: (X, da.ones(N, chunks=8)[da.ones(N, chunks=8) > 0]),
        {},
        ValueError,
        r"compute_chunk_sizes\(\)",
    ),
    "a future of an error": (
        lambda c: ([*rows_of(c, 3), c.submit(fails, 0, 0, 0, pure=False)], None),
        {},
        ZeroDivisionError,
        "on purpose",
    ),
    "a delayed error": (
        lambda c: ([delayed(first)(delayed(fails)(0, 0, 0))], None),
        {},
        ZeroDivisionError,
        "on purpose",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_data_that_cannot_be_is_refused(client, case):
    data, options, error, text = REFUSED[case]
    with sgd_store() as store:
        X_bad, y_bad = data(client)
        with pytest.raises(error, match=text):
            daskps.train(store, regression, X_bad, y_bad, **options)
        assert store.version == 0
        assert daskps.train(store, regression, X, Y).version == 1


def test_cancelled_future_raises_its_own_error(train, client):
    parts = rows_of(client, 3, 3)
    parts[1].cancel()
    with sgd_store() as store:
        with pytest.raises(CancelledError, match=parts[1].key) as caught:
            train(store, regression, parts)
        assert caught.value.__notes__ == [
            "raised by part 1 of X, the data of trainer 1"
        ]
        assert train(store, regression, X, Y).version == 1


def test_a_chunk_that_is_not_what_it_says(client):
    """Its trainer tells, instead of training on rows beside the wrong labels."""
    lying = da.from_array(X, chunks=(16, 3)).map_blocks(
        lambda block: block[:-1], meta=np.empty((0, 3)), chunks=((16,) * 3, (3,))
    )
    with sgd_store() as store:
        with pytest.raises(ValueError, match=r"rows of X and .* of y"):
            daskps.train(store, regression, lying, Y)
        assert store.version == 0


@pytest.mark.parametrize("kind", [sparse.coo_matrix, sparse.dok_matrix])
def test_blocks_without_rows_to_take_are_refused(train, client, kind):
    blocks = da.from_array(X, chunks=(16, 3)).map_blocks(kind)
    with sgd_store() as store:
        with pytest.raises(TypeError, match=rf"{kind.__name__}, .*; pass \.tocsr\(\)"):
            train(store, regression, blocks, Y)
        assert store.version == 0


def test_plain_lists_stay_what_they_were(client):
    with sgd_store() as store:
        expected = daskps.train(store, regression, X, Y, trainers=2)
        store.assign(START)
        found = daskps.train(store, regression, X.tolist(), Y.tolist(), trainers=2)
    assert bits(found.weights) == bits(expected.weights)
    assert found.stats.moved_parts == 0


def test_what_to_delayed_returns(client):
    """An object array of delayed blocks is as good as a list."""
    lazy = da.from_array(X, chunks=(16, 3))
    spy = Spy()
    with sgd_store() as store:
        daskps.train(store, spy, lazy.to_delayed().ravel())
    assert sorted(spy.seen(client)) == list(range(N))


@gen_cluster(client=True)
async def test_with_an_asynchronous_client(c, s, a, b):
    data = c.persist(da.from_array(X, chunks=(12, 3)))
    parts = [delayed(first)(delayed(load)(i)) for i in range(3)]
    async with await sgd_store(client=c) as store:
        for given, n in ((data, 4), (parts, 3)):
            spy = Spy()
            trainers = n if given is data else None
            result = await daskps.aio.train(store, spy, given, trainers=trainers)
            assert result.stats.moved_parts == 0
            events = await c.get_events(spy.topic)
            seen = [row for _, event in events for row in event["rows"]]
            assert sorted(seen) == list(range(N))
    assert {f.status for f in futures_of(data)} == {"finished"}


def test_futures_of_another_client(client):
    """They belong to another event loop; nothing of them is released."""
    with Client(client.scheduler.address, set_as_default=False) as other:
        pairs = [other.submit(load, i, pure=False) for i in range(3)]
        features = [other.submit(first, p, pure=False) for p in pairs]
        labels = [other.submit(second, p, pure=False) for p in pairs]
        wait([*features, *labels])  # else the scheduler may not know them yet
        spy = Spy()
        with sgd_store(client=client) as store:
            daskps.train(store, spy, features, labels)
        assert sorted(spy.seen(client)) == list(range(N))
        np.testing.assert_array_equal(np.concatenate(other.gather(labels)), Y)


def train_inside(uid):
    """Train from a task, on a dask array of the worker's own client."""
    store = daskps.open(uid)
    data = da.from_array(X, chunks=(16, 3))
    with dask.config.set(scheduler="sync"):
        return daskps.train(store, regression, data, Y, trainers=3, seed=1).weights


def test_inside_a_task(client):
    name = f"inside-{uuid.uuid4().hex}"
    with sgd_store(name=name) as store:
        found = client.submit(train_inside, name, pure=False).result(timeout=60)
        store.assign(START)
        expected = daskps.train(
            store, regression, X, Y, trainers=3, seed=1, reset_optimizer=True
        )
        store.delete()
    assert bits(found) == bits(expected.weights)
