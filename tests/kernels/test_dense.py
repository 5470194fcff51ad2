"""The compiled loops: bits, memory and refusals."""

from __future__ import annotations

import re
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps import kernels, optim
from tests.kernels.compiling import hits, kept, llvm, misses

#: Every update function of the built-in rules.
RULES = [
    optim.SGD(0.1),
    optim.SGD(0.1, weight_decay=0.1),
    optim.SGD(0.1, momentum=0.9),
    optim.SGD(0.1, momentum=0.9, nesterov=True),
    optim.Adagrad(0.1),
    optim.RMSprop(0.1),
    optim.RMSprop(0.1, momentum=0.9),
    optim.RMSprop(0.1, centered=True),
    optim.RMSprop(0.1, centered=True, momentum=0.9),
    optim.Adam(0.1, weight_decay=0.1),
    optim.Adam(0.1, eps_root=0.1),
    optim.Adadelta(),
    optim.Adamax(0.1),
    optim.Ftrl(0.1, l1=1.0),
    optim.AdamW(0.1),
]


def state(rule, dtype, n, seed=0):
    """Return a bound rule, weights, gradient, slots and scalars."""
    rng = np.random.default_rng(seed)
    bound = optim.bind(rule, dtype, cache_dir=kept())
    w, g = (rng.standard_normal(n).astype(dtype) for _ in range(2))
    compute = bound.kernel.compute_dtype
    slots = tuple(1 + rng.random(n).astype(compute) for _ in rule.slots)
    return bound, w, g, slots, bound.scalars(3)


