"""All-reduces at one host: what ranks bring, in any order, and what is kept of it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from daskps import errors
from daskps.cluster.host import reductions
from daskps.cluster.host.collectives import (
    Collective,
    Collectives,
    Offered,
    PartPlace,
    WholeResult,
    check_alike,
)
from daskps.reduction import OPERATIONS, fold

RNG = np.random.default_rng(3)


def brought(op="sum", shape=(5,), dtype="float32", name="a"):
    return Offered(op, ((name, shape, dtype),))


def joined(held, run, number, rank, about, *, size=2, part=(0, 1), room=None):
    place = PartPlace(run, number, *part)
    return held.join(place, rank, about, live=[True] * size, room=room)


def test_who_finishes_while_a_host_looks_is_left_out():
    held = Collectives()
    held.leave_out(7, 1)
    # By what was looked at before rank 1 is still there.
    part = joined(held, 7, 0, 0, brought())
    held.bring(part, 0, [np.ones(5, "f4")])
    assert part.absent == {1}


def gathered(size, arrays, order, op="sum"):
    """Bring arrays by rank in an order; the ranks without one have finished."""
    dtype = next(iter(arrays.values())).dtype.name
    part = Collective(size, brought(op, dtype=dtype), order[0], 0)
    held = 0
    for rank in order:
        if rank in arrays:
            part.bring(rank, [arrays[rank].copy()])
        else:
            part.leave_out(rank)
        held = max(held, len(part.nodes))
    return part.answer.result()[0], held


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("absent", [(), (1,), (0, 3)])
def test_bits_do_not_depend_on_who_comes_first(op, absent):
    size = 5
    arrays = {
        r: RNG.standard_normal(5).astype("f4") * 10.0 ** (3 * r)
        for r in range(size)
        if r not in absent
    }
    nodes = {(r, r + 1): ({0: a.copy()}, {0: 1.0}) for r, a in arrays.items()}
    total = fold(nodes, 0, size, combine=OPERATIONS[op])
    assert total is not None
    expected = total[0][0] / np.float32(len(arrays)) if op == "mean" else total[0][0]
    for order in itertools.permutations(range(size)):
        found, held = gathered(size, arrays, order, op)
        assert found.tobytes() == expected.tobytes()
        assert held <= 3  # ceil(5 / 2)


def test_float16_is_summed_in_float32_and_rounded_once():
    arrays = {r: np.full(5, v, "f2") for r, v in enumerate([2048.0, 1.0, 1.0])}
    found, _ = gathered(3, arrays, (0, 1, 2))
    # In float16 2048 + 1 is 2048.
    assert found.dtype == np.float16
    assert (found == 2050).all()


def test_what_a_rank_brings_again_counts_once():
    part = Collective(2, brought(), 0, 0)
    for value in (1.0, 5.0):
        part.bring(0, [np.full(5, value, "f4")])
    part.bring(1, [np.full(5, 2.0, "f4")])
    part.bring(1, [np.full(5, 9.0, "f4")])
    part.leave_out(1)
    assert (part.answer.result()[0] == 3).all()
    assert part.absent == set()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (brought("max"), "op='max', and not 'sum'"),
        (brought(shape=(4,)), r"'a' of shape \(4,\) and float32, and not 'a' of"),
        (brought(dtype="float64"), "float64, and not"),
        (brought(name="b"), "'b', and not 'a'"),
        (Offered("sum", brought().arrays * 2), "2 arrays, and not 1"),
        (brought()._replace(clock=3), "clock 3, and not -1"),
    ],
)
def test_what_differs_is_told_to_all(other, says):
    held = Collectives()

    def join(rank, about):
        return joined(held, 1, 0, rank, about, size=3)

    part, woken = join(2, brought()), []
    part.answer.add_done_callback(lambda _: woken.append(1))
    with pytest.raises(ValueError, match=f"trainer 1 brings .*{says}.* trainer 2 does"):
        join(1, other)
    assert woken == [1]
    assert isinstance(part.answer.exception(), ValueError)
    # Who brings what the first one has hears of it too.
    assert join(0, brought()).answer.exception() is part.answer.exception()


def test_there_is_room_or_all_hear_that_there_is_none():
    held = Collectives()
    about = brought(shape=(10**12,), dtype="float16")
    for rank in (0, 1):
        part = joined(held, 1, 0, rank, about, size=4, part=(1, 2), room=10**9)
        assert isinstance(part.answer.exception(), errors.LayoutError)
        # Widened, and three of them: half of the elements.
        assert "6,000,000,000,000 bytes" in str(part.answer.exception())
    assert held.nbytes == 0
    small = brought(shape=(10,))
    assert not joined(held, 1, 1, 0, small, size=4, room=120).done
    assert held.nbytes == 120
    assert joined(held, 1, 2, 0, small, size=4, room=239).done


def test_results_stay_until_no_rank_can_ask_again():
    held = Collectives()
    for number in range(3):
        for rank in (0, 1):
            assert held.told(7, rank, 0, (0, 1)) == 0
            part = joined(held, 7, number, rank, brought())
            held.bring(part, rank, [np.ones(5, "f4")])
        held.keep(7, number, WholeResult(brought(), [np.ones(5, "f4")]), 0)
    again = joined(held, 7, 0, 1, brought())
    assert (again.answer.result()[0] == 2).all()
    # Rank 0 has ticked; rank 1 has not, and may be started again.
    assert held.told(7, 0, 2, (0, 1)) == 0
    assert held.find(7, 0) is not None
    assert held.told(7, 1, 2, (0, 1)) == 2
    assert held.find(7, 1) is None
    assert held.find(7, 2) is not None
    # Who has finished asks for nothing.
    assert held.told(7, 1, 3, (1,)) == 3
    assert held.nbytes == 0


def test_the_end_of_a_run_wakes_who_waits_and_keeps_nothing():
    held, error, woken = Collectives(), errors.RunCancelledError("over"), []
    part = joined(held, 7, 0, 0, brought())
    part.answer.add_done_callback(lambda _: woken.append(1))
    held.end(7, error)
    assert woken == [1]
    assert part.answer.exception() is error
    assert held.nbytes == 0
    held.keep(7, 0, WholeResult(brought(), [np.ones(5)]), 0)  # a trainer that was late
    assert held.find(7, 0) is None
    with pytest.raises(errors.RunCancelledError):
        held.told(7, 0, 0, (0, 1))


def test_parts_with_other_ranks_are_no_result():
    check_alike([(1,), (1,)])
    with pytest.raises(errors.ConsistencyError, match=r"trainers \[2\] finished"):
        check_alike([(1,), (1, 2)])


def test_parts_go_to_shards_all_over_the_store():
    assert [reductions.shard_of(p, 4, 10) for p in range(4)] == [0, 2, 5, 7]
    assert [reductions.shard_of(p, 3, 3) for p in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("op", "arrays"),
    [
        ("product", [("a", (1,), "float32")]),
        ("sum", []),
        ("sum", [("a", (-1,), "float32")]),
        ("sum", [("a", (2**50,), "float32")]),
        ("sum", [("a", (1,), "object")]),
        ("mean", [("a", (1,), "int64")]),
    ],
)
def test_what_no_trainer_sends_is_refused(op: str, arrays: Any):
    with pytest.raises(errors.ProtocolError):
        Offered.of(op, arrays, -1)
