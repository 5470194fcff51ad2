"""Second copies in a simulation: what becomes of shards and runs whose owners go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.cluster.directory.copies import SecondCopies
from daskps.cluster.directory.entry import Hosts
from daskps.cluster.directory.machines import SERVING
from daskps.cluster.host.coming import Coming
from daskps.cluster.host.node import HOSTS
from tests.shards.stating import content, used
from tests.simulator.ground import put

if TYPE_CHECKING:
    from concurrent.futures import Future

    from daskps.cluster.directory.entry import StoreEntry
    from daskps.shards.states import State
    from tests.simulator.oracles import Watch
    from tests.simulator.world import World


class Promotions:
    """Hears what the directory tells of copies.

    Attributes
    ----------
    n_promoted : int
        How many copies have taken over.
    n_gone_on : int
        How many runs went on to their end when a copy had taken over.
    """

    def __init__(self, world: World, watch: Watch) -> None:
        self._world, self._watch = world, watch
        self.n_promoted = self.n_gone_on = 0
        #: By name of a store that is trained: how many of these were in its run.
        self._in_run: dict[str, int] = {}
        #: Copies that an owner need not wait for any more.
        self._struck = set[str]()

    def follow(self) -> None:
        """Hear all from here on."""
        tell, strike, install = Hosts.tell, SecondCopies.strike, Coming.install

        def tell_and_hear(
            hosts: Hosts, action: str, entry: StoreEntry, **more: Any
        ) -> None:
            tell(hosts, action, entry, **more)
            self._world.network.note("event", action, entry.name, more.get("shards"))
            self._count(action, entry.name)
            if action == "shards-lost" and entry.n_copies > 1:
                for shard in more["shards"]:
                    self._lost(entry, shard)

        def strike_and_note(
            second: SecondCopies, entry: StoreEntry, shard: int, why: str
        ) -> Any:
            if (copy := entry.copies.get(shard)) is not None:
                self._struck.add(copy.move)
            return strike(second, entry, shard, why)

        def install_and_compare(
            coming: Coming, state: State, done: Future[None]
        ) -> None:
            install(coming, state, done)
            if state.goes_back:
                self._has_gone_back(coming)

        put(Coming, install=install_and_compare)
        put(Hosts, tell=tell_and_hear)
        put(SecondCopies, strike=strike_and_note)

    def _count(self, action: str, name: str) -> None:
        if action == "run-begun":
            self._in_run[name] = 0
        elif action == "shards-promoted":
            self.n_promoted += 1
            if name in self._in_run:
                self._in_run[name] += 1
        elif action == "run-fenced":
            self._in_run.pop(name, None)
        elif action == "run-ended":
            self.n_gone_on += self._in_run.pop(name, 0) > 0

    def check(self) -> None:
        """Find copies that have not what their owners have, when all is quiet."""
        directory = self._world.scheduler.extensions["daskps-directory"]
        for entry in directory.stores.values():
            for shard, copy in entry.copies.items():
                if copy.counts and shard not in entry.without_owner:
                    self._compare(entry, shard, copy.worker)

    def _compare(self, entry: StoreEntry, shard: int, worker: str) -> None:
        key, owner = (entry.uid, shard), HOSTS[entry.owners[shard]]
        mine = owner.shards[key].shard.segment
        coming = HOSTS[worker].coming[key]
        copy = coming.hosted.shard.segment
        what = f"the copy of shard {shard} of {entry.name}, at {worker}"
        if coming.mark != (mine.flip, mine.current.version):
            self._watch.wrong(f"{what}, is at {coming.mark}, not at flip {mine.flip}")
        elif used(mine) != used(copy):
            self._watch.wrong(f"{what}, has another record")
        elif content(mine, mine.flip) != content(copy, copy.flip):
            self._watch.wrong(f"{what}, has another content")

    def _has_gone_back(self, coming: Coming) -> None:
        """Find a copy that has not gone back with its owner, where that is there yet."""
        owner = HOSTS.get(coming.source)
        process = self._world.network.processes[coming.source.removeprefix("sim://")]
        shards = owner.shards.values() if owner and not process.is_dead else ()
        name, number = coming.hosted.name, coming.hosted.index
        for hosted in shards:
            if (hosted.name, hosted.index) != (name, number):
                continue
            mine, copy = hosted.shard.segment, coming.hosted.shard.segment
            is_there = coming.mark == (mine.flip, mine.current.version)
            if is_there and content(mine, mine.flip) != content(copy, copy.flip):
                what = f"the copy of shard {number} of {name}"
                self._watch.wrong(f"{what} has not gone back with its owner")

    def _lost(self, entry: StoreEntry, shard: int) -> None:
        """Find a shard that is lost although a worker that lives has all of it."""
        for process in self._world.live:
            host = HOSTS.get(f"sim://{process.name}")
            copy = None if host is None else host.coming.get((entry.uid, shard))
            # One that closes, or that Dask retires, refuses.
            stays = not process.is_stopped and self._world.status(process) in SERVING
            if copy is None or not stays or copy.move in self._struck:
                continue
            if copy.counts.is_set():
                self._watch.wrong(
                    f"shard {shard} of {entry.name} is lost, and {process.name} has a "
                    f"copy of it"
                )
