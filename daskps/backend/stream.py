"""Work for a device: put into a queue in order, and waited for.

A :class:`Stream` says what to copy and to launch; nothing of it is done before
:meth:`Stream.wait` returns, or an event tells that it is. Copies between host and device
go through *pinned* memory of two halves: one fills, or is emptied, while the device copies
the other, and is used again once the device is done with it. So what a caller has given
may be changed as soon as a call returns.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from daskps.errors import StaleGenerationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from weakref import WeakMethod

    from daskps.typing import Array

#: Bytes of half of the pinned memory of a stream: at first, and at most.
_FIRST_NBYTES: Final = 2**16
_MOST_NBYTES: Final = 2**23
#: Where temporary arrays begin, and how much memory for them is kept, in bytes.
_ALIGN: Final = 256
_KEPT_NBYTES: Final = 2**26


class Loop(Protocol):
    """A loop over the elements of arrays, as :mod:`daskps.kernels.device` makes them."""

    def __hash__(self) -> int:
        """Loops of the same text are equal."""

    @property
    def name(self) -> str:
        """Of its kernel."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of its arguments: dtypes such as "f4", with a star where they are pointers."""

    def ptx(self, cache_dir: str | None = None) -> str:
        """Return its text for devices."""

    def check(self, cache_dir: str | None = None) -> None:
        """Refuse one that devices have no text for."""

    def host(self, cache_dir: str | None = None) -> Any:
        """Return a function that runs it here, in some order of its elements."""


class DeviceInfo(NamedTuple):
    """A device: its name in messages, which one it is, and its memory in bytes."""

    name: str
    uuid: str
    free: int
    total: int


