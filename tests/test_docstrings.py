"""The numpydoc checks of pyproject.toml, on everything that is public.

`numpydoc lint` reads files and so cannot tell the public names from the others, nor
what a dataclass takes; it runs over the whole package with the remaining checks.
Here too: every public name shows an example, which pytest runs as a doctest, and
every one that asks the cluster says what it raises.
"""

from __future__ import annotations

import doctest
import inspect
import tomllib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name

import pytest
from numpydoc.docscrape import NumpyDocString
from numpydoc.validate import validate

import daskps
from daskps.training.callbacks import EVENTS
from tests.test_exported_members import PUBLIC, existing

CONFIG = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
CHECKS = set(CONFIG["tool"]["numpydoc_validation"]["checks"])
#: Functions beside the callbacks, for who calls them.
CALLED_BY_TRAIN = {"check", "chosen", "end", "notify", "step_aside"}
#: Methods of codecs that are none of users: see `daskps/codecs/base.py`.
OF_CODECS = {
    *("decode_piece", "encode_pieces", "fits"),
    *("is_fixed", "of_rows", "takes_rows"),
}


def public_names() -> Iterator[str]:
    """Give the full name of each public function, class and method."""
    for module in existing(PUBLIC):
        for name in vars(module).get("__all__", ()):  # else test_exported_members fails
            value = getattr(module, name)
            if not (inspect.isclass(value) or inspect.isfunction(value)):
                continue
            yield f"{value.__module__}.{value.__qualname__}"
            if inspect.isclass(value) and not issubclass(value, BaseException):
                yield from methods(value)


def methods(cls: type) -> Iterator[str]:
    """Give the public methods of a class, less those described at their interface."""
    for name, value in vars(cls).items():
        if name in {*EVENTS, *OF_CODECS} or any(
            name in vars(base) for base in cls.__mro__[1:]
        ):
            continue
        function = getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(function):
            # One line is enough where there is nothing to give and nothing to get.
            doc = inspect.getdoc(function) or ""
            takes = len(inspect.signature(function).parameters) > 1
            if takes or not doc or "\n" in doc:
                yield f"{cls.__module__}.{cls.__qualname__}.{name}"


@pytest.mark.parametrize("name", sorted(set(public_names())))
def test_docstring_is_complete(name: str) -> None:
    report = validate(name)
    assert report["docstring"], f"{name} has no docstring"
    assert [error for error in report["errors"] if error[0] in CHECKS] == []


def test_a_bad_docstring_is_found() -> None:
    codes = {code for code, _ in validate(f"{__name__}.bad")["errors"]}
    assert {"PR01", "RT01"} <= codes & CHECKS


def bad(x: int) -> int:
    """Return it."""
    return x


def shown_names() -> Iterator[str]:
    """Give the full name of everything public that needs an example."""
    for module in existing(PUBLIC):
        for name in vars(module).get("__all__", ()):
            value = getattr(module, name)
            if inspect.ismodule(value):
                yield value.__name__
            if not getattr(value, "__module__", "").startswith("daskps"):
                continue
            if inspect.isfunction(value) and name not in CALLED_BY_TRAIN:
                yield f"{module.__name__}.{name}"
            if inspect.isclass(value):
                yield f"{module.__name__}.{name}"
                if module is daskps:
                    yield from verbs(name, value)


def verbs(name: str, cls: type) -> Iterator[str]:
    """Give the public methods of a class, inherited ones too, less callbacks'."""
    for method, value in inspect.getmembers(cls, inspect.isroutine):
        ours = getattr(value, "__module__", None) or ""
        if method.startswith("_") or method in EVENTS:
            continue
        if ours.startswith("daskps"):
            yield f"daskps.{name}.{method}"


def members() -> Iterator[tuple[str, set[str]]]:
    """Give each public method and property, and the names under which it may be shown.

    Those are of its own class, of bases that are public, and of others that have it of
    the same base.
    """
    classes = {
        f"{module.__name__}.{name}": value
        for module in existing(PUBLIC)
        for name in vars(module).get("__all__", ())
        if inspect.isclass(value := getattr(module, name))
        and value.__module__.startswith("daskps")
    }
    for of, cls in classes.items():
        for name, _ in inspect.getmembers_static(cls, is_member):
            [base, *others] = [b for b in cls.__mro__ if name in vars(b)]
            foreign = any(
                not b.__module__.startswith("daskps") for b in (base, *others)
            )
            if name.startswith("_") or name in {*EVENTS, *OF_CODECS} or foreign:
                continue
            yield (
                f"{of}.{name}",
                {
                    f"{other}.{name}"
                    for other, also in classes.items()
                    if also in cls.__mro__ or base in also.__mro__
                },
            )


def is_member(value: object) -> bool:
    kinds = property, cached_property, classmethod, staticmethod
    return inspect.isfunction(value) or isinstance(value, kinds)


@pytest.mark.parametrize("name", sorted(set(shown_names())))
def test_docstring_has_an_example(name: str) -> None:
    assert examples(inspect.getdoc(resolve_name(name)))


def raising_names() -> Iterator[str]:
    """Give the full name of everything public that asks the cluster for something."""
    for name in vars(daskps)["__all__"]:
        value = getattr(daskps, name)
        if inspect.isfunction(value) and takes_timeout(value):
            yield f"daskps.{name}"
        if inspect.isclass(value):
            for verb in verbs(name, value):
                if takes_timeout(resolve_name(verb)) or verb in QUIETLY:
                    yield verb


#: They ask the cluster too, for as long as that takes.
QUIETLY = {"daskps.ParameterStore.bound", "daskps.Trainer.finish"}


def takes_timeout(function: Callable[..., object]) -> bool:
    return "timeout" in inspect.signature(function).parameters


@pytest.mark.parametrize("name", sorted(set(raising_names())))
def test_docstring_says_what_is_raised(name: str) -> None:
    assert raises(inspect.getdoc(resolve_name(name)))


def raises(doc: str | None) -> bool:
    return bool(NumpyDocString(doc or "")["Raises"])


def test_a_missing_raises_is_found() -> None:
    names = set(raising_names())
    assert {"daskps.train", "daskps.ParameterArray.pull", *QUIETLY} <= names
    assert "daskps.Trainer.tick" in names
    assert not raises("Return it.\n\nReturns\n-------\nint\n    It.")


def examples(doc: str | None) -> list[doctest.Example]:
    section = "\n".join(NumpyDocString(doc or "")["Examples"])
    return doctest.DocTestParser().get_examples(section)


def test_a_missing_example_is_found() -> None:
    names = set(shown_names())
    assert {"daskps.train", "daskps.ParameterStore.pull", "daskps.init"} <= names
    assert {"daskps.Trainer.tick", "daskps.optim.schedules.step"} <= names
    assert {"daskps.ParameterStore.device", "daskps.Version.of"} <= dict(
        members()
    ).keys()
    assert not examples("Return it.\n\nExamples\n--------\nNone yet.")
    assert not examples("Return it.\n\n>>> 1  # outside of the section\n1")
