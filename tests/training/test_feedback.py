"""Codecs that leave something over, in runs: the same numbers by every way, and bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import daskps
from daskps import codecs, optim
from daskps.cluster.protocol import encoding
from daskps.codecs import Int8, TopK, TwoBit
from daskps.layout.arrays import Layout
from tests.seams import session_of
from tests.support import mostly_inside

CODECS = {
    "int8": Int8(16),
    "2bit": TwoBit(0.5),
    "topk": TopK(ratio=0.1),
    "bound": TopK(threshold=0.8),
}
#: Gradients of each step, of 103 and of 7 numbers.
STEPS = [
    {
        "w": np.random.default_rng(k).normal(size=103).astype("f4"),
        "b": np.random.default_rng(k + 9).normal(size=7),
    }
    for k in range(4)
]
START = {"w": np.zeros(103, "f4"), "b": np.zeros(7)}


def expected(codec):
    """What one trainer's pushes come to, by the codec alone."""
    found = {name: array.copy() for name, array in START.items()}
    left: dict[str, Any] = dict.fromkeys(found)
    for step in STEPS:
        for name, given in step.items():
            made = codec.encode_pieces(given, [(0, len(given))], left[name])
            left[name] = made.residual
            out = np.empty_like(given)
            codec.decode_piece(made.words[0], out)
            found[name] -= out
    return found


def push_steps(trainer, part):
    for step in STEPS:
        trainer.push(step)


@mostly_inside(
    "codec,sync,shards",
    [
        (c, s, n)
        for c in CODECS
        for s, n in (("bsp", 1), ("bsp", 3), ("asp", 3), ("ssp", 3))
    ],
    real=[("topk", "asp", 3), ("bound", "bsp", 3), ("int8", "ssp", 3)],
)
def test_what_was_not_said_is_said_later_by_every_way(way, codec, sync, shards):
    """To the last bit, on any number of shards."""
    with daskps.create(START, optimizer=optim.SGD(1.0), shards=shards) as store:
        daskps.run(store, push_steps, [0], sync=sync, codec=CODECS[codec])
        found = store.pull()
    for name, array in expected(CODECS[codec]).items():
        np.testing.assert_array_equal(found[name], array)


class Doubles(codecs.Codec):
    """Two words of a user's for each number, which say it twice."""

    dtype = "float64"

    def n_words(self, n):
        return 2 * n

    def encode(self, array, words):
        words[:] = np.repeat(array, 2)

    def decode(self, words, out):
        out[:] = words[::2]


# -- bytes -----------------------------------------------------------------------------


def count_steps(trainer, part):
    """Return messages, calls by socket and bytes of three steps."""
    counters, rng = session_of(trainer).shards.counters, np.random.default_rng(4)
    grad = {"w": rng.normal(size=8000).astype("f4")}
    trainer.push(grad)
    before = replace(counters)
    for _ in range(3):
        trainer.push(grad)
    nbytes = counters.nbytes + counters.socket_nbytes
    return (
        counters.messages - before.messages,
        counters.socket_calls - before.socket_calls,
        nbytes - before.nbytes - before.socket_nbytes,
    )


@pytest.mark.parametrize("way", ["rpc", "socket"], indirect=True)
@pytest.mark.parametrize("sync", ["asp", "bsp"])
@pytest.mark.parametrize(
    ("codec", "each"),
    [
        # Two shards of 4,000, of which one begins and the other ends within a block.
        (Int8(), 8000 + 4 * (16 + 17)),
        (TwoBit(1.0), 2 * 1000),
        (TopK(ratio=0.01), 80 * 8),
        (Doubles(), 2 * 8000 * 8),
    ],
    ids=["int8", "2bit", "topk", "own"],
)
def test_bytes_of_a_step_are_those_of_the_words(way, request, codec, each, sync):
    params = {"w": np.zeros(8000, "f4")}
    with daskps.create(params, shards=2, optimizer=optim.SGD(0.1)) as store:
        [found] = daskps.run(store, count_steps, [0], codec=codec, sync=sync)
    by_socket = "socket" in request.node.callspec.id.split("-")
    assert found[:2] == ((0, 3 * 2) if by_socket else (3 * 2, 0))
    assert found[2] == 3 * each


# -- refused, lost, sent again ---------------------------------------------------------


