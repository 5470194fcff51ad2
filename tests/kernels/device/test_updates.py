"""Updates by element functions, in a random order, against the loops of hosts."""

from __future__ import annotations

import numpy as np
import pytest

from daskps import optim
from daskps.kernels.device.pieces import update_loop
from daskps.optim.master import WithMaster
from tests.kernels.compiling import kept
from tests.kernels.device.launching import Launcher, kernel_of, numbers, same_bits
from tests.kernels.test_dense import RULES

CLIPPED = optim.chain(optim.clip_by_value(-1, 1), optim.SGD(0.5, momentum=0.9))
#: Rules, and the dtypes of their weights: of each class one rule with all of them.
CASES = [(rule, "f4") for rule in RULES]
CASES += [
    (rule, dtype)
    for rule in {type(rule): rule for rule in RULES}.values()
    for dtype in ("f2", "f8")
]
CASES += [
    (CLIPPED, "f2"),
    (CLIPPED, "f4"),
    (optim.chain(optim.clip_by_value(-2, 2), CLIPPED), "f8"),
    (optim.scaled(optim.SGD(0.1, weight_decay=0.1), 2.0, 3.0), "f4"),
    *((WithMaster(optim.Adam(0.1)), dtype) for dtype in ("f2", "f4")),
    (WithMaster(optim.SGD(0.1)), "f2"),
    *((optim.DCASGD(0.1, adaptive=a, ranks=3), "f4") for a in (False, True)),
    (WithMaster(optim.DCASGD(0.1, ranks=2)), "f2"),
]


class Lion(optim.Rule):
    slots = ("momentum",)

    def prepare(self, step, lr):
        return lr, 0.9, 0.99

    @staticmethod
    def update(w, g, m, lr, b1, b2):
        return w - lr * np.sign(b1 * m + (1 - b1) * g), b2 * m + (1 - b2) * g


class Branches(optim.Rule):
    slots = ("n",)

    def prepare(self, step, lr):
        return (lr,)

    @staticmethod
    def update(w, g, n, lr):
        n = n + 1
        if abs(g) > 1:
            g = g / abs(g)
        elif g**2 < 0.25 and n > 3:
            g = 0.5 * g
        return w - lr * max(min(g, 0.9), np.minimum(n, -0.9)), n


CASES += [(Lion(0.1), "f4"), (Branches(0.1), "f4"), (Branches(0.1), "f8")]


def case(rule, dtype, n, seed=0):
    """Return a bound rule, weights, gradient, slots and scalars."""
    rng = np.random.default_rng(seed)
    bound = optim.bind(rule, dtype, cache_dir=kept())
    w, g = numbers(rng, n, dtype)
    compute = bound.kernel.compute_dtype
    slots = tuple(np.abs(rng.normal(size=n)).astype(compute) for _ in rule.slots)
    scalars = bound.scalars(3)
    return bound, w, g, slots, bound.of_rank(scalars, 1) if bound.ranks else scalars


@pytest.mark.parametrize(("rule", "dtype"), CASES, ids=repr)
def test_elements_in_any_order_have_the_bits_of_hosts(rule, dtype):
    bound, w, g, slots, scalars = case(rule, dtype, 300)
    expected, kept_slots = np.empty_like(w), tuple(s.copy() for s in slots)
    bound.publish(w, expected, g, kept_slots, scalars)
    launcher = Launcher(1)
    kernel = kernel_of(rule, dtype, launcher)
    out, outs = np.full_like(w, 7), tuple(np.full_like(s, 7) for s in slots)
    before = w.copy(), *(s.copy() for s in slots)
    assert kernel.publish(w, out, g, slots, scalars, outs)
    assert (out == 7).all()  # nothing runs before the wait
    assert launcher.wait()
    assert same_bits((out, *outs), (expected, *kept_slots))
    assert same_bits((w, *slots), before)
    # In place, and by what is checked once.
    fixed = kernel.fixed(w, w, slots)
    for update in (fixed, lambda g, scalars: kernel.inplace(w, g, slots, scalars)):
        for a, b in zip((w, *slots), before, strict=True):
            a[:] = b
        update(g, scalars)
        launcher.wait()
        assert same_bits((w, *slots), (expected, *kept_slots))


@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_a_gradient_may_have_the_dtype_of_arithmetic(dtype):
    rule = optim.SGD(0.1, momentum=0.9) if dtype == "f2" else WithMaster(optim.SGD(0.1))
    bound, w, g, slots, scalars = case(rule, dtype, 300)
    g = (1.1 * g.astype(bound.kernel.compute_dtype)).astype(bound.kernel.compute_dtype)
    launcher = Launcher(2)
    kernel = kernel_of(rule, dtype, launcher)
    mine = w.copy(), tuple(s.copy() for s in slots)
    kernel.inplace(mine[0], g, mine[1], scalars)
    launcher.wait()
    bound.inplace(w, g, slots, scalars)
    assert same_bits((mine[0], *mine[1]), (w, *slots))


