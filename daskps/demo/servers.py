"""The cluster of the demo: a running one, or two processes that leave no trace."""

from __future__ import annotations

import logging
import signal
import tempfile
from contextlib import ExitStack, contextmanager
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

import dask
from distributed import Client, LocalCluster

from daskps.demo.options import DemoError
from daskps.demo.waiting import WaitNotice
from daskps.errors import ProtocolError
from daskps.usercode import holding_interrupts

if TYPE_CHECKING:
    from collections.abc import Iterator

#: For a scheduler that somebody else has started, and may have ended.
CONNECT_SECONDS = 30.0
#: Configuration of a cluster of our own, here and in its processes. A busy machine may
#: take minutes to start these and to compile their loops; no limit of time is needed to
#: tell that they are lost, and Ctrl-C ends them.
PATIENCE = {
    "daskps.timeout": None,
    "daskps.register-timeout": "1 hour",
    "distributed.comm.timeouts.connect": "5 minutes",
}


@contextmanager
def cluster(scheduler: str | None) -> Iterator[Any]:
    """Give a client of a running cluster, or of two worker processes of our own.

    Parameters
    ----------
    scheduler : str or None
        Address of a running cluster's scheduler.

    Yields
    ------
    distributed.Client
        The client. A cluster that was started ends with the context, and leaves no
        file.

    Raises
    ------
    DemoError
        If there is no such cluster, or it has no workers or lacks daskps.
    """
    with ExitStack() as stack:
        address = scheduler or _two_processes(stack)
        limit = {"timeout": CONNECT_SECONDS} if scheduler else {}
        try:
            client: Any = Client(address, set_as_default=False, **limit)
        except (OSError, ValueError) as error:
            reason = (str(error) or repr(error)).splitlines()[0]
            raise DemoError(
                f"cannot reach a scheduler at {address}: {reason}"
            ) from error
        stack.enter_context(client)
        if not client.nthreads():
            raise DemoError(f"the cluster at {address} has no workers; start some")
        try:
            yield client
        except ProtocolError as error:
            raise DemoError(str(error)) from error


def _two_processes(stack: ExitStack) -> LocalCluster:
    """Start two worker processes on the loopback interface, to end with `stack`."""
    stack.enter_context(dask.config.set(PATIENCE))
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="daskps-demo-"))
    # A terminal sends Ctrl-C to all processes, and this one is to end the others in
    # good order. The mask does not suffice for itself: any thread of a library's, made
    # before, may take the signal. Python's own helper process comes first: starting it
    # lifts the mask in the thread that does it.
    resource_tracker.ensure_running()
    with holding_interrupts(), _masked(), WaitNotice("two worker processes"):
        cluster = LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address=None,
            # Dask listens for HTTP without a dashboard too.
            scheduler_kwargs={
                "dashboard_address": "127.0.0.1:0",
                "local_directory": folder,
            },
            local_directory=folder,
            # Errors are raised here; a task that Ctrl-C cuts off needs no log.
            silence_logs=logging.CRITICAL,
        )
        stack.callback(_close, cluster)
    return cluster


def _close(cluster: LocalCluster) -> None:
    with holding_interrupts():
        cluster.close()


@contextmanager
def _masked() -> Iterator[None]:
    """Have processes that are started in the block never see Ctrl-C."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
