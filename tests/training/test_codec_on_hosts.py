"""Codecs of a user's that do not decode: at the trainer, or at one of the shards."""

from __future__ import annotations

import numpy as np
import pytest

import daskps
from daskps import codecs, optim

#: How many more times eight numbers cannot be decoded, and how many times they can before.
FAILS, FIRST = 0, 0


class Fragile(codecs.Codec):
    """Cannot decode the eight numbers of the second shard, once the trainer has."""

    dtype = "float64"

    def n_words(self, n):
        return n

    def encode(self, array, words):
        words[:] = array

    def decode(self, words, out):
        global FAILS, FIRST
        if len(out) == 8 and FAILS:
            if FIRST:
                FIRST -= 1
            else:
                FAILS -= 1
                raise OSError("no such table")
        out[:] = words


class Short(Fragile):
    """Says of every array that it is one number shorter."""

    def decode(self, words, out):
        return words[1:].copy()


def push_short(trainer, part):
    with pytest.raises(daskps.PushRejectedError) as caught:
        trainer.push({"w": np.ones(17)})
    return str(caught.value), trainer.clock


@pytest.mark.parametrize("way", ["inside", "queue"], indirect=True)
@pytest.mark.parametrize("sync", ["bsp", "ssp", "asp"])
def test_what_decodes_to_another_length_changes_nothing(way, sync):
    with daskps.create(
        {"w": np.zeros(17)}, optimizer=optim.SGD(1.0), shards=2
    ) as store:
        [found] = daskps.run(store, push_short, [0], sync=sync, codec=Short())
        assert store.versions == (0, 0)
        assert not store.pull()["w"].any()
    said = "decode of codec='Short' returned ndarray of shape (8,) for 9 numbers"
    assert found == (f"{said}; fill `out` and return nothing", 0)


def push_twice(trainer, part):
    global FAILS, FIRST
    FAILS, FIRST = 1, 1
    with pytest.raises(daskps.PushRejectedError) as caught:
        trainer.push({"w": np.ones(17)})
    clock = trainer.clock
    trainer.push({"w": np.ones(17)})
    return str(caught.value), clock, trainer.clock


@pytest.mark.parametrize("way", ["inside", "queue"], indirect=True)
@pytest.mark.parametrize(("sync", "first"), [("bsp", 1), ("asp", 2), ("ssp", 2)])
def test_what_a_shard_cannot_decode_is_said_as_it_is(way, sync, first):
    """The other shard has its part: pushed again it counts once in a round, else twice."""
    with daskps.create(
        {"w": np.zeros(17)}, optimizer=optim.SGD(1.0), shards=2
    ) as store:
        [found] = daskps.run(store, push_twice, [0], sync=sync, codec=Fragile())
        assert store.pull()["w"].tolist() == [-first] * 9 + [-1.0] * 8
    said, clock, after = found
    assert said.startswith("decode of codec='Fragile' raised OSError: no such table")
    assert "shard 1 could not, which has taken nothing of this push" in said
    assert "Other shards may have taken their parts" in said
    assert "nothing was changed" not in said
    assert (clock, after) == (0, 1)