class Device(ABC):
    """One device, as this process sees it."""

    #: As in `create(device=)`, with its number: "cuda:0".
    name: str

    def __init__(self, name: str) -> None:
        self.name = name
        #: Methods of hosts, by their addresses, that `lose` calls in any thread.
        self.watchers: dict[str, WeakMethod[Callable[[object, str], None]]] = {}
        self._ended: StaleGenerationError | None = None
        self._idle: deque[Stream] = deque()

    def lose(self, what: object, why: str) -> StaleGenerationError:
        """Tell hosts that arrays there are lost.

        Parameters
        ----------
        what : object
            The launcher of the shard that has them; the name of the device for all.
        why : str
            The reason, which says what the worker has done, in messages.

        Returns
        -------
        StaleGenerationError
            To be raised: callers ask the directory then, and hear of the loss.
        """
        for ref in list(self.watchers.values()):
            if (watcher := ref()) is not None:
                watcher(what, why)
        return StaleGenerationError(f"process {os.getpid()} {why}")

    def end(self, error: object) -> StaleGenerationError:
        """Tell that an error has ended all work of this process there, as `lose` does."""
        if self._ended is None:
            why = f"can work on {self.name} no more, until its process starts again"
            self._ended = self.lose(self.name, f"{why}: {error}")
        # A new one each time: tracebacks of one that is raised again grow.
        return StaleGenerationError(*self._ended.args)

    @contextmanager
    def lend(self, counts: Counter[str] | None = None) -> Iterator[Stream]:
        """Lend a stream that no other thread uses meanwhile, and that counts there."""
        try:
            stream = self._idle.pop()
        except IndexError:
            stream = self.stream()
        stream.counts = Counter() if counts is None else counts
        yield stream
        self._idle.append(stream)

    def fetch(self, array: Array) -> Array:
        """Return an array of the device in host memory."""
        out = np.empty(array.shape, array.dtype)
        source = array if array.flags.c_contiguous else array.copy()
        with self.lend() as stream:
            stream.follow()
            stream.download([(out, source)])
        return out

    def put(self, out: Array, values: Array) -> None:
        """Copy an array in host memory to one of the device, now."""
        is_whole = out.flags.c_contiguous
        to = out if is_whole else self.array(out.shape, out.dtype)
        with self.lend() as stream:
            stream.follow()
            stream.upload(to, values)
            stream.wait()
        if not is_whole:
            out[...] = to

    def settle(self) -> None:
        """Wait for what this thread has launched by itself."""
        with self.lend() as stream:
            stream.follow()
            stream.wait()

    def moved(self, values: Array) -> Array:
        """Return a new array of the device with the numbers of one in host memory."""
        out = self.array(values.shape, values.dtype)
        self.put(out, values)
        return out

    @abstractmethod
    def array(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array with anything in it."""

    @abstractmethod
    def info(self) -> DeviceInfo:
        """Return what there is of it now."""

    @abstractmethod
    def stream(self) -> Stream:
        """Return a new queue of work."""

    @abstractmethod
    def adopt(self, array: Any) -> Array | None:
        """Return an array of any library on this device as one of the device's own.

        It shares memory. None for an array that is in host memory.

        Raises
        ------
        ValueError
            For an array of another device, naming both.
        """


class Scratch:
    """Memory of a device for temporary arrays, used again once all that used it is done.

    Parameters
    ----------
    empty : callable
        Returns so many bytes of new memory.
    """

    def __init__(self, empty: Callable[[int], Array]) -> None:
        self._empty = empty
        #: Memory, how much of it is used, and what there was before.
        self._room: Array | None = None
        self._used = 0
        self._rooms: list[Array] = []

    def take(self, n: int, dtype: Any) -> Array:
        """Return memory for elements until `clear`."""
        nbytes, room = n * np.dtype(dtype).itemsize, self._room
        start = -(-self._used // _ALIGN) * _ALIGN
        if room is None or start + nbytes > room.nbytes:
            before = 0 if room is None else room.nbytes
            size = max(nbytes, 2 * min(before, _KEPT_NBYTES), 2**16)
            made, start = self._empty(size), 0
            self._rooms += [] if room is None else [room]
            self._room = room = made
        self._used = start + nbytes
        return room[start : self._used].view(dtype)

    def clear(self) -> None:
        """Use it again; give back what is more than a little."""
        self._used = 0
        self._rooms.clear()
        if self._room is not None and self._room.nbytes > _KEPT_NBYTES:
            self._room = None


class Stream(ABC):
    """A queue of work for one device; one thread at a time uses it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        #: Copies, their bytes, launches and waits, by name.
        self.counts: Counter[str] = Counter()
        self.scratch = Scratch(self.empty)
        self._halves: list[Array] = []
        #: For each half what has to happen before it is used again.
        self._busy: list[Any] = [None, None]
        self._half = self._used = 0

    # -- what a device does ----------------------------------------------------

    @abstractmethod
    def empty(self, nbytes: int) -> Array:
        """Return memory of the device, with anything in it; MemoryError without any."""

    @abstractmethod
    def address(self, a: Array) -> int:
        """Return where an array begins in the memory of the device."""

    @abstractmethod
    def load(self, loop: Loop) -> None:
        """Make a loop ready, so that its first launch finds it."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Array:
        """Return host memory that the device can copy from and to by itself."""

    @abstractmethod
    def send(self, out: Array, pinned: Array) -> None:
        """Queue a copy from pinned memory to the device, of as many bytes."""

    @abstractmethod
    def fetch(self, pinned: Array, a: Array) -> None:
        """Queue a copy from the device to pinned memory, of as many bytes."""

    @abstractmethod
    def copy(self, out: Array, a: Array) -> None:
        """Queue a copy within the device, of as many bytes."""

    @abstractmethod
    def launch(
        self,
        loop: Loop,
        size: tuple[int, int],
        args: Sequence[Any],
        touched: Sequence[Array] = (),
    ) -> None:
        """Queue a loop over rows and columns.

        Arrays may be given as their addresses; `touched` are those behind addresses that
        are to be looked at.
        """

    @abstractmethod
    def follow(self) -> None:
        """Have what is queued from here on come after what this thread has launched."""

    @abstractmethod
    def record(self) -> Any:
        """Return an event: that all that was queued so far is done."""

    @abstractmethod
    def await_event(self, event: Any) -> None:
        """Wait for an event of this stream."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all that was queued is done."""

    # -- what follows from it --------------------------------------------------

    def wait(self) -> None:
        """Wait until all that was queued is done; count it."""
        self.counts["waits"] += 1
        self.finish()
        self._busy, self._used = [None, None], 0

    def upload(self, out: Array, a: Array) -> None:
        """Queue a copy of a host array to the device; it may be changed at once."""
        self.counts["copies to device"] += 1
        self.counts["bytes to device"] += a.nbytes
        to, source = as_bytes(out), as_bytes(np.ascontiguousarray(a))
        at = 0
        while at < len(source):
            memory = self._take(len(source) - at)
            n = len(memory)
            memory[:] = source[at : at + n]
            self.send(to[at : at + n], memory)
            at += n

    def sent(self, a: Any) -> Array:
        """Return a host array in temporary memory of the device."""
        out = self.scratch.take(a.size, a.dtype)
        self.upload(out, a)
        return out.reshape(a.shape)

    def download(self, pairs: Iterable[tuple[Array, Array]]) -> None:
        """Copy arrays of the device to host memory, now."""
        held: tuple[list[tuple[Array, Array]], ...] = [], []
        for out, a in pairs:
            self.counts["copies to host"] += 1
            self.counts["bytes to host"] += a.nbytes
            to, source, at = as_bytes(out), as_bytes(a), 0
            while at < len(source):
                before = self._half
                memory = self._take(len(source) - at)
                if self._half != before:
                    _give_out(held[self._half])
                stop = at + len(memory)
                self.fetch(memory, source[at:stop])
                held[self._half].append((to[at:stop], memory))
                at = stop
        self.wait()
        for half in held:
            _give_out(half)

    def _take(self, nbytes: int) -> Array:
        """Return pinned memory for so many bytes, or as many as there is room for."""
        if not self._halves or self._used == len(self._halves[self._half]):
            self._turn(nbytes)
        half = self._halves[self._half]
        start = self._used
        self._used = min(len(half), start + nbytes)
        return half[start : self._used]

    def _turn(self, nbytes: int) -> None:
        """Begin with the other half, once the device is done with it."""
        if self._halves:
            self._busy[self._half] = self.record()
            self._half ^= 1
        self._used = 0
        if (event := self._busy[self._half]) is not None:
            self.counts["waits"] += 1
            self.await_event(event)
            self._busy[self._half] = None
        size = min(max(nbytes, _FIRST_NBYTES), _MOST_NBYTES)
        if not self._halves:
            self._halves = [self.pinned(size) for _ in range(2)]
        elif len(self._halves[self._half]) < size:
            self._halves[self._half] = self.pinned(size)


def _give_out(held: list[tuple[Array, Array]]) -> None:
    for out, memory in held:
        out[:] = memory
    held.clear()


def is_here(a: Any) -> bool:
    """Return whether an array is in host memory, as one of NumPy's."""
    return isinstance(a, np.ndarray)


def as_bytes(a: Array) -> Array:
    """Return a contiguous array as its bytes."""
    return a.reshape(-1).view(np.uint8)
