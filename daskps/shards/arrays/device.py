"""The payload of a segment that is in memory of a device.

Its functions put work into the queue of one stream, in order; consecutive updates by one
loop, with the same scalars, share a launch. A look for NaN and infinity sets a
*flag* there, and no update that comes after it does anything: so nothing is waited for
before :meth:`DeviceMemory.wait`, which says what the looks have found.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from daskps.backend.stream import Scratch, is_here
from daskps.errors import LayoutError, PushRejectedError, StaleGenerationError
from daskps.kernels.device import rows
from daskps.kernels.device.pieces import elementwise, look_loop
from daskps.kernels.row_moves import scatter
from daskps.shards.arrays.payload import Payload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from daskps.backend.stream import Device
    from daskps.kernels.device import DeviceLoop
    from daskps.kernels.row_log import TableRows, UndoLog
    from daskps.kernels.row_repeats import Repeats
    from daskps.typing import Array

#: Loops that set the flag: over arrays, and over what comes for rows.
_LOOKS: Final = {"look", "row_look"}


class _Launch:
    """Pieces that one launch of a loop takes, in any order: none touches another's."""

    def __init__(self, loop: DeviceLoop, scalars: tuple[float, ...]) -> None:
        self.loop, self.scalars = loop, scalars
        #: Of the loop's table, and the arrays that it names.
        self.rows: list[list[int]] = []
        self.arrays: list[Array] = []
        #: Where these begin and end, in order.
        self._edges: list[int] = []

    def takes(
        self,
        loop: DeviceLoop,
        scalars: tuple[float, ...],
        spans: Iterable[tuple[int, int]],
    ) -> bool:
        """Return whether a piece may join."""
        edges = self._edges
        return (loop, scalars) == (self.loop, self.scalars) and all(
            # Between two of them, and after as many ends as beginnings.
            not (at := bisect_right(edges, start)) & 1
            and (at == len(edges) or edges[at] >= stop)
            for start, stop in spans
        )

    def add(
        self, row: list[int], spans: Iterable[tuple[int, int]], arrays: Sequence[Array]
    ) -> None:
        """Take a piece."""
        self.rows.append(row)
        self.arrays += arrays
        for start, stop in spans:
            at = bisect_right(self._edges, start)
            self._edges[at:at] = start, stop


