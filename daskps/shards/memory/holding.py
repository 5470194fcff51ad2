"""Checks of a memory: that it holds a shard, and that this is the expected one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from daskps.errors import ProtocolError
from daskps.shards.memory.format import (
    FORMAT,
    FORMAT_AT,
    HEADER_WORDS,
    MAGIC,
    MAGIC_AT,
    N_PIECES_AT,
    N_SIDES_AT,
    N_TABLES_AT,
)

if TYPE_CHECKING:
    from daskps.typing import Array


class Identity(NamedTuple):
    """The numbers in a header that tell its shard from another one."""

    n_pieces: int
    n_sides: int
    n_tables: int
    #: Bytes of the memory that such a shard takes.
    nbytes: int

    def check_header(self, buffer: Array) -> None:
        """Refuse memory that has no room for a header.

        Raises
        ------
        ProtocolError
            If it is too short.
        """
        self._check_length(buffer, 8 * HEADER_WORDS)

    def is_in(self, words: Array, buffer: Array) -> bool:
        """Return whether memory holds a shard, which must be this one; else it is empty.

        Raises
        ------
        ProtocolError
            If it holds something else, or is too short.
        """
        magic, n = int(words[MAGIC_AT]), self.n_pieces
        if magic not in (0, MAGIC):
            raise ProtocolError(
                f"this memory holds no shard of daskps: it begins with {magic:#x} "
                f"instead of {MAGIC:#x}; remove it, or give another place"
            )
        found = tuple(map(int, words[[FORMAT_AT, N_PIECES_AT, N_SIDES_AT]]))
        if magic and found[0] != FORMAT:
            raise ProtocolError(
                f"this memory holds a shard in format {found[0]}, this version of "
                f"daskps reads format {FORMAT}; run the same version of daskps in "
                f"all processes"
            )
        if magic and found[1:] != (n, self.n_sides):
            raise ProtocolError(
                f"this memory holds a shard of {found[1]} pieces and {found[2]} slot "
                f"buffers, expected were {n} and {self.n_sides}; it is another shard, "
                f"or one end made it durable and the other did not"
            )
        if magic and words[N_TABLES_AT] != self.n_tables:
            raise ProtocolError(
                f"this memory holds a shard of {words[N_TABLES_AT]} tables, "
                f"expected were {self.n_tables}; it is another shard"
            )
        self._check_length(buffer, self.nbytes)
        return bool(magic)

    def write(self, words: Array) -> None:
        """Say in a header that all behind it is this shard's; the magic number last."""
        words[[FORMAT_AT, N_PIECES_AT, N_SIDES_AT, N_TABLES_AT]] = (
            *(FORMAT, self.n_pieces),
            *(self.n_sides, self.n_tables),
        )
        words[MAGIC_AT] = MAGIC

    def _check_length(self, buffer: Array, needed: int) -> None:
        if len(buffer) < needed:
            raise ProtocolError(
                f"this memory has {len(buffer)} bytes, a shard of this layout "
                f"takes {self.nbytes}; it was cut short, or is another shard"
            )
