from __future__ import annotations

import io
import logging
import re
import sys
import threading
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from daskps.training import callbacks
from daskps.training.callbacks import (
    EVENTS,
    Log,
    ProgressBar,
    check,
    chosen,
    notify,
)
from daskps.training.result import Epoch, RunStatus

#: What depends on the clock.
TIMES = re.compile(r" \[[\d:]+.*?(?:rounds|rounds/s|round)(?=[,\]])")


def epoch(**metrics: float) -> Epoch:
    return Epoch(0, loss=0.25, metrics=metrics, seconds=0.5, staleness=0)


def progress() -> RunStatus:
    store: Any = "a store"
    return RunStatus(store, epochs=4, rounds=28)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def closed() -> io.StringIO:
    file = io.StringIO()
    file.close()
    return file


def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal for standard error, outside of pytest; not for other phases of it."""
    found = Terminal()
    monkeypatch.setattr("sys.stderr", found)
    monkeypatch.delenv("PYTEST_VERSION", raising=False)
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    return found


class Recorder:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_epoch(self, run: Any) -> None:
        self.seen.append(run)


def whole_run(*callbacks: object) -> None:
    """Send the events of a run of one epoch."""
    run = progress()
    notify(callbacks, "on_start", run)
    run.clock = run.slowest = 7
    run.loss = 0.5
    notify(callbacks, "on_round", run)
    run.loss = None
    run.history.append(epoch(accuracy=0.9375))
    notify(callbacks, "on_epoch", run)
    notify(callbacks, "on_failover", run)
    notify(callbacks, "on_stop", run)


def test_notify_calls_those_that_listen() -> None:
    recorder, run = Recorder(), progress()
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
        check(Log())  # type: ignore[arg-type]  # no callback


def shown(file: io.StringIO) -> list[str]:
    """What was drawn, less what depends on the clock."""
    lines = [line.strip() for line in re.split(r"[\r\n]", file.getvalue())]
    return list(dict.fromkeys(TIMES.sub("", line) for line in lines if line))


def test_progress_bar_draws_one_line() -> None:
    file = io.StringIO()
    whole_run(ProgressBar(file))
    assert file.getvalue().endswith("\n")
    assert file.getvalue().count("\n") == 1
    quarter, rest = f"25%|##5{'':7}|", ", accuracy 0.9375]"
    assert shown(file) == [
        f"epoch 1/4:   0%|{'':10}| 0/28]",
        f"epoch 1/4:  {quarter} 7/28, loss 0.5]",
        f"epoch 2/4:  {quarter} 7/28, loss 0.25{rest}",
        # It was told to stop: there are no more rounds to come.
        f"epoch 2/4: 100%|{'#' * 10}| 7/7, loss 0.25{rest}",
    ]


def test_progress_bar_says_that_data_is_computed() -> None:
    file = io.StringIO()
    bar = ProgressBar(file)
    for _ in range(2):
        bar.on_data(progress())
        whole_run(bar)
    first, second, end = file.getvalue().split("\n")
    assert end == ""
    for text in (first, second):
        said, *lines = [line.strip() for line in text.split("\r") if line.strip()]
        assert said == "computing the data"
        assert "28" in lines[0]
        assert "7/7" in lines[-1]


def test_progress_bar_of_data_that_fails_leaves_no_line() -> None:
    file = io.StringIO()
    bar = ProgressBar(file)
    bar.on_data(progress())
    bar.close()
    bar.on_start(progress())
    bar.close()
    assert [line[:9] for line in shown(file)] == ["computing", "epoch 1/4"]


def test_progress_bar_of_a_failed_run_ends_its_line() -> None:
    file = io.StringIO()
    bar = ProgressBar(file)
    bar.on_start(progress())
    bar.close()
    bar.close()
    assert file.getvalue().count("\n") == 1
    assert file.getvalue().endswith("\n")


class FakeTqdm:
    """What a progress bar uses of tqdm's class."""

    made: ClassVar[list[FakeTqdm]] = []

    def __init__(self, **options: object) -> None:
        self.total = options["total"]
        self.n = self.last_print_n = 0
        self.last_print_t = 0.0
        self.said: list[object] = []
        self.made.append(self)

    def set_description(self, text: str, *, refresh: bool) -> None:
        self.said.append(text)

    def set_postfix_str(self, text: str, *, refresh: bool) -> None:
        self.said.append(text)

    def update(self, n: int) -> None:
        self.n += n
        self.said.append(n)

    def refresh(self) -> None:
        self.said.append("refresh")

    def close(self) -> None:
        self.said.append("close")


