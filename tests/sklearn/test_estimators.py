"""The estimators beside scikit-learn's own and plain `train`, on all kinds of data."""

from __future__ import annotations

import gc
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from distributed import Client
from sklearn import linear_model
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.datasets import make_classification
from sklearn.exceptions import (
    ConvergenceWarning,
    DataConversionWarning,
    NotFittedError,
)
from sklearn.linear_model import LogisticRegression, Perceptron
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import daskps
from daskps.optim import SGD, Adam
from daskps.sklearn import Averaged, SGDClassifier, SGDRegressor
from tests import inprocess

pytestmark = pytest.mark.leaky  # the cluster of a module

LOSSES = {
    SGDClassifier: (
        "hinge",
        "log_loss",
        "modified_huber",
        "squared_hinge",
        "perceptron",
        "squared_error",
        "huber",
        "epsilon_insensitive",
        "squared_epsilon_insensitive",
    ),
    SGDRegressor: (
        "squared_error",
        "huber",
        "epsilon_insensitive",
        "squared_epsilon_insensitive",
    ),
}
#: Two trainers have one half of the rows each.
TWO: dict[str, Any] = {"trainers": 2, "max_iter": 3, "tol": None, "random_state": 0}


@pytest.fixture
def inside() -> Iterator[None]:
    with inprocess.cluster():
        yield


def rows(n: int, k: int = 2, seed: int = 0) -> tuple[Any, Any]:
    X, y = make_classification(
        n, 8, n_informative=6, n_classes=k, class_sep=1.5, random_state=seed
    )
    return X / X.std(axis=0), y


# -- the same numbers ------------------------------------------------------------


def one_by_one(kind: type, loss: str, **how: Any) -> tuple[Any, Any]:
    """Return our estimator and scikit-learn's, which see the same rows in order."""
    how |= {"loss": loss, "max_iter": 2, "tol": None, "shuffle": False}
    ours = kind(batch_size=1, trainers=1, **how)
    return ours, getattr(linear_model, kind.__name__)(**how)


@pytest.mark.parametrize(
    ("kind", "loss"), [(kind, loss) for kind in LOSSES for loss in LOSSES[kind]]
)
def test_row_by_row_it_is_scikit_learns(inside: None, kind: type, loss: str) -> None:
    X, y = rows(40)
    ours, theirs = one_by_one(kind, loss, learning_rate="constant", eta0=0.01)
    for estimator in (ours, theirs):
        estimator.fit(X, y * 3.0 - 1)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=1e-9)


@pytest.mark.parametrize(
    "how",
    [
        {"learning_rate": "optimal", "alpha": 0.01},
        {"learning_rate": "invscaling", "eta0": 0.1, "power_t": 0.3},
        {"penalty": None, "alpha": 0.01},
        {"fit_intercept": False, "alpha": 0.01},
    ],
)
@pytest.mark.parametrize("k", [2, 3])
def test_arguments_mean_what_they_mean_there(inside: None, how: Any, k: int) -> None:
    X, y = rows(40, k)
    ours, theirs = one_by_one(SGDClassifier, "log_loss", **how)
    for estimator in (ours, theirs):
        estimator.fit(X, y)
    assert ours.coef_.shape == theirs.coef_.shape == ((1 if k == 2 else k), 8)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-8, atol=1e-11)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=1e-8)


def logistic(params: Any, X: Any, y: Any) -> Any:
    """The loss of two classes and its gradient, with alpha=0.01 of elasticnet's half."""
    w = params["coef"]
    margin = y[:, None] * (X @ w.T + params["intercept"])
    slope = -y[:, None] * np.exp(-np.logaddexp(0, margin)) / len(y)
    penalty = 0.005 * w + 0.005 * np.sign(w)
    grads = {"coef": slope.T @ X + penalty, "intercept": slope.sum(axis=0)}
    return np.logaddexp(0, -margin).mean(), grads


