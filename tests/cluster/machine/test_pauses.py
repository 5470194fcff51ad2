"""Waiting without a wake-up: when it sleeps, and for how long."""

from __future__ import annotations

import os
import sys
import threading
import time

from daskps.cluster.machine.locks import LONGEST_NAP, NAP, Pause


def test_other_threads_go_on_beside_one_that_spins():
    """With the interpreter in its hands it would spin to the end, or for 5 ms."""
    turns, pause = [0], Pause(60.0)

    def answer() -> None:
        for turn in range(1, 200, 2):
            while turns[0] != turn:
                pause()
            turns[0] += 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        thread = threading.Thread(target=answer)
        thread.start()
        for turn in range(0, 200, 2):
            while turns[0] != turn:
                pause()
            turns[0] += 1
        thread.join()
    finally:
        sys.setswitchinterval(before)
    assert turns == [200]
    assert pause.seconds < 30


def test_pauses_sleep_after_the_spin_and_longer_each_time(monkeypatch):
    now, yields = [10.0], []
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
