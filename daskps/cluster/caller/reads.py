"""Pulls of a trainer into the same arrays again and again, made ready once.

Between two such pulls nothing changes but the clock: which shards, which of their
elements, which places. What a small pull costs is the Python between the call and the
copy, so all of that is looked up once.
"""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.cluster.caller.routes import Target
from daskps.cluster.host.copying import copier
from daskps.cluster.machine.pauses import Pause
from daskps.shards.memory.format import MIXED
from daskps.shards.memory.sides import runs
from daskps.shards.reads import NOT_YET, TrainerReads
from daskps.typing import Array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from daskps.cluster.caller.member import Member
    from daskps.cluster.host.copying import Copy
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


class Source(NamedTuple):
    """One shard of a read."""

    glance: TrainerReads
    #: What to copy where all of its weights lie in one buffer, for either of them.
    whole: tuple[PieceCopies, PieceCopies]
    #: What to copy at a flip where they do not.
    mixed: Callable[[int], PieceCopies]
    #: None to assign to a slice, which costs half of what a call of `copyto` does.
    copy: Copy | None


class PreparedRead:
    """One read of one trainer, ready to be repeated into whatever arrays.

    It holds none of them: what a loop has let go of must not be kept alive here.

    Parameters
    ----------
    session : Member
        The trainer's place in its run.
    ranges : mapping of int to tuple of Range
        What to read of which shard.
    cuts : mapping of int to sequence of (int, slice), optional
        For each of these which array it goes to, and where; by default each has an
        array of its own.
    """

    def __init__(
        self,
        session: Member,
        ranges: Mapping[int, tuple[Range, ...]],
        cuts: Mapping[int, Sequence[tuple[int, slice]]] | None = None,
    ) -> None:
        self.ranges = ranges
        self._sources: list[Source] = []
        self._lives: list[Callable[[], bool]] = []
        self._next_look = 0.0
        each = itertools.chain.from_iterable(ranges.values())
        nbytes = sum((b - a) * np.dtype(dtype).itemsize for dtype, a, b in each)
        numbers = itertools.count()
        ways, meta = session.shards.ways, session.meta
        owners = meta.where.owners
        #: Whether all shards can be read without a message.
        self.is_possible = True
        for shard, asked in ranges.items():
            serving = ways.serving(owners[shard])
            if serving is None or (meta.uid, shard) not in serving.slots:
                self.is_possible = False
                return
            slot = serving.slots[meta.uid, shard]
            if slot.locks_reads:
                self.is_possible = False
                return
            segment = slot.shard.segment
            glance = TrainerReads(segment, session.run, session.rank)
            to = cuts[shard] if cuts else [(next(numbers), slice(None)) for _ in asked]
            copy = copier(nbytes)
            self._sources.append(
                Source(
                    glance,
                    (_pieces(segment, 0, asked, to), _pieces(segment, 1, asked, to)),
                    partial(_mixed, segment, asked, to),
                    None if copy is np.copyto else copy,
                )
            )
            self._lives.append(serving.is_live)

    def read(self, clock: int, outs: Sequence[Array]) -> bool:
        """Read what a clock may; False where the shards must be asked.

        Parameters
        ----------
        clock : int
            The trainer's.
        outs : sequence of ndarray, shape (n,)
            Where the ranges go.

        Returns
        -------
        bool
            Whether all of it was read.
        """
        if (now := time.monotonic()) > self._next_look:
            if not all(lives() for lives in self._lives):
                return False
            self._next_look = now + LOOK_SECONDS
        for glance, whole, mixed, copy in self._sources:
            for _ in range(TRIES):
                flip = glance.find_flip(clock)
                if flip == NOT_YET:
                    flip = wait(glance, clock)
                if flip < 0:
                    return False
                side = glance.side(flip)
                _fill(outs, mixed(flip) if side == MIXED else whole[side], copy)
                if glance.is_whole(flip):
                    break
            else:
                return False
        return True

    @property
    def lag(self) -> int:
        """Clocks by which the slowest live trainer was behind."""
        return max([source.glance.lag for source in self._sources], default=0)


def wait(glance: TrainerReads, clock: int) -> int:
    """Wait a little for the other trainers: a round is short, where they are near."""
    pause = Pause(SPIN_SECONDS)
    while (flip := glance.find_flip(clock)) == NOT_YET and pause.seconds < WAIT_SECONDS:
        pause()
    return flip


def _fill(outs: Sequence[Array], pieces: PieceCopies, copy: Copy | None) -> None:
    for position, where, source in pieces:
        if copy is None:
            outs[position][where] = source
        else:
            copy(outs[position][where], source)


