"""Reads without a lock or a message, made ready once: into arrays, and as views.

Between two reads of the same parameters nothing changes but the clock: which shards,
which of their elements, which places. What a small read costs is the Python between the
call and the copy, so all of that is looked up once.

A view copies nothing. Under BSP a shard applies round t + 1 only with the contribution of
every live trainer. It writes that round to buffers that are not in force, and none before
t + 2 to one that was read at clock t. So what a trainer reads at its clock stays as it is
until it has ticked twice.
"""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.cluster.caller.routes import Target, at_least
from daskps.cluster.caller.shard_map import Prepared
from daskps.cluster.host.copy_routine import copier
from daskps.cluster.machine.pauses import Pause
from daskps.shards.memory.format import MIXED
from daskps.shards.memory.sides import runs
from daskps.shards.reads import NOT_YET, LatestReads, TrainerReads
from daskps.typing import Array

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from daskps.cluster.caller.far import Counters
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.caller.ways import Ways
    from daskps.cluster.host.copy_routine import Copy
    from daskps.cluster.wire.messages import Range
    from daskps.shards.memory.segment import Segment

#: How often a copy that updates run into is tried again.
TRIES = 4
#: How long a read waits without asking the shards, and how much of it without a sleep.
WAIT_SECONDS, SPIN_SECONDS = 0.01, 0.0005
#: How often the shards' owners are looked after: one that is gone publishes nothing more,
#: and what is read from its memory would look as if nobody pushed.
LOOK_SECONDS = 0.1

#: Which array, which of its elements, and what to copy there.
PieceCopy = tuple[int, slice, Array]
PieceCopies = tuple[PieceCopy, ...]
#: Which array a range goes to, and where.
ArraySlice = tuple[int, slice]
#: A parameter in one shard: who looks, which piece, and that in both buffers.
Seen = tuple[TrainerReads, int, tuple[Array, Array]]


class Source(NamedTuple):
    """One shard of a read."""

    shard: int
    looks: TrainerReads
    #: What to copy where all of its weights lie in one buffer, for either of them.
    whole: tuple[PieceCopies, PieceCopies]
    #: What to copy at a flip where they do not.
    mixed: Callable[[int], PieceCopies]


class PreparedRead:
    """One read, ready to be repeated into whatever arrays.

    It holds none of them: what a loop has let go of must not be kept alive here.

    Parameters
    ----------
    ways : Ways
        How this process reaches the shards, and whose reads these are.
    ranges : mapping of int to tuple of Range
        What to read of which shard.
    places : mapping of int to sequence of (int, slice), optional
        For each of these which array it goes to, and where; by default each has an
        array of its own.
    """

    def __init__(
        self,
        ways: Ways,
        ranges: Mapping[int, tuple[Range, ...]],
        places: Mapping[int, Sequence[ArraySlice]] | None = None,
    ) -> None:
        self.ranges, self._places = ranges, places
        self._sources: list[Source] = []
        lives: set[Callable[[], bool]] = set()
        self._next_look = 0.0
        #: Clocks by which the slowest live trainer was behind at the last read.
        self.lag = 0
        each = itertools.chain.from_iterable(ranges.values())
        nbytes = sum((b - a) * np.dtype(dtype).itemsize for dtype, a, b in each)
        copy = copier(nbytes)
        #: None to assign to a slice, which costs half of what a call of `copyto` does.
        self._copy: Copy | None = None if copy is np.copyto else copy
        numbers = itertools.count()
        #: Hosts whose shards it reads.
        self.n_hosts = 0
        #: Whether all shards can be read without a message.
        self.is_possible = True
        for shard, asked in ranges.items():
            found = ways.find_shard(shard)
            if found is None or found[1].locks_reads:
                self.is_possible = False
                return
            serving, hosted = found
            segment = hosted.shard.segment
            at = (
                places[shard]
                if places
                else [(next(numbers), slice(None)) for _ in asked]
            )
            whole = _pieces(segment, 0, asked, at), _pieces(segment, 1, asked, at)
            mixed = partial(_mixed, segment, asked, at)
            self._sources.append(Source(shard, _looks_at(segment, ways), whole, mixed))
            lives.add(serving.is_live)
        self._lives, self.n_hosts = [*lives], len(lives)

    def read(self, bound: Any, outs: Sequence[Array]) -> bool:
        """Read what may be read; False where the shards must be asked.

        Parameters
        ----------
        bound : int or Version
            The clock of a trainer; outside runs the version that is wanted.
        outs : sequence of ndarray, shape (n,)
            Where the ranges go.

        Returns
        -------
        bool
            Whether all of it was read.
        """
        if time.monotonic() > self._next_look and not self._are_owners_live():
            return False
        copy, least, lag = self._copy, bound, 0
        for shard, looks, whole, mixed in self._sources:
            if type(bound) is not int:
                least = at_least(shard, bound)
            for _ in range(TRIES):
                flip = looks.find_flip(least)
                if flip == NOT_YET:
                    flip = wait(looks, least)
                if flip < 0:
                    return False
                side = looks.side(flip)
                pieces = mixed(flip) if side == MIXED else whole[side]
                for position, where, source in pieces:
                    if copy is None:
                        outs[position][where] = source
                    else:
                        copy(outs[position][where], source)
                if looks.is_whole(flip):
                    break
            else:
                return False
            lag = max(lag, looks.lag)
        self.lag = lag
        return True

    def _are_owners_live(self) -> bool:
        if not all(lives() for lives in self._lives):
            return False
        self._next_look = time.monotonic() + LOOK_SECONDS
        return True


