"""The worker that owns each shard: a pure function with its own balance test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.errors import LayoutError
from daskps.layout.bounds import bounds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def place(n_shards: int, servers: Sequence[str]) -> tuple[str, ...]:
    """Deal the shards out to the servers, neighbours together, balanced within one.

    Parameters
    ----------
    n_shards : int
        Number of shards, at least 1.
    servers : sequence of str
        Addresses of the workers that may own shards, at least one.

    Returns
    -------
    tuple of str
        The owner of each shard.

    Raises
    ------
    LayoutError
        When there is no shard or no server.

    Examples
    --------
    >>> place(5, ["a", "b"])
    ('a', 'a', 'a', 'b', 'b')
    """
    if not servers or n_shards < 1:
        raise LayoutError(
            f"{n_shards} shards on {len(servers)} servers; a store needs at least one "
            f"of each"
        )
    k = min(len(servers), n_shards)
    parts = (bounds(n_shards, k, i) for i in range(k))
    return tuple(servers[i] for i, part in enumerate(parts) for _ in range(*part))


def shards_on(servers: Sequence[str], owners: Sequence[str]) -> tuple[int, ...]:
    """Return over which shards something is cut that is placed on some servers.

    Parameters
    ----------
    servers : sequence of str
        Addresses, at least one.
    owners : sequence of str
        The owner of each shard.

    Returns
    -------
    tuple of int
        All shards of these servers, ascending; of one server alone the first shard, which
        has it whole.

    Raises
    ------
    LayoutError
        If one of them owns no shard.

    Examples
    --------
    >>> shards_on(["b"], ["a", "b", "b"]), shards_on(["b", "a"], ["a", "b", "b"])
    ((1,), (0, 1, 2))
    """
    wanted = dict.fromkeys(servers)
    if absent := wanted.keys() - set(owners):
        raise LayoutError(
            f"placement names {min(absent)!r:.80}, which owns no shard of this store; its "
            f"shards are on {[*dict.fromkeys(owners)][:8]}. Name some of these, or have "
            f"more by servers= and shards="
        )
    found = tuple(shard for shard, owner in enumerate(owners) if owner in wanted)
    return found[:1] if len(wanted) == 1 else found


def check_memory(
    need: Mapping[str, int],
    held: Mapping[str, int],
    limits: Mapping[str, int],
    share: float,
) -> None:
    """Refuse shards that would fill more than `share` of a worker's memory limit.

    Parameters
    ----------
    need, held, limits : mapping of str to int
        Bytes by worker address: of the new shards, of shards already there, and of
        the worker's memory limit (0 for none).
    share : float
        Largest allowed share of the limit, in (0, 1].

    Raises
    ------
    LayoutError
        Naming the worker, the need and the limit.
    """
    for worker, nbytes in need.items():
        limit = limits.get(worker, 0)
        total = nbytes + held.get(worker, 0)
        if limit and total > share * limit:
            raise LayoutError(
                f"the shards for worker {worker} need {nbytes:,} bytes and it holds "
                f"{held.get(worker, 0):,} already, above {share:.0%} of its memory "
                f"limit of {limit:,} bytes; add workers, raise their memory limit or "
                f"the configuration value daskps.memory-share"
            )