def test_pieces_of_all_sizes_share_a_launch_and_stay_apart():
    rule, launcher = optim.SGD(0.1, momentum=0.9), Launcher(3)
    kernel, expected = kernel_of(rule, "f4", launcher), []
    pieces = []
    for seed, n in enumerate((300, 1, 0, 5000, 17)):
        rng = np.random.default_rng(seed)
        w, g, m = rng.normal(size=(3, n)).astype("f4")
        whole = np.full(n + 2, 7, "f4")  # with neighbours that nobody writes
        whole[1:-1] = w
        pieces.append((whole, g, m))
        bound = optim.bind(rule, "f4", cache_dir=kept())
        made = w.copy(), m.copy()
        bound.inplace(made[0], g, (made[1],), rule.scalars(1))
        expected.append(made)
    for whole, g, m in pieces:
        kernel.inplace(whole[1:-1], g, (m,), rule.scalars(1))
    launcher.wait()
    assert launcher.launches == 1
    for (whole, _, m), made in zip(pieces, expected, strict=True):
        assert same_bits((whole[1:-1], m), made)
        assert whole[0] == whole[-1] == 7


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_look_that_finds_something_stops_what_comes_after(dtype, bad):
    rule, launcher = optim.SGD(0.1), Launcher(4)
    kernel = kernel_of(rule, dtype, launcher)
    w, g = np.ones((2, 1000), dtype)
    g[777] = bad
    assert not kernel.is_finite(g)
    g_other, other = np.ones((2, 3), dtype)
    assert kernel.is_finite(g_other)
    for a, b in ((w, g), (other, g_other)):
        assert kernel.publish(a, a, b, (), rule.scalars(1), check=True)
    assert not launcher.wait()
    assert (w == 1).all()
    assert (other == 1).all()
    # The largest numbers are finite, and the next step begins anew.
    g[:] = np.finfo(dtype).max
    g[::2] = np.finfo(dtype).smallest_subnormal
    kernel.publish(w, w, g, (), (0.0,), check=True)
    assert launcher.wait()


def test_integers_are_finite():
    assert kernel_of(optim.SGD(0.1), "f4", Launcher()).is_finite(np.ones(3, "i8"))


def test_wrong_arrays_are_refused_before_anything_is_queued():
    rule, launcher = optim.SGD(0.1, momentum=0.9), Launcher()
    kernel = kernel_of(rule, "f4", launcher)
    w, g, m = np.ones((3, 5), "f4")
    scalars = rule.scalars(1)
    for wrong in (
        (w, g[:4], (m,), scalars),
        (w, g.astype("f8"), (m,), scalars),
        (w, g, (), scalars),
        (w, g, (m[::2],), scalars),
        (w[:4], g, (m,), scalars),
        (w, g, (m,), scalars[1:]),
    ):
        with pytest.raises(ValueError, match=r"expected|slots|scalars|must be"):
            kernel.inplace(*wrong)
        with pytest.raises(ValueError, match=r"expected|slots|scalars|must be"):
            kernel.fixed(wrong[0], wrong[0], wrong[2])(wrong[1], wrong[3])
    with pytest.raises(ValueError, match="finite in float32"):
        kernel.check_scalars((1e39, 0.0, 0.0))
    assert not launcher.queue


def test_slots_of_other_ranks_are_copied():
    rule, launcher = optim.DCASGD(0.1, ranks=3), Launcher()
    bound, w, g, slots, _ = case(rule, "f4", 300)
    outs = tuple(np.empty_like(s) for s in slots)
    kernel = kernel_of(rule, "f4", launcher)
    kernel.publish(w, np.empty_like(w), g, slots, bound.of_rank((0.1, 0.04), 2), outs)
    launcher.wait()
    assert same_bits(outs[:2], slots[:2])
    assert same_bits(outs[2:], (w,)) is False  # the new weights
    with pytest.raises(ValueError, match="rank 3 is none of the 3"):
        kernel.inplace(w, g, slots, (0.1, 0.04, 3.0))


def test_equal_rules_have_one_loop():
    one, other = (kernel_of(optim.Adam(lr), "f4", Launcher()) for lr in (0.1, 0.2))
    loops = [update_loop(kernel.rule, kernel.dtype) for kernel in (one, other)]
    assert loops[0] == loops[1]
