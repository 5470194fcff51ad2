"""What the frames of a lane ask of the shards, and the frames that answer them.

Whichever thread serves the lane calls this; the sockets and the threads are `lanes`'.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.host.calls import Countdown, Started, answers_of, start_call
from daskps.cluster.host.lane_fetches import answer_fetch
from daskps.cluster.lane.forms import LEAST, Form, read_form
from daskps.cluster.lane.frames import (
    ANSWER,
    CALL,
    FETCH,
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
from daskps.errors import DaskPSError, ProtocolError, ShardBusyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.wire.messages import Call
    from daskps.layout.arrays import Layout
    from daskps.typing import Array

logger = logging.getLogger(__name__)
#: How long a call may wait here before its caller takes a message.
MOST_WAIT_SECONDS = 1.0


class Parked:
    """A call whose tickets wait at their shards; no thread waits with it.

    Whoever has it either finishes or cancels it, once.

    Parameters
    ----------
    host : ShardHost
        Whose shards they are.
    number : int
        Number of the frame that is to be answered.
    end : float
        When it is to be finished at the latest, by `time.monotonic`.
    """

    def __init__(self, host: ShardHost, number: int, end: float) -> None:
        self.end = end
        self._host, self._number = host, number
        self._started: Sequence[Started] = ()
        self._pending: Countdown | None = None
        self._lock = threading.Lock()
        self._callback: Callable[[], None] | None = None

    def begin(self, call: Call, seconds: float) -> None:
        """Put a call into the inboxes of its shards, and serve these.

        What another process's lock keeps from it for so many seconds waits there; with
        0 for the host to look, else nothing of the call is left.
        """
        host = self._host
        hosted_shards = [host.get_shard(call.store, p.shard) for p in call.parts]
        self._pending, self._started = start_call(hosted_shards, call, self._is_over)
        try:
            for hosted in hosted_shards:
                hosted.serve(seconds)
        except BaseException:
            self.cancel()
            raise
        if not self.done and any(hosted.is_shared for hosted in hosted_shards):
            # Who publishes in another process wakes nobody here.
            host.worker.loop.add_callback(host.keep_looking)

    @property
    def done(self) -> bool:
        """Whether nothing of it waits any more."""
        return self._pending is not None and self._pending.done

    def then(self, callback: Callable[[], None]) -> None:
        """Have a function called once it is done, by whoever serves the shard then.

        That is this thread, where it is done already.
        """
        with self._lock:
            self._callback = callback
            if not self.done:
                return
        callback()

    def finish(self, seconds: float) -> list[Any]:
        """Return the frame that answers it; what is not done by now is said to wait.

        Parameters
        ----------
        seconds : float
            How long a read waits for its turn that updates have run into.

        Raises
        ------
        ShardBusyError
            Where it would have to, and may not wait at all. It can be asked again.
        """
        try:
            self.cancel()
            answers = answers_of(self._started, self._host.empty, seconds=seconds)
            return pack_answers(answers, self._number)
        except ShardBusyError:
            raise
        except Exception as error:  # noqa: BLE001 - its caller gets a refusal
            return refusal_of(error, self._number)

    def cancel(self) -> None:
        """Take back what is not done: its caller is gone, or is told to wait elsewhere.

        Another thread may look at its arrays a moment longer; they are its own.
        """
        if self.done:
            return
        loop = self._host.worker.loop
        for hosted, _, ticket in self._started:
            gone = hosted.take_back(ticket)
            if gone is not None and not gone.done() and hosted.is_shared:
                loop.add_callback(self._host.keep_looking)

    def _is_over(self) -> None:
        with self._lock:
            callback = self._callback
        if callback is not None:
            callback()


class LaneCalls:
    """The calls of one lane.

    Parameters
    ----------
    host : ShardHost
        Whose shards they reach.
    """

    def __init__(self, host: ShardHost) -> None:
        self._host = host
        self._forms: dict[int, Form] = {}

    def wanted(self, head: Head) -> list[Any]:
        """Return the buffers for the body of a frame, which its shards may keep.

        Raises
        ------
        ProtocolError
            Where what follows cannot be told from the body of this frame.
        """
        if head.kind in (FORM, FETCH):
            return [bytearray(head.nbytes)]
        form = self._forms.get(head.form)
        if head.kind != CALL or form is None:
            raise ProtocolError(f"a frame that nobody has asked for: {head!r:.200}")
        form.check(head)
        empty = self._host.empty
        arrays = [empty(n, dtype) for dtype, n in form.arrays]
        if head.flags & HAS_LEAST:
            arrays.insert(0, np.empty(len(form.template.parts), LEAST))
        return arrays

    def begin(
        self, head: Head, body: Sequence[Any], seconds: float
    ) -> list[Any] | Parked:
        """Return the frame that answers one, or the call that waits.

        Parameters
        ----------
        head : Head
            Its head.
        body : sequence of buffers
            Those that it wanted, filled.
        seconds : float
            How long this thread waits for the lock of a shard, or for room at one.
        """
        try:
            if head.kind == FORM:
                self._learn(head, body[0])
                return [pack_head(Head(ANSWER, number=head.number))]
            if head.kind == FETCH:
                return answer_fetch(self._host, body[0], head.number)
            parked = self._start(head, body, seconds)
        except Exception as error:  # noqa: BLE001 - its caller gets a refusal
            return refusal_of(error, head.number)
        if parked.done:
            # A read whose turn has not come waits as well.
            with contextlib.suppress(ShardBusyError):
                return parked.finish(seconds)
        return parked

    def _learn(self, head: Head, text: Any) -> None:
        self._forms.pop(head.form, None)
        try:
            self._forms[head.form] = read_form(unpack_text(text), self._layout)
        except Exception as error:
            raise refused(error, "a form") from error

    def _layout(self, store: str, shard: int) -> Layout:
        return self._host.get_shard(store, shard).layout

    def _start(self, head: Head, body: Sequence[Array], seconds: float) -> Parked:
        """Serve a call, as `ShardHost.call` does on the event loop."""
        host, arrays, least = self._host, iter(body), None
        if head.flags & HAS_LEAST:
            least = next(arrays).tolist()
        call = self._forms[head.form].call(head, least, arrays)
        end = time.monotonic() + min(call.wait_seconds, MOST_WAIT_SECONDS)
        if producer := call.step.producer:
            for part in call.parts:
                hosted = host.get_shard(call.store, part.shard)
                host.make_room(hosted, producer, seconds)
        if call.codec:
            layout = host.get_shard(call.store, call.parts[0].shard).layout
            call = widened(call, layout, host.empty)
        parked = Parked(host, head.number, end)
        parked.begin(call, seconds)
        return parked


def refusal_of(error: Exception, number: int) -> list[Any]:
    """Return the frame that refuses a call, after an error that its shards gave none."""
    if isinstance(error, (DaskPSError, ValueError, TypeError)):
        return pack_refusal(error, number)
    logger.error("a call by a lane failed", exc_info=error)
    return pack_refusal(refused(error, "a call"), number)
