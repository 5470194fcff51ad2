"""The cost of rounds of resident trainers: messages and bytes exactly, time about.

Pure arithmetic: nothing here measures or sends anything. `docs/scaling.md` explains it.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from msgpack import packb

from daskps.cluster.protocol.messages import PROTOCOL
from daskps.cluster.sockets.frames import HEAD_NBYTES, ROW_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Arrays up to this size travel inside their message.
INLINE_NBYTES = 16_384
#: What Dask puts before each message, and before each of its frames.
PRELUDE_NBYTES = 16
PER_FRAME_NBYTES = 8
#: What a call by socket has besides its arrays, to one shard and back.
PER_FRAMES_NBYTES = 2 * HEAD_NBYTES + ROW_NBYTES

_FRAME = {"__Serialized__": 1}


@dataclass(frozen=True)
class RoundWork:
    """The work that the messages of a round are."""

    #: Requests with their replies.
    messages: int
    #: Of these, those whose arrays are frames of their own.
    framed: int
    #: Bytes of their arrays.
    payload: int


@dataclass(frozen=True)
class StoreShape:
    """A BSP run on one float32 parameter, cut into one shard per host.

    By sockets bytes are those of calls; templates, once for each socket, come besides.
    """

    trainers: int
    hosts: int
    elements: int
    #: Number of the run in its cluster.
    run: int = 1
    #: Of the store before the run.
    version: int = 0
    #: Whether calls take sockets, and none a message.
    by_socket: bool = False
    #: Names of codecs of 16 bits, of gradients and of pulled weights; "" for none.
    codec: str = ""
    read_codec: str = ""

    @property
    def messages(self) -> int:
        """Messages of a round: one for each trainer and host, both ways in one."""
        return self.trainers * self.hosts

    @property
    def sizes(self) -> list[int]:
        """Elements of each shard, as `np.array_split` cuts."""
        least, more = divmod(self.elements, self.hosts)
        return [least + (host < more) for host in range(self.hosts)]

    @property
    def payload(self) -> int:
        """Bytes of gradients and weights of a round, without what is around them."""
        return (self.pushed + self.pulled) * self.trainers * sum(self.sizes)

    @property
    def pushed(self) -> int:
        """Bytes of an element of a gradient."""
        return 2 if self.codec else 4

    @property
    def pulled(self) -> int:
        """Bytes of an element of weights."""
        return 2 if self.read_codec else 4

    @property
    def framed(self) -> int:
        """Messages of a round whose arrays are frames of their own."""
        if self.by_socket:
            return 0
        return self.trainers * sum(
            _is_framed(n * max(self.pushed, self.pulled)) for n in self.sizes
        )

    @property
    def work(self) -> RoundWork:
        """All that a round has to do with messages."""
        return RoundWork(self.messages, self.framed, self.payload)

    @property
    def graph_tasks(self) -> int:
        """Tasks of a round in the task graph, with a part for each trainer."""
        return self.trainers + self.hosts

    def nbytes(self, clocks: Iterable[int | None]) -> int:
        """Return the bytes on the wire of rounds that begin at these clocks.

        These are the numbers of rounds, from 0; None stands for the pull of each
        trainer before its first round.
        """
        if self.by_socket:
            clocks = list(clocks)
            pulls = clocks.count(None)
            each = self.trainers * sum(self.sizes)
            gradients = self.pushed * each * (len(clocks) - pulls)
            weights = self.pulled * each * len(clocks)
            return self.messages * len(clocks) * PER_FRAMES_NBYTES + gradients + weights
        return sum(
            request(self, rank, host, clock) + reply(self, host, clock)
            for clock in clocks
            for rank in range(self.trainers)
            for host in range(self.hosts)
        )


def request(shape: StoreShape, rank: int, host: int, clock: int | None) -> int:
    """Return the bytes of a message from a trainer to a host, at a clock as above."""
    n = shape.sizes[host]
    # The calls of a trainer are numbered as they leave.
    number = (0 if clock is None else clock + 1) * shape.hosts + host
    pushes = clock is not None
    nbytes = shape.pushed * n if pushes else 0
    store, call = "u" * 32, f"{'t' * 32}-{number}"
    text = None
    if not clock:  # later calls have the same template
        head: list[Any] = [
            store,
            "gradient" if pushes else "nothing",
            shape.run,
            rank,
            pushes,
            0,
        ]
        head += [None, False, False, shape.codec if pushes else "", shape.read_codec]
        items, ranges = [[0, 0, n]] if nbytes else [], [["float32", 0, n]] if n else []
        form = {
            "protocol": PROTOCOL,
            "head": head,
            "parts": [[host, 1, items, ranges, "read"]],
            "tables": [[], [], False],
        }
        text = json.dumps(form, separators=(",", ":")).encode()
    message = {
        "op": "daskps_call",
        "reply": True,
        "protocol": PROTOCOL,
        "template": bytes(16),
        "text": text,
        "head": bytes(HEAD_NBYTES),
        "body": [_array(nbytes)] if nbytes else [],
        "given_up": [],
        "token": call,
    }
    return _message(message, [(nbytes, shape.pushed)] if nbytes else [])


def reply(shape: StoreShape, host: int, clock: int | None) -> int:
    """Return the bytes of the host's answer to it."""
    n = shape.sizes[host]
    version = shape.version + (0 if clock is None else clock + 1)
    nbytes = shape.pulled * n
    arrays = [_array(nbytes)] if n else []
    row = [host, None, False, True, version, 0, arrays]
    framed = [(nbytes, shape.pulled)] if n else []
    return _message({"status": "OK", "value": [row]}, framed)


