"""Shards without an owner, as the directory looks after them: fake workers and time."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import dask
import pytest
from distributed.comm.core import CommClosedError
from distributed.core import Status

from daskps.cluster.directory.copies import SecondCopies
from daskps.cluster.directory.entry import Copy, LeftBy, StoreEntry
from daskps.cluster.directory.move import END_SECONDS, ShardMoves
from daskps.cluster.protocol.reports import MEMORY_METRIC
from daskps.errors import ConsistencyError, ProtocolError, ShardLostError
from tests import virtual

if TYPE_CHECKING:
    from collections.abc import Callable

DEAD, FAR = "tcp://127.0.0.1:1", "tcp://127.0.0.2:1"
ONE, TWO = "tcp://127.0.0.1:2", "tcp://127.0.0.1:3"
TAKEN = {"name": "n", "nbytes": 99, "held": 10, "nonce": 1, "run": 0, "mailbox": None}


def said(sight: str, why: str = "") -> Any:
    return {"sight": sight, "why": why}


class Cluster:
    """A directory's adoptions, its workers, and what it has told whom.

    `answers` says for a worker and "adopt" or "look" what it answers: a dict for each
    shard, an exception, or a function of the time that returns one of these or awaits.
    """

    def __init__(self, *workers: str, n_shards: int = 1) -> None:
        self.workers = {
            w: SimpleNamespace(memory_limit=0, status=Status.running, metrics={})
            for w in workers
        }
        self.answers: dict[tuple[str, str], Any] = {}
        self.asked: list[tuple[float, str, str]] = []
        self.events: list[tuple[float, str, Any]] = []
        self.ended: list[tuple[float, Exception]] = []
        self.noted: list[str] = []
        # Their addresses, most of which have no memory, are many more than that.
        segments = [(i, f"{5:016x}-{i:016x}", 99, i) for i in range(n_shards)]
        self.entry = StoreEntry(
            *("u", "s", "client", False, {}, (DEAD,) * n_shards),
            *({}, 0.5, b"", {}, "cluster"),
            segments=segments,
            sizes=dict.fromkeys(range(n_shards), 10),
            ready=True,
        )
        self.stores = {"u": self.entry}
        runs: Any = SimpleNamespace(
            rounds_of=lambda _: None,
            for_owner=lambda _: {"rounds": None, "codecs": []},
            codecs_of=lambda _: [],
            tell_ended=lambda *_: asyncio.sleep(0),
            mailbox_moved=lambda *_: None,
            shards_away=lambda entry, shards, why: self.noted.append(why),
            fence_all=self.fence_all,
        )
        self.runs, scheduler = runs, cast("Any", self)
        hosts: Any = self
        self.moves = ShardMoves(scheduler, hosts, runs, self.stores)
        self.copies = SecondCopies(self.moves)

    status = Status.running

    @property
    def now(self) -> float:
        return round(asyncio.get_running_loop().time(), 3)

    # -- as the hosts --------------------------------------------------------

    async def control(self, worker: str, method: str, **more: Any) -> Any:
        self.asked.append((self.now, worker, method))
        answer = self.answers[worker, method]
        if callable(answer):
            answer = answer(self.now)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        if method == "move_own":
            return {**TAKEN, "shard": more["shard"], "generation": more["generation"]}
        return [
            {"shard": row[0], **answer}
            if "sight" in answer
            else {"shard": row[0], "generation": row[-1], **answer}
            for row in more.get("rows", ())
        ]

    def spawn(self, work: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(work)

    def has_worker(self, worker: str) -> bool:
        return worker in self.workers

    def fence_all(self, entry: StoreEntry, error: Exception, hit: Any = None) -> None:
        if hit is None:
            self.ended.append((self.now, error))

    def tell(self, action: str, entry: StoreEntry, **more: Any) -> None:
        self.events.append((self.now, action.removeprefix("shards-"), more))

    # -- what a test does ----------------------------------------------------

    def die(self) -> None:
        self.moves.worker_left(LeftBy(DEAD, "died"))

    def leaves(self, worker: str, names: list[str], memory: str = "1:1") -> None:
        """Have the last worker of a machine say what went with it."""
        self.moves.on_removed(worker, names, memory)
        self.workers.pop(worker, None)

    def told(self) -> list[tuple[float, str]]:
        return [(at, what) for at, what, _ in self.events]


def look_after(cluster: Cluster, until: float, then: Callable[[], Any] = int) -> None:
    """Let the owner die, and time pass."""

    async def watch() -> None:
        cluster.die()
        await asyncio.sleep(until)
        then()
        cluster.stores.clear()
        cluster.moves.store_gone(cluster.entry)
        await asyncio.sleep(60.0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others

    virtual.run(watch())


def test_a_slow_adopter_keeps_a_shard_away() -> None:
    """It compiles for 40 s; another worker sees the memory, in vain."""
    cluster = Cluster(ONE, TWO)

    async def late() -> Any:
        await asyncio.sleep(40.0)
        return TAKEN

    cluster.answers = {
        (ONE, "adopt"): lambda now: late(),
        (ONE, "look"): said("found"),
        (TWO, "look"): said("found"),
        (TWO, "adopt"): said("found", "its owner, process 7 of its machine, lives"),
    }
    look_after(cluster, 50.0)
    assert cluster.told() == [(5.0, "away"), (40.0, "adopted")]
    assert cluster.entry.owners == (ONE,)
    assert cluster.noted == [f"died; worker {ONE} takes long to take it over"]
    # Others are asked to adopt it once the first one takes very long.
    assert next(at for at, *who in cluster.asked if who == [TWO, "adopt"]) >= 15.0
    assert not cluster.entry.away


def test_an_owner_that_lives_keeps_its_shards_away_until_it_ends() -> None:
    """As one that hangs past worker-ttl: asked every second, and nothing is lost."""
    cluster = Cluster(ONE, n_shards=3)

    def answer(now: float) -> Any:
        lives = said("found", "its owner, process 7 of its machine, lives")
        return lives if now < 200.0 else TAKEN

    cluster.answers = {(ONE, "adopt"): answer}
    look_after(cluster, 250.0)
    assert [what for _, what in cluster.told()] == ["away", "adopted"]
    [_, (back, _)] = cluster.told()
    assert 200.0 <= back <= 201.0
    assert cluster.entry.generations == (2, 2, 2)
    # One message for all three.
    times = [at for at, *_ in cluster.asked]
    assert len(times) < 240
    assert all(b - a <= 1.001 for a, b in pairwise(times))


def test_a_run_waits_so_long_for_a_shard_that_is_away() -> None:
    cluster = Cluster(ONE)
    why = "process 9 of its machine has locked it"
    cluster.answers = {(ONE, "adopt"): said("found", why)}
    look_after(cluster, 400.0)
    assert cluster.told() == [(5.0, "away")]
    [(at, error)] = cluster.ended
    assert at == 300.0
    assert isinstance(error, ShardLostError)
    assert why in str(error)
    assert "run-away-timeout" in str(error)
    # The shard itself is not given up.
    assert cluster.entry.lost == {}


def test_without_a_sign_it_is_lost_and_comes_back_when_found() -> None:
    """Its machine is silent; then a worker of it comes that finds the memory."""
    cluster = Cluster(FAR)
    cluster.answers = {
        (FAR, "adopt"): said("absent", "no file"),
        (ONE, "adopt"): lambda now: TAKEN if now > 31.0 else ProtocolError("no host"),
    }

    def check() -> None:
        assert set(cluster.entry.lost) == {0}

    async def watch() -> None:
        cluster.die()
        await asyncio.sleep(30.0)
        check()
        cluster.workers |= Cluster(ONE).workers
        cluster.moves.worker_came()
        await asyncio.sleep(12.0)

    virtual.run(watch())
    assert [what for _, what in cluster.told()] == ["away", "lost", "adopted"]
    assert cluster.told()[1][0] == 10.0
    assert cluster.entry.lost == {}
    assert cluster.entry.generations == (2,)
    # Who is not on the machine is not asked twice.
    assert [at for at, *who in cluster.asked if who == [FAR, "adopt"]] == [0.0]


def test_workers_of_other_addresses_are_asked_one_after_the_other() -> None:
    """The memory may be in the tenth container, of which each has its own address."""
    others = [f"tcp://127.0.1.{i}:1" for i in range(10)]
    cluster = Cluster(*others)
    cluster.answers = {(w, "adopt"): said("absent", "no file") for w in others}
    cluster.answers[others[-1], "adopt"] = TAKEN
    look_after(cluster, 9.0)
    assert [worker for _, worker, _ in cluster.asked] == others
    assert cluster.entry.owners == (others[-1],)


def test_lost_at_once_where_its_machine_has_no_such_memory() -> None:
    """When all there have looked; who answers late is waited for."""
    cluster = Cluster(ONE, TWO, FAR)

    async def late() -> Any:
        await asyncio.sleep(3.0)
        return said("absent", "no file there")

    cluster.answers = {
        (ONE, "adopt"): said("absent", "no file here"),
        (TWO, "adopt"): lambda now: late(),
    }
    look_after(cluster, 9.0)
    [(at, what, more)] = cluster.events
    assert what == "lost"
    assert 3.0 <= at <= 4.5
    assert more["reason"] == "died; nobody could adopt it: no file there"


def test_a_worker_with_another_memory_does_not_say_that_a_shard_is_lost() -> None:
    """As containers of one address: a worker starts again in that of the shard."""
    cluster = Cluster(ONE)
    cluster.entry.memories[DEAD] = "1:1"
    cluster.workers[ONE].metrics = {MEMORY_METRIC: "2:2"}
    cluster.answers = {(ONE, "adopt"): said("absent", "no file"), (TWO, "adopt"): TAKEN}

    async def watch() -> None:
        cluster.die()
        await asyncio.sleep(3.0)
        assert not cluster.entry.lost
        cluster.workers |= Cluster(TWO).workers
        cluster.moves.worker_came()
        await asyncio.sleep(1.0)

    virtual.run(watch())
    assert cluster.told() == [(3.0, "adopted")]
    assert cluster.entry.owners == (TWO,)


def test_no_room_keeps_a_shard_away() -> None:
    """Somebody sees it, and somebody with room may come."""
    cluster = Cluster(ONE)
    cluster.workers[ONE].memory_limit = 1
    cluster.answers = {(ONE, "look"): said("found")}
    look_after(cluster, 100.0)
    assert cluster.told() == [(5.0, "away")]
    [why] = cluster.noted
    assert why.startswith(f"died; the shards for worker {ONE} need 10 bytes")
    assert {what for _, _, what in cluster.asked} == {"look"}


def test_a_worker_has_room_for_a_shard_that_it_let_go_of() -> None:
    """As one that is drained, where its neighbour dies before it has adopted it."""
    cluster = Cluster(DEAD)
    cluster.entry.nbytes[DEAD] = 10
    cluster.workers[DEAD].memory_limit = 30
    cluster.answers = {(DEAD, "adopt"): TAKEN, (DEAD, "look"): said("found")}

    async def drain() -> None:
        cluster.moves.begin(cluster.entry, [0], LeftBy(DEAD, "is drained"))
        await asyncio.sleep(3.0)

    virtual.run(drain())
    assert not cluster.entry.away
    assert cluster.entry.generations == (2,)
    assert cluster.entry.nbytes == {DEAD: 10}


def test_a_worker_of_the_same_address_is_asked_too() -> None:
    """It may hold the shard, and have answered meanwhile that it finds the memory."""
    cluster = Cluster(ONE, DEAD)
    cluster.answers = {(ONE, "adopt"): said("found"), (DEAD, "adopt"): TAKEN}
    look_after(cluster, 10.0)
    assert [by for _, by, _ in cluster.asked] == [ONE] * 4 + [DEAD]
    assert cluster.told()[-1][1] == "adopted"


def test_sizes_are_said_by_who_has_the_shards() -> None:
    """Later words of a worker that is gone count nothing."""
    entry = Cluster(ONE, n_shards=2).entry
    entry.nbytes = {DEAD: 20}
    for _ in range(2):
        assert entry.note_sizes(DEAD, [(0, 25), (1, 11), (7, 9)]) == [0, 1]
        assert (entry.nbytes, entry.sizes) == ({DEAD: 36}, {0: 25, 1: 11})
    assert entry.note_sizes(ONE, [(0, 99)]) == []
    entry.set_away([0], "died")
    assert entry.note_sizes(DEAD, [(0, 30)]) == []
    entry.uncharge({0, 1})
    # It has left, and has yet to send the other one.
    assert entry.note_sizes(DEAD, [(1, 12)]) == [1]
    assert (entry.nbytes, entry.sizes) == ({}, {0: 25, 1: 12})
    entry.install(ONE, [{**TAKEN, "shard": 0, "generation": 2, "held": 26}])
    assert (entry.nbytes, entry.sizes) == ({ONE: 26}, {0: 26, 1: 12})
    assert entry.note_sizes(ONE, [(0, 40)]) == [0]
    assert entry.nbytes == {ONE: 40}
    # A worker has come to the address of the one that died, and adopts the other one.
    entry.install(DEAD, [{**TAKEN, "shard": 0, "generation": 3}])
    entry.install(DEAD, [{**TAKEN, "shard": 1, "generation": 2}])
    assert entry.nbytes == {DEAD: 20}


@pytest.mark.parametrize("running", [True, False])
def test_lost_at_once_where_its_memory_was_private(running: bool) -> None:
    """It says so, unless the whole cluster is being closed."""
    cluster = Cluster(ONE)
    cluster.entry.segments = []
    cluster.status = Status.running if running else Status.closing
    look_after(cluster, 1.0)
    [(at, what, more)] = cluster.events
    assert (at, what) == (0.0, "lost")
    assert more["reason"].startswith("died")
    [(_, error)] = cluster.ended
    assert ("daskps.carriers.machine is false" in str(error)) is running
    assert not cluster.asked


def test_a_paused_worker_adopts_where_no_running_one_does() -> None:
    """The running one is asked first, and in turn with it; one that closes is not."""
    cluster = Cluster(TWO, ONE, FAR)
    cluster.workers[ONE].status = Status.paused
    cluster.workers[FAR].status = Status.closing_gracefully
    cluster.answers = {
        (TWO, "adopt"): said("found", "it has no more memory"),
        (ONE, "adopt"): lambda now: TAKEN if now > 0.2 else said("found", "locked"),
    }
    look_after(cluster, 5.0)
    asked = [who for _, who, _ in cluster.asked]
    assert asked == [TWO, ONE] * (len(asked) // 2)
    assert cluster.entry.owners == (ONE,)


@pytest.mark.parametrize("status", [Status.paused, Status.closing_gracefully])
def test_a_paused_worker_is_heard_before_a_shard_is_lost(status: Status) -> None:
    """Its machine's last one says that the memory is gone, and no closing one is asked."""
    cluster = Cluster(ONE)
    cluster.workers[ONE].status = status
    cluster.answers = {(ONE, "adopt"): said("absent", "no file there")}
    look_after(cluster, 20.0)
    lost_at, why = {
        Status.paused: (0.0, "no file there"),
        Status.closing_gracefully: (10.0, "no other worker of its machine runs"),
    }[status]
    assert [(at, what) for at, what in cluster.told() if what == "lost"] == [
        (lost_at, "lost")
    ]
    assert why in cluster.events[-1][2]["reason"]


