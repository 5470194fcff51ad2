"""Views of a store: found in this process or on its machine, else made of a cut.

A process that makes one reads the copies of the cut from their hosts, and writes them
into memory that all processes of its machine map; see
:mod:`daskps.cluster.machine.views`. The directory knows the workers that have one: they
let go of it with the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.cluster.caller import routes
from daskps.cluster.caller.snapshots import drop_cut, take_cut
from daskps.cluster.caller.targets import ReadSlice, Target, at_least
from daskps.cluster.host.node import HOSTS
from daskps.cluster.keys import copy_key
from daskps.cluster.machine import accounting
from daskps.cluster.machine.folder import CarrierClosed
from daskps.cluster.machine.views import VIEWS, Making, View, ViewFiles
from daskps.cluster.protocol.deadline import gather
from daskps.cluster.protocol.packing import unpack_array
from daskps.errors import (
    ConsistencyError,
    LayoutError,
    SnapshotLostError,
    StoreClosedError,
    StoreNotFoundError,
)
from daskps.layout.chunks import ARRAYS, runs_of
from daskps.layout.spans import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.link import Link
    from daskps.cluster.machine.membership import Membership
    from daskps.cluster.protocol.deadline import Deadline
    from daskps.layout.arrays import Layout
    from daskps.layout.spans import Span

#: Bytes of a part of an array, and parts, that a host is asked for at a time.
_PART_NBYTES, _PARTS = 2**22, 16
#: Between two looks whether the turn to make a view has come.
_PAUSE_SECONDS = 0.005
#: Cuts that are taken where hosts of their copies are lost meanwhile.
_TRIES = 3
#: Shard, span and dtype of a part, and the byte of a view that it begins at.
_Part = tuple[int, "Span", str, int]


@dataclass(frozen=True, slots=True)
class ViewRequest:
    """The demands of a call on a view."""

    #: Version, or versions of shards, that it has at least.
    least: int | None
    #: Seconds since it was the newest; None for whatever the process has.
    max_age: float | None

    def at_hand(self, link: Link, uid: str) -> View | None:
        """Return the view that a worker's process has, if it serves; nobody is asked."""
        # A client does not hear of the end of a store.
        host = _host(link)
        view = None if host is None else host.views.get(link.latest(uid))
        return view if view and self.takes(view, time.monotonic()) else None

    def takes(self, view: View, asked_at: float) -> bool:
        """Return whether a view serves who has asked at a time."""
        age, least = self.max_age, self.least
        if age is not None and view.newest_at < asked_at - age:
            return False
        # Nobody updates a shard without elements.
        pieces, of = view.layout.pieces, view.versions.items()
        return least is None or all(
            version >= at_least(shard, least) for shard, version in of if pieces[shard]
        )


def _host(link: Link) -> Any:
    """Return the host of the worker that this is."""
    return HOSTS.get(link.node.address) if link.is_worker else None


async def take_view(
    shards: ShardClient, asked: ViewRequest, deadline: Deadline
) -> View:
    """Return a view of a store, on the event loop.

    Parameters
    ----------
    shards : ShardClient
        The store.
    asked : ViewRequest
        What is asked of it.
    deadline : Deadline
        When to give up.

    Returns
    -------
    View
        The one that this process has from now on.

    Raises
    ------
    LayoutError
        Where there is no room for it.
    ShardLostError, StoreClosedError, TimeoutError
        As their names say.
    """
    link, uid, now = shards.link, shards.meta.uid, time.monotonic()
    host = _host(link)
    kept: dict[str, View] = (host or link).views
    # First: the directory has a worker drop what it may have from here on.
    try:
        cluster = await _tell(shards, deadline)
    except (StoreClosedError, StoreNotFoundError):
        kept.pop(uid, None)
        raise
    view = VIEWS.get(uid)
    if view is None or not asked.takes(view, now):
        await _reached(shards, asked.least, deadline)
        members = await _members(link, cluster)
        try:
            files = ViewFiles(uid, members)
            view = await _newest(shards, asked, files, now=now, deadline=deadline)
        finally:
            if members is not None:
                members.leave()
    VIEWS[uid] = kept[uid] = view
    if host and uid in host.dropped:
        host.drop_view(uid)
        raise StoreClosedError(
            f"store {shards.meta.name!r} was closed or deleted while a view of it was "
            f"taken"
        )
    return view


async def _tell(shards: ShardClient, deadline: Deadline, **made: Any) -> str:
    """Tell the directory that this process has a view from now on."""
    link, uid = shards.link, shards.meta.uid
    worker = link.node.address if link.is_worker else ""
    tell = partial(link.directory, "viewing", uid=uid, worker=worker, **made)
    cluster: str = await link.within(tell, deadline.remaining(), deadline.what)
    return cluster


async def _members(link: Link, cluster: str) -> Membership | None:
    """Return this process among those that share memory, None where it shares none."""
    # A thread may wait to hear whether memory of others may be mapped.
    if config.load().machine_carrier and await asyncio.to_thread(accounting.may_map):
        with contextlib.suppress(CarrierClosed):
            return link.machine.visit(cluster)
    return None


