"""Gradients that a shard looks at for NaN and infinity, best while it applies them."""

from __future__ import annotations

import functools
from typing import Any

import dask
import numpy as np
import pytest

from daskps import optim
from daskps.consistency import ASP
from daskps.errors import PushRejectedError
from daskps.layout.arrays import Layout
from daskps.shards.memory import publication
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard
from daskps.shards.steps import GRADIENT, READ, Item, Ready, Step
from tests.invariants import validate
from tests.kernels.compiling import kept
from tests.shards.making import RUN, contents, copy_parts, counts, done, send, weights

N, M = 200, 70
LAYOUT = Layout.build({"v": ((N,), "float32"), "w": ((M,), "float32")}, 1)
RULES = {"SGD": optim.SGD(0.1), "Adam": optim.Adam(0.1)}
V, W = 0, 1


@functools.cache
def bound(rule: str) -> Any:
    return optim.bind(RULES[rule], "f4", cache_dir=kept())


def shard(rule: str = "SGD", *, durable: bool = True) -> Shard:
    bindings = dict.fromkeys((V, W), bound(rule))
    slots = {i: (0.0,) * len(RULES[rule].slots) for i in bindings}
    made = Shard(Segment(LAYOUT, 0, slots, durable=durable), bindings)
    made.begin_run(RUN, ASP(), 2)
    return made


def step(sequence: int, bad: int | None = None, **kwargs: Any) -> Step:
    """A trainer's gradient of both parameters, one of them not finite."""
    rng = np.random.default_rng(sequence)
    found = [Item(p, 0, rng.normal(size=n).astype("f4")) for p, n in ((V, N), (W, M))]
    if bad is not None:
        found[bad].data[-1] = np.nan
    options = {"tick": True, "clock": sequence, "sequence": sequence, "rank": 0}
    return Step(GRADIENT, found, run=RUN, check=True, **{**options, **kwargs})


def refused(ticket: Any, name: str) -> bool:
    error = ticket.outcome
    return isinstance(error, PushRejectedError) and repr(name) in str(error)


@pytest.fixture(params=[True, False], ids=["past the caches", "small"])
def past(request, monkeypatch):
    """Whether shards are large enough to write past the caches."""
    monkeypatch.setattr(publication, "PAST_NBYTES", 0 if request.param else 2**40)
    return request.param


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("bad", "name"), [(V, "v"), (W, "w")])
def test_a_bad_gradient_changes_nothing(past, rule, durable, bad, name):
    one, other = shard(rule, durable=durable), shard(rule, durable=durable)
    for made in (one, other):
        send(made, step(0))
    before, counted = contents(one), counts(one)
    reader = done(send(one, Step(run=RUN, rank=1, wait=READ))[0])
    (ticket,) = send(one, step(1, bad))
    assert refused(ticket, name)
    assert not ticket.applied
    assert contents(one) == before
    assert counts(one) == counted
    # Who reads meanwhile, and who read before, has the weights in force.
    out = np.empty(N, "f4")
    parts = [("float32", 0, N, out)]
    assert copy_parts(one.segment, reader, parts) is reader
    assert out.tolist() == weights(one)[V]
    # The same number again, with a gradient that is right.
    for made in (one, other):
        (ticket,) = send(made, step(1))
        assert not done(ticket).duplicate
        send(made, step(2))
    assert contents(one) == contents(other)
    validate(one)


@pytest.mark.parametrize("queued", [[None, V, None], [V, None], [None, W], [V, W]])
def test_of_pushes_in_one_pass_the_bad_ones_alone_are_refused(past, queued):
    one, other = shard("Adam"), shard("Adam")
    tickets = send(one, *(step(i, bad, rank=i % 2) for i, bad in enumerate(queued)))
    for i, bad in enumerate(queued):
        if bad is None:
            assert type(tickets[i].outcome) is Ready
            send(other, step(i, rank=i % 2))
        else:
            assert refused(tickets[i], "vw"[bad])
    assert one.segment.flip == 1 + any(bad is None for bad in queued)
    assert weights(one) == weights(other)
    assert one.segment.current.version == queued.count(None)
    validate(one)


def parts(sequence: int, bad: bool) -> Step:
    """Two parts of one parameter: neither is all of it."""
    good = step(sequence)
    data = good.items[0].data
    if bad:
        data[-1] = np.inf
    halves = [Item(V, at, data[at : at + N // 2]) for at in (0, N // 2)]
    return Step(GRADIENT, halves, run=RUN, rank=0, tick=True, check=True)


@pytest.mark.parametrize(
    "make", [parts, lambda s, b: step(s, 0 if b else None, weight=2.0)]
)
def test_what_cannot_be_looked_at_on_the_way_is_looked_at_before(past, make):
    made = shard("Adam")
    before, flip = contents(made), made.segment.writing
    (ticket,) = send(made, make(0, True))
    assert refused(ticket, "v")
    assert made.segment.writing == flip
    assert contents(made) == before
    assert type(send(made, make(0, False))[0].outcome) is Ready


def test_a_weight_may_make_numbers_infinite_that_were_not(past):
    """Also where the trainer has looked: it has not seen the product."""
    made = shard()
    big = step(0, weight=1e30)
    big.items[0].data[0] = 1e30
    before = contents(made)
    error = send(made, big)[0].outcome
    assert type(error) is PushRejectedError
    assert "the sum of what was pushed for 'v'" in str(error)
    assert contents(made) == before
    with dask.config.set({"daskps.finite": "allow"}):
        assert type(send(made, big)[0].outcome) is Ready
    assert np.isinf(weights(made)[V][0])


def test_large_shards_look_in_the_pass_itself(monkeypatch):
    monkeypatch.setattr(publication, "PAST_NBYTES", 0)
    looked: list[Any] = []

    def look(a: Any) -> bool:
        looked.append(a)
        return True

    monkeypatch.setattr(bound("Adam"), "is_finite", look)
    made = shard("Adam")
    assert refused(send(made, step(0, W))[0], "w")
    assert not looked
    # Its buffers are worthless: both begin where the last publication ended.
    assert made.segment.writing == made.segment.flip + 1
    send(shard("Adam", durable=False), step(0))
    assert len(looked) == 2


def test_the_look_before_is_kept_for_other_processes(tmp_path):
    """Compiled anew it takes a fifth of a second, while the shard is locked."""
    n = 2**15
    layout = Layout.build({"v": ((n,), "float32")}, 1)
    rule = optim.bind(RULES["SGD"], "f4", cache_dir=str(tmp_path))
    made = Shard(Segment(layout, 0, {V: ()}), {V: rule})
    data = np.full(n, np.nan, "f4")
    (ticket,) = send(made, Step(GRADIENT, [Item(V, 0, data)], weight=2.0, check=True))
    assert refused(ticket, "v")
    assert list(tmp_path.glob("daskps_*.py"))