def test_an_adopter_whose_answer_was_lost_is_asked_first() -> None:
    """It may have the memory, under a name of its own."""
    cluster = Cluster(ONE, TWO)
    cluster.answers = {
        (ONE, "adopt"): lambda now: TAKEN if now else OSError("the connection broke"),
        (TWO, "adopt"): said("absent"),
    }
    look_after(cluster, 5.0)
    assert [who for _, *who in cluster.asked] == [[ONE, "adopt"]] * 2
    assert cluster.entry.owners == (ONE,)


def test_an_adopter_whose_answers_were_all_lost_is_asked_again() -> None:
    """It has the memory, and who answers can only say that its owner lives."""
    cluster = Cluster(ONE, TWO)
    broken = OSError("the connection broke")
    cluster.answers = {
        (ONE, "adopt"): lambda now: TAKEN if now > 3.0 else broken,
        (TWO, "adopt"): said("found", "its owner, process 2 of its machine, lives"),
    }
    look_after(cluster, 60.0)
    # Both in turn: the other one can have it when that owner dies.
    asked = [who for _, who, _ in cluster.asked]
    assert asked[:7] == [ONE, ONE, TWO, ONE, TWO, ONE, TWO]
    assert cluster.entry.owners == (ONE,)
    assert cluster.told() == [(cluster.asked[-1][0], "adopted")]


