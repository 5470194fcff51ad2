"""A device that is none, for machines without a GPU: documents, tests, and users' tests.

Its arrays refuse what CuPy's refuse: to be made NumPy arrays in passing, and to be mixed
with these. It is as *asynchronous* as a device may be: nothing that was queued is done
before somebody waits, a seed says which of two streams goes on first, and memory that
nobody has written holds junk. A program that forgets to wait gets wrong numbers here each
time, on a device now and then. Work on memory that another stream has written, without an
event between them, is an error.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import WeakValueDictionary

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from daskps import config
from daskps.backend.stream import Device, DeviceInfo, Loop, Stream, as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.typing import Array

#: The bytes of fresh memory: NaN in all float dtypes.
_JUNK: Final = 0xFF
#: Bytes that there are, of which nothing is ever used up.
_TOTAL: Final = 2**34


class _Memory:
    """Memory of a device, and who has written it last: a stream, and which of its work."""

    def __init__(self, owner: FakeStream | None) -> None:
        #: The stream whose launches write it; those of others read it.
        self.owner = owner
        self.written: tuple[FakeStream, int] | None = None


class FakeArray(NDArrayOperatorsMixin):
    """An array of a fake device; :func:`asarray` makes one.

    Ufuncs and operators of NumPy are queued in the device's default stream.
    """

    __slots__ = ("device", "held", "memory")
    __array_priority__ = 100
    __iter__ = None

    def __init__(self, array: Array, memory: _Memory, device: FakeDevice) -> None:
        self.held, self.memory, self.device = array, memory, device

    dtype = property(lambda self: self.held.dtype)
    shape = property(lambda self: self.held.shape)
    ndim = property(lambda self: self.held.ndim)
    size = property(lambda self: self.held.size)
    nbytes = property(lambda self: self.held.nbytes)
    itemsize = property(lambda self: self.held.itemsize)
    strides = property(lambda self: self.held.strides)
    flags = property(lambda self: self.held.flags)
    T = property(lambda self: self._same(self.held.T))

    def __repr__(self) -> str:
        return f"<FakeArray of shape {self.shape}, {self.dtype}, on {self.device.name}>"

    def __len__(self) -> int:
        return len(self.held)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to "
            "construct a NumPy array explicitly."
        )

    def __bool__(self) -> bool:
        return bool(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def get(self) -> Array:
        """Return a NumPy array of the same numbers, once the default stream is done."""
        self.device.default.finish()
        return np.array(self.held)

    def _same(self, array: Array) -> FakeArray:
        return FakeArray(array, self.memory, self.device)

    def __getitem__(self, at: Any) -> FakeArray:
        if isinstance(at, FakeArray):
            raise TypeError("a fake array takes no arrays of a device as indices")
        found = self.held[at]
        if not isinstance(at, np.ndarray):
            return self._same(found)
        out: FakeArray = self.device.array(found.shape, found.dtype)
        index = at.copy()
        copy = partial(np.copyto, out.held)
        self.device.default.queue(lambda: copy(self.held[index]), [self], [out])
        return out

    def __setitem__(self, at: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("NumPy memory assigned to memory of a device")
        part = self[at]
        self.__array_ufunc__(np.positive, "__call__", value, out=(part,))

    def reshape(self, *shape: Any) -> FakeArray:
        """Return a view of another shape."""
        found = self.held.reshape(*shape)
        if self.size and not np.shares_memory(found, self.held):
            raise ValueError("a fake array is reshaped where it is contiguous only")
        return self._same(found)

    def view(self, dtype: Any) -> FakeArray:
        """Return its bytes as another dtype."""
        return self._same(self.held.view(dtype))

    def all(self) -> Any:
        """Return whether all are true."""
        return np.logical_and.reduce(cast("Any", self), axis=None)

    def astype(self, dtype: Any, *, order: str = "K", copy: bool = True) -> FakeArray:
        """Return the numbers in another dtype, in order."""
        del order
        if not copy and self.dtype == dtype:
            return self
        out: FakeArray = self.device.array(self.shape, dtype)
        default = self.device.default
        default.queue(partial(np.copyto, out.held, self.held, "unsafe"), [self], [out])
        return out

    def copy(self) -> FakeArray:
        """Return the same numbers in memory of their own."""
        return self.astype(self.dtype)

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any
    ) -> Any:
        outs = kwargs.pop("out", None)
        arrays = [*inputs, *(outs or ())]
        if method not in ("__call__", "reduce") or any(
            isinstance(a, np.ndarray) and a.ndim for a in arrays
        ):
            return NotImplemented
        given = [a.held if isinstance(a, FakeArray) else a for a in inputs]
        # Of the same shape and dtype, whatever the inputs hold now.
        with np.errstate(all="ignore"):
            like = np.asarray(getattr(ufunc, method)(*given, **kwargs))
        out = outs[0] if outs else self.device.array(like.shape, like.dtype)
        read = [a for a in inputs if isinstance(a, FakeArray)]
        work = partial(getattr(ufunc, method), *given, out=out.held, **kwargs)
        self.device.default.queue(work, read, [out])
        return out

    def __array_function__(self, f: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise TypeError(f"np.{f.__name__} of memory of a device")


class FakeStream(Stream):
    """A queue of the fake device."""

    device: FakeDevice

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device)
        self._work: deque[tuple[int, Callable[[], object]]] = deque()
        self.issued = 0
        #: How much of its work anybody has waited for.
        self.done = 0
        #: How much of other streams comes before whatever is queued here next.
        self._after: dict[FakeStream, int] = {}

    def queue(
        self,
        work: Callable[[], object],
        read: Sequence[FakeArray] = (),
        written: Sequence[FakeArray] = (),
    ) -> None:
        """Put work into the queue, on arrays that this stream may touch."""
        with self.device.lock:
            for array in (*read, *written):
                self._check(array)
            self.issued += 1
            for array in written:
                array.memory.written = self, self.issued
            self._work.append((self.issued, work))

    def _check(self, array: FakeArray) -> None:
        if array.device is not self.device:
            raise RuntimeError(
                f"memory of {array.device.name} is used on {self.device.name}"
            )
        stream, at = array.memory.written or (self, 0)
        if stream is not self and at > max(stream.done, self._after.get(stream, 0)):
            raise RuntimeError(
                "memory that another stream has written, without an event between them"
            )

    def run(self, until: int) -> None:
        """Do what was queued, up to a number; the device's lock is held."""
        with np.errstate(all="ignore"):
            while self._work and self._work[0][0] <= until:
                self._work.popleft()[1]()

    def empty(self, nbytes: int) -> Any:
        """Return memory that holds junk."""
        made: FakeArray = self.device.array((nbytes,), np.uint8)
        made.memory.owner = self
        return made

    def address(self, a: Any) -> int:
        """Return where an array begins."""
        return int(a.held.ctypes.data)

    def load(self, loop: Loop) -> None:
        """Compile a loop, one that a device has too."""
        loop.check(self.device.cache_dir)
        loop.host(self.device.cache_dir)

    def pinned(self, nbytes: int) -> Array:
        """Return host memory that holds junk."""
        return np.full(nbytes, _JUNK, np.uint8)

    def send(self, out: Any, pinned: Array) -> None:
        """Queue a copy to the device."""
        self.queue(partial(np.copyto, out.held, pinned), [], [out])

    def fetch(self, pinned: Array, a: Any) -> None:
        """Queue a copy to the host."""
        # Not looked at: a reader may run into what is being written, and finds out.
        self.queue(partial(np.copyto, pinned, a.held))

    def copy(self, out: Any, a: Any) -> None:
        """Queue a copy within the device."""
        to: Any = as_bytes(out)
        source: Any = as_bytes(a)
        self.queue(partial(np.copyto, to.held, source.held), [], [to])

    def launch(
        self,
        loop: Loop,
        size: tuple[int, int],
        args: Sequence[Any],
        touched: Sequence[Any] = (),
    ) -> None:
        """Queue a loop."""
        self.counts["launches"] += 1
        arrays = [*touched, *(a for a in args if isinstance(a, FakeArray))]
        given = [
            self.address(a)
            if isinstance(a, FakeArray)
            else np.dtype("i8" if kind.endswith("*") else kind).type(a)
            for a, kind in zip(args, loop.kinds, strict=True)
        ]

        written = [a for a in arrays if a.memory.owner is self]
        # These have to be there until it is done.
        work = partial(self._run_loop, loop, size, given, arrays)
        self.queue(work, arrays, written)

    def _run_loop(
        self, loop: Loop, size: tuple[int, int], args: Sequence[Any], _: Any
    ) -> None:
        rows, columns = size
        order = self.device.rng.permutation(rows * columns)
        loop.host(self.device.cache_dir)(order, columns, *args)

    def follow(self) -> None:
        """Come after what the program has queued in the default stream."""
        event = self.device.default.record()
        with self.device.lock:
            self._after[event[0]] = event[1]
            self.issued += 1
            self._work.append((self.issued, partial(event[0].run, event[1])))

    def record(self) -> tuple[FakeStream, int]:
        """Return this stream, and how much was queued in it."""
        return self, self.issued

    def await_event(self, event: tuple[FakeStream, int]) -> None:
        """Do what was queued until then."""
        with self.device.lock:
            if self.device.failure:
                raise self.device.end(self.device.failure)
            self.device.overtake(self)
            self.run(event[1])
            self.done = max(self.done, event[1])

    def finish(self) -> None:
        """Do what was queued."""
        self.await_event(self.record())