def lose_one(trainer, part):
    """Push 0.03; push again, which is lost; again; and once more."""
    session, given = session_of(trainer), {"w": np.array([0.03])}
    seen = []

    def push():
        trainer.push(given)
        seen.append(float(trainer.pull()["w"][0]))

    push()
    with (
        mock.patch.object(session, "_find_step_route", return_value=None),
        mock.patch.object(session, "_send", side_effect=TimeoutError("lost")),
        pytest.raises(TimeoutError),
    ):
        trainer.push(given)
    with pytest.raises(daskps.PushRejectedError, match="NaN"):
        trainer.push({"w": np.array([np.nan])})
    push()
    push()
    return seen


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_push_that_is_refused_or_lost_takes_nothing_of_what_is_left(client, sync):
    """0.03, threshold 0.05: nothing is sent, then 0.06, and then nothing is left."""
    with daskps.create({"w": np.zeros(1)}, optimizer=optim.SGD(1.0)) as store:
        [seen] = daskps.run(store, lose_one, [0], sync=sync, codec=TopK(threshold=0.05))
    assert seen == [0.0, -0.06, -0.06]


def sit_out(trainer, part):
    trainer.push({"w": np.array([0.03])})
    trainer.push({"w": np.array([0.03])}, weight=0.0)
    trainer.push({"w": np.array([0.03])})
    return float(trainer.pull()["w"][0])


def test_what_counts_for_nothing_leaves_nothing_over(client):
    with daskps.create({"w": np.zeros(1)}, optimizer=optim.SGD(1.0)) as store:
        assert daskps.run(store, sit_out, [0], codec=TopK(threshold=0.05)) == [-0.06]


def push_in_pieces(trainer, part):
    """Two pushes before a tick; the second one meets shards that have gone."""
    trainer.push({"w": np.full(5, 0.6)}, tick=False)
    session_of(trainer)._is_torn = True
    trainer.push({"w": np.full(5, 0.6)})
    trainer.push({"w": np.full(5, 0.4)})
    return trainer.pull()["w"].tolist()


def test_pushes_of_one_clock_are_sent_again_as_what_they_said(client):
    """0.5 and 0.5, with 0.1 and 0.2 left over, then 0.5 of what has become 0.6."""
    with daskps.create({"w": np.zeros(5)}, optimizer=optim.SGD(1.0)) as store:
        [found] = daskps.run(store, push_in_pieces, [0], codec=TwoBit(0.5))
    assert found == [-1.5] * 5


def test_all_tries_of_a_push_send_the_same_words():
    """They are made once; what was left over before stays until the push is accepted."""
    layout = Layout.build({"w": ((9,), "float32")}, 2)
    given, before = {0: np.full(9, 0.3, "f4")}, {0: np.full(9, 0.3, "f4")}
    made = [
        encoding.encoded(
            layout, given, TwoBit(0.5), residuals=before, finite=True, empty=np.empty
        )
        for _ in range(2)
    ]
    (one, left), (two, _) = made
    assert [w.tobytes() for w in one.values()] == [w.tobytes() for w in two.values()]
    np.testing.assert_array_equal(before[0], np.full(9, 0.3, "f4"))
    np.testing.assert_allclose(left[0], 0.1, atol=1e-7)


# -- refused combinations --------------------------------------------------------------


@pytest.mark.parametrize("codec", [Int8(), TwoBit(1.0), TopK(ratio=0.5)])
def test_graph_execution_refuses_them_by_name(codec):
    store: Any = None
    said = (
        f"execution='graph' takes codecs of 16 bits alone, found codec='{codec.name}'"
    )
    with pytest.raises(ValueError, match=said):
        daskps.train(store, len, np.ones(3), execution="graph", codec=codec)


def gradient(params, X, y):
    error = X @ params["w"] - y
    return float((error**2).mean()), {"w": X.T @ error / len(X)}


@pytest.mark.parametrize("codec", ["int8", Int8(), TopK(ratio=0.25)])
def test_training_comes_to_the_same_end(client, codec):
    """Nothing is lost, so the weights are those that solve it."""
    X = np.random.default_rng(1).normal(size=(64, 8))
    solution = np.arange(8.0)
    with daskps.create({"w": np.zeros(8)}, optimizer=optim.SGD(0.1)) as store:
        result = daskps.train(
            store,
            gradient,
            X,
            X @ solution,
            trainers=2,
            epochs=60,
            batch_size=8,
            codec=codec,
        )
    np.testing.assert_allclose(result.weights["w"], solution, atol=0.02)
    assert result.execution == "resident"
    assert codecs.choose("int8") == Int8()
