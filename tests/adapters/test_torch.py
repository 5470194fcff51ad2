"""Modules of torch in stores: the same numbers as its own loops, and as plain `run`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from distributed import Client

import daskps
from daskps import optim
from tests import inprocess
from tests.support import adapter

torch: Any = adapter("torch")


@pytest.fixture
def here() -> Iterator[Any]:
    """Workers in this process, where torch is imported by now."""
    with inprocess.cluster(2) as made:
        yield made


nn, functional = torch.nn, torch.nn.functional
Module: Any = nn.Module


def net(seed: int = 0) -> Any:
    """Two layers in float64."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def data(n: int, rows: int = 8) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    shapes = (rows, 4), (rows, 1)
    return [tuple(torch.tensor(rng.normal(size=s)) for s in shapes) for _ in range(n)]


def loop(trainer: Any, part: Any, make: Any = net) -> Any:
    """The loop that anybody writes in torch."""
    torch.set_num_threads(1)
    model = make()
    optimizer = daskps.torch.Optimizer(trainer, model)
    for X, y in part:
        optimizer.zero_grad()
        functional.mse_loss(model(X), y).backward()
        optimizer.step(weight=len(X))
    return [array.detach().numpy() for array in model.parameters()]


def unchanged(optimizer: Any, batches: Any, make: Any = net) -> Any:
    """The same loop without daskps."""
    model = make()
    optimizer = optimizer(model.parameters())
    for X, y in batches:
        optimizer.zero_grad()
        functional.mse_loss(model(X), y).backward()
        optimizer.step()
    return model


def same(store: Any, model: Any, rtol: float) -> None:
    values, state = store.pull(), model.state_dict()
    assert values.keys() == state.keys()
    for name, value in values.items():
        np.testing.assert_allclose(value, state[name].numpy(), rtol=rtol, err_msg=name)


