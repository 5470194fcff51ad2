from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Iterator

import pytest
from distributed.core import error_message
from distributed.protocol.pickle import loads

from daskps import errors
from daskps.errors import DaskPSError

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, BaseException)
]


def sample(cls: type[DaskPSError]) -> DaskPSError:
    """Make an error with as many arguments as its constructor asks for."""
    ours = [base for base in cls.__mro__ if issubclass(base, DaskPSError)]
    if not any("__init__" in vars(base) for base in ours):
        return cls("what was asked, where, why and what to do")
    parameters = list(inspect.signature(cls).parameters.values())
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    values: dict[str, object] = {"int": 3, "int | None": None, "bool": True}
    values |= {"str": "some text", "str | None": None, "Any": (1, "what there is")}
    return cls(*(values[p.annotation] for p in parameters))


@pytest.mark.parametrize("cls", CLASSES)
def test_error_survives_pickling(cls: type[DaskPSError]) -> None:
    error = sample(cls)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is cls
        assert str(again) == str(error)
        assert again.args == error.args
        assert vars(again) == vars(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_error_survives_dask(cls: type[DaskPSError]) -> None:
    """What `distributed` sends between processes is the error itself."""
    error = sample(cls)
    message = error_message(error)["exception"]
    again = loads(message.data)
    assert type(again) is cls
    assert str(again) == str(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_error_is_exported_documented_and_below_the_root(
    cls: type[DaskPSError],
) -> None:
    assert issubclass(cls, DaskPSError)
    assert cls.__name__ in errors.__all__
    assert cls.__doc__
    assert not issubclass(cls, OSError)


def test_text_of_a_key_error_is_not_its_repr() -> None:
    assert str(errors.UnknownParameterError("no 'w' in the store")) == (
        "no 'w' in the store"
    )


def printed_tree(text: str) -> Iterator[tuple[str, str, str | None]]:
    """Give name, parent and second base of each line of the docstring's tree."""
    path: list[str] = []
    for line in text.splitlines():
        match = re.match(r"    ([│├└─ ]*)(\w+)(?:\((\w+)\))?", line)
        if match and (match[1] or not path):
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            yield match[2], path[depth - 1] if depth else "", match[3]


def test_tree_in_the_docstring_is_the_tree() -> None:
    def bases(cls: type) -> tuple[str, str | None]:
        names = [base.__name__ for base in cls.__bases__]
        if cls is DaskPSError:
            return "", names[0]
        return names[0], names[1] if len(names) > 1 else None

    real = {cls.__name__: bases(cls) for cls in CLASSES}
    tree = (errors.__doc__ or "").split("::", 1)[1].split("\n\nA message", 1)[0]
    printed = {name: (parent, second) for name, parent, second in printed_tree(tree)}
    # A built-in that is inherited from the parent is printed or left out.
    assert printed.keys() == real.keys()
    for name, (parent, second) in real.items():
        assert printed[name][0] == parent, name
        assert printed[name][1] == second, name
