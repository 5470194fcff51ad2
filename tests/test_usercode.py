"""What code of the user's may raise where it runs, and what becomes of it."""

from __future__ import annotations

import asyncio
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from daskps import init, optim, reduction
from daskps.cluster.host.rules import initial_slots
from daskps.cluster.upstream import dumps, loads
from daskps.optim import Rule, bind
from daskps.training import callbacks
from daskps.training.data import parts
from daskps.usercode import holding_interrupts, user_code

CASES = [
    (SystemExit(3), r"called sys.exit\(3\); raise an error instead"),
    (SystemExit(), r"called sys.exit\(\)"),
    (SystemExit("over"), r"called sys.exit\('over'\)"),
    (KeyboardInterrupt(), r"raised KeyboardInterrupt;"),
    (asyncio.CancelledError("so"), r"raised CancelledError \(so\)"),
    (GeneratorExit(), "raised GeneratorExit"),
    (StopIteration(4), r"raised StopIteration \(4\), as next\(\) does at the end"),
    (StopIteration(), "raised StopIteration, as next"),
]


def elsewhere(function):
    """Call a function in a thread that is not the main one."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


def raising(error):
    def function(*args):
        raise error

    return function


@pytest.mark.parametrize(("error", "said"), CASES)
def test_what_is_no_error_becomes_one(error, said):
    with pytest.raises(RuntimeError, match="the gradient " + said) as found:
        elsewhere(user_code("the gradient")(raising(error)))
    assert found.value.__cause__ is error


def test_errors_and_results_pass_as_they_are():
    error = ValueError("no")
    with pytest.raises(ValueError, match="no") as found:
        user_code("the gradient")(raising(error))()
    assert found.value is error
    assert user_code("the gradient")(max)(1, 2) == 2


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_of_the_main_thread_stays_one():
    with pytest.raises(KeyboardInterrupt), user_code("the gradient"):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("fails", [False, True])
def test_ctrl_c_is_held_until_the_end(fails):
    done = []

    def rule():
        signal.raise_signal(signal.SIGINT)
        done.append(True)
        if fails:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), holding_interrupts(), user_code("a rule"):
        rule()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_what_a_user_raises_where_ctrl_c_is_held_is_no_ctrl_c():
    said = pytest.raises(RuntimeError, match="a rule raised KeyboardInterrupt")
    with said, holding_interrupts(), holding_interrupts(), user_code("a rule"):
        raise KeyboardInterrupt


def test_other_threads_hold_nothing():
    handler = signal.getsignal(signal.SIGINT)

    def within():
        with holding_interrupts():
            return signal.getsignal(signal.SIGINT)

    assert elsewhere(within) is handler


def test_handlers_of_others_stay():
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with holding_interrupts():
            signal.raise_signal(signal.SIGINT)
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


# -- everywhere ----------------------------------------------------------------


@dataclass(frozen=True)
class Leaving(Rule):
    """A rule that ends the process in the method `where`."""

    lr: float = 0.1
    where: str = ""

    def at(self, name):
        if self.where == name:
            sys.exit(name)

    @property
    def slots(self):
        self.at("slots")
        return ()

    def prepare(self, step, lr):
        self.at("prepare")
        return (lr,)

    @property
    def update(self):
        self.at("update")
        return lambda w, g, lr: w - lr * g


class Unreadable:
    """What ends the process that unpickles it."""

    def __reduce__(self):
        return sys.exit, ("read",)


class Unwritable:
    """What ends the process that pickles it."""

    def __reduce__(self):
        sys.exit("written")


class Callback:
    """A callback that ends the process."""

    def on_round(self, run):
        sys.exit("round")


class Rows:
    """Data that end the process that reads them."""

    shape, dtype = (8, 1), np.dtype("f8")

    def __len__(self):
        return 8

    def __getitem__(self, rows):
        sys.exit("rows")


def leave(*args):
    sys.exit("here")


def places():
    """Calls of the user's code, and who it is that did what."""
    stacked = {0: ({0: np.ones(2)}, {0: 1.0})}
    yield (
        "the reduce function called sys.exit('here')",
        lambda: reduction.reduce_all(stacked, 1, leave),
    )
    yield (
        "the initializer of parameter 'w' called sys.exit('here')",
        lambda: init.fill(np.empty(3), leave, name="w", shape=(3,), seed=0),
    )
    yield "the schedule called", lambda: optim.SGD(leave).scalars(1)
    yield (
        "prepare of the optimizer called",
        lambda: Leaving(where="prepare").scalars(1),
    )
    yield (
        "the optimizer Leaving called",
        lambda: initial_slots(Leaving(0.1, "slots")),
    )
    yield "the optimizer Leaving called", lambda: bind(Leaving(0.1, "update"), "f4")
    yield "what was pickled called sys.exit('read')", lambda: loads(dumps(Unreadable()))
    yield "what was to be pickled called", lambda: dumps(Unwritable())
    yield (
        "taking rows of the data called sys.exit('rows')",
        lambda: parts._each(Rows(), [slice(0, 4)]),
    )
    yield (
        "on_round of Callback called sys.exit('round')",
        lambda: callbacks.notify([Callback()], "on_round", None),  # type: ignore[arg-type]  # a stand-in
    )


@pytest.mark.parametrize(("said", "call"), [*places()])
def test_code_of_the_users_never_ends_its_thread(said, call):
    with pytest.raises(RuntimeError) as found:
        call()
    assert str(found.value).startswith(said)
