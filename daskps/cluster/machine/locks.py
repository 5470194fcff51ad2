"""The lock of a shard between the processes of a machine.

A POSIX record lock on the segment's file: the kernel frees it when its holder dies,
however that happens, and a fork does not inherit it. It is only ever tried, never
waited for in the kernel. A process that waits spins a little, then sleeps.

Two words of the segment's header pass the turn on. ``HOLDER`` is the process that got
the lock last and stays when it is released; ``WANTED`` is a process that waits. A
process that finds itself the last holder while another one waits puts its own number
there, as the next to wait, and lets somebody else have the lock first, for
:data:`_GRACE` seconds at most: the process that waited may have died. Both are numbers
of :mod:`daskps.cluster.machine.processes`, since process ids need not differ.
"""

from __future__ import annotations

import fcntl
import os
import time
from typing import TYPE_CHECKING

from daskps.cluster.machine.folder import try_lock
from daskps.cluster.machine.processes import THIS, pid_of
from daskps.errors import IllegalStateError, ShardBusyError
from daskps.shards.memory.format import HEADER_WORDS, HOLDER, WANTED

if TYPE_CHECKING:
    from daskps.cluster.machine.mapping import Mapped
    from daskps.typing import Array


#: Seconds that a waiter sleeps at first, and at most.
NAP, LONGEST_NAP = 20e-6, 500e-6


#: Seconds that a waiter spins before it sleeps.
_SPIN = 100e-6
#: Seconds that the last holder waits for its successor.
_GRACE = 2e-3


class Pause:
    """Waits a little, at first without sleeping, later longer each time.

    Parameters
    ----------
    spin : float
        Seconds without a sleep. Whatever else could use the processor gets it.
    """

    def __init__(self, spin: float) -> None:
        self._began, self._spin = time.perf_counter(), spin
        self._nap = NAP

    @property
    def seconds(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._began

    def __call__(self) -> None:
        """Pause once."""
        if self.seconds < self._spin:
            # Lets other threads go on, too. `time.sleep(0)` takes 65 microseconds.
            os.sched_yield()
        else:
            time.sleep(self._nap)
            self._nap = min(self._nap * 1.5, LONGEST_NAP)


class FileLock:
    """The lock of one segment, as this process sees it.

    Threads of one process exclude each other too, also by several locks of the same
    file, but wait in no order.

    Parameters
    ----------
    file : Mapped
        The file that carries the lock.
    buffer : ndarray
        The memory, whose header passes the turn on.
    name : str
        Name of the block, for messages.
    """

    def __init__(self, file: Mapped, buffer: Array, name: str) -> None:
        self._file, self._name = file, name
        # Also keeps the file open after the block was freed.
        # Not an array: reading a word of one takes three times as long.
        self._words = buffer[: 8 * HEADER_WORDS].data.cast("q")
        self._me = THIS.number
        self._has_passed = False

    @property
    def holder(self) -> int:
        """Id of the process that has the lock, or had it last; 0 before the first."""
        return pid_of(self._words[HOLDER])

    def held_by(self) -> int:
        """Return the process that has the lock now, also where it is stopped.

        Returns
        -------
        int
            Its id, as its own namespace knows it; 0 where nobody has the lock.
        """
        if not self._file.mutex.acquire(blocking=False):
            return pid_of(self._me)
        try:
            return 0 if try_lock(self._file.fd, 0, fcntl.LOCK_EX) else self.holder
        finally:
            self._file.mutex.release()

    def try_acquire(self) -> bool:
        """Take the lock if it is free and it is not the turn of a process that waits.

        Returns
        -------
        bool
            Whether this process has it now. A turn is passed on once: the next try
            counts whether or not somebody took it.

        Raises
        ------
        IllegalStateError
            In a process that was forked after the lock was made.
        """
        if self._is_turn_of_other() and not self._has_passed:
            self._has_passed = True
            return False
        return self._try()

    def acquire(self, seconds: float) -> None:
        """Take the lock, waiting for it.

        Parameters
        ----------
        seconds : float
            How long to wait at most.

        Raises
        ------
        ShardBusyError
            If it was not free in time; the message names the holder's process.
        IllegalStateError
            In a process that was forked after the lock was made.
        """
        if self._is_turn_of_other():
            start = time.perf_counter()
            self._pass_on(min(seconds, _GRACE))
            self._wait(start, seconds)
        elif not self._try():
            self._wait(time.perf_counter(), seconds)

    def release(self) -> None:
        """Give the lock back.

        Raises
        ------
        IllegalStateError
            In a process that was forked after the lock was made.
        """
        if self._me != THIS.number:
            raise _forked_error()
        fcntl.lockf(self._file.fd, fcntl.LOCK_UN, 1)
        self._file.mutex.release()

    def _is_turn_of_other(self) -> bool:
        if self._me != THIS.number:
            raise _forked_error()
        words, me = self._words, self._me
        return words[HOLDER] == me and words[WANTED] not in (0, me)

    def _try(self) -> bool:
        if not self._file.mutex.acquire(blocking=False):
            return False
        try:
            fcntl.lockf(self._file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except (BlockingIOError, PermissionError):
            self._file.mutex.release()
            return False
        except BaseException:
            # A signal's error may come when the lock has been taken.
            try:
                fcntl.lockf(self._file.fd, fcntl.LOCK_UN, 1)
            finally:
                self._file.mutex.release()
            raise
        self._words[HOLDER] = self._me
        if self._words[WANTED] == self._me:
            self._words[WANTED] = 0
        self._has_passed = False
        return True

    def _pass_on(self, seconds: float) -> None:
        """Let another process have the lock, and be the next one that waits."""
        words, me = self._words, self._me
        words[WANTED] = me
        pause, end = Pause(_SPIN), time.perf_counter() + seconds
        while words[HOLDER] == me and time.perf_counter() < end:
            pause()

    def _wait(self, start: float, seconds: float) -> None:
        words, pause = self._words, Pause(_SPIN)
        while not self._try():
            if words[WANTED] == 0:
                words[WANTED] = self._me
            if time.perf_counter() - start > seconds:
                if words[WANTED] == self._me:
                    words[WANTED] = 0
                raise ShardBusyError(
                    f"the shard in {self._name} stayed locked for {seconds:g} s by "
                    f"process {self.holder} of this machine; look what holds that "
                    f"process up, or give a longer timeout="
                )
            pause()


def _forked_error() -> IllegalStateError:
    return IllegalStateError(
        "this lock was made before a fork; a child attaches to the memory itself"
    )
