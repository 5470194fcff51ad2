"""Places where tests take hold of the inside of objects: each private name stands here once.

A test that needs one of them asks this module, so that what is inside may get another name
or another owner by a change in one file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

from daskps import ParameterStore
from daskps.cluster.caller.producer import Producer
from daskps.cluster.directory.drains import Drains

if TYPE_CHECKING:
    import threading

    from daskps.cluster.caller.link import Link
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.directory.directory import Directory
    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.cluster.machine.membership import Membership
    from daskps.shards.rounds.round import Round
    from daskps.shards.shard import Shard

# -- handles and trainers ------------------------------------------------------


def shards_of(store: Any) -> Any:
    """Return the `ShardClient` of a handle, which meets its cluster if it has to."""
    return store._attached()


def bound_link(store: Any) -> Any:
    """Return the `Link` of a handle to its cluster; it asks nobody."""
    return store._bind()


def session_of(trainer: Any) -> Any:
    """Return the `Session` of a trainer, whose methods a test may replace."""
    return trainer._session


def handle_of(meta: StoreMap, link: Link) -> ParameterStore:
    """Return a handle of a store that was created below the handles."""
    return ParameterStore._of(meta, link)


def push_as_another(store: Any) -> Any:
    """Have the pushes of a handle count as those of another process; return it."""
    store._producer = Producer()
    return store


def left_behind(link: Link) -> set[Any]:
    """Return what calls have left to go on behind their callers."""
    return link._background


# -- hosts and shards ------------------------------------------------------------


def mutex_of(hosted: HostedShard) -> threading.Lock:
    """Return what a thread of the host has that is at a shard."""
    return hosted._mutex


def lock_of(hosted: HostedShard) -> Any:
    """Return the lock of a shard between processes, whose methods a test may replace."""
    return hosted._lock


def drains_by_adoption(*shards: int) -> Any:
    """Have drains of a scheduler in this process take these shards alone for near."""
    return mock.patch.object(Drains, "_near", return_value=[*shards])


def is_taken(lock: Any) -> bool:
    """Tell whether a thread of this process has the lock between processes."""
    return bool(lock._file.mutex.locked())


def judge_all(shard: Any, judges: bool = True) -> None:
    """Have a shard judge each step, as one that does not simply join or come next."""
    for one, name in ((shard.round, "_look"), (shard._pushes, "_find_row")):
        if one is not None:
            vars(one).pop(name, None)
            if judges:
                setattr(one, name, lambda *_: -1)


def rules_of(shard: Shard) -> Any:
    """Return the rules of a shard by the position of their piece."""
    return shard._planner._bindings


def form_by(open_round: Round, form: Any) -> None:
    """Have a round form its sums by another function; by NumPy where there is none."""
    forms = open_round._forms
    forms[:] = [of._replace(form=form) for of in forms]


def room_of_sums(open_round: Round) -> list[Any]:
    """Return where the sums of each piece are formed."""
    return [of.room for of in open_round._forms]


def members_of(host: ShardHost) -> Any:
    """Return the membership of a host among those of its machine."""
    return host._members


def registry_of(members: Membership) -> Any:
    """Return the list that a membership is in."""
    return members._registry


def leave_no_room(host: ShardHost) -> None:
    """Have a host copy nothing beside what it copies already."""
    host.budget._most = 0


# -- the directory -----------------------------------------------------------------


def waiters_of(directory: Directory) -> Any:
    """Return the calls that wait for a store of some name."""
    return directory.stores._named._waiters