def same_bits(a, b):
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_publish_has_the_bits_of_inplace_and_leaves_its_input(rule, dtype):
    bound, w, g, slots, scalars = state(rule, dtype, 1027)
    before, out = w.copy(), np.empty_like(w)
    published = tuple(slot.copy() for slot in slots)
    bound.publish(w, out, g, published, scalars)
    assert same_bits(w, before)
    bound.inplace(w, g, slots, scalars)
    assert not same_bits(w, before)
    for a, b in zip((w, *slots), (out, *published), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("shift", [0, 1], ids=["lines", "anywhere"])
@pytest.mark.parametrize("dtype", ["f2", "f4"])
@pytest.mark.parametrize("rule", [RULES[0], RULES[-1]], ids=repr)
def test_fixed_update_has_the_bits_of_publish(rule, dtype, shift, moves):
    bound, w, g, slots, scalars = state(rule, dtype, 1027)

    def room(like):
        return np.zeros(len(like) + shift, like.dtype)[shift:]

    out, again = room(w), room(w)
    outs, others = (tuple(map(room, slots)) for _ in range(2))
    if moves:
        bound.publish(w, out, g, slots, scalars, outs)
        fixed = bound.fixed(w, again, slots, others)
    else:
        for one, slot, other in zip(outs, slots, others, strict=True):
            one[:] = other[:] = slot
        bound.publish(w, out, g, outs, scalars)
        fixed = bound.fixed(w, again, others)
    fixed(g, scalars)
    for a, b in zip((out, *outs), (again, *others), strict=True):
        assert same_bits(a, b)
    for wrong in (g[:-1], g.astype("f8"), np.repeat(g, 2)[::2]):
        with pytest.raises(ValueError, match="expected a contiguous"):
            fixed(wrong, scalars)
    with pytest.raises(ValueError, match="scalars"):
        fixed(g, (*scalars, 1.0))
    assert same_bits(again, out)


def test_fixed_update_takes_the_scalars_of_each_call():
    w, out, g = np.zeros(3, "f4"), np.empty(3, "f4"), np.ones(3, "f4")
    fixed, kept = optim.bind(optim.SGD(0.1), "f4").fixed(w, out, ()), (0.5,)
    for scalars in (kept, kept, (0.25,), kept, (0.5,)):
        fixed(g, scalars)
        assert out.tolist() == [-scalars[0]] * 3


def test_fixed_update_needs_no_scalars():
    kernel = kernels.build(lambda w, g: w - g, 0, 0, "f4")
    out = np.zeros(3, "f4")
    kernel.fixed(np.ones(3, "f4"), out, ())(np.full(3, 0.25, "f4"), ())
    assert out.tolist() == [0.75] * 3


def test_fixed_update_checks_its_arrays_before_the_first_one():
    bound, w, _, slots, _ = state(optim.Adam(0.1), "f4", 9)
    for arrays in ((w, w[:-1], slots), (w, w, slots[:1]), (w, w, slots, slots[:1])):
        with pytest.raises(ValueError, match=r"shape|slots"):
            bound.fixed(*arrays)


@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_fixed_updates_that_are_not_fast_refuse_arrays_too(dtype):
    """At the latest in their first call: slots here begin no cache line together."""
    bound, w, g, slots, scalars = state(optim.Adam(0.1), dtype, 9)
    outs = (*lines(slots[:1]), *lines(slots[1:], 1))
    before = w.copy()
    with pytest.raises(ValueError, match="shape"):
        bound.fixed(w, w[:-1], slots, outs)(g, scalars)
    assert same_bits(w, before)


def lines(slots, shift=0):
    """Copies of slots that start at a cache line, or `shift` elements after one."""
    found = []
    for slot in slots:
        raw = np.zeros(slot.nbytes + 192, np.uint8)
        at = -raw.ctypes.data % 64 + shift * slot.itemsize
        found.append(raw[at : at + slot.nbytes].view(slot.dtype))
    return tuple(found)


@pytest.mark.parametrize("n", [0, 1, 15, 63, 64, 65, 1027, 20_000])
@pytest.mark.parametrize(
    ("rule", "dtype"),
    [*((rule, "f4") for rule in RULES), (RULES[-1], "f2"), (RULES[-1], "f8")],
    ids=repr,
)
def test_slots_to_another_buffer_have_the_bits_of_inplace(rule, dtype, n):
    bound, w, g, slots, scalars = state(rule, dtype, n)
    w_before, before = w.copy(), [slot.copy() for slot in slots]
    for shift in (0, 1):  # at a cache line, and not
        out, slots_out = np.empty_like(w), lines(slots, shift)
        bound.publish(w, out, g, slots, scalars, slots_out)
        assert same_bits(w, w_before)
        assert all(map(same_bits, slots, before))
        expected, state_ = w.copy(), tuple(slot.copy() for slot in slots)
        bound.inplace(expected, g, state_, scalars)
        for a, b in zip((expected, *state_), (out, *slots_out), strict=True):
            assert same_bits(a, b)


def starts(n, dtype, *shifts):
    """Arrays of sevens that start so many elements after a line, and all their memory."""
    size = np.dtype(dtype).itemsize
    raw = np.full((len(shifts), size * n + 320), 7, np.uint8)
    found = []
    for row, shift in zip(raw, shifts, strict=True):
        at = -row.ctypes.data % 64 + shift * size
        found.append(row[at : at + size * n].view(dtype))
    return found, raw


@pytest.mark.parametrize("n", [0, 3, 64, 100, 1027])
@pytest.mark.parametrize("shifts", [(0, 0, 0), (3, 3, 3), (5, 0, 0), (0, 1, 2)])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("rule", [optim.SGD(0.1), optim.Adam(0.1)], ids=repr)
def test_past_the_caches_means_the_same_bits_in_the_same_places(rule, dtype, shifts, n):
    bound, w, g, slots, scalars = state(rule, dtype, n)
    (out, *_), raw = starts(n, dtype, *shifts)
    slots_out, raw_slots = starts(n, bound.kernel.compute_dtype, *shifts[1:])
    moved = tuple(slots_out) if slots else None
    before = [a.copy() for a in (w, g, *slots)]
    assert bound.publish(w, out, g, slots, scalars, moved, check=True, past=True)
    assert all(map(same_bits, (w, g, *slots), before))
    bound.inplace(w, g, slots, scalars)
    for a, b in zip((w, *slots), (out, *(moved or ())), strict=True):
        assert same_bits(a, b)
    for a in (out, *slots_out):
        a.view(np.uint8)[:] = 7
    assert (raw == 7).all()
    assert (raw_slots == 7).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 1, 2, 3, 66, 67, 130, 131])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_the_check_finds_what_is_not_finite_wherever_it_is(dtype, position, bad):
    """Before the first full line, in the lines, and behind the last one."""
    bound, w, g, slots, scalars = state(optim.Adam(0.1), dtype, 132)
    g[0] = np.finfo(dtype).max
    (out, *_), _ = starts(132, dtype, 3)
    slots_out, _ = starts(132, bound.kernel.compute_dtype, 3, 3)
    for moved in (None, tuple(slots_out)):
        kept = tuple(slot.copy() for slot in slots)
        assert bound.publish(w, out, g, kept, scalars, moved, check=True, past=True)
    g[position] = bad
    before = [a.copy() for a in (w, g, *slots)]
    for moved in (None, tuple(slots_out)):
        assert not bound.publish(
            w, out, g, slots, scalars, moved, check=True, past=True
        )
        assert all(map(same_bits, (w, g, *slots), before))
    for moved in (None, tuple(slots_out)):
        kept = tuple(slot.copy() for slot in slots)
        assert bound.publish(w, out, g, kept, scalars, moved, past=True)
        assert not np.isfinite(out[position])


