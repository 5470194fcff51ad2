"""Templates of a socket at the shards of a host: looked up once, then used by each call.

The host can serve nearly all frames at once: a step joins its round, a push is applied,
weights and rows are read without a lock. The host tries that first, shard by shard. A
part that has to wait becomes a ticket at its shard, and the call is parked with its
tickets. A read asks only the shards that some of its elements or ids belong to; a push
of rows goes to all.
"""

from __future__ import annotations

import contextlib
import logging
import time
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from daskps.cluster.host.calls import Parked, answers_of
from daskps.cluster.host.socket_answers import TemplateAnswers
from daskps.cluster.protocol.encoding import widened
from daskps.cluster.protocol.messages import Answer, Part, in_words
from daskps.cluster.protocol.wellformed import refused
from daskps.cluster.sockets.frames import (
    Head,
    pack_answers,
    pack_refusal,
)
from daskps.errors import DaskPSError, ShardBusyError
from daskps.shards.steps import ASK, NO_WAIT, READ, Ready, Step, changes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from daskps.cluster.host.calls import Started
    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.cluster.sockets.templates import FrameTemplate

logger = logging.getLogger(__name__)
#: How long a call may wait here before its caller sends it as a message.
MOST_WAIT_SECONDS = 20.0
#: How long a simple step waits for a shard's lock before it becomes a ticket.
SOON_SECONDS = 0.05