def test_a_silent_adopter_is_a_stray() -> None:
    """It is told when the store ends: it may yet adopt it."""
    cluster = Cluster(ONE)

    async def never() -> None:
        await asyncio.sleep(80.0)
        raise OSError("it left")

    cluster.answers = dict.fromkeys(
        [(ONE, "adopt"), (ONE, "look")], lambda now: never()
    )
    strays: list[str] = []
    look_after(cluster, 50.0, lambda: strays.extend(cluster.entry.strays))
    assert strays == [ONE]
    assert cluster.told() == [(5.0, "away"), (10.0, "lost")]
    assert len(cluster.asked) == 2


def test_who_broke_off_is_a_stray() -> None:
    """As who is silent: it may have adopted the shard before."""
    cluster = Cluster(ONE)
    broken = OSError("the connection broke")
    cluster.answers = dict.fromkeys([(ONE, "adopt"), (ONE, "look")], broken)
    strays: list[str] = []
    look_after(cluster, 5.0, lambda: strays.extend(cluster.entry.strays))
    assert strays == [ONE]


def test_what_was_adopted_of_a_store_that_has_ended_is_freed() -> None:
    """Who has adopted it answers when nobody knows the store any more."""
    cluster = Cluster(ONE)

    async def late() -> Any:
        await asyncio.sleep(3.0)
        return TAKEN

    cluster.answers = {
        (ONE, "adopt"): lambda now: late(),
        (ONE, "drop"): said("found"),
    }
    look_after(cluster, 2.0)
    assert [what for _, what in cluster.told()] == []
    assert cluster.asked[-1] == (3.0, ONE, "drop")


