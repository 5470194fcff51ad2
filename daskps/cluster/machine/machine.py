"""The access of a process to its machine: memory that it shares with others there.

Hosts and links reach the machine by this and by nothing else. Processes with memory of
their own join; those that only use memory of others visit.
"""

from __future__ import annotations

from daskps import config
from daskps.cluster.machine.folder import WayClosed, folder_of
from daskps.cluster.machine.membership import Membership
from daskps.cluster.machine.sweeping import sweep_abandoned, sweep_later
from daskps.cluster.machine.warnings import warn_private


class Machine:
    """The machine of this process: the configured directory of shared memory."""

    def join(self, cluster: str) -> Membership | None:
        """Return a membership of a process with memory here.

        None where shared memory is closed, which is logged once per process. Folders
        of this user whose cluster is over, as after a crash, are removed, now or when
        it is certain.
        """
        base = config.load().shared_memory
        try:
            own = folder_of(base, cluster)
            if sweep_abandoned(base, own).waits:
                sweep_later(base, own)
            return Membership.join(base, cluster)
        except WayClosed as error:
            warn_private(str(error))
            return None

    def visit(self, cluster: str) -> Membership:
        """Return a membership of a process without memory here, or raise WayClosed."""
        return Membership.visit(config.load().shared_memory, cluster)

    def keep(self, cluster: str) -> Membership | None:
        """Return a membership of a scheduler with stores; None where none are here."""
        try:
            return Membership.keep(config.load().shared_memory, cluster)
        except WayClosed:
            return None


HERE = Machine()
