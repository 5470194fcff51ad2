"""The rules against torch, against NumPy, and against numbers from the papers."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest

from daskps import optim
from daskps.testing import updated
from tests.kernels.compiling import kept

#: For arguments of a wrong type.
untyped: Any = optim

#: Rule, name in torch.optim, its arguments there.
CASES = [
    (optim.SGD(0.1), "SGD", {"lr": 0.1}),
    (optim.SGD(0.1, weight_decay=0.01), "SGD", {"lr": 0.1, "weight_decay": 0.01}),
    (optim.SGD(0.02, momentum=0.9), "SGD", {"lr": 0.02, "momentum": 0.9}),
    (
        optim.SGD(0.02, momentum=0.9, nesterov=True, weight_decay=0.1),
        "SGD",
        {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    (optim.Adagrad(), "Adagrad", {}),
    (
        optim.Adagrad(0.1, 0.1, 0.01, 0.5, 1e-8),
        "Adagrad",
        {
            "lr": 0.1,
            "lr_decay": 0.1,
            "weight_decay": 0.01,
            "initial_accumulator_value": 0.5,
            "eps": 1e-8,
        },
    ),
    (optim.RMSprop(), "RMSprop", {}),
    (
        optim.RMSprop(momentum=0.5, weight_decay=0.01),
        "RMSprop",
        {"momentum": 0.5, "weight_decay": 0.01},
    ),
    (optim.RMSprop(alpha=0.9, centered=True), "RMSprop", {"alpha": 0.9, "centered": 1}),
    (
        optim.RMSprop(1e-3, centered=True, momentum=0.9),
        "RMSprop",
        {"lr": 1e-3, "centered": True, "momentum": 0.9},
    ),
    (optim.Adam(), "Adam", {}),
    (
        optim.Adam(0.01, 0.8, 0.99, weight_decay=0.1),
        "Adam",
        {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1},
    ),
    (optim.Adadelta(), "Adadelta", {"lr": 1.0}),
    (
        optim.Adadelta(0.5, rho=0.95, eps=1e-4, weight_decay=0.01),
        "Adadelta",
        {"lr": 0.5, "rho": 0.95, "eps": 1e-4, "weight_decay": 0.01},
    ),
    (optim.Adamax(), "Adamax", {"lr": 2e-3}),
    (
        optim.Adamax(0.01, 0.8, 0.99, eps=1e-6, weight_decay=0.1),
        "Adamax",
        {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1},
    ),
    (optim.AdamW(), "AdamW", {}),
    (
        optim.AdamW(0.01, weight_decay=0.1),
        "AdamW",
        {"lr": 0.01, "weight_decay": 0.1},
    ),
]
RULES: list[Any] = [
    *(case[0] for case in CASES),
    # What torch has not.
    optim.Adam(0.01, bias_correction=False),
    optim.Adam(0.01, eps_root=1e-3, weight_decay=0.1),
    optim.Ftrl(),
    optim.Ftrl(0.5, l1=2.0, l2=0.1, beta=0.5),
]


def slots_of(rule: optim.Rule, n: int, dtype: str) -> tuple[np.ndarray, ...]:
    first = rule.slot_init
    return tuple(np.full(n, first.get(name, 0), dtype) for name in rule.slots)


def compiled(rule, w, gradients):
    bound = optim.bind(rule, w.dtype, cache_dir=kept())
    w, slots = w.copy(), slots_of(rule, len(w), bound.kernel.compute_dtype.name)
    for step, g in enumerate(gradients, 1):
        bound.inplace(w, g.astype(w.dtype), slots, bound.scalars(step))
    return w


def error(got, expected):
    """Return the largest error against max(1, |w|)."""
    expected = np.asarray(expected, "f8")
    return np.max(np.abs(got - expected) / np.maximum(1, np.abs(expected)))


def job(steps=100, n=37):
    rng = np.random.default_rng(5)
    w = rng.standard_normal(n) * rng.choice([0.1, 1, 10], n)
    return w, [rng.standard_normal(n) + 0.1 for _ in range(steps)]


def scalar_reference(rule: Any, w, gradients):
    """One weight at a time from the papers, nothing shared with the rules."""
    out = []
    for i, w_i in enumerate(w):
        x, m, v, buf = float(w_i), 0.0, 0.0, 0.0
        if type(rule) is untyped.Adagrad:
            v = rule.initial_accumulator_value
        if type(rule) in REFERENCES:
            reference = REFERENCES[type(rule)]
            out.append(reference(rule, x, [float(g[i]) for g in gradients]))
            continue
        for t, gradient in enumerate(gradients, 1):
            g = float(gradient[i])
            if type(rule) is untyped.AdamW:
                x -= rule.lr * rule.weight_decay * x
            else:
                g += rule.weight_decay * x
            if type(rule) is untyped.SGD:
                buf = rule.momentum * buf + g
                x -= rule.lr * (g + rule.momentum * buf if rule.nesterov else buf)
            elif type(rule) is untyped.Adagrad:
                v += g**2
                lr = rule.lr / (1 + (t - 1) * rule.lr_decay)
                x -= lr * g / (math.sqrt(v) + rule.eps)
            elif type(rule) is untyped.RMSprop:
                v = rule.alpha * v + (1 - rule.alpha) * g**2
                m = rule.alpha * m + (1 - rule.alpha) * g
                variance = v - m**2 if rule.centered else v
                buf = rule.momentum * buf + g / (math.sqrt(variance) + rule.eps)
                x -= rule.lr * buf
            else:
                m = rule.beta1 * m + (1 - rule.beta1) * g
                v = rule.beta2 * v + (1 - rule.beta2) * g**2
                m_hat, v_hat = m / (1 - rule.beta1**t), v / (1 - rule.beta2**t)
                x -= rule.lr * m_hat / (math.sqrt(v_hat) + rule.eps)
        out.append(x)
    return np.array(out)


def adadelta_reference(rule: Any, w: float, gradients: list[float]) -> float:
    """Algorithm 1 of Zeiler for one weight, times lr."""
    squares = steps = 0.0
    for gradient in gradients:
        g = gradient + rule.weight_decay * w
        squares = rule.rho * squares + (1 - rule.rho) * g**2
        delta = math.sqrt(steps + rule.eps) / math.sqrt(squares + rule.eps) * g
        steps = rule.rho * steps + (1 - rule.rho) * delta**2
        w -= rule.lr * delta
    return w


def adamax_reference(rule: Any, w: float, gradients: list[float]) -> float:
    """Algorithm 2 of Kingma and Ba for one weight."""
    m = u = 0.0
    for t, gradient in enumerate(gradients, 1):
        g = gradient + rule.weight_decay * w
        m = rule.beta1 * m + (1 - rule.beta1) * g
        u = max(rule.beta2 * u, abs(g) + rule.eps)
        w -= rule.lr / (1 - rule.beta1**t) * m / u
    return w


def adam_reference(rule: Any, w: float, gradients: list[float]) -> float:
    """Algorithm 1 of Kingma and Ba for one weight, corrected or not."""
    m = v = 0.0
    for t, gradient in enumerate(gradients, 1):
        g = gradient + rule.weight_decay * w
        m = rule.beta1 * m + (1 - rule.beta1) * g
        v = rule.beta2 * v + (1 - rule.beta2) * g**2
        lacks = (1.0, 1.0)
        if rule.bias_correction:
            lacks = 1 - rule.beta1**t, 1 - rule.beta2**t
        root = math.sqrt(v / lacks[1] + rule.eps_root)
        w -= rule.lr * m / lacks[0] / (root + rule.eps)
    return w


def ftrl_reference(rule: Any, w: float, gradients: list[float]) -> float:
    """Algorithm 1 of McMahan and others for one weight."""
    z = n = 0.0
    for g in gradients:
        sigma = (math.sqrt(n + g * g) - math.sqrt(n)) / rule.lr
        z, n = z + g - sigma * w, n + g * g
        by = (rule.beta + math.sqrt(n)) / rule.lr + rule.l2
        w = 0.0 if abs(z) <= rule.l1 else -(z - math.copysign(rule.l1, z)) / by
    return w


#: By kind of rule; those of others are told in `scalar_reference`.
REFERENCES: dict[type, Any] = {
    optim.Adadelta: adadelta_reference,
    optim.Adam: adam_reference,
    optim.Adamax: adamax_reference,
    optim.Ftrl: ftrl_reference,
}


@pytest.mark.parametrize(("rule", "name", "arguments"), CASES, ids=repr)
def test_rule_float32_equals_torch(rule, name, arguments):
    torch = pytest.importorskip("torch")
    w, gradients = job()
    parameter = torch.nn.Parameter(torch.tensor(w, dtype=torch.float32))
    theirs = getattr(torch.optim, name)(
        [parameter],
        **{"lr": 1e-2, **arguments} if name in ("RMSprop", "Adagrad") else arguments,
    )
    for g in gradients:
        parameter.grad = torch.tensor(g, dtype=torch.float32)
        theirs.step()
    ours = compiled(rule, w.astype("f4"), gradients)
    assert error(ours, parameter.detach().numpy()) <= 1e-6


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rule_float64_equals_oracle_and_paper(rule):
    w, gradients = job()
    ours = compiled(rule, w, gradients)
    assert error(ours, updated(rule, w, gradients)) <= 1e-12
    assert error(ours, scalar_reference(rule, w, gradients)) <= 1e-12


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rule_float16_is_rounded_float32(rule):
    w, gradients = job(steps=1)
    w16, g16 = w.astype("f2"), gradients[0].astype("f2")
    ours = compiled(rule, w16, [g16])
    wide = compiled(rule, w16.astype("f4"), [g16.astype("f4")])
    assert ours.dtype == np.float16
    np.testing.assert_array_equal(ours, wide.astype("f2"))


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        pytest.param(optim.SGD(0.1, 0.9), [0.9, 0.71, 0.439], id="S11-momentum"),
        pytest.param(optim.Adagrad(0.1), [0.9, 0.82929], id="S13-adagrad"),
        pytest.param(
            optim.RMSprop(0.1, alpha=0.9), [0.683772, 0.454357], id="S13-rmsprop"
        ),
        # The first step of Adam is lr; without correction lr * 0.1 / sqrt(0.001).
        pytest.param(optim.Adam(0.1), [0.9, 0.8], id="adam"),
        pytest.param(
            optim.Adam(0.1, bias_correction=False), [0.683772, 0.258813], id="adam-raw"
        ),
        # sqrt(1e-6) / sqrt(0.1 + 1e-6)
        pytest.param(optim.Adadelta(), [0.996838], id="adadelta"),
        pytest.param(optim.Adamax(0.1), [0.9, 0.8], id="adamax"),
    ],
)
def test_rule_gives_the_scenario_numbers(rule, expected, dtype):
    for steps, value in enumerate(expected, 1):
        got = compiled(rule, np.ones(1, dtype), [np.ones(1)] * steps)
        assert got[0] == pytest.approx(value, abs=2e-6)


def test_v15_adagrad_keeps_its_sum_between_steps():
    """Theirs worked on a copy, whose first step gave NaN."""
    got = [compiled(optim.Adagrad(0.1), np.zeros(1), [np.ones(1)] * n) for n in (1, 2)]
    np.testing.assert_allclose(got, [[-0.1], [-0.17071]], atol=1e-5)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_ftrl_makes_weights_exactly_zero(dtype):
    """Half of the gradients stay below l1 together, and their weights at 0."""
    rule = optim.Ftrl(0.5, l1=1.0)
    weak, strong = np.full(8, 0.09), np.full(8, -0.5)
    w = compiled(rule, np.zeros(16, dtype), [np.concatenate((weak, strong))] * 10)
    assert np.count_nonzero(w[:8]) == 0
    assert not np.signbit(w[:8]).any()
    # z = -5 and further by what it has given up, n = 2.5
    assert (w[8:] > 0.5).all()


def test_ftrl_that_has_seen_nothing_divides_by_nothing():
    w = compiled(optim.Ftrl(0.1, beta=0.0), np.zeros(3), [np.array([0.0, 1e-30, 1.0])])
    np.testing.assert_allclose(w, [0.0, -0.1, -0.1])
    with pytest.raises(
        ValueError, match=r"learning rate of Ftrl must lie in \(0, inf\)"
    ):
        optim.Ftrl(optim.schedules.polynomial(1.0, 4)).scalars(5)


def test_slots_exist_only_when_needed():
    assert optim.SGD(1).slots == ()
    assert optim.SGD(1, 0.5).slots == ("momentum",)
    assert optim.RMSprop().slots == ("square_avg",)
    assert optim.RMSprop(centered=True, momentum=0.1).slots == (
        "square_avg",
        "grad_avg",
        "momentum",
    )
    assert optim.Adam().slots == ("exp_avg", "exp_avg_sq")
    assert optim.Adagrad(initial_accumulator_value=2).slot_init == {"sum": 2.0}


def test_centered_rmsprop_survives_equal_gradients():
    """Rounding must not make the variance negative: torch gives NaN here or not."""
    rule = optim.RMSprop(1e-3, alpha=0.5, centered=True)
    w = compiled(rule, np.ones(64, "f4"), [np.linspace(0.1, 9, 64)] * 200)
    assert np.isfinite(w).all()


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rule_is_a_value(rule):
    copy = pickle.loads(pickle.dumps(rule))
    assert copy == rule
    assert hash(copy) == hash(rule)
    assert eval(repr(rule), vars(optim)) == rule
    assert len({*RULES, copy}) == len(RULES)


def test_rules_of_different_kind_or_arguments_differ():
    assert optim.SGD(0.1) != optim.SGD(0.2)
    assert optim.Adam(weight_decay=0.01) != optim.AdamW(weight_decay=0.01)
    assert optim.SGD(0.1) != "SGD(0.1)"


def test_repr_shows_what_was_chosen():
    assert repr(optim.SGD(0.1, momentum=0.9)) == "SGD(lr=0.1, momentum=0.9)"
    assert repr(optim.AdamW()) == "AdamW(lr=0.001)"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: optim.SGD(-0.1), r"lr must lie in \[0, inf\), got -0.1"),
        (lambda: optim.SGD(math.nan), "lr must lie"),
        (lambda: optim.SGD(math.inf), "lr must lie"),
        (lambda: optim.SGD(10**400), "lr must lie"),
        (lambda: optim.SGD(0.1, momentum=1.0), r"momentum must lie in \[0, 1\)"),
        (lambda: optim.SGD(0.1, nesterov=True), "needs a momentum"),
        (lambda: optim.Adam(beta1=1.0), "beta1 must lie"),
        (lambda: optim.Adam(beta2=-0.1), "beta2 must lie"),
        (lambda: optim.Adam(eps=-1), "eps must lie"),
        (lambda: optim.RMSprop(alpha=1), "alpha must lie"),
        (lambda: optim.Adagrad(initial_accumulator_value=-1), "initial_accumulator"),
        (lambda: optim.AdamW(weight_decay=-1), "weight_decay must lie"),
        (lambda: optim.Adam(eps_root=-1), "eps_root must lie"),
        (lambda: optim.Adadelta(rho=1), "rho must lie"),
        (lambda: optim.Adadelta(eps=0), r"eps must lie in \(0, inf\)"),
        (lambda: optim.Adamax(eps=0), r"eps must lie in \(0, inf\)"),
        (lambda: optim.Ftrl(0), r"lr must lie in \(0, inf\)"),
        (lambda: optim.Ftrl(l1=-1), "l1 must lie"),
    ],
)
def test_bad_values_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: untyped.SGD("0.1"),
        lambda: untyped.SGD(None),
        lambda: untyped.SGD(True),
        lambda: untyped.SGD(float),
        lambda: untyped.SGD(0.1, momentum="0.9"),
        lambda: untyped.SGD(0.1, 0.9, nesterov=1),
        lambda: untyped.RMSprop(centered="yes"),
        lambda: untyped.Adam(beta=0.9),
        lambda: untyped.Adam(bias_correction=1),
    ],
)
def test_bad_types_are_refused(make):
    with pytest.raises(TypeError):
        make()


def test_rate_checks_what_a_schedule_gives():
    assert optim.SGD(lambda step: 0.1 * step).rate(3) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="learning rate"):
        optim.SGD(lambda step: -1.0).rate(0)
    with pytest.raises(TypeError, match="learning rate"):
        untyped.SGD(lambda step: None).rate(0)


def test_an_error_of_a_schedule_says_whose_it_is():
    rule = optim.SGD(optim.schedules.step(1.0, 1, factor=2))
    with pytest.raises(OverflowError, match=r"rate of SGD\(lr=step.* at 5000"):
        rule.scalars(5001)


def test_scalars_take_the_schedule_of_the_step_before_or_an_override():
    rule = optim.SGD(optim.schedules.exponential(1.0, 0.5))
    assert rule.scalars(1) == (1.0,)
    assert rule.scalars(3) == (0.25,)
    assert rule.scalars(3, lr=0.7) == (0.7,)
    with pytest.raises(ValueError, match="lr must lie"):
        rule.scalars(1, lr=-1)
