"""One flat vector, of which each partition owns a slice."""

from __future__ import annotations

import itertools
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps import config
from daskps.codecs import BFloat16
from daskps.compat import launch as base
from daskps.compat.bigdl.partitions import SYSTEM, FutureResult
from daskps.errors import PushRejectedError
from daskps.store.arguments import number, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daskps.compat.behind import Behind
    from daskps.compat.launch import Participant
    from daskps.store.store import ParameterStore
    from daskps.typing import Array


_CODEC = BFloat16(truncate=True)


_ids = itertools.count()


def check_vector(given: Any, what: str, size: int, *, compressed: bool) -> Array:
    """Return a vector of a size, or refuse what is none.

    Raises
    ------
    TypeError, ValueError
        Naming what it is.
    """
    if not isinstance(given, np.ndarray) or given.dtype not in ("f4", "f8"):
        found = getattr(given, "dtype", type(given).__name__)
        raise TypeError(f"{what} is an array of float32 or float64, found {found}")
    if given.dtype == "f8" and not compressed:
        raise TypeError(
            f'{what} is float64, and compress="none" sends float32; give float32, or '
            f'compress="fp16"'
        )
    if given.shape != (size,):
        raise ValueError(f"{what} has shape {given.shape}, not ({size},)")
    return given


def encode(vector: Array, *, compressed: bool) -> Array:
    """Return what travels of a vector, or refuse what is no number.

    Raises
    ------
    PushRejectedError
        For what is not finite, or too large for float32.
    """
    words, finite = vector, bool(np.isfinite(vector).all())
    if compressed:
        flat = np.ascontiguousarray(vector)
        words = np.empty(len(flat), _CODEC.dtype)
        finite = _CODEC.encode(flat, words, cache_dir=config.cache_dir())
    if not finite:
        raise PushRejectedError(
            "there are numbers that are not finite, or too large for float32; nothing "
            "was sent"
        )
    return words


def decode(words: Array, *, compressed: bool) -> Array:
    """Return the float32 that have travelled."""
    if not compressed:
        return words
    found = np.empty(len(words), "f4")
    _CODEC.decode(words, found, cache_dir=config.cache_dir())
    return found


@dataclass
class _Slice:
    """A trainer's part of one parameter."""

    store: ParameterStore
    #: Number of the parameter among those of its launch.
    number: int
    start: int
    length: int
    weights: Array
    gradients: Array
    #: How often gradients were put, which is said with them.
    puts: int = 0

    @property
    def stamp(self) -> int:
        """The number that ends blocks of the last gradients; others do not count."""
        return 1 + self.puts % 60_000