def _looks_at(segment: Segment, ways: Ways) -> TrainerReads:
    if ways.run:
        return TrainerReads(segment, ways.run, ways.rank)
    return LatestReads(segment, 0, -1)


def wait(looks: TrainerReads, clock: int) -> int:
    """Wait a little for the other trainers: a round is short, where they are near."""
    pause = Pause(SPIN_SECONDS)
    while (flip := looks.find_flip(clock)) == NOT_YET and pause.seconds < WAIT_SECONDS:
        pause()
    return flip


def _pieces(
    segment: Segment,
    side: int,
    ranges: Iterable[Range],
    places: Iterable[ArraySlice],
) -> PieceCopies:
    return tuple(
        (position, where, segment.vectors[side][dtype][start:stop])
        for (dtype, start, stop), (position, where) in zip(ranges, places, strict=True)
    )


def _mixed(
    segment: Segment,
    ranges: Iterable[Range],
    places: Iterable[ArraySlice],
    flip: int,
) -> PieceCopies:
    found, record = [], segment.record(flip)
    for part, (position, where) in zip(ranges, places, strict=True):
        at = where.start or 0
        for weights in runs(segment, record, part):
            found.append((position, slice(at, at + len(weights)), weights))
            at += len(weights)
    return tuple(found)


class NamedRead:
    """A read of whole parameters by their names, in that order.

    Parameters
    ----------
    meta : StoreMap
        The store.
    ways : Ways
        How this process reaches its shards.
    names : tuple of str
        Which parameters.
    target : Target
        The same read into some arrays.
    """

    def __init__(
        self, meta: StoreMap, ways: Ways, names: tuple[str, ...], target: Target
    ) -> None:
        layout = meta.layout
        parameters = [layout[name] for name in names]
        self._wanted = [(p.shape, np.dtype(p.dtype)) for p in parameters]
        self._places: dict[int, list[ArraySlice]] = {s: [] for s in target.ranges}
        for position, p in enumerate(parameters):
            for piece in layout.pieces_of[p.index]:
                if piece.start < piece.stop:
                    where = slice(piece.start, piece.stop)
                    self._places[piece.shard].append((position, where))
        self.prepared = PreparedRead(ways, target.ranges, self._places)

    def flats(self, out: Mapping[str, Array]) -> list[Array] | None:
        """Return the arrays as vectors; None for others to look at them."""
        flats = []
        for array, (shape, dtype) in zip(out.values(), self._wanted, strict=True):
            if not (
                type(array) is np.ndarray
                and array.shape == shape
                and array.dtype == dtype
                and array.flags.carray
            ):
                return None
            flats.append(array.ravel())
        return flats

    def target(self, out: Mapping[str, Array]) -> Target | None:
        """Return this read into the arrays of `out`; None for others to look at them."""
        flats, found = self.flats(out), dict(out)
        if flats is None:
            return None
        outs = {
            shard: [flats[position][where] for position, where in places]
            for shard, places in self._places.items()
        }
        return Target(self.prepared.ranges, outs, lambda: found)