class HostTemplate:
    """A template at the shards of a host, and the calls of that template.

    Parameters
    ----------
    host : ShardHost
        The host.
    template : FrameTemplate
        The constant part of the calls.
    """

    def __init__(self, host: ShardHost, template: FrameTemplate) -> None:
        self.template, self._host = template, host
        parts, step = template.call.parts, template.call.step
        self._run, self._step = step.run, step
        self._shards = [part.shard for part in parts]
        self._keys = [(template.call.store, shard) for shard in self._shards]
        self._only_reads = not changes(step) and (
            bool(template.read) or all(part.ranges for part in parts)
        )
        #: Whether its parts wait only for their reads, or not at all.
        self._is_plain = (not step.run or step.rank >= 0) and all(
            part.step.wait == (READ if part.ranges or self._only_reads else NO_WAIT)
            for part in parts
        )
        #: Whether shards may take its steps without tickets.
        self._steps = self._is_plain and _may_step(template)
        self._all_asked = (ASK,) * len(parts)
        self._answers = TemplateAnswers(parts, host.budget, template.read)
        #: Whether the values read are sent as words of a codec.
        self._is_coded = bool(template.call.read_codec)
        self._may_read_now = self._only_reads and self._answers.may_read_now
        #: Whether what it reads is read without tickets; also where that is nothing.
        self._reads_at_once = not template.read or (
            self._only_reads and not self._is_coded and not template.is_marked
        )
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
        # Where one is not here, `let_go` is to see that the last ones have left.
        found = [self._host.get_shard(*key) for key in self._keys]
        self._found = []
        self._answers.find(found)
        self._tries = self._is_plain
        for hosted, part in zip(found, self.template.call.parts, strict=True):
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
        frame = self._answers.read_now(number, bound)
        if self._host.has_copies and True in [of.behind > 0 for of in self._found]:
            return None  # it may have to wait, and this buffer is used again
        return frame

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
        if not self._is_current():
            self._find()
        said = self.template.read_body(head, body)
        if self._run:
            bounds: Iterable[int] = repeat(head.clock + self._step.tick)
        else:
            bounds = said.least or repeat(0)
        versions: Sequence[int] = self._all_asked
        parts: Sequence[Part] = ()
        end = time.monotonic() + min(head.wait_ms / 1000, MOST_WAIT_SECONDS)
        if self._tries:
            if self._steps:
                parts = self.template.parts(head, said)
                versions = self._try_steps(parts, seconds)
            if self._reads_at_once and (self._only_reads or ASK not in versions):
                # The answer to a push as well, with what it reads, if anything.
                asked = said.asked if self.template.read else ()
                frame = self._answers.read(head.number, bounds, versions, asked)
                if frame is not None:
                    if self._host.has_copies:
                        return self._backed(frame, self._found, head.number, end)
                    return frame
        parts = self._left(head, parts or self.template.parts(head, said), versions)
        answer = partial(
            self._answer, number=head.number, parts=parts, bounds=bounds, end=end
        )
        parked = Parked(end, answer, self._host.look_soon)
        return self._park(parked, parts, versions, seconds)

    def _park(
        self,
        parked: Parked,
        parts: Sequence[Part],
        versions: Sequence[int],
        seconds: float,
    ) -> list[Any] | Parked:
        """Give shards tickets for their parts; return the answer if all are done."""
        # The others have nothing to do: no id that is read belongs to them.
        asked = [
            (hosted, part, version)
            for hosted, part, version in zip(self._found, parts, versions, strict=True)
            if part.reads or not self._only_reads
        ]
        if producer := self._step.producer:
            for hosted, _, version in asked:
                if version == ASK:
                    self._host.make_room(hosted, producer, seconds)
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

    def _left(
        self, head: Head, parts: Sequence[Part], versions: Sequence[int]
    ) -> list[Part]:
        """Return what remains to be done: only reads where a shard took the step."""
        template = self.template
        if template.codec is not None:
            call = template.call._replace(parts=tuple(parts))
            parts = widened(call, self._found[0].layout, self._host.empty).parts
        clock = head.clock + self._step.tick
        return [
            part
            if version == ASK
            else part._replace(
                step=Step(
                    run=self._run,
                    rank=self._step.rank,
                    clock=clock,
                    sequence=head.sequence,
                    generation=part.step.generation,
                    wait=part.step.wait,
                    at_least=0 if self._run else part.step.at_least,
                    floor=head.floor,
                )
            )
            for part, version in zip(parts, versions, strict=True)
        ]

    def _try_steps(self, parts: Sequence[Part], seconds: float) -> Sequence[int]:
        """Have each shard take its step; return the versions, or ASK."""
        soon, versions = min(seconds, SOON_SECONDS), []
        for hosted, part in zip(self._found, parts, strict=True):
            try:
                versions.append(hosted.try_step(part.step, soon))
            except ShardBusyError:
                versions.append(ASK)
        return versions

    # -- its answer ----------------------------------------------------------------

    def _answer(
        self,
        started: Sequence[Started],
        seconds: float,
        *,
        number: int,
        parts: Sequence[Part],
        bounds: Iterable[int],
        end: float,
    ) -> list[Any] | Parked:
        """Return the frame that answers a call with tickets, done or not."""
        versions, of = [], [hosted for hosted, _, _ in started]
        for _, _, ticket in started if self._tries and not self.template.read else ():
            outcome = ticket.outcome
            if type(outcome) is not Ready:
                break
            versions.append(ticket.version or outcome.version)
        try:
            if len(versions) == len(self._shards):
                frame = self._answers.read(number, bounds, versions)
                if frame is not None:
                    return self._backed(frame, of, number, end)
            nbytes = sum(part.read_nbytes for part in parts)
            empty = self._host.budget.answer_now(nbytes)
            found = answers_of(started, empty, seconds=seconds)
            if self._is_coded:
                found = in_words(found, parts, empty)
            if len(found) < len(self._shards):
                by = {answer.shard: answer for answer in found}
                found = [by.get(shard) or Answer(shard) for shard in self._shards]
            # Also where they wait on: their callers bring no arrays again.
            return self._backed(pack_answers(found, number), of, number, end)
        except ShardBusyError:
            raise  # this thread may not wait
        except Exception as error:  # noqa: BLE001 - its caller gets a refusal
            return refusal_of(error, number)

    def _backed(
        self, frame: list[Any], of: Sequence[HostedShard], number: int, end: float
    ) -> list[Any] | Parked:
        """Return a frame, or a call that waits until second copies have what it tells.

        Trainers that need not see the same do not wait for what they read.
        """
        if not self._host.has_copies:
            return frame
        in_rounds = [hosted.shard.run_state.is_bsp for hosted in of]
        if self._only_reads and self._run and True not in in_rounds:
            return frame

        def answer(started: Sequence[Started], _: float) -> list[Any]:
            outcomes = [ticket.outcome for _, _, ticket in started]
            if None in outcomes:
                # It is sent again as it is: another owner may not have it.
                again = [Answer(s, parked=True, applied=False) for s in shards]
                return pack_answers(again, number)
            errors = [one for one in outcomes if isinstance(one, Exception)]
            return refusal_of(errors[0], number) if errors else frame

        shards, parked = self._shards, Parked(end, answer)
        for hosted in of:
            if hosted.backing is not None:
                hosted.back(parked.add(hosted))
        return parked.finish(0.0) if parked.done else parked


def refusal_of(error: Exception, number: int) -> list[Any]:
    """Return the frame that refuses a call, after an error outside of its shards."""
    if isinstance(error, (DaskPSError, ValueError, TypeError)):
        return pack_refusal(error, number)
    logger.error("a call by a socket failed", exc_info=error)
    return pack_refusal(refused(error, "a call"), number)


def _may_step(template: FrameTemplate) -> bool:
    """Return whether shards may take a template's steps as they are, without tickets."""
    step = template.call.step
    takes = step.tick if step.run else step.producer
    is_other = step.whole or template.codec or template.read
    return bool(takes and changes(step) and not is_other)
