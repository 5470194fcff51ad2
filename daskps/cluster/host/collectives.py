"""All-reduces under way at one host, and sums of aggregates that it keeps.

Arrays are cut into parts, and one shard's host reduces each; an array that is there
belongs to one part. A part is a :class:`daskps.reduction.Reduction`, so that at most
ceil(P / 2) + 1 arrays are held for P ranks. Ranks that have finished are skipped in
place.

Results stay until no rank can ask for them again, see :meth:`Collectives.told`.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps import config
from daskps.errors import (
    ConsistencyError,
    ContributionLostError,
    LayoutError,
    ProtocolError,
    PushRejectedError,
    RunCancelledError,
)
from daskps.kernels import finite
from daskps.layout.arrays import DTYPES, FLOATS, compute_dtype
from daskps.layout.bounds import bounds
from daskps.limits import MOST_PARAMETERS
from daskps.reduction import OPERATIONS, Reduction
from daskps.shards.rounds.mailbox import n_slices
from daskps.typing import Array

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Number of ended runs that are remembered: their trainers may still be at work.
_REMEMBERED = 1_000
#: How long a host keeps reduced contributions for a caller that does not come back.
KEPT_SECONDS = 300.0
#: Reduced arrays by shard and position of the piece.
ReducedPieces = dict[tuple[int, int], Array]


class PartPlace(NamedTuple):
    """Identifies one part of one all-reduce of one run."""

    run: int
    number: int
    part: int
    parts: int


class Offered(NamedTuple):
    """Description of the arrays that a rank brings to an all-reduce."""

    op: str
    #: Name, shape and dtype of each.
    arrays: Sequence[tuple[str, Sequence[int], str]]
    #: The rank's clock, if all ranks must be at the same one: a rank may start again.
    clock: int = -1

    @classmethod
    def of(
        cls, op: str, arrays: Sequence[tuple[str, Sequence[int], str]], clock: int
    ) -> Offered:
        """Return the arrays that a rank announces in a message, or refuse the message.

        Raises
        ------
        ProtocolError
            If no trainer sends such a message.
        """
        if op not in OPERATIONS or not 1 <= len(arrays) <= MOST_PARAMETERS:
            raise ProtocolError(f"an allreduce {op!r:.60} of {len(arrays)} arrays")
        for name, shape, dtype in arrays:
            is_known = dtype in (FLOATS if op == "mean" else DTYPES)
            if not is_known or any(not 0 <= n < 2**47 for n in shape):
                raise ProtocolError(
                    f"an allreduce of {name!r:.60}, {list(shape)!r:.60}, {dtype!r:.60}"
                )
        about = tuple((name, tuple(shape), dtype) for name, shape, dtype in arrays)
        return cls(op, about, clock)

    def extent(self, index: int, part: int, parts: int) -> tuple[int, int]:
        """Return the elements of an array, in C order, that a part has."""
        return bounds(math.prod(self.arrays[index][1]), parts, part)

    def differs(self, other: Offered) -> str:
        """Return in words how it differs from another one; "" if it does not."""
        if self.clock != other.clock:
            return f"clock {self.clock}, and not {other.clock}"
        if self.op != other.op:
            return f"op={self.op!r}, and not {other.op!r}"
        for mine, its in zip(self.arrays, other.arrays, strict=False):
            if mine[0] and its[0] and mine[0] != its[0]:
                return f"{mine[0][:60]!r}, and not {its[0][:60]!r}"
            if mine != its:
                return f"{_described(*mine)}, and not {_described(*its)}"
        if len(self.arrays) != len(other.arrays):
            return f"{len(self.arrays)} arrays, and not {len(other.arrays)}"
        return ""


#: The same in a message.
OfferedWire = tuple[str, Sequence[tuple[str, Sequence[int], str]], int]


def _described(name: str, shape: Sequence[int], dtype: str) -> str:
    return f"{name[:60]!r} of shape {shape} and {dtype}" if name else f"{shape} {dtype}"


def narrowed(array: Array, dtype: str, error: str) -> Array:
    """Return a sum in the dtype of its parameter.

    Raises
    ------
    PushRejectedError
        With the text `error`, unless that is empty, if it is not finite there.
    """
    with np.errstate(all="ignore"):
        found = array.astype(dtype, copy=False)
    if error and not finite(found):
        raise PushRejectedError(error)
    return found


class Collective(Reduction):
    """One part of one all-reduce: the ranks in it, and the sums so far.

    Threads: one at a time, under the lock of its :class:`Collectives`.

    Parameters
    ----------
    size : int
        Number of ranks.
    brought, first : Offered, int
        The description by the first rank, and the number of that rank.
    nbytes : int
        The most bytes that it can need.
    """

    def __init__(self, size: int, brought: Offered, first: int, nbytes: int) -> None:
        super().__init__(size, brought.op)
        self.brought, self.first, self.nbytes = brought, first, nbytes
        #: The reduced arrays by index; no caller can call it off.
        self.answer: Future[list[Array]] = Future()
        self.answer.set_running_or_notify_cancel()
        self._on_loop: asyncio.Future[list[Array]] | None = None
        self._looks = config.check_finite()

    @property
    def done(self) -> bool:
        """Whether there is a result or an error."""
        return self.answer.done()

    def on_loop(self) -> asyncio.Future[list[Array]]:
        """Return the answer for all who wait on the event loop; they may not cancel it."""
        if self._on_loop is None:
            self._on_loop = asyncio.wrap_future(self.answer)
            # An error that nobody waits for is not told to the log.
            self._on_loop.add_done_callback(lambda of: of.cancelled() or of.exception())
        return self._on_loop

    def check(self, rank: int, brought: Offered) -> None:
        """Refuse a description unlike the first one; the part then fails for all.

        Raises
        ------
        ValueError
            The message names the ranks and the difference.
        """
        words = brought.differs(self.brought)
        if not words:
            return
        error = ValueError(
            f"trainer {rank} brings to an allreduce {words}, as trainer {self.first} does; "
            f"all trainers must call it with the same names, shapes, dtypes and op, and as "
            f"often between two ticks; a resumable loop before the push that ends a step"
        )
        if not self.done:
            self.fail(error)
        raise error

    def bring(self, rank: int, arrays: Sequence[Array]) -> None:
        """Take a rank's arrays over as their only owner; ignore a repeat."""
        if self.done or rank in self.present:
            return
        # If a rank brings an infinity or NaN, the result has it, without an error.
        self._looks = self._looks and all(map(finite, arrays))
        wide = [a.astype(compute_dtype(a.dtype.name), copy=False) for a in arrays]
        whole = dict(enumerate(wide))
        if self.add((whole, dict.fromkeys(whole, 1.0)), rank):
            self._finish()

    def leave_out(self, rank: int) -> bool:
        """Stop waiting for a rank; return whether that completes it."""
        completes = not self.done and super().leave_out(rank)
        if completes:
            self._finish()
        return completes

    def fail(self, error: Exception) -> None:
        """Give an error to all ranks."""
        self.nodes.clear()
        self.answer.set_exception(error)

    def _finish(self) -> None:
        sums, op = self.take(), self.reduce
        found, error = [], ""
        for index, (name, _, dtype) in enumerate(self.brought.arrays):
            if self._looks:
                error = (
                    f"the {op} of what trainers bring to an allreduce"
                    f"{f' for {name[:60]!r}' if name else ''} overflows {dtype}, and all "
                    f"of it is finite; scale it down, or set the configuration value "
                    f"daskps.finite to 'allow'"
                )
            try:
                found.append(narrowed(sums[index], dtype, error))
            except PushRejectedError as refused:
                self.fail(refused)
                return
        self.nodes.clear()
        self.answer.set_result(found)