@pytest.mark.parametrize("sync", ["bsp", daskps.SSP(0)])
@pytest.mark.parametrize("partial", [False, True])
def test_the_bits_are_those_of_train(inside: None, sync: Any, partial: bool) -> None:
    X, y = rows(100)
    model = SGDClassifier(
        "log_loss",
        penalty="elasticnet",
        l1_ratio=0.5,
        alpha=0.01,
        optimizer=Adam(0.01),
        sync=sync,
        batch_size=16,
        **(TWO | {"trainers": 2 if sync == "bsp" else 1}),
    )
    if partial:
        for _ in range(3):
            model.partial_fit(X, y, classes=[0, 1])
    else:
        model.fit(X, y)
    zeros = {"coef": np.zeros((1, 8)), "intercept": np.zeros(1)}
    with daskps.create(zeros, optimizer=Adam(0.01)) as store:
        seed = np.random.RandomState(0).randint(2**31 - 1)
        how: dict[str, Any] = {"epochs": 3, "batch_size": 16}
        how |= {"trainers": model.trainers}
        result = daskps.train(
            store, logistic, X, 2 * y - 1, seed=seed, sync=sync, **how
        )
    assert model.coef_.tobytes() == result.weights["coef"].tobytes()
    assert model.intercept_.tobytes() == result.weights["intercept"].tobytes()
    assert model.t_ == 1 + result.version


@pytest.mark.parametrize("k", [2, 4])
def test_accuracy_is_scikit_learns(inside: None, k: int) -> None:
    X, y = rows(12_000, k)
    (X, y), test = (X[:6_000], y[:6_000]), (X[6_000:], y[6_000:])
    how: dict[str, Any] = {"loss": "log_loss", "alpha": 0.01, "random_state": 0}
    theirs = linear_model.SGDClassifier(max_iter=10, tol=None, **how)
    ours = SGDClassifier(max_iter=10, tol=None, trainers=2, **how)
    averaged = Averaged(clone(theirs), trainers=2)
    wanted = theirs.fit(X, y).score(*test)
    assert wanted > 0.65
    # Block after block, as dask_ml.wrappers.Incremental does it.
    blocks = clone(theirs)
    for i in 10 * [*range(0, 6_000, 1_000)]:
        blocks.partial_fit(X[i : i + 1_000], y[i : i + 1_000], classes=range(k))
    assert abs(blocks.score(*test) - wanted) < 0.005
    for model in (ours, averaged):
        assert abs(model.fit(X, y).score(*test) - wanted) < 0.005


# -- kinds of data ---------------------------------------------------------------


def kinds(X: Any, y: Any) -> dict[str, tuple[Any, Any]]:
    """Return the same rows in two halves, in memory and lazily."""
    half = len(X) // 2
    frame = pd.DataFrame(X, columns=[*"abcdefgh"]).assign(y=y)
    lazy = dd.from_pandas(frame, npartitions=2)
    assert lazy.map_partitions(len).compute().tolist() == [half, half]
    return {
        "NumPy": (X, y),
        "sparse": (scipy.sparse.csr_matrix(X), y),
        "pandas": (frame[[*"abcdefgh"]], frame["y"]),
        "dask arrays": (da.from_array(X, chunks=(half, 3)), da.from_array(y, half)),
        "dask frames": (lazy[[*"abcdefgh"]], lazy["y"]),
        "a dask array and NumPy": (da.from_array(X, chunks=half), y),
    }


@pytest.mark.parametrize(
    "model",
    [
        SGDClassifier("log_loss", **TWO),
        SGDRegressor(**TWO),
        Averaged(linear_model.SGDClassifier("log_loss", random_state=0), trainers=2),
        Averaged(linear_model.SGDRegressor(random_state=0), trainers=2),
    ],
)
def test_kinds_of_data_give_the_same(client: Client, model: Any) -> None:
    X, y = rows(80)
    labels = np.array(["no", "yes"])[y] if is_classifier(model) else y * 1.5
    assert is_regressor(model) != is_classifier(model)
    found = {kind: clone(model).fit(*data) for kind, data in kinds(X, labels).items()}
    first = found.pop("NumPy")
    if isinstance(model, Averaged):
        # scikit-learn slows the intercept down where rows are sparse.
        del found["sparse"]
    wanted = {"predict": first.predict(X), "score": first.score(X, labels)}
    if is_classifier(model):
        wanted["decision_function"] = first.decision_function(X)
        wanted["predict_proba"] = first.predict_proba(X)
        assert set(wanted["predict"]) == {"no", "yes"}
    for kind, fitted in [("NumPy", first), *found.items()]:
        data = kinds(X, labels)[kind]
        np.testing.assert_allclose(fitted.coef_, first.coef_, rtol=1e-12)
        for method, value in wanted.items():
            args = data if method == "score" else data[:1]
            said = getattr(fitted, method)(*args)
            assert hasattr(said, "compute") == ("dask" in kind), (kind, method)
            said = np.asarray(said)
            assert said.shape == np.shape(value)
            if said.dtype.kind == "f":
                np.testing.assert_allclose(said, value, rtol=1e-9)
            else:
                assert said.tolist() == np.asarray(value).tolist()


