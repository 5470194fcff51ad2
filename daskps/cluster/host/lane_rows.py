"""Forms of calls with rows of tables at the shards of a host.

As with arrays, the host first tries to serve a call at once: a push of rows that is an
update of its own, or a read of rows that no update overwrites. All other calls become
tickets, as by message. A read asks only the shards that some of its ids belong to.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.host.calls import answers_of
from daskps.cluster.host.lane_answers import SMALL_NBYTES
from daskps.cluster.host.lane_forms import (
    MOST_WAIT_SECONDS,
    SOON_SECONDS,
    HostForm,
    tick_of,
)
from daskps.cluster.host.lane_refusals import refusal_of
from daskps.cluster.host.parked_calls import Parked
from daskps.cluster.host.shard_row_reads import ShardRowRead
from daskps.cluster.lane.frames import APPLIED, AnswerHead, pack_answers
from daskps.cluster.wire.encoding import check_words, widened
from daskps.cluster.wire.messages import Answer, in_words
from daskps.errors import ProtocolError, ShardBusyError
from daskps.shards.run_record import changes
from daskps.shards.steps import ASK, NO_WAIT, READ

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from daskps.cluster.host.calls import Started
    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.lane.frames import Head
    from daskps.cluster.lane.row_forms import RowForm, RowsSaid
    from daskps.cluster.wire.messages import Part
    from daskps.codecs import Codec
    from daskps.typing import Array


class HostRowForm(HostForm):
    """A form of calls with rows at the shards of a host.

    Parameters
    ----------
    host : ShardHost
        The host.
    form : RowForm
        The constant part of the calls.
    """

    def __init__(self, host: ShardHost, form: RowForm) -> None:
        super().__init__(host, form)
        self._row_form, self._rows = form, AnswerHead(len(self._shards), 0)
        step, has_ranges = self._step, self._answers.has_reads
        self._only_reads = not changes(step)
        #: Whether its parts wait only for their reads.
        wait = READ if self._only_reads else NO_WAIT
        self._is_plain = (not step.run or step.rank >= 0) and all(
            part.step.wait == wait for part in form.template.parts
        )
        self._all_asked = (ASK,) * len(self._shards)
        is_update = step.tick if step.run else bool(step.producer)
        #: Whether a shard may take its steps without a ticket; such steps read nothing.
        self._steps = is_update and not (
            self._only_reads or step.whole or has_ranges or form.read or form.codec
        )
        self._row_nbytes = [table.row_nbytes for table in form.read]
        #: Readers of the rows of each shard; empty if tickets must read them.
        self._row_reads: list[ShardRowRead] = []

    def _find(self) -> None:
        super()._find()
        self._row_reads = []
        simple = not (self._answers.has_reads or self._is_coded)
        if self._tries and self._only_reads and simple:
            tables = self._row_form.read
            self._row_reads = [
                ShardRowRead(hosted.shard.segment, self._step, tables)
                for hosted in self._found
                if all(table.is_bounded for table in tables)
            ]

    def begin(
        self,
        head: Head,
        body: Sequence[Any],
        seconds: float,
    ) -> list[Any] | Parked:
        """Return the frame that answers a call, or the call that waits.

        See :meth:`HostForm.begin`.
        """
        if self._run and head.weight < 0:
            raise ProtocolError(f"a call of weight {head.weight} in run {self._run}")
        if not self._is_current():
            self._find()
        form = self._row_form
        said = form.read_body(head, body)
        versions: Sequence[int] = self._all_asked
        if self._row_reads:
            frame = self._read_rows(head, said)
            if frame is not None:
                return frame
        elif self._steps and self._tries:
            versions = self._try_rows(head, said, seconds)
            if ASK not in versions:
                return [self._rows.pack(head.number, self._said(versions))]
        parts: Sequence[Part] = form.parts(head, said)
        if form.codec is not None:
            parts = self._widened(parts, form.codec)
        asked = [
            (hosted, part, version)
            for hosted, part, version in zip(self._found, parts, versions, strict=True)
            if part.reads or not self._only_reads
        ]
        if producer := self._step.producer:
            for hosted, *_ in asked:
                self._host.make_room(hosted, producer, seconds)
        end = time.monotonic() + min(head.wait_ms / 1000, MOST_WAIT_SECONDS)
        parked = Parked(self._host, end, partial(self._answer_rows, head.number, parts))
        return self._offer_all(parked, asked, seconds)

    def _widened(self, parts: Sequence[Part], codec: Codec) -> Sequence[Part]:
        """Return parts with their words widened to numbers."""
        layout, template = self._found[0].layout, self.form.template
        check_words(parts, codec, layout)
        call = template._replace(parts=tuple(parts))
        return widened(call, layout, self._host.empty).parts

    def _said(self, versions: Iterable[int]) -> list[int]:
        """Return the rows of an answer for shards that are done."""
        found: list[int] = []
        for shard, version in zip(self._shards, versions, strict=True):
            found += (shard, version, 0, APPLIED)
        return found

    def _try_rows(self, head: Head, said: RowsSaid, seconds: float) -> list[int]:
        """Have each shard take its step; return the versions, or ASK."""
        step, versions = self._step, []
        tick = tick_of(step, head)
        soon, n = min(seconds, SOON_SECONDS), len(self._row_form.pushed)
        for hosted, items in zip(self._found, said.items, strict=True):
            arrays: dict[int, Array] = {}
            if len(items) > n:
                arrays = {item.position: item.data for item in items[:-n]}
            try:
                version = hosted.try_step(
                    tick, arrays, soon, items[-n:], check=step.check
                )
                versions.append(version)
            except ShardBusyError:
                versions.append(ASK)
        return versions

    def _read_rows(self, head: Head, said: RowsSaid) -> list[Any] | None:
        """Return the frame that answers a read; None if a shard must be asked."""
        nbytes = 0
        for asked in said.asked:
            for ids, row_nbytes in zip(asked, self._row_nbytes, strict=True):
                nbytes += len(ids) * row_nbytes
        if is_small := nbytes <= SMALL_NBYTES:
            out = np.empty(self._rows.nbytes + nbytes, np.uint8)
            at = self._rows.nbytes
        else:
            out, at = self._host.budget.answer_now(nbytes)(nbytes, np.uint8), 0
        rows = list[int]()
        for shard, read, bound, asked in zip(
            self._shards, self._row_reads, said.least, said.asked, strict=True
        ):
            version = lag = 0
            if any(map(len, asked)):
                if self._run:
                    bound = head.clock + self._step.tick
                version, at = read.read(bound, asked, out, at)
                if version < 0:
                    return None
                lag = read.looks.lag
            rows += (shard, version, lag, APPLIED)
        first = self._rows.pack_before(head.number, rows, nbytes)
        if not is_small:
            return [first, out]
        out[: len(first)] = np.frombuffer(first, np.uint8)
        return [out]

    def _answer_rows(
        self,
        number: int,
        parts: Sequence[Part],
        started: Sequence[Started],
        seconds: float,
    ) -> list[Any]:
        """Return the frame that answers a call with tickets, done or not."""
        try:
            nbytes = sum(part.read_nbytes for part in parts)
            empty = self._host.budget.answer_now(nbytes)
            found = answers_of(started, empty, seconds=seconds)
            if self._is_coded:
                found = in_words(found, parts, empty)
        except ShardBusyError:
            raise  # this thread may not wait
        except Exception as error:  # noqa: BLE001 - its caller gets a refusal
            return refusal_of(error, number)
        if len(found) < len(self._shards):
            of = {answer.shard: answer for answer in found}
            found = [of.get(shard) or Answer(shard) for shard in self._shards]
        return pack_answers(found, number)
