"""The calls in the frames of a socket: this module passes them on and answers them.

The thread that serves the socket calls it; sockets and threads belong to
:mod:`daskps.cluster.host.sockets`. A *fetch* calls no shard: a module that offers
something to fetch puts a function of its own into a table, as handlers of messages do::

    @FETCHES.handles("name")
    def name(host, *, run): ...

The function returns a description of the arrays, in plain values, and the arrays; no
thread may change them until they are sent. It may take long, but must not wait: where
it has to it returns a function that begins a call that waits, by the head of the frame.
Later frames without a text begin it again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from daskps.cluster.host.calls import Parked
from daskps.cluster.host.host_template import HostTemplate, refusal_of
from daskps.cluster.protocol.handlers import FETCHES
from daskps.cluster.protocol.wellformed import check
from daskps.cluster.sockets.fetches import pack_fetched, unpack_fetch
from daskps.cluster.sockets.frames import (
    ANSWER,
    CALL,
    FETCH,
    HEAD,
    MAGIC,
    TEMPLATE,
    Head,
    pack_head,
)
from daskps.cluster.sockets.templates import ID
from daskps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.host.host import ShardHost


__all__ = ["Parked", "SocketCalls"]
#: Fields of a head that says nothing but a clock.
_READ = MAGIC, CALL, 0, 0, 1.0
#: A leader lets another thread lead before an answer above this size, or has another
#: thread send it.
LONG = 65_536


class SocketCalls:
    """The calls of one socket.

    Parameters
    ----------
    host : ShardHost
        The host of the shards.
    """

    def __init__(self, host: ShardHost) -> None:
        self._host = host
        self._templates: dict[int, HostTemplate] = {}
        #: Begins a fetch that waits, the last one.
        self._again: Callable[[Head], list[Any] | Parked] | None = None
        #: Guards changes of the templates: the event loop makes some too.
        self._learning = threading.Lock()

    def read_now(self, data: Any) -> bytearray | None:
        """Return the answer to a frame without a body that only reads; None for others.

        The buffer is valid until the next call: the caller sends it before.
        """
        (
            magic,
            kind,
            flags,
            template,
            nbytes,
            clock,
            sequence,
            floor,
            weight,
            *_,
            number,
        ) = HEAD.unpack_from(data)
        known, said = (
            self._templates.get(template),
            (magic, kind, flags, nbytes, weight),
        )
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
        if head.kind in (TEMPLATE, FETCH):
            return [bytearray(head.nbytes)]
        known = self._templates.get(head.template)
        if head.kind != CALL or known is None:
            raise ProtocolError(f"a frame that nobody has asked for: {head!r:.200}")
        return known.template.wanted(head, self._host.empty)

    def is_long(self, head: Head) -> bool:
        """Return whether the answer to a frame has many bytes, or takes long."""
        if head.kind != CALL:
            return head.kind == FETCH and not 0 < head.sequence <= LONG
        known = self._templates.get(head.template)
        if known is None:
            return False
        template = known.template
        # The caller may ask for a row by each id.
        rows = template.row_nbytes and head.nbytes // ID.itemsize * template.row_nbytes
        return template.answer_nbytes + rows > LONG

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
            if head.kind == TEMPLATE:
                self._learn(head, body[0])
                return [pack_head(Head(ANSWER, number=head.number))]
            if head.kind == FETCH:
                return self._fetch(head, body[0])
            return self._templates[head.template].begin(head, body, seconds)
        except Exception as error:  # noqa: BLE001 - its caller gets a refusal
            return refusal_of(error, head.number)

    def _fetch(self, head: Head, text: bytes) -> list[Any] | Parked:
        """Serve a fetch; one without a text is the last one that waited, again."""
        begin = self._again
        if head.nbytes or begin is None:
            what, about = unpack_fetch(text)
            if (handler := FETCHES.by_name.get(what)) is None:
                raise ProtocolError(f"no socket fetches {what!r:.60}")
            check(handler.function, about, f"a fetch of {what}")
            found = handler.function(self._host, **about)
            if not callable(found):
                value, arrays = found
                return pack_fetched(value, arrays, head.number)
            self._again = begin = found
        return begin(head)

    def _learn(self, head: Head, text: Any) -> None:
        with self._learning:
            self._templates.pop(head.template, None)
        template = self._host.templates.learn(bytes(text))
        with self._learning:
            self._templates[head.template] = HostTemplate(self._host, template)

    def closed(self) -> None:
        """Nothing is left half-done: its calls are whole, or never came."""

    def let_go(self) -> None:
        """Let go of shards that have left this host; any thread may call this."""
        with self._learning:
            for number, template in [*self._templates.items()]:
                if template.has_gone:
                    # A new one: the socket's thread may be using the old one in a call.
                    self._templates[number] = HostTemplate(
                        self._host, template.template
                    )
