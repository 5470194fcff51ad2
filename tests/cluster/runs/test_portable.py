"""What is heard of errors that tasks raise, when Dask has sent them."""

from __future__ import annotations

import threading
import traceback
from typing import Any

import pytest
from distributed.core import clean_exception, error_message

from daskps.cluster.runs.portable import sends_errors
from daskps.errors import PushRejectedError


class Held(Exception):  # noqa: N818 - a user's
    """Holds what cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Two(Exception):  # noqa: N818 - a user's
    """Is pickled, and cannot be made again of its text alone."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def of_user(error: Exception) -> None:
    raise error


def heard(fail: Any) -> BaseException:
    """Return what a caller gets of a task that fails."""
    try:
        sends_errors(fail)()
    except BaseException as error:  # noqa: BLE001 - what a worker does
        sent: Any = error_message(error)
    sent = {k: getattr(v, "data", v) for k, v in sent.items()}
    _, found, trace = clean_exception(**sent)
    assert found is not None
    return found.with_traceback(trace)


@pytest.mark.parametrize("error", [Held("mine"), Two("mine", "yours")], ids=repr)
def test_it_says_whose_it_is_and_where(error):
    def fail():
        try:
            of_user(error)
        except Exception as raised:
            raised.add_note("raised in trainer 1 of 2")
            raise

    found = heard(fail)
    assert type(found) is RuntimeError
    assert str(found).startswith(f"{type(error).__name__}: mine")
    assert found.__notes__ == ["raised in trainer 1 of 2"]
    assert "of_user" in [
        frame.name for frame in traceback.extract_tb(found.__traceback__)
    ]


def test_what_it_has_caused_stays_what_it_is():
    def fail():
        try:
            of_user(Held("mine"))
        except Held as error:
            raise PushRejectedError("encode raised Held: mine") from error

    found = heard(fail)
    assert type(found) is PushRejectedError
    assert str(found.__cause__) == "Held: mine"


def test_errors_that_can_be_sent_are_the_same():
    error, cause = ValueError("mine"), KeyError("k")

    def fail():
        raise error from cause

    with pytest.raises(ValueError, match="mine") as raised:
        sends_errors(fail)()
    assert raised.value is error
    assert raised.value.__cause__ is cause


def test_a_circle_of_causes_ends():
    error, cause = ValueError("mine"), KeyError("k")
    cause.__context__ = error

    def fail():
        raise error from cause

    with pytest.raises((ValueError, RuntimeError), match="mine"):
        sends_errors(fail)()