class WholeResult(NamedTuple):
    """The result of an all-reduce, kept where a rank has got it."""

    brought: Offered
    flats: Sequence[Array]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(flat.nbytes for flat in self.flats)


@dataclass
class _RunHere:
    """The all-reduces of one run at one host."""

    #: Parts by number of the all-reduce and index of the part.
    parts: dict[tuple[int, int], Collective] = field(default_factory=dict)
    wholes: dict[int, WholeResult] = field(default_factory=dict)
    #: For each rank the first number that it may ask for again.
    floors: dict[int, int] = field(default_factory=dict)
    #: Ranks that have finished, as this host has heard: perhaps after a look at `live`.
    finished: set[int] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        held = sum(part.nbytes for part in self.parts.values())
        return held + sum(whole.nbytes for whole in self.wholes.values())

    def forget(self, floor: int) -> None:
        for key in [key for key in self.parts if key[0] < floor]:
            del self.parts[key]
        for number in [number for number in self.wholes if number < floor]:
            del self.wholes[number]


class Collectives:
    """The all-reduces of all runs at one host, and sums of aggregates; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._runs: dict[int, _RunHere] = {}
        self._ended: dict[int, None] = {}
        #: Sums of aggregates by token, and when they are dropped.
        self._kept: dict[str, tuple[float, ReducedPieces]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of all-reduces."""
        with self._lock:
            return sum(here.nbytes for here in self._runs.values())

    def _here(self, run: int) -> _RunHere:
        if run in self._ended:
            raise RunCancelledError(f"run {run} is over")
        return self._runs.setdefault(run, _RunHere())

    def told(self, run: int, rank: int, floor: int, live: Iterable[int]) -> int:
        """Hear the first number that a rank may ask for; return the first of all ranks.

        The rank asks for none below `floor`. The host forgets results that none of the
        `live` ranks may ask for.
        """
        with self._lock:
            here = self._here(run)
            here.floors[rank] = max(floor, here.floors.get(rank, 0))
            least = min((here.floors.get(one, 0) for one in live), default=floor)
            here.forget(least)
            return least

    def join(
        self,
        place: PartPlace,
        rank: int,
        brought: Offered,
        *,
        live: Sequence[bool],
        room: int | None,
    ) -> Collective:
        """Return a part of an all-reduce; the first rank that comes creates it.

        `live` says for each rank whether the others wait for it, `room` how many bytes
        all parts may take, None for no limit.

        Raises
        ------
        ValueError
            If the rank brings other arrays than the first.
        """
        with self._lock:
            here, key = self._here(place.run), (place.number, place.part)
            found = here.parts.get(key)
            if found is None:
                nbytes = _needed(brought, place, len(live))
                found = Collective(len(live), brought, rank, nbytes)
                if room is not None and self.nbytes + nbytes > room:
                    found.nbytes = 0
                    found.fail(_no_room(nbytes, self.nbytes, room))
                here.parts[key] = found
            found.check(rank, brought)
            for other, is_live in enumerate(live):
                if not is_live or other in here.finished:
                    found.leave_out(other)
            return found

    def bring(self, collective: Collective, rank: int, arrays: Sequence[Array]) -> None:
        """Take a rank's arrays into a part."""
        with self._lock:
            collective.bring(rank, arrays)

    def leave_out(self, run: int, rank: int) -> None:
        """Stop waiting for a rank of a run."""
        with self._lock:
            if run not in self._ended:
                here = self._here(run)
                here.finished.add(rank)
                for part in here.parts.values():
                    part.leave_out(rank)

    def keep(self, run: int, number: int, whole: WholeResult, floor: int) -> None:
        """Keep a result that a rank here has got, and drop those below `floor`."""
        with self._lock:
            if run not in self._ended:
                here = self._here(run)
                here.forget(floor)
                here.wholes[number] = whole

    def find(self, run: int, number: int) -> WholeResult | None:
        """Return a result that a rank here has got, if it is kept."""
        with self._lock:
            here = self._runs.get(run)
            return here.wholes.get(number) if here else None

    def end(self, run: int, error: Exception) -> None:
        """Drop all parts and results of a run; waiting calls get an error."""
        with self._lock:
            self._ended[run] = None
            if len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]
            here = self._runs.pop(run, None)
            for part in here.parts.values() if here else ():
                if not part.done:
                    part.fail(error)

    def keep_pieces(self, token: str, found: ReducedPieces) -> None:
        """Keep sums of an aggregate; drop those whose caller has not come in time."""
        now = time.monotonic()
        for old in [t for t, (end, _) in self._kept.items() if end < now]:
            del self._kept[old]
        self._kept[token] = now + KEPT_SECONDS, found

    def pieces(self, token: str, shards: Iterable[int]) -> ReducedPieces:
        """Return the sums of an aggregate.

        Raises
        ------
        ContributionLostError
            If those of some shard are not kept: the caller must reduce again.
        """
        _, found = self._kept.get(token, (0.0, ReducedPieces()))
        if not {shard for shard, _ in found}.issuperset(shards):
            raise ContributionLostError(
                "what contributions have come to went with the worker that had it; "
                "reduce them again"
            )
        return found

    def drop_pieces(self, token: str) -> None:
        """Drop the sums of an aggregate."""
        self._kept.pop(token, None)


def _needed(brought: Offered, place: PartPlace, size: int) -> int:
    """Return the most bytes that a part can need."""
    nbytes = 0
    for index, (_, _, dtype) in enumerate(brought.arrays):
        start, stop = brought.extent(index, place.part, place.parts)
        nbytes += (stop - start) * np.dtype(compute_dtype(dtype)).itemsize
    return nbytes * n_slices(size, "sum")


def _no_room(nbytes: int, held: int, room: int) -> LayoutError:
    return LayoutError(
        f"an allreduce needs up to {nbytes:,} bytes on a worker that holds {held:,} of "
        f"others and has room for {room:,}; give the store more shards, reduce fewer "
        f"elements at a time, or tick between two of them where the run is resumable"
    )


def check_alike(absent: Iterable[Sequence[int]]) -> None:
    """Refuse a result whose parts include different ranks.

    Raises
    ------
    ConsistencyError
        The message names the ranks.
    """
    found = {frozenset(ranks) for ranks in absent}
    if len(found) > 1:
        odd = sorted(frozenset().union(*found) - frozenset.intersection(*found))
        raise ConsistencyError(
            f"trainers {odd[:8]} finished while they were in an allreduce: some shards "
            f"have their arrays and others do not; end a trainer after its last call"
        )
