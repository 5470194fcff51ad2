"""A process is killed in an update: the shard is whole, and others go on with it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daskps.consistency import ASP, BSP
from daskps.shards.memory.format import N_PRODUCERS, RUN, VERSION
from daskps.shards.memory.segment import Segment
from daskps.shards.rounds import words
from daskps.shards.run_record import epochs_of
from daskps.shards.shard import Shard
from tests.invariants import validate
from tests.kernels.compiling import kept
from tests.shards import crashing
from tests.shards.crashing import (
    ACKNOWLEDGED,
    LABELS,
    LAYOUT,
    RESET_LABELS,
    SLOTS,
    WITHDRAW_LABELS,
)
from tests.shards.making import held, slots_of

#: Pushes a child is killed among; a push takes 0.1 ms or so.
MANY, SECONDS = 400, 0.05


def state(shard: Shard) -> str:
    """A hash of weights, slots, counts and what the shard knows of its producers."""
    segment, record = shard.segment, shard.segment.current
    found = held(segment)
    found += [s for of in slots_of(segment) for s in of]
    found += [record.steps, record.producers[: record.fixed[N_PRODUCERS]]]
    found += [record.fixed[[VERSION, RUN]]]
    return hashlib.sha256(b"".join(a.tobytes() for a in found)).hexdigest()


class Reference:
    """States after so many pushes, one by one in private memory, without a crash."""

    def __init__(self, cache: str) -> None:
        self.cache, self.bindings = cache, crashing.bindings(cache)
        self._shard = self.new()
        self._states = [state(self._shard)]

    def new(self) -> Shard:
        segment = Segment(LAYOUT, 0, SLOTS)
        return Shard(segment, self.bindings, cache_dir=self.cache)

    def after(self, n: int) -> str:
        while len(self._states) <= n:
            crashing.push(self._shard, len(self._states) - 1)
            self._states.append(state(self._shard))
        return self._states[n]


class Successor(Shard):
    """Who goes on with the shard in a file."""

    def __init__(self, path: str, reference: Reference) -> None:
        segment, bound = crashing.at(path), reference.bindings
        super().__init__(segment, bound, cache_dir=reference.cache)
        self.path = path


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(kept())


@pytest.fixture(scope="module")
def kill(
    reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """Run a case in a child that is killed, and return the shard it leaves."""
    # Compiled here, loaded there.
    reference.after(1)
    words.compiled(reference.cache)
    for binding in reference.bindings.values():
        binding.kernel.warm(durable=True, past=True)
    command = [sys.executable, "-m", "tests.shards.crashing", reference.cache]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    helper = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env=environment,
    )
    assert helper.stdin is not None
    assert helper.stdout is not None
    answers = helper.stdout
    folder = tmp_path_factory.mktemp("segments")

    def run(**case: Any) -> tuple[Successor, int]:
        path = crashing.new_file(folder / "segment")
        print(json.dumps({"path": path, **case}), file=helper.stdin, flush=True)
        assert int(answers.readline()) == -signal.SIGKILL
        acknowledged = int(np.fromfile(path + ".ack", np.int64)[0])
        return Successor(path, reference), acknowledged

    yield run
    helper.stdin.close()
    assert helper.wait(60) == 0
    answers.close()


def goes_on(shard: Shard, reference: Reference, first: int, batch: list[int]) -> int:
    """Retry the pushes of a batch, push on; return how many were applied before."""
    validate(shard)
    before = shard.segment.current.version
    assert before in (first, first + len(batch))
    assert state(shard) == reference.after(before)
    tickets = crashing.push(shard, *batch)
    assert [t.duplicate for t in tickets] == [before > first] * len(batch)
    last = first + len(batch)
    assert state(shard) == reference.after(last)
    for sequence in range(last, last + 3):
        crashing.push(shard, sequence)
        validate(shard)
        assert state(shard) == reference.after(sequence + 1)
    return before - first


@pytest.mark.parametrize(
    ("batch", "how"),
    [([4], None), ([4], "past"), ([4], "together"), ([4, 5, 6, 7], None)],
    ids=["one", "one past the caches", "one that takes others along", "several"],
)
@pytest.mark.parametrize("label", LABELS)
def test_killed_after_a_store(kill, reference, label, batch, how):
    given = {} if how is None else {how: True}
    shard, _ = kill(label=label, batch=batch, reset=False, **given)
    flipped = label in ("flip", "applied")
    assert shard.segment.writing == ACKNOWLEDGED + 1
    assert shard.segment.flip == ACKNOWLEDGED + flipped
    applied = goes_on(shard, reference, ACKNOWLEDGED, batch)
    assert applied == flipped * len(batch)


@pytest.mark.parametrize("label", RESET_LABELS)
def test_killed_while_a_run_begins_with_fresh_slots(kill, reference, label):
    shard, _ = kill(label=label, reset=True)
    expected = reference.new()
    crashing.push(expected, *range(ACKNOWLEDGED))
    if label == "flip":
        assert shard.segment.current.fixed[RUN] == crashing.RUN
    else:
        assert state(shard) == reference.after(ACKNOWLEDGED) == state(expected)
    for one in (shard, expected):
        one.begin_run(crashing.RUN, ASP(), 1, reset=True)
        validate(one)
    assert state(shard) == state(expected)
    for one in (shard, expected):
        one.end_run(crashing.RUN, "over")
        crashing.push(one, 4, 5)
    assert state(shard) == state(expected)


@pytest.mark.parametrize("label", WITHDRAW_LABELS)
def test_killed_while_a_round_is_withdrawn(kill, reference, label):
    """Who goes on still has the round, and withdraws it; or the run is over."""
    shard, _ = kill(label=label, withdraw=True)
    expected = reference.new()
    crashing.push(expected, *range(ACKNOWLEDGED))
    expected.begin_run(crashing.RUN, BSP(), 2, "mean", epochs=crashing.EPOCHS)
    for number in range(2 * (crashing.ROUNDS - 1)):
        crashing.deliver(expected, number)
    expected.end_run(crashing.RUN, "over", version=crashing.VERSION)
    assert shard.run_state.is_bsp == (label != "flip")
    if shard.run_state.is_bsp:
        box = crashing.mailboxes(shard.path)
        shard.run_state.attach_rounds(crashing.RUN, 2, "mean", box)
        shard.take_over()
        validate(shard)
        assert shard.rounds_of(crashing.RUN) == crashing.ROUNDS
        told = {"rounds": crashing.ROUNDS - 1, "version": crashing.VERSION}
        shard.end_run(crashing.RUN, "over", **told)
    assert state(shard) == state(expected)
    for one in (shard, expected):
        found = crashing.EPOCHS._replace(clock=crashing.ROUNDS - 1)
        assert epochs_of(one.segment.current) == found
    for one in (shard, expected):
        crashing.push(one, 4, 5)
        validate(one)
    assert state(shard) == state(expected)


def random_moments(kill, reference, rng, n):
    for i in range(n):
        delay, past = rng.uniform(0, SECONDS), i % 2 == 1
        shard, acknowledged = kill(pushes=MANY, delay=delay, past=past)
        goes_on(shard, reference, acknowledged, [acknowledged])


def test_killed_at_random_moments(kill, reference, rng):
    random_moments(kill, reference, rng, 10)


def random_rounds(kill, reference, rng, n):
    """Kill who delivers for two trainers; a successor ends the round that was open."""
    alone = reference.new()
    alone.begin_run(crashing.RUN, BSP(), 2, "mean")
    states = [state(alone)]
    for i in range(n):
        delay, past = rng.uniform(0, SECONDS), i % 2 == 1
        shard, done = kill(pushes=MANY, delay=delay, rounds=True, past=past)
        last = done + 5
        while len(states) <= last:
            crashing.deliver(alone, len(states) - 1)
            states.append(state(alone))
        # Killed after its store and before the acknowledgement it is a step further.
        assert state(shard) in (states[done], states[done + 1])
        box = crashing.mailboxes(shard.path)
        shard.run_state.attach_rounds(crashing.RUN, 2, "mean", box)
        shard.take_over()
        validate(shard)
        for number in range(done, last):
            ticket = crashing.deliver(shard, number)
            assert number == done or not ticket.duplicate
            validate(shard)
            assert state(shard) == states[number + 1]


def test_rounds_killed_at_random_moments(kill, reference, rng):
    random_rounds(kill, reference, rng, 10)


@pytest.mark.slow
def test_rounds_killed_at_more_random_moments(kill, reference, rng):
    random_rounds(kill, reference, rng, 50)


@pytest.mark.slow
def test_killed_at_more_random_moments(kill, reference, rng):
    random_moments(kill, reference, rng, 50)
