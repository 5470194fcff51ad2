from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import types
from unittest import mock

import pytest

import daskps

#: Modules whose names are part of the public contract; those that exist are checked.
PUBLIC = [
    "daskps",
    "daskps.aio",
    "daskps.codecs",
    "daskps.compat.bigdl",
    "daskps.compat.multiverso",
    "daskps.compat.mxnet",
    "daskps.compat.mxnet.kvstore",
    "daskps.compat.singa",
    "daskps.compat.systemml",
    "daskps.errors",
    "daskps.init",
    *(f"daskps.{name}" for name in ("jax", "torch") if importlib.util.find_spec(name)),
    "daskps.optim",
    "daskps.optim.schedules",
    "daskps.sklearn",
    "daskps.testing",
    "daskps.training.callbacks",
    "daskps.training.stop",
]

#: What tab completion shows of the handles, and nothing that connects their layers.
SHOWN = {
    "ParameterStore": "add aggregate apply assign bound close delete device layout name "
    "names nbytes optimizer placement pull pull_async push push_async pushpull drain replica "
    "reshard save scale_lr snapshot stats to_json uid version versions view visualize",
    "ParameterArray": "add assign dot dtype max mean min name nbytes ndim norm pull "
    "push region shape size sum to_dask_array",
    "Trainer": "add allreduce assign barrier clock finish leave prefetch "
    "pull pull_async push push_async pushpull rank size tick",
}


def existing(names: list[str]) -> list[types.ModuleType]:
    return [
        importlib.import_module(name)
        for name in names
        if importlib.util.find_spec(name)
    ]


def test_all_is_the_public_namespace() -> None:
    """What `import daskps` shows, less its modules, is what it promises."""
    submodules = {module.name for module in pkgutil.iter_modules(daskps.__path__)}
    # A module of `training` whose names are used as `daskps.stop.steps`.
    submodules |= {"stop"}
    shown = {
        name
        for name, value in vars(daskps).items()
        if not name.startswith("_")
        and not (inspect.ismodule(value) and name in submodules)
        and name != "annotations"
    }
    promised = {
        name
        for name in vars(daskps)["__all__"]
        if not inspect.ismodule(getattr(daskps, name)) and not name.startswith("__")
    }
    assert promised == shown


def test_all_is_sorted_and_without_repeats() -> None:
    names = vars(daskps)["__all__"]
    # The order is ruff's to keep (RUF022).
    assert len(names) == len(set(names))


@pytest.mark.parametrize("module", existing(PUBLIC), ids=lambda m: m.__name__)
def test_every_promised_name_exists(module: types.ModuleType) -> None:
    assert [name for name in vars(module)["__all__"] if not hasattr(module, name)] == []


def test_public_modules_are_reached_from_the_package() -> None:
    for name in ("init", "optim"):
        assert name in vars(daskps)["__all__"]
        assert inspect.ismodule(getattr(daskps, name))


@pytest.mark.parametrize("cls", SHOWN)
def test_tab_completion_shows_verbs_and_properties_alone(cls: str) -> None:
    made = {
        "ParameterStore": lambda: daskps.ParameterStore("0", "model"),
        "ParameterArray": lambda: daskps.ParameterArray(*[mock.MagicMock()] * 2),
        "Trainer": lambda: daskps.Trainer(*[mock.MagicMock()] * 3),
    }
    names = [name for name in dir(made[cls]()) if not name.startswith("_")]
    assert sorted(names) == sorted(SHOWN[cls].split())
