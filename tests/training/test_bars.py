from __future__ import annotations

import io

import pytest

from daskps.training.bars import State, Text, Tqdm


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def last(file: io.StringIO) -> str:
    return file.getvalue().rpartition("\r")[2]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_text_says_rate_and_time_left_since_the_first_round(clock: Clock) -> None:
    """What came before it, to start trainers and to compile, is no round's time."""
    file = io.StringIO()
    bar = Text(file, clock)
    bar.draw(State(0, 400, 1, 2))
    assert last(file) == f"[{'':20}]   0% | round 0/400 | epoch 1/2"
    clock.seconds = 30.0
    bar.draw(State(100, 400, 1, 2))
    assert "rounds/s" not in last(file)
    clock.seconds = 32.0
    bar.draw(State(200, 400, 1, 2, "loss 0.5"))
    assert last(file) == (
        f"[{'#' * 10:20}]  50% | round 200/400 | epoch 1/2 | loss 0.5 | 50 rounds/s | "
        f"0:04 left"
    )
    clock.seconds = 4000.0
    bar.draw(State(400, 400, 2, 2, "loss 0.25"))
    assert last(file).endswith("| 1:06:40")
    bar.close()
    assert file.getvalue().endswith("\n")


def test_text_of_a_run_without_epochs(clock: Clock) -> None:
    file = io.StringIO()
    bar = Text(file, clock)
    bar.draw(State(1, 0, 0, 0))
    assert last(file) == "round 1 | 0:00"
    clock.seconds = 2.0
    bar.draw(State(2001, 0, 0, 0))
    assert last(file) == "round 2001 | 1e+03 rounds/s | 0:02"


def test_text_wipes_a_longer_line(clock: Clock) -> None:
    file = io.StringIO()
    bar = Text(file, clock)
    bar.draw(State(1000, 0, 0, 0))
    bar.draw(State(1, 0, 0, 0))
    *_, long, short = file.getvalue().split("\r")
    assert len(short) == len(long)


def test_text_does_not_wrap(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " 20% | round 2/10 | epoch 1/2 | loss 1"
    file = io.StringIO()
    Text(file, clock).draw(State(2, 10, 1, 2, "loss 1"))
    assert last(file) == f"[{'#' * 4:20}] {text}"
    for columns, shown in ((52, f"[{'#' * 2:10}] {text}"), (30, text[:29])):
        monkeypatch.setenv("COLUMNS", str(columns))
        file = Terminal()
        Text(file, clock).draw(State(2, 10, 1, 2, "loss 1"))
        assert last(file) == shown


class FakeTqdm:
    """What `Tqdm` uses of tqdm's class."""

    def __init__(self, **options: object) -> None:
        self.total = options["total"]
        self.n = self.last_print_n = 0
        self.last_print_t = 0.0
        self.said: list[object] = []

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


def test_tqdm_is_told_the_rounds_since_the_first_ones() -> None:
    bar = Tqdm(FakeTqdm)
    bar.close()
    for done in (0, 40, 40, 100):
        bar.draw(State(done, 100, 1, 2, f"loss {done}"))
    bar.close()
    found = bar._bar
    assert (found.total, found.n, found.monitor_interval) == (100, 100, 0)
    rounds = [s for s in found.said if s != "epoch 1/2" and "loss" not in str(s)]
    assert rounds == ["refresh", "refresh", "refresh", 60, "close"]
    assert found.last_print_t > 0
