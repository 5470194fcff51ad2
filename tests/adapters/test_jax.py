"""Pytrees of JAX in stores, and the rules beside the transforms of optax."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from distributed import Client

import daskps
from daskps import optim
from tests import inprocess
from tests.support import adapter

jax: Any = adapter("jax")
jnp: Any = jax.numpy
optax: Any = adapter("optax")


@pytest.fixture
def here() -> Iterator[Any]:
    """Workers in this process, where JAX is imported by now."""
    with inprocess.cluster(2) as made:
        yield made


class Scale(NamedTuple):
    by: Any
    at: Any


def made() -> Any:
    rng = np.random.default_rng(0)
    layers = [{"w": jnp.array(rng.normal(size=(3, 2)), "f4")}, {"w": jnp.ones(2, "f4")}]
    return {
        "layers": layers,
        "pair": (jnp.ones(2, "f4"),),
        "s": Scale(*jnp.ones((2, 2))),
    }


NAMES = ["layers/0/w", "layers/1/w", "pair/0", "s/by", "s/at"]


def loss(tree: Any, X: Any, y: Any) -> Any:
    hidden = jnp.tanh(X @ tree["layers"][0]["w"] * tree["s"].by) + tree["s"].at
    return ((hidden @ tree["layers"][1]["w"] + tree["pair"][0].sum() - y) ** 2).mean()


def data() -> tuple[Any, Any]:
    X = np.random.default_rng(1).normal(size=(40, 3)).astype("f4")
    return X, X.sum(1)


def test_paths_are_names_and_the_way_back(here: Any) -> None:
    tree = made()
    assert [*daskps.jax.flatten(tree)] == NAMES
    with daskps.jax.create(tree) as store:
        assert [*store.pull()] == NAMES
        found = daskps.jax.pull(store, tree)
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        for one, two in zip(*map(jax.tree.leaves, (found, tree)), strict=True):
            assert one.tobytes() == two.tobytes()
        assert type(found["s"]) is Scale
        # As `daskps.create` names dicts, lists and tuples.
        plain = {"layers": tree["layers"], "pair": tree["pair"]}
        with daskps.create(plain) as other:
            assert [*other.pull()] == NAMES[:3]


def gradient(params: Any, X: Any, y: Any) -> Any:
    w = [params[name] for name in NAMES]
    tree = {"layers": [{"w": w[0]}, {"w": w[1]}], "pair": (w[2],), "s": Scale(*w[3:])}
    value, grads = jax.value_and_grad(loss)(jax.tree.map(jnp.array, tree), X, y)
    # Nested as it comes.
    return value, {**grads, "s": grads["s"]._asdict()}


def with_aux(tree: Any, X: Any, y: Any) -> Any:
    return loss(tree, X, y), {"rows": len(X)}


@pytest.mark.parametrize("has_aux", [False, True])
def test_training_has_the_bits_of_plain_train(here: Any, has_aux: bool) -> None:
    X, y = data()
    tree = made()
    how: dict[str, Any] = {"epochs": 2, "batch_size": 10, "trainers": 2}
    create = partial(daskps.jax.create, tree, optimizer=optim.Adam(0.01))
    with create() as store, create() as other:
        of = with_aux if has_aux else loss
        function = jax.value_and_grad(of, has_aux=has_aux)
        more: dict[str, Any] = {"like": tree, "has_aux": has_aux, **how}
        found = daskps.jax.train(store, function, X, y, **more)
        wanted = daskps.train(other, gradient, X, y, **how)
        assert [e.loss for e in found.history] == [e.loss for e in wanted.history]
        for name, value in found.weights.items():
            assert value.tobytes() == wanted.weights[name].tobytes()
        weights = daskps.jax.unflatten(found.weights, tree)
        assert weights["s"].by is found.weights["s/by"]


def test_function_of_one_argument(client: Client) -> None:
    def mean(tree: Any, X: Any) -> Any:
        return ((X - tree["m"]) ** 2).mean()

    X = np.array([[1.0], [3.0]], "f4")
    tree = {"m": jnp.zeros(1)}
    with daskps.jax.create(tree, optimizer=optim.SGD(0.25), client=client) as store:
        daskps.jax.train(store, jax.value_and_grad(mean), X, like=tree, batch_size=2)
        assert daskps.jax.pull(store, tree)["m"].tolist() == [1.0]


def test_pull_with_an_asynchronous_client(client: Client) -> None:
    address = client.scheduler_info()["address"]

    async def pull() -> Any:
        async with (
            Client(address, asynchronous=True) as other,
            daskps.jax.create(made(), client=other) as store,
        ):
            return await daskps.jax.pull(store, made())

    found = asyncio.run(pull())
    assert found["s"].by.tolist() == made()["s"].by.tolist()


def test_bad_trees(here: Any) -> None:
    with pytest.raises(daskps.LayoutError, match="has no path"):
        daskps.jax.create(jnp.ones(2))
    with pytest.raises(daskps.LayoutError, match="two leaves are at 'a/b'"):
        daskps.jax.create({"a": {"b": 1.0}, "a/b": 2.0})
    with pytest.raises(daskps.LayoutError, match="'name'"):
        daskps.jax.create({"name": "text", "w": jnp.ones(2)})
    with pytest.raises(daskps.LayoutError, match="'key'"):
        daskps.jax.create({"key": jax.random.key(0)})
    with pytest.raises(daskps.LayoutError, match=r"\.astype\('float32'\)"):
        daskps.jax.create({"w": jnp.ones(2, "bfloat16")})
    with (
        daskps.jax.create({"w": jnp.ones(2)}) as store,
        pytest.raises(daskps.UnknownParameterError, match="'v'"),
    ):
        daskps.jax.pull(store, {"v": 0})
    with pytest.raises(daskps.UnknownParameterError, match="no value for"):
        daskps.jax.unflatten({"w": 1.0}, {"v": 0})


#: By the words of optax, which `docs/jax.md` lists.
RULES = {
    "sgd(0.1)": (optax.sgd(0.1), optim.SGD(0.1)),
    "sgd(0.1, momentum=0.9)": (
        optax.sgd(0.1, momentum=0.9),
        optim.SGD(0.1, momentum=0.9),
    ),
    "sgd(0.1, momentum=0.9, nesterov=True)": (
        optax.sgd(0.1, momentum=0.9, nesterov=True),
        optim.SGD(0.1, momentum=0.9, nesterov=True),
    ),
    "chain(add_decayed_weights(0.01), sgd(0.1))": (
        optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.1)),
        optim.SGD(0.1, weight_decay=0.01),
    ),
    "adam(0.01)": (optax.adam(0.01), optim.Adam(0.01)),
    "adamw(0.01, weight_decay=0.1)": (
        optax.adamw(0.01, weight_decay=0.1),
        optim.AdamW(0.01, weight_decay=0.1),
    ),
    "adagrad(0.1, eps=0)": (
        optax.adagrad(0.1, eps=0),
        optim.Adagrad(0.1, initial_accumulator_value=0.1, eps=0.0),
    ),
    "rmsprop(0.01, eps_in_sqrt=False)": (
        optax.rmsprop(0.01, eps_in_sqrt=False),
        optim.RMSprop(0.01, alpha=0.9),
    ),
    "adadelta(1.0)": (optax.adadelta(1.0), optim.Adadelta(1.0, rho=0.9, eps=1e-6)),
    "adamax(0.01)": (optax.adamax(0.01), optim.Adamax(0.01)),
    "chain(clip(0.5), adam(0.01))": (
        optax.chain(optax.clip(0.5), optax.adam(0.01)),
        optim.chain(optim.clip_by_value(-0.5, 0.5), optim.Adam(0.01)),
    ),
    "sgd(cosine_decay_schedule(0.1, 50))": (
        optax.sgd(optax.cosine_decay_schedule(0.1, 50)),
        optim.SGD(optim.schedules.cosine(0.1, 50)),
    ),
    "sgd(exponential_decay(0.1, 1, 0.97))": (
        optax.sgd(optax.exponential_decay(0.1, 1, 0.97)),
        optim.SGD(optim.schedules.exponential(0.1, 0.97)),
    ),
}


def test_the_page_lists_these_rules() -> None:
    page = (Path(__file__).parents[2] / "docs" / "jax.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+\(.*)` \| `(.*)` \|$", page, re.MULTILINE))
    assert rows.keys() == RULES.keys()
    names = {**vars(optim), "schedules": optim.schedules}
    for words, ours in rows.items():
        assert repr(eval(ours, names)) == repr(RULES[words][1])


@pytest.mark.parametrize("words", RULES)
def test_rules_are_those_of_optax(here: Any, words: str) -> None:
    transform, rule = RULES[words]
    rng = np.random.default_rng(2)
    start, grads = rng.normal(size=20), rng.normal(size=(100, 20))
    with jax.enable_x64():
        w = jnp.array(start)
        state = transform.init(w)

        @jax.jit
        def step(w: Any, state: Any, g: Any) -> Any:
            updates, state = transform.update(g, state, w)
            return optax.apply_updates(w, updates), state

        for g in grads:
            w, state = step(w, state, g)
        wanted = np.array(w)
    with daskps.create({"w": start}, optimizer=rule) as store:
        for g in grads:
            store.push({"w": g})
        np.testing.assert_allclose(store["w"].pull(), wanted, rtol=1e-6, atol=1e-6)
