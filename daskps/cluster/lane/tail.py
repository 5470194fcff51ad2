"""The end of an answer that is sent straight from memory which others may overwrite.

Nobody can take back what was sent. But an answer counts once all of it has come: so its
end is held back until it is known that what went before it was whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array

#: Bytes of an answer that are held back.
TAIL_NBYTES: Final = 4096


class Tail:
    """The last bytes of an answer, in place of a buffer; all others are sent before.

    Parameters
    ----------
    data : ndarray, shape (n,), uint8
        What they are, if the answer is whole.
    is_whole : callable
        Returns whether nobody has overwritten this, nor what was sent before.
    """

    def __init__(self, data: Array, is_whole: Callable[[], bool]) -> None:
        self._data, self._is_whole = data, is_whole

    def __len__(self) -> int:
        return len(self._data)

    def made(self) -> memoryview:
        """Return the bytes, once all before them are sent.

        Raises
        ------
        OSError
            Where the answer must not come to its end.
        """
        found = self._data.tobytes()
        if not self._is_whole():
            raise ConnectionAbortedError("updates have run into an answer of a lane")
        return memoryview(found)
