"""What a run led to shows itself: as a line or two, as a table, a frame, a figure."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from daskps.training.result import Epoch, TrainResult
from daskps.training.stats import TrainStats


def result(n: int, *, metrics: bool = False, lost_trainers: int = 0) -> TrainResult:
    weights = {f"w{i}": np.zeros(3, "f4") for i in range(2)}
    history = [
        Epoch(i, 2.0 / (i + 1), {"<accuracy>": i / n} if metrics else {}, 0.5, 0)
        for i in range(n)
    ]
    return TrainResult(
        weights, history, 7, "graph", TrainStats(clock=12, lost_trainers=lost_trainers)
    )


def test_repr_is_a_few_lines() -> None:
    assert repr(result(4, metrics=True, lost_trainers=2)) == (
        "<daskps.TrainResult: 4 epochs, 12 rounds, version 7, graph, 2.00 s\n"
        "  loss 2 -> 0.5 (best 0.5 in epoch 3), <accuracy> 0 -> 0.75\n"
        "  weights: w0 (3,) float32, w1 (3,) float32\n"
        "  lost_trainers 2>"
    )


def test_repr_of_a_run_without_losses_or_rows() -> None:
    history = [Epoch(0, None, {}, 0.5, 0)]
    weights = {f"w{i}": np.zeros(1) for i in range(6)}
    text = repr(TrainResult(weights, history, 0, "resident", TrainStats(clock=1)))
    assert "loss" not in text
    assert "1 epoch, 1 round," in text
    assert "w3 (1,) float64, 2 more>" in text
    assert "none" in repr(TrainResult({}, [], 0, "resident", TrainStats()))


def test_any_loss_is_better_than_nan() -> None:
    nan = float("nan")
    history = [Epoch(i, x, {}, 0.5, 0) for i, x in enumerate((nan, 2.0, 1.0, nan))]
    found = TrainResult({}, history, 4, "resident", TrainStats(clock=4))
    assert "loss nan -> nan (best 1 in epoch 2)" in repr(found)
    found.history[:] = history[:1] * 2
    assert "(best nan in epoch 0)" in repr(found)


def test_table_of_a_notebook() -> None:
    html = result(4, metrics=True)._repr_html_()
    assert "<accuracy>" not in html
    assert "&lt;accuracy&gt;" in html
    assert html.count("<tr>") == 5
    assert "<td>0.6667</td>" in html
    assert "more" not in html


def test_long_histories_are_cut_in_the_middle() -> None:
    html = result(100)._repr_html_()
    assert html.count("<tr>") == 1 + 15 + 1 + 15
    for shown in ("<td>0</td>", "<td>14</td>", "… 70 more", "<td>85</td>"):
        assert shown in html
    assert "<td>15</td>" not in html


def test_frame() -> None:
    pytest.importorskip("pandas")
    frame = result(3, metrics=True).to_frame()
    assert [*frame.columns] == ["loss", "<accuracy>", "seconds", "staleness"]
    assert frame.index.name == "epoch"
    assert [*frame["loss"]] == [2.0, 1.0, 2 / 3]
    empty = result(0).to_frame()
    assert [*empty.columns] == ["loss", "seconds", "staleness"]
    assert len(empty) == 0


def test_plot() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    assert result(3, metrics=True).plot(ax) is ax
    [line] = ax.lines
    assert [*line.get_ydata()] == [2.0, 1.0, 2 / 3]
    [right] = [other for other in ax.figure.axes if other is not ax]
    assert [line.get_label() for line in right.lines] == ["<accuracy>"]
    assert right.lines[0].get_color() != line.get_color()


@pytest.mark.parametrize(
    ("module", "method"), [("pandas", "to_frame"), ("matplotlib", "plot")]
)
def test_without_the_library_it_is_named(
    module: str, method: str, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"pip install {module}"):
        getattr(result(1), method)()