class Reads:
    """The prepared reads of one handle, or of one trainer.

    Parameters
    ----------
    meta : StoreMap
        The store.
    ways : Ways
        How this process reaches its shards, and whose reads these are.
    counters : Counters
        What they count in.
    """

    def __init__(self, meta: StoreMap, ways: Ways, counters: Counters) -> None:
        self._meta, self._ways, self._counters = meta, ways, counters
        self._named: Prepared[tuple[str, ...] | None, NamedRead] = Prepared(meta)
        #: What was read last, under the one key: loops read the same again.
        self._latest: Prepared[None, PreparedRead] = Prepared(meta, most=1)
        most = max(1, len(meta.layout.parameters))
        self._seen: Prepared[str, tuple[Seen | None]] = Prepared(meta, most)
        #: Largest number of clocks a live trainer was behind one of these reads.
        self.lag = 0

    def clear(self) -> None:
        """Forget all reads, and with them the shards' memory."""
        for known in (self._named, self._latest, self._seen):
            known.clear()

    def read(self, names: Any, out: Any, bound: Any) -> dict[str, Array] | None:
        """Repeat a read that is known; None where it is not, or has to wait."""
        known = self._named.find(_asked(names, out))
        if known is None:
            return None
        flats, prepared = known.flats(out), known.prepared
        if flats is None or not prepared.read(bound, flats):
            return None
        self.lag = max(self.lag, prepared.lag)
        return dict(out)

    def target(self, names: Any, out: Any) -> Target | None:
        """Return where a known read goes; None where it is not known."""
        known = self._named.find(_asked(names, out))
        return None if known is None else known.target(out)

    def learn(self, names: Any, out: Mapping[str, Array], target: Target) -> None:
        """Make a read ready for the next time, unless it is."""
        asked, where = _asked(names, out), self._meta.where
        if asked is not None and self._named.find(asked) is None:
            made = NamedRead(self._meta, self._ways, asked, target)
            if made.prepared.is_possible:
                self._named.keep(asked, made, where)

    def fill(self, target: Target, bound: Any) -> bool:
        """Repeat the read of a target; return whether that was possible."""
        known, where = self._latest.find(None), self._meta.where
        if known is None or known.ranges != target.ranges:
            known = PreparedRead(self._ways, target.ranges)
            if not known.is_possible:
                return False
            self._latest.keep(None, known, where)
        outs = [out for shard in target.ranges for out in target.outs[shard]]
        if not known.read(bound, outs):
            return False
        self._counters.local_calls += known.n_hosts
        self.lag = max(self.lag, known.lag)
        return True

    # -- without a copy ----------------------------------------------------------

    def views(self, names: Iterable[str], clock: int) -> dict[str, Array]:
        """Return read-only views of those parameters of which that is possible.

        They must lie in one shard whose memory this process has, in a BSP run.
        """
        found = {}
        for name in names:
            known, where = self._seen.find(name), self._meta.where
            if known is None:
                known = (self._look(name),)
                self._seen.keep(name, known, where)
            if (seen := known[0]) is None:
                continue
            looks, position, buffers = seen
            flip = looks.find_flip(clock)
            if flip == NOT_YET:
                flip = wait(looks, clock)
            if flip >= 0:
                found[name] = buffers[looks.side_of(flip, position)]
        return found

    def late(self, names: Iterable[str], seen: Container[str]) -> list[str]:
        """Return those that can be seen once their round is complete."""
        return [
            name
            for name in names
            if name not in seen
            and (known := self._seen.find(name)) is not None
            and known[0] is not None
        ]

    def _look(self, name: str) -> Seen | None:
        meta, parameter = self._meta, self._meta.layout[name]
        pieces = [p for p in meta.layout.pieces_of[parameter.index] if p.size]
        if not self._ways.bsp or len(pieces) != 1:
            return None
        shard = pieces[0].shard
        found = self._ways.find_shard(shard)
        if found is None or found[1].locks_reads:
            return None
        segment = found[1].shard.segment
        position = meta.layout.positions[shard, parameter.index]
        buffers = [w[position].reshape(parameter.shape) for w in segment.weights]
        for buffer in buffers:
            buffer.flags.writeable = False
        return _looks_at(segment, self._ways), position, (buffers[0], buffers[1])


def _asked(names: Any, out: Any) -> tuple[str, ...] | None:
    """Return the names of a read whose arrays are all in `out`, in that order."""
    if not isinstance(out, dict):
        return None
    given = tuple(out)
    if names is None or given == ((names,) if type(names) is str else names):
        return given
    return None
