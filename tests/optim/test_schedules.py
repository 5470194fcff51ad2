"""The numbers of the schedules."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from daskps import optim
from daskps.errors import PushRejectedError
from daskps.optim import schedules as s

#: For arguments of a wrong type.
untyped: Any = s

NUMBERS = [
    (s.constant(0.3), {0: 0.3, 99: 0.3}),
    (s.step(1.0, 10), {0: 1.0, 9: 1.0, 10: 0.1, 25: 0.01}),
    (s.step(1.0, 2, factor=0.5), {3: 0.5, 4: 0.25}),
    (s.exponential(2.0, 0.5), {0: 2.0, 3: 0.25}),
    (s.polynomial(1.0, 4), {0: 1.0, 1: 0.75, 4: 0.0, 9: 0.0}),
    (s.polynomial(1.1, 4, power=2, final=0.1), {0: 1.1, 2: 0.35, 4: 0.1, 9: 0.1}),
    (s.cosine(1.0, 4), {0: 1.0, 1: 0.8535534, 2: 0.5, 4: 0.0, 9: 0.0}),
    (s.cosine(1.0, 2, final=0.5), {0: 1.0, 1: 0.75, 2: 0.5, 3: 0.5}),
    (s.warmup(1.0, 4), {0: 0.0, 1: 0.25, 3: 0.75, 4: 1.0, 9: 1.0}),
    (s.warmup(s.step(1.0, 2), 2, start=0.5), {0: 0.5, 1: 0.75, 2: 1, 3: 1, 4: 0.1}),
    # exp(-0.5) and exp(-1)
    (s.natural_exp(2.0, 0.5), {0: 2.0, 1: 1.2130613, 2: 0.7357589}),
    (s.natural_exp(1.0, 0.5, every=10), {9: 1.0, 10: 0.6065307, 20: 0.3678794}),
    (s.inverse_time(1.0, 0.5), {0: 1.0, 2: 0.5, 6: 0.25}),
    (s.inverse_time(1.0, 1.0, power=0.5), {0: 1.0, 3: 0.5}),
    (s.piecewise([1, 0.1, 0.01], [10, 20]), {0: 1, 9: 1, 10: 0.1, 19: 0.1, 20: 0.01}),
    (s.piecewise([0.5], []), {0: 0.5, 99: 0.5}),
    (s.piecewise([0.5, s.step(1.0, 2)], [3]), {2: 0.5, 3: 1.0, 4: 1.0, 5: 0.1}),
    (s.warm_restarts(1.0, 4), {0: 1.0, 2: 0.5, 3: 0.1464466, 4: 1.0, 10: 0.5}),
    (s.warm_restarts(1.0, 2, mult=2), {1: 0.5, 2: 1.0, 4: 0.5, 6: 1.0, 10: 0.5}),
    (s.warm_restarts(1.0, 2, final=0.5), {0: 1.0, 1: 0.75, 10**9: 1.0}),
]


@pytest.mark.parametrize(("schedule", "values"), NUMBERS, ids=str)
def test_schedule_gives_its_numbers(schedule, values):
    for updates, lr in values.items():
        assert schedule(updates) == pytest.approx(lr, abs=1e-7)
        assert type(schedule(updates)) is float


@pytest.mark.parametrize("mult", [1, 2, 3])
def test_warm_restarts_equal_torch(mult):
    torch = pytest.importorskip("torch")
    theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        theirs, T_0=5, T_mult=mult, eta_min=0.01
    )
    ours = s.warm_restarts(0.3, 5, mult=mult, final=0.01)
    for updates in range(60):
        assert ours(updates) == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-12)
        theirs.step()
        scheduler.step()


def test_a_schedule_by_epochs_asks_for_the_epoch():
    rule = optim.SGD(s.by_epoch(s.step(1.0, 2)))
    assert rule.rate(99, epoch=1) == 1.0
    assert rule.scalars(100, epoch=2) == (0.1,)
    assert rule.scalars(100, 0.5) == (0.5,)
    assert pickle.loads(pickle.dumps(rule)) == rule
    with pytest.raises(PushRejectedError, match="goes by epochs, which only"):
        rule.rate(99)
    inside = optim.SGD(s.warmup(rule.lr, 2))
    with pytest.raises(TypeError, match="no part of another schedule"):
        inside.rate(5, epoch=1)
    assert optim.bind(rule, "f4").scalars(7, epoch=4) == pytest.approx((0.01,))


@pytest.mark.parametrize("schedule", [case[0] for case in NUMBERS], ids=str)
def test_schedule_is_a_value(schedule):
    copy = pickle.loads(pickle.dumps(schedule))
    assert copy == schedule
    assert hash(copy) == hash(schedule)
    assert optim.SGD(copy) == optim.SGD(schedule)


def test_schedules_differ_by_arguments():
    assert s.cosine(1.0, 4) != s.cosine(1.0, 5)
    assert s.constant(1) == s.constant(1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: s.constant(-1),
        lambda: s.step(1.0, 0),
        lambda: s.step(1.0, 5, factor=0),
        lambda: s.exponential(1.0, 1.5),
        lambda: s.polynomial(1.0, 4, power=0),
        lambda: s.cosine(1.0, 0),
        lambda: s.warmup(1.0, 0),
        lambda: s.warmup(-1.0, 5),
        lambda: s.natural_exp(1.0, -1),
        lambda: s.inverse_time(1.0, 1.0, power=0),
        lambda: s.piecewise([1.0, 2.0], []),
        lambda: s.piecewise([1.0, 2.0, 3.0], [5, 5]),
        lambda: s.piecewise([1.0, -2.0], [5]),
        lambda: s.piecewise([1.0, 2.0], [0]),
        lambda: s.warm_restarts(1.0, 0),
        lambda: s.warm_restarts(1.0, 5, mult=0),
    ],
)
def test_bad_values_are_refused(make):
    with pytest.raises(ValueError, match="must"):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: untyped.step(1.0, 2.5),
        lambda: untyped.cosine("1", 5),
        lambda: untyped.cosine(1.0, True),
        lambda: untyped.warmup("fast", 5),
        lambda: untyped.piecewise(1.0, [5]),
        lambda: untyped.piecewise("12", [5]),
        lambda: untyped.piecewise([1.0, 2.0], [5.5]),
        lambda: untyped.warm_restarts(1.0, 5, mult=1.5),
        lambda: untyped.by_epoch(0.1),
        lambda: s.by_epoch(s.by_epoch(s.constant(1.0))),
        lambda: untyped.by_epoch(s.step),
    ],
)
def test_bad_types_are_refused(make):
    with pytest.raises(TypeError, match=r"must|by_epoch takes a schedule"):
        make()
