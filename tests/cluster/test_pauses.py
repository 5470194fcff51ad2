"""Waiting without a wake-up: when it sleeps, and for how long."""

from __future__ import annotations

import os
import time

from daskps.cluster.pauses import LONGEST_NAP, NAP, Pause


def test_pauses_sleep_after_the_spin_and_longer_each_time(monkeypatch):
    now = [10.0]
    yields: list[float] = []
    naps: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", naps.append)
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(now[0]))
    pause = Pause(0.5)
    for now[0] in (10.0, 10.25, 10.5, 10.75):
        pause()
    assert yields == [10.0, 10.25]
    assert naps == [NAP, NAP * 1.5]
    for _ in range(50):
        pause()
    assert naps[-1] == LONGEST_NAP
    assert pause.seconds == 0.75