def _pieces(
    segment: Segment,
    side: int,
    ranges: Iterable[Range],
    cuts: Iterable[tuple[int, slice]],
) -> PieceCopies:
    return tuple(
        (position, where, segment.vectors[side][dtype][start:stop])
        for (dtype, start, stop), (position, where) in zip(ranges, cuts, strict=True)
    )


def _mixed(
    segment: Segment,
    ranges: Iterable[Range],
    cuts: Iterable[tuple[int, slice]],
    flip: int,
) -> PieceCopies:
    found, record = [], segment.record(flip)
    for part, (position, where) in zip(ranges, cuts, strict=True):
        at = where.start or 0
        for weights in runs(segment, record, part):
            found.append((position, slice(at, at + len(weights)), weights))
            at += len(weights)
    return tuple(found)


class NamedRead:
    """A read of whole parameters by their names, in that order.

    Parameters
    ----------
    session : Member
        The trainer's place in its run.
    names : tuple of str
        Which parameters.
    target : Target
        The same read into some arrays.
    """

    def __init__(self, session: Member, names: tuple[str, ...], target: Target) -> None:
        layout = session.meta.layout
        parameters = [layout[name] for name in names]
        self._wanted = [(p.shape, np.dtype(p.dtype)) for p in parameters]
        self._cuts: dict[int, list[tuple[int, slice]]] = {s: [] for s in target.ranges}
        for position, p in enumerate(parameters):
            for piece in layout.pieces_of[p.index]:
                if piece.start < piece.stop:
                    where = slice(piece.start, piece.stop)
                    self._cuts[piece.shard].append((position, where))
        self.prepared = PreparedRead(session, target.ranges, self._cuts)

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
            shard: [flats[position][where] for position, where in cuts]
            for shard, cuts in self._cuts.items()
        }
        return Target(self.prepared.ranges, outs, lambda: found)


class PreparedReads:
    """The prepared reads of one trainer.

    Parameters
    ----------
    session : Member
        The trainer's place in its run.
    """

    #: Reads that are kept, the latest.
    MOST = 8

    def __init__(self, session: Member) -> None:
        self._session = session
        self._known: dict[tuple[str, ...], NamedRead] = {}
        #: Where the shards were when these were learned.
        self._where = session.meta.where
        #: What was read last: loops read the same again.
        self._latest: PreparedRead | None = None

    def read(self, names: Any, out: Mapping[str, Array]) -> dict[str, Array] | None:
        """Repeat a read that is known; None where it is not, or has to wait."""
        known = self._find(names, out)
        if known is None or not known.prepared.is_possible:
            return None
        flats = known.flats(out)
        if flats is None or not self._read(known.prepared, flats):
            return None
        return dict(out)

    def target(self, names: Any, out: Mapping[str, Array]) -> Target | None:
        """Return where a known read goes; None where it is not known."""
        known = self._find(names, out)
        return None if known is None else known.target(out)

    def _find(self, names: Any, out: Mapping[str, Array]) -> NamedRead | None:
        asked = _asked(names, out)
        return None if asked is None else self._known.get(asked)

    def _read(self, prepared: PreparedRead, outs: Sequence[Array]) -> bool:
        if not prepared.read(self._session.clock, outs):
            return False
        self._session.lag = max(self._session.lag, prepared.lag)
        return True

    def fill(self, target: Target) -> bool:
        """Repeat the read of a target; return whether that was possible."""
        self._refresh()
        latest = self._latest
        if latest is None or latest.ranges != target.ranges:
            latest = self._latest = PreparedRead(self._session, target.ranges)
        outs = [out for shard in target.ranges for out in target.outs[shard]]
        return latest.is_possible and self._read(latest, outs)

    def _refresh(self) -> None:
        """Forget what was learned before shards moved."""
        if self._where is not self._session.meta.where:
            self._where = self._session.meta.where
            self.clear()

    def clear(self) -> None:
        """Forget all reads."""
        self._known.clear()
        self._latest = None

    def learn(self, names: Any, out: Mapping[str, Array], target: Target) -> None:
        """Make a read ready for the next time, unless it is."""
        self._refresh()
        asked = _asked(names, out)
        if asked is None or asked in self._known:
            return
        if len(self._known) >= self.MOST:
            del self._known[next(iter(self._known))]
        self._known[asked] = NamedRead(self._session, asked, target)


def _asked(names: Any, out: Mapping[str, Array]) -> tuple[str, ...] | None:
    """Return the names of a read whose arrays are all in `out`, in that order."""
    if not isinstance(out, dict):
        return None
    given = tuple(out)
    if names is None or given == ((names,) if type(names) is str else names):
        return given
    return None