@pytest.mark.parametrize(
    "model", [SGDClassifier(**TWO), Averaged(Perceptron(), trainers=2)]
)
def test_a_client_that_is_not_the_current_one(client: Client, model: Any) -> None:
    X, y = rows(80)
    wanted = clone(model).fit(X, y).coef_.tobytes()
    lazy = {kind: kinds(X, y)[kind] for kind in ("dask arrays", "dask frames")}
    stored = {kind: client.persist(data) for kind, data in lazy.items()}
    with Client(processes=False, n_workers=1, dashboard_address="127.0.0.1:0"):
        for data in stored.values():
            found = clone(model).set_params(client=client).fit(*data)
            assert found.coef_.tobytes() == wanted


def test_empty_blocks_and_weights(client: Client) -> None:
    X, y = rows(80)
    data = kinds(X, y)["dask frames"]
    model = SGDClassifier("log_loss", **TWO).fit(*data)
    frame, labels = (of[data[0]["a"] > 0.9] for of in data)
    assert model.predict_proba(frame).compute().shape[1] == 2
    none = frame[frame["a"] > 1e9]
    assert model.predict(none).compute().shape == (0,)
    local = model.to_local()
    assert float(model.score(frame, labels)) == local.score(
        frame.compute(), labels.compute()
    )
    weights = np.arange(80.0)
    for kind in ("NumPy", "dask arrays"):
        nameless = SGDRegressor(eta0=0.1, **TWO).fit(X, y)
        said = float(nameless.score(*kinds(X, y)[kind], sample_weight=weights))
        wanted = nameless.to_local().score(X, y, weights)
        assert said == pytest.approx(wanted, rel=1e-12)


# -- lives of estimators and stores -----------------------------------------------


def stores() -> int:
    gc.collect()
    return len(daskps.list_stores())


def test_fit_frees_its_store_and_partial_fit_keeps_one(client: Client) -> None:
    X, y = rows(40)
    before = stores()
    model = SGDClassifier("log_loss", **TWO).fit(X, y)
    assert stores() == before
    model.partial_fit(X, y)
    model.partial_fit(X, y)
    assert stores() == before + 1
    other = pickle.loads(pickle.dumps(model))
    assert other.coef_.tobytes() == model.coef_.tobytes()
    assert other.partial_fit(X, y).n_iter_ == 1
    assert stores() == before + 2
    del other
    assert stores() == before + 1
    # A fit begins anew, and the store of partial fits goes.
    again = clone(model).fit(X, y).coef_.tobytes()
    assert model.fit(X, y).coef_.tobytes() == again
    assert stores() == before


def test_a_partial_fit_that_fails_changes_no_coefficients(client: Client) -> None:
    X, y = rows(80)
    before = stores()
    model = SGDClassifier("log_loss", **TWO).partial_fit(X, y, classes=[0, 1])
    coef = model.coef_.tobytes()
    wrong = X.copy()
    wrong[79] = np.nan
    with pytest.raises(daskps.PushRejectedError, match="NaN"):
        model.set_params(batch_size=8).partial_fit(da.from_array(wrong, chunks=40), y)
    assert model.coef_.tobytes() == coef
    again = pickle.loads(pickle.dumps(model))
    # Some rounds of the one that failed had changed what is in its store.
    model.partial_fit(X, y)
    assert model.coef_.tobytes() == again.partial_fit(X, y).coef_.tobytes()
    del again
    assert stores() == before + 1
    del model
    assert stores() == before


def test_partial_fits_after_a_fit_go_on_from_its_coefficients(inside: None) -> None:
    X, y = rows(40)
    how = TWO | {"max_iter": 1}
    model = SGDRegressor(learning_rate="constant", shuffle=False, **how).fit(X, y)
    model.partial_fit(X, y)
    whole = SGDRegressor(
        learning_rate="constant", shuffle=False, **(how | {"max_iter": 2})
    )
    assert model.coef_.tobytes() == whole.fit(X, y).coef_.tobytes()


