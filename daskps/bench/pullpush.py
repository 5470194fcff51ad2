"""64 MB over RPC, beside a bare handler that does the same work.

One shard on one worker, called from a task on the other. The bare push moves the
same bytes, checks them and runs the same kernel; the bare pull copies once before
the reply and once into `out`. A second line sets ours against handlers that only
move the bytes. Ratios are the peer's time over ours: 1 is as fast, more is faster.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.protocol.serialize import to_serialize

import daskps
from daskps import optim
from daskps.bench import bare

if TYPE_CHECKING:
    from collections.abc import Sequence


def _measure(store: Any, peer: str, n: int, pairs: int) -> dict[str, list[float]]:
    grad, out = np.ones(n, "f4"), np.empty(n, "f4")

    def bare_pull(work: bool) -> None:
        reply = bare.call(peer, "pull", work=work)
        np.copyto(out, reply["data"])

    actions = {
        "push": lambda: store.push({"w": grad}),
        "push work": lambda: bare.call(
            peer, "push", data=to_serialize(grad), work=True
        ),
        "push bytes": lambda: bare.call(
            peer, "push", data=to_serialize(grad), work=False
        ),
        "pull": lambda: store.pull(out={"w": out}),
        "pull work": lambda: bare_pull(True),
        "pull bytes": lambda: bare_pull(False),
    }
    found: dict[str, list[float]] = {name: [] for name in actions}
    for action in actions.values():
        action()
    for _ in range(pairs):
        for name, action in actions.items():
            found[name].append(bare.milliseconds(action))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Parameters
    ----------
    argv : sequence of str, optional
        Command line without the program's name.

    Returns
    -------
    int
        Exit status: 0, whatever was measured.
    """
    parser = argparse.ArgumentParser(prog="python -m daskps.bench pullpush")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args(argv)
    n = options.mib * 2**20 // 4
    with bare.cluster() as client:
        client.run(partial(bare.install, n))
        a, b = client.scheduler_info()["workers"]
        spec = {"w": daskps.ArraySpec((n,), "float32")}
        store = daskps.create(spec, optimizer=optim.SGD(0.1), servers=[a])
        work = client.submit(_measure, store, a, n, options.pairs, workers=[b])
        found = work.result()
        print(f"{options.mib} MiB{'peer':>37}{'ours':>9}")
        for verb in ("push", "pull"):
            for peer in ("work", "bytes"):
                name = f"{verb}, peer: same {peer}"
                print(bare.summary(name, found[f"{verb} {peer}"], found[verb]))
    return 0
