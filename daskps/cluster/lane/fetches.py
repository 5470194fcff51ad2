"""Fetching by a lane: a text that says what is wanted, answered by a text and arrays.

For what one host asks of another beside calls to shards: sums of contributions, values
at the edges of a snapshot. The text of an answer says which arrays follow; how long these
are the one who asks knows, and compares before memory is taken for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.cluster.lane.frames import (
    ANSWER,
    FETCH,
    MOST_TEXT,
    Head,
    pack_head,
    pack_text,
    text_of,
    unpack_text,
)
from daskps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.typing import Array


def pack_fetch(what: str, about: Mapping[str, Any], number: int) -> list[Any]:
    """Return the frame that asks for something, as buffers.

    Parameters
    ----------
    what : str
        Name of what is fetched.
    about : mapping of str to object
        Which of it, as plain values.
    number : int
        Number of the frame.

    Raises
    ------
    ProtocolError
        Where that takes more text than a lane has.
    """
    return pack_text(FETCH, [what, about], number)


def unpack_fetch(text: bytes | bytearray) -> tuple[str, dict[str, Any]]:
    """Return what is wanted, and which of it.

    Raises
    ------
    ProtocolError
        For a text that asks for nothing.
    """
    said = unpack_text(text)
    if (
        isinstance(said, list)
        and len(said) == 2
        and isinstance(said[0], str)
        and isinstance(said[1], dict)
    ):
        return said[0], said[1]
    raise ProtocolError(f"a lane was asked for {said!r:.60}")


def pack_fetched(value: object, arrays: Sequence[Array], number: int) -> list[Any]:
    """Return the frame that answers, as buffers.

    Parameters
    ----------
    value : object
        What is said of the arrays, in plain values.
    arrays : sequence of ndarray
        The arrays; they stay the host's.
    number : int
        Number of the frame.

    Raises
    ------
    ProtocolError
        Where it takes more text than a lane has.
    """
    text = text_of(value)
    nbytes = len(text) + sum([array.nbytes for array in arrays])
    head = Head(ANSWER, nbytes, number, sequence=len(text))
    return [pack_head(head) + text, *[array for array in arrays if array.nbytes]]


def text_nbytes(head: Head) -> int:
    """Return how long the text of an answer is.

    Raises
    ------
    ProtocolError
        For a head that has none.
    """
    if not 0 < head.sequence <= min(head.nbytes, MOST_TEXT):
        raise ProtocolError(
            f"an answer with {head.sequence:,} bytes of text in {head.nbytes:,}"
        )
    return head.sequence


def check_fetched(head: Head, arrays: Sequence[Array]) -> None:
    """Refuse an answer that is not as long as its arrays are.

    Raises
    ------
    ProtocolError
        Before any of them is received.
    """
    wanted = head.sequence + sum([array.nbytes for array in arrays])
    if head.nbytes != wanted:
        raise ProtocolError(
            f"an answer of {head.nbytes:,} bytes, where {wanted:,} were asked for"
        )
