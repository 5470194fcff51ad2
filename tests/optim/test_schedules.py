"""The numbers of the schedules."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from daskps import optim
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
]


@pytest.mark.parametrize(("schedule", "values"), NUMBERS, ids=str)
def test_schedule_gives_its_numbers(schedule, values):
    for updates, lr in values.items():
        assert schedule(updates) == pytest.approx(lr, abs=1e-7)
        assert type(schedule(updates)) is float


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
    ],
)
def test_bad_types_are_refused(make):
    with pytest.raises(TypeError, match="must"):
        make()
