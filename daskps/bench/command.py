"""The command line: which benchmark, and the options that several of them share."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from daskps.bench import against, clusters, cores
from daskps.bench.pairs import Effort
from daskps.bench.report import Report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distributed import Client

    from daskps.bench.jobs import StepJob

#: Benchmarks, each a module with `main`.
NAMES = {
    "batches": "shuffled batches of data in blocks, beside those of one array",
    "ends": "what the ends of workers cost: kills under pushes, closing a cluster",
    "graph": "rounds in the task graph, beside plain Dask",
    "kernels": "compiled loops, beside torch and copying memory",
    "lock": "the lock of a shard between processes",
    "memory": "workers with a model as large as their memory",
    "mixed": "a small push right after a large one, beside one after a small one",
    "overlap": "steps whose transfer and computation overlap",
    "pullpush": "small gets, pull + push + apply, and the same over RPC",
    "rounds": "BSP rounds, and a long run",
    "scaling": "rounds of 1 to 64 trainers in one process, beside the cost model",
    "snapshot": "snapshots while others push",
    "startup": "imports, first pushes, and a worker that comes",
    "train": "logistic regression",
    "tree": "steps of this checkout, beside those of another one",
    "wire": "gradients as bfloat16 in large messages",
}


def main(argv: Sequence[str]) -> int:
    """Run one benchmark by name.

    Parameters
    ----------
    argv : sequence of str
        Command line without the program's name.

    Returns
    -------
    int
        Exit status of the benchmark.
    """
    parser = argparse.ArgumentParser(
        prog="python -m daskps.bench",
        usage="%(prog)s NAME [OPTIONS]",
        description="Measure daskps and its peers side by side.",
        epilog="NAME --help tells the options of each.",
    )
    names = parser.add_argument_group("NAME").add_argument
    names("name", choices=NAMES, metavar="NAME", help="; ".join(_listed()))
    chosen = parser.parse_args(argv[:1])
    module = importlib.import_module(f"daskps.bench.{chosen.name}")
    status: int = module.main(argv[1:])
    return status


def _listed() -> Iterator[str]:
    return (f"{name}: {what}" for name, what in NAMES.items())


def plain(name: str) -> argparse.ArgumentParser:
    """Return a parser without options.

    Parameters
    ----------
    name : str
        One of `NAMES`.

    Returns
    -------
    argparse.ArgumentParser
        For the benchmark's own.
    """
    return argparse.ArgumentParser(
        prog=f"python -m daskps.bench {name}", description=f"Measure {NAMES[name]}."
    )


def parser(name: str, *, pairs: int, peers: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the options of benchmarks that end in a `Report`.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    pairs : int
        Default of ``--pairs``.
    peers : bool
        Whether it sets jobs against the peers.

    Returns
    -------
    argparse.ArgumentParser
        For more options.
    """
    found = plain(name)
    add = found.add_argument
    add(
        "--pairs",
        type=count,
        default=pairs,
        help="undisturbed ones wanted [%(default)s]",
    )
    add("--json", metavar="FILE", type=_file, help="write all samples, too")
    add("--svg", metavar="FILE", type=_svg, help="plot the ratios, too")
    add("--scheduler", metavar="ADDRESS", help="of your own cluster")
    add(
        "--close",
        action="append",
        default=[],
        choices=clusters.WAYS,
        help="close a way to the shards; may be given several times",
    )
    if peers:
        add(
            "--peers",
            type=_peers,
            metavar="NAME,...",
            help=f"of {', '.join(against.PEERS)} [all that are installed]",
        )
        add("--seconds", type=duration, default=0.3, help="of a sample [%(default)s]")
        add("--job", default="", help="only jobs whose title contains this")
    return found


def count(text: str) -> int:
    """Return a number of things, or refuse it as an option's value.

    Parameters
    ----------
    text : str
        What the user gave.

    Returns
    -------
    int
        At least 1.

    Raises
    ------
    argparse.ArgumentTypeError
        If it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number that is at least 1"
        )
    return int(text)


def counts(text: str) -> list[int]:
    """Return several numbers of things, or refuse them as an option's value.

    Parameters
    ----------
    text : str
        What the user gave, with commas in between.

    Returns
    -------
    list of int
        Each at least 1.

    Raises
    ------
    argparse.ArgumentTypeError
        If one of them is none.
    """
    return [count(one) for one in text.split(",")]


def duration(text: str) -> float:
    """Return seconds, or refuse them as an option's value.

    Parameters
    ----------
    text : str
        What the user gave.

    Returns
    -------
    float
        Above 0.

    Raises
    ------
    argparse.ArgumentTypeError
        If these are none.
    """
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return found


def _file(path: str) -> str:
    # Not after minutes of measuring.
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {folder}")
    return path


def _peers(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(against.PEERS):
        raise argparse.ArgumentTypeError(
            f"no peer {', '.join(sorted(unknown))}; there are {', '.join(against.PEERS)}"
        )
    return names


def _svg(path: str) -> str:
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "needs matplotlib, which the extra daskps[bench] installs"
        )
    return _file(path)


@contextmanager
def reported(name: str, options: argparse.Namespace) -> Iterator[Report]:
    """Print comparisons as they come; write the files at the end.

    Parameters
    ----------
    name : str
        The benchmark.
    options : argparse.Namespace
        What `parser` gave.

    Yields
    ------
    Report
        To add comparisons to.
    """
    # The cores of a user's cluster are not those of this machine.
    with nullcontext() if options.scheduler else cores.watched() as looks:
        report = Report(name, dict(vars(options)), looks)
        report.begin()
        yield report
        report.end(options.json, options.svg)


@contextmanager
def cluster(
    options: argparse.Namespace, workers: int, threads: int = 1
) -> Iterator[Client]:
    """Start workers, or connect to the user's cluster.

    Parameters
    ----------
    options : argparse.Namespace
        What `parser` gave.
    workers, threads : int
        Of a cluster started here.

    Yields
    ------
    Client
        Closed afterwards.

    Raises
    ------
    SystemExit
        If ways of a cluster are to be closed that was started elsewhere.
    """
    if options.scheduler is None:
        with clusters.local(workers, close=options.close, threads=threads) as client:
            yield client
        return
    if options.close:
        raise SystemExit(
            "--close takes effect in workers that are started here; start those of "
            "your cluster with DASK_DASKPS__WAYS__NAME=false instead"
        )
    with clusters.theirs(options.scheduler) as client:
        yield client


def compare(
    options: argparse.Namespace, jobs: Sequence[StepJob], report: Report
) -> None:
    """Set jobs against all peers that are here.

    Parameters
    ----------
    options : argparse.Namespace
        What `parser` gave.
    jobs : sequence of StepJob
        Which; `options.job` may leave out some.
    report : Report
        What is found goes there.
    """
    these = [job for job in jobs if options.job in job.title]
    if not these:
        return
    field = against.chosen(options.peers, on_dask=options.scheduler is not None)
    workers = max(job.trainers + job.servers for job in these)
    with cluster(options, workers) as client:
        effort = Effort(options.pairs, options.seconds, report.looks)
        for found in field.compare(client, these, effort):
            report.add(found)
    report.missing.update(field.missing)
