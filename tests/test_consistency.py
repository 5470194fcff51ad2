from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.consistency import ASP, BSP, SSP, may_pull, policy

clocks = st.integers(0, 50)


@given(clocks, clocks, clocks)
def test_bsp_reads_once_the_round_is_complete(clock, slowest, rounds):
    assert may_pull(BSP(), clock, slowest, rounds) == (rounds >= clock)


@given(clocks, clocks, clocks, st.integers(0, 10))
def test_ssp_never_reads_more_than_s_clocks_ahead(clock, slowest, rounds, staleness):
    # By chance alone few are at the border.
    for at in (clock, slowest + staleness, slowest + staleness + 1):
        allowed = may_pull(SSP(staleness), at, slowest, rounds)
        assert allowed == (at - slowest <= staleness)


@given(clocks, clocks, clocks)
def test_asp_never_waits(clock, slowest, rounds):
    assert may_pull(ASP(), clock, slowest, rounds)


@pytest.mark.parametrize(
    ("given", "found"),
    [("bsp", BSP()), ("ssp", SSP(3)), ("asp", ASP()), (SSP(7), SSP(7))],
)
def test_a_policy_has_a_name_or_is_itself(given, found):
    assert policy(given) == found
    assert pickle.loads(pickle.dumps(found)) == found


def test_what_is_no_policy_is_refused():
    with pytest.raises(ValueError, match=r"sync='sync' is not known.*'bsp', 'ssp'"):
        policy("sync")
    with pytest.raises(TypeError, match="or a policy such as SSP"):
        policy(BSP)  # type: ignore[arg-type]


@pytest.mark.parametrize("staleness", [-1, -100])
def test_negative_staleness_is_refused(staleness):
    with pytest.raises(ValueError, match=r"0 or more clocks.*sync=\"asp\""):
        SSP(staleness)


@pytest.mark.parametrize("staleness", [1.0, "3", True, None])
def test_staleness_is_a_whole_number(staleness):
    with pytest.raises(TypeError, match="number of clocks"):
        SSP(staleness)
