"""Devices of CUDA, by CuPy: memory, copies, launches and streams.

This module alone imports CuPy. It compiles nothing: loops come as PTX, which the driver
makes code of. Memory is taken and given back at once, beside CuPy's pool.
"""

from __future__ import annotations

import functools
import os
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import cupy  # noqa: TID253 - `find` imports this
import numpy as np

from daskps import config
from daskps.backend.stream import Device, DeviceInfo, Loop, Stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from daskps.typing import Array

#: Threads of a block, and blocks for each processor of a device.
_BLOCK: Final = 256
_BLOCKS: Final = 16
_MOST_ROWS: Final = 2**15
_runtime: Final = cupy.cuda.runtime
_ERRORS: Final = (_runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)
#: That there is no memory; and errors after which CUDA does no more work of the process:
#: of memory (ECC, NVLink), addresses, time, contexts, asserts, instructions, launches.
_NO_MEMORY: Final = 2
_ENDS: Final = {214, 220, 700, 702, 709, 710, *range(714, 720)}
#: Of DLPack: memory of a CUDA device, and what both sides reach.
_DLPACK: Final = (2, 13)


class CudaDevice(Device):
    """One device, by its number in this process."""

    def __init__(self, number: int) -> None:
        super().__init__(f"cuda:{number}")
        self.number = number
        self._pid = os.getpid()
        n = _runtime.getDeviceCount()
        if number >= n:
            raise ValueError(
                f"this process sees {n} CUDA devices, and none is {self.name}"
            )
        said = _runtime.getDeviceProperties(number)
        self._called = said["name"].decode()
        uuid = said.get("uuid")
        self._uuid = uuid.hex() if uuid else cupy.cuda.Device(number).pci_bus_id
        self.n_processors = int(said["multiProcessorCount"])

    @contextmanager
    def current(self) -> Iterator[None]:
        """Have calls of this thread go to the device."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "CUDA does not go on in a process that was forked after it began; start "
                "workers by spawn or forkserver"
            )
        try:
            with cupy.cuda.Device(self.number):
                yield
        except _ERRORS as error:
            if error.status in _ENDS:
                raise self.end(error) from error
            raise

    def info(self) -> DeviceInfo:
        """Return what there is of it now."""
        with self.current():
            free, total = _runtime.memGetInfo()
        return DeviceInfo(self._called, self._uuid, int(free), int(total))

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array of CuPy's."""
        with self.current():
            return cupy.empty(shape, dtype)

    def stream(self) -> CudaStream:
        """Return a new queue."""
        return CudaStream(self)

    def adopt(self, array: Any) -> Any:
        """Return an array of any library as one of CuPy's, which shares its memory."""
        found = _as_cupy(array)
        if found is None:
            return None
        if found.device.id != self.number:
            raise ValueError(f"it is on cuda:{found.device.id}, and not on {self.name}")
        return found


class CudaStream(Stream):
    """A queue of one device."""

    device: CudaDevice

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device)
        with device.current():
            self._stream = cupy.cuda.Stream(non_blocking=True)

    def empty(self, nbytes: int) -> Any:
        """Return memory with anything in it."""
        with self.device.current():
            try:
                memory = cupy.cuda.Memory(nbytes)
            except _runtime.CUDARuntimeError as error:
                if error.status != _NO_MEMORY:
                    raise
                raise MemoryError(
                    f"{nbytes:,} bytes on {self.device.name}: {error}"
                ) from None
            return cupy.ndarray(nbytes, np.uint8, cupy.cuda.MemoryPointer(memory, 0))

    def address(self, a: Any) -> int:
        """Return where an array begins."""
        return int(a.data.ptr)

    def load(self, loop: Loop) -> None:
        """Have the driver make code of a loop."""
        with self.device.current():
            _kernel(self.device.number, loop)

    def pinned(self, nbytes: int) -> Array:
        """Return host memory that is never paged out."""
        with self.device.current():
            memory = cupy.cuda.alloc_pinned_memory(nbytes)
        return np.frombuffer(memory, np.uint8, nbytes)

    def send(self, out: Any, pinned: Array) -> None:
        """Queue a copy to the device."""
        self._copy(out.data.ptr, pinned.ctypes.data, pinned.nbytes)

    def fetch(self, pinned: Array, a: Any) -> None:
        """Queue a copy to the host."""
        self._copy(pinned.ctypes.data, a.data.ptr, pinned.nbytes)

    def copy(self, out: Any, a: Any) -> None:
        """Queue a copy within the device."""
        self._copy(self.address(out), self.address(a), a.nbytes)

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        with self.device.current():
            how = _runtime.memcpyDefault
            _runtime.memcpyAsync(to, source, nbytes, how, self._stream.ptr)

    def launch(
        self,
        loop: Loop,
        size: tuple[int, int],
        args: Sequence[Any],
        touched: Sequence[Any] = (),
    ) -> None:
        """Queue a loop."""
        # CUDA frees memory only once the device is done with it.
        del touched
        self.counts["launches"] += 1
        rows, columns = size
        width = min(_BLOCK, 1 << max(columns - 1, 0).bit_length())
        block = width, _BLOCK // width
        most = _BLOCKS * self.device.n_processors
        grid = min(-(-columns // block[0]), most), min(-(-rows // block[1]), _MOST_ROWS)
        given = [np.int64(rows), np.int64(columns)]
        for a, kind in zip(args, loop.kinds, strict=True):
            is_array = kind.endswith("*") and not isinstance(a, int)
            number = np.dtype("i8" if kind.endswith("*") else kind)
            given.append(a if is_array else number.type(a))
        with self.device.current(), self._stream:
            _kernel(self.device.number, loop)(grid, block, tuple(given))

    def follow(self) -> None:
        """Come after what this thread has queued in CuPy's current stream."""
        with self.device.current():
            self._stream.wait_event(cupy.cuda.get_current_stream().record())

    def record(self) -> Any:
        """Return an event."""
        with self.device.current():
            return self._stream.record()

    def await_event(self, event: Any) -> None:
        """Wait for an event."""
        with self.device.current():
            event.synchronize()

    def finish(self) -> None:
        """Wait until the stream is done."""
        with self.device.current():
            self._stream.synchronize()


@functools.cache
def _kernel(number: int, loop: Any) -> Any:
    """Return the kernel of a loop on a device."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(loop.ptx(str(config.load().cache)))
        file.flush()
        return cupy.RawModule(path=file.name).get_function(loop.name)


def _as_cupy(array: Any) -> Any:
    """Return an array of a CUDA device as CuPy's, None for any other object."""
    if isinstance(array, cupy.ndarray):
        return array
    if hasattr(array, "__cuda_array_interface__"):
        return cupy.asarray(array)
    if hasattr(array, "__dlpack_device__") and array.__dlpack_device__()[0] in _DLPACK:
        return cupy.from_dlpack(array)
    return None


def device_of(array: Any) -> CudaDevice | None:
    """Return the device of an array, None for an array of anything else."""
    found = _as_cupy(array)
    return None if found is None else device(found.device.id)


@functools.cache
def device(number: int = 0) -> CudaDevice:
    """Return a device of this process."""
    return CudaDevice(number)