def test_clones_and_pickles(client: Client) -> None:
    model = SGDClassifier("log_loss", client=client, optimizer=SGD(0.1))
    copy = clone(make_pipeline(StandardScaler(), model))[-1]
    assert copy.client is client
    assert copy.get_params() == model.get_params()
    assert pickle.loads(pickle.dumps(model)).client is None
    averaged = clone(Averaged(Perceptron(), client=client))
    assert averaged.client is client
    assert averaged.get_params()["estimator__penalty"] is None


@pytest.mark.parametrize("k", [2, 3])
def test_to_local_is_scikit_learns(inside: None, k: int) -> None:
    X, y = rows(60, k)
    for model, kind in (
        (SGDClassifier("log_loss", **TWO), linear_model.SGDClassifier),
        (SGDRegressor(**TWO), linear_model.SGDRegressor),
        (Averaged(Perceptron()), Perceptron),
    ):
        local = model.fit(X, y).to_local()
        assert type(local) is kind
        assert local.predict(X).tobytes() == model.predict(X).tobytes()
        local.partial_fit(X, y)
        assert local.coef_.tobytes() != model.coef_.tobytes()
        assert "daskps" not in pickle.dumps(local).decode("latin")


def test_averaged_is_the_mean_by_rows(inside: None) -> None:
    X, y = rows(50)
    of = linear_model.SGDRegressor(random_state=0)
    model = Averaged(of, epochs=1, trainers=3).fit(X, y)
    parts = daskps.partition(X, y, 3)
    assert [len(y) for _, y in parts] == [17, 17, 16]
    coefs = [clone(of).partial_fit(*part).coef_ for part in parts]
    wanted = np.average(coefs, axis=0, weights=[17, 17, 16])
    np.testing.assert_allclose(model.coef_, wanted, rtol=1e-12)
    # More trainers than rows: those without any are left out.
    few = Averaged(of, epochs=2, trainers=4).fit(X[:2], y[:2])
    assert few.partial_fit(X, y).t_ == 1 + 2 + 13


def test_it_stops_where_the_loss_is_no_better(inside: None) -> None:
    X, y = rows(200)
    model = SGDClassifier("log_loss", trainers=1, random_state=0, n_iter_no_change=2)
    assert 2 < model.fit(X, y).n_iter_ < 100
    with pytest.warns(ConvergenceWarning, match="raise max_iter"):
        model.set_params(max_iter=2).fit(X, y)


# -- tools of scikit-learn ----------------------------------------------------------


def fit_and_score(model: Any, X: Any, y: Any) -> float:
    score: float = model.fit(X, y).score(X, y)
    return score


def test_pipelines_and_grids(client: Client) -> None:
    X, y = rows(60)
    model = make_pipeline(StandardScaler(), SGDClassifier("log_loss", **TWO))
    grid = GridSearchCV(model, {"sgdclassifier__alpha": [1e-4, 10.0]}, cv=2)
    grid.fit(X, y)
    assert grid.best_params_ == {"sgdclassifier__alpha": 1e-4}
    assert grid.score(X, y) > 0.8


def test_it_fits_in_ordinary_tasks(client: Client) -> None:
    X, y = rows(60)
    for model in (SGDClassifier(client=client, **TWO), Averaged(Perceptron())):
        # Pickled, it is without the client, and finds its worker's.
        args = pickle.loads(pickle.dumps(model)), X, y
        futures = [client.submit(fit_and_score, *args, pure=False) for _ in range(2)]
        one, other = client.gather(futures)
        assert one == other > 0.8


# -- bad input -----------------------------------------------------------------------


@pytest.mark.parametrize("model", [SGDClassifier(), Averaged(Perceptron())])
def test_it_is_not_fitted(model: Any) -> None:
    X, y = rows(20)
    for data in (X, da.from_array(X)):
        for call in (model.predict, model.decision_function):
            with pytest.raises(NotFittedError):
                call(data)
        with pytest.raises(NotFittedError):
            model.score(data, y)
    with pytest.raises(NotFittedError):
        model.to_local()
    assert not hasattr(model, "predict_proba")
    assert not hasattr(SGDRegressor(), "decision_function")


