"""Forms of calls with rows of tables at the shards of a host.

Which rows a call brings or reads is another thing each time: its shards are asked with
tickets, as they are by message. Shards that none of the ids of a read are of are not.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps.cluster.host.calls import answers_of
from daskps.cluster.host.lane_forms import MOST_WAIT_SECONDS, HostForm
from daskps.cluster.host.lane_refusals import refusal_of
from daskps.cluster.host.parked_calls import Parked
from daskps.cluster.lane.frames import pack_answers
from daskps.cluster.wire.messages import Answer
from daskps.errors import ProtocolError, ShardBusyError
from daskps.shards.run_record import changes
from daskps.shards.steps import ASK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.calls import Started
    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.lane.calls import Queues
    from daskps.cluster.lane.frames import Head
    from daskps.cluster.lane.row_forms import RowForm


class HostRowForm(HostForm):
    """A form of calls with rows at the shards of a host.

    Parameters
    ----------
    host : ShardHost
        The host.
    form : RowForm
        What stays the same from call to call.
    """

    def __init__(self, host: ShardHost, form: RowForm) -> None:
        super().__init__(host, form)
        self._row_form = form
        self._only_reads = not changes(form.template.step)

    def begin(
        self,
        head: Head,
        body: Sequence[Any],
        seconds: float,
        queues: Queues | None = None,
    ) -> list[Any] | Parked:
        """Return the frame that answers a call, or the call that waits.

        See :meth:`HostForm.begin`.
        """
        if self._run and head.weight < 0:
            raise ProtocolError(f"a call of weight {head.weight} in run {self._run}")
        if not self._is_current():
            self._find()
        call = self._row_form.call_with_rows(head, body)
        asked = [
            (hosted, part, ASK)
            for hosted, part in zip(self._found, call.parts, strict=True)
            if part.reads or not self._only_reads
        ]
        if call.step.producer:
            for hosted, *_ in asked:
                self._host.make_room(hosted, call.step.producer, seconds)
        end = time.monotonic() + min(call.wait_seconds, MOST_WAIT_SECONDS)
        parked = Parked(self._host, end, partial(self._answer_rows, head.number))
        return self._offer_all(parked, asked, seconds, queues=queues)

    def _answer_rows(
        self, number: int, started: Sequence[Started], seconds: float
    ) -> list[Any]:
        """Return the frame that answers a call with tickets, done or not."""
        try:
            found = answers_of(started, self._host.empty, seconds=seconds)
        except ShardBusyError:
            raise  # with no time to wait
        except Exception as error:  # noqa: BLE001 - its caller gets a refusal
            return refusal_of(error, number)
        if len(found) < len(self._shards):
            said = {answer.shard: answer for answer in found}
            found = [said.get(shard) or Answer(shard) for shard in self._shards]
        return pack_answers(found, number)