def test_tqdm_is_told_the_rounds_since_the_first_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=FakeTqdm))
    monkeypatch.setattr(FakeTqdm, "made", [])
    bar, run = ProgressBar(io.StringIO()), progress()
    bar.close()
    for done in (0, 7, 7, 28):
        run.slowest, run.loss = done, float(done)
        bar.on_round(run)
    bar.close()
    [found] = FakeTqdm.made
    assert (found.total, found.n, vars(type(found))["monitor_interval"]) == (28, 28, 0)
    rounds = [s for s in found.said if s != "epoch 1/4" and "loss" not in str(s)]
    assert rounds == ["refresh", "refresh", "refresh", 21, "close"]
    assert found.last_print_t > 0


def test_nothing_is_shown_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    file = io.StringIO()
    bar = ProgressBar(file)
    bar.on_data(progress())
    bar.clear()
    whole_run(bar)
    assert file.getvalue() == ""


def test_progress_bar_that_cannot_be_drawn_is_given_up() -> None:
    """A terminal that has gone ends no run."""
    file = io.StringIO()
    bar = ProgressBar(file)
    file.close()
    whole_run(bar)
    bar.close()


def test_progress_bar_is_quiet_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    whole_run(ProgressBar())
    assert pipe.getvalue() == ""


def test_progress_bar_is_drawn_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = at_a_terminal(monkeypatch)
    threads = set(threading.enumerate())
    bar = ProgressBar()
    bar.on_data(progress())
    assert "computing the data" in terminal.getvalue()
    whole_run(bar)
    said = terminal.getvalue()
    last = [line for line in re.split(r"[\r\n]", said) if line.strip()][-1]
    for text in ("7/7", "2/4", "loss 0.25", "accuracy 0.9375"):
        assert text in last
    assert said.endswith("\n")
    assert ("it/s" in said, "left" in said) == (False, False)
    assert set(threading.enumerate()) == threads


def test_auto_is_a_bar_where_a_person_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_a_terminal(monkeypatch)
    assert [type(c) for c in chosen("auto")] == [ProgressBar]
    for found in (io.StringIO(), None, closed()):
        monkeypatch.setattr("sys.stderr", found)
        assert chosen("auto") == ()
    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    assert [type(c) for c in chosen("auto")] == [ProgressBar]
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", shell)
    assert chosen("auto") == ()


def test_auto_is_silent_in_tests_and_in_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_a_terminal(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setenv("PYTEST_CURRENT_TEST", "of a parent")
        assert chosen("auto") == ()
    with monkeypatch.context() as patch:
        patch.setattr(callbacks, "current_task", lambda: ("key", 0.0))
        assert chosen("auto") == ()
    assert chosen("auto")


def test_silence_and_what_callbacks_may_be() -> None:
    assert chosen(()) == ()
    log = Log()
    assert chosen([log]) == (log,)
    with pytest.raises(ValueError, match=r"callbacks='bar'.*'auto'.*\(\)"):
        chosen("bar")


def test_log_says_what_happens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "daskps"):
        notify([Log()], "on_data", progress())
        whole_run(Log())
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "run on 'a store' computes its data"),
        ("INFO", "run on 'a store' starts"),
        ("INFO", "epoch 0: loss 0.25, accuracy 0.9375, 0.50 s, staleness 0"),
        ("WARNING", "run on 'a store': failover at clock 7"),
        ("INFO", "run on 'a store' ends at clock 7 after 1 epochs"),
    ]


def test_log_uses_the_logger_and_level_given(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "mine"):
        Log(logging.getLogger("mine"), logging.DEBUG).on_start(progress())
    assert [(r.name, r.levelno) for r in caplog.records] == [("mine", logging.DEBUG)]
