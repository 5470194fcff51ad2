"""What the answers of a host, and of the directory, mean for a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.errors import ShardLostError, StaleGenerationError
from daskps.typing import Array

if TYPE_CHECKING:
    from daskps.cluster.wire.deadline import Deadline
    from daskps.cluster.wire.messages import Answer, Call

#: For each shard where what is read goes.
Outs = Mapping[int, Sequence[Array]]


def late(deadline: Deadline, worker: str, call: Call, why: str) -> TimeoutError:
    """Return the error that says which shards of which worker were waited for."""
    shards = [part.shard for part in call.parts]
    named = ", ".join(map(str, shards[:8])) + (", ..." if len(shards) > 8 else "")
    where = f"{'shards' if len(shards) > 1 else 'shard'} {named} at worker {worker}"
    where += f", {why}" if why else ""
    # In a run, what waits on may be the rest of a push that was accepted.
    return deadline.error(where, changes=call.changes or bool(call.run))


def raise_first(answers: Sequence[Answer]) -> None:
    """Raise the first error among answers."""
    for answer in answers:
        if answer.error is not None:
            raise answer.error


def again(call: Call, answers: Sequence[Answer]) -> Call:
    """Return the call that waits on: without its arrays where they were accepted."""
    if all(a.applied for a in answers):
        return call.waiting()
    return call


def fill(outs: Outs, answers: Sequence[Answer]) -> None:
    """Copy what was read to where it was asked for, unless it is there already."""
    for answer in answers:
        wanted = outs.get(answer.shard, ())
        if answer.arrays and wanted and answer.arrays[0] is not wanted[0]:
            for out, array in zip(wanted, answer.arrays, strict=True):
                np.copyto(out, array)


def check_located(
    store: str, located: Mapping[str, Any], shards: Sequence[int], worker: str = ""
) -> None:
    """Refuse to wait for shards that are lost, or no longer at a worker if given.

    Raises
    ------
    ShardLostError, StaleGenerationError
        For what their names say.
    """
    for shard, owner, reason in located["lost"]:
        if shard in shards:
            raise ShardLostError(store, shard, owner, reason)
    for shard in shards if worker else ():
        if located["owners"][shard] != worker or shard in located["adopting"]:
            raise StaleGenerationError(
                f"shard {shard} of store {store!r} is no longer at worker {worker}; "
                f"ask the directory where it lives"
            )
