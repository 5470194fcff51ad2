"""Where a host takes memory from: shared by the processes of its machine, or private.

Where shared memory is absent or too small, blocks are private and processes send
messages instead; the log says so once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from daskps.cluster.machine.blocks import Block, FileMembers, Members, new_nonce
from daskps.cluster.machine.folder import WayClosed, folder_of
from daskps.cluster.machine.sweeping import sweep_abandoned
from daskps.cluster.machine.warnings import warn_once
from daskps.shards.memory.areas import private

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

logger = logging.getLogger(__name__)


class Memory:
    """Where a host takes the memory of its shards from.

    Parameters
    ----------
    members : Members or None
        The membership on this machine, which this object leaves in :meth:`close`;
        None for private memory only.
    """

    def __init__(self, members: Members | None) -> None:
        self.members = members

    @property
    def is_shared(self) -> bool:
        """Whether memory is shared as far as there is room."""
        return self.members is not None

    def allocate(self, nbytes: int) -> Block:
        """Return zeroed memory; see :meth:`allocate_all`.

        Parameters
        ----------
        nbytes : int
            Its size, at least 1.

        Returns
        -------
        Block
            Shared where possible, else private.
        """
        return self.allocate_all([nbytes])[0]

    def allocate_all(
        self, sizes: Sequence[int], private_sizes: Sequence[int] | None = None
    ) -> list[Block]:
        """Return zeroed memory of several sizes, all of it shared or all private.

        Its pages exist: nothing fails later for want of memory.

        Parameters
        ----------
        sizes : sequence of int
            The sizes, each at least 1.
        private_sizes : sequence of int, optional
            The sizes where it is private; the same by default.

        Returns
        -------
        list of Block
            In this order. Private where shared memory is closed or has no room for
            all, which is logged once per process.
        """
        if taken := self.allocate_shared(sizes):
            return taken
        sizes = sizes if private_sizes is None else private_sizes
        return [Block(private(nbytes), new_nonce()) for nbytes in sizes]

    def allocate_shared(self, sizes: Sequence[int]) -> list[Block]:
        """Return zeroed memory of several sizes that other processes can map, or none.

        Parameters
        ----------
        sizes : sequence of int
            The sizes, each at least 1.

        Returns
        -------
        list of Block
            In this order. Empty where shared memory is closed or has no room for
            all, which is logged once per process.
        """
        if self.members is None:
            return []
        taken: list[Block] = []
        try:
            for nbytes in sizes:
                block = self.members.make(nbytes)
                taken.append(block)
            return taken
        except (OSError, WayClosed) as error:
            need, where = sum(sizes), self.members.path
            _say_once(
                f"no room for {need:,} bytes of shared memory in {where}: {error}"
            )
            return []
        finally:
            if len(taken) < len(sizes):
                for block in taken:
                    block.free()

    def close(self) -> list[str]:
        """Leave the machine; return the names of the blocks that went with it.

        Those are all, where nobody else is there, and none otherwise: what was not
        freed others can adopt.
        """
        members, self.members = self.members, None
        return [] if members is None else members.leave()


def open_memory(base: str | os.PathLike[str], cluster_id: str) -> Memory:
    """Return a host's memory: shared where this machine allows it.

    Folders of this user in which nobody is left, as after a crash, are removed.

    Parameters
    ----------
    base : path-like
        Where the folders of all clusters are.
    cluster_id : str
        What the processes of one cluster agree on, such as the scheduler's id.

    Returns
    -------
    Memory
        Private memory only, which is logged once per process, where shared memory
        is closed.
    """
    try:
        sweep_abandoned(base, but=folder_of(base, cluster_id))
        return Memory(FileMembers.join(base, cluster_id))
    except WayClosed as error:
        _say_once(str(error))
        return Memory(None)


def _say_once(reason: str) -> None:
    warn_once(
        logger,
        # Whatever it was first: memory is asked for in many sizes.
        "",
        "%s; what was to be there is in private memory, and other processes of "
        "this machine reach it by messages. This is said once",
        reason,
    )
