"""Where simulations are born: imports once, then a child of its own for each seed.

Started by :mod:`daskps.testing.simulate` through :mod:`daskps.testing.ground`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daskps.testing import network, world
from daskps.testing.ground import processor_time, put, sow
from daskps.testing.known_bad import VARIANTS
from daskps.testing.loop import VirtualLoop
from daskps.testing.scenario import Report, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Processor time a simulation may take: a loop without end takes no virtual time.
MOST_PROCESSOR_SECONDS = 60


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog="python -m daskps.testing.simulate",
        description="Simulate a cluster with daskps and faults, one seed after another.",
    )
    found.add_argument("--seeds", type=int, default=20, help="how many (20)")
    found.add_argument("--first", type=int, default=0, help="the first of them (0)")
    found.add_argument("--replay", type=int, help="this seed only, with what happened")
    found.add_argument("--repeat", type=int, default=1, help="each so often (1)")
    found.add_argument(
        "--known-bad",
        choices=sorted(VARIANTS),
        help="break the code in a known way, which must be found",
    )
    found.add_argument("--trace", default="", help="file for all that was sent")
    found.add_argument("--json", action="store_true", help="a line of JSON per seed")
    found.add_argument("--log", action="store_true", help="show what is logged")
    return found


def main(argv: Sequence[str]) -> int:
    """Simulate; the exit status is 1 where something was found."""
    options = parser().parse_args(argv)
    if min(options.seeds, options.repeat) < 1:
        parser().error("--seeds and --repeat must be at least 1")
    # Until here there was nothing to tidy, and Ctrl-C ended it without a word.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _simulate(options)
    except KeyboardInterrupt:
        return 130


def _simulate(options: argparse.Namespace) -> int:
    """Simulate what was asked for, up to the first finding; return the status."""
    if not options.log:
        logging.disable(logging.CRITICAL)
    put(threading.Thread, start=_refuse)
    world.prepare()
    if options.known_bad:
        VARIANTS[options.known_bad]()
    first, n = options.first, options.seeds
    if options.replay is not None:
        first, n = options.replay, 1
    for seed in range(first, first + n):
        for _ in range(options.repeat):
            report, seconds = _child(seed, options.trace)
            _tell(report, seconds, options)
            if report["finding"]:
                return 1
    return 0


def _refuse(thread: threading.Thread) -> None:
    raise RuntimeError(f"{thread} starts in a simulation")


def _tell(report: dict[str, Any], seconds: float, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps({**report, "processor_seconds": seconds}), flush=True)
        return
    if options.replay is not None or report["finding"]:
        for line in report["happened"]:
            print(f"  {line}")
    outcomes = ", ".join(f"{n} {name}" for name, n in report["outcomes"].items())
    print(
        f"seed {report['seed']}: {report['n_sent']} messages, {report['n_lost']} lost, "
        f"{report['seconds']:.2f} s virtual, {seconds:.2f} s of processor, "
        f"trace {report['trace']}; calls: {outcomes}",
        flush=True,
    )
    if report["finding"]:
        print(f"seed {report['seed']} FOUND: {report['finding']}")
        broken = f" --known-bad {options.known_bad}" if options.known_bad else ""
        command = f"python -m daskps.testing.simulate --replay {report['seed']}"
        print(f"again: {command}{broken}")


def _child(seed: int, trace: str) -> tuple[dict[str, Any], float]:
    """Simulate one seed in a forked child; return its report and processor time."""
    folder = tempfile.mkdtemp(prefix="daskps-simulate-")
    source, target = os.pipe()
    try:
        pid = os.fork()
        if not pid:
            os.close(source)
            _be_child(seed, folder, target, trace)
        os.close(target)
        with open(source, "rb") as pipe:
            found = pipe.read()
        status, usage = os.wait4(pid, 0)[1:]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if found:
        report: dict[str, Any] = json.loads(found)
    else:
        end = f"its process ended with status {status} and without a report"
        report = Report(seed, end, "", 0.0, 0, 0).to_dict()
    return report, round(usage.ru_utime + usage.ru_stime, 3)


def _be_child(seed: int, folder: str, pipe: int, trace: str) -> None:
    """Simulate, report and end; nothing that a parent would do afterwards."""
    status = 1
    # Its parent has something to tidy.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        limit = MOST_PROCESSOR_SECONDS + int(processor_time())
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        # Servers look for files of others there, and wait for their locks.
        tempfile.tempdir = folder
        sow(seed)
        loop = VirtualLoop()
        asyncio.set_event_loop(loop)
        report = loop.run_until_complete(simulate(seed))
        if trace:
            Path(trace).write_bytes(b"".join(network.network().lines))
        with open(pipe, "wb") as file:
            file.write(json.dumps(report.to_dict()).encode())
        status = 0
    except BaseException:  # noqa: BLE001 - told before the process ends
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
