"""What a connection waits for before it goes on."""

from __future__ import annotations

from typing import Final

#: What a connection waits for: bytes of a frame, room for those of an answer, what others
#: do to its call, a thread that may take its time; or nothing, it has answered; or the
#: rest of its batch.
BYTES: Final = 1
ROOM: Final = 2
OTHERS: Final = 3
THREAD: Final = 4
ANSWERED: Final = 5
BATCH: Final = 6