def test_an_adopter_that_died_when_it_had_answered_owns_nothing() -> None:
    """Another one is asked, who finds the memory under its new name."""
    cluster = Cluster(ONE, TWO)

    def dies(now: float) -> Any:
        del cluster.workers[ONE]
        return TAKEN

    cluster.answers = {(ONE, "adopt"): dies, (TWO, "adopt"): TAKEN}
    look_after(cluster, 5.0)
    assert cluster.entry.owners == (TWO,)
    assert cluster.entry.generations == (2,)
    assert [what for _, what in cluster.told()] == ["adopted"]


def test_an_adopter_that_cannot_end_a_run_does_not_hold_up_the_rest() -> None:
    cluster = Cluster(ONE)
    cluster.answers = {
        (ONE, "adopt"): {**TAKEN, "run": 4},
        (ONE, "look"): said("found", "its owner lives"),
        (ONE, "end_run"): lambda now: asyncio.sleep(1000.0),
    }
    cluster.runs.how_over = lambda run: {"reason": "it is over"}
    look_after(cluster, 20.0)
    assert cluster.told() == [(END_SECONDS, "adopted")]


@pytest.mark.parametrize("leaves", [False, True])
def test_an_adopter_is_told_of_the_end_of_a_run_until_it_answers(leaves: bool) -> None:
    """Else its shard would stay in the run, and take no other step."""
    cluster = Cluster(ONE)
    lost = CommClosedError("the answer is lost")

    def ended(now: float) -> Any:
        if leaves and now > 5.0:
            cluster.workers.clear()
        return lost if leaves or now < 10.0 else {}

    cluster.answers = {(ONE, "adopt"): {**TAKEN, "run": 4}, (ONE, "end_run"): ended}
    cluster.runs.how_over = lambda run: {"reason": "it is over"}
    look_after(cluster, 30.0)
    assert cluster.told() == [(0.0, "adopted")]
    asked = [at for at, _, method in cluster.asked if method == "end_run"]
    assert asked == [float(i) for i in range(7 if leaves else 11)]


