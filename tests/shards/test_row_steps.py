"""Pushes of rows that a shard takes without a ticket: nothing is to be said against them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps.consistency import ASP, BSP
from daskps.shards.deputy import READING, set_gate
from daskps.shards.memory.format import N_APPLIED, ROWS_SEQUENCE
from daskps.shards.shard import Shard
from daskps.shards.steps import (
    ADD,
    ASK,
    ASSIGN,
    GRADIENT,
    MODEL,
    NOTHING,
    Item,
    Step,
    Ticket,
)
from tests.invariants import validate
from tests.shards.rowing import EMB, KINDS, NUM, W, contents, make, rows, send

RUN = 7


def known() -> Shard:
    """A shard that knows its producer: the first push of one takes a ticket."""
    shard = make()
    send(shard, ADD, rows(shard, NUM, [1], 1))
    return shard


def take(
    shard: Shard, kind: str, *items: Item, check: bool = False, **said: Any
) -> int:
    step = Step(kind, items, producer=1, sequence=10**9, check=check)
    return shard.step(step._replace(**said))


def cases(shard: Shard) -> list[tuple[str, list[Item]]]:
    w = Item(0, 0, np.ones(6, "f4"))
    emb = rows(shard, EMB, [3, 9, 3], [1, 2, 4])
    placed = rows(shard, EMB, [7, 2], [5, 6, 7], [2, 0])
    empty = rows(shard, EMB, [], np.empty((0, 3)))
    num = rows(shard, NUM, [2, 0, 2], [1, 2, 4])
    both = [(kind, [placed]) for kind in KINDS]
    return [
        *both,
        (GRADIENT, [emb]),
        (GRADIENT, [w, emb]),
        (GRADIENT, [empty]),
        (GRADIENT, [w, empty]),
        (ADD, [emb, num]),
        (ASSIGN, [num, emb]),
    ]


@pytest.mark.parametrize("case", range(len(cases(make()))))
@pytest.mark.parametrize("check", [False, True])
def test_a_push_of_rows_does_what_its_ticket_does(case: int, check: bool) -> None:
    taken, asked = known(), known()
    kind, items = cases(taken)[case]
    check = check and all(item.ids is not None for item in items)
    version = take(taken, kind, *items, check=check)
    ticket = Ticket(Step(kind, items, producer=1, sequence=10**9))
    # Two at once take no short way.
    asked.submit([ticket, Ticket(Step())])
    assert version == ticket.version
    assert version > 0
    validate(taken)
    for shard in (taken, asked):
        for table in shard.segment.tables:
            table.buffers.undo[0] = 0
    assert contents(taken) == contents(asked)
    assert taken.segment.header[N_APPLIED] == asked.segment.header[N_APPLIED]


def test_what_there_is_something_to_say_about_is_asked() -> None:
    shard = known()
    fine, before = rows(shard, EMB, [3], 1), contents(shard)
    outside, bad = rows(shard, EMB, [40], 1), rows(shard, EMB, [1] * 20 + [2], 1)
    bad.data[-1] = np.inf
    for items, said in (
        ([outside], {}),
        ([fine._replace(data=np.ones(3))], {}),
        ([fine, fine], {}),
        ([fine._replace(position=9)], {}),
        ([rows(shard, NUM, [1], 1)], {"kind": GRADIENT}),  # no rule
        ([fine], {"kind": MODEL}),
        ([fine], {"kind": NOTHING}),
        ([fine], {"lr": 0.25}),  # its rule raises
        ([bad], {"check": True}),
    ):
        how: dict[str, Any] = {"kind": GRADIENT} | said
        kind, check = how.pop("kind"), how.pop("check", False)
        assert take(shard, kind, *items, check=check, **how) == ASK
        validate(shard)
        assert contents(shard) == before
    assert shard.segment.header[ROWS_SEQUENCE] % 2 == 0
    shard.segment.header[ROWS_SEQUENCE] += 1  # a writer died
    assert take(shard, GRADIENT, fine) == ASK
    shard.segment.header[ROWS_SEQUENCE] -= 1
    set_gate(shard.segment, READING)
    assert take(shard, GRADIENT, fine) == ASK
    shard.set_gate()
    assert take(shard, GRADIENT, fine) > 0
    before = contents(shard)
    assert take(shard, GRADIENT, fine) > 0  # again
    assert contents(shard) == before


def test_rows_after_rows_that_are_not_finite_are_undone() -> None:
    """Those before it had changed; what comes next finds none of that."""
    shard = known()
    data = np.ones((40, 3), "f4")
    data[39, 2] = np.nan
    before = contents(shard)
    bad = rows(shard, EMB, range(40), data)
    assert take(shard, GRADIENT, bad, check=True) == ASK
    assert contents(shard) == before
    ticket = send(shard, GRADIENT, bad, check=True)
    assert "NaN or Inf" in str(ticket.outcome)
    assert contents(shard) == before
    good = rows(shard, EMB, [39], 1)
    assert take(shard, GRADIENT, good, check=True) > 0


def test_in_runs_a_tick_may_bring_rows_where_there_are_no_rounds() -> None:
    for policy in (ASP(), BSP()):
        shard = make()
        shard.begin_run(RUN, policy, 1)
        fine = rows(shard, EMB, [3], 1)
        step = Step(GRADIENT, [fine], RUN, rank=0, tick=True)
        assert shard.step(step) == 1
        assert shard.segment.tables[0].rows[3, 0] == 301
        validate(shard)


def test_large_arrays_are_taken_as_rows_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskps.shards.memory.publication.PAST_NBYTES", 1)
    shard = known()
    assert take(shard, GRADIENT, rows(shard, EMB, [3], 1)) > 0
    w = Item(W, 0, np.ones(6, "f4"))
    assert take(shard, GRADIENT, w, sequence=10**9 + 1) == 3