async def _reached(shards: ShardClient, least: int | None, deadline: Deadline) -> None:
    """Wait until shards have a version, as a pull does, by one of no elements."""
    slices = {
        shard: (ReadSlice((pieces[0].parameter.dtype, 0, 0), 0, slice(0)),)
        for shard, pieces in enumerate(shards.meta.layout.pieces)
        if pieces and at_least(shard, least)
    }
    if slices:
        target = Target(slices, [np.empty(0)], lambda: None)
        await shards.call_async(routes.read(shards.meta, target, least), deadline)


async def _newest(
    shards: ShardClient,
    asked: ViewRequest,
    files: ViewFiles,
    *,
    now: float,
    deadline: Deadline,
) -> View:
    """Return a view that was the newest at most so long before a call, or after it."""
    meta, asked = shards.meta, replace(asked, max_age=asked.max_age or 0.0)

    async def serves(view: View) -> bool:
        if not asked.takes(view, now):
            at, rows = time.monotonic(), await shards.control("versions", deadline)
            if dict(pair for of in rows for pair in of) == view.versions:
                view.newest_at = at
        return asked.takes(view, now)

    view = VIEWS.get(meta.uid)
    if view is not None and await serves(view):
        return view
    try:
        while who := files.take_turn():
            if deadline.is_over:
                raise deadline.error(f"{who} makes a view of the store", changes=False)
            await asyncio.sleep(_PAUSE_SECONDS)
        view = files.find(meta.layout) or VIEWS.get(meta.uid)
        if view is not None and await serves(view):
            return view
        return await _made(shards, files, deadline)
    finally:
        files.end_turn()


async def _made(shards: ShardClient, files: ViewFiles, deadline: Deadline) -> View:
    """Make a view, where there is room for it."""
    link, meta, making = shards.link, shards.meta, Making(files, shards.meta.layout)
    host, nbytes = _host(link), making.nbytes
    room: Any = host.budget.copying(nbytes) if host else contextlib.nullcontext()
    with room as lack:
        if lack:
            raise LayoutError(
                f"a view of store {meta.name!r} needs {nbytes:,} bytes on worker "
                f"{link.node.address}, of whose memory {lack}; nothing was copied. Give "
                f"the worker more memory, or pull what a task needs with pull(names)"
            )
        await asyncio.to_thread(making.take)
        try:
            view = await _filled(shards, making, deadline)
            await _tell(shards, deadline, nbytes=nbytes, name=view.name)
        except BaseException:
            making.give_up()
            raise
    return view


async def _filled(shards: ShardClient, making: Making, deadline: Deadline) -> View:
    """Fill the memory of a view; where a host of the cut is lost, from another cut."""
    tries = 0
    while True:
        tries, cut, began = tries + 1, uuid.uuid4().hex, time.monotonic_ns()
        try:
            found = await take_cut(shards, cut, index=ARRAYS, deadline=deadline)
            versions = {shard: version for shard, version, *_ in found["versions"]}
            work = partial(_copy, shards, making, versions)
            await shards.link.within(work, deadline.remaining(), deadline.what)
            return making.done(versions, began)
        except (SnapshotLostError, ConsistencyError):
            if tries == _TRIES:
                raise
        finally:
            await drop_cut(shards, cut)


async def _copy(shards: ShardClient, making: Making, versions: dict[int, int]) -> None:
    """Copy all arrays from the copies of a cut."""
    meta, link = shards.meta, shards.link
    of_owners: dict[str, list[_Part]] = {}
    for part in _parts(meta.layout, making.places):
        of_owners.setdefault(meta.owners[part[0]], []).append(part)

    async def copy(owner: str, parts: Sequence[_Part]) -> None:
        for first in range(0, len(parts), _PARTS):
            some = parts[first : first + _PARTS]
            keys = [copy_key(meta.uid, ARRAYS, i, versions[i]) for i, *_ in some]
            spans = [tuple(span) for _, span, *_ in some]
            wanted = [*zip(keys, spans, strict=True)]
            try:
                packed = await link.control(owner, "edges", wanted=wanted)
            except OSError as error:
                why = f"died or cannot be reached ({error})"
                raise SnapshotLostError(meta.name, some[0][0], owner, why) from error
            arrays = [
                (at, unpack_array(one, dtype))
                for (*_, dtype, at), one in zip(some, packed, strict=True)
            ]
            await asyncio.to_thread(making.write, arrays)

    await gather(*(copy(owner, parts) for owner, parts in of_owners.items()))


def _parts(layout: Layout, places: Sequence[int]) -> Iterator[_Part]:
    """Give where all elements are, and where they go."""
    for p, at in zip(layout.parameters, places, strict=True):
        size = np.dtype(p.dtype).itemsize
        for run in runs_of(layout, p.index):
            for a in range(run.start, run.stop, _PART_NBYTES // size):
                b = min(run.stop, a + _PART_NBYTES // size)
                yield run.shard, run.span(WEIGHTS, a, b), p.dtype, at + a * size
