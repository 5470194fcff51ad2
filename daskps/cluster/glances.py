"""Pulls of a trainer into the same arrays again and again, made ready once.

Between two such pulls nothing changes but the clock: which shards, which of their
elements, which places. What a small pull costs is the Python between the call and the
copy, so all of that is looked up once.
"""

from __future__ import annotations

import itertools
import operator
import time
from typing import TYPE_CHECKING, Any

from daskps.cluster.messages import Array
from daskps.cluster.pauses import Pause
from daskps.shards.deputies import NotHereError
from daskps.shards.glance import NOT_YET, Glance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from daskps.cluster.plans import Target
    from daskps.cluster.reading import Copy
    from daskps.cluster.session import Session
    from daskps.shards.segment import Segment

#: How often a copy that updates run into is tried again.
TRIES = 4
#: How long a read waits without asking the shards, and how much of it without a sleep.
WAIT_SECONDS, SPIN_SECONDS = 0.01, 0.0005
#: How often the shards' owners are looked after: who is gone publishes nothing more,
#: and what is read from its memory would look as if nobody pushed.
LOOK_SECONDS = 0.1

#: Copies to make for the flips of either parity.
Copies = tuple[tuple[tuple[Array, Array], ...], tuple[tuple[Array, Array], ...]]


class Prepared:
    """One read of one trainer, ready to be repeated.

    Parameters
    ----------
    session : Session
        The trainer's place in its run.
    target : Target
        What to read and where to put it.
    """

    def __init__(self, session: Session, target: Target) -> None:
        self.target = target
        self._parts: list[tuple[Glance, Copies, Copy]] = []
        self._lives: list[Callable[[], bool]] = []
        self._next_look = 0.0
        outs = itertools.chain.from_iterable(target.outs.values())
        nbytes = sum(out.nbytes for out in outs)
        ways, meta = session.shards.ways, session.meta
        owners = meta.where.owners
        #: Whether all shards can be read without a message.
        self.is_possible = True
        for shard, ranges in target.ranges.items():
            serving = ways.reader(owners[shard])
            if serving is None or (meta.uid, shard) not in serving.slots:
                self.is_possible = False
                return
            slot = serving.slots[meta.uid, shard]
            if slot.locks_reads:
                self.is_possible = False
                return
            segment = slot.shard.segment
            glance = Glance(segment, session.run, session.rank)
            copies = _copies(segment, ranges, target.outs[shard])
            self._parts.append((glance, copies, slot.copier(nbytes)))
            self._lives.append(serving.is_live)

    def read(self, clock: int) -> Any:
        """Read what a clock may; None where the shards must be asked."""
        if (now := time.monotonic()) > self._next_look:
            if not all(lives() for lives in self._lives):
                return None
            self._next_look = now + LOOK_SECONDS
        for glance, copies, copy in self._parts:
            for _ in range(TRIES):
                flip = glance.flip(clock)
                if flip == NOT_YET:
                    flip = wait(glance, clock)
                if flip < 0:
                    return None
                try:
                    for out, source in copies[flip & 1]:
                        copy(out, source)
                except NotHereError:  # the shard's file cannot be read
                    return None
                if glance.is_whole(flip):
                    break
            else:
                return None
        return self.target.finish()

    @property
    def lag(self) -> int:
        """Clocks by which the slowest live trainer was behind."""
        return max([glance.lag for glance, _, _ in self._parts], default=0)


def wait(glance: Glance, clock: int) -> int:
    """Wait a little for the other trainers: a round is short, where they are near."""
    pause = Pause(SPIN_SECONDS)
    while (flip := glance.flip(clock)) == NOT_YET and pause.seconds < WAIT_SECONDS:
        pause()
    return flip


def _copies(
    segment: Segment, ranges: Iterable[tuple[str, int, int]], outs: Iterable[Array]
) -> Copies:
    pairs = [
        tuple(
            (out, segment.vectors[side][dtype][start:stop])
            for (dtype, start, stop), out in zip(ranges, outs, strict=True)
        )
        for side in (0, 1)
    ]
    return pairs[0], pairs[1]


class Glances:
    """The prepared reads of one trainer.

    Parameters
    ----------
    session : Session
        The trainer's place in its run.
    """

    #: Reads that are kept, the latest.
    MOST = 8

    def __init__(self, session: Session) -> None:
        self._session = session
        #: By identity of `out`, which is kept so that the number stays its own.
        self._known: dict[Any, tuple[Any, list[Array], Prepared]] = {}
        #: Where the shards were when these were learned.
        self._where = session.meta.where
        #: The target that was read last: loops have one.
        self._latest: tuple[Target, Prepared] | None = None

    def read(self, names: Any, out: Mapping[str, Array]) -> Any:
        """Repeat a read that is known; None where it is not, or has to wait."""
        prepared = self._find(names, out)
        if prepared is None or not prepared.is_possible:
            return None
        found = prepared.read(self._session.clock)
        if found is not None:
            self._session.lag = max(self._session.lag, prepared.lag)
        return found

    def target(self, names: Any, out: Mapping[str, Array]) -> Target | None:
        """Return where a known read goes; None where it is not known."""
        prepared = self._find(names, out)
        return None if prepared is None else prepared.target

    def _find(self, names: Any, out: Mapping[str, Array]) -> Prepared | None:
        known = self._known.get(_key(names, out))
        if known is None:
            return None
        kept, arrays, prepared = known
        same = kept[0] is out and _are_same(arrays, [*out.values()])
        return prepared if same else None

    def fill(self, target: Target) -> bool:
        """Repeat the read of a target; return whether that was possible."""
        self._refresh()
        if self._latest is None or self._latest[0] is not target:
            self._latest = target, Prepared(self._session, target)
        prepared = self._latest[1]
        if not prepared.is_possible or prepared.read(self._session.clock) is None:
            return False
        self._session.lag = max(self._session.lag, prepared.lag)
        return True

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
        if names is not None and not isinstance(names, (str, tuple)):
            # A list may be another one next time; an iterator is used up.
            return
        self._refresh()
        key, arrays = _key(names, out), list(out.values())
        before = self._known.pop(key, None)
        if before is not None and _are_same(before[1], arrays):
            self._known[key] = before
            return
        if len(self._known) >= self.MOST:
            del self._known[next(iter(self._known))]
        self._known[key] = (out, names), arrays, Prepared(self._session, target)


def _key(names: Any, out: Mapping[str, Array]) -> Any:
    return id(out), names if type(names) is str else id(names)


def _are_same(one: Sequence[Array], other: Sequence[Array]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))
