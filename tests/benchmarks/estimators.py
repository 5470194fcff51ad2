"""Linear models on rows that lie on a cluster, beside scikit-learn and dask-ml."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.benchmarks import clusters
from tests.benchmarks.command import benchmark, number
from tests.benchmarks.report import Verdict
from tests.benchmarks.samples import Job, seconds

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from tests.benchmarks.report import Found

ALPHA, EPOCHS, COLUMNS, WORSE = 1e-3, 5, 50, 0.005
ARGS: dict[str, Any] = {"loss": "log_loss", "alpha": ALPHA, "random_state": 0}
WHOLE: dict[str, Any] = {**ARGS, "max_iter": EPOCHS, "tol": None}


def _data(rows: int) -> tuple[Any, Any]:
    """Return columns with noise, and labels of which a tenth cannot be known."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, COLUMNS))
    scores = X @ rng.normal(size=COLUMNS) + 1.8 * rng.normal(size=rows)
    return X, (scores > 0).astype(int)


@benchmark(
    "estimators",
    "linear models of scikit-learn's kind",
    number("--rows", 200_000, "to train on"),
    number("--chunks", 20, "of dask arrays"),
    pairs=3,
)
def estimators(options: Namespace) -> Iterator[Found]:
    """Yield the time of each way to fit, and whether all are as accurate."""
    import dask.array as da
    from sklearn.linear_model import SGDClassifier

    from daskps import sklearn as ours

    X, y = _data(options.rows + options.rows // 10)
    seen, new = slice(options.rows), slice(options.rows, None)
    accuracy: dict[str, float] = {}
    with clusters.local(2) as client:
        chunk = -(-options.rows // options.chunks)
        lazy_x, lazy_y = (da.from_array(a[seen], chunk).persist() for a in (X, y))
        client.rebalance([*client.futures_of([lazy_x, lazy_y])])

        def fitted(name: str, fit: Callable[[], Any]) -> float:
            found: list[Any] = []
            took = seconds(lambda: found.append(fit()))
            accuracy[name] = float(found[0].score(X[new], y[new]))
            return took

        def incremental(wrapper: Any) -> Any:
            model = wrapper(SGDClassifier(**ARGS), shuffle_blocks=False)
            for _ in range(EPOCHS):
                model.partial_fit(lazy_x, lazy_y, classes=[0, 1])
            return model

        def linear(n: int) -> Any:
            return ours.SGDClassifier(batch_size=n, **WHOLE).fit(lazy_x, lazy_y)

        sides: dict[str, Callable[[], Any]] = {
            f"batch_size={n}": partial(linear, n) for n in (64, 256, 1024)
        }
        sides["Averaged"] = lambda: ours.Averaged(
            SGDClassifier(**ARGS), epochs=EPOCHS
        ).fit(lazy_x, lazy_y)
        if find_spec("dask_ml"):
            wrappers: Any = import_module("dask_ml.wrappers")
            sides["dask_ml Incremental"] = partial(incremental, wrappers.Incremental)
        sides["scikit-learn, one process"] = lambda: SGDClassifier(**WHOLE).fit(
            X[seen], y[seen]
        )
        title = f"{EPOCHS} epochs of {options.rows:,} x {COLUMNS}"
        yield Job(
            title,
            {name: partial(fitted, name, fit) for name, fit in sides.items()},
            warm=1,
        )
    told = {name: round(of, 4) for name, of in accuracy.items()}
    worst = min(accuracy.values(), default=0.0)
    is_near = worst >= accuracy.get("scikit-learn, one process", 1.0) - WORSE
    yield Verdict(f"accuracies within {WORSE:.1%} of scikit-learn's: {told}", is_near)
