"""The count of the fourth way tells calls that should have taken a socket."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.socket_tally import Tally


def of(calls: int, messages: int, **noted: Any) -> dict[str, Any]:
    return {
        "calls": calls,
        "messages": messages,
        "by_contract": Counter(noted.get("by_contract", {})),
        "without": Counter(noted.get("without", {})),
    }


@pytest.mark.parametrize(
    ("found", "missed", "is_enough"),
    [
        ([of(10_000, 0)], 0, True),
        ([of(9_900, 100, without={"none": 100})], 100, True),
        ([of(9_800, 200, without={"OSError": 200})], 200, False),
        ([of(9_800, 200, by_contract={"on an event loop": 200})], 0, True),
        ([of(10_000, 200, without={"it has to be waited for": 150})], 50, True),
        ([of(5_000, 60), of(4_900, 60, without={"none": 120})], 120, False),
        ([of(0, 20)], 20, True),
        ([of(0, 21)], 21, False),
    ],
)
def test_a_call_that_could_have_taken_a_socket_is_missed(found, missed, is_enough):
    tally = Tally(found)
    assert tally.missed == missed
    assert tally.is_enough is is_enough


def test_it_says_why_calls_took_none():
    tally = Tally([of(1_000, 50, without={"none": 40, "OSError": 10})])
    assert "1,000 calls by socket, 50 without" in str(tally)
    assert "40 'none', 10 'OSError'" in str(tally)