@pytest.mark.parametrize(
    "model", [SGDClassifier(**TWO), Averaged(Perceptron(), trainers=2)]
)
def test_labels_that_the_first_call_did_not_name(client: Client, model: Any) -> None:
    X, y = rows(40)
    with pytest.raises(ValueError, match="classes must be passed"):
        clone(model).partial_fit(X, y)
    model.partial_fit(X, y, classes=[0, 1])
    coef = model.coef_.tobytes()
    for data in (X, da.from_array(X, chunks=20)), (y + 1, da.from_array(y + 1)):
        with pytest.raises(ValueError, match=r"labels \[2\], which are none of"):
            model.partial_fit(data[0] if data[0] is X else X, y + 1)
    with pytest.raises(ValueError, match=r"labels \[2\]"):
        model.partial_fit(da.from_array(X, chunks=20), da.from_array(y + 1, chunks=20))
    with pytest.raises(ValueError, match="not the same as on last call"):
        model.partial_fit(X, y, classes=[0, 1, 2])
    assert model.coef_.tobytes() == coef
    model.partial_fit(X, y, classes=[1, 0])


@pytest.mark.parametrize("model", [SGDClassifier(**TWO), SGDRegressor(**TWO)])
def test_a_column_of_targets(client: Client, model: Any) -> None:
    X, y = rows(40)
    wanted = clone(model).fit(X, y).coef_.tobytes()
    lazy = da.from_array(X, chunks=20)
    frame = dd.from_pandas(pd.DataFrame({"y": y}), npartitions=2)
    for data in (X, y[:, None]), (lazy, da.from_array(y, 20)[:, None]), (lazy, frame):
        with pytest.warns(DataConversionWarning):
            assert clone(model).fit(*data).coef_.tobytes() == wanted


@pytest.mark.parametrize(
    "model",
    [
        SGDClassifier(**TWO),
        SGDRegressor(**TWO),
        Averaged(Perceptron()),
        Averaged(linear_model.SGDRegressor()),
    ],
)
def test_rows_that_cannot_be(client: Client, model: Any) -> None:
    X, y = rows(40)
    lazy = da.from_array(X, chunks=20)
    for of in (X, lazy):
        with pytest.raises(ValueError, match=r"sample|rows|classes"):
            clone(model).fit(of[:0], y[:0])
        with pytest.raises(ValueError, match="y to be passed"):
            clone(model).fit(of, None)
        with pytest.raises(ValueError, match="Expected 2D array"):
            clone(model).fit(of[:, 0], y)
        with pytest.raises(ValueError, match=r"39|inconsistent"):
            clone(model).fit(of, y[1:])
        fitted = clone(model).fit(of, y)
        with pytest.raises(ValueError, match="is expecting 8 features"):
            fitted.predict(of[:, 1:])
    if is_classifier(model):
        for labels in (np.ones(40), da.ones(40)):
            with pytest.raises(ValueError, match="greater than one"):
                clone(model).fit(lazy, labels)
        with pytest.raises(ValueError, match="Unknown label type"):
            clone(model).fit(lazy, da.from_array(X[:, 0]))


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"loss": "quantile"}, "loss"),
        ({"penalty": "l3"}, "penalty"),
        ({"alpha": -1.0}, "alpha"),
        ({"alpha": 0.0}, "alpha must be > 0"),
        ({"learning_rate": "adaptive"}, "optimal"),
        ({"batch_size": 0}, "batch_size"),
        ({"sync": "sometimes"}, "sometimes"),
        ({"max_iter": 0}, "max_iter"),
    ],
)
def test_arguments_that_cannot_be(inside: None, how: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SGDClassifier(**how).fit(*rows(20))


def test_averages_of_no_epoch(inside: None) -> None:
    with pytest.raises(ValueError, match="epochs"):
        Averaged(Perceptron(), epochs=0).fit(*rows(20))


@pytest.mark.parametrize(
    "of",
    [
        LogisticRegression(),
        MLPClassifier((2,), max_iter=1),
        linear_model.SGDClassifier(average=True),
    ],
)
def test_estimators_that_have_no_mean(inside: None, of: Any) -> None:
    model = Averaged(of)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        with pytest.raises(TypeError, match="whose partial_fit goes on from its coef_"):
            model.fit(*rows(20))
    assert not hasattr(model, "coef_")
