"""A check for descriptors, without which this process can open no connection."""

from __future__ import annotations

import errno
import os
import resource


def without_descriptors() -> str:
    """Return why no connection can be opened from here, in words; "" where one can.

    Dask tries again until its time is over where there is no descriptor, and says no
    more than that then.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            return ""
        of = "its machine" if error.errno == errno.ENFILE else f"process {os.getpid()}"
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"to which no connection can be opened from here: {of} has as many files "
            f"and sockets open as it may (ulimit -n is {soft:,}); close some, or allow "
            f"it more"
        )
    return ""