def test_a_new_owner_is_told_of_a_run_that_is_ending() -> None:
    """The former one may have answered for it, and the run waits for other shards."""
    cluster = Cluster(ONE)
    over: list[Any] = []

    def how_over(run: int) -> Any:
        return {"reason": "it is over"} if cluster.now > 4.5 else None

    def ended(now: float) -> Any:
        over.append(now)
        return {}

    cluster.answers = {(ONE, "adopt"): {**TAKEN, "run": 4}, (ONE, "end_run"): ended}
    cluster.runs.how_over = how_over
    cluster.runs.why_over = lambda run: "it has ended"
    look_after(cluster, 30.0)
    assert over == [5.0]


def test_lost_after_is_configured() -> None:
    cluster = Cluster()
    with dask.config.set({"daskps.lost-after": "20s", "daskps.run-away-timeout": None}):
        look_after(cluster, 30.0)
    assert cluster.told() == [(5.0, "away"), (20.0, "lost")]


def test_memory_that_was_renamed_goes_with_the_last_of_its_machine() -> None:
    """One that adopts the shard renames it, and leaves before it can say so."""
    cluster = Cluster(ONE, FAR)
    cluster.entry.memories[DEAD] = "1:1"
    cluster.answers = {
        (ONE, "adopt"): said("found", f"worker {ONE} is leaving too"),
        (FAR, "adopt"): said("absent"),
    }
    look_after(cluster, 1.0, lambda: cluster.leaves(ONE, [f"{6:016x}-{7:016x}"]))
    [(at, what, about)] = cluster.events
    assert (at, what) == (1.0, "lost")
    assert "as were all others of its machine" in about["reason"]


