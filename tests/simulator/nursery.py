"""Where simulations are born: imports once, then a child of its own for each seed.

Started by :mod:`tests.simulator.simulate` through :mod:`tests.simulator.ground`. Whatever
is in a set by its address has the same one where memory looks the same in the
beginning. So all seeds are children of one process, the zygote, which was forked before
anybody read what is to be done, and does nothing but fork.
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
import struct
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tests.simulator import network, ordering, world
from tests.simulator.ground import processor_time, put, sow, timeless
from tests.simulator.known_bad import VARIANTS
from tests.simulator.loop import VirtualLoop
from tests.simulator.scenario import SeedReport, simulate

#: Processor time a simulation may take: a loop without end takes no virtual time.
MOST_PROCESSOR_SECONDS = 60
#: An order, as a child reads it: as long for all of them.
_ORDER = struct.Struct("<qi?i")
#: How a child ended.
_END = struct.Struct("<i")
#: With what one ends that had nothing to do, because the command is over.
_IDLE = 3
#: How often the zygote forks for nothing: its first time may leave something behind.
_N_WARM = 3
#: The folder of its servers by a name that is always the same.
_HERE = "/proc/self/cwd"
#: What a child leaves in the folder of the command, and where its servers have files.
_REPORT, _TRACE, _SERVERS = "report", "trace", "servers"


class _Order(NamedTuple):
    """What a child is to do."""

    seed: int
    #: Number of a broken variant, or -1.
    bad: int
    #: Whether it shows what is logged.
    log: bool
    #: Where it has its memory.
    scatter: int


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog="python -m tests.simulator",
        description="Simulate a cluster with daskps and faults, one seed after another.",
    )
    found.add_argument("--seeds", type=int, default=20, help="how many (20)")
    found.add_argument("--first", type=int, default=0, help="the first of them (0)")
    found.add_argument("--replay", type=int, help="this seed only, with what happened")
    found.add_argument(
        "--repeat",
        type=int,
        default=1,
        help="each so often, with its objects elsewhere in memory each time (1)",
    )
    found.add_argument(
        "--known-bad",
        choices=sorted(VARIANTS),
        help="break the code in a known way, which must be found",
    )
    found.add_argument("--trace", default="", help="file for all that was sent")
    found.add_argument("--json", action="store_true", help="a line of JSON per seed")
    found.add_argument("--log", action="store_true", help="show what is logged")
    return found


def main() -> int:
    """Simulate; the exit status is 1 where something was found."""
    # Until here there was nothing to tidy, and Ctrl-C ended it without a word.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _nurse()
    except KeyboardInterrupt:
        return 130


def _nurse() -> int:
    """Do what each line asks for, with a nursery that ends with the last one."""
    put(threading.Thread, start=_refuse)
    world.prepare()
    with tempfile.TemporaryDirectory(prefix="daskps-simulate-") as folder:
        nursery = Nursery(Path(folder))
        try:
            # They come this way, and not in the command line, for the zygote's sake.
            orders = (parser().parse_args(json.loads(line)) for line in sys.stdin)
            return max([_simulate(nursery, options) for options in orders])
        finally:
            nursery.close()


def _simulate(nursery: Nursery, options: argparse.Namespace) -> int:
    """Simulate what was asked for, up to the first finding; return the status."""
    if min(options.seeds, options.repeat) < 1:
        parser().error("--seeds and --repeat must be at least 1")
    bad = sorted(VARIANTS).index(options.known_bad) if options.known_bad else -1
    first, n = options.first, options.seeds
    if options.replay is not None:
        first, n = options.replay, 1
    for seed in range(first, first + n):
        for time in range(options.repeat):
            report = nursery.report(_Order(seed, bad, options.log, time))
            _tell(report, options)
            if options.trace and report["trace"]:
                shutil.copyfile(nursery.folder / _TRACE, options.trace)
            if report["finding"]:
                return 1
    return 0


def _refuse(thread: threading.Thread) -> None:
    raise RuntimeError(f"{thread} starts in a simulation")


def _tell(report: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(report), flush=True)
        return
    if options.replay is not None or report["finding"]:
        for line in report["happened"]:
            print(f"  {line}")
    outcomes = ", ".join(f"{n} {name}" for name, n in report["outcomes"].items())
    print(
        f"seed {report['seed']}: {report['n_sent']} messages, {report['n_lost']} lost, "
        f"{report['seconds']:.2f} s virtual, "
        f"{report['processor_seconds']:.2f} s of processor, "
        f"trace {report['trace']}; calls: {outcomes}",
        flush=True,
    )
    if report["finding"]:
        print(f"seed {report['seed']} FOUND: {report['finding']}")
        broken = f" --known-bad {options.known_bad}" if options.known_bad else ""
        command = f"python -m tests.simulator --replay {report['seed']}"
        print(f"again: {command}{broken}")


class Nursery:
    """A zygote, and what goes to and from its children.

    Parameters
    ----------
    folder : Path
        Where a child has its files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        orders, self._orders = os.pipe()
        self._ends, ends = os.pipe()
        self._zygote = os.fork()
        if not self._zygote:
            os.close(self._orders)
            os.close(self._ends)
            _be_zygote(orders, ends, folder)
        os.close(orders)
        os.close(ends)

    def report(self, order: _Order) -> dict[str, Any]:
        """Have a child simulate a seed; return what it reports."""
        path = self.folder / _REPORT
        path.unlink(missing_ok=True)
        # Servers look for files of others there, and wait for their locks.
        shutil.rmtree(self.folder / _SERVERS, ignore_errors=True)
        (self.folder / _SERVERS).mkdir()
        os.write(self._orders, _ORDER.pack(*order))
        (status,) = _END.unpack(os.read(self._ends, _END.size))
        if path.exists():
            report: dict[str, Any] = json.loads(path.read_bytes())
            return report
        end = f"its process ended with status {status} and without a report"
        lost = SeedReport(order.seed, end, "", 0.0, 0, 0).to_dict()
        return {**lost, "processor_seconds": 0.0}

    def close(self) -> None:
        """End the zygote."""
        os.close(self._orders)
        os.close(self._ends)
        os.waitpid(self._zygote, 0)


