"""The worker of a host, as far as the host needs it; the host uses no more of Dask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from daskps.cluster import connections, upstream
from daskps.cluster.protocol.deadline import TAKE_SECONDS
from daskps.cluster.protocol.packing import unpack_reply

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distributed import Worker

#: By worker address the hosts of this process, each a
#: :class:`~daskps.cluster.host.host.ShardHost`: threads of the process call them
#: directly. Its module imports this one, so the type cannot be named here.
HOSTS: dict[str, Any] = {}


class OpenSockets(Protocol):
    """The sockets that a host has given to callers, which end with it."""

    @property
    def n_calls(self) -> int:
        """Calls that came by them."""

    def let_go(self) -> None:
        """Release the memory of shards that have left this host."""

    def serve(
        self, taken: Any, calls: Any, token: str, first: list[Any] | None = None
    ) -> Any:
        """Serve the calls of a socket, after a first frame to its other end."""

    def close(self) -> None:
        """End all of them."""

    def __len__(self) -> int: ...


class WorkerNode:
    """A Dask worker as its host uses it.

    Parameters
    ----------
    worker : distributed.Worker
        The worker.

    Attributes
    ----------
    server : distributed.Worker
        The same worker, for the links of this process; see
        :class:`~daskps.cluster.caller.link.Link`.
    """

    def __init__(self, worker: Worker) -> None:
        self.server: Any = worker

    @property
    def address(self) -> str:
        """The address at which others reach the host."""
        address: str = self.server.address
        return address

    @property
    def loop(self) -> Any:
        """The event loop of the host, a tornado one."""
        return self.server.loop

    @property
    def memory_limit(self) -> int | None:
        """Bytes that the worker may use."""
        limit: int | None = self.server.memory_manager.memory_limit
        return limit

    def measure(self) -> int:
        """Return the bytes that the worker uses, as Dask counts them."""
        found: int = self.server.monitor.get_process_memory()
        return found

    @property
    def pause_share(self) -> float:
        """Share of its memory limit above which the worker starts no task."""
        # False means never.
        return self.server.memory_manager.memory_pause_fraction or 1.0

    def is_busy(self) -> bool:
        """Return whether tasks are running."""
        return bool(self.server.state.executing_count)

    def is_connected(self) -> bool:
        """Return whether messages can reach the scheduler."""
        stream = self.server.batched_stream
        return stream is not None and not stream.closed()

    def serve(self, name: str, handler: Callable[..., Awaitable[Any]]) -> None:
        """Register a handler for messages of a name; its replies are sent."""

        async def served(comm: Any, **message: Any) -> Any:
            reply = await handler(**message)
            return await connections.send_reply(comm, reply, TAKE_SECONDS)

        self.serve_comm(name, served)

    def serve_comm(self, name: str, handler: Callable[..., Awaitable[Any]]) -> None:
        """Register a handler that gets messages of a name with their connection."""
        upstream.add_handlers(self.server, {name: handler})

    async def ask(self, worker: str, method: str, **kwargs: Any) -> Any:
        """Send a control message to the host of another worker."""
        reply = await self.server.rpc(worker).daskps_control(method=method, **kwargs)
        return unpack_reply(reply, f"worker {worker}")

    async def directory(self, method: str, **kwargs: Any) -> Any:
        """Send a message to the directory."""
        reply = await self.server.scheduler.daskps_directory(method=method, **kwargs)
        return unpack_reply(reply, "the scheduler")
