"""What a process asks of the machine that it is on: memory it shares with others there.

Hosts and links reach the machine by this and by nothing else. Processes with memory of
their own join; those that only use memory of others visit.
"""

from __future__ import annotations

from daskps import config
from daskps.cluster.machine.folder import WayClosed, folder_of
from daskps.cluster.machine.membership import Membership
from daskps.cluster.machine.sweeping import sweep_abandoned
from daskps.cluster.machine.warnings import warn_private


class Machine:
    """The machine of this process: the configured directory of shared memory."""

    def join(self, cluster: str) -> Membership | None:
        """Return a membership of a process with memory here.

        None where shared memory is closed, which is logged once per process. Folders
        of this user in which nobody is left, as after a crash, are removed.
        """
        base = config.load().shared_memory
        try:
            sweep_abandoned(base, but=folder_of(base, cluster))
            return Membership.join(base, cluster)
        except WayClosed as error:
            warn_private(str(error))
            return None

    def visit(self, cluster: str) -> Membership:
        """Return a membership of a process without memory here, or raise WayClosed."""
        return Membership.visit(config.load().shared_memory, cluster)


HERE = Machine()
