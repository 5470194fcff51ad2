"""What the frames of a lane ask of the shards, and the frames that answer them.

Whichever thread serves the lane calls this; the sockets and the threads are `lanes`'.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from daskps.cluster.host.calls import answers_of, start_call
from daskps.cluster.host.hosted import LOCK_SECONDS
from daskps.cluster.lane.forms import LEAST, Form, read_form
from daskps.cluster.lane.frames import (
    ANSWER,
    CALL,
    FORM,
    HAS_LEAST,
    Head,
    pack_answers,
    pack_head,
    pack_refusal,
    unpack_text,
)
from daskps.cluster.wire.encoding import widened
from daskps.cluster.wire.wellformed import refused
from daskps.errors import DaskPSError, ProtocolError

if TYPE_CHECKING:
    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.lane.channel import Channel
    from daskps.cluster.wire.messages import Answer, Call
    from daskps.layout.arrays import Layout

logger = logging.getLogger(__name__)
#: How long a call may wait here before its caller takes a message.
MOST_WAIT_SECONDS = 1.0
#: What a read gets to wait for its turn, however late it is.
MIN_SECONDS = 0.1


class LaneCalls:
    """The calls of one lane.

    Parameters
    ----------
    host : ShardHost
        Whose shards they reach.
    channel : Channel
        Where the bodies of frames come from.
    """

    def __init__(self, host: ShardHost, channel: Channel) -> None:
        self._host, self._channel = host, channel
        self._forms: dict[int, Form] = {}
        #: Set for whoever waits here: what it waits for is done, or the lane ends.
        self._woken = threading.Event()

    def wake(self) -> None:
        """End a wait; from any thread."""
        self._woken.set()

    def answer(self, head: Head) -> list[Any]:
        """Return the frame that answers one.

        Raises
        ------
        ProtocolError
            Where what follows cannot be told from the body of this frame.
        """
        if head.kind == FORM:
            text = self._channel.receive_bytes(head.nbytes)
            try:
                self._forms.pop(head.form, None)
                self._forms[head.form] = read_form(unpack_text(text), self._layout)
            except Exception as error:  # noqa: BLE001 - its caller gets a refusal
                return pack_refusal(refused(error, "a form"), head.number)
            return [pack_head(Head(ANSWER, number=head.number))]
        form = self._forms.get(head.form)
        if head.kind != CALL or form is None:
            raise ProtocolError(f"a frame that nobody has asked for: {head!r:.200}")
        form.check(head)
        call = self._receive(form, head)
        try:
            return pack_answers(self._answers(call), head.number)
        except (DaskPSError, ValueError, TypeError) as error:
            return pack_refusal(error, head.number)
        except Exception as error:
            logger.exception("a call by a lane failed")
            return pack_refusal(refused(error, "a call"), head.number)

    def _layout(self, store: str, shard: int) -> Layout:
        return self._host.get_shard(store, shard).layout

    def _receive(self, form: Form, head: Head) -> Call:
        """Receive the body of a call into arrays that its shards may keep."""
        least: list[int] | None = None
        if head.flags & HAS_LEAST:
            buffer = self._host.empty(len(form.template.parts), LEAST)
            self._channel.receive_into(buffer)
            least = buffer.tolist()
        arrays = []
        for dtype, n in form.arrays:
            array = self._host.empty(n, dtype)
            if n:
                self._channel.receive_into(array)
            arrays.append(array)
        return form.call(head, least, iter(arrays))

    def _answers(self, call: Call) -> list[Answer]:
        """Serve a call, as `ShardHost.call` does on the event loop."""
        host = self._host
        end = time.monotonic() + min(call.wait_seconds, MOST_WAIT_SECONDS)
        hosted_shards = [host.get_shard(call.store, p.shard) for p in call.parts]
        if producer := call.step.producer:
            for hosted in hosted_shards:
                host.make_room(hosted, producer, MOST_WAIT_SECONDS)
        if call.codec:
            call = widened(call, hosted_shards[0].layout, host.empty)
        self._woken.clear()
        pending, tickets = start_call(hosted_shards, call, self._woken.set)
        try:
            for hosted in hosted_shards:
                hosted.serve(MOST_WAIT_SECONDS)
            if not pending.done and self._channel.is_open:
                if any(hosted.is_shared for hosted in hosted_shards):
                    # Who publishes in another process wakes nobody here.
                    host.worker.loop.add_callback(host.keep_looking)
                self._woken.wait(max(0.0, end - time.monotonic()))
        finally:
            if not pending.done:
                for hosted, _, ticket in tickets:
                    # Until then somebody may be reading its arrays.
                    hosted.take_back(ticket, LOCK_SECONDS)
        left = max(MIN_SECONDS, end - time.monotonic())
        return answers_of(tickets, host.empty, seconds=left)