def _array(nbytes: int) -> Any:
    return _FRAME if _is_framed(nbytes) else bytes(nbytes)


def _is_framed(nbytes: int) -> bool:
    """Return whether an array of so many bytes is a frame of its own."""
    return nbytes > INLINE_NBYTES


def _message(message: Any, arrays: Sequence[tuple[int, int]]) -> int:
    """Return the bytes of a message with arrays of so many bytes, and of an element."""
    frames = [each for each in arrays if _is_framed(each[0])]
    nbytes = PRELUDE_NBYTES + PER_FRAME_NBYTES + len(packb(message))
    return nbytes + sum(
        2 * PER_FRAME_NBYTES + len(packb(_about(*each))) + each[0] for each in frames
    )


def _about(nbytes: int, size: int) -> dict[str, Any]:
    """Return what Dask says of an array that is a frame of its own."""
    n, dtype = nbytes // size, "<f4" if size == 4 else "<u2"
    array = {"dtype": [0, dtype], "shape": [n], "strides": [size], "writeable": [True]}
    return {
        "sub-header": array,
        "type": "numpy.ndarray",
        "type-serialized": pickle.dumps(np.ndarray, 5),
        "serializer": "dask",
        "split-num-sub-frames": [1],
        "split-offsets": [0],
        "compression": [None],
        "num-sub-frames": 1,
    }


@dataclass(frozen=True)
class Times:
    """Seconds of a round: so much at least, per message and per byte."""

    fixed: float
    per_message: float
    #: More, for a message whose arrays are frames of their own.
    per_framed: float
    per_byte: float

    def round(self, work: RoundWork) -> float:
        """Return the seconds of a round, as far as one processor has to do with it."""
        each = zip(astuple(self)[1:], astuple(work), strict=True)
        return self.fixed + float(sum(seconds * n for seconds, n in each))


def fitted(rows: Sequence[tuple[RoundWork, float]]) -> Times:
    """Return the times that fit rounds and their seconds best, in relative terms."""
    table = np.array([[1.0, *astuple(work)] for work, _ in rows])
    seconds = np.array([row[1] for row in rows])
    scaled = table / seconds[:, None]
    columns = list(range(table.shape[1]))
    found = np.zeros(table.shape[1])
    while columns:
        # A cost below nothing would only make up for noise elsewhere.
        part = np.linalg.lstsq(scaled[:, columns], np.ones(len(rows)), rcond=None)[0]
        if (part >= 0).all():
            found[columns] = part
            break
        columns.pop(int(part.argmin()))
    return Times(*map(float, found))


@dataclass(frozen=True)
class Apart:
    """Seconds of a round where every worker has a machine of its own."""

    #: To take a message from every trainer, and answer it.
    host: float
    #: To send a message to every host.
    trainer: float

    @property
    def round(self) -> float:
        """A round takes at least so long: the last message of the busiest host."""
        return max(self.host, self.trainer)


def apart(times: Times, shape: StoreShape) -> Apart:
    """Extrapolate from one process to a machine for each host and trainer.

    Half of the work of a message is the sender's, half the receiver's; in one process
    both are done one after the other, on machines of their own each does its half.
    """
    each = astuple(times)[1:]
    half = Times(times.fixed, *(seconds / 2 for seconds in each))
    n, largest = shape.trainers, max(shape.sizes)
    bytes_of, most = shape.pushed + shape.pulled, max(shape.pushed, shape.pulled)
    framed = 0 if shape.by_socket else n * _is_framed(most * largest)
    host = RoundWork(n, framed, n * bytes_of * largest)
    trainer = RoundWork(*(whole // n for whole in astuple(shape.work)))
    return Apart(half.round(host), half.round(trainer))