@dataclass(frozen=True)
class AllReduceParameter:
    """A vector of which each partition owns a slice: its weights and their gradients.

    It is light and travels into tasks, as often as one likes; what a partition has of it
    stays in its trainer. All partitions call its methods in the same order, `get_weights`
    left aside; each call waits until all have made the one before, which is what the
    border of a Spark job was. A partition that has ended is not waited for: its gradients
    no longer count, and its slice of the weights stays as it is.

    Parameters
    ----------
    id : int
        Tells parameters apart in error messages.
    partition_num : int
        How many partitions there are.
    size : int
        Length of the vector. Of slices the first ``size % partition_num`` are one
        longer; with fewer elements than partitions some are empty.
    param_offset : int
        Where the vector begins in a larger one, which `init` adds to what it returns.
    compress : {"fp16", "none"}
        How vectors travel: as the upper 16 bits of float32, or as float32. In any case
        of letters.

    Raises
    ------
    ValueError, TypeError
        For arguments that cannot be.

    Examples
    --------
    >>> from daskps.compat import bigdl
    >>> parameter = bigdl.AllReduceParameter(0, partition_num=2, size=5, param_offset=10)
    >>> def main(part):
    ...     place = parameter.init(np.zeros(5, "f4"))
    ...     for _ in range(3):
    ...         weights = parameter.get_weights(np.empty(5, "f4")).wait_result()
    ...         parameter.put_gradients(weights - part)
    ...         parameter.aggregate_gradient_partition(2)
    ...         parameter.weight_partition[:] -= parameter.gradient_partition
    ...         parameter.send_weight_partition()
    ...     return place, parameter.weight_partition.tolist()
    >>> bigdl.launch(main, [1.0, 3.0])
    [((0, 10, 3), [2.0, 2.0, 2.0]), ((1, 13, 2), [2.0, 2.0])]
    """

    id: int
    partition_num: int
    size: int
    param_offset: int = 0
    compress: str = "fp16"
    _key: str = field(default_factory=lambda: uuid.uuid4().hex, init=False, repr=False)

    def __post_init__(self) -> None:
        whole(self.id, "id")
        whole(self.partition_num, "partition_num", 1)
        whole(self.size, "size", 1)
        whole(self.param_offset, "param_offset", 0)
        if not isinstance(self.compress, str):
            raise TypeError(
                f'compress is "fp16" or "none", found {self.compress!r:.60}'
            )
        if self.compress.lower() not in ("fp16", "none"):
            raise ValueError(
                f'compress is "fp16" or "none", found {self.compress!r:.60}'
            )

    @classmethod
    def new_parameter(
        cls,
        partition_num: int,
        size: int,
        param_offset: int = 0,
        compress: str = "fp16",
    ) -> AllReduceParameter:
        """Make one with an id that no other of this process has.

        Parameters
        ----------
        partition_num, size, param_offset, compress
            As for the class.

        Returns
        -------
        AllReduceParameter
            The parameter.
        """
        return cls(next(_ids), partition_num, size, param_offset, compress)

    def init(self, parameter: Array) -> tuple[int, int, int]:
        """Take the own slice of the first weights, and show it to all.

        Parameters
        ----------
        parameter : ndarray, float32 or float64, shape (size,)
            All of them, the same in every partition.

        Returns
        -------
        tuple of int
            Number of this partition, where its slice starts (`param_offset` included),
            and how long it is. Called again, it begins anew.

        Raises
        ------
        ValueError, TypeError
            For another shape or dtype, float64 without compression, and where there are
            not `partition_num` trainers.
        """
        given = check_vector(
            parameter, "parameter", self.size, compressed=self._compressed
        )
        here = base.here(SYSTEM)
        if here.size != self.partition_num:
            raise ValueError(
                f"parameter {self.id} has partition_num={self.partition_num}, but there "
                f"are {here.size} partitions"
            )
        mine: _Slice | None = here.kept.get(self._key)
        if mine is None:
            what = f"init of a vector of {self.size}, {self.compress.lower()}"
            _settle(here)
            store = here.make_store(self._create, what)
            start, length = self._slice(here.rank)
            number = sum(isinstance(kept, _Slice) for kept in here.kept.values())
            nothing = np.zeros(0, given.dtype)
            mine = here.kept[self._key] = _Slice(
                store, number, start, length, nothing, nothing
            )
        mine.weights = given[mine.start : mine.start + mine.length].copy()
        mine.gradients = np.zeros_like(mine.weights)
        mine.puts += 1
        self._publish(mine, "init")
        return here.rank, self.param_offset + mine.start, mine.length

    def get_weights(self, local_parameter: Array) -> FutureResult:
        """Begin to copy the weights of all partitions.

        Parameters
        ----------
        local_parameter : ndarray, float32 or float64, shape (size,)
            Takes them; it belongs to the call until that is waited for.

        Returns
        -------
        FutureResult
            Of `local_parameter`. The next call of another method waits for it too.

        Raises
        ------
        ValueError, TypeError
            For another shape or dtype, and what cannot be written.
        RuntimeError
            Before :meth:`init`.
        """
        out = local_parameter
        check_vector(out, "local_parameter", self.size, compressed=self._compressed)
        if not out.flags.writeable:
            raise ValueError("local_parameter is read-only; give an array to write to")
        mine = self._mine()
        gets: Behind = base.here(SYSTEM).kept["gets"]

        def get() -> Array:  # behind the wait for all that have made the call before
            out[:] = decode(
                mine.store["wire"].pull(timeout=None), compressed=self._compressed
            )
            return out

        return FutureResult(gets.do(get))

    def put_gradients(self, parameter: Array) -> None:
        """Cut a gradient into slices, and bring each to its owner.

        Parameters
        ----------
        parameter : ndarray, float32 or float64, shape (size,)
            The result of this partition.

        Raises
        ------
        ValueError, TypeError
            For another shape or dtype.
        PushRejectedError
            For what is not finite, also once it has been compressed.
        RuntimeError
            Before :meth:`init`.
        """
        given = check_vector(
            parameter, "parameter", self.size, compressed=self._compressed
        )
        mine, sender = self._mine(), base.here(SYSTEM).rank
        wire = encode(given, compressed=self._compressed)
        with self._phase(mine, "put_gradients"):
            mine.puts += 1
            for receiver in range(self.partition_num):
                start, length = self._slice(receiver)
                if length:
                    first = self._first(receiver) + sender * (length + 1)
                    block = mine.store["gradients"].region(first, first + length + 1)
                    words = np.append(wire[start : start + length], mine.stamp)
                    block.assign(words.astype(wire.dtype), timeout=None)

    def aggregate_gradient_partition(self, avg_numbers: float) -> None:
        """Sum the gradients of the own slice, and divide them by a number.

        The sum is of float32 (of float64 where the weights are), in the order of
        partitions, and lies in :attr:`gradient_partition`.

        Parameters
        ----------
        avg_numbers : float
            How many contributions there are, for their mean.

        Raises
        ------
        ValueError, TypeError
            For a number that is not above 0.
        RuntimeError
            Before :meth:`init`.
        """
        share = number(avg_numbers, "avg_numbers")
        if share <= 0:
            raise ValueError(f"avg_numbers must be above 0, found {avg_numbers!r}")
        mine, n, here = self._mine(), self.partition_num, base.here(SYSTEM)
        with self._phase(mine, "aggregate_gradient_partition"):
            if mine.length:
                first, each = self._first(here.rank), mine.length + 1
                blocks = mine.store["gradients"].region(first, first + n * each)
                found = blocks.pull(timeout=None).reshape(n, each)
                put = found[found[:, -1] == mine.stamp, :-1].reshape(-1)
                grads = decode(put, compressed=self._compressed)
                rows = grads.reshape(-1, mine.length)
                total = rows.sum(0, dtype=mine.weights.dtype)
                mine.gradients[:] = total / total.dtype.type(share)

    def send_weight_partition(self) -> None:
        """Show all partitions what :attr:`weight_partition` has become.

        Raises
        ------
        PushRejectedError
            For what is not finite.
        RuntimeError
            Before :meth:`init`.
        """
        self._publish(self._mine(), "send_weight_partition")

    @property
    def weight_partition(self) -> Array:
        """The own slice of the weights, in full precision; write to it in place."""
        return self._mine().weights

    @property
    def gradient_partition(self) -> Array:
        """The own slice of the gradients, as it was aggregated last; zeros before."""
        return self._mine().gradients

    # -- what they are made of -------------------------------------------------------

    @property
    def _compressed(self) -> bool:
        return self.compress.lower() == "fp16"

    def _slice(self, partition: int) -> tuple[int, int]:
        """Return where the slice of a partition starts, and how long it is."""
        each, more = divmod(self.size, self.partition_num)
        return partition * each + min(partition, more), each + (partition < more)

    def _first(self, receiver: int) -> int:
        """Return where the blocks begin that an owner is sent, each with its stamp."""
        return self.partition_num * (self._slice(receiver)[0] + receiver)

    def _create(self, name: str) -> ParameterStore:
        """Make the store: what travels, and for each owner what is sent to it."""
        wire = "uint16" if self._compressed else "float32"
        blocks = self._first(self.partition_num)
        params = {
            "wire": daskps.ArraySpec((self.size,), wire, 0),
            "gradients": daskps.ArraySpec((blocks,), wire, 0),
        }
        store: ParameterStore = daskps.create(
            params, name=name, shards=self.partition_num
        )
        return store

    def _mine(self) -> _Slice:
        mine: _Slice | None = base.here(SYSTEM).kept.get(self._key)
        if mine is None:
            raise RuntimeError(
                f"parameter {self.id} has no weights here yet; call init in every "
                f"partition first"
            )
        return mine

    def _publish(self, mine: _Slice, what: str) -> None:
        wire = encode(mine.weights, compressed=self._compressed)
        with self._phase(mine, what):
            if mine.length:
                part = mine.store["wire"].region(mine.start, mine.start + mine.length)
                part.assign(wire, timeout=None)

    @contextmanager
    def _phase(self, mine: _Slice, what: str) -> Iterator[None]:
        """Act once all have made the call before; begin to wait for them in this one."""
        here = base.here(SYSTEM)
        gets = _settle(here)
        yield
        gets.do(partial(here.join, f"{what} of parameter {mine.number}"))


def _settle(here: Participant) -> Behind:
    """Wait until all partitions have made the same call as this one, its last one.

    Raises
    ------
    ValueError
        In all partitions, where one has made another.
    """
    gets: Behind = here.kept["gets"]
    gets.settle()
    return gets
