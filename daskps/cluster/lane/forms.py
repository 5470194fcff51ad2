"""Forms: the constant part of repeated calls on a lane, sent once.

A form names the shards and their generation, the elements to push and to read, and the
run and rank or the producer. A call then has the number of its form, and the changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import codecs
from daskps.cluster.lane.frames import HAS_LEAST, HAS_LR, Head
from daskps.cluster.wire.messages import (
    Call,
    Part,
    dtype_of_item,
    pack_call,
    unpack_call,
)
from daskps.errors import ProtocolError
from daskps.shards.steps import GRADIENT, Item, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from daskps.layout.arrays import Layout
    from daskps.reduction import Empty
    from daskps.typing import Array

#: A version to wait for, in front of the arrays of a call.
LEAST = np.dtype("int64")
#: The body of a frame without one.
_NO_BYTES = np.empty(0, np.uint8)
#: Bodies up to this size are received into one buffer.
SMALL_NBYTES = 65_536
#: More elements than any shard has.
_MOST_ELEMENTS = 2**48


def _sizes(items: Sequence[Item]) -> tuple[tuple[int, int, int, int], ...]:
    """Return position, start, length and number of ids of each item; -1 for none."""
    return tuple(
        [
            (i.position, i.start, len(i.data), -1 if i.ids is None else len(i.ids))
            for i in items
        ]
    )


def say_form(call: Call) -> Any:
    """Return the form of a call as plain values."""
    parts = tuple(
        p._replace(step=p.step._replace(items=(), **_NEUTRAL)) for p in call.parts
    )
    packed = pack_call(call._replace(parts=parts, wait_seconds=0, token=""))
    said = {**packed, "sizes": [_sizes(p.step.items) for p in call.parts]}
    return {**said, "looks": True} if call.step.check else said


#: Fields that the head of a frame or its body gives, in place of the form.
_NEUTRAL: dict[str, Any] = {
    "clock": 0,
    "sequence": 0,
    "floor": 0,
    "weight": 1.0,
    "lr": None,
    "at_least": 0,
}


@dataclass(frozen=True, slots=True)
class Form:
    """A form as the host keeps it."""

    #: A call of this form; its arrays have the right lengths and take no memory.
    template: Call
    #: Dtype and length of each array, in their order in the body.
    arrays: tuple[tuple[str, int], ...]
    #: Bytes of these arrays, and of the arrays of an answer.
    nbytes: int
    answer_nbytes: int
    #: Place of each array in a small body that is one buffer; None for other bodies.
    places: tuple[tuple[np.dtype[Any], int, int], ...] | None
    #: Bytes of the longest row that its frames may read; 0 if they read none.
    row_nbytes: int = 0

    def check(self, head: Head) -> None:
        """Refuse a head whose body does not fit this form.

        Raises
        ------
        ProtocolError
            Before memory is taken for it.
        """
        least = LEAST.itemsize * len(self.template.parts)
        wanted = self.nbytes + (least if head.flags & HAS_LEAST else 0)
        if head.nbytes != wanted:
            raise ProtocolError(
                f"a call with a body of {head.nbytes:,} bytes, of a form that has "
                f"{wanted:,}"
            )

    def wanted(self, head: Head, empty: Empty) -> list[Array]:
        """Return the buffers for a body of this form: one per array, or one for all.

        Raises
        ------
        ProtocolError
            Before memory is taken for it.
        """
        self.check(head)
        if not head.nbytes:
            return []
        if self.places is not None:
            return [np.empty(head.nbytes, np.uint8)]
        arrays = [empty(n, dtype) for dtype, n in self.arrays]
        if head.flags & HAS_LEAST:
            arrays.insert(0, np.empty(len(self.template.parts), LEAST))
        return arrays

    def taken(
        self, head: Head, body: Sequence[Array]
    ) -> tuple[list[int] | None, Sequence[Array]]:
        """Return the versions to wait for, by part, and the arrays of a body."""
        least: list[int] | None = None
        if self.places is None:
            if head.flags & HAS_LEAST:
                least, body = body[0].tolist(), body[1:]
            return least, body
        data = body[0] if body else _NO_BYTES
        if head.flags & HAS_LEAST:
            n = LEAST.itemsize * len(self.template.parts)
            least, data = data[:n].view(LEAST).tolist(), data[n:]
        return least, [data[a:b].view(dtype) for dtype, a, b in self.places]

    def call(
        self, head: Head, least: Sequence[int] | None, arrays: Iterator[Array]
    ) -> Call:
        """Return the call in a frame of this form.

        Parameters
        ----------
        head : Head
            Head of the frame.
        least : sequence of int or None
            Versions to wait for, by part.
        arrays : iterator of ndarray
            Arrays of the frame, in their order.
        """
        lr = head.lr if head.flags & HAS_LR else None
        parts = []
        # By position: this runs for each call, and `_replace` takes thrice as long.
        for (shard, step, ranges, _, _), bound in zip(
            self.template.parts, least or repeat(0), strict=False
        ):
            said = Step(
                step.kind,
                tuple([_filled(item, arrays) for item in step.items]),
                step.run,
                step.rank,
                head.clock,
                step.tick,
                step.producer,
                head.sequence,
                step.generation,
                head.weight,
                lr,
                step.wait,
                bound,
                owned=step.owned,
                floor=head.floor,
                touched=step.touched,
                whole=step.whole,
                check=step.check,
            )
            parts.append(Part(shard, said, ranges))
        store, _, _, token, codec, _ = self.template
        return Call(store, tuple(parts), head.wait_ms / 1000, token, codec)


def _filled(item: Item, arrays: Iterator[Array]) -> Item:
    """Return an item with the next arrays in place of those without memory."""
    position, start, _, ids, _ = item
    data = next(arrays)
    return Item(position, start, data, None if ids is None else next(arrays))


def read_form(said: Any, layout_of: Callable[[str, int], Layout]) -> Form:
    """Return the form that a caller has sent.

    Parameters
    ----------
    said : object
        The form as :func:`say_form` returns it.
    layout_of : callable
        Returns the layout of a store by its name and one of its shards, or raises.

    Raises
    ------
    ProtocolError, PushRejectedError, StaleGenerationError
        If no call can have that form. A malformed text raises other errors.
    """
    protocol, head, parts, sizes = (
        said[name] for name in ("protocol", "head", "parts", "sizes")
    )
    layout = layout_of(str(head[0]), parts[0][0])
    # Only gradients may have a codec; `unpack_call` checks that.
    kind, codec = head[1], codecs.named(head[-2]) if head[-2] else None
    for part, rows in zip(parts, sizes, strict=True):
        part[3] = []
        pieces = layout.pieces[part[0]]
        if part[6]:
            raise ProtocolError("a form of a call that reads rows, which go by message")
        for position, start, n, n_ids in rows:
            if not (type(position) is int and 0 <= position < len(pieces)):
                raise ProtocolError(f"piece {position!r:.60} of shard {part[0]!r:.60}")
            dtype = codec.dtype if codec else dtype_of_item(pieces[position], kind)
            if n_ids != -1:
                raise ProtocolError("a form of a call with rows, which go by message")
            part[3].append([position, start, _sized(n, dtype), None])
    template = unpack_call(protocol, head, parts, layout, owned=True)
    if said.get("looks"):
        # The first shard would have applied its part before the second one finds an
        # error.
        if len(template.parts) > 1 or codec or kind != GRADIENT:
            raise ProtocolError(f"a form of a {kind!r:.60} that is to be looked at")
        [part] = template.parts
        part = part._replace(step=part.step._replace(check=True))
        template = template._replace(parts=(part,))
    arrays = tuple(
        (array.dtype.name, len(array))
        for part in template.parts
        for item in part.step.items
        for array in (item.data, item.ids)
        if array is not None
    )
    nbytes = sum(np.dtype(dtype).itemsize * n for dtype, n in arrays)
    answer = sum(part.answer_nbytes for part in template.parts)
    return Form(template, arrays, nbytes, answer, _places(arrays))


def _places(
    arrays: Iterable[tuple[str, int]],
) -> tuple[tuple[np.dtype[Any], int, int], ...] | None:
    """Return the places of arrays in one buffer; None if it is large or misaligned."""
    found, at = [], 0
    for name, n in arrays:
        dtype = np.dtype(name)
        end = at + n * dtype.itemsize
        if at % dtype.alignment or end > SMALL_NBYTES:
            return None
        found.append((dtype, at, end))
        at = end
    return tuple(found)


def _sized(n: int, dtype: str) -> Array:
    """Return an array of a given length that takes no memory."""
    if type(n) is not int or not 0 <= n <= _MOST_ELEMENTS:
        raise ProtocolError(f"an array of {n!r:.60} elements")
    return np.broadcast_to(np.zeros((), dtype), (n,))
