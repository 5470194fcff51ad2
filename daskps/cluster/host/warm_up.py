"""Loading the update loops of a store before the host gets shards of it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps.cluster.host.rules import Rules
from daskps.cluster.protocol.handlers import HOST
from daskps.cluster.protocol.wellformed import layout_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from daskps.cluster.host.host import ShardHost

#: Seconds between looks whether the worker is idle; idle looks in a row before the host
#: loads; and looks after which it loads anyway.
LOOK_SECONDS = 0.1
QUIET_LOOKS = 5
MOST_LOOKS = 50


@HOST.handles("warm")
async def warm(host: ShardHost, layout: Mapping[str, Any], rules: bytes) -> None:
    """Load the loops of a store in a thread, when the worker is idle.

    Not at once: the first tasks after a store was made, or a worker has come, would
    share the interpreter with it. And in a thread of its own: the host's threads serve
    calls of other stores meanwhile.
    """
    ready = partial(Rules(layout_of(layout), rules).warm, durable=True)
    await _when_quiet(host, ready)


async def _when_quiet(host: ShardHost, ready: Callable[[], object]) -> None:
    quiet = 0
    for _ in range(MOST_LOOKS):
        if quiet == QUIET_LOOKS:
            break
        await asyncio.sleep(LOOK_SECONDS)
        quiet = 0 if host.worker.is_busy() else quiet + 1
    thread = ThreadPoolExecutor(1, thread_name_prefix="daskps-warm")
    try:
        await asyncio.get_running_loop().run_in_executor(thread, ready)
    finally:
        thread.shutdown(wait=False)
