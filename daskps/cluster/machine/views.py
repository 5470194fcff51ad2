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

import hashlib
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from daskps.backend.host import untouched
from daskps.cluster.machine.blocks import HEAD_NBYTES, BlockAddress, new_block
from daskps.cluster.machine.folder import CarrierClosed
from daskps.cluster.machine.warnings import warn_private
from daskps.layout.arrays import align

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.machine.blocks import Block
    from daskps.cluster.machine.membership import Membership
    from daskps.layout.arrays import Layout
    from daskps.typing import Array

#: Turns are numbers above those of owners.
_TURNS_FROM = 2**62
#: The turns that somebody in this process has, or waits for before all others here.
_turns: dict[int, object] = {}


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
    versions : dict of int to int
        By shard.
    arrays : dict of str to ndarray
        All arrays of the store.
    """

    def __init__(self, layout: Layout, memory: Array, name: str = "") -> None:
        self.layout, self.name = layout, name
        words = memory[: 8 * (1 + layout.n_shards)].view(np.int64).tolist()
        self.newest_at, self.versions = words[0] / 1e9, dict(enumerate(words[1:]))
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

    def take_turn(self) -> str:
        """Be the only one on this machine that makes a view of the store.

        Returns
        -------
        str
            "" where that is so; else who is.
        """
        if _turns.setdefault(self._turn, self) is not self:
            return "another thread of this process"
        if self.members and not self.members.take_turn(self._turn):
            return "another process of this machine"
        return ""

    def end_turn(self) -> None:
        """Let others have their turn, also where this one has not come."""
        if _turns.get(self._turn) is self:
            if self.members is not None:
                self.members.end_turn(self._turn)
            del _turns[self._turn]

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
        self._body = np.empty(0, np.uint8)
        self._block: Block | None = None

    def take(self) -> None:
        """Take the memory, private where there is not enough to share; it waits for that."""
        files, nbytes, of = self._files, self.nbytes, self._files.members
        if of is not None:
            try:
                name = f"{of.owner:016x}-{files.digits}{secrets.token_hex(3)}"
                address = BlockAddress(name, HEAD_NBYTES + nbytes, files.nonce)
                where: dict[str, Any] = {"at": of.folder_fd, "remove": of.remove}
                whole = [(0, address.nbytes)]
                self._block = new_block(address, whole, **where, later=(), private=True)
            except (OSError, CarrierClosed) as error:
                warn_private(
                    f"no shared memory for a view of {nbytes:,} bytes: {error}"
                )
        self._body = untouched(nbytes) if self._block is None else self._block.body

    def write(self, parts: Sequence[tuple[int, Array]]) -> None:
        """Write arrays, each from a byte on."""
        for at, array in parts:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            if self._block is None:
                self._body[at : at + data.nbytes] = data
            else:
                self._block.write(HEAD_NBYTES + at, data)

    def done(self, versions: Mapping[int, int], began: int) -> View:
        """Return what was made, for all others of the machine to find, alone.

        Parameters
        ----------
        versions : mapping of int to int
            By shard; 0 of a shard without arrays.
        began : int
            When it was the newest, in nanoseconds.
        """
        of = [versions.get(shard, 0) for shard in range(self._layout.n_shards)]
        self.write([(0, np.array([began, *of], np.int64))])
        if self._block is None:
            return View(self._layout, self._body)
        self._block.stamp()
        self._files.drop(but=self._block.name)
        return View(self._layout, self._body, self._block.name)

    def give_up(self) -> None:
        """Free the memory."""
        if self._block is not None:
            self._block.free()
