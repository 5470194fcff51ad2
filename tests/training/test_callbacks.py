from __future__ import annotations

import io
import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

from daskps.training.callbacks import EVENTS, Log, ProgressBar, check, notify


@dataclass
class Entry:
    epoch: int = 0
    loss: float | None = 0.25
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.5
    staleness: int = 0


@dataclass
class Run:
    store: Any = "a store"
    clock: int = 0
    history: list[Entry] = field(default_factory=list)
    epochs: int = 4


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Recorder:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_epoch(self, run: Any) -> None:
        self.seen.append(run)


def whole_run(*callbacks: object) -> None:
    """Send the events of a run of one epoch."""
    run = Run()
    notify(callbacks, "on_start", run)
    run.clock = 7
    notify(callbacks, "on_round", run)
    run.history.append(Entry(metrics={"accuracy": 0.9375}))
    notify(callbacks, "on_epoch", run)
    notify(callbacks, "on_failover", run)
    notify(callbacks, "on_stop", run)


def test_notify_calls_those_that_listen() -> None:
    recorder, run = Recorder(), Run()
    for event in EVENTS:
        notify([recorder, ProgressBar(io.StringIO())], event, run)
    assert recorder.seen == [run]


def test_check_keeps_callbacks_in_order() -> None:
    callbacks = [Recorder(), Log(), ProgressBar()]
    assert check(iter(callbacks)) == tuple(callbacks)
    assert check(()) == ()


class Misspelt:
    def on_epochs(self, run: Any) -> None: ...


class NotCallable:
    on_epoch = "text"


@pytest.mark.parametrize("bad", [Misspelt(), NotCallable(), print, None, 3])
def test_check_refuses_what_never_hears_anything(bad: Any) -> None:
    with pytest.raises(
        TypeError, match="on_start, on_round, on_epoch, on_failover, on_stop"
    ):
        check([bad])


def test_check_refuses_a_class_and_a_lone_callback() -> None:
    with pytest.raises(TypeError, match=r"give Log\(\)"):
        check([Log])
    with pytest.raises(TypeError, match=r"callbacks=\[\.\.\.\]"):
        check(Log())  # type: ignore[arg-type]


def test_progress_bar_draws_one_line() -> None:
    file = io.StringIO()
    whole_run(ProgressBar(file))
    text = file.getvalue()
    assert text.endswith("\n")
    assert text.count("\n") == 1
    lines = [line.rstrip() for line in text.split("\r")[1:]]
    assert lines == [
        f"[{'':40}] | 0/4 epochs | round 0",
        f"[{'':40}] | 0/4 epochs | round 7",
        f"[{'#' * 10:40}] | 1/4 epochs | round 7 | loss 0.25, accuracy 0.9375 | 0.5 s",
        f"[{'#' * 10:40}] | 1/4 epochs | round 7 | loss 0.25, accuracy 0.9375 | 0.5 s",
    ]


def test_progress_bar_wipes_a_longer_line() -> None:
    file, run = io.StringIO(), Run(clock=1000)
    bar = ProgressBar(file)
    bar.on_round(run)
    run.clock = 1
    bar.on_round(run)
    *_, long, short = file.getvalue().split("\r")
    assert len(short) == len(long)


def test_progress_bar_is_quiet_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, terminal = io.StringIO(), Terminal()
    monkeypatch.setattr("sys.stdout", pipe)
    whole_run(ProgressBar())
    assert pipe.getvalue() == ""
    monkeypatch.setattr("sys.stdout", terminal)
    whole_run(ProgressBar())
    assert terminal.getvalue().endswith("\n")


def test_progress_bar_without_epochs_or_loss() -> None:
    file = io.StringIO()
    ProgressBar(file).on_stop(Run(epochs=0, history=[Entry(loss=None)]))
    assert "no loss" in file.getvalue()


def test_log_says_what_happens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "daskps"):
        whole_run(Log())
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "run on 'a store' starts"),
        ("INFO", "epoch 0: loss 0.25, accuracy 0.9375, 0.50 s, staleness 0"),
        ("WARNING", "run on 'a store': failover at clock 7"),
        ("INFO", "run on 'a store' ends at clock 7 after 1 epochs"),
    ]


def test_log_uses_the_logger_and_level_given(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "mine"):
        Log(logging.getLogger("mine"), logging.DEBUG).on_start(Run())
    assert [(r.name, r.levelno) for r in caplog.records] == [("mine", logging.DEBUG)]
