"""Who restores a store that has lost a shard, as the directory has it: no host, no time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.core import Status
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from daskps.cluster.directory.directory import Directory
from daskps.cluster.directory.entry import (
    AGAIN_SECONDS,
    LEASE_SECONDS,
    StoreEntry,
)
from daskps.cluster.keys import anchor_key, label_of
from daskps.cluster.protocol.messages import identity
from daskps.errors import (
    ConsistencyError,
    DaskPSError,
    LayoutError,
    ProtocolError,
    StoreClosedError,
    StoreNotFoundError,
    StoreRestoredError,
)
from daskps.layout.arrays import Layout
from tests import virtual

WORKERS = ["tcp://a:1", "tcp://a:2"]
CLIENTS = ["one", "two", "three"]
LAYOUT = Layout.build({"w": ((8,), "float64")}, 2)
#: What its users are told of the checkpoint.
LOADED = {"checkpoint": "there/ckpt-7", "saved": 60, "version": 5, "lost": 2}
#: Of the memory of a worker, in bytes: some of the tests need one.
LIMIT = 10**8


class Hub:
    """A scheduler with workers that say yes to everything."""

    id = "hub"
    status = Status.running

    def __init__(self, limit: int = 0) -> None:
        self.handlers, self.extensions = dict[str, Any](), dict[str, Any]()
        self.tasks = dict[Any, Any]()
        self.workers = {
            name: SimpleNamespace(address=name, memory_limit=limit, resources={})
            for name in WORKERS
        }
        self.clients = {
            name: SimpleNamespace(wants_what=[]) for name in (*CLIENTS, "C")
        }
        self.events: list[Any] = []
        self.sent: list[tuple[str, str, str]] = []

    @property
    def running(self) -> list[Any]:
        return list(self.workers.values())

    def rpc(self, worker: str) -> Any:
        async def control(method: str, store: str = "", **about: Any) -> Any:
            self.sent.append((worker, method, store))
            value = identity() if method == "hello" else None
            return {"status": "OK", "value": value}

        return SimpleNamespace(daskps_control=control)

    def log_event(self, topic: str, event: Any) -> None:
        self.events.append(event)

    def client_desires_keys(self, keys: Any, client: str) -> None:
        self.clients[client] = SimpleNamespace(wants_what=[])

    def client_releases_keys(self, **names: Any) -> None: ...

    def actions(self) -> list[str]:
        return [event["action"] for event in self.events]


class Book:
    """A directory with one store that may be restored; clients that ask about it."""

    def __init__(self, *, session: bool = False, limit: int = 0) -> None:
        self.hub = Hub(limit)
        scheduler: Any = self.hub
        self.directory = Directory(scheduler)
        self.stores = self.directory.stores
        about = ("C", session, LAYOUT.to_wire(), tuple(WORKERS))
        nbytes = dict.fromkeys(WORKERS, limit // 3)
        entry = StoreEntry(
            *("first", "model", *about, nbytes, 0.5, b"", {}),
            recover_from=("there", "{}"),
            ready=True,
        )
        self.stores["first"] = entry
        if not session:
            self.stores._names["model"] = "first"
        self._numbers = iter(range(1, 10**6))

    def lose(self, uid: str = "first", shard: int = 0) -> None:
        """Have a shard of a store be lost, as a move that is over says."""
        entry = self.stores[uid]
        entry.lost[shard] = (entry.owners[shard], "died")

    async def ask(self, client: str, uid: str = "first", wait: float = 0.0) -> Any:
        asked = self.directory.recoveries.on_recover
        return await asked(uid, ("client", client), wait)

    async def make(
        self, client: str, token: int, uid: str = "first", params: Any = None
    ) -> str:
        """Reserve what takes the place of a store; return its uid."""
        made = f"made-{next(self._numbers)}"
        request = {
            "uid": made,
            "name": f"session-{made}",
            "client": client,
            "session": True,
            "params": params or [("w", [8], "float64")],
            "tables": [],
            "unbounded": [],
            "shards": None,
            "servers": "auto",
            "rules": b"",
            "optimizers": [],
            "slots": [],
            "overwrite": False,
            "memory_share": 1.0,
            "machine": True,
            "wait_seconds": 0.0,
            "replaces": (uid, token),
        }
        await self.stores.on_create(request)
        return made

    def commit(self, made: str, loaded: Any = None) -> None:
        anchors = [anchor_key(label_of("model", made), i) for i in range(2)]
        given = LOADED if loaded is None else loaded
        self.stores.on_commit(made, anchors, [], False, loaded=given)

    async def restore(self, client: str, uid: str = "first") -> str:
        turn = await self.ask(client, uid)
        assert turn["state"] == "yours"
        made = await self.make(client, turn["token"], uid)
        self.commit(made)
        return made


def test_one_restores_and_the_others_wait() -> None:
    """All hear of it at the same moment, and say whichever store has the place now."""
    book = Book()

    async def main() -> None:
        assert await book.ask("one") == {"state": "whole"}
        book.lose()
        turn = await book.ask("one")
        assert turn["state"] == "yours"
        assert turn["where"] == ("there", "{}")
        assert turn["hosts"] == WORKERS[1:]
        # Who restores it waits as well.
        waiting = [
            asyncio.ensure_future(book.ask(client, wait=1000.0))
            for client in ("one", "two", "three")
        ]
        made = await book.make("one", turn["token"])
        await asyncio.sleep(LEASE_SECONDS / 2)
        assert not any(task.done() for task in waiting)
        book.commit(made)
        for task in waiting:
            with pytest.raises(StoreRestoredError) as caught:
                await task
            error = caught.value
            assert (error.store, error.shard, error.worker) == ("model", 0, WORKERS[0])
            assert (error.checkpoint, error.version) == ("there/ckpt-7", 5)
            assert (error.lost, error.time.minute, error.uid) == (2, 1, made)
        entry = book.stores[made]
        assert (entry.name, entry.session, entry.client) == ("model", False, "C")
        assert entry.to_wire()["origin"] == "first"
        assert book.stores.on_find(name="model")["uid"] == made
        # A second loss: both former stores are known to be where the last one is.
        book.lose(made, 1)
        last = await book.restore("two", made)
        for uid in ("first", made):
            with pytest.raises(StoreRestoredError) as caught:
                await book.ask("three", uid)
            assert (caught.value.shard, caught.value.uid) == (1, last)
        assert book.stores[last].to_wire()["origin"] == "first"
        assert book.hub.actions().count("store-restored") == 2
        await book.stores.on_delete("first")
        assert not book.stores
        with pytest.raises(StoreClosedError, match="was deleted"):
            await book.ask("one", made)

    virtual.run(main())


def test_a_session_store_stays_its_clients() -> None:
    book = Book(session=True)

    async def main() -> None:
        book.lose()
        made = await book.restore("one")
        assert book.stores[made].session
        assert "model" not in book.stores._names
        # Who has restored it may go.
        book.directory.client_left("one")
        assert made in book.stores
        book.directory.client_left("C")
        assert not book.stores

    virtual.run(main())


@pytest.mark.parametrize("end", ["silence", "leaves", "fails"])
def test_another_one_is_chosen(end: str) -> None:
    """What the first one has made is freed, and what it says then is refused."""
    book = Book()

    async def main() -> None:
        book.lose()
        turn = await book.ask("one")
        made = await book.make("one", turn["token"])
        clock = asyncio.get_running_loop().time
        began = clock()
        # Before the other one: who leaves may have asked, and is not given it again.
        own = asyncio.ensure_future(book.ask("one", wait=1000.0))
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(book.ask("two", wait=1000.0))
        await asyncio.sleep(LEASE_SECONDS - 1)
        book.directory.recoveries.on_recovering("first", turn["token"])
        if end == "leaves":
            del book.hub.clients["one"]
            book.directory.client_left("one")
            with pytest.raises(ConsistencyError, match="has left"):
                await own
        elif end == "silence":
            own.cancel()
        elif end == "fails":
            give_up = book.directory.recoveries.on_recovery_failed
            give_up("first", turn["token"], "damaged")
            # Those that wait hear why; somebody tries again a little later.
            for task in (own, waiting):
                assert await task == {"state": "failed", "why": "damaged"}
            assert (await book.ask("two"))["state"] == "failed"
            await asyncio.sleep(AGAIN_SECONDS)
            waiting = asyncio.ensure_future(book.ask("two", wait=1000.0))
        after = await waiting
        assert after["state"] == "yours"
        assert after["token"] > turn["token"]
        if end == "silence":
            assert clock() - began == pytest.approx(2 * LEASE_SECONDS - 1)
        assert made not in book.stores
        with pytest.raises(ConsistencyError, match="silent"):
            book.directory.recoveries.on_recovering("first", turn["token"])
        with pytest.raises(ConsistencyError, match="silent"):
            await book.make("one", turn["token"])
        with pytest.raises(StoreClosedError):
            book.commit(made)
        book.commit(await book.make("two", after["token"]))

    virtual.run(main())


def test_what_is_found_again_is_not_replaced() -> None:
    book = Book()

    async def main() -> None:
        book.lose()
        turn = await book.ask("one")
        made = await book.make("one", turn["token"])
        book.stores["first"].settle([0])
        with pytest.raises(ConsistencyError, match="whole again"):
            book.commit(made)
        assert book.stores.on_find(name="model")["uid"] == "first"
        assert await book.ask("two") == {"state": "whole"}

    virtual.run(main())


def test_a_store_that_is_deleted_is_not_restored() -> None:
    book = Book()

    async def main() -> None:
        book.lose()
        turn = await book.ask("one")
        made = await book.make("one", turn["token"])
        waiting = asyncio.ensure_future(book.ask("two", wait=1000.0))
        await asyncio.sleep(1)
        await book.stores.on_delete("first")
        with pytest.raises(StoreClosedError, match="was deleted"):
            await waiting
        assert not book.stores
        with pytest.raises(StoreClosedError):
            book.commit(made)
        with pytest.raises(StoreClosedError, match="was deleted"):
            await book.make("one", turn["token"])

    virtual.run(main())


def test_what_is_left_makes_room_where_it_has_to() -> None:
    """Only then, and not where the store would not fit even so."""
    params = [("w", [LIMIT // 40], "float64")]
    book = Book(limit=LIMIT)

    async def main() -> None:
        book.lose()
        turn = await book.ask("one")
        await book.make("one", turn["token"])
        assert "drop" not in [method for _, method, _ in book.hub.sent]
        with pytest.raises(LayoutError, match="memory limit"):
            await book.make("one", turn["token"], params=[("w", [LIMIT], "float64")])
        assert book.stores["first"].lost.keys() == {0}
        made = await book.make("one", turn["token"], params=params)
        assert (WORKERS[1], "drop", "first") in book.hub.sent
        assert (WORKERS[0], "drop", "first") not in book.hub.sent
        assert book.stores["first"].lost.keys() == {0, 1}
        assert "made room" in book.stores["first"].lost[1][1]
        book.commit(made)

    virtual.run(main())


def test_servers_that_were_named_are_those_that_are_there() -> None:
    book = Book()
    gone = "tcp://gone:1"

    async def main() -> None:
        book.lose()
        book.stores["first"].asked_servers = [gone, WORKERS[1]]
        turn = await book.ask("one")
        assert turn["servers"] == WORKERS[1:]
        made = await book.make("one", turn["token"])
        # Another time the one that is gone may be back.
        assert book.stores[made].asked_servers == [gone, WORKERS[1]]
        # Where none is left, any are.
        book.commit(made)
        book.lose(made)
        book.stores[made].asked_servers = [gone]
        assert (await book.ask("one", made))["servers"] == "auto"

    virtual.run(main())


def test_what_was_loaded_is_said_in_full() -> None:
    book = Book()

    async def main() -> None:
        book.lose()
        turn = await book.ask("one")
        made = await book.make("one", turn["token"])
        for loaded in ({}, {**LOADED, "lost": "2"}, {**LOADED, "more": 1}):
            with pytest.raises(ProtocolError):
                book.commit(made, loaded)
        assert "first" in book.stores
        book.commit(made)

    virtual.run(main())


class Recovering(RuleBasedStateMachine):
    """Clients ask, make, commit, fail, fall silent and leave, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=virtual.VirtualLoop)
        self.book = Book()
        #: The store by its name; what clients believe is their turn, and have made.
        self.now = "first"
        self.deleted = False
        self.turns: dict[str, tuple[str, int]] = {}
        self.made: dict[str, str] = {}
        #: Who has the turn, and until when.
        self.holder, self.until = "", 0.0
        self.failed_until = 0.0

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def call(self, function: Any, *args: Any) -> Any:
        """Call what is no coroutine where the event loop runs."""

        async def work() -> Any:
            return function(*args)

        return self.run(work())

    @property
    def time(self) -> float:
        return self.runner.get_loop().time()

    @property
    def lost(self) -> bool:
        return not self.deleted and bool(self.book.stores[self.now].lost)

    def has_turn(self, client: str) -> bool:
        return self.lost and self.holder == client

    @initialize()
    def begin(self) -> None:
        self.run(asyncio.sleep(0))

    @precondition(lambda self: not self.deleted)
    @rule(shard=st.integers(0, 1))
    def lose(self, shard: int) -> None:
        self.book.lose(self.now, shard)

    @precondition(lambda self: self.lost)
    @rule()
    def find_again(self) -> None:
        self.book.stores[self.now].settle([0, 1])

    @rule(client=st.sampled_from(CLIENTS), wait=st.sampled_from([0.0, 3.0, 30.0]))
    def ask(self, client: str, wait: float) -> None:
        before = self.now
        if self.deleted:
            with pytest.raises(StoreClosedError):
                self.run(self.book.ask(client, before, wait))
            return
        began = self.time
        state = self.run(self.book.ask(client, before, wait))
        assert self.time <= began + wait
        if not self.lost:
            assert state["state"] == "whole"
        elif self.time < self.failed_until:
            assert state == {"state": "failed", "why": "why"}
        elif state["state"] == "yours":
            # Nobody else had it, or not any more.
            assert not self.holder or self.time >= self.until
            self.turns[client] = (before, state["token"])
            self.made.pop(client, None)
            self.holder, self.until = client, self.time + LEASE_SECONDS
        else:
            assert state["state"] == "under way"
            assert self.holder
            assert self.time < self.until

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def make(self, data: Any) -> None:
        client = data.draw(st.sampled_from(sorted(self.turns)))
        uid, token = self.turns[client]
        if self.has_turn(client) and uid == self.now and client not in self.made:
            self.made[client] = self.run(self.book.make(client, token, uid))
        elif not self.has_turn(client):
            with pytest.raises(DaskPSError):
                self.run(self.book.make(client, token, uid))

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def commit(self, data: Any) -> None:
        client = data.draw(st.sampled_from(sorted(self.made)))
        made, before = self.made.pop(client), self.now
        if not self.has_turn(client) or self.turns[client][0] != before:
            with pytest.raises(DaskPSError):
                self.call(self.book.commit, made)
            self.run(self.book.stores.on_close(made, undo=True))
            return
        self.call(self.book.commit, made)
        self.now, self.holder, self.failed_until = made, "", 0.0
        with pytest.raises(StoreRestoredError) as caught:
            self.run(self.book.ask("three", before))
        assert caught.value.uid == made

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def renew(self, data: Any) -> None:
        client = data.draw(st.sampled_from(sorted(self.turns)))
        uid, token = self.turns[client]
        recoveries = self.book.directory.recoveries
        if not self.deleted and self.holder == client and uid == self.now:
            self.call(recoveries.on_recovering, uid, token)
            self.until = self.time + LEASE_SECONDS
        else:
            with pytest.raises(DaskPSError):
                self.call(recoveries.on_recovering, uid, token)

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def fail(self, data: Any) -> None:
        client = data.draw(st.sampled_from(sorted(self.turns)))
        uid, token = self.turns.pop(client)
        recoveries = self.book.directory.recoveries
        if not self.deleted and self.holder == client and uid == self.now:
            self.call(recoveries.on_recovery_failed, uid, token, "why")
            self.holder, self.failed_until = "", self.time + AGAIN_SECONDS
        else:
            with pytest.raises(DaskPSError):
                self.call(recoveries.on_recovery_failed, uid, token, "why")
        self.made.pop(client, None)

    @rule(client=st.sampled_from(CLIENTS))
    def leave(self, client: str) -> None:
        self.call(self.book.directory.client_left, client)
        self.turns.pop(client, None)
        self.made.pop(client, None)
        if self.holder == client:
            self.holder = ""

    @rule(seconds=st.floats(0.1, 20))
    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @precondition(lambda self: not self.deleted and self.now != "first")
    @rule()
    def delete(self) -> None:
        self.run(self.book.stores.on_delete("first"))
        self.deleted, self.holder = True, ""

    @invariant()
    def one_store_has_the_name(self) -> None:
        ready = [uid for uid, of in self.book.stores.items() if of.ready]
        assert ready == [] if self.deleted else ready == [self.now]
        half = [uid for uid, of in self.book.stores.items() if not of.ready]
        # What nobody has the turn for any more is gone.
        assert len(half) <= 1
        if not self.holder:
            assert not half
        if self.deleted:
            with pytest.raises(StoreNotFoundError):
                self.book.stores.on_find(name="model")
        else:
            assert self.book.stores.on_find(name="model")["uid"] == self.now

    def teardown(self) -> None:
        self.book.directory.hosts.close()
        self.runner.close()


TestRecovering = Recovering.TestCase
TestRecovering.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