T = torch.optim
RULES = {
    "sgd": (optim.SGD(0.05), partial(T.SGD, lr=0.05)),
    "momentum": (optim.SGD(0.05, momentum=0.9), partial(T.SGD, lr=0.05, momentum=0.9)),
    "nesterov": (
        optim.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        partial(T.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adam": (optim.Adam(0.01), partial(T.Adam, lr=0.01)),
    "adamw": (
        optim.AdamW(0.01, weight_decay=0.1),
        partial(T.AdamW, lr=0.01, weight_decay=0.1),
    ),
    "adagrad": (optim.Adagrad(0.1), partial(T.Adagrad, lr=0.1)),
    "rmsprop": (optim.RMSprop(0.01), partial(T.RMSprop, lr=0.01)),
    "adadelta": (optim.Adadelta(1.0), partial(T.Adadelta, lr=1.0)),
    "adamax": (optim.Adamax(0.01), partial(T.Adamax, lr=0.01)),
}


@pytest.mark.parametrize("name", RULES)
def test_one_trainer_has_the_numbers_of_torch(here: Any, name: str) -> None:
    rule, of_torch = RULES[name]
    batches = data(100)
    with daskps.torch.create(net(), optimizer=rule) as store:
        (found,) = daskps.run(store, loop, [batches])
        assert store.version == 100
        same(store, unchanged(of_torch, batches), 1e-6)
        for there, here in zip(found, store.pull().values(), strict=True):
            np.testing.assert_array_equal(there, here)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_two_trainers_with_half_of_each_batch(client: Client, name: str) -> None:
    rule, of_torch = RULES[name]
    batches = data(100)
    halves = [[(X[s], y[s]) for X, y in batches] for s in (slice(3), slice(3, 8))]
    with daskps.torch.create(net(), optimizer=rule, client=client) as store:
        daskps.run(store, loop, halves)
        same(store, unchanged(of_torch, batches), 1e-5)


def plain(trainer: Any, part: Any) -> None:
    """The same in NumPy's words."""
    model = net()
    for X, y in part:
        for name, value in trainer.pull().items():
            model.get_parameter(name).data = torch.from_numpy(value)
        model.zero_grad()
        functional.mse_loss(model(X), y).backward()
        grads = {n: p.grad.numpy() for n, p in model.named_parameters()}
        trainer.push(grads, weight=len(X))


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_loop_has_the_bits_of_plain_run(here: Any, sync: str) -> None:
    parts = [data(5), data(3)] if sync == "bsp" else [data(5)]
    made = partial(daskps.torch.create, net(), optimizer=optim.Adam(0.01))
    with made() as store, made() as other:
        daskps.run(store, loop, parts, sync=sync)
        daskps.run(other, plain, parts, sync=sync)
        for one, two in zip(store.pull().values(), other.pull().values(), strict=True):
            assert one.tobytes() == two.tobytes()


def normed() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()


def test_statistics_are_the_mean_of_the_trainers(here: Any) -> None:
    def gather(trainer: Any, part: Any) -> Any:
        model = normed()
        optimizer = daskps.torch.Optimizer(trainer, model)
        for X, y in part:
            functional.mse_loss(model(X), y).backward()
            optimizer.step(weight=len(X))
        return {name: b.numpy() for name, b in model.named_buffers()}

    rule = {"*": optim.SGD(0.1)}
    with daskps.torch.create(normed(), optimizer=rule) as store:
        # The second one leaves after two steps.
        one, two = daskps.run(store, gather, [data(6, 8), data(2, 4)])
        for name in ("1.running_mean", "1.running_var"):
            wanted = (48 * one[name] + 8 * two[name]) / 56
            np.testing.assert_allclose(store[name].pull(), wanted, rtol=1e-12)
        assert int(store["1.num_batches_tracked"].pull()) == 6
        assert store.version == 7


class Tied(Module):
    """One weight under two names, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(4, 1).requires_grad_(requires_grad=False)
        self.double()

    def forward(self, X: Any) -> Any:
        return self.frozen(self.last(torch.tanh(self.first(X))))


def test_tied_and_frozen_parameters(
    here: Any, caplog: pytest.LogCaptureFixture
) -> None:
    batches = data(20)
    with daskps.torch.create(Tied(), optimizer=optim.SGD(0.1)) as store:
        names = ["first.weight", "first.bias", "last.bias"]
        assert [*store.pull()] == [*names, "frozen.weight", "frozen.bias"]
        with caplog.at_level(logging.WARNING):
            daskps.run(store, partial(loop, make=Tied), [batches])
        assert "no gradient" not in caplog.text
        wanted = unchanged(partial(T.SGD, lr=0.1), batches, Tied)
        found = daskps.torch.load_into(Tied(), store)
        assert found.last.weight is found.first.weight
        for name, value in wanted.state_dict().items():
            torch.testing.assert_close(
                found.state_dict()[name], value, rtol=1e-6, atol=0
            )


class Words(Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.emb = nn.Embedding(50, 4, sparse=sparse)
        self.out = nn.Linear(4, 1)
        self.double()

    def forward(self, ids: Any) -> Any:
        return self.out(self.emb(ids).mean(1))


def ids(n: int) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(4)
    y = torch.ones((6, 1), dtype=torch.float64)
    return [(torch.tensor(rng.integers(0, 50, (6, 3))), y) for _ in range(n)]


def test_sparse_embedding_is_a_table(here: Any) -> None:
    batches = ids(30)
    make, rule = partial(Words, sparse=True), optim.Adagrad(0.1)
    with daskps.torch.create(make(), optimizer=rule) as store:
        assert store["emb.weight"].rows == 50
        halves = [[(X[s], y[s]) for X, y in batches] for s in (slice(3), slice(3, 6))]
        daskps.run(store, partial(loop, make=make), halves)
        counted = store.stats()
        wanted = unchanged(
            partial(T.Adagrad, lr=0.1), batches, partial(Words, sparse=False)
        )
        found = daskps.torch.load_into(make(), store)
        torch.testing.assert_close(
            found.emb.weight, wanted.emb.weight, rtol=1e-5, atol=1e-9
        )
        assert counted


@pytest.mark.parametrize("rows", [50, None])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_over_a_table(here: Any, rows: int | None, mode: str) -> None:
    first = np.random.default_rng(5).normal(size=(50, 4))
    spec = daskps.TableSpec(
        rows, 4, dtype="float64", init=0.5 if rows is None else first
    )
    offsets = torch.tensor([0, 2, 2, 9])
    batches = [X.reshape(-1) for X, _ in ids(10)]

    def gather(trainer: Any, part: Any) -> None:
        model = nn.Sequential(daskps.torch.EmbeddingBag(trainer, "emb", mode))
        optimizer = daskps.torch.Optimizer(trainer, model)
        for flat in part:
            # Two passes, of which a step pushes both gradients.
            for _ in range(2):
                (model[0](flat, offsets).square().mean() / 2).backward()
            optimizer.step()

    weight = torch.tensor(first if rows else np.full((50, 4), 0.5), requires_grad=True)
    steps = T.SGD([weight], 0.5)
    for flat in batches:
        steps.zero_grad()
        functional.embedding_bag(
            flat, weight, offsets, mode=mode
        ).square().mean().backward()
        steps.step()
    with daskps.create({"emb": spec}, optimizer=optim.SGD(0.5)) as store:
        daskps.run(store, gather, [batches])
        found = store["emb"].pull(np.arange(50))
        np.testing.assert_allclose(found, weight.detach().numpy(), rtol=1e-6)
        bag = daskps.torch.EmbeddingBag(store, "emb", mode)
        assert bag(torch.arange(50).reshape(25, 2)).shape == (25, 4)


def test_load_into_with_an_asynchronous_client(client: Client) -> None:
    address = client.scheduler_info()["address"]

    async def load() -> None:
        async with Client(address, asynchronous=True) as other:
            make = partial(Words, sparse=True)
            async with daskps.torch.create(make(), client=other) as store:
                model = make()
                nn.init.zeros_(model.emb.weight)
                found = await daskps.torch.load_into(model, store)
                assert torch.equal(found.emb.weight, make().emb.weight)
                assert torch.equal(found.out.weight, make().out.weight)

    asyncio.run(load())


def test_batches_come_as_modules_and_losses_take_them(here: Any) -> None:
    """Columns of float64 for a module of float32, labels of int32 for a loss of int64."""
    X, y = np.random.default_rng(0).normal(size=(40, 4)), np.arange(40, dtype="i4") % 3

    def make() -> Any:
        return nn.Linear(4, 3)

    with daskps.torch.create(make(), optimizer=optim.SGD(0.1)) as store:
        loss = functional.cross_entropy
        found = daskps.torch.train_module(store, make, loss, X, y, epochs=2)
        assert len(found.history) == 2


def test_modules_of_a_process_share_a_view(client: Client) -> None:
    def predicted(store: Any) -> Any:
        models = [daskps.torch.view(Tied(), store) for _ in range(2)]
        at = {p.data_ptr() for model in models for p in model.parameters()}
        with torch.no_grad():
            found = models[0](torch.ones(1, 4, dtype=torch.float64))
        training = models[0].training or any(
            p.requires_grad for p in models[0].parameters()
        )
        return len(at), training, float(found)

    with daskps.torch.create(Tied(), client=client) as store:
        with torch.no_grad():
            wanted = float(Tied()(torch.ones(1, 4, dtype=torch.float64)))
        # Five tensors in memory: the tied one once.
        assert client.submit(predicted, store).result() == (5, False, wanted)
        with pytest.raises(ValueError, match="other shapes"):
            daskps.torch.view(Wide(), store)
        with pytest.raises(daskps.UnknownParameterError, match="'0"):
            daskps.torch.view(net(), store)


class Wide(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 2)


def mse(output: Any, y: Any) -> Any:
    return functional.mse_loss(output[:, 0], y)


def gradient(params: Any, X: Any, y: Any) -> Any:
    model = net()
    for name, value in params.items():
        model.get_parameter(name).data = torch.tensor(value)
    loss = mse(model(torch.tensor(X)), torch.tensor(y))
    loss.backward()
    return loss.item(), {n: p.grad.numpy() for n, p in model.named_parameters()}


def test_train_module_has_the_bits_of_train(here: Any) -> None:
    X, y = (torch.cat(some).numpy() for some in zip(*data(5), strict=True))
    y = y[:, 0]
    made = partial(daskps.torch.create, net(), optimizer=optim.Adam(0.01))
    with made() as store, made() as other:
        how: dict[str, Any] = {"epochs": 2, "batch_size": 4}
        found = daskps.torch.train_module(store, net, mse, X, y, **how)
        wanted = daskps.train(other, gradient, X, y, **how)
        assert [e.loss for e in found.history] == [e.loss for e in wanted.history]
        for name, value in found.weights.items():
            assert value.tobytes() == wanted.weights[name].tobytes()
        with pytest.raises(TypeError, match="BatchNorm1d, whose statistics"):
            daskps.torch.train_module(store, normed, mse, X, y)
        with pytest.raises(TypeError, match="pass a function or class"):
            daskps.torch.train_module(store, net(), mse, X, y)
        make = partial(Words, sparse=True)
        with pytest.raises(TypeError, match="sparse=True, which train_module"):
            daskps.torch.train_module(store, make, mse, X, y)


def test_parameters_are_read_and_written_where_they_are(here: Any) -> None:
    def check(trainer: Any, part: Any) -> None:
        model = net()
        at = [p.data_ptr() for p in model.parameters()]
        optimizer = daskps.torch.Optimizer(trainer, model)
        before = model[0].weight.detach().clone()
        functional.mse_loss(model(part[0]), part[1]).backward()
        assert optimizer.step(closure=lambda: 7) == 7
        assert [p.data_ptr() for p in model.parameters()] == at
        assert not torch.equal(model[0].weight, before)

    with daskps.torch.create(net(), optimizer=optim.SGD(0.1)) as store:
        daskps.run(store, check, [data(1)[0]])


def refused(store: Any, work: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        daskps.run(store, work, [data(1)])


def test_refusals(client: Client) -> None:
    def scheduled(trainer: Any, part: Any) -> None:
        optimizer = daskps.torch.Optimizer(trainer, net())
        scheduler = T.lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.step()

    def saved(trainer: Any, part: Any) -> None:
        daskps.torch.Optimizer(trainer, net()).state_dict()

    def more(trainer: Any, part: Any) -> None:
        optimizer = daskps.torch.Optimizer(trainer, net())
        optimizer.add_param_group({"params": [torch.ones(1)]})

    def loading(trainer: Any, part: Any) -> None:
        found = torch.utils.data.DataLoader([1, 2], num_workers=1)
        assert [*found]

    def other(trainer: Any, part: Any) -> None:
        daskps.torch.Optimizer(trainer, nn.Linear(4, 8).double())

    def frozen(trainer: Any, part: Any) -> None:
        daskps.torch.Optimizer(trainer, net().requires_grad_(requires_grad=False))

    with daskps.torch.create(net(), optimizer=optim.SGD(0.1), client=client) as store:
        refused(store, scheduled, ValueError, "daskps.optim.schedules")
        refused(store, saved, TypeError, r"store\.save")
        refused(store, more, TypeError, "those of its model")
        refused(store, other, daskps.UnknownParameterError, "'weight'")
        refused(store, frozen, ValueError, "requires a gradient")
        with pytest.raises(AssertionError) as found:
            daskps.run(store, loading, [None])
        assert any("num_workers=0" in note for note in found.value.__notes__)
        with pytest.raises(ValueError, match="shape"):
            daskps.torch.load_into(nn.Sequential(nn.Linear(4, 9).double()), store)
    with pytest.raises(daskps.LayoutError, match=r"'0\.weight' is bfloat16"):
        daskps.torch.create(net().to(torch.bfloat16), client=client)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        daskps.torch.create({"w": torch.ones(1)}, client=client)
    with pytest.raises(ValueError, match="'max'"):
        daskps.torch.EmbeddingBag(None, "emb", "max")
