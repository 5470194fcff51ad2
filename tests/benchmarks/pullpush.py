"""Reading and updating: small gets, 16 MiB pull + push + apply, the same over RPC.

Against other systems a step is a pull and a push that is applied. Over RPC (all ways
but messages closed) ours is set beside a bare Dask handler, in a task on another
worker: the bare push moves the same bytes, checks them and runs the same kernel; the
bare pull copies once before the reply and once into `out`. "Same bytes" are handlers
that only move them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.protocol.serialize import to_serialize

import daskps
from daskps import optim
from tests.benchmarks import bare, busy, clusters, command
from tests.benchmarks.jobs import StepJob
from tests.benchmarks.options import beside_peers, number, switch
from tests.benchmarks.pairs import Comparison, seconds
from tests.benchmarks.report import Report

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

SMALL_NBYTES = 256
#: What is measured over RPC.
VERBS = ("pull + push", "pull", "push")


def _measure(store: Any, peer: str, n: int, pairs: int) -> dict[str, list[float]]:
    grad, out = np.ones(n, "f4"), np.empty(n, "f4")

    def bare_pull(work: bool) -> None:
        np.copyto(out, bare.call(peer, "pull", work=work)["data"])

    def bare_push(work: bool) -> None:
        bare.call(peer, "push", data=to_serialize(grad), work=work)

    actions = {
        "push": lambda: store.push({"w": grad}),
        "push work": lambda: bare_push(True),
        "push bytes": lambda: bare_push(False),
        "pull": lambda: store.pull(out={"w": out}),
        "pull work": lambda: bare_pull(True),
        "pull bytes": lambda: bare_pull(False),
    }
    found: dict[str, list[float]] = {name: [] for name in actions}
    for action in actions.values():
        action()
    for _ in range(pairs):
        for name, action in actions.items():
            found[name].append(seconds(action))
    return found


def over_rpc(mib: int, pairs: int) -> Iterator[Comparison]:
    """Set pull + push, and each, by messages alone, against a bare Dask RPC handler."""
    n = mib * 2**20 // 4
    with clusters.local(2, close=clusters.WAYS) as client:
        client.run(partial(bare.install, n))
        a, b = client.nthreads()
        spec = {"w": daskps.ArraySpec((n,), "float32")}
        with daskps.create(spec, optimizer=optim.SGD(0.1), servers=[a]) as store:
            work = client.submit(_measure, store, a, n, pairs, workers=[b])
            found = {name: np.array(took) for name, took in work.result().items()}
    for of in ("", " work", " bytes"):
        found[f"pull + push{of}"] = found[f"pull{of}"] + found[f"push{of}"]
    for verb in VERBS:
        for what in ("work", "bytes"):
            yield Comparison(
                _title(verb, mib),
                f"bare RPC, same {what}",
                tuple(found[verb].tolist()),
                tuple(found[f"{verb} {what}"].tolist()),
                ways=("message",),
            )


def _title(verb: str, mib: int) -> str:
    return f"{verb} over RPC, {mib} MiB"


OPTIONS = (
    *beside_peers(pairs=7),
    number("--mib", 16, "of the model"),
    switch("--busy", "only pulls from a busy worker, beside idle"),
)


def run(options: Namespace) -> None:
    """Measure and print."""
    nbytes = options.mib * 2**20
    jobs = [
        StepJob("get", SMALL_NBYTES, 1, 1),
        StepJob("get", SMALL_NBYTES, 2, 1),
        StepJob("pullpush", nbytes, 1, 1),
        StepJob("pullpush", nbytes, 2, 2),
    ]
    report = Report("pullpush", options)
    if options.busy:
        with command.cluster(options, 2) as client:
            for found in busy.compare(client, jobs[::2], options):
                report.add(found)
    else:
        command.compare(options, jobs, report)
        titles = [_title(verb, options.mib) for verb in VERBS]
        wanted = [title for title in titles if options.job in title]
        if options.scheduler is None and wanted:
            for found in over_rpc(options.mib, options.pairs):
                if found.job in wanted:
                    report.add(found)
    report.end()
