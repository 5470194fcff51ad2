"""Loading the update loops of a store before its shards may come."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps.cluster.rules import Rules
from daskps.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.cluster.host import ShardHost

#: How often a host looks whether its worker has nothing to do, and how long at most.
LOOK_SECONDS = 0.1
PATIENCE_SECONDS = 5.0


async def warm(host: ShardHost, layout: Mapping[str, Any], rules: bytes) -> None:
    """Load the loops of a store in a thread, when the worker has nothing to do.

    A thread of its own: those of the host serve calls of other stores meanwhile.
    """
    left = PATIENCE_SECONDS
    while host.worker.state.executing_count and left > 0:
        left -= LOOK_SECONDS
        await asyncio.sleep(LOOK_SECONDS)
    ready = partial(Rules(Layout.from_wire(layout), rules).warm, durable=True)
    thread = ThreadPoolExecutor(1, thread_name_prefix="daskps-warm")
    try:
        await asyncio.get_running_loop().run_in_executor(thread, ready)
    finally:
        thread.shutdown(wait=False)


METHODS = (warm,)
