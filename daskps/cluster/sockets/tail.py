"""The end of an answer that a host sends straight from memory that updates overwrite.

A host cannot take back bytes that it has sent. But an answer counts only when all of it
has come: so the host holds back the end until it knows that the rest was whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array

#: Bytes of an answer that the host holds back.
TAIL_NBYTES: Final = 4096


class Tail:
    """The last bytes of an answer, in place of a buffer; the host sends them last.

    Parameters
    ----------
    data : ndarray, shape (n,), uint8
        The bytes, if the answer is whole.
    is_whole : callable
        Returns whether no update has overwritten these bytes, nor those sent before.
    """

    def __init__(self, data: Array, is_whole: Callable[[], bool]) -> None:
        self._data, self._is_whole = data, is_whole

    def __len__(self) -> int:
        return len(self._data)

    def made(self) -> memoryview:
        """Return the bytes, once the host has sent all bytes before them.

        Raises
        ------
        OSError
            If the answer must not be completed: updates have overwritten it.
        """
        found = self._data.tobytes()
        if not self._is_whole():
            raise ConnectionAbortedError("updates have run into an answer of a socket")
        return memoryview(found)
