"""Reads without a lock or a message, prepared once: into arrays, and as views.

Between two reads of the same parameters nothing changes but the clock: shards, elements
and places stay. The cost of a small read is the Python between the call and the copy,
so a prepared read looks all of that up once.

A view copies nothing. Under BSP a shard applies round t + 1 only with the contribution
of every live trainer. It writes that round to buffers that are not in force, and no
round before t + 2 to one that was read at clock t. So a view that a trainer takes at
its clock stays as it is until it has ticked twice.
"""

from __future__ import annotations

import time
import weakref
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.cluster.caller.lane_read import LaneRead
from daskps.cluster.caller.lane_row_reads import LaneRowReads
from daskps.cluster.caller.looks import LOOK_SECONDS, NotedReads, looks_at, wait
from daskps.cluster.caller.routes import Step
from daskps.cluster.caller.row_reads import RowReads
from daskps.cluster.caller.shard_map import Prepared
from daskps.cluster.caller.targets import Target, find_overlap
from daskps.cluster.host.copy_routine import copier
from daskps.cluster.wire.deadline import Deadline
from daskps.shards.memory.format import MIXED
from daskps.shards.memory.sides import runs
from daskps.shards.reads import NOT_YET, TrainerReads
from daskps.typing import Array

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from daskps.cluster.caller.far import Far
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.caller.targets import ReadSlice
    from daskps.cluster.caller.ways import Ways
    from daskps.cluster.host.copy_routine import Copy
    from daskps.shards.memory.segment import Segment

#: Number of tries of a copy that updates run into.
TRIES = 4

#: Number of an array, elements of it, and the array to copy there.
PieceCopy = tuple[int, slice, Array]
PieceCopies = tuple[PieceCopy, ...]
#: A parameter in one shard: the object that looks, the piece, and its array in both
#: buffers.
Seen = tuple[TrainerReads, int, tuple[Array, Array]]


class Source(NamedTuple):
    """One shard of a read."""

    looks: TrainerReads
    #: By buffer the copies to make where all weights lie in that one.
    whole: tuple[PieceCopies, PieceCopies]
    #: Returns the copies to make at a flip where they do not.
    mixed: Callable[[int], PieceCopies]


class PreparedRead:
    """One read, ready to be repeated into any arrays.

    It holds none of them: arrays that a loop has let go of must not live on here.

    Parameters
    ----------
    ways : Ways
        How this process reaches the shards, and the trainer that reads.
    slices : mapping of int to tuple of ReadSlice
        By shard the elements to read, and the places that they go to.
    seen : dict of int to int, optional
        Takes the version that was read of each shard.
    """

    def __init__(
        self,
        ways: Ways,
        slices: Mapping[int, tuple[ReadSlice, ...]],
        seen: dict[int, int] | None = None,
    ) -> None:
        self.slices = slices
        self._sources: list[Source] = []
        lives: set[Callable[[], bool]] = set()
        self._next_look = 0.0
        #: Clocks by which the slowest live trainer was behind at the last read.
        self.lag = 0
        asked = [one.range for of in slices.values() for one in of]
        copy = copier(sum((b - a) * np.dtype(dtype).itemsize for dtype, a, b in asked))
        #: None to assign to a slice, which costs half as much as a call of `copyto`.
        self._copy: Copy | None = None if copy is np.copyto else copy
        #: Hosts whose shards it reads.
        self.n_hosts = 0
        #: Whether all shards can be read without a message.
        self.is_possible = True
        for shard, of in slices.items():
            found = ways.find_shard(shard)
            if found is None or found[1].locks_reads:
                self.is_possible = False
                return
            serving, hosted = found
            segment = hosted.shard.segment
            whole = _pieces(segment, 0, of), _pieces(segment, 1, of)
            mixed = partial(_mixed, segment, of)
            looks = looks_at(segment, ways)
            if seen is not None:
                looks = NotedReads(segment, ways, shard, seen)
            self._sources.append(Source(looks, whole, mixed))
            lives.add(serving.is_live)
        self._lives, self.n_hosts = [*lives], len(lives)

    def read(self, bounds: Iterable[int], outs: Sequence[Array]) -> bool:
        """Read without asking the shards; False where this may not be done.

        Parameters
        ----------
        bounds : iterable of int
            For each shard the clock of the trainer; outside runs the least version.
        outs : sequence of ndarray, shape (n,)
            The arrays to fill.

        Returns
        -------
        bool
            Whether all of it was read.
        """
        if time.monotonic() > self._next_look and not self._are_owners_live():
            return False
        copy, lag = self._copy, 0
        for (looks, whole, mixed), least in zip(self._sources, bounds, strict=False):
            for _ in range(TRIES):
                flip = looks.find_flip(least)
                if flip == NOT_YET:
                    flip = wait(looks, least)
                if flip < 0:
                    return False
                side = looks.side(flip)
                pieces = mixed(flip) if side == MIXED else whole[side]
                for number, where, source in pieces:
                    if copy is None:
                        outs[number][where] = source
                    else:
                        copy(outs[number][where], source)
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


