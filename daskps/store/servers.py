"""Into how many shards a store is cut, and on which servers these are to be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daskps.limits import check_shards
from daskps.optim.patterns import first_matches
from daskps.store.arguments import encoded, whole

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Wanted:
    """Into how many shards a store is cut and where these are, as its user says it."""

    shards: Any
    servers: Any
    placement: Any


def checked_shards(shards: Any) -> int | None:
    """Return a number of shards, or refuse what can be none."""
    if shards is None:
        return None
    number = whole(shards, "shards")
    check_shards(number)
    return number


def checked_servers(servers: Any) -> str | list[str]:
    """Return which servers are meant, or refuse what can be none."""
    if not isinstance(servers, str):
        found = _addresses(servers)
        if not found:
            raise TypeError(
                f"servers is 'auto', 'all', 'resource:NAME' or a list of worker "
                f"addresses, found {servers!r}"
            )
        return found
    encoded(servers, "servers", ValueError)
    if servers in ("auto", "all") or servers.removeprefix("resource:") != servers:
        return servers
    raise ValueError(
        f"servers={servers!r} is not known; choose 'auto', 'all', 'resource:NAME' or "
        f"a list of worker addresses"
    )


def checked_placement(
    placement: Any, names: Sequence[str]
) -> list[tuple[list[str], list[int]]]:
    """Return servers, and the indices of what is placed on them.

    Parameters
    ----------
    placement : mapping of str to str or sequence of str, or None
        As `create` takes it.
    names : sequence of str
        Of the arrays and then of the tables.

    Raises
    ------
    TypeError, ValueError
        For what names no servers.
    LayoutError
        If a pattern matches nothing.
    """
    if placement is None:
        return []
    if not isinstance(placement, Mapping):
        raise TypeError(
            f"placement is a mapping of patterns of names to worker addresses, such as "
            f"{{'emb*': 'tcp://host:1234'}}, found {type(placement).__name__}"
        )
    servers: dict[str, list[str]] = {}
    for pattern, given in placement.items():
        one = [given] if isinstance(given, str) else given
        if not isinstance(pattern, str) or not (found := _addresses(one)):
            raise TypeError(
                f"placement[{pattern!r:.60}] is a worker address or a list of them, and "
                f"its key a pattern of names, found {given!r:.80}"
            )
        servers[pattern] = found
    by_pattern: dict[str, list[int]] = {}
    for index, pattern in enumerate(first_matches(servers, names, "placement")):
        if pattern is not None:
            by_pattern.setdefault(pattern, []).append(index)
    return [(servers[pattern], indices) for pattern, indices in by_pattern.items()]


def _addresses(given: Any) -> list[str]:
    """Return addresses of workers; none for what has no such."""
    found = list(given) if isinstance(given, Iterable) else []
    if not all(isinstance(one, str) for one in found):
        return []
    for server in found:
        encoded(server, "server", ValueError)
    return found
