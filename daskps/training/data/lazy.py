"""Parts for loops of the user's: what is lazy in them is computed on the workers, once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask.base import is_dask_collection

from daskps.cluster import upstream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.caller.link import Link


async def computed_parts(link: Link, parts: Sequence[Any]) -> list[Any]:
    """Return parts with a future for each that has something lazy, when all are computed.

    Lazy are futures, delayed objects and other dask collections, by themselves or in a
    tuple. Trainers that began while others still waited for their data would wait too.

    Parameters
    ----------
    link : Link
        The client's way to the cluster.
    parts : sequence
        As :func:`daskps.run` is given them.

    Returns
    -------
    list
        A future of each part that is lazy, the others as they are.

    Raises
    ------
    Exception
        The error of the computation of a part, with its number in a note.
    """
    members = [part if _is_pair(part) else (part,) for part in parts]
    # Together, so that what they share is computed once.
    lazy = [v for part in members for v in part if is_dask_collection(v)]
    started = iter(upstream.compute_all(link.client, lazy) if lazy else ())

    def begun(value: Any) -> Any:
        if is_dask_collection(value):
            return next(started)
        is_future = upstream.is_future(value)
        return upstream.own(link.client, value) if is_future else value

    found: list[Any] = []
    for part, given in zip(parts, members, strict=True):
        values = [begun(value) for value in given]
        if _is_pair(part):
            found.append(link.client.submit(_together, *values, pure=False))
        else:
            found += values
    for i, part in enumerate(found):
        if upstream.is_future(part):
            try:
                await upstream.computed(part)
            except Exception as error:
                error.add_note(f"raised by part {i} of the parts of run, which is lazy")
                raise
    return found


def is_lazy(part: Any) -> bool:
    """Whether it is computed before a loop gets it."""
    return is_dask_collection(part) or upstream.is_future(part) or _is_pair(part)


def _is_pair(part: Any) -> bool:
    """Whether it is a tuple with something lazy in it, such as features and labels."""
    return type(part) is tuple and any(
        is_dask_collection(value) or upstream.is_future(value) for value in part
    )


def _together(*values: Any) -> tuple[Any, ...]:
    return values