def _pieces(segment: Segment, side: int, slices: Iterable[ReadSlice]) -> PieceCopies:
    vectors = segment.vectors[side]
    return tuple(
        (number, where, vectors[dtype][start:stop])
        for (dtype, start, stop), number, where in slices
    )


def _mixed(segment: Segment, slices: Iterable[ReadSlice], flip: int) -> PieceCopies:
    found, record = [], segment.record(flip)
    for asked, number, where in slices:
        at = where.start
        for weights in runs(segment, record, asked):
            found.append((number, slice(at, at + len(weights)), weights))
            at += len(weights)
    return tuple(found)


class NamedRead:
    """A read of whole parameters into arrays by their names.

    Parameters
    ----------
    ways : Ways
        How this process reaches their shards.
    far : Far
        The way to those of other processes.
    out : mapping of str to ndarray
        The arrays, in the order in which the target has them.
    target : Target
        The same read.
    seen : dict of int to int, optional
        As for :class:`PreparedRead`.
    """

    def __init__(
        self,
        ways: Ways,
        far: Far,
        out: Mapping[str, Array],
        target: Target,
        *,
        seen: dict[int, int] | None = None,
    ) -> None:
        self._wanted = [(array.shape, array.dtype) for array in out.values()]
        #: The arrays of the latest read, of which no two share memory.
        self._apart = [weakref.ref(array) for array in out.values()]
        self.slices = target.slices
        near: dict[int, tuple[ReadSlice, ...]] = {}
        far_slices: dict[int, tuple[ReadSlice, ...]] = {}
        for shard, of in target.slices.items():
            where = far_slices if ways.find_shard(shard) is None else near
            where[shard] = of
        #: The read of shards that this process reaches, and by lanes the read of the
        #: others.
        self.prepared, self.by_lane = PreparedRead(ways, near, seen), None
        if far_slices:
            step = Step(run=ways.run, rank=ways.rank)
            self.by_lane = LaneRead.of(far, far_slices, step, seen)
        #: Whether it is worth keeping.
        self.is_possible = self.prepared.is_possible and (
            not far_slices or self.by_lane is not None
        )

    def flats(self, out: Mapping[str, Array]) -> list[Array] | None:
        """Return the arrays as vectors; None where the general read must check them."""
        flats, is_known = [], True
        wanted = zip(out.values(), self._wanted, self._apart, strict=True)
        for array, (shape, dtype), latest in wanted:
            if not (
                type(array) is np.ndarray
                and array.shape == shape
                and array.dtype == dtype
                and array.flags.carray
            ):
                return None
            flats.append(array.ravel())
            is_known = is_known and latest() is array
        if not is_known:
            if find_overlap(out.items()):
                return None
            self._apart = [weakref.ref(array) for array in out.values()]
        return flats

    def target(self, out: Mapping[str, Array]) -> Target | None:
        """Return this read into `out`; None where the general read must check that."""
        flats, found = self.flats(out), dict(out)
        if flats is None:
            return None
        return Target(self.slices, flats, lambda: found)


