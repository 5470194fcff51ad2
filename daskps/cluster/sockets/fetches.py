"""Fetches over a socket: a text names the wanted arrays; a text and the arrays answer.

One host fetches from another, beside calls to shards, sums of contributions. The text
of an answer names the arrays that follow; the fetching host knows their lengths, and
compares before it takes memory for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.cluster.sockets.frames import (
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
    """Return the frame of a fetch, as buffers.

    Parameters
    ----------
    what : str
        Name of the kind of fetch.
    about : mapping of str to object
        Arguments of the fetch, as plain values.
    number : int
        Number of the frame.

    Raises
    ------
    ProtocolError
        If that takes more text than a socket allows.
    """
    return pack_text(FETCH, [what, about], number)


def unpack_fetch(text: bytes | bytearray) -> tuple[str, dict[str, Any]]:
    """Return the name of a fetch, and its arguments.

    Raises
    ------
    ProtocolError
        If the text is no fetch.
    """
    said = unpack_text(text)
    if (
        isinstance(said, list)
        and len(said) == 2
        and isinstance(said[0], str)
        and isinstance(said[1], dict)
    ):
        return said[0], said[1]
    raise ProtocolError(f"a socket was asked for {said!r:.60}")


def pack_fetched(value: object, arrays: Sequence[Array], number: int) -> list[Any]:
    """Return the frame that answers, as buffers.

    Parameters
    ----------
    value : object
        Description of the arrays, in plain values.
    arrays : sequence of ndarray
        The arrays; the host keeps owning them.
    number : int
        Number of the frame.

    Raises
    ------
    ProtocolError
        If it takes more text than a socket allows.
    """
    text = text_of(value)
    nbytes = len(text) + sum([array.nbytes for array in arrays])
    head = Head(ANSWER, nbytes, number, sequence=len(text))
    return [pack_head(head) + text, *[array for array in arrays if array.nbytes]]


def text_nbytes(head: Head) -> int:
    """Return the length of the text of an answer.

    Raises
    ------
    ProtocolError
        If the head has no valid length.
    """
    if not 0 < head.sequence <= min(head.nbytes, MOST_TEXT):
        raise ProtocolError(
            f"an answer with {head.sequence:,} bytes of text in {head.nbytes:,}"
        )
    return head.sequence


def check_fetched(head: Head, arrays: Sequence[Array]) -> None:
    """Refuse an answer whose length is not that of its arrays.

    Raises
    ------
    ProtocolError
        Before any of the arrays is received.
    """
    wanted = head.sequence + sum([array.nbytes for array in arrays])
    if head.nbytes != wanted:
        raise ProtocolError(
            f"an answer of {head.nbytes:,} bytes, where {wanted:,} were asked for"
        )