class FakeDevice(Device):
    """One fake device."""

    def __init__(self, number: int) -> None:
        super().__init__(f"fake:{number}")
        self.lock = threading.RLock()
        self.cache_dir = str(config.load().cache)
        self.failure = ""
        self.streams: WeakValueDictionary[int, FakeStream] = WeakValueDictionary()
        self._made = count()
        #: Says which stream goes on first, and in which order elements are done.
        self.rng = np.random.default_rng(number)
        #: The stream of what a program does with arrays itself.
        self.default = self.stream()

    def seed(self, seed: int) -> None:
        """Begin with another order of what is queued."""
        self.rng = np.random.default_rng(seed)

    def fail(self, why: str) -> None:
        """Have all that is waited for from now on fail, as after an error of CUDA's."""
        self.failure = why

    def info(self) -> DeviceInfo:
        """Return a device of which nothing is used."""
        if self.failure:
            raise self.end(self.failure)
        return DeviceInfo("a fake device", self.name, _TOTAL, _TOTAL)

    def stream(self) -> FakeStream:
        """Return a new queue."""
        made = FakeStream(self)
        self.streams[next(self._made)] = made
        return made

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return memory that holds junk."""
        made = np.empty(shape, dtype)
        made.reshape(-1).view(np.uint8)[...] = _JUNK
        return FakeArray(made, _Memory(None), self)

    def adopt(self, array: Any) -> Any:
        """Return an array of this device, None for any other object."""
        if not isinstance(array, FakeArray):
            return None
        if array.device is not self:
            raise ValueError(f"it is on {array.device.name}, and not on {self.name}")
        return array

    def overtake(self, stream: FakeStream) -> None:
        """Let other streams go on, or not, before one that is waited for."""
        for other in list(self.streams.values()):
            if other is not stream and self.rng.random() < 0.5:
                other.run(other.issued)


_devices: dict[int, FakeDevice] = {}
_lock: Final = threading.Lock()


def device(number: int = 0) -> FakeDevice:
    """Return a fake device of this process."""
    with _lock:
        return _devices.get(number) or _devices.setdefault(number, FakeDevice(number))


def device_of(array: Any) -> FakeDevice | None:
    """Return the device of an array, None for an array of anything else."""
    return array.device if isinstance(array, FakeArray) else None


def asarray(values: Any, number: int = 0) -> FakeArray:
    """Return an array of a fake device with the numbers of a NumPy array."""
    of, values = device(number), np.array(values)
    out: FakeArray = of.array(values.shape, values.dtype)
    of.default.queue(partial(np.copyto, out.held, values), [], [out])
    return out
