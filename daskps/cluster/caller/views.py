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
from typing import TYPE_CHECKING, Any, Self

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
from daskps.cluster.machine.warnings import warn_private
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
    from daskps.typing import Array

#: Bytes of a part of an array, and parts, that a host is asked for at a time.
_PART_NBYTES, _PARTS = 2**22, 16
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
    #: Whether memory of others may be mapped into this process.
    shares: bool = False

    def of_thread(self) -> Self:
        """Return the same of a thread, which may wait to hear what the process shares."""
        shares = config.load().machine_carrier and accounting.may_map()
        return replace(self, shares=shares)

    def at_hand(self, link: Link, uid: str) -> View | None:
        """Return the view that a worker's process has, if it serves; nobody is asked."""
        # A client does not hear of the end of a store.
        view = _kept(link).get(link.latest(uid)) if link.is_worker else None
        return view if view and self.takes(view, time.monotonic()) else None

    def takes(self, view: View, asked_at: float, max_age: float | None = None) -> bool:
        """Return whether a view serves who has asked at a time."""
        age = self.max_age if max_age is None else max_age
        is_young = age is None or view.newest_at >= asked_at - age
        return is_young and self.has_reached(view)

    def has_reached(self, view: View) -> bool:
        """Return whether a view has the versions."""
        # Nobody updates a shard without elements.
        pieces, of = view.layout.pieces, enumerate(view.versions)
        return self.least is None or all(
            version >= at_least(shard, self.least)
            for shard, version in of
            if pieces[shard]
        )


def _kept(link: Link) -> dict[str, View]:
    """Return the views that this process has for a worker, or for a client."""
    found: dict[str, View] = (_host(link) or link).views
    return found


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
    # First: the directory has a worker drop what it may have from here on.
    try:
        cluster = await _tell(shards, deadline)
    except (StoreClosedError, StoreNotFoundError):
        _kept(link).pop(uid, None)
        raise
    view = VIEWS.get(uid)
    if view is None or not asked.takes(view, now):
        if asked.least is not None and not (view and asked.has_reached(view)):
            await _reached(shards, asked.least, deadline)
        members = _members(link, cluster) if asked.shares else None
        try:
            files = ViewFiles(uid, members)
            view = await _newest(shards, asked, files, now=now, deadline=deadline)
        finally:
            if members is not None and not link.is_worker:
                members.leave()
    VIEWS[uid] = _kept(link)[uid] = view
    if (host := _host(link)) and uid in host.dropped:
        host.drop_view(uid)
        raise StoreClosedError(
            f"store {shards.meta.name!r} was closed or deleted while a view of it was "
            f"taken"
        )
    return view


async def _tell(shards: ShardClient, deadline: Deadline, **made: Any) -> str:
    """Tell the directory that this process has a view from now on."""
    link = shards.link
    worker = link.node.address if link.is_worker else ""
    about = {"uid": shards.meta.uid, "worker": worker, **made}
    tell = partial(link.directory, "viewing", **about)
    cluster: str = await link.within(tell, deadline.remaining(), deadline.what)
    return cluster


def _members(link: Link, cluster: str) -> Membership | None:
    """Return this process among those that share memory, None where it shares none."""
    if link.is_worker:
        found: Membership | None = (host := _host(link)) and host.members(cluster)
        return found
    with contextlib.suppress(CarrierClosed):
        return link.machine.visit(cluster)
    return None


async def _reached(shards: ShardClient, least: int, deadline: Deadline) -> None:
    """Wait until shards have a version, as a pull does, by one element of each."""
    slices: dict[int, tuple[ReadSlice, ...]] = {}
    flats: list[Array] = []
    for shard, pieces in enumerate(shards.meta.layout.pieces):
        if pieces and at_least(shard, least):
            dtype, local = pieces[0].parameter.dtype, pieces[0].local
            asked = dtype, local, local + 1
            slices[shard] = (ReadSlice(asked, len(flats), slice(0, 1)),)
            flats.append(np.empty(1, dtype))
    if slices:
        target = Target(slices, flats, lambda: None)
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
    meta, max_age = shards.meta, asked.max_age or 0.0

    async def serves(view: View) -> bool:
        if asked.takes(view, now, max_age):
            return True
        at = time.monotonic()
        rows = await shards.control("versions", deadline)
        if sorted(pair for of in rows for pair in of) != [*enumerate(view.versions)]:
            return False
        view.newest_at = at
        return asked.has_reached(view)

    def look(who: str) -> None:
        if deadline.is_over:
            raise deadline.error(f"{who} makes a view of the store", changes=False)

    view = VIEWS.get(meta.uid)
    if view is not None and await serves(view):
        return view
    async with files.turn(look):
        view = files.find(meta.layout) or VIEWS.get(meta.uid)
        if view is not None and await serves(view):
            return view
        return await _made(shards, files, deadline)


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
        try:
            await asyncio.to_thread(making.take)
        except (OSError, CarrierClosed) as error:
            warn_private(f"no shared memory for a view of {nbytes:,} bytes: {error}")
            making = Making(ViewFiles(meta.uid, None), meta.layout)
            making.take()
        try:
            view = await _filled(shards, making, deadline)
            await _tell(shards, deadline, nbytes=nbytes, name=view.name)
        except BaseException:
            making.give_up()
            raise
    return view


async def _filled(shards: ShardClient, making: Making, deadline: Deadline) -> View:
    """Fill the memory of a view; where a host of the cut is lost, from another cut."""
    tries, copied = 0, False
    while not copied:
        tries, cut, making.began = tries + 1, uuid.uuid4().hex, time.monotonic_ns()
        try:
            found = await take_cut(shards, cut, index=ARRAYS, deadline=deadline)
            versions = {shard: version for shard, version, *_ in found["versions"]}
            work = partial(_copy, shards, making, versions)
            await shards.link.within(work, deadline.remaining(), deadline.what)
            copied = True
        except (SnapshotLostError, ConsistencyError):
            if tries == _TRIES:
                raise
        finally:
            await drop_cut(shards, cut)
    return making.done(versions)


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
