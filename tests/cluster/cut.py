"""A client of a store with two copies, whose owner's wire is cut.

``python -m tests.cluster.cut SCHEDULER`` says with a line that it has pushed, waits for one,
goes on while the wire is cut, and says what it found; and once more where it is back.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from distributed import Client

import daskps
from daskps import optim
from tests.support import until

N = 6


def say(found: Any) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def loop(trainer: Any, part: Any) -> None:
    for _ in range(trainer.clock, 10):
        trainer.push({"w": np.ones(N)})


def main(scheduler: str) -> None:
    with Client(scheduler) as client:
        client.wait_for_workers(3)
        hosts = sorted(client.nthreads(), key=lambda w: w.split(":")[1])
        servers, near = hosts[-1:], hosts[:2]
        about: dict[str, Any] = {"servers": servers, "copies": 2, "client": client}
        rule = optim.SGD(1.0)
        with daskps.create({"w": np.zeros(N)}, optimizer=rule, **about) as store:
            for _ in range(3):
                store.push({"w": np.ones(N)})
            say(store.pull()["w"].tolist())
            sys.stdin.readline()
            began = time.monotonic()
            store.push({"w": np.ones(N)})
            waited = time.monotonic() - began
            daskps.run(store, loop, [0, 1], sync="bsp", workers=near)
            found = {"w": store.pull()["w"].tolist(), "waited": waited}
            say({**found, "moved": [*store.placement] != servers})
            sys.stdin.readline()
            # The former owner is back, and answers nobody.
            until(lambda: servers[0] in client.run(bool, workers=servers))
            for _ in range(2):
                store.push({"w": np.ones(N)})
            say({"w": store.pull()["w"].tolist()})


if __name__ == "__main__":
    main(sys.argv[1])