def _be_zygote(orders: int, ends: int, folder: Path) -> NoReturn:
    """Fork, and wait for the end of each child, until one finds nothing to do."""
    # The command has something to tidy; this one, and its children, have not.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        for _ in range(_N_WARM):
            if not os.fork():
                os._exit(0)
            os.wait()
        while True:
            if not os.fork():
                _be_child(orders, folder)
            status = os.wait()[1]
            if os.waitstatus_to_exitcode(status) == _IDLE:
                break
            os.write(ends, _END.pack(status))
    finally:
        os._exit(0)


def _be_child(orders: int, folder: Path) -> NoReturn:
    """Simulate, report and end; nothing that a parent would do afterwards."""
    status = 1
    try:
        if order := os.read(orders, _ORDER.size):
            _live(folder, _Order(*_ORDER.unpack(order)))
            status = 0
        else:
            status = _IDLE
    except BaseException:  # noqa: BLE001 - told before the process ends
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _live(folder: Path, do: _Order) -> None:
    limit = MOST_PROCESSOR_SECONDS + int(processor_time())
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    os.chdir(folder / _SERVERS)
    tempfile.tempdir = _HERE
    if do.log:
        logging.setLogRecordFactory(timeless)
    else:
        logging.disable(logging.CRITICAL)
    if do.bad >= 0:
        VARIANTS[sorted(VARIANTS)[do.bad]]()
    ordering.scatter(do.scatter)
    sow(do.seed)
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    report = loop.run_until_complete(simulate(do.seed)).to_dict()
    (folder / _TRACE).write_bytes(b"".join(network.network().lines))
    report["processor_seconds"] = round(processor_time(), 3)
    (folder / _REPORT).write_text(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
