"""Calls of a thread to shards that it reaches itself: their tickets, and the answers.

All shards get their part as a ticket before the thread waits for any of them. Parts
that only the owner of a shard can do go on under the same sequence number, and so do
those of shards of other machines.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from daskps.cluster.caller.socket_carrier import start
from daskps.cluster.caller.thread_call import ThreadCall
from daskps.cluster.host.calls import copy_out
from daskps.cluster.host.hosted import LOCK_SECONDS
from daskps.cluster.machine.locks import Pause
from daskps.cluster.protocol.encoding import widened_step
from daskps.config import cache_dir
from daskps.errors import ShardBusyError, StaleGenerationError
from daskps.kernels import finite
from daskps.kernels.past import PAST_NBYTES
from daskps.shards.deputy import NotHereError
from daskps.shards.steps import Ready, Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.caller.local import LocalPart, SplitRoute
    from daskps.cluster.caller.remote import RemoteShards
    from daskps.cluster.caller.routes import FiniteCheck, Request
    from daskps.cluster.caller.thread_call import Left
    from daskps.cluster.protocol.deadline import Deadline

#: How long to wait for the lock of a shard before asking its owner.
PATIENCE_SECONDS = 1.0
#: How long to wait for a ticket that was called off.
_TAKE_BACK_SECONDS = 1.0
#: How long a call looks at shared shards without a sleep in between.
_SPIN_SECONDS = 0.0005
#: Seconds that a read may wait for its turn at least, even if the call is late.
_MIN_SECONDS = 0.01
#: Errors that leave a part of a call to the owner of the shard.
_HANDED_BACK = (NotHereError, StaleGenerationError)


def local_call(
    remote: RemoteShards,
    request: Request,
    split_route: SplitRoute,
    deadline: Deadline,
    *,
    taken: Sequence[tuple[int, int]] = (),
    parts: Sequence[LocalPart] | None = None,
) -> ThreadCall:
    """Return a call to shards that this process reaches; others get it as well.

    Parameters
    ----------
    remote : RemoteShards
        Sends the messages.
    request : Request
        The call; its target has the values that were read afterwards.
    split_route : SplitRoute
        The shards of its route.
    deadline : Deadline
        Its end.
    taken : sequence of (int, int)
        Shards that have taken it before, with their versions.
    parts : sequence of LocalPart, optional
        The shards of `split_route` that have not; all by default. The caller sees to
        its remote ones.
    """
    local = LocalShards(remote, request, split_route, deadline)
    local.versions += taken
    if parts is None:
        local.leave(request, split_route.remote)
    else:
        local.parts = parts
    return ThreadCall(local, deadline, partial(start, remote))


class LocalShards:
    """The parts of one call at shards that this process reaches, as tickets.

    Parameters
    ----------
    remote, request, split_route, deadline
        As for :func:`local_call`.
    """

    def __init__(
        self,
        remote: RemoteShards,
        request: Request,
        split_route: SplitRoute,
        deadline: Deadline,
    ) -> None:
        self._remote, self._request, self._local = remote, request, split_route
        self._deadline = deadline
        #: The shards among those of the route that get the call.
        self.parts: Sequence[LocalPart] = split_route.parts
        self.versions: list[tuple[int, int]] = []
        self.lag = 0
        self.left: Left = []
        self._tickets: list[tuple[LocalPart, Ticket]] = []
        #: Shards whose owners must get the request as it is, and shards whose owners
        #: get it without its accepted arrays.
        self._back: list[int] = []
        self._waiting: list[int] = []
        self._woken: threading.Event | None = None
        self._is_stopped = False

    @property
    def is_under_way(self) -> bool:
        """Whether there are tickets."""
        return bool(self._tickets)

    def leave(self, request: Request, shards: Sequence[int]) -> None:
        """Leave shards to the next carrier."""
        if shards:
            self.left.append((request.checked(), shards))

    def stop(self) -> None:
        """Make the thread that waits for tickets end soon."""
        self._is_stopped = True
        self.one_done()

    def one_done(self) -> None:
        """Hear that a ticket is done, from the thread that has served its shard."""
        if (woken := self._woken) is not None:
            woken.set()

    # -- all shards get their part ---------------------------------------------

    def begin(self) -> None:
        """Give all shards their part as a ticket."""
        split_route, request, parts = self._local, self._request, self.parts
        self._remote.counters.local_calls += split_route.n_hosts
        if time.monotonic() > split_route.next_look and not split_route.is_live():
            # A deputy would acknowledge a push into memory whose owner is gone. Where
            # nobody adopts that memory, the push would be lost with it.
            self._back = [p.shard for p in parts if not p.serving.is_live()]
            parts = [p for p in parts if p.shard not in self._back]
        seconds = PATIENCE_SECONDS
        if self._deadline.timeout is not None:
            seconds = min(self._seconds_left(parts), seconds)
        if (check := request.check) is not None and not check.done:
            parts = self._begin_checked(check, parts, seconds)
        for part in parts:
            ticket = self._offer(part, seconds)
            if ticket is None:
                self._back.append(part.shard)
            elif isinstance(ticket.outcome, Ready) and request.target is None:
                version = ticket.version or ticket.outcome.version
                self._heed(part.shard, version, ticket.outcome)
            else:
                self._tickets.append((part, ticket))
        self.leave(request, self._back)
        self._back = []

    def _offer(
        self, part: LocalPart, seconds: float, *, check: bool = False
    ) -> Ticket | None:
        """Give a shard its part, maybe done at once; None leaves it to the owner."""
        request, layout = self._request, part.hosted.layout
        rows = tuple([g.item(layout, part.shard, sent=False) for g in request.rows])
        shard, empty = part.shard, part.serving.empty
        if request.codec:
            # A message takes the words as they are if the shard hands the step back.
            # Rows are numbers already.
            step = request.step_of(shard, part.generation, check=check)
            step = widened_step(step, request.codec, layout, shard, empty=empty)
            step = step._replace(items=(*step.items, *rows), owned=not rows)
        else:
            step = request.step_of(shard, part.generation, check=check, rows=rows)
        ticket = Ticket(step, owner=self)
        try:
            if step.producer:
                part.serving.make_room(part.hosted, step.producer, seconds)
            part.hosted.offer(ticket, seconds)
        except ShardBusyError:
            # The holder of the lock may be stopped: by message this call hears of a
            # fence.
            return None
        return None if isinstance(ticket.outcome, _HANDED_BACK) else ticket

    def _heed(self, shard: int, version: int, outcome: Ready) -> None:
        """Take the answer of a shard into the reply."""
        self.versions.append((shard, version))
        self.lag = max(self.lag, outcome.lag)

    def _begin_checked(
        self, check: FiniteCheck, parts: Sequence[LocalPart], seconds: float
    ) -> Sequence[LocalPart]:
        """Have the first shard look at its part of the gradients while it applies them.

        Until it has looked, no other shard has got anything. Returns the parts left to
        offer.
        """
        in_others = bool(self._request.rows) and len(parts) > 1
        if self._back or in_others or not self._may_look_later(parts):
            check()
            return parts
        first, *others = parts
        if ticket := self._offer(first, seconds, check=True):
            if isinstance(ticket.outcome, Ready):
                check.done = True
                self._tickets.append((first, ticket))
                return others
            first.hosted.take_back(ticket, _TAKE_BACK_SECONDS)
        check()
        return parts

    def _may_look_later(self, parts: Sequence[LocalPart]) -> bool:
        """Check the gradients for all shards but the first; return whether all pass."""
        first, *others = parts
        arrays, cache = self._request.arrays, cache_dir()
        return first.hosted.shard.segment.weights_nbytes >= PAST_NBYTES and all(
            finite(arrays[name][a:b], cache_dir=cache)
            for part in others
            for _, name, a, b in part.slices
        )

    # -- then it waits -----------------------------------------------------------

    def take(self) -> None:
        """Wait for the tickets as long as that makes sense, and take their answers."""
        end = time.monotonic() + self._seconds_left([part for part, _ in self._tickets])
        self._wait(end)
        for part, ticket in self._tickets:
            self._take_outcome(part, ticket, end)
        self._tickets.clear()
        # The owners wait as well, and say why where the wait is in vain.
        self.leave(self._request, self._back)
        if self._waiting:
            self.leave(self._request.waiting(), self._waiting)

    def cancel(self) -> None:
        """Take the tickets back."""
        for part, ticket in self._tickets:
            part.hosted.take_back(ticket, _TAKE_BACK_SECONDS)
        # This is the owner of its tickets: such a cycle would keep the memory of shards
        # mapped until it is collected.
        self._tickets.clear()

    def _undone(self) -> list[tuple[LocalPart, Ticket]]:
        return [(p, ticket) for p, ticket in self._tickets if ticket.outcome is None]

    def _wait(self, end: float) -> None:
        """Wait for the tickets as long as that makes sense here; take back the rest."""
        if not (undone := self._undone()):
            return
        patience = min(part.serving.patience for part, _ in undone)
        seconds = min(patience, end - time.monotonic())
        self._woken, pause = threading.Event(), Pause(_SPIN_SECONDS)
        while (undone := self._undone()) and not self._is_stopped:
            if pause.seconds >= seconds:
                break
            shared = [part.hosted for part, _ in undone if part.hosted.is_shared]
            # A publication by another process wakes no thread here.
            for hosted in shared:
                hosted.look()
            if shared:
                pause()
            else:
                self._woken.wait(seconds - pause.seconds)
                self._woken.clear()
        for part, ticket in undone:
            part.hosted.take_back(ticket, _TAKE_BACK_SECONDS)
        if self._is_stopped:
            raise concurrent.futures.CancelledError

    def _take_outcome(self, part: LocalPart, ticket: Ticket, end: float) -> None:
        outcome = ticket.outcome
        if outcome is None:
            (self._waiting if ticket.applied else self._back).append(part.shard)
        elif isinstance(outcome, _HANDED_BACK):
            self._back.append(part.shard)
        elif isinstance(outcome, Exception):
            raise outcome
        else:
            version = ticket.version or outcome.version
            target = self._request.target
            if target and target.reads(part.shard):
                left = max(_MIN_SECONDS, min(end - time.monotonic(), LOCK_SECONDS))
                asked = target.ranges(part.shard), target.outs(part.shard)
                rows = target.row_reads(part.shard)
                try:
                    outcome = copy_out(
                        part.hosted, ticket, *asked, seconds=left, rows=rows
                    )
                except (ShardBusyError, *_HANDED_BACK):
                    self._waiting.append(part.shard)
                    return
                version = outcome.version
            self._heed(part.shard, version, outcome)

    def _seconds_left(self, parts: Sequence[LocalPart]) -> float:
        """Return the seconds left, or raise an error that names the late shards."""
        try:
            return self._deadline.left()
        except TimeoutError:
            remote, shards = self._remote, [part.shard for part in parts]
            late = partial(remote.late, self._deadline, self._request, shards)
            raise remote.link.run(late) from None