class Reads:
    """The prepared reads of one handle, or of one trainer.

    Parameters
    ----------
    meta : StoreMap
        The store.
    ways : Ways
        How this process reaches its shards, and the trainer that reads.
    far : Far
        The way to those of other processes.
    seen : dict of int to int, optional
        Takes the version that was last read of each shard.
    """

    def __init__(
        self,
        meta: StoreMap,
        ways: Ways,
        far: Far,
        seen: dict[int, int] | None = None,
    ) -> None:
        self._meta, self._ways, self._far, self._seen_at = meta, ways, far, seen
        self._counters = far.counters
        #: The reads of rows of tables.
        by_lane = None if far.lanes is None else LaneRowReads(far, far.lanes)
        self.rows = RowReads(meta, ways, far.counters, by_lane)
        self._forever = Deadline(None, "a pull")
        self._named: Prepared[tuple[str, ...] | None, NamedRead] = Prepared(meta)
        #: The last read, under the one key: loops read the same again.
        self._latest: Prepared[None, PreparedRead] = Prepared(meta, most=1)
        most = max(1, len(meta.layout.parameters))
        self._seen: Prepared[str, tuple[Seen | None]] = Prepared(meta, most)
        #: Largest number of clocks that a live trainer was behind one of these reads.
        self.lag = 0

    def clear(self) -> None:
        """Forget all reads, and with them the shards' memory."""
        for known in (self._named, self._latest, self._seen, self.rows):
            known.clear()

    def read(
        self, names: Any, out: Any, clock: int, deadline: Deadline | None = None
    ) -> dict[str, Array] | None:
        """Repeat a read that is known; None where it is not, or has to wait.

        By lanes it waits as well.
        """
        known = self._named.find(_asked(names, out))
        if known is None or (flats := known.flats(out)) is None:
            return None
        near, far = known.prepared, known.by_lane
        lag: int | None = None
        if far is None:
            lag = near.lag if near.read(repeat(clock), flats) else None
        elif time.monotonic() > far.until:
            self._named.forget(_asked(names, out))
        elif not near.n_hosts:
            lag = far.read(clock, flats, deadline or self._forever)
        else:
            also = partial(near.read, repeat(clock), flats)
            lag = far.read(clock, flats, deadline or self._forever, also)
            lag = None if lag is None else max(lag, near.lag)
        if lag is None:
            return None
        self._counters.local_calls += near.n_hosts
        self.lag = max(self.lag, lag)
        return dict(out)

    def target(self, names: Any, out: Any) -> Target | None:
        """Return the target of a known read; None where it is not known."""
        known = self._named.find(_asked(names, out))
        return None if known is None else known.target(out)

    def learn(self, names: Any, out: Mapping[str, Array], target: Target) -> None:
        """Make a read ready for the next time, unless it is."""
        asked, where = _asked(names, out), self._meta.where
        if asked is not None and self._named.find(asked) is None:
            about = self._ways, self._far, out, target
            made = NamedRead(*about, seen=self._seen_at)
            if made.is_possible:
                self._named.keep(asked, made, where)

    def fill(self, target: Target, bounds: Iterable[int]) -> bool:
        """Read a target as far as these bounds; return whether that was possible."""
        if target.rows:
            if self._seen_at is not None:
                return False  # the shards say which version that is
            if not self.rows.fill(target, bounds):
                return False
            self.lag = max(self.lag, self.rows.lag)
            return True
        known, where = self._latest.find(None), self._meta.where
        if known is None or known.slices != target.slices:
            known = PreparedRead(self._ways, target.slices, self._seen_at)
            if not known.is_possible:
                return False
            self._latest.keep(None, known, where)
        if not known.read(bounds, target.flats):
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
            if (seen := self._find_seen(name)) is None:
                continue
            looks, position, buffers = seen
            flip = looks.find_flip(clock)
            if flip == NOT_YET:
                flip = wait(looks, clock)
            if flip >= 0:
                found[name] = buffers[looks.side_of(flip, position)]
        return found

    def late(self, names: Iterable[str], seen: Container[str]) -> list[str]:
        """Return the names of those that can be seen once their round is complete."""
        return [n for n in names if n not in seen and self._find_seen(n) is not None]

    def _find_seen(self, name: str) -> Seen | None:
        known, where = self._seen.find(name), self._meta.where
        if known is None:
            known = (self._look(name),)
            self._seen.keep(name, known, where)
        return known[0]

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
        return looks_at(segment, self._ways), position, (buffers[0], buffers[1])


def _asked(names: Any, out: Any) -> tuple[str, ...] | None:
    """Return the names of a read whose arrays are all in `out`, in order."""
    if not isinstance(out, dict):
        return None
    given = tuple(out)
    if names is None or given == ((names,) if type(names) is str else names):
        return given
    return None
