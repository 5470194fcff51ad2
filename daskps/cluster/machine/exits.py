"""The end of a worker's process, which should not take longer for what we loaded.

The interpreter ends by looking for cycles among all objects, several times over. With
the compiler of the update loops loaded that takes twice as long as without, in all
processes of the machine at once when a cluster is closed; Dask's nannies give them 4 s
and then kill them, which it says in red.
"""

from __future__ import annotations

import atexit
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Worker


def quicken(worker: Worker) -> None:
    """End this process quickly, if it is a worker's own.

    Parameters
    ----------
    worker : Worker
        It has a nanny where a process was made for it alone.
    """
    if worker.nanny:
        atexit.unregister(settle)
        atexit.register(settle)


def settle() -> None:
    """Look for cycles once more, and from here on leave alone what is in use.

    Python finalizes objects that nobody holds as ever, and those held without cycles.
    """
    gc.collect()
    gc.freeze()
