from __future__ import annotations

import pickle

import pytest

from daskps.consistency import ASP, BSP, SSP, policy


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
        policy(BSP)  # type: ignore[arg-type]  # refused


@pytest.mark.parametrize("staleness", [-1, -100, 2**63])
def test_staleness_that_no_word_holds_is_refused(staleness):
    with pytest.raises(ValueError, match=r"from 0 to 9.* clocks.*sync=\"asp\""):
        SSP(staleness)


@pytest.mark.parametrize("staleness", [1.0, "3", True, None])
def test_staleness_is_a_whole_number(staleness):
    with pytest.raises(TypeError, match="number of clocks"):
        SSP(staleness)
