"""Codecs of a user's that do what none may: what is said of it, and what goes on.

At the trainer, where nothing has left yet, and in the process of one shard alone.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import codecs, optim
from tests.support import mostly_inside


class Bad(codecs.Codec):
    """Does something wrong, in one process or in all, from a call of it on."""

    dtype = "float64"

    def __init__(self, what: str, pid: int = 0) -> None:
        self.what, self.pid, self.n_asked = what, pid, 0

    def does(self, what: str) -> bool:
        return self.what == what and (self.pid or STATE["trainer"]) == os.getpid()

    def n_words(self, n: int) -> Any:
        if self.does("length raises"):
            raise KeyError("n")
        if self.does("length exits"):
            raise SystemExit(3)
        if self.does("length is none"):
            return "many"
        if self.does("length is huge"):
            return 10**15
        if self.does("length grows"):
            self.n_asked += 1
            return n + self.n_asked
        return n

    def encode(self, array: Any, words: Any) -> None:
        if self.does("encode exits"):
            raise SystemExit(3)
        if self.does("encode writes its input"):
            array[0] = 7.0
        words[: len(array)] = array

    def decode(self, words: Any, out: Any) -> Any:
        if self.does("decode exits"):
            raise SystemExit(3)
        if self.does("decode raises"):
            raise MemoryError
        if self.does("decode writes its input"):
            words[0] = 7.0
        if self.does("another dtype"):
            return words.astype("f2")
        out[:] = words[: len(out)]
        return None


#: The process of a trainer whose codec is bad.
STATE = {"trainer": -1}
AT_TRAINER = {
    "length raises": "n_words of codec='Bad' raised KeyError",
    "length exits": "n_words of codec='Bad' raised .*called sys.exit.3",
    "length is none": "n_words.9. of codec='Bad' is 'many'",
    "length is huge": "n_words.9. of codec='Bad' is 1,000,.*; return 66,112 at most",
    "length grows": "n_words.9. of codec='Bad' is 1., and 1. when it is asked again",
    "encode exits": "encode of codec='Bad' raised .*called sys.exit.3",
    "encode writes its input": "encode of codec='Bad' raised ValueError",
    "decode exits": "decode of codec='Bad' raised .*called sys.exit.3",
    "decode raises": "decode of codec='Bad' raised MemoryError",
    "decode writes its input": "decode of codec='Bad' raised ValueError",
    "another dtype": "decode of codec='Bad' returned ndarray of shape .9,. for 9 numbers",
}
ONES = np.ones(17)


def push_bad(trainer: Any, says: str) -> int:
    """Push in words that are bad, then in good ones."""
    given = {"w": ONES.copy()}
    STATE["trainer"] = os.getpid()
    with pytest.raises(daskps.PushRejectedError, match=says):
        trainer.push(given)
    STATE["trainer"] = -1
    assert trainer.clock == 0
    assert (given["w"] == 1).all()
    trainer.push(given)
    clock: int = trainer.clock
    return clock


@mostly_inside(
    "what,sync",
    [(what, sync) for what in AT_TRAINER for sync in ("bsp", "asp")],
    real=[("length grows", "asp"), ("decode exits", "bsp")],
)
def test_what_is_bad_at_the_trainer_changes_nothing(
    way: Any, what: str, sync: str
) -> None:
    """By every way the same is said, before anything has left; then it goes on."""
    with daskps.create({"w": np.zeros(17)}, optimizer=optim.SGD(1.0), shards=2) as s:
        says, codec = AT_TRAINER[what], Bad(what)
        assert daskps.run(s, push_bad, [says], sync=sync, codec=codec) == [1]
        assert s.versions == (1, 1)
        assert s.pull()["w"].tolist() == [-1.0] * 17


def push_to_bad(trainer: Any, pid: int) -> tuple[str, int]:
    with pytest.raises(daskps.PushRejectedError) as caught:
        trainer.push({"w": ONES})
    return str(caught.value), trainer.clock


AT_SHARD = {
    "length exits": "n_words of codec='Bad' raised",
    "length grows": "do not fit",
    "length is huge": "return 66,048 at most",
    "decode exits": "decode of codec='Bad' raised",
    "decode writes its input": "decode of codec='Bad' raised",
    "another dtype": "decode of codec='Bad' returned",
}


@pytest.mark.parametrize("way", ["rpc", "socket"], indirect=True)
@pytest.mark.parametrize("sync", ["bsp", "asp"])
@pytest.mark.parametrize("what", AT_SHARD)
def test_what_is_bad_at_one_shard_is_said_of_that_one(
    way: Any, what: str, sync: str
) -> None:
    """The trainer's worker has one shard, the other worker that can read nothing one."""
    here, there = way.nthreads()
    pid = way.run(os.getpid, workers=[there])[there]
    spec = {"w": np.zeros(17)}
    with daskps.create(spec, optimizer=optim.SGD(1.0), servers=[here, there]) as s:
        how: dict[str, Any] = {"sync": sync, "codec": Bad(what, pid), "workers": [here]}
        [(said, clock)] = daskps.run(s, push_to_bad, [pid], **how)
        assert clock == 0
        assert AT_SHARD[what] in said
        # The end of the run takes back what only one shard has of a round.
        first = 0.0 if sync == "bsp" else -1.0
        assert s.pull()["w"].tolist() == [first] * 9 + [0.0] * 8
        # Both workers live, and so do their sockets.
        assert set(way.nthreads()) == {here, there}
        s.push({"w": ONES})
        assert s.pull()["w"][16] == -1.0
