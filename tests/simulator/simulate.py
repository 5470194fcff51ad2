"""``python -m tests.simulator --seeds N`` or ``--replay SEED``.

A real scheduler, real workers on two machines and real clients live in one thread, in
virtual time, over a network that loses, delays and cuts, on processes that stop and
die; all of it follows from the seed. What must hold is looked at after every message.
The first finding ends the command, with status 1.

It starts a process of its own: clocks, ids and the order of sets have to be settled
before Dask is imported. That process begins the same whatever it is to do: it gets its
options where others have their input, and few variables of the environment.
"""

from __future__ import annotations

import compileall
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The file that the process starts with.
GROUND = Path(__file__).with_name("ground.py")
CHECKOUT = Path(__file__).parents[2]

#: Settings of the simulating process: no threads, no files, no sockets; and only ways
#: that a network can disturb.
SETTINGS: dict[str, object] = {
    "temporary-directory": None,
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    "distributed.admin.system-monitor.interval": "1h",
    "distributed.admin.tick.interval": "1h",
    "distributed.worker.profile.enabled": False,
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.scheduler.worker-ttl": "5s",
    "distributed.comm.timeouts.connect": "5s",
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "daskps.carriers.process": False,
    "daskps.correct-memory": False,
}


#: What it gets of the environment; other variables would be elsewhere in its memory.
SEEN = ("HOME", "LD_LIBRARY_PATH", "NUMBA_CACHE_DIR", "PATH", "PYTHONPATH", "TMPDIR")


def environment() -> dict[str, str]:
    """Return the environment of the process: sets of names have one order."""
    settings = {
        "DASK_" + key.replace(".", "__").replace("-", "_").upper(): repr(value)
        for key, value in SETTINGS.items()
    }
    seen = {name: os.environ[name] for name in SEEN if name in os.environ}
    return {**seen, **settings, "PYTHONHASHSEED": "0"}


def start(stdout: int | None = None) -> subprocess.Popen[str]:
    """Start a process that simulates for each line of options that it gets.

    Parameters
    ----------
    stdout : int, optional
        What becomes of what it prints, as for :class:`subprocess.Popen`.

    Returns
    -------
    subprocess.Popen
        The process. It ends with its input, or with an error of the options; its status
        is 1 where something was found.
    """
    # Or its memory looks otherwise after the first run, which compiles.
    for code in (CHECKOUT / "daskps", GROUND.parent):
        compileall.compile_dir(code, quiet=2)
    command = [sys.executable, str(GROUND)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment(), stdout=stdout, text=True
    )


def line(argv: Sequence[str]) -> str:
    """Return options as the process reads them."""
    return json.dumps(list(argv)) + "\n"


def run(argv: Sequence[str], stdout: int | None = None) -> tuple[int, str]:
    """Simulate, in a process that has ended when this returns.

    Parameters
    ----------
    argv : sequence of str
        The options of the command.
    stdout : int, optional
        As for :func:`start`.

    Returns
    -------
    tuple of int and str
        The exit status, and what was printed where that is a pipe.
    """
    with start(stdout) as process:
        said, _ = process.communicate(line(argv))
    return process.returncode, said


def main(argv: Sequence[str]) -> int:
    """Simulate, and return the exit status."""
    try:
        return run(argv)[0]
    except KeyboardInterrupt:  # the process has heard it too, and ends by itself
        return 130