def test_memory_of_another_machine_stays_where_one_removes_its_own() -> None:
    """Also behind the same address, as of two containers; of one nobody has heard."""
    for worker, memory, of in (
        (FAR, "1:1", "1:1"),
        (ONE, "2:2", "1:1"),
        (ONE, "1:1", ""),
    ):
        cluster = Cluster(worker)
        cluster.entry.memories = {DEAD: of} if of else {}
        cluster.answers = {(worker, "adopt"): said("unknown")}
        cluster.answers[worker, "look"] = said("unknown")
        gone = [f"{6:016x}-{7:016x}"]
        look_after(cluster, 1.0, partial(cluster.leaves, worker, gone, memory))
        assert cluster.events == []


def test_memory_that_nobody_shares_does_not_go_with_a_machine() -> None:
    """A worker that is no member there hands its shard over just then."""
    cluster = Cluster(DEAD, ONE)
    cluster.entry.segments = []
    cluster.entry.memories[DEAD] = "1:1"

    async def watch() -> None:
        cluster.entry.set_away([0], "hands it over")
        cluster.leaves(ONE, [f"{6:016x}-{7:016x}"])

    virtual.run(watch())
    assert cluster.events == []


# -- second copies ---------------------------------------------------------------------


def with_copy(status: Status = Status.running) -> Cluster:
    """Return a cluster where another machine has a copy of the shard."""
    cluster = Cluster(FAR)
    cluster.workers[FAR].status = status
    cluster.entry.n_copies = 2
    cluster.entry.copies[0] = Copy(FAR, "m", 10, is_together=False, counts=True)
    found = dict.fromkeys(["move_own", "copy_on", "move_drop"], said("found"))
    cluster.answers = {(FAR, method): answer for method, answer in found.items()}
    cluster.answers[DEAD, "move_deposed"] = said("found")
    return cluster


def test_a_shard_is_not_lost_while_its_copy_takes_over() -> None:
    """The last worker of its machine says meanwhile that the memory is freed."""
    cluster = with_copy()
    [(_, name, *_)] = cluster.entry.segments

    def own(now: float) -> Any:
        cluster.leaves(DEAD, [name])
        return said("found")

    cluster.answers[FAR, "move_own"] = own
    look_after(cluster, 5.0)
    assert [what for _, what in cluster.told()] == ["promoted"]
    assert cluster.entry.owners == (FAR,)


def test_a_copy_that_leaves_with_its_owner_is_missed() -> None:
    """At once: else callers would wait for a shard that nobody looks for."""
    cluster = with_copy()
    cluster.answers[FAR, "move_own"] = OSError("nobody is there")

    async def watch() -> None:
        cluster.die()
        del cluster.workers[FAR]
        cluster.copies.worker_left(FAR)
        await asyncio.sleep(15.0)
        cluster.stores.clear()

    virtual.run(watch())
    assert [what for _, what in cluster.told()][-1] == "lost"
    assert set(cluster.entry.lost) == {0}