class DeviceMemory:
    """Memory of a device and what is done there, for one shard.

    Parameters
    ----------
    device : Device
        The device.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.stream()
        #: Work of other threads, in streams of their own.
        self._others: Counter[str] = Counter()
        #: 0, or 1 after a look that has found something; in memory of the device.
        self.flag = self.allocate(2, np.int64)[:1]
        self._asked = self.allocate(1, np.int64)
        self._has_looked = False
        self._given_up: StaleGenerationError | None = None
        self._next: _Launch | None = None
        self.stream.scratch = Scratch(self._taken)
        self.fill(self.flag, 0)

    def payload(self) -> Payload:
        """Return its functions."""
        return Payload(
            copy=self.copy,
            add=self.add,
            multiply=self.multiply,
            divide=self.divide,
            round=self.round,
            fill=self.fill,
            is_finite=self.is_finite_array,
            look=self.look,
            empty=self.empty,
            allocate=self.allocate,
            duplicate=self.duplicate,
            fetch=self.fetch,
            bring=self.bring,
            read=self.read,
            write=self.write,
            gather=self.gather,
            read_rows=self.read_rows,
            add_rows=functools.partial(self._write_rows, True),
            assign_rows=functools.partial(self._write_rows, False),
            sum_rows=self.sum_rows,
            restore=self.restore,
            wait=self.wait,
            form=self.form,
            device=self.device.name,
            launcher=self,
            give_up=self.give_up,
        )

    def give_up(self, error: Exception) -> StaleGenerationError:
        """Have the shard given up: an update has stopped where nobody knows how far.

        Returns
        -------
        StaleGenerationError
            To be raised, as that of :meth:`Device.end`.
        """
        why = (
            f"ran into an error in the middle of an update on {self.device.name}, which "
            f"leaves optimizer state half-way: {error}"
        )
        if self._given_up is None:
            self._next = None
            self._given_up = self.device.lose(self, why)
        return self._given_up

    def work(self) -> dict[str, int]:
        """Return how much was copied, launched and waited for, by readers too."""
        return dict(self.stream.counts + self._others)

    # -- as :class:`daskps.kernels.device.Launcher` -----------------------------

    def load(self, loop: DeviceLoop) -> None:
        """Make a loop ready, so that its first launch finds it."""
        self.stream.load(loop)

    def update(
        self, loop: DeviceLoop, arrays: Sequence[Array], scalars: tuple[float, ...]
    ) -> None:
        """Queue a piece of arrays of one length for a loop over pieces."""
        n = len(arrays[0])
        if not n:
            return
        self._has_looked |= loop.name in _LOOKS
        starts = [*map(self.stream.address, arrays)]
        spans = {(at, at + a.nbytes) for at, a in zip(starts, arrays, strict=True)}
        following = self._next
        if following is None or not following.takes(loop, scalars, spans):
            self.flush()
            following = self._next = _Launch(loop, scalars)
        following.add([n, *starts], spans, arrays)

    def launch(
        self, loop: DeviceLoop, rows: int, columns: int, args: Sequence[Array | float]
    ) -> None:
        """Queue a loop; NumPy arrays are copied to the device first, as they are now."""
        self.flush()
        self._has_looked |= loop.name in _LOOKS
        given = [self.stream.sent(a) if is_here(a) else a for a in args]
        self.stream.launch(loop, (rows, columns), given)

    def is_finite(self, loop: DeviceLoop, a: Array) -> bool:
        """Wait for a look at one array, with a flag of its own; return what it says."""
        self.fill(self._asked, 0)
        self.flush()
        table = self.stream.sent(np.array([[len(a), self.stream.address(a)]]))
        self.stream.launch(loop, (1, len(a)), [table, self._asked], [a])
        found = np.empty(1, np.int64)
        self.stream.download([(found, self._asked)])
        return not found[0]

    def flush(self) -> None:
        """Queue the launch that was put together."""
        if self._given_up is not None:
            raise StaleGenerationError(*self._given_up.args)
        if self._next is None:
            return
        launch, self._next = self._next, None
        loop, table = launch.loop, np.array(launch.rows, np.int64)
        flag = [self.flag] if loop.guarded else []
        given = [self.stream.sent(table), *flag, *launch.scalars]
        size = len(table), int(table[:, 0].max())
        self.stream.launch(loop, size, given, launch.arrays)

    # -- as :class:`Payload` ---------------------------------------------------

    def allocate(self, n: int, dtype: Any) -> Array:
        """Return memory for elements."""
        return self._taken(n * np.dtype(dtype).itemsize).view(dtype)

    def _taken(self, nbytes: int) -> Array:
        try:
            return self.stream.empty(nbytes)
        except MemoryError as error:
            raise LayoutError(
                f"{self.device.name} has no {nbytes:,} bytes more: {error}; use more devices, "
                f"or free stores that are on this one"
            ) from error

    def empty(self, n: int, dtype: Any) -> Array:
        """Return memory for elements until `wait`."""
        return self.stream.scratch.take(n, dtype)

    def copy(self, out: Array, a: Array) -> None:
        """Copy to the device's array `out` one of the device or the host."""
        if is_here(a):
            self.flush()
            self.stream.upload(out, a.astype(out.dtype, copy=False))
        elif a.dtype != out.dtype:
            self.round(out, a)
        else:
            bits = np.dtype(f"u{a.itemsize}")
            self.update(elementwise("a", bits), (out, a), ())

    def add(self, a: Array, b: Array, out: Array) -> None:
        """Write a sum, computed in the wider of two dtypes."""
        wide = max(a.dtype, b.dtype)
        given = self._in(wide, a), self._in(wide, b)
        # As NumPy adds bools.
        how = "a | b" if wide.kind == "b" else "a + b"
        self.update(elementwise(how, wide, out.dtype), (out, *given), ())

    def _in(self, dtype: np.dtype[Any], a: Array) -> Array:
        """Return an array in another float dtype."""
        if a.dtype == dtype:
            return a
        out = self.empty(len(a), dtype)
        self.round(out, a)
        return out

    def multiply(self, a: Array, number: float, out: Array) -> None:
        """Write an array times a number."""
        self.update(elementwise("a * s", a.dtype), (out, a), (number,))

    def divide(self, a: Array, number: float, out: Array) -> None:
        """Write an array divided by a number."""
        self.update(elementwise("a / d", a.dtype), (out, a), (number,))

    def form(  # noqa: PLR0917 - as `words.form4`, which is compiled
        self, out: Array, a: Array, s: float, b: Array, d: float
    ) -> None:
        """Write (a * s + b) / d."""
        # In the order of their names, as the loop has them.
        self.update(elementwise("(a * s + b) / d", a.dtype), (out, a, b), (d, s))

    def round(self, out: Array, values: Array) -> None:
        """Write values as another dtype has them."""
        self.update(elementwise("a", values.dtype, out.dtype), (out, values), ())

    def fill(self, out: Array, value: float) -> None:
        """Set all elements to a number."""
        self.update(elementwise("s", out.dtype), (out,), (value,))

    def look(self, a: Array) -> bool:
        """Have `wait` say whether an array is finite."""
        if a.dtype.kind == "f":
            self.update(look_loop(a.dtype), (a,), ())
        return True

    def is_finite_array(self, a: Array) -> bool:
        """Return whether an array is finite, now."""
        return a.dtype.kind != "f" or self.is_finite(look_loop(a.dtype), a)

    def duplicate(self, a: Array) -> Array:
        """Return the same numbers in memory of their own."""
        out = self.allocate(a.size, a.dtype)
        self.copy(out, a.reshape(-1))
        return out.reshape(a.shape)

    def fetch(self, a: Array) -> Array:
        """Return an array of the shard in host memory."""
        out = np.empty(a.shape, a.dtype)
        self.read([(out, a)])
        return out

    def bring(self, a: Array) -> Array:
        """Return a caller's array on the device: until `wait`, if it is in host memory."""
        if is_here(a):
            # One that does not fit is refused later, as in host memory.
            return self.stream.sent(a) if a.flags.c_contiguous else a
        try:
            found = self.device.adopt(a)
        except ValueError as error:
            raise PushRejectedError(f"a gradient cannot be taken: {error}") from error
        if found is None:
            raise PushRejectedError(
                f"a gradient is a {type(a).__name__}, and no array of {self.device.name} "
                f"or of NumPy; nothing was applied"
            )
        self.flush()
        self.stream.follow()
        return found

    def read(self, pairs: Iterable[tuple[Array, Array]]) -> None:
        """Copy arrays of the shard out, now, in any thread and beside the shard's turn."""
        with self.device.lend(self._others) as stream:
            to_host = []
            for out, a in pairs:
                if is_here(out):
                    to_host.append((out, a))
                else:
                    stream.follow()
                    stream.copy(out, a)
            if to_host:
                stream.download(to_host)
            else:
                stream.wait()

    def read_rows(
        self,
        w: Array,
        ids: Array,
        out: Array,
        at: Array | None = None,
        *,
        first: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        """Copy rows of the shard out, now, in any thread and beside the shard's turn."""

        def launch(loop: DeviceLoop, n: int, columns: int, args: Sequence[Any]) -> None:
            # The table not as an array that is looked at: a reader may run into what is
            # being written, and finds out.
            given = [stream.address(a) if a is w else a for a in args]
            given = [stream.sent(a) if is_here(a) else a for a in given]
            stream.launch(loop, (n, columns), given)

        with self.device.lend(self._others) as stream:
            if is_here(out):
                to = stream.scratch.take(len(ids) * w.shape[1], w.dtype)
                to = to.reshape(len(ids), w.shape[1])
                rows.gather(launch, w, ids, to, first=first)
                found = out if at is None else np.empty(to.shape, to.dtype)
                stream.download([(found, to)])
                if at is not None:
                    scatter(out, at, found, cache_dir=cache_dir)
            else:
                stream.follow()
                rows.gather(launch, w, ids, out, at, first=first)
                stream.wait()
            stream.scratch.clear()

    def write(self, out: Array, a: Array) -> None:
        """Copy a host array to one of the shard, now, in any thread."""
        with self.device.lend(self._others) as stream:
            stream.upload(out, np.asarray(a, out.dtype))
            stream.wait()

    def gather(
        self, w: Array, ids: Array, out: Array, *, first: int = 0, cache_dir: str | None
    ) -> None:
        """Copy rows of the shard to other arrays of it."""
        del cache_dir
        rows.gather(self.launch, w, ids, out, first=first)

    def _write_rows(
        self, adds: bool, table: TableRows, *given: Any, **how: Any
    ) -> bool:
        """Add to rows, or replace them, as `row_writes` does."""
        (ids, at, data, log), check = given, how["check"]
        kernel = rows.writing(self, table.w.dtype, adds=adds)
        return kernel.rows(table, ids, at, data, (), log, check=check)

    def sum_rows(
        self, repeats: Repeats, given: Array, at: Array | None, **_: Any
    ) -> Array:
        """Return the sum of the rows of each id."""
        return rows.sums(self, repeats, given, at)

    def restore(self, table: TableRows, log: UndoLog, n: int) -> None:
        """Put back what rows were before the first entries of a log."""
        rows.restore(self, table, log, n)

    def wait(self) -> bool:
        """Return, when all is done, whether all that was looked at was finite."""
        self.flush()
        found = np.zeros(1, np.int64)
        if self._has_looked:
            self.stream.download([(found, self.flag)])
            self._has_looked = False
        else:
            self.stream.wait()
        if found[0]:
            # Gradients stay here until the next wait: somebody says which it was.
            self.fill(self.flag, 0)
            return False
        self.stream.scratch.clear()
        return True
