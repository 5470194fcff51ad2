"""Forms of a lane at the shards of a host: looked up once, then used by each call.

The host can serve nearly all frames at once: a step joins its round, a push is applied,
weights are read without a lock. The host tries that first, shard by shard. A part that
has to wait becomes a ticket at its shard, and the call is parked with its tickets.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from daskps.cluster.host.calls import answers_of
from daskps.cluster.host.lane_answers import FormAnswers
from daskps.cluster.host.lane_refusals import refusal_of
from daskps.cluster.host.parked_calls import Parked
from daskps.cluster.lane.frames import (
    HAS_LR,
    Head,
    pack_answers,
)
from daskps.cluster.wire.encoding import widened
from daskps.cluster.wire.messages import Part, in_words
from daskps.errors import ProtocolError, ShardBusyError
from daskps.shards.run_record import changes
from daskps.shards.steps import ASK, NO_WAIT, READ, Ready, Step, Tick

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from daskps.cluster.host.calls import Started
    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.cluster.lane.forms import Form
    from daskps.cluster.wire.messages import Call
    from daskps.typing import Array

#: How long a call may wait here before its caller sends it as a message.
MOST_WAIT_SECONDS = 20.0
#: How long a simple step waits for a shard's lock before it becomes a ticket.
SOON_SECONDS = 0.05


class HostForm:
    """A form at the shards of a host, and the calls of that form.

    Parameters
    ----------
    host : ShardHost
        The host.
    form : Form
        The constant part of the calls.
    """

    def __init__(self, host: ShardHost, form: Form) -> None:
        self.form, self._host = form, host
        parts, step = form.template.parts, form.template.step
        self._run, self._step = step.run, step
        self._shards = [part.shard for part in parts]
        self._keys = [(form.template.store, shard) for shard in self._shards]
        self._only_reads = not changes(step) and all(part.ranges for part in parts)
        #: Placeholder for the versions after steps, for calls that only read.
        self._no_versions = (0,) * len(parts)
        #: Whether its parts wait only for their reads, or not at all.
        self._is_plain = (not step.run or step.rank >= 0) and all(
            part.step.wait == (READ if part.ranges else NO_WAIT) for part in parts
        )
        #: By part the pieces of a step that a shard may take unchanged; else None.
        self._positions = _positions(form.template) if self._is_plain else None
        self._answers = FormAnswers(parts, host.budget)
        #: Whether the values read are sent as words of a codec.
        self._is_coded = bool(form.template.read_codec)
        self._may_read_now = self._only_reads and self._answers.may_read_now
        #: The shards of the last lookup; none before the first call.
        self._found: list[HostedShard] = []
        #: Whether calls first try these shards without tickets.
        self._tries = False

    # -- the shards ------------------------------------------------------------

    @property
    def has_gone(self) -> bool:
        """Whether it keeps the memory of shards that have left this host."""
        return bool(self._found) and not self._is_current()

    def _is_current(self) -> bool:
        """Return whether the shards of the last lookup are still the ones here."""
        shards, found = self._host.shards, self._found
        for key, hosted in zip(self._keys, found, strict=False):
            if shards.get(key) is not hosted or hosted.is_released:
                return False
        return bool(found)

    def _find(self) -> None:
        """Look the shards up.

        Raises
        ------
        StaleGenerationError
            If one of them is not here.
        """
        self._found = []
        found = [self._host.get_shard(*key) for key in self._keys]
        self._answers.find(found)
        self._tries = self._is_plain
        for hosted, part in zip(found, self.form.template.parts, strict=True):
            if (
                hosted.locks_reads
                or hosted.is_released
                or hosted.shard.generation != part.step.generation
            ):
                self._tries = False
        self._found = found

    def read_now(self, number: int, clock: int) -> bytearray | None:
        """Return the answer to a call that has only a clock; None if it needs more."""
        if not (self._may_read_now and self._is_current() and self._tries):
            return None
        bound = clock + self._step.tick if self._run else 0
        return self._answers.read_now(number, bound)

    # -- a call ------------------------------------------------------------------

    def begin(
        self,
        head: Head,
        body: Sequence[Any],
        seconds: float,
    ) -> list[Any] | Parked:
        """Return the frame that answers a call, or the call that waits.

        Parameters
        ----------
        head : Head
            Head of the frame.
        body : sequence of buffers
            Body of the frame.
        seconds : float
            How long this thread waits for the lock of a shard, or for room at one.

        Raises
        ------
        Exception
            Any error for which the call is refused. No part of it waits then.
        """
        if self._run and head.weight < 0:
            raise ProtocolError(f"a call of weight {head.weight} in run {self._run}")
        if not self._is_current():
            self._find()
        least, arrays = self.form.taken(head, body)
        if self._run:
            bounds: Iterable[int] = repeat(head.clock + self._step.tick)
        else:
            bounds = least or repeat(0)
        versions: Sequence[int] = ()
        if self._tries and (self._only_reads or self._positions is not None):
            versions = self._try_step(head, arrays, seconds)
            if ASK not in versions:
                frame = self._answers.read(head.number, bounds, versions)
                if frame is not None:
                    return frame
        # A call that only reads has done nothing yet, and so has one with all shards to
        # ask.
        is_asked = self._only_reads or versions.count(ASK) == len(versions)
        taken = () if is_asked else versions
        parts: Sequence[Part]
        if versions and ASK not in versions:
            parts = self._left(head, bounds)
        else:
            parts = self._asked(self.form.call(head, least, iter(arrays)), seconds)
            if taken:
                left = zip(parts, self._left(head, bounds), taken, strict=True)
                parts = [part if v == ASK else rest for part, rest, v in left]
        end = time.monotonic() + min(head.wait_ms / 1000, MOST_WAIT_SECONDS)
        parked = Parked(self._host, end, partial(self._answer, head, bounds))
        return self._offer(parked, parts, taken, seconds)

    def _left(self, head: Head, bounds: Iterable[int]) -> list[Part]:
        """Return the parts that remain after the shards have taken the step: reads."""
        run, rank, said = self._run, self._step.rank, head.clock + self._step.tick
        found = []
        for (shard, step, ranges, _, _), bound in zip(
            self.form.template.parts, bounds, strict=False
        ):
            least = 0 if run else bound
            wait = Step(
                run=run,
                rank=rank,
                clock=said,
                sequence=head.sequence,
                generation=step.generation,
                wait=step.wait,
                at_least=least,
                floor=head.floor,
            )
            found.append(Part(shard, wait, ranges))
        return found

    def _try_step(
        self, head: Head, arrays: Sequence[Array], seconds: float
    ) -> Sequence[int]:
        """Have each shard take its step; return the versions, or ASK."""
        if self._positions is None:
            return self._no_versions
        step, given, versions = self._step, iter(arrays), []
        # Like `tick_of`, but inline: this runs for each frame.
        tick = Tick(
            step.run,
            step.rank,
            head.clock,
            head.sequence,
            step.kind,
            head.weight,
            step.producer,
            head.lr if head.flags & HAS_LR else None,
            head.floor,
            step.touched,
        )
        soon = min(seconds, SOON_SECONDS)
        for hosted, places in zip(self._found, self._positions, strict=True):
            # The places first: `zip` must take no array that it does not return.
            mine = dict(zip(places, given, strict=False))
            try:
                versions.append(hosted.try_step(tick, mine, soon))
            except ShardBusyError:
                versions.append(ASK)
        return versions

    def _asked(self, call: Call, seconds: float) -> Sequence[Part]:
        """Return the parts for tickets, after making room at the shards."""
        host, found = self._host, self._found
        if call.step.producer:
            for hosted in found:
                host.make_room(hosted, call.step.producer, seconds)
        return (
            widened(call, found[0].layout, host.empty) if call.codec else call
        ).parts

    def _offer(
        self,
        parked: Parked,
        parts: Sequence[Part],
        taken: Sequence[int],
        seconds: float,
    ) -> list[Any] | Parked:
        """Give the shards tickets for their parts; `taken` has versions after steps."""
        taken = taken or (ASK,) * len(parts)
        asked = zip(self._found, parts, taken, strict=True)
        return self._offer_all(parked, asked, seconds)

    @staticmethod
    def _offer_all(
        parked: Parked,
        asked: Iterable[tuple[HostedShard, Part, int]],
        seconds: float,
    ) -> list[Any] | Parked:
        """Give shards their tickets, and return the answer if all are done."""
        try:
            for hosted, part, version in asked:
                parked.offer(hosted, part, version, seconds)
        except BaseException:
            parked.cancel()
            raise
        if parked.done:
            # A read whose turn does not come waits too.
            with contextlib.suppress(ShardBusyError):
                return parked.finish(seconds)
        return parked

    # -- its answer ----------------------------------------------------------------

    def _answer(
        self,
        head: Head,
        bounds: Iterable[int],
        started: Sequence[Started],
        seconds: float,
    ) -> list[Any]:
        """Return the frame that answers a call with tickets, done or not."""
        versions = []
        for _, _, ticket in started if self._tries else ():
            outcome = ticket.outcome
            if type(outcome) is not Ready:
                break
            versions.append(ticket.version or outcome.version)
        try:
            if len(versions) == len(started):
                frame = self._answers.read(head.number, bounds, versions)
                if frame is not None:
                    return frame
            empty = self._host.budget.answer_now(self._answers.read_nbytes)
            answers = answers_of(started, empty, seconds=seconds)
            if self._is_coded:
                answers = in_words(answers, self.form.template.parts, empty)
            return pack_answers(answers, head.number)
        except ShardBusyError:
            raise  # this thread may not wait
        except Exception as error:  # noqa: BLE001 - its caller gets a refusal
            return refusal_of(error, head.number)


def tick_of(step: Step, head: Head) -> Tick:
    """Return the tick of a form's step in the call with this head."""
    return Tick(
        step.run,
        step.rank,
        head.clock,
        head.sequence,
        step.kind,
        head.weight,
        step.producer,
        head.lr if head.flags & HAS_LR else None,
        head.floor,
        step.touched,
    )


def _positions(template: Call) -> list[tuple[int, ...]] | None:
    """Return the pieces of a step that shards may take unchanged, by part."""
    step, found = template.step, []
    takes = step.tick if step.run else step.producer
    if not (takes and changes(step)) or step.whole or step.check or template.codec:
        return None
    for part in template.parts:
        items = part.step.items
        if any(item.start or item.ids is not None for item in items):
            return None
        found.append(tuple(item.position for item in items))
    return found
