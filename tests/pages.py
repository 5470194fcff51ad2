"""Run code of a page in a process that was forked from one with all imports.

Thirty processes that import Dask, Numba and the package took 40 s of processor time.
Workers of the clusters that pages start are forked from the same one.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import Any

import dask

#: Files beside the code's own: what it prints, and what it says of errors.
STREAMS = ("stdout", "stderr")


def run(code: str, folder: Path) -> None:
    """Run code as `python -Werror -c` would, to the end of its process."""
    for to, name in enumerate(STREAMS, 1):
        file = os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, to)
        os.close(file)
    os.chdir(folder)
    warnings.resetwarnings()
    warnings.simplefilter("error")
    # Dask says so where another program has its dashboard's port.
    warnings.filterwarnings("ignore", "Port")
    warnings.filterwarnings("ignore", "unclosed", ResourceWarning)
    # Of pandas, about what Dask does as it reads Parquet.
    warnings.filterwarnings("ignore", "The inplace keyword")
    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    # It is not this one's child, and so would be started again.
    start: Any = forkserver.ensure_running
    start.__self__.ensure_running = lambda: None
    # Functions of the code travel by value, as those of a notebook do.
    sys.modules["__main__"] = main = ModuleType("__main__")
    try:
        exec(code, main.__dict__)
    finally:
        # A forked process ends without them.
        atexit._run_exitfuncs()
