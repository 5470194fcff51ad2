"""Numbers of a parameter that its owners work out."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import daskps
from daskps.cluster.protocol.measures import Measuring, Share
from daskps.errors import ProtocolError
from daskps.kernels.measures import BLOCK
from daskps.layout.arrays import DTYPES
from tests.inprocess import cluster
from tests.seams import shards_of

KINDS = ("sum", "mean", "min", "max", "norm")


@pytest.fixture(scope="module")
def here() -> Any:
    with cluster(3) as made:
        yield made


def every(array: Any, other: Any) -> list[Any]:
    return [*(getattr(array, kind)() for kind in KINDS), array.dot(other)]


def test_the_bits_do_not_depend_on_the_number_of_shards(here):
    """Nor on what else there is, nor do those of a region on where it begins."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=5 * BLOCK + 77).astype("f4")
    y = rng.normal(size=len(x))
    found = []
    for shards in (1, 2, 7, 100):
        other = {"before": np.ones(shards * 11, "f4")}
        with daskps.create({**other, "x": x, "y": y}, shards=shards) as store:
            of = every(store["x"], store["y"]) + every(store["x"], y)
            of += every(store["y"].region(1000, 4 * BLOCK), x[: 4 * BLOCK - 1000])
            of += every(store["y"].region(5, 9), store["y"].region(1, 5))
            found.append(of)
    assert [np.asarray(v).tobytes() for v in found[0]] == [
        np.asarray(v).tobytes() for v in found[2]
    ]
    assert found[0] == found[1] == found[2] == found[3]
    with daskps.create({"z": y[1000 : 4 * BLOCK]}, shards=3) as alone:
        assert every(alone["z"], x[: 4 * BLOCK - 1000]) == found[0][12:18]
    np.testing.assert_allclose(found[0][0], x.astype("f8").sum(), rtol=1e-6)
    np.testing.assert_allclose(found[0][5], np.vdot(x, y), rtol=1e-12)
    np.testing.assert_allclose(found[0][4], np.linalg.norm(x), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_as_in_numpy(here, dtype):
    x = np.arange(60).reshape(3, 4, 5) % 7
    x = x.astype(dtype)
    with daskps.create({"x": x, "e": np.zeros((0, 2), dtype)}, shards=4) as store:
        for kind in ("sum", "mean", "min", "max"):
            found, wanted = getattr(store["x"], kind)(), getattr(np, kind)(x)
            assert (found, found.dtype) == (pytest.approx(wanted), wanted.dtype)
        assert store["x"].dot(x) == np.vdot(x, x)
        assert (store["e"].sum(), store["e"].norm()) == (0, 0)
        with pytest.raises(ValueError, match="zero-size array"):
            store["e"].max()
        with pytest.warns(RuntimeWarning):
            assert np.isnan(store["e"].mean())


def test_numbers_are_those_of_the_latest_version(way):
    """By any way the owners are asked, whatever runs meanwhile."""
    n = 3 * BLOCK
    with daskps.create({"w": np.zeros(n)}, shards=3) as store:
        for k in range(1, 4):
            store["w"].add(np.ones(n))
            store["w"].region(BLOCK - 1, BLOCK + 1).add([0.5, 0.5])
            assert store["w"].sum() == k * (n + 1)
            assert store["w"].max() == 1.5 * k
            assert store["w"].dot(store["w"]) == k * k * (n + 2.5)


def test_factors_that_do_not_fit_are_refused(here):
    with (
        daskps.create({"w": np.zeros((2, 3)), "v": np.zeros(6)}) as store,
        daskps.create({"w": np.zeros((2, 3))}) as other,
    ):
        with pytest.raises(
            ValueError, match=r"the array has shape \(6,\), 'w' \(2, 3\)"
        ):
            store["w"].dot(np.zeros(6))
        with pytest.raises(ValueError, match=r"'v'.* has shape \(6,\), 'w' \(2, 3\)"):
            store["w"].dot(store["v"])
        with pytest.raises(ValueError, match="is of another store than"):
            store["w"].dot(other["w"])
        with pytest.raises(ValueError, match="which a store cannot hold"):
            store["w"].dot([["a", "b", "c"]] * 2)


def test_messages_that_no_caller_sends_are_refused(here):
    with daskps.create({"w": np.zeros(6)}, shards=2) as store:
        link, [owner, _] = shards_of(store).link, store.placement

        def ask(asked: Any, given: Any) -> Any:
            about = {"store": store.uid, "asked": asked, "given": given}
            return link.run(lambda: link.control(owner, "measure", **about))

        assert len(ask(("sum", 0, 0, 6, ""), [(0, None)])) == 1
        for asked, given in [
            (("median", 0, 0, 6, ""), [(0, None)]),
            (("sum", 0, 0, 7, ""), [(0, None)]),
            (("sum", 0, -1, 3, ""), [(0, None)]),
            (("sum", 1, 0, 3, ""), [(0, None)]),
            (("sum", 0, 0, -1, ""), [(0, None)]),
            (("sum", 0, 0, 6, "float64"), [(0, b"")]),
            (("dot", 0, 0, 6, "complex64"), [(0, b"")]),
            (("dot", 0, 0, 6, "float64"), [(0, b"12345678")]),
        ]:
            with pytest.raises(ProtocolError):
                ask(asked, given)


def test_shares_have_every_element_once():
    asked = Measuring("sum", 0, 100, 3 * BLOCK)
    for cuts in ([0, 50, 100, 3 * BLOCK + 100], [0, 5000, 5001, 9000, 9001, 20_000]):
        seen = np.zeros(asked.n, int)
        for start, stop in itertools.pairwise(cuts):
            share = Share.of(asked, start, stop)
            for part in (share.whole, *share.cut):
                seen[part] += 1
        assert (seen == 1).all()
