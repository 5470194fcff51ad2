"""Threads for what takes long: few, started when they are needed, and not kept for ever."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from functools import partial

#: What a thread is to do, with all that it is about.
PoolJob = partial[None]

logger = logging.getLogger(__name__)
#: How long a thread waits for more to do.
IDLE_SECONDS = 10.0


class Pool:
    """Threads that do one job after the other.

    Parameters
    ----------
    most : int
        How many there are at most.
    name : str
        What the names of the threads begin with.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._jobs: deque[PoolJob] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._threads: set[threading.Thread] = set()
        self._n_idle = self._n_started = 0
        self._is_closed = False

    def submit(self, job: PoolJob) -> bool:
        """Have a thread do a job; return whether one will.

        None does after the end, nor where the system gives this process no thread and
        it has none.
        """
        with self._changed:
            if self._is_closed:
                return False
            self._jobs.append(job)
            if self._n_idle >= len(self._jobs):
                self._changed.notify()
            elif len(self._threads) < self._most:
                self._n_started += 1
                thread = threading.Thread(
                    target=self._run,
                    name=f"{self._name}-{self._n_started}",
                    daemon=True,
                )
                try:
                    thread.start()
                except RuntimeError as error:
                    logger.warning("no thread for lanes: %s", error)
                    if not self._threads:
                        self._jobs.remove(job)
                        return False
                else:
                    self._threads.add(thread)
        return True

    def close(self) -> list[PoolJob]:
        """Have its threads end after what they are at; return what nobody has begun."""
        with self._changed:
            self._is_closed = True
            left = [*self._jobs]
            self._jobs.clear()
            self._changed.notify_all()
        return left

    def join(self, end: float) -> bool:
        """Wait for its threads, in the time of `time.monotonic`; return whether all ended."""
        with self._changed:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def __len__(self) -> int:
        return len(self._threads)

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                try:
                    job()
                except Exception:
                    logger.exception("a thread of lanes failed")
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _next(self) -> PoolJob | None:
        with self._changed:
            self._n_idle += 1
            try:
                self._changed.wait_for(
                    lambda: self._jobs or self._is_closed, IDLE_SECONDS
                )
                return self._jobs.popleft() if self._jobs else None
            finally:
                self._n_idle -= 1