def test_a_copy_whose_worker_closes_does_not_take_over() -> None:
    """It would refuse, when the owner, which may live, has heard that it is none."""
    cluster = with_copy(Status.closing)
    cluster.answers[FAR, "look"] = cluster.answers[FAR, "adopt"] = said("absent")
    look_after(cluster, 5.0)
    assert {method for _, _, method in cluster.asked} <= {"look", "adopt"}
    assert cluster.copies.serves(cluster.entry, 0) is False


def test_an_adopter_that_is_asked_as_a_copy_takes_over_hears_that_it_has() -> None:
    """And gives its own up, which has less: else it would say again that it has it."""
    cluster = with_copy()
    cluster.workers[ONE] = SimpleNamespace(
        memory_limit=0, status=Status.running, metrics={}
    )

    async def late(answer: Any, seconds: float) -> Any:
        await asyncio.sleep(seconds)
        return answer

    cluster.answers |= {
        # It has no host yet, and then takes its time.
        (ONE, "adopt"): lambda now: (
            late(TAKEN, 10.0) if now >= 5.0 else ProtocolError("no host")
        ),
        (ONE, "look"): ProtocolError("no host"),
        (ONE, "move_deposed"): said("found"),
        (FAR, "look"): said("absent"),
        (FAR, "adopt"): said("absent"),
        (FAR, "move_own"): lambda now: late(said("found"), 4.0),
    }
    numbers, control = list[tuple[str, int]](), cluster.control

    async def note(worker: str, method: str, **more: Any) -> Any:
        if worker == ONE and method == "adopt":
            numbers.append((method, more["rows"][0][-1]))
        elif worker == ONE and method == "move_deposed":
            numbers.append((method, more["generation"]))
        return await control(worker, method, **more)

    cast("Any", cluster).control = note
    look_after(cluster, 40.0)
    assert [what for _, what in cluster.told()] == ["away", "promoted"]
    [(_, asked), (method, deposed)] = numbers[-2:]
    assert method == "move_deposed"
    assert asked < deposed == cluster.entry.generations[0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_that_takes_long_does_not_take_what_was_adopted(fails: bool) -> None:
    """Its worker leaves meanwhile, and might have become the owner."""
    cluster = with_copy()
    cluster.workers[ONE] = SimpleNamespace(
        memory_limit=0, status=Status.running, metrics={}
    )

    async def own() -> Any:
        await asyncio.sleep(2.0)
        cluster.entry.set_away([0], "it may yet send them")
        await asyncio.sleep(2.0)
        if fails:
            raise ConsistencyError("it leaves")
        return said("found")

    cluster.answers |= {
        (ONE, "adopt"): lambda now: TAKEN if now >= 6.0 else ProtocolError("no host"),
        (ONE, "look"): ProtocolError("no host"),
        (FAR, "look"): said("absent"),
        (FAR, "adopt"): said("absent"),
        (FAR, "move_own"): lambda now: own(),
    }
    look_after(cluster, 40.0)
    assert [what for _, what in cluster.told()] == ["away", "adopted"]
    assert cluster.entry.owners == (ONE,)
    assert cluster.entry.away == {0: "it may yet send them"}


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_takes_over_where_no_neighbour_has_room(fails: bool) -> None:
    """They see the memory for as long as it is there, and callers would wait as long."""
    cluster = with_copy()
    cluster.workers[ONE] = SimpleNamespace(
        memory_limit=1, status=Status.running, metrics={}
    )
    cluster.answers[ONE, "look"] = said("found")
    cluster.answers[FAR, "look"] = cluster.answers[FAR, "adopt"] = said("absent")
    if fails:
        cluster.answers[FAR, "move_own"] = ConsistencyError("it leaves")
    look_after(cluster, 60.0)
    if fails:
        assert cluster.told() == [(5.0, "away")]
        assert "memory limit" in cluster.entry.away[0]
    else:
        assert cluster.told() == [(5.0, "away"), (5.0, "promoted")]
        assert cluster.entry.owners == (FAR,)
