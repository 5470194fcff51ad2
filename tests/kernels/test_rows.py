"""The loop over rows of a table: their bits, their neighbours, and refusals."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from daskps import kernels, optim
from daskps.kernels.row_log import TableRows, UndoLog
from tests.kernels.compiling import hits, kept, llvm, misses

#: Rules without slots, with one, two and three.
RULES = [
    optim.SGD(0.1, weight_decay=0.1),
    optim.SGD(0.1, momentum=0.9, nesterov=True),
    optim.Adagrad(0.1),
    optim.Adam(0.1, weight_decay=0.1),
    optim.RMSprop(0.1, centered=True, momentum=0.9),
]


class Mine(optim.Rule):
    slots = ("m",)

    def prepare(self, step, lr):
        return (lr,)

    @staticmethod
    def update(w, g, m, lr):
        m = 0.25 * m + abs(g)
        return w - lr * np.sign(g) * m, m


def log_of(w, slots, entries):
    """Return an undo log of a table, all of it random."""
    rng = np.random.default_rng(entries)
    copies = [
        rng.standard_normal((entries, a.shape[1])).astype(a.dtype) for a in (w, *slots)
    ]
    rows = rng.integers(-(2**62), 2**62, entries)
    return UndoLog(rows, copies[0], tuple(copies[1:]), np.zeros(1, np.int64), 7 << 24)


def update(bound, w, ids, g, slots, scalars, at=None, **more):
    """Update rows as a shard does; return the log."""
    log = log_of(w, slots, len(ids) + 3)._replace(begin=2)
    assert bound.rows(TableRows(w, slots), ids, at, g, scalars, log, **more)
    assert log.word[0] == ((7 << 24) + 2 + len(ids) if len(ids) else 0)
    return log


def table(rule, dtype, n, dim, k):
    """Return a bound rule, weights, ids, their gradients, slots and scalars."""
    rng = np.random.default_rng(n + dim + k)
    bound = optim.bind(rule, dtype, cache_dir=kept())
    compute = bound.kernel.compute_dtype
    w = rng.standard_normal((n, dim)).astype(dtype)
    g = rng.standard_normal((k, dim)).astype(compute)
    slots = tuple(1 + rng.random((n, dim)).astype(compute) for _ in rule.slots)
    ids = rng.choice(n, k, replace=False)
    return bound, w, ids, g, slots, bound.scalars(3)


def dense(bound, w, ids, g, slots, scalars):
    """Return what the dense loop makes of the gathered rows, put where they were."""
    w, *slots = (a.copy() for a in (w, *slots))
    gathered = [a[ids].reshape(-1) for a in (w, *slots)]
    bound.inplace(gathered[0], g.reshape(-1), tuple(gathered[1:]), scalars)
    for a, rows in zip((w, *slots), gathered, strict=True):
        a[ids] = rows.reshape(len(ids), a.shape[1])
    return w, *slots


def same_bits(some, others):
    return all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in zip(some, others, strict=True)
    )


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        *((rule, dtype) for rule in [*RULES, Mine(0.1)] for dtype in ("f2", "f4")),
        (RULES[0], "f8"),
        (Mine(0.1), "f8"),
    ],
    ids=repr,
)
def test_named_rows_have_the_bits_of_the_dense_loop_and_others_stay(rule, dtype):
    # Vectors with a rest and without; float16 takes blocks of 1 and of several rows.
    for n, dim, k in [(50, 64, 20), (90, 1, 90), (30, 1027, 20), (4, 20_000, 2)]:
        bound, w, ids, g, slots, scalars = table(rule, dtype, n, dim, k)
        expected = dense(bound, w, ids, g, slots, scalars)
        assert not same_bits(expected, (w, *slots))
        update(bound, w, ids, g, slots, scalars)
        assert same_bits((w, *slots), expected)


@pytest.mark.parametrize("shape", [(5, 0, 3), (5, 4, 0), (0, 4, 0), (0, 0, 0)])
@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_no_rows_and_rows_of_nothing_are_legal(dtype, shape):
    bound, w, ids, g, slots, scalars = table(optim.Adam(), dtype, *shape)
    before = [a.copy() for a in (w, *slots)]
    update(bound, w, ids, g, slots, scalars)
    assert same_bits((w, *slots), before)


@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_a_view_of_a_flat_segment_is_a_table(dtype):
    bound, w, ids, g, slots, scalars = table(optim.Adam(0.1), dtype, 20, 6, 7)
    expected = dense(bound, w, ids, g, slots, scalars)
    flat = [a.reshape(-1) for a in (w, *slots)]
    views = [a.reshape(20, 6) for a in flat]
    update(bound, views[0], ids, g, tuple(views[1:]), scalars)
    assert same_bits(flat, [a.reshape(-1) for a in expected])


def shifted(a):
    """A read-only copy that starts at an odd address, as from the network."""
    made = np.frombuffer(bytes(1) + a.tobytes(), np.uint8)[1:].view(a.dtype)
    return made.reshape(a.shape)


@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_ids_and_gradients_may_be_read_only_and_at_any_address(dtype):
    bound, w, ids, g, slots, scalars = table(optim.Adam(0.1), dtype, 30, 9, 11)
    g = g.astype(dtype)  # of the weights' own dtype, as the dense loops take it
    expected = dense(bound, w, ids, g, slots, scalars)
    at = shifted(np.arange(len(ids))[::-1].copy())
    update(bound, w, shifted(ids), shifted(g[::-1].copy()), slots, scalars, at)
    assert same_bits((w, *slots), expected)


@pytest.mark.parametrize("rule", [RULES[0], RULES[-1], Mine(0.1)], ids=repr)
def test_float32_rows_are_vectorised_and_free_of_float64(rule):
    code = llvm(optim.bind(rule, "f4", cache_dir=kept()).kernel.module, "rows")
    assert "double" not in code
    assert re.search(r"f(add|sub|mul)[a-z ]* <\d+ x float>", code)


def test_float16_beyond_its_range_is_infinity_without_a_warning():
    bound = optim.bind(optim.SGD(1.0), "f2", cache_dir=kept())
    w = np.full((2, 3), -6e4, "f2")
    update(bound, w, np.array([1]), np.full((1, 3), 6e4, "f4"), (), bound.scalars(1))
    np.testing.assert_array_equal(w, [[-6e4] * 3, [-np.inf] * 3])


def refusals():
    n, dim, k = 4, 3, 2
    frozen = np.ones((n, dim), "f4")
    frozen.flags.writeable = False
    strided = np.ones((n, 2 * dim), "f4")[:, ::2]
    slot = (np.ones((n, dim), "f4"),)
    log = log_of(frozen, slot, k)
    yield "id too large", {"ids": np.array([n, 0])}
    yield "id below zero", {"ids": np.array([-1, 0])}
    yield "ids int32", {"ids": np.arange(k, dtype="i4")}
    yield "ids uint64", {"ids": np.arange(k, dtype="u8")}
    yield "ids 2-d", {"ids": np.zeros((k, 1), "i8")}
    yield "ids strided", {"ids": np.arange(2 * k)[::2]}
    yield "too many ids", {"ids": np.arange(k + 1)}
    yield "too few positions", {"at": np.arange(k - 1)}
    yield "a position too large", {"at": np.array([k, 0])}
    yield "a position below zero", {"at": np.array([-1, 0])}
    yield "positions int32", {"at": np.arange(k, dtype="i4")}
    yield "gradient float64", {"g": np.ones((k, dim))}
    yield "gradient narrow", {"g": np.ones((k, dim - 1), "f4")}
    yield "gradient flat", {"g": np.ones(k * dim, "f4")}
    yield "gradient strided", {"g": np.ones((dim, k), "f4").T}
    yield "weights flat", {"w": np.ones(n * dim, "f4")}
    yield "weights float64", {"w": np.ones((n, dim))}
    yield "weights read-only", {"w": frozen}
    yield "weights strided", {"w": strided}
    yield "slot of another shape", {"slots": (np.ones((n + 1, dim), "f4"),)}
    yield "slot flat", {"slots": (np.ones(n * dim, "f4"),)}
    yield "slot read-only", {"slots": (frozen,)}
    yield "slot missing", {"slots": ()}
    yield "scalar missing", {"scalars": (0.1,)}
    yield "no room in the log", {"log": log._replace(begin=1)}
    yield "a log before its begin", {"log": log._replace(begin=-1)}
    yield "a log of another width", {"log": log._replace(w=np.ones((k, 4), "f4"))}
    yield "a log of other slots", {"log": log._replace(slots=())}
    yield "a log of another dtype", {"log": log._replace(w=np.ones((k, dim)))}
    yield "a log without numbers", {"log": log._replace(rows=np.arange(k - 1))}
    yield "a log without a word", {"log": log._replace(word=np.arange(0))}


@pytest.mark.parametrize("dtype", ["f2", "f4"])
@pytest.mark.parametrize(
    "change", [case[1] for case in refusals()], ids=[case[0] for case in refusals()]
)
def test_what_does_not_fit_is_refused_and_nothing_changes(change, dtype):
    w, slot = np.ones((4, 3), dtype), np.ones((4, 3), "f4")
    given: dict[str, Any] = {
        "w": w,
        "slots": (slot,),
        "ids": np.arange(2),
        "at": None,
        "g": np.ones((2, 3), "f4"),
        "scalars": (0.1, 0.9, 0.0),
        "log": log_of(w, (slot,), 2),
        **change,
    }
    changed = (given["w"], *given["slots"])
    before = [a.copy() for a in changed]
    bound = optim.bind(optim.SGD(0.1, momentum=0.9), dtype, cache_dir=kept())
    rows = TableRows(given.pop("w"), given.pop("slots"))
    with pytest.raises(ValueError, match=r"expected|must be|the rule has|do not fit"):
        bound.rows(rows, **given)
    assert same_bits(changed, before)
    assert not given["log"].word.any()


def test_rows_are_compiled_when_asked_for_and_kept_like_the_others(tmp_path):
    def own(w, g):
        return w - 0.28125 * g

    kernel = kernels.build(own, 0, 0, "f4", str(tmp_path))
    kernel.warm()
    warmed = misses(kernel.module)
    compiled = len(list(tmp_path.rglob("*.rows-*.nbc")))
    w, ids = np.ones((3, 2), "f4"), np.array([2])
    for _ in range(2):
        update(kernel, w, ids, np.ones((1, 2), "f4"), (), ())
    np.testing.assert_array_equal(w, [[1, 1], [1, 1], [0.4375, 0.4375]])
    assert (compiled, misses(kernel.module)) == (0, warmed + 1)
    (_,) = tmp_path.rglob("*.rows-*.nbc")
    from daskps.kernels.compiled import Module
    from daskps.kernels.update_source import update_source

    again = Module(update_source(own, 0, 0, np.dtype("f4")), str(tmp_path))
    again.function("rows")
    assert (hits(again), misses(again)) == (1, 0)
