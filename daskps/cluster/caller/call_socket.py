"""The caller's end of one socket: a whole call in few calls of Python and the kernel.

A short way here serves nearly all calls: the frame goes in one piece, and its answer
comes in one piece and says of each shard that it is done. :class:`Channel` reads all
other answers.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.cluster.caller.call_template import least_in
from daskps.cluster.sockets.channel import MOST_BUFFERS, Channel
from daskps.cluster.sockets.fetches import check_fetched, pack_fetch, text_nbytes
from daskps.cluster.sockets.frames import (
    ANSWER,
    ANSWERED,
    CALL,
    HAS_LEAST,
    HAS_LR,
    HEAD,
    HEAD_NBYTES,
    MAGIC,
    MOST_TEMPLATES,
    MOST_TEXT,
    REFUSAL,
    TEMPLATE,
    Head,
    pack_head,
    unpack_rows,
    unpack_text,
)
from daskps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.cluster.caller.call_template import CallTemplate, SocketFrame
    from daskps.typing import Array

#: Seconds and microseconds of a time-out, as the kernel takes them.
_TIME = struct.Struct("ll")
#: The event that `poll` looks for on a socket that nobody uses; it always tells errors.
_HUNG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)
#: The largest number of a frame; 0 follows it.
_MOST_NUMBER = 0xFFFF_FFFF


class SocketPayload(NamedTuple):
    """The numbers and arrays of one call, beside its template."""

    clock: int = 0
    sequence: int = 0
    floor: int = 0
    weight: float = 1.0
    lr: float | None = None
    #: The arrays that it brings, by their names in the template.
    arrays: Mapping[Any, Array] = MappingProxyType({})
    #: Flat arrays that take the values it reads.
    outs: Sequence[Array] = ()
    #: The version that a read outside runs waits for.
    min_version: int | None = None
    #: Version of each shard that a trainer has read last, where its run asks.
    seen: Mapping[int, int] | None = None


class SocketSilentError(TimeoutError):
    """A host has said nothing yet; the socket is as it was, inside of its call."""


class SocketRefusedError(Exception):
    """A host leaves a call to messages; the socket is as it was."""


def reason_of(error: Exception) -> str:
    """Return why a socket had no answer, by one text for each kind of reason."""
    if isinstance(error, SocketRefusedError):
        return f"refused: {str(error).partition(':')[0]}"
    # A thread that waits in the kernel gets a BlockingIOError when it has waited too
    # long.
    late = isinstance(error, (BlockingIOError, TimeoutError))
    return "TimeoutError" if late else type(error).__name__


class CallSocket(Channel):
    """The caller's end of one socket; one thread at a time has it.

    Parameters
    ----------
    taken : socket.socket
        The socket, which nobody else uses.
    patience : float
        Seconds without a byte after which the host is given up.
    """

    def __init__(self, taken: socket.socket, patience: float) -> None:
        super().__init__(taken, patience)
        if not self._is_tls:
            # The kernel keeps the time itself: that takes half as many calls of it.
            taken.settimeout(None)
            self._set_patience(patience)
        self._recv_into = taken.recv_into
        #: Numbers of the templates that the host has been told, the latest last.
        self._templates: dict[bytes, int] = {}
        self._number = 0
        #: Views of the buffer where the answers to these templates lie.
        self._sources: dict[bytes, tuple[Array, ...]] = {}

    @property
    def has_hung_up(self) -> bool:
        """Whether its host has closed it, or is gone; asked while nobody uses it."""
        found = select.poll()
        found.register(self._socket, _HUNG_UP)
        return bool(found.poll(0))

    def set_limits(self, patience: float, seconds: float) -> None:
        """Give the next frames a patience, and all of them together so many seconds."""
        if patience != self._patience:
            self._set_patience(patience)
        self._until = time.monotonic() + seconds

    def _set_patience(self, patience: float) -> None:
        self._patience = patience
        seconds = max(patience, 0.001)
        if self._is_tls:
            self._socket.settimeout(seconds)
            return
        whole = int(min(seconds, 1e9))
        packed = _TIME.pack(whole, int(1e6 * (seconds - whole)) % 1_000_000)
        for which in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, which, packed)

    def ask(
        self,
        frame: SocketFrame,
        said: SocketPayload,
        left: float = math.inf,
        wait_ms: int = 0,
    ) -> None:
        """Send a call, and before it its template where the host does not know it.

        Parameters
        ----------
        frame : SocketFrame
            The part that is equal in all calls of its kind.
        said : SocketPayload
            The rest of the call.
        left : float
            Seconds that all of it may take.
        wait_ms : int
            Longest that the host may keep the caller waiting.
        """
        patience = frame.patience
        if left == math.inf:
            self._until = math.inf
        else:
            patience = min(left, patience)
            self._until = time.monotonic() + left
        if patience != self._patience:
            self._set_patience(patience)
        known = self._templates.get(frame.key)
        if known is None:
            known = self._tell(frame.template)
        clock, sequence, floor, weight, lr, arrays, _, min_version, seen = said
        self._number = number = (self._number + 1) & _MOST_NUMBER
        least = b""
        if min_version is not None or seen is not None:
            least = least_in(frame, min_version, seen)
        flags = HAS_LEAST if least else 0
        if lr is None:
            lr = 0.0
        else:
            flags |= HAS_LR
        nbytes = frame.nbytes + len(least)
        head = HEAD.pack(
            MAGIC,
            CALL,
            flags,
            known,
            nbytes,
            clock,
            sequence,
            floor,
            weight,
            lr,
            wait_ms,
            number,
        )
        buffers: list[Any] = [head + least + frame.counts]
        for name, start, stop in frame.slices:
            buffers.append(arrays[name][start:stop])
        if self._is_tls or len(buffers) > MOST_BUFFERS:
            self.send(buffers)
            return
        sent = self._socket.sendmsg(buffers)
        if sent < HEAD_NBYTES + nbytes:
            self._send_rest(buffers, sent)

    def _send_rest(self, buffers: Sequence[Any], sent: int) -> None:
        rest = []
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            if view[sent:]:
                rest.append(view[sent:])
            sent = max(0, sent - len(view))
        if time.monotonic() > self._until:
            raise TimeoutError("the other end of a socket is too slow")
        self.send(rest)

    def answer(self, frame: SocketFrame, outs: Sequence[Array]) -> tuple[int, ...]:
        """Return the rows that answer the last call, one after the other.

        The values that were read are in `outs` then, but for those of shards that wait.

        Parameters
        ----------
        frame : SocketFrame
            The call's.
        outs : sequence of ndarray, shape (n,)
            The arrays of its target.

        Raises
        ------
        OSError
            Where the host is gone, or silent for too long.
        SocketSilentError
            Where it has not begun to answer; this may be called again.
        SocketRefusedError
            Where it leaves the call to messages.
        ProtocolError
            Where it sends something that answers nothing.
        """
        buffer, nbytes = self._buffer, frame.answer_nbytes
        is_small = frame.first_nbytes == nbytes
        try:
            got = self._recv_into(buffer, 0 if is_small else frame.first_nbytes)
        except (BlockingIOError, TimeoutError):
            raise SocketSilentError("a host answers nothing") from None
        if got == frame.first_nbytes and ANSWERED.unpack_from(buffer) == (
            MAGIC,
            ANSWER,
            nbytes - HEAD_NBYTES,
            self._number,
        ):
            rows = frame.rows.unpack_from(buffer, HEAD_NBYTES)
            if rows[::4] == frame.shards and rows[3::4] == frame.applied:
                if is_small:
                    # Each frame with rows has other places.
                    sources = None if frame.counts else self._sources.get(frame.key)
                    if sources is None and frame.places:
                        sources = self._find_in(frame)
                    for place, source in zip(frame.places, sources or (), strict=True):
                        outs[place[0]][place[1]] = source
                else:
                    for number, where, *_ in frame.places:
                        self.receive_into(outs[number][where])
                return rows
        return self._read_answer(frame, outs, got)

    def _find_in(self, frame: SocketFrame) -> tuple[Array, ...]:
        """Return views of the buffer where small answers to a template lie, for next times.

        They are the same for all templates of that key, which says what is read. Each
        caller has other arrays that the values go to.
        """
        found: tuple[Array, ...] = ()
        for _, _, dtype, n, at in frame.places:
            found = (*found, np.frombuffer(self._buffer, dtype, n, at))
        if not frame.counts:
            self._sources[frame.key] = found
        return found

    def _read_answer(
        self, frame: SocketFrame, outs: Sequence[Array], got: int
    ) -> tuple[int, ...]:
        """As :meth:`answer`, of any answer that begins with the bytes in the buffer."""
        self._from, self._to = 0, got
        if not got:
            raise ConnectionResetError("the other end of a socket has closed it")
        head = self._receive_own()
        if head.nbytes < frame.rows.size:
            raise ProtocolError(f"an answer of {head.nbytes} bytes")
        rows = self.receive_bytes(frame.rows.size)
        wanted = [
            outs[one.number][one.where]
            for said, of in zip(
                unpack_rows(rows, frame.shards), frame.reads, strict=True
            )
            if not said.parked
            for one in of
        ]
        if head.nbytes != frame.rows.size + sum(out.nbytes for out in wanted):
            raise ProtocolError(f"an answer of {head.nbytes} bytes")
        for out in wanted:
            if out.nbytes:
                self.receive_into(out)
        self.end_frame()
        return frame.rows.unpack(rows)

    def fetch(self, what: str, about: Mapping[str, Any]) -> None:
        """Send a request whose answer :meth:`fetched` returns."""
        self._number = (self._number + 1) & _MOST_NUMBER
        self.send(pack_fetch(what, about, self._number))

    def fetched(
        self, make: Callable[[Any], Sequence[Array]]
    ) -> tuple[Any, Sequence[Array]]:
        """Return the answer to :meth:`fetch`: a description, and arrays.

        Parameters
        ----------
        make : callable
            Returns arrays to receive into, by their description; it refuses one that is
            no answer.

        Raises
        ------
        OSError, SocketRefusedError, ProtocolError
            As :meth:`answer`.
        """
        self._from = self._to = 0
        head = self._receive_own()
        value = unpack_text(self.receive_bytes(text_nbytes(head)))
        arrays = make(value)
        check_fetched(head, arrays)
        for array in arrays:
            if array.nbytes:
                self.receive_into(array)
        self.end_frame()
        return value, arrays

    def _receive_own(self) -> Head:
        """Return the head of the answer to the last frame, unless it is a refusal."""
        head = self.receive_head()
        if head.number != self._number:
            raise ProtocolError(f"an answer to frame {head.number} of a socket")
        if head.kind == REFUSAL:
            text = self.receive_bytes(head.nbytes)
            self.end_frame()
            raise SocketRefusedError(str(unpack_text(text)))
        if head.kind != ANSWER:
            raise ProtocolError(f"an answer of kind {head.kind}")
        return head

    def _tell(self, template: CallTemplate) -> int:
        """Tell the host a template, and return its number there."""
        number = len(self._templates)
        if number == MOST_TEMPLATES:
            first = next(iter(self._templates))
            number = self._templates.pop(first)
            self._sources.pop(first, None)
        self._number = (self._number + 1) & _MOST_NUMBER
        n = len(template.text)
        if n > MOST_TEXT:
            raise ProtocolError(f"{n:,} bytes of text, more than a socket takes")
        head = pack_head(Head(TEMPLATE, n, self._number, number))
        self.send([head, template.text])
        self._from = self._to = 0
        if self._receive_own().nbytes:
            raise ProtocolError("an answer to a template that says more than that")
        self._templates[template.key] = number
        return number
