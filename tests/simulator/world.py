"""A simulated cluster: scheduler, workers on two machines, and clients."""

from __future__ import annotations

import concurrent.futures
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import distributed
import distributed.utils
from distributed import Client, Scheduler, Worker
from distributed.system_monitor import SystemMonitor

from daskps import config
from daskps.cluster.caller import snapshots
from daskps.cluster.caller.link import Link, link_of
from daskps.cluster.host.copy_budget import CopyBudget
from daskps.cluster.host.node import HOSTS
from daskps.cluster.plugins import HostPlugin
from daskps.kernels import compiled
from daskps.shards.arrays.unbounded_rows import UnboundedRows
from daskps.shards.rounds import words
from tests.simulator import draining, files, network, ordering
from tests.simulator.ground import CHANCE, aside, put
from tests.simulator.loop import PROCESS, Process
from tests.simulator.machines import SimMachine, SimView, follow_growth

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractContextManager

    from distributed.core import Status
    from distributed.scheduler import WorkerState


T = TypeVar("T")
#: How often a host has no room for the copies of a cut.
FULL_SHARE = 0.2


class InlineThreadPoolExecutor(concurrent.futures.Executor):
    """Runs what it is given at once, in the thread that gives it.

    Dask tells by the name whether functions can be given to it unpickled.
    """

    _threads = ()

    def submit(  # type: ignore[override]  # its own is positional only
        self, function: Callable[..., T], *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[T]:
        """Run a function and return its future, which is done."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - the future's
            future.set_exception(error)
        return future


async def _offload(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    return function(*args, **kwargs)


def prepare() -> None:
    """Have this process start no threads and know the scheme; before any server."""
    network.register()
    files.register()
    ordering.settle()
    follow_growth()
    draining.prepare()
    # What servers tell of their process and machine is not the same each time.
    still = {name: type(value)(0) for name, value in SystemMonitor().recent().items()}
    put(SystemMonitor, update=lambda _: still.copy(), recent=lambda _: still.copy())
    _die_at_work()
    _lack_room()
    _compile_aside()
    _ask_at_once()
    # Or each simulation would import the compiler: more than half a second.
    words.compiled(str(config.load().cache))
    close = Worker.close

    async def close_and_say(worker: Worker, *args: Any, **kwargs: Any) -> str | None:
        if (process := PROCESS.get()) is not None:
            process.is_closing = True
        said: str | None = await close(worker, *args, **kwargs)
        return said

    put(Worker, close=close_and_say)
    threaded = distributed.utils.offload
    for name, module in list(sys.modules.items()):
        if name.startswith("distributed") and vars(module).get("offload") is threaded:
            vars(module)["offload"] = _offload


def _die_at_work() -> None:
    """Have processes that are to die at it stop when rows have changed, before the flip."""
    change = UnboundedRows.change

    def change_or_die(unbounded: UnboundedRows, *args: Any) -> Any:
        found, process = change(unbounded, *args), PROCESS.get()
        if process is not None and process.dies_at_work:
            network.network().crash(process, 0.0)
            raise network.DeadError
        return found

    put(UnboundedRows, change=change_or_die)


def _lack_room() -> None:
    """Have hosts now and then no room for copies: saves hold the shards, snapshots end."""
    copying = CopyBudget.copying
    # What this process uses is not the same each time.
    put(SystemMonitor, get_process_memory=lambda _: 0)

    def copying_or_not(budget: CopyBudget, nbytes: int) -> AbstractContextManager[str]:
        if CHANCE.random() < FULL_SHARE:
            return nullcontext("nothing is free, by chance")
        return copying(budget, nbytes)

    put(CopyBudget, copying=copying_or_not)


def _compile_aside() -> None:
    """Have loops cost the same whether they are compiled or kept from another time."""
    function = compiled.Module.function

    def get(module: compiled.Module, name: str) -> Callable[..., Any]:
        if name in module.functions:
            return function(module, name)
        with aside():
            return function(module, name)

    put(compiled.Module, function=get)


def _ask_at_once() -> None:
    """Have tasks that look for copies elsewhere not wait: all are in one thread."""

    async def has(link: Link, owner: str, key: str) -> bool:
        process = network.network().processes[owner.removeprefix("sim://")]
        host = None if process.is_dead else HOSTS.get(owner)
        return host is not None and host.snapshots.find(key) is not None

    run = Link.run

    def run_at_once(link: Link, function: Callable[[], Any]) -> Any:
        if not link.is_worker:
            return run(link, function)
        try:
            function().send(None)
        except StopIteration as end:
            return end.value
        raise RuntimeError("a task waits in a simulation")

    put(snapshots, _has=has)
    put(Link, run=run_at_once)


class World:
    """All processes of one simulation."""

    def __init__(self) -> None:
        self.network = network.Network()
        network.NETWORK.append(self.network)
        self.machines: dict[str, SimMachine] = {}
        self.workers: dict[str, Worker] = {}
        self.scheduler: Any = None
        self._n_workers = 0
        self._numbers: dict[str, int] = {}

    def process(self, machine: str, number: int = 0) -> Process:
        """Return a new process of a machine, perhaps with the number of a dead one."""
        if not number:
            number = self._numbers[machine] = self._numbers.get(machine, 0) + 1
        process = Process(f"{machine}:{number}")
        self.network.processes[process.name] = process
        return process

    @property
    def hub(self) -> Process:
        """The scheduler's process."""
        return self.network.processes["hub:1"]

    async def start_scheduler(self) -> None:
        """Start the scheduler."""
        process = self.process("hub")

        async def start() -> Scheduler:
            scheduler = Scheduler(
                host=f"sim://{process.name}",
                dashboard=False,
                dashboard_address=":0",
                validate=False,
            )
            started: Scheduler = await scheduler
            return started

        self.scheduler = await process.spawn(start())

    async def start_worker(self, machine: str, number: int = 0) -> Process:
        """Start a worker with a host that shares memory on its machine."""
        process = self.process(machine, number)
        # One that died at this address is no worker any more, this one none yet.
        self.workers.pop(process.name, None)
        self._n_workers += 1
        name = f"worker-{self._n_workers}"
        shared = self.machines.setdefault(machine, SimMachine(machine))
        plugin = HostPlugin(self.scheduler.id, SimView(shared, process))

        async def start() -> Worker:
            worker: Worker = await Worker(
                self.scheduler.address,
                host=f"sim://{process.name}",
                name=name,
                nthreads=1,
                dashboard=False,
                dashboard_address=":0",
                memory_limit="1 GiB",
                executor=InlineThreadPoolExecutor(),
                heartbeat_interval="1s",
                plugins=(plugin,),
            )
            return worker

        self.workers[process.name] = await process.spawn(start())
        return process

    async def start_client(self) -> tuple[Process, Client]:
        """Start a client on a machine of its own."""
        process = self.process("user")

        async def start() -> Client:
            client = Client(
                self.scheduler.address, asynchronous=True, set_as_default=False
            )
            started: Client = await client
            return started

        return process, await process.spawn(start())

    async def within(self, process: Process, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in a process and return what it returns."""
        result: T = await process.spawn(work)
        return result

    def link(self, node: Any) -> Any:
        """Return the way of a client or worker to the cluster."""
        return link_of(node)

    def status(self, process: Process) -> Status | None:
        """Return what the scheduler takes a worker for; None where it has left."""
        state = self.state(process)
        found: Status | None = None if state is None else state.status
        return found

    def state(self, process: Process) -> WorkerState | None:
        """Return the worker that the scheduler knows: another one where it came again."""
        found: WorkerState | None = self.scheduler.workers.get(f"sim://{process.name}")
        return found

    @property
    def live(self) -> list[Process]:
        """Workers that have not died."""
        found = (self.network.processes[name] for name in self.workers)
        return [process for process in found if not process.is_dead]
