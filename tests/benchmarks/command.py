"""The command line: which benchmark, and what those that end in a report share.

A benchmark is a module with `OPTIONS` and with `run`, which gets their values and
returns the exit status; None is 0.
"""

from __future__ import annotations

import argparse
import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distributed import Client

from tests.benchmarks import against, clusters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.benchmarks.jobs import StepJob
    from tests.benchmarks.report import Report

#: The benchmarks.
NAMES = {
    "batches": "shuffled batches of data in blocks, beside those of one array",
    "bf16": "gradients as bfloat16 in large messages",
    "checkpoint": "saves and restores, beside np.save and zarr",
    "codecs": "codecs beside np.copyto and np.partition, and where they pay",
    "ends": "what the ends of workers cost: kills under pushes, closing a cluster",
    "graph": "rounds in the task graph, beside plain Dask",
    "index": "rows by id: to find them, to make them, to grow",
    "intent": "waits for the rows of batches, read ahead and not",
    "kernels": "compiled loops, beside torch and copying memory",
    "memory": "workers with a model as large as their memory",
    "mixed": "a small push right after a large one, beside one after a small one",
    "overlap": "steps whose transfer and computation overlap",
    "pullpush": "small gets, pull + push + apply, and the same over RPC",
    "rounds": "BSP rounds, and a long run",
    "rows": "rows of a table under an undo log, beside loops without",
    "scaling": "rounds of 1 to 64 trainers in one process, beside the cost model",
    "snapshot": "snapshots while others push",
    "startup": "imports, first pushes, and a worker that comes",
    "tables": "rows of tables, beside other systems and the limit",
    "train": "logistic regression",
    "tree": "steps of this checkout, beside those of another one",
    "wire": "calls between machines, beside messages, bare sockets and others",
}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that a command line names; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        usage="%(prog)s NAME [OPTIONS]",
        description="Measure daskps and its peers side by side.",
        epilog="NAME --help tells the options of each.",
    )
    listed = "; ".join(f"{name}: {what}" for name, what in NAMES.items())
    names = parser.add_argument_group("NAME").add_argument
    names("name", choices=NAMES, metavar="NAME", help=listed)
    name = parser.parse_args(argv[:1]).name
    parser = parser_of(name)
    try:
        status: int | None = _module(name).run(parser.parse_args(argv[1:]))
    except argparse.ArgumentError as error:
        parser.error(str(error))
    return status or 0


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of one of `NAMES`."""
    found = argparse.ArgumentParser(
        prog=f"python -m tests.benchmarks {name}", description=f"Measure {NAMES[name]}."
    )
    for flag, about in _module(name).OPTIONS:
        found.add_argument(flag, **about)
    return found


def _module(name: str) -> Any:
    return importlib.import_module(f"tests.benchmarks.{name}")


@contextmanager
def cluster(
    options: argparse.Namespace, workers: int, threads: int = 1
) -> Iterator[Client]:
    """Start workers, or connect to the cluster of the user, whose ways stay open."""
    if options.scheduler is None:
        with clusters.local(
            workers, close=options.close, threads_per_worker=threads
        ) as client:
            yield client
        return
    if options.close:
        raise SystemExit(
            "--close takes effect in workers that are started here; start those of "
            "your cluster with DASK_DASKPS__WAYS__NAME=false instead"
        )
    with Client(options.scheduler) as client:
        yield client


def compare(
    options: argparse.Namespace, jobs: Sequence[StepJob], report: Report
) -> None:
    """Set the jobs that `options.job` names against all peers that are here."""
    these = [job for job in jobs if options.job in job.title]
    if not these:
        return
    field = against.chosen(options.peers, on_dask=options.scheduler is not None)
    workers = max(job.trainers + job.servers for job in these)
    with cluster(options, workers) as client:
        for found in field.compare(client, these, options):
            report.add(found)
    report.missing.update(field.missing)
