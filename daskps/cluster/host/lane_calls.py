"""The calls in the frames of a lane: this module passes them on and answers them.

The thread that serves the lane calls it; sockets and threads belong to `lanes`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from daskps.cluster.host.lane_fetches import answer_fetch
from daskps.cluster.host.lane_forms import HostForm, refusal_of
from daskps.cluster.host.parked_calls import Parked
from daskps.cluster.lane.forms import ID, read_form
from daskps.cluster.lane.frames import (
    ANSWER,
    CALL,
    FETCH,
    FORM,
    HEAD,
    MAGIC,
    Head,
    pack_head,
    unpack_text,
)
from daskps.cluster.wire.wellformed import refused
from daskps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.layout.arrays import Layout

__all__ = ["LaneCalls", "Parked"]
#: Fields of a head that says nothing but a clock.
_READ = MAGIC, CALL, 0, 0, 1.0
#: A leader lets another thread lead before an answer above this size, or has another
#: thread send it.
LONG = 65_536


class LaneCalls:
    """The calls of one lane.

    Parameters
    ----------
    host : ShardHost
        The host of the shards.
    """

    def __init__(self, host: ShardHost) -> None:
        self._host = host
        self._forms: dict[int, HostForm] = {}
        #: Guards changes of the forms: the event loop makes some too.
        self._learning = threading.Lock()

    def read_now(self, data: Any) -> bytearray | None:
        """Return the answer to a frame without a body that only reads; None for others.

        The buffer is valid until the next call: the caller sends it before.
        """
        magic, kind, flags, form, nbytes, clock, sequence, floor, weight, *_, number = (
            HEAD.unpack_from(data)
        )
        known, said = self._forms.get(form), (magic, kind, flags, nbytes, weight)
        if known is None or said != _READ or min(clock, sequence, floor) < -1:
            return None
        return known.read_now(number, clock)

    def wanted(self, head: Head) -> list[Any]:
        """Return buffers for the body of a frame; its shards may keep them.

        Raises
        ------
        ProtocolError
            If the end of the body cannot be known from this head.
        """
        if head.kind in (FORM, FETCH):
            return [bytearray(head.nbytes)]
        known = self._forms.get(head.form)
        if head.kind != CALL or known is None:
            raise ProtocolError(f"a frame that nobody has asked for: {head!r:.200}")
        return known.form.wanted(head, self._host.empty)

    def is_long(self, head: Head) -> bool:
        """Return whether the answer to a frame has many bytes, or takes long."""
        if head.kind != CALL:
            return head.kind == FETCH
        known = self._forms.get(head.form)
        if known is None:
            return False
        form = known.form
        # The caller may ask for a row by each id.
        rows = form.row_nbytes and head.nbytes // ID.itemsize * form.row_nbytes
        return form.answer_nbytes + rows > LONG

    def begin(
        self,
        head: Head,
        body: Sequence[Any],
        seconds: float,
    ) -> list[Any] | Parked:
        """Return the frame that answers a frame, or the call that waits.

        Parameters
        ----------
        head : Head
            Head of the frame.
        body : sequence of buffers
            The buffers from :meth:`wanted`, filled.
        seconds : float
            How long this thread waits for the lock of a shard, or for room at one.
        """
        try:
            if head.kind == FORM:
                self._learn(head, body[0])
                return [pack_head(Head(ANSWER, number=head.number))]
            if head.kind == FETCH:
                return answer_fetch(self._host, body[0], head.number)
            return self._forms[head.form].begin(head, body, seconds)
        except Exception as error:  # noqa: BLE001 - its caller gets a refusal
            return refusal_of(error, head.number)

    def _learn(self, head: Head, text: Any) -> None:
        with self._learning:
            self._forms.pop(head.form, None)
        try:
            form = read_form(unpack_text(text), self._layout)
        except Exception as error:
            raise refused(error, "a form") from error
        with self._learning:
            self._forms[head.form] = HostForm(self._host, form)

    def let_go(self) -> None:
        """Let go of shards that have left this host; any thread may call this."""
        with self._learning:
            for number, form in [*self._forms.items()]:
                if form.has_gone:
                    # A new one: the lane's thread may be using the old one in a call.
                    self._forms[number] = HostForm(self._host, form.form)

    def _layout(self, store: str, shard: int) -> Layout:
        return self._host.get_shard(store, shard).layout
