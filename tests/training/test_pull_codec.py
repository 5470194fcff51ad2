"""Weights that are rounded on their way to trainers: the numbers, and the bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import daskps
from daskps import codecs, optim
from daskps.codecs import Int8, TopK
from tests.seams import session_of
from tests.support import mostly_inside

GIVEN = 1.111111
ROUNDED = {"bf16": 1.109375, "fp16": 1.111328125, "truncated": 1.109375}
CODECS: dict[str, Any] = {**{n: n for n in ("bf16", "fp16")}}
CODECS["truncated"] = codecs.BFloat16(truncate=True)
START = {
    "w": np.full(9, GIVEN, "f4"),
    "b": np.full(4, GIVEN),
    "h": np.full(3, GIVEN, "f2"),
    "n": np.arange(5),
}


def seen(params, X, y):
    """The gradient is what was pulled."""
    assert params["n"].tolist() == [0, 1, 2, 3, 4]
    return {"w": params["w"].copy(), "b": params["b"].copy()}


@mostly_inside("codec,sync", [("bf16", "bsp"), ("fp16", "asp"), ("truncated", "bsp")])
def test_trainers_see_rounded_weights_by_every_way(way, codec, sync):
    """With steps of what was seen: 1.111111 - r(w), twice; the store keeps all digits."""
    trainers = 2 if sync == "bsp" else 1  # of which all see the same
    with daskps.create(START, optimizer=optim.SGD(0.5), shards=3) as store:
        result = daskps.train(
            store,
            seen,
            np.zeros((2 * trainers, 1)),
            trainers=trainers,
            batch_size=1,
            sync=sync,
            pull_codec=CODECS[codec],
            callbacks=(),
        )
    expected = dict(START)
    for _ in range(2):
        for name in ("w", "b"):
            words = np.empty(len(expected[name]), "u2")
            of: Any = codecs.choose(CODECS[codec])
            pulled = np.empty_like(expected[name])
            of.encode(expected[name], words)
            of.decode(words, pulled)
            expected[name] = expected[name] - expected[name].dtype.type(0.5) * pulled
    for name, array in expected.items():
        np.testing.assert_array_equal(result.weights[name], array)


# -- bytes -----------------------------------------------------------------------------


def read_in(trainer, name):
    """Have a trainer of `run` pull in words, as those of `train` do."""
    of = session_of(trainer)._codecs
    of.reads_in, of._read_codec = name, codecs.named(name)


def count_pulls(trainer, name):
    """Return messages, calls by socket and bytes of three pulls, and of three pushpulls."""
    counters, found = session_of(trainer).shards.counters, []
    read_in(trainer, name)
    grads = {"w": np.ones(8001, "f4")}
    verbs = (trainer.pull, lambda: trainer.pushpull(grads))
    for verb in verbs:
        verb()
        before = counters.messages, counters.socket_calls
        nbytes = counters.nbytes + counters.socket_nbytes
        pulled = [verb()["w"] for _ in range(3)][-1]
        words = np.empty(8001, "u2")
        codecs.named(name).encode(pulled, words)
        assert (pulled == decoded(name, words, "f4")).all()
        assert pulled[0] != GIVEN
        calls = counters.messages - before[0], counters.socket_calls - before[1]
        found.append((*calls, counters.nbytes + counters.socket_nbytes - nbytes))
    return found


def decoded(name, words, dtype):
    out = np.empty(len(words), dtype)
    codecs.named(name).decode(words, out)
    return out


#: Of arrays of two shards, one of whose lengths is odd: float32, float64, and integers.
PULLED = {"w": np.full(8001, GIVEN, "f4"), "b": np.full(7, GIVEN), "n": np.arange(5)}


@pytest.mark.parametrize("way", ["rpc", "socket"], indirect=True)
@pytest.mark.parametrize("codec", ["bf16", "fp16"])
@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_bytes_of_a_pull_are_those_of_the_words(way, request, sync, codec):
    """By message and by socket: two for each number, and integers as they are."""
    with daskps.create(PULLED, optimizer=optim.SGD(0.01), shards=2) as store:
        [found] = daskps.run(store, count_pulls, [codec], sync=sync)
    by_socket = "socket" in request.node.callspec.id.split("-")
    calls = (0, 3 * 2) if by_socket else (3 * 2, 0)
    words = 2 * (8001 + 7) + 8 * 5
    assert found == [(*calls, 3 * words), (*calls, 3 * (words + 4 * 8001))]


# -- rows of tables --------------------------------------------------------------------

IDS = np.array([3, 17, 3, 0, 19, 8, 5])


def read_rows(trainer, name):
    """Return rows that were pulled, with arrays and alone, and bytes of the latter."""
    counters = session_of(trainer).shards.counters
    read_in(trainer, name)
    rows = {"emb": daskps.RowGrad(np.arange(12), np.full((12, 3), -GIVEN, "f4"))}
    found = [trainer.pushpull({"w": np.zeros(9, "f4"), **rows}, rows={"emb": IDS})]
    before = counters.messages, counters.nbytes + counters.socket_nbytes
    found.append(trainer.pull((), rows={"emb": IDS}))
    nbytes = counters.nbytes + counters.socket_nbytes - before[1]
    return found, counters.messages - before[0], nbytes


@mostly_inside(
    "codec,sync,rows",
    [("bf16", "bsp", 20), ("fp16", "asp", None), ("bf16", "asp", 20)],
    real=[("bf16", "bsp", 20), ("fp16", "asp", None)],
)
def test_rows_are_rounded_by_every_way(way, request, codec, sync, rows):
    """Also those of arrays that are read with them, and those that are not there."""
    params = {**START, "emb": daskps.TableSpec(rows, 3, init=0.3)}
    with daskps.create(params, optimizer=optim.SGD(1.0), shards=3) as store:
        [(found, messages, nbytes)] = daskps.run(store, read_rows, [codec], sync=sync)
    there = np.float32(0.3) + np.float32(GIVEN)
    expected = np.where(IDS < 12, there, np.float32(0.3)).astype("f4")
    words = np.empty(len(IDS), "u2")
    codecs.named(codec).encode(expected, words)
    expected = decoded(codec, words, "f4")
    if rows is None:  # there is none to be rounded
        expected[IDS >= 12] = np.float32(0.3)
    expected = np.repeat(expected, 3).reshape(-1, 3)
    for pulled in found:
        np.testing.assert_array_equal(pulled["emb"], expected)
    assert found[0]["w"][0] == np.float32(ROUNDED[codec])
    way = request.node.callspec.id.split("-")[0]
    marks = 0 if rows else len(IDS)
    if way == "rpc":
        assert (messages, nbytes) == (2, len(IDS) * 3 * 2 + marks)
    elif way == "socket":
        assert messages == 0
        assert nbytes == len(IDS) * (3 * 2 + 8) + marks  # ids count too


@pytest.mark.parametrize("execution", ["resident", "graph"])
def test_both_executions_see_the_same(client, execution):
    found = []

    def validate(params):
        found.append(params["w"][0])
        return {}

    with daskps.create(START, optimizer=optim.SGD(0.5)) as store:
        how: dict[str, Any] = {"execution": execution, "pull_codec": "bf16"}
        result = daskps.train(
            store, seen, np.zeros((2, 1)), trainers=2, validate=validate, **how
        )
    assert (
        result.weights["w"][0] == np.float32(GIVEN) - np.float32(0.5) * ROUNDED["bf16"]
    )
    # Not what trainers pull.
    assert found == [result.weights["w"][0]]


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ("int8", ValueError, "pull_codec takes codecs of 16 bits alone, found 'int8'"),
        (Int8(), ValueError, "choose 'bf16', 'fp16' or None"),
        (TopK(ratio=0.1), ValueError, "found 'topk'"),
        ("zip", ValueError, "pull_codec='zip' is not known"),
        (16, TypeError, "pull_codec is None, a name or a codec"),
    ],
)
def test_what_cannot_round_weights_is_refused_by_name(given, error, said):
    store: Any = None
    with pytest.raises(error, match=said):
        daskps.train(store, seen, np.zeros(3), pull_codec=given)


def test_a_mean_of_models_pulls_them_as_they_are():
    store: Any = None
    with pytest.raises(
        ValueError, match="takes no pull_codec, found pull_codec='fp16'"
    ):
        daskps.train(store, seen, np.zeros(3), average="models", pull_codec="fp16")
