"""Templates: the constant part of repeated calls on a socket, sent once.

A template names the shards and their generation, the elements to push and to read, the
tables whose rows are pushed and read, and the run and rank or the producer. A call then
has the number of its template, and the changes. The body of its frame has:

- versions to wait for, by shard;
- the number of ids, for each shard and table: first of pushed rows, then of rows to
  read;
- if a codec pushes words whose number the template does not say: how many there are,
  for each shard: of its arrays, then of its rows of each table;
- these ids;
- pushed arrays and rows, those with the widest elements first: so all of them lie
  aligned in the one buffer that receives the frame.

An answer has for each shard its arrays, then the rows of each table that is read. For
unbounded tables a mark for each id follows: 1 if the table has a row for it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.cluster.protocol.messages import (
    COUNTED,
    Call,
    Part,
    codec_of,
    pack_parts,
    unpack_given_up,
    unpack_parts,
)
from daskps.cluster.protocol.read_words import read_codec_of
from daskps.cluster.protocol.row_messages import asked_of, given_to, most_rows
from daskps.cluster.sockets.frames import (
    CALL,
    HAS_LEAST,
    HAS_LR,
    Head,
)
from daskps.config import cache_dir
from daskps.errors import ProtocolError, PushRejectedError
from daskps.limits import MOST_PUSHED_ROWS
from daskps.shards.steps import (
    MODEL,
    NO_WAIT,
    NOTHING,
    READ,
    Item,
    Step,
    changes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from daskps.codecs import Codec
    from daskps.layout.arrays import Layout
    from daskps.layout.tables import Table, TablePiece
    from daskps.reduction import Empty
    from daskps.typing import Array

#: A version to wait for, in front of the arrays of a call.
LEAST = np.dtype("int64")
#: Dtype of an id, and of a number of ids or words.
ID = np.dtype("int64")
#: Bodies up to this size take no memory of the host's pool.
SMALL_NBYTES = 65_536
#: Most bytes of words that a socket carries: for each number, and besides.
_MOST_NBYTES, _MORE_NBYTES = 16, 4096
#: More ids or words than any body has.
_ANY = 2**48
_NO_BYTES = np.empty(0, np.uint8)


def most_words(n: int, word: str) -> int:
    """Return the most words of a dtype that a socket carries for `n` numbers.

    A user's codec may make more words than that; those go by message.
    """
    return (_MOST_NBYTES * n + _MORE_NBYTES) // np.dtype(word).itemsize


def pack_template(
    call: Call,
    *,
    tables: tuple[Sequence[int], Sequence[int], bool] = ((), (), False),
    counted: bool = False,
) -> dict[str, Any]:
    """Return the template of a call as plain values.

    Parameters
    ----------
    call : Call
        The call, without rows.
    tables : (sequence of int, sequence of int, bool)
        Numbers of the tables whose rows are pushed, and whose rows are read; and
        whether the call asks only which rows these have.
    counted : bool
        Whether each frame says how many words there are of each array.
    """
    return {**pack_parts(call, counted=counted), "tables": tables}


def key_of(text: bytes) -> bytes:
    """Return the key by which a host knows the template with a text."""
    return hashlib.blake2b(text, digest_size=16).digest()


class BodyItem(NamedTuple):
    """One array of a body, or the rows that a part has of a table."""

    part: int
    #: Index among the part's arrays; the tables come after them.
    slot: int
    dtype: np.dtype[Any]
    #: Elements of the array, or of each row; 1 for words that the frame counts.
    n: int
    #: Index of the count of its rows or words in the frame; -1 for an array.
    counted: int
    #: Index of the count of its ids; -1 for an array, and for its words.
    ids: int


def body_items(
    arrays: Sequence[Sequence[tuple[str, int]]],
    pushed: Sequence[Table],
    kind: str,
    *,
    n_read: int = 0,
    word: str = "",
) -> tuple[BodyItem, ...]:
    """Return the arrays and rows in the body of a frame, in their order.

    Parameters
    ----------
    arrays : sequence of sequence of (dtype, n)
        The arrays of each part; n is COUNTED for words that the frame counts.
    pushed : sequence of Table
        The tables that every part pushes rows of.
    kind : str
        Kind of the step that the call makes of them.
    n_read : int
        Number of tables that every part reads rows of.
    word : str
        The dtype of words, if rows come as words; "" for numbers.
    """
    found, words = list[BodyItem](), len(arrays) * (len(pushed) + n_read)
    for part, of in enumerate(arrays):
        for slot, (dtype, n) in enumerate(of):
            if n == COUNTED:
                found.append(BodyItem(part, slot, np.dtype(dtype), 1, words, -1))
                words += 1
            else:
                found.append(BodyItem(part, slot, np.dtype(dtype), n, -1, -1))
        for k, table in enumerate(pushed, len(of)):
            (rows, n), at = given_to(table, kind), part * len(pushed) + k - len(of)
            if word:
                found.append(BodyItem(part, k, np.dtype(word), 1, words, at))
                words += 1
            else:
                found.append(BodyItem(part, k, np.dtype(rows), n, at, at))
    return tuple(sorted(found, key=lambda one: -one.dtype.itemsize))


class _FrameBody(NamedTuple):
    """The body of a frame, by part."""

    #: Versions to wait for; None where it says none.
    least: list[int] | None
    #: Arrays and rows that are pushed.
    items: list[list[Item]]
    #: Ids of the rows to read, by table.
    asked: Sequence[Sequence[Array]]
    #: Pushes before this one that their caller has given up.
    given_up: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FrameTemplate:
    """A template as the host keeps it."""

    #: A call of this template; its arrays take no memory, and its frames add the rows.
    call: Call
    #: The arrays and rows at the end of a body.
    given: tuple[BodyItem, ...]
    #: By part the items that a body fills: of arrays, then of pushed rows.
    items: tuple[tuple[Item, ...], ...]
    #: Tables whose rows are pushed, and tables whose rows are read.
    pushed: tuple[Table, ...]
    read: tuple[Table, ...]
    #: Positions of the pieces that are read, by part.
    reads_at: tuple[tuple[int, ...], ...]
    #: The table piece of each number of ids.
    pieces: tuple[TablePiece, ...]
    #: For each number of ids, and of words: its maximum by socket and at all, and the
    #: bytes that come with each id or word.
    limits: tuple[tuple[int, int, int], ...]
    #: Bytes of a body without ids and rows, and of one with as many as are allowed.
    least_nbytes: int
    most_nbytes: int
    #: Bytes of the arrays of an answer without rows, and of the longest row that its
    #: frames may read; 0 if they read none.
    answer_nbytes: int
    row_nbytes: int
    #: The codec of pushed arrays and rows, and that of read ones.
    codec: Codec | None
    read_codec: Codec | None
    #: Whether the call asks only for marks, not for rows, of the tables it reads.
    finds: bool

    @property
    def is_marked(self) -> bool:
        """Whether rows that it reads may be absent: then answers mark those there are."""
        return not all(table.is_bounded for table in self.read)

    def check(self, head: Head) -> None:
        """Refuse a head whose body does not fit this template.

        Raises
        ------
        ProtocolError
            Before memory is taken for it.
        """
        least = LEAST.itemsize * len(self.call.parts)
        rest = head.nbytes - (least if head.flags & HAS_LEAST else 0)
        if not self.least_nbytes <= rest <= self.most_nbytes:
            raise ProtocolError(
                f"a call with a body of {head.nbytes:,} bytes, of a template that has "
                f"{self.least_nbytes:,} to {self.most_nbytes:,}"
            )

    def wanted(self, head: Head, empty: Empty) -> list[Array]:
        """Return the buffer for a body of this template; none where it has no bytes.

        Raises
        ------
        ProtocolError
            Before memory is taken for it.
        """
        self.check(head)
        if not head.nbytes:
            return []
        small = head.nbytes <= SMALL_NBYTES
        return [(np.empty if small else empty)(head.nbytes, np.uint8)]

    def read_body(
        self, head: Head, body: Sequence[Array], *, by_socket: bool = True
    ) -> _FrameBody:
        """Return the content of the body of a frame of this template.

        By socket it is one buffer. In a message each array that is not empty follows
        the numbers in a buffer of its own: to join them would copy them.

        Raises
        ------
        ProtocolError, PushRejectedError
            If the numbers of ids are impossible or do not fit the body, or ids of rows
            belong to another shard.
        """
        if head.weight < 0 and (run := self.call.step.run):
            raise ProtocolError(f"a call of weight {head.weight} in run {run}")
        buffers, n_parts = iter(body), len(self.items)
        data, least, at = next(buffers, _NO_BYTES), None, 0
        if head.flags & HAS_LEAST:
            at = LEAST.itemsize * n_parts
            least = data[:at].view(LEAST).tolist()
        counts, cut, asked = list[int](), list["Array"](), list[list["Array"]]()
        if self.limits or not by_socket:
            first = at + ID.itemsize * len(self.limits)
            counts = data[at:first].view(ID).tolist()
            self._check_counts(counts, head.nbytes - at, by_socket=by_socket)
            cut, data, at = self._cut(counts, data[first:], buffers)
            n, k = len(self.read), n_parts * len(self.pushed)
            asked = [cut[k + i * n : k + (i + 1) * n] for i in range(n_parts)]
        items = [*map(list, self.items)]
        for part, slot, dtype, n, k, row in self.given:
            size = dtype.itemsize * (n if k < 0 else n * counts[k])
            if size and at == len(data):
                data, at = next(buffers, _NO_BYTES), 0
            if (end := at + size) > len(data):
                raise ProtocolError(f"a call with {len(data):,} bytes of an array")
            array, of = data[at:end].view(dtype), items[part]
            position, start, *_ = of[slot]
            of[slot] = Item(position, start, array, None if row < 0 else cut[row])
            at = end
        return _FrameBody(least, items, asked)

    def _check_counts(
        self, counts: Sequence[int], nbytes: int, *, by_socket: bool
    ) -> None:
        found = self.least_nbytes
        for n, (here, at_all, each) in zip(counts, self.limits, strict=True):
            most = here if by_socket else at_all
            if not 0 <= n <= most:
                raise ProtocolError(
                    f"a call with {n:,} ids or words for a shard, which takes {most:,}"
                )
            found += n * each
        if found != nbytes:
            raise ProtocolError(
                f"a call with {nbytes:,} bytes, whose numbers of ids make {found:,}"
            )

    def _cut(
        self, counts: Sequence[int], data: Array, buffers: Iterator[Array]
    ) -> tuple[list[Array], Array, int]:
        """Return the ids of each table piece, which must be its own.

        Also the buffer that the last of them are in, and where they end there.
        """
        cut, at = list[Any](), 0
        for n, piece in zip(counts, self.pieces, strict=False):
            if n and at == len(data):
                data, at = next(buffers, _NO_BYTES), 0
            end = at + ID.itemsize * n
            cut.append(some := data[at:end].view(ID))
            at = end
            if n and not (len(some) == n and piece.holds(some, cache_dir=cache_dir())):
                error = PushRejectedError if self.pushed else ProtocolError
                raise error(
                    f"{n:,} ids do not fit shard {piece.shard}, which has {piece}"
                )
        return cut, data, at

    def call_in(
        self, head: Head, body: Sequence[Array], *, given_up: Sequence[Any], token: str
    ) -> Call:
        """Return the call in a message of this template.

        Raises
        ------
        ProtocolError, PushRejectedError
            If the body is none of this template.
        """
        if head.kind != CALL or head.nbytes != sum(map(len, body)):
            raise ProtocolError(f"a message that no caller sends: {head!r:.200}")
        said = self.read_body(head, body, by_socket=False)
        said = said._replace(given_up=unpack_given_up(given_up))
        parts = self.parts(head, said)
        if self.read and not any(part.ranges or part.step.tick for part in parts):
            parts = [part for part in parts if part.reads or changes(part.step)]
        if not parts:
            raise ProtocolError("a call to no shard at all")
        wait = head.wait_ms / 1000
        return self.call._replace(parts=tuple(parts), wait_seconds=wait, token=token)

    def parts(self, head: Head, body: _FrameBody) -> list[Part]:
        """Return the part of each shard in the call of a frame of this template.

        A part of a call that only reads reads nothing if no id belongs to its shard.
        """
        found: list[Part] = []
        lr = head.lr if head.flags & HAS_LR else None
        for i, (shard, step, ranges, _, _) in enumerate(self.call.parts):
            asked = tuple(
                [
                    asked_of(table, position, some, finds=self.finds)
                    for table, position, some in zip(
                        self.read, self.reads_at[i], body.asked[i], strict=True
                    )
                    if len(some)
                ]
                if self.read
                else ()
            )
            # By position: this runs for each call, and `_replace` takes thrice as long.
            said = Step(
                step.kind,
                tuple(body.items[i]),
                step.run,
                step.rank,
                head.clock,
                step.tick,
                step.producer,
                head.sequence,
                head.weight,
                lr,
                READ if step.wait == NO_WAIT and asked else step.wait,
                body.least[i] if body.least else 0,
                owned=step.owned,
                floor=head.floor,
                whole=step.whole,
                generation=step.generation,
                check=step.check,
                touched=step.touched,
                given_up=body.given_up,
            )
            one = Part(shard, said, ranges, asked)
            found.append(one.in_words(self.read_codec) if self.read_codec else one)
        return found


def unpack_template(
    said: Any, layout_of: Callable[[str, int], Layout], *, owned: bool = True
) -> FrameTemplate:
    """Return the template that a caller has sent.

    Parameters
    ----------
    said : object
        The template as :func:`pack_template` has it.
    layout_of : callable
        Returns the layout of a store by its name and one of its shards, or raises.
    owned : bool
        Whether shards may keep and change arrays that come.

    Raises
    ------
    ProtocolError, PushRejectedError, StaleGenerationError
        If no call can have that template. A malformed text raises other errors.
    """
    protocol, head, parts, [*named, finds] = (
        said[name] for name in ("protocol", "head", "parts", "tables")
    )
    layout = layout_of(str(head[0]), parts[0][0])
    call, arrays = unpack_parts(protocol, head, parts, layout, owned=owned)
    kind, codec = call.step.kind, codec_of(call.codec, call.step.kind)
    pushed, read = (_tables(layout, of) for of in named)
    if type(finds) is not bool or (finds and any(t.is_bounded for t in read)):
        raise ProtocolError(
            f"a template that asks with {finds!r:.60} which rows there are"
        )
    if pushed and kind in (NOTHING, MODEL):
        raise ProtocolError(f"a {kind} of rows")
    word = codec.dtype if codec else ""
    given = body_items(arrays, pushed, kind, n_read=len(read), word=word)
    n, reads_in = len(call.parts), call.read_codec
    limits = [_limit(table, kind, is_coded=bool(word)) for table in pushed] * n
    limits += [(most_rows(t), most_rows(t), ID.itemsize) for t in read] * n
    if word:
        for part, of in zip(call.parts, arrays, strict=True):
            pieces = layout.pieces[part.shard]
            sizes = [
                pieces[item.position].size
                for item, (_, n) in zip(part.step.items, of, strict=True)
                if n == COUNTED
            ]
            sizes += [MOST_PUSHED_ROWS * table.dim for table in pushed]
            each = np.dtype(word).itemsize
            limits += [(most_words(n, word), _ANY, each) for n in sizes]
    nbytes = ID.itemsize * len(limits)
    nbytes += sum(one.dtype.itemsize * one.n for one in given if one.counted < 0)
    return FrameTemplate(
        call,
        given,
        tuple(
            (
                *part.step.items,
                *(Item(at, 0, _NO_BYTES) for at in _positions(layout, part, pushed)),
            )
            for part in call.parts
        ),
        pushed,
        read,
        tuple(_positions(layout, p, read) for p in call.parts),
        tuple(
            layout.table_pieces[p.shard][table.index - len(layout.parameters)]
            for tables in (pushed, read)
            for p in call.parts
            for table in tables
        ),
        tuple(limits),
        nbytes,
        nbytes + sum(most * each for most, _, each in limits),
        sum(part.answer_nbytes for part in call.parts),
        max((t.row_nbytes + (not t.is_bounded) for t in read), default=0),
        codec,
        read_codec_of(reads_in) if reads_in else None,
        finds,
    )


def _limit(table: Table, kind: str, *, is_coded: bool) -> tuple[int, int, int]:
    """Return how many rows of a table may come, and the bytes with each id."""
    dtype, wide = given_to(table, kind)
    each = 0 if is_coded else np.dtype(dtype).itemsize * wide
    return MOST_PUSHED_ROWS, _ANY, ID.itemsize + each


def _tables(layout: Layout, ordinals: Iterable[Any]) -> tuple[Table, ...]:
    """Return tables by their numbers among those of a store."""
    found = []
    for k in ordinals:
        if type(k) is not int or not 0 <= k < len(layout.tables):
            raise ProtocolError(
                f"table {k!r:.60} of the {len(layout.tables)} of a store"
            )
        found.append(layout.tables[k])
    if len({table.index for table in found}) < len(found):
        raise ProtocolError("a template that names a table twice")
    return tuple(found)


def _positions(layout: Layout, part: Part, tables: Iterable[Table]) -> tuple[int, ...]:
    return tuple(layout.table_position(part.shard, table.index) for table in tables)
