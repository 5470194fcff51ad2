"""Gradients of rows in words of a codec: the numbers, the bytes, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import daskps
from daskps import RowGrad, TableSpec, codecs, optim
from daskps.codecs import Int8
from tests.seams import session_of
from tests.support import mostly_inside

RNG = np.random.default_rng(31)
IDS = np.array([3, 17, 3, 0, 19, 8, 8, 8])
ROWS = RNG.normal(size=(8, 5)).astype("f4")
ARRAY = RNG.normal(size=6)


class Halved(codecs.Codec):
    """Of a user's: float16 of NumPy's."""

    dtype = "uint16"

    def n_words(self, n):
        return n

    def encode(self, array, words):
        words.view("f2")[:] = array

    def decode(self, words, out):
        out[:] = words.view("f2")


CODECS = {"bf16": codecs.BFloat16(), "int8": Int8(), "own": Halved()}


def of_each_row(codec):
    """What arrives of each row, which is a block of its own."""
    out = np.empty_like(ROWS)
    for row, to in zip(ROWS, out, strict=True):
        of = codec.of_rows(5)
        of.decode_piece(of.encode_pieces(row, [(0, 5)]).words[0], to)
    return out


def push_rows(trainer, part):
    trainer.push({"emb": RowGrad(IDS, ROWS), "w": ARRAY}, tick=False)
    trainer.push({"emb": RowGrad(IDS[:2], ROWS[:2])})


@mostly_inside(
    "codec,sync,rows",
    [(c, s, n) for c in CODECS for s in ("bsp", "asp") for n in (20, None)],
    real=[("bf16", "asp", 20), ("int8", "bsp", None), ("own", "asp", 20)],
)
def test_rows_arrive_as_their_codec_says_by_every_way(way, codec, sync, rows):
    """Rows that repeat are added up as what they come to."""
    chosen = CODECS[codec]
    params = {"emb": TableSpec(rows, 5), "w": np.zeros(6)}
    with daskps.create(params, optimizer=optim.SGD(1.0), shards=3) as store:
        daskps.run(store, push_rows, [0], sync=sync, codec=chosen)
        found = store.pull(rows={"emb": np.arange(20)})
    expected, given = np.zeros((20, 5), "f4"), of_each_row(chosen)
    for k, row in [*zip(IDS, given, strict=True), *zip(IDS[:2], given, strict=False)]:
        expected[k] -= row
    np.testing.assert_allclose(found["emb"], expected, rtol=0, atol=1e-6)
    assert np.abs(expected).max() > 1
    assert np.abs(found["w"] + ARRAY).max() < 0.02


def count_rows(trainer, part):
    counters = session_of(trainer).shards.counters
    grad = {"emb": RowGrad(np.arange(400), np.ones((400, 8), "f4"))}
    trainer.push(grad)
    before = counters.nbytes + counters.socket_nbytes
    trainer.push(grad)
    return counters.nbytes + counters.socket_nbytes - before, counters.messages


@pytest.mark.parametrize(
    ("codec", "each"), [(None, 4 * 8), ("fp16", 2 * 8), ("int8", 8 + 4), (Halved(), 16)]
)
@pytest.mark.parametrize("way", ["rpc", "socket"], indirect=True)
def test_bytes_of_rows_are_those_of_their_words(way, request, codec, each):
    how: dict[str, Any] = {"optimizer": optim.SGD(0.1), "shards": 2}
    with daskps.create({"emb": TableSpec(400, 8)}, **how) as store:
        [(found, messages)] = daskps.run(
            store, count_rows, [0], codec=codec, sync="asp"
        )
    by_socket = "socket" in request.node.callspec.id.split("-")
    # By socket ids count too.
    assert found == 400 * (each + 8 * by_socket)
    assert messages == (0 if by_socket else 2 * 2)


def push_too_large(trainer, part):
    with pytest.raises(daskps.PushRejectedError, match=r"table 'emb'.*codec='fp16'"):
        trainer.push({"emb": RowGrad([1], np.full((1, 2), 65_520.0)), "w": np.ones(1)})
    clock = trainer.clock
    trainer.push({"emb": RowGrad([1], np.full((1, 2), 65_500.0))})
    return clock, trainer.clock, trainer.pull()["w"].tolist()


def test_rows_that_would_become_infinite_are_refused(client):
    """With all that comes with them, before any shard has seen it."""
    params = {"emb": TableSpec(4, 2), "w": np.zeros(1)}
    with daskps.create(params, optimizer=optim.SGD(1.0)) as store:
        assert daskps.run(store, push_too_large, [0], codec="fp16") == [(0, 1, [0.0])]
        assert store["emb"].pull([1]).tolist() == [[-65_504.0, -65_504.0]]
