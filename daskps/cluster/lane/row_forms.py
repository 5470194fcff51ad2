"""Forms of calls with rows of tables, or words of a codec: frames of variable length.

A form says once which tables a call pushes rows of, and which tables it reads. Each
frame says how many rows of each shard, and their ids, before the rows. Its body has:

- versions to wait for, as in frames without rows;
- the number of ids, for each shard and table: first of pushed rows, then of rows to
  read;
- if words of a codec are pushed, their number, for each shard: of its arrays, then of
  its rows of each table;
- these ids;
- pushed arrays and rows, those with the widest elements first: so all of them lie
  aligned in the one buffer that receives the frame.

An answer has for each shard its arrays, then the rows of each table that is read. For
tables of any ids a mark for each id follows: 1 if the table has a row for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.cluster.lane.forms import LEAST, SMALL_NBYTES, Form, read_form
from daskps.cluster.lane.frames import HAS_LEAST, HAS_LR, Head
from daskps.cluster.wire.messages import Part, codec_of
from daskps.cluster.wire.read_words import read_codec_of
from daskps.cluster.wire.rows import asked_of, given_to, most_rows
from daskps.config import cache_dir
from daskps.errors import ProtocolError, PushRejectedError
from daskps.limits import MOST_PUSHED_ROWS
from daskps.shards.steps import MODEL, NO_WAIT, NOTHING, READ, Item

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from daskps.cluster.wire.messages import Call
    from daskps.codecs import Codec
    from daskps.layout.arrays import Layout
    from daskps.layout.tables import Table, TablePiece
    from daskps.reduction import Empty
    from daskps.typing import Array

_NONE = np.empty(0, np.uint8)
#: Dtype of an id, and of a number of ids.
ID = np.dtype("int64")


#: Most bytes of words that a lane carries: for each number, and besides.
_MOST_NBYTES, _MORE_NBYTES = 16, 4096


def most_words(n: int, word: str) -> int:
    """Return the most words of a dtype that a lane carries for `n` numbers.

    A user's codec may make more words than that; those go by message.
    """
    return (_MOST_NBYTES * n + _MORE_NBYTES) // np.dtype(word).itemsize


class RowsSaid(NamedTuple):
    """The body of a frame with rows, by part."""

    #: Versions to wait for.
    least: list[int]
    #: Arrays and rows that are pushed.
    items: list[list[Item]]
    #: Ids of the rows to read, by table.
    asked: list[list[Array]]


class Given(NamedTuple):
    """One array of a body, or the rows that a part has of a table."""

    part: int
    #: Index among the part's arrays; the tables come after them.
    slot: int
    dtype: np.dtype[Any]
    #: Elements of the array, or of each row; 1 for words.
    n: int
    #: Index of the count of its rows or words in the frame; -1 for an array.
    counted: int
    #: Index of the count of its ids; -1 for an array, and for its words.
    ids: int


def given_in(
    arrays: Sequence[Sequence[tuple[str, int]]],
    pushed: Sequence[Table],
    kind: str,
    *,
    n_read: int = 0,
    word: str = "",
) -> tuple[Given, ...]:
    """Return the arrays and rows in the body of a frame, in their order.

    Parameters
    ----------
    arrays : sequence of sequence of (dtype, n)
        The arrays of each part.
    pushed : sequence of Table
        The tables that every part pushes rows of.
    kind : str
        Kind of the step that the call makes of them.
    n_read : int
        Number of tables that every part reads rows of.
    word : str
        The dtype of words, if arrays and rows come as words; "" for numbers.
    """
    found, words = [], len(arrays) * (len(pushed) + n_read)
    for part, of in enumerate(arrays):
        for slot, (dtype, n) in enumerate(of):
            found.append(Given(part, slot, np.dtype(dtype), n, -1, -1))
        for k, table in enumerate(pushed):
            (rows, n), at = given_to(table, kind), part * len(pushed) + k
            found.append(Given(part, len(of) + k, np.dtype(rows), n, at, at))
    if word:
        found = [
            Given(part, slot, np.dtype(word), 1, words + i, ids)
            for i, (part, slot, _, _, _, ids) in enumerate(found)
        ]
    return tuple(sorted(found, key=lambda one: -one.dtype.itemsize))


@dataclass(frozen=True, slots=True)
class RowForm(Form):
    """A form of calls with rows, as the host keeps it."""

    #: Tables whose rows are pushed, and tables whose rows are read.
    pushed: tuple[Table, ...] = ()
    read: tuple[Table, ...] = ()
    #: The arrays and rows that follow the ids.
    given: tuple[Given, ...] = ()
    #: Pushed rows, as items without rows, by part.
    row_items: tuple[tuple[Item, ...], ...] = ()
    #: Positions of the pieces that are read, by part.
    reads_at: tuple[tuple[int, ...], ...] = ()
    #: The table piece of each number of ids.
    pieces: tuple[TablePiece, ...] = ()
    #: For each number of ids, and of words: its maximum, and the bytes that come with
    #: each id or word.
    limits: tuple[tuple[int, int], ...] = ()
    #: Bytes of a frame without ids and rows, and of one with as many as are allowed.
    least_nbytes: int = 0
    most_nbytes: int = 0
    #: The codec of pushed arrays and rows, and that of read ones.
    codec: Codec | None = None
    read_codec: Codec | None = None
    #: Whether the call asks only for marks, not for rows, of the tables it reads.
    finds: bool = False

    def check(self, head: Head) -> None:
        """Refuse a head whose body does not fit this form; see :meth:`Form.check`."""
        least = LEAST.itemsize * len(self.template.parts)
        rest = head.nbytes - (least if head.flags & HAS_LEAST else 0)
        if not self.least_nbytes <= rest <= self.most_nbytes:
            raise ProtocolError(
                f"a call with a body of {head.nbytes:,} bytes, of a form that has "
                f"{self.least_nbytes:,} to {self.most_nbytes:,}"
            )

    def wanted(self, head: Head, empty: Empty) -> list[Array]:
        """Return the buffer for a body of this form; see :meth:`Form.wanted`."""
        self.check(head)
        if head.nbytes <= SMALL_NBYTES:
            return [np.empty(head.nbytes, np.uint8)]
        return [empty(head.nbytes, np.uint8)]

    def read_body(self, head: Head, body: Sequence[Array]) -> RowsSaid:
        """Return the content of the body of a frame of this form.

        Raises
        ------
        ProtocolError, PushRejectedError
            If the numbers of ids are impossible or do not fit the body, or ids of rows
            belong to another shard.
        """
        data, n_parts = body[0], len(self.template.parts)
        least, at = [0] * n_parts, 0
        if head.flags & HAS_LEAST:
            at = LEAST.itemsize * n_parts
            least = data[:at].view(LEAST).tolist()
        first = at + ID.itemsize * len(self.limits)
        counts: list[int] = data[at:first].view(ID).tolist()
        self._check_counts(counts, len(data) - at)
        at = first + ID.itemsize * sum(counts[: len(self.pieces)])
        ids, cut, k = data[first:at].view(ID), [], 0
        for n, piece in zip(counts, self.pieces, strict=False):
            cut.append(some := ids[k : k + n])
            k += n
            if n and not piece.holds(some, cache_dir=cache_dir()):
                error = PushRejectedError if self.pushed else ProtocolError
                raise error(
                    f"{n:,} ids do not fit shard {piece.shard}, which has {piece}"
                )
        items: list[list[Item]] = [
            [*part.step.items, *self.row_items[i]]
            for i, part in enumerate(self.template.parts)
        ]
        for part, slot, dtype, n, k, row in self.given:
            end = at + dtype.itemsize * (n if k < 0 else n * counts[k])
            array, of = data[at:end].view(dtype), items[part]
            of[slot] = Item(of[slot].position, 0, array, None if row < 0 else cut[row])
            at = end
        n, k = len(self.read), n_parts * len(self.pushed)
        asked = [cut[k + i * n : k + (i + 1) * n] for i in range(n_parts)]
        return RowsSaid(least, items, asked)

    def _check_counts(self, counts: Sequence[int], nbytes: int) -> None:
        found = self.least_nbytes
        for n, (most, each) in zip(counts, self.limits, strict=True):
            if not 0 <= n <= most:
                raise ProtocolError(
                    f"a call with {n:,} ids or words for a shard, which takes {most:,}"
                )
            found += n * each
        if found != nbytes:
            raise ProtocolError(
                f"a call with {nbytes:,} bytes, whose numbers of ids make {found:,}"
            )

    def parts(self, head: Head, said: RowsSaid) -> list[Part]:
        """Return the part of each shard in the call of a frame of this form.

        A part of a call that only reads reads nothing if no id belongs to its shard.
        """
        found: list[Part] = []
        words_in = self.read_codec
        lr = head.lr if head.flags & HAS_LR else None
        for part, at_least, items, ids in zip(self.template.parts, *said, strict=True):
            shard, step, ranges, _, _ = part
            asked = tuple(
                [
                    asked_of(table, position, some, finds=self.finds)
                    for table, position, some in zip(
                        self.read, self.reads_at[len(found)], ids, strict=True
                    )
                    if len(some)
                ]
            )
            step = step._replace(
                items=tuple(items),
                clock=head.clock,
                sequence=head.sequence,
                weight=head.weight,
                lr=lr,
                wait=READ if step.wait == NO_WAIT and (asked or ranges) else step.wait,
                at_least=at_least,
                floor=head.floor,
            )
            one = Part(shard, step, ranges, asked)
            found.append(one.in_words(words_in) if words_in else one)
        return found


def read_any_form(said: Any, layout_of: Callable[[str, int], Layout]) -> Form:
    """Return the form that a caller has sent, of calls with rows or without.

    Raises
    ------
    ProtocolError, PushRejectedError, StaleGenerationError
        As :func:`~daskps.cluster.lane.forms.read_form`.
    """
    if "tables" not in said:
        return read_form(said, layout_of)
    name, codec = _codec_in(said)
    form = read_form(said, layout_of)
    template, kind = form.template._replace(codec=name), form.template.step.kind
    layout = layout_of(template.store, template.parts[0].shard)
    *named, finds = said["tables"]
    pushed, read = (_tables(layout, of) for of in named)
    if type(finds) is not bool or (finds and any(t.is_bounded for t in read)):
        raise ProtocolError(f"a form that asks with {finds!r:.60} which rows there are")
    if pushed and kind in (NOTHING, MODEL):
        raise ProtocolError(f"a {kind} of rows")
    n, arrays = len(template.parts), _arrays_of(template)
    word = codec.dtype if codec else ""
    given = given_in(arrays, pushed, kind, n_read=len(read), word=word)
    limits = [_limit(table, kind, is_coded=bool(word)) for table in pushed] * n
    limits += [(most_rows(t), ID.itemsize) for t in read] * n
    if word:
        for part in template.parts:
            limits += _word_limits(layout, part, pushed, word)
    nbytes = form.nbytes + ID.itemsize * len(limits)
    read_in = template.read_codec
    return RowForm(
        template,
        form.arrays,
        form.nbytes,
        form.answer_nbytes,
        None,
        max((t.row_nbytes + (not t.is_bounded) for t in read), default=0),
        pushed,
        read,
        given,
        tuple(
            tuple(Item(at, 0, _NONE) for at in _positions(layout, p, pushed))
            for p in template.parts
        ),
        tuple(_positions(layout, p, read) for p in template.parts),
        tuple(
            layout.table_pieces[p.shard][table.index - len(layout.parameters)]
            for tables in (pushed, read)
            for p in template.parts
            for table in tables
        ),
        tuple(limits),
        nbytes,
        nbytes + sum(most * each for most, each in limits),
        codec,
        read_codec_of(read_in) if read_in else None,
        finds,
    )


def _codec_in(said: Any) -> tuple[str, Codec | None]:
    """Return name and codec of pushed words, and clear the codec in the form's head.

    The number of words comes with each frame, and :meth:`RowForm.read_body` checks it.
    """
    head = said["head"] = [*said["head"]]
    name, head[-2] = head[-2], ""
    if not name:
        return "", None
    if any(start or n for of in said["sizes"] for _, start, n, _ in of):
        raise ProtocolError("a form that says how many words come with each frame")
    if said.get("looks"):
        raise ProtocolError("a form of words that are to be looked at")
    return name, codec_of(name, head[1])


def _limit(table: Table, kind: str, *, is_coded: bool) -> tuple[int, int]:
    """Return the most rows of a table that may come, and the bytes with each id."""
    dtype, wide = given_to(table, kind)
    each = 0 if is_coded else np.dtype(dtype).itemsize * wide
    return MOST_PUSHED_ROWS, ID.itemsize + each


def _word_limits(
    layout: Layout, part: Part, pushed: Sequence[Table], word: str
) -> list[tuple[int, int]]:
    """Return the most words of each array and table, and the bytes of each word."""
    pieces = layout.pieces[part.shard]
    sizes = [pieces[item.position].size for item in part.step.items]
    sizes += [MOST_PUSHED_ROWS * table.dim for table in pushed]
    return [(most_words(n, word), np.dtype(word).itemsize) for n in sizes]


def _arrays_of(template: Call) -> list[list[tuple[str, int]]]:
    """Return dtype and length of the arrays of each part."""
    return [
        [(item.data.dtype.name, len(item.data)) for item in part.step.items]
        for part in template.parts
    ]


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
        raise ProtocolError("a form that names a table twice")
    return tuple(found)


def _positions(layout: Layout, part: Part, tables: Iterable[Table]) -> tuple[int, ...]:
    return tuple(layout.table_position(part.shard, table.index) for table in tables)