@settings(deadline=None, max_examples=20)
@given(cuts=st.lists(st.integers(0, 203), max_size=6), seed=st.integers(0, 99))
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_any_split_has_the_bits_of_the_whole(rule, dtype, cuts, seed):
    """The vector body and the scalar tail of a loop must agree."""
    bound, w, g, slots, scalars = state(rule, dtype, 203, seed)
    parts, pieces = w.copy(), tuple(slot.copy() for slot in slots)
    bound.inplace(w, g, slots, scalars)
    edges = [0, *sorted(cuts), 203]
    for lo, hi in pairwise(edges):
        part = tuple(piece[lo:hi] for piece in pieces)
        bound.inplace(parts[lo:hi], g[lo:hi], part, scalars)
    for a, b in zip((w, *slots), (parts, *pieces), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("name", ["inplace", "publish", "move", "past"])
def test_float32_loop_is_vectorised_and_free_of_float64(rule, name):
    if name == "move" and not rule.slots:
        return
    code = llvm(optim.bind(rule, "f4", cache_dir=kept()).kernel.module, name)
    assert "double" not in code
    assert re.search(r"f(add|sub|mul)[a-z ]* <\d+ x float>", code)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_gradient_may_be_read_only_and_at_any_address(dtype):
    """Arrays from the network are read-only or start at odd addresses."""
    _, w, g, slots, scalars = state(optim.Adam(0.1), dtype, 301)
    bound = optim.bind(optim.Adam(0.1), dtype)
    expected, state_ = w.copy(), tuple(slot.copy() for slot in slots)
    bound.inplace(expected, g, state_, scalars)
    frozen = g.copy()
    frozen.flags.writeable = False
    shifted = np.frombuffer(bytes(1) + g.tobytes(), np.uint8)[1:].view(dtype)
    assert not shifted.flags.aligned
    assert not shifted.flags.writeable
    made: Any = bound.kernel.module.functions
    before = set(made)
    for gradient in (frozen, shifted):
        copy = w.copy()
        bound.inplace(copy, gradient, tuple(s.copy() for s in slots), scalars)
        assert same_bits(copy, expected)
        out = np.empty_like(w)
        bound.publish(w, out, gradient, tuple(s.copy() for s in slots), scalars)
        assert same_bits(out, expected)
    # f2 is updated in place as f4, and published so.
    assert set(made) - before <= (set() if dtype == "f2" else {"publish"})
    assert {len(function.overloads) for function in made.values()} == {1}


def test_publish_reads_weights_that_are_read_only_and_unaligned():
    bound, w, g, _, scalars = state(optim.SGD(0.1), "f4", 50)
    shifted = np.frombuffer(bytes(1) + w.tobytes(), np.uint8)[1:].view("f4")
    out = np.empty_like(w)
    bound.publish(shifted, out, g, (), scalars)
    bound.inplace(w, g, (), scalars)
    assert same_bits(out, w)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_empty_arrays_are_legal(dtype):
    bound, w, g, slots, scalars = state(optim.Adam(), dtype, 0)
    bound.inplace(w, g, slots, scalars)
    bound.publish(w, w.copy(), g, slots, scalars)


def test_publish_onto_itself_is_inplace():
    bound, w, g, slots, scalars = state(optim.Adam(0.1), "f4", 100)
    other = w.copy()
    bound.publish(w, w, g, tuple(s.copy() for s in slots), scalars)
    bound.inplace(other, g, slots, scalars)
    assert same_bits(w, other)


def refusals():
    n = 8
    odd = np.frombuffer(bytearray(4 * n + 1), np.uint8)[1:].view("f4")
    frozen = np.ones(n, "f4")
    frozen.flags.writeable = False
    yield "gradient too short", {"g": np.ones(n - 1, "f4")}
    yield "gradient too long", {"g": np.ones(n + 1, "f4")}
    yield "gradient float64", {"g": np.ones(n)}
    yield "gradient float16", {"g": np.ones(n, "f2")}
    yield "gradient swapped bytes", {"g": np.ones(n, ">f4")}
    yield "gradient strided", {"g": np.ones(2 * n, "f4")[::2]}
    yield "gradient 2-d", {"g": np.ones((n, 1), "f4")}
    yield "weights float64", {"w": np.ones(n)}
    yield "weights read-only", {"w": frozen}
    yield "weights unaligned", {"w": odd}
    yield "slot too short", {"slots": (np.ones(n - 1, "f4"),)}
    yield "slot float64", {"slots": (np.ones(n),)}
    yield "slot read-only", {"slots": (frozen,)}
    yield "slot missing", {"slots": ()}
    yield "slot too many", {"slots": (np.ones(n, "f4"), np.ones(n, "f4"))}
    yield "scalar missing", {"scalars": (0.1,)}
    yield "scalar too many", {"scalars": (0.1, 0.9, 0.0, 1.0)}


@pytest.mark.parametrize(
    "change", [case[1] for case in refusals()], ids=[case[0] for case in refusals()]
)
def test_arrays_that_do_not_fit_are_refused_and_nothing_changes(change):
    bound = optim.bind(optim.SGD(0.1, momentum=0.9), "f4")
    given_: dict[str, Any] = {
        "w": np.ones(8, "f4"),
        "g": np.ones(8, "f4"),
        "scalars": (0.1, 0.9, 0.0),
    }
    given_["slots"] = (np.ones(8, "f4"),)
    given_.update(change)
    w, g, slots, scalars = (given_[k] for k in ("w", "g", "slots", "scalars"))
    before = w.copy()
    with pytest.raises(ValueError, match=r"expected|must be|the rule has"):
        bound.inplace(w, g, slots, scalars)
    with pytest.raises(ValueError, match=r"expected|must be|the rule has"):
        bound.publish(w.copy(), w, g, slots, scalars)
    with pytest.raises(ValueError, match=r"expected|must be|the rule has"):
        bound.publish(w.copy(), w, g, (np.ones(8, "f4"),), scalars, slots)
    np.testing.assert_array_equal(w, before)


@pytest.mark.parametrize("dtype", ["f2", "f4"])
@pytest.mark.parametrize("bad", [(), (np.ones(7, "f4"),), (np.ones(8),)])
def test_publish_refuses_slots_to_read_that_do_not_fit(dtype, bad):
    bound, w, g, slots, scalars = state(optim.SGD(0.1, momentum=0.9), dtype, 8)
    before = slots[0].copy()
    with pytest.raises(ValueError, match=r"expected|the rule has"):
        bound.publish(w.copy(), w, g, bad, scalars, slots)
    np.testing.assert_array_equal(slots[0], before)


def test_publish_refuses_an_input_that_does_not_fit():
    bound, w, g, slots, scalars = state(optim.SGD(0.1), "f4", 8)
    with pytest.raises(ValueError, match="expected"):
        bound.publish(w.astype("f8"), w, g, slots, scalars)
    with pytest.raises(ValueError, match="expected"):
        bound.publish(w[:4], w, g, slots, scalars)


@pytest.mark.parametrize("dtype", ["i4", "c8", ">f4", "O", "U1"])
def test_other_dtypes_have_no_kernel(dtype):
    with pytest.raises(ValueError, match="no kernel for"):
        kernels.build(lambda w, g: w - g, 0, 0, dtype)


def test_threads_share_one_compilation():
    kernel = kernels.build(lambda w, g: w - 0.0625 * g, 0, 0, "f4")
    start = threading.Barrier(4)
    arrays = [np.ones(100, "f4") for _ in range(4)]

    def work(w):
        start.wait(60)
        kernel.inplace(w, np.ones(100, "f4"), (), ())

    threads = [threading.Thread(target=work, args=(w,)) for w in arrays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert misses(kernel.module) == 1
    assert all((w == 0.9375).all() for w in arrays)


@pytest.mark.parametrize("durable", [False, True])
def test_warm_compiles_the_loops_of_the_memory_in_use(durable):
    by = 0.375 if durable else 0.4375  # equal functions share a kernel
    kernel = kernels.build(lambda w, g, m: (w - by * g, m), 1, 0, "f4")
    kernel.warm(durable=durable)
    assert misses(kernel.module) == 2
    w, slots = np.ones(64, "f4"), lines([np.ones(64, "f4")])
    moved = lines(slots) if durable else None
    kernel.publish(w, w.copy(), w, slots, (), moved)
    assert misses(kernel.module) == 2


@pytest.mark.parametrize(
    ("durable", "slots", "loops"), [(True, 1, 3), (False, 1, 2), (True, 0, 3)]
)
def test_warm_compiles_what_writes_past_the_caches_where_it_can(durable, slots, loops):
    by = 0.15625 if durable else 0.1875

    def two(w, g, m):
        return w - by * g, m

    update = two if slots else lambda w, g: w - by * g
    kernel = kernels.build(update, slots, 0, "f4")
    kernel.warm(durable=durable, past=True)
    assert misses(kernel.module) == loops
    w, out = lines([np.ones(64, "f4")] * 2)
    state_ = lines([np.ones(64, "f4")] * slots)
    kernel.publish(
        w, out, w, state_, (), lines(state_) if durable and slots else None, past=True
    )
    assert misses(kernel.module) == loops


def test_nothing_is_compiled_before_the_first_call():
    kernel = kernels.build(lambda w, g: w - 0.03125 * g, 0, 0, "f8")
    assert (hits(kernel.module), misses(kernel.module)) == (0, 0)
    kernel.warm()
    assert (hits(kernel.module), misses(kernel.module)) == (0, 2)
    kernel.warm()
    assert (hits(kernel.module), misses(kernel.module)) == (0, 2)
