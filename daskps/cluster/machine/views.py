"""Views: the arrays of a store at one version, once on a machine, for all its processes.

A view is a file in the cluster's folder, as a block is: a page with its header, words
that say when it was taken and the version of each shard, and then the arrays. The
layout says where each begins. Its maker writes it by its descriptor and the header last,
so that nobody takes half of one for a view. Its name has digits of the store, by which
others find it. Each process maps it privately: what a framework writes into an array
stays in that process. The names of older views go with a new one, and their memory
with the last process that maps them.

Where memory is not shared a view is private memory of its process.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from daskps.backend.host import untouched
from daskps.cluster.machine.blocks import HEAD_NBYTES, BlockAddress, new_block
from daskps.cluster.machine.folder import CarrierClosed
from daskps.layout.arrays import align

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from daskps.cluster.machine.blocks import Block
    from daskps.cluster.machine.membership import Membership
    from daskps.layout.arrays import Layout
    from daskps.typing import Array

#: Between two looks whether the turn to make a view has come.
_PAUSE_SECONDS = 0.005
#: Turns are numbers above those of owners.
_TURNS_FROM = 2**62
#: The turns that somebody in this process has.
_turns: dict[Any, object] = {}


class View:
    """The arrays of a store at one version, read-only.

    Parameters
    ----------
    layout : Layout
        The store's.
    memory : ndarray, shape (nbytes,), uint8
        As in a file behind its header.
    name : str
        The file; "" for private memory.

    Attributes
    ----------
    newest_at : float
        When it was the newest, as :func:`time.monotonic`, which is one on a machine.
    versions : tuple of int
        Of each shard.
    arrays : dict of str to ndarray
        All arrays of the store.
    """

    def __init__(self, layout: Layout, memory: Array, name: str = "") -> None:
        self.layout, self.name = layout, name
        words = memory[: 8 * (1 + layout.n_shards)].view(np.int64).tolist()
        self.newest_at, self.versions = words[0] / 1e9, tuple(words[1:])
        self.arrays: dict[str, Array] = {}
        for p, at in zip(layout.parameters, _places_of(layout)[0], strict=True):
            array = memory[at : at + p.nbytes].view(p.dtype).reshape(p.shape)
            array.flags.writeable = False
            self.arrays[p.name] = array


#: Those of this process, by uid of the store, as long as a host or a client keeps them.
VIEWS: WeakValueDictionary[str, View] = WeakValueDictionary()


def _places_of(layout: Layout) -> tuple[list[int], int]:
    """Return where each array begins in the memory of a view, and its bytes in all."""
    places, at = [], align(8 * (1 + layout.n_shards))
    for p in layout.parameters:
        places.append(at)
        at += align(p.nbytes)
    return places, at


class ViewFiles:
    """The views of one store on this machine.

    Parameters
    ----------
    uid : str
        The store.
    members : Membership, optional
        Those who share memory; without them its views are private to this process.
    """

    def __init__(self, uid: str, members: Membership | None) -> None:
        self.members = members
        number = hashlib.blake2b(uid.encode(), digest_size=8).digest()
        self._turn = _TURNS_FROM + (int.from_bytes(number) >> 3)
        self.nonce = int.from_bytes(number) >> 1
        #: They are in the names of its files, behind the owner's number.
        self.digits = number.hex()[:10]

    @property
    def names(self) -> list[str]:
        """Names of all its files, also of one that is being made."""
        names = [] if self.members is None else self.members.names()
        return [name for name in names if name[17:].startswith(self.digits)]

    @asynccontextmanager
    async def turn(self, look: Callable[[str], None]) -> AsyncIterator[None]:
        """Be the only one on this machine that makes a view of the store.

        While that waits, `look` is told who has the turn, and may raise.
        """
        key, mine = (self._turn, self.members is None), object()
        while _turns.setdefault(key, mine) is not mine:
            look("another thread of this process")
            await asyncio.sleep(_PAUSE_SECONDS)
        try:
            while self.members and not self.members.take_turn(self._turn):
                look("another process of this machine")
                await asyncio.sleep(_PAUSE_SECONDS)
            yield
        finally:
            # Of a turn that others have it ends nothing.
            if self.members is not None:
                self.members.end_turn(self._turn)
            del _turns[key]

    def find(self, layout: Layout) -> View | None:
        """Return the view that is there, if any."""
        nbytes, members = HEAD_NBYTES + _places_of(layout)[1], self.members
        for name in self.names:
            address = BlockAddress(name, nbytes, self.nonce)
            # One that is not whole yet, or goes meanwhile.
            with suppress(CarrierClosed):
                if members is not None:
                    block = members.attach(address, private=True)
                    return View(layout, block.body, name)
        return None

    def drop(self, but: str = "") -> None:
        """Remove all files, but for one; who has mapped them keeps the memory."""
        # One that has left removes nothing.
        with suppress(CarrierClosed):
            for name in self.names:
                if self.members is not None and name != but:
                    self.members.remove(name)


class Making:
    """Memory for a view that is being made, of which nobody knows.

    Parameters
    ----------
    files : ViewFiles
        The views of the store.
    layout : Layout
        Its layout.
    """

    def __init__(self, files: ViewFiles, layout: Layout) -> None:
        self._files, self._layout = files, layout
        self.places, self.nbytes = _places_of(layout)
        self.began = time.monotonic_ns()
        self._body = np.empty(0, np.uint8)
        self._block: Block | None = None

    def take(self) -> None:
        """Take the memory; it waits for the system.

        Raises
        ------
        OSError
            Where there is not enough of it.
        CarrierClosed
            Where this process is no member any more.
        """
        if (members := self._files.members) is None:
            self._body = untouched(self.nbytes)
            return
        name = f"{members.owner:016x}-{self._files.digits}{secrets.token_hex(3)}"
        address = BlockAddress(name, HEAD_NBYTES + self.nbytes, self._files.nonce)
        where: dict[str, Any] = {"at": members.folder_fd, "remove": members.remove}
        whole = [(0, address.nbytes)]
        self._block = new_block(address, whole, **where, later=(), private=True)
        self._body = self._block.body

    def write(self, parts: Sequence[tuple[int, Array]]) -> None:
        """Write arrays, each from a byte on."""
        for at, array in parts:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            if self._block is None:
                self._body[at : at + data.nbytes] = data
            else:
                self._block.write(HEAD_NBYTES + at, data)

    def done(self, versions: Mapping[int, int]) -> View:
        """Return what was made, for all others of the machine to find, alone."""
        of = [versions.get(shard, 0) for shard in range(self._layout.n_shards)]
        self.write([(0, np.array([self.began, *of], np.int64))])
        if self._block is None:
            return View(self._layout, self._body)
        self._block.stamp()
        self._files.drop(but=self._block.name)
        return View(self._layout, self._body, self._block.name)

    def give_up(self) -> None:
        """Free the memory."""
        if self._block is not None:
            self._block.free()
