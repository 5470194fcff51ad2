"""Templates: the part that all calls along a route share, sent once over each socket.

From one call to the next only numbers and the contents of arrays change. The lengths of
the arrays, their places in the caller's, the layout of the answer and the places of its
arrays stay while the shards are where they are.
"""

from __future__ import annotations

import json
import struct
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.cluster.caller.targets import ReadSlice, at_least
from daskps.cluster.sockets.channel import BUFFER_NBYTES
from daskps.cluster.sockets.frames import APPLIED, HEAD_NBYTES
from daskps.cluster.sockets.templates import ID, LEAST, key_of, pack_template
from daskps.config import cache_dir
from daskps.kernels.row_moves import scatter
from daskps.shards.steps import UNREAD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.protocol.messages import Call
    from daskps.cluster.protocol.read_words import ReadWords
    from daskps.typing import Array

#: Fields of a step that a template has: steps that differ in these need different
#: templates.
told_once = attrgetter("kind", "run", "rank", "tick", "producer", "wait", "whole")
#: A caller gives a socket up that brings no byte for so long.
PATIENCE_SECONDS = 1.5
#: Bytes that a host takes in and applies in a second at least; they add to the
#: patience.
SLOW_NBYTES = 100_000_000

#: Number of an array of a target, elements of it, their dtype and number, and their
#: place in a frame that is received at once.
_SocketPlace = tuple[int, slice, Any, int, int]
#: Name of an array of a request, and start and stop of elements of it.
SocketSlice = tuple[Any, int, int]


class RowMove(NamedTuple):
    """Rows that arrive one after the other, and belong to other places."""

    #: Number of the array of a target that they go to, and the rows of it.
    number: int
    at: Array
    #: The rows that have come.
    rows: Array

    def put(self, outs: Sequence[Array]) -> None:
        """Put the rows where they belong, once all have come."""
        out = outs[self.number].reshape(-1, self.rows.shape[1])
        scatter(out, self.at, self.rows, cache_dir=cache_dir())


class WordMove(NamedTuple):
    """Words that arrive, and the places of the numbers that they stand for."""

    #: Number of the array of a call that they are received in.
    come: int
    how: ReadWords
    #: Number of the array of a target that the numbers go to, and the elements of it.
    number: int
    where: slice

    def put(self, outs: Sequence[Array]) -> None:
        """Put the numbers where they belong, once all of their words have come."""
        self.how.decode(outs[self.come], outs[self.number][self.where])


class CallTemplate:
    """The template of calls to one host: all that does not change from call to call.

    Parameters
    ----------
    worker : str
        Address of the host.
    call : Call
        A call of this template, without rows.
    tables : (sequence of int, sequence of int, bool)
        Tables of which its frames bring rows, and of which they read some; and whether
        they ask only which rows there are.
    counted : bool
        Whether each frame says how many words there are of each array.
    """

    __slots__ = (
        "applied",
        "is_told",
        "key",
        "rows",
        "shards",
        "store",
        "text",
        "worker",
    )

    def __init__(
        self,
        worker: str,
        call: Call,
        *,
        tables: tuple[Sequence[int], Sequence[int], bool] = ((), (), False),
        counted: bool = False,
    ) -> None:
        self.worker, self.store = worker, call.store
        #: The text of the template, sent once for each socket, and the key that it is
        #: known by.
        said = pack_template(call, tables=tables, counted=counted)
        self.text = json.dumps(said, separators=(",", ":")).encode()
        self.key = key_of(self.text)
        #: Whether a message has told its host the text.
        self.is_told = False
        self.shards = tuple(part.shard for part in call.parts)
        n_shards = len(self.shards)
        #: The layout of an answer's rows, and their codes where no shard waits for
        #: anything.
        self.rows = struct.Struct(f"<{4 * n_shards}q")
        self.applied = (APPLIED,) * n_shards


class SocketFrame:
    """A frame of a template, or of one call: its arrays, and the layout of its answer.

    Parameters
    ----------
    template : CallTemplate
        The template that the host is told once.
    slices : sequence of (name, start, stop)
        The elements of the caller's arrays that a call sends, in their order.
    reads : sequence of sequence of ReadSlice
        By shard the elements that it reads, and the places that they go to.
    nbytes : int
        Bytes of the arrays that go.
    moves : sequence of WordMove and RowMove
        Words and rows among the values that it reads, and belong to other places.
    counts : sequence of int
        The number of ids for each shard and table, and of words.
    asked : tuple of int, optional
        The shards that the call is for; all by default.
    """

    __slots__ = (
        "answer_nbytes",
        "applied",
        "asked",
        "call_nbytes",
        "counts",
        "data_nbytes",
        "first_nbytes",
        "key",
        "moves",
        "nbytes",
        "patience",
        "places",
        "reads",
        "rows",
        "shards",
        "slices",
        "template",
    )

    def __init__(
        self,
        template: CallTemplate,
        slices: Sequence[SocketSlice],
        reads: Sequence[Sequence[ReadSlice]],
        *,
        nbytes: int,
        moves: Sequence[WordMove | RowMove] = (),
        counts: Sequence[int] = (),
        asked: tuple[int, ...] | None = None,
    ) -> None:
        # Not looked up in the template: that would run for each call.
        self.template, self.key, self.shards = template, template.key, template.shards
        self.rows, self.applied = template.rows, template.applied
        self.slices, self.reads, self.moves = tuple(slices), reads, moves
        self.counts = np.array(counts, ID).tobytes() if counts else b""
        self.nbytes = len(self.counts) + nbytes
        self.asked = self.shards if asked is None else asked
        #: Where in an answer the values lie that are read.
        places: list[_SocketPlace] = []
        at = rows_end = HEAD_NBYTES + self.rows.size
        for (dtype, start, stop), number, where in chain.from_iterable(reads):
            if n := stop - start:
                places.append((number, where, np.dtype(dtype), n, at))
                at += n * np.dtype(dtype).itemsize
        self.places = tuple(places)
        self.answer_nbytes = at
        #: Bytes that are received first: the whole answer, or the part before large
        #: arrays.
        self.first_nbytes = at if at < BUFFER_NBYTES else rows_end
        #: Bytes of the arrays that go and that come, with ids and without.
        self.call_nbytes = self.data_nbytes = nbytes + at - rows_end
        self.patience = PATIENCE_SECONDS + self.call_nbytes / SLOW_NBYTES


def least_in(
    frame: SocketFrame, min_version: int | None, seen: Mapping[int, int] | None
) -> bytes:
    """Return the versions that a body begins with, by shard, packed.

    The call waits for these; or a trainer has read them last, where its run asks.
    """
    if min_version is not None:
        found = [at_least(shard, min_version) for shard in frame.shards]
        if any(found):
            return np.array(found, LEAST).tobytes()
    if seen is None:
        return b""
    found = [seen.get(shard, UNREAD) for shard in frame.shards]
    return np.array(found, LEAST).tobytes()
