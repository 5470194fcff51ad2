"""Shards of one store under trainers and producers that do everything wrong.

Messages are delivered to each shard in any order, late, twice, or never. What a shard
must hold follows from what it acknowledged alone: that is the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from daskps.consistency import ASP, BSP, SSP
from daskps.errors import (
    ClockError,
    ConsistencyError,
    RunCancelledError,
    StaleGenerationError,
)
from daskps.layout.arrays import Layout
from daskps.shards import cut_requests, producers
from daskps.shards.cuts.cut import OWNER, Order, ShardReport, agree
from daskps.shards.deputy import NotHereError
from daskps.shards.memory.format import (
    CLOCK,
    GENERATION,
    LIVE,
    N_DUPLICATES,
    NEXT,
    ROUNDS,
    RUN,
    VERSION,
)
from daskps.shards.memory.segment import Segment
from daskps.shards.rounds.mailbox import Mailbox
from daskps.shards.shard import Shard
from daskps.shards.steps import (
    ADD,
    ASK,
    ASSIGN,
    BARRIER,
    GRADIENT,
    NO_WAIT,
    NOTHING,
    READ,
    Item,
    Ready,
    Step,
    Ticket,
    changes,
)
from tests.invariants import validate
from tests.seams import judge_all
from tests.shards.making import Adding, held, make

N_SHARDS = 2
LAYOUT = Layout.build(
    {
        "a": ((3,), "float64"),
        "b": ((), "float64"),
        "c": ((3,), "int64"),
        "z": ((0,), "float64"),
    },
    N_SHARDS,
)
RULED = {0, 1}
RULES = dict.fromkeys(RULED, Adding())
SLOTS = dict.fromkeys(RULED, (0.0,))
DURABLE = 1
shards_ = st.integers(0, N_SHARDS - 1)
ranks_ = st.integers(0, 2)


@dataclass
class Trainer:
    """What a trainer is at: its message on the way, and who has accepted it."""

    length: int
    clock: int = 0
    sequence: int = 0
    #: Which of its rank it is.
    attempt: int = 1
    #: Number of the push within its clock; the last one ticks.
    nth: int = 0
    accepted: set[int] = field(default_factory=set)
    finished: bool = False


@dataclass
class Run:
    id: int
    policy: Any
    reduce: str
    trainers: list[Trainer]
    #: Pushes per clock, the last of which ticks, and weight, by rank and clock.
    script: Any
    base: list[list[np.ndarray]]
    base_steps: list[list[int]]
    base_version: list[int]
    ended: set[int] = field(default_factory=set)
    #: Weights and steps by shard and round, once worked out.
    rounds: dict[tuple[int, int], Any] = field(default_factory=dict)
    #: Rank to shards that were told it has finished.
    told: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    ticks: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))


@dataclass
class Cut:
    """A cut in progress: who has reported, what follows, who has reached it."""

    name: str
    reports: dict[int, ShardReport] = field(default_factory=dict)
    orders: dict[int, Order] | None = None
    tickets: dict[int, Ticket] = field(default_factory=dict)
    marked_lost: set[int] = field(default_factory=set)
    #: What each shard that has reached the cut contained then.
    reached: dict[int, Any] = field(default_factory=dict)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        # The second shard is in memory that several processes may write.
        self.shards = [self.new(i, durable=i == DURABLE) for i in range(N_SHARDS)]
        self.weights = [
            [np.zeros_like(w) for w in s.segment.weights[0]] for s in self.shards
        ]
        self.steps = [[0] * len(w) for w in self.weights]
        self.versions = [0] * N_SHARDS
        #: Sequence numbers applied, by shard and producer or (run, rank).
        self.seen: dict[tuple[int, Any], set[int]] = defaultdict(set)
        self.next: dict[tuple[int, int], int] = defaultdict(int)
        self.outstanding: dict[int, tuple[int, Ticket]] = {}
        self.run: Run | None = None
        self.runs = 0
        self.cut: Cut | None = None
        self.cuts = 0

    def new(self, i: int, durable: bool) -> Shard:
        return make(LAYOUT, i, ruled=RULED, durable=durable)

    @initialize(together=st.lists(st.booleans(), min_size=4, max_size=4))
    def keep(self, together: list[bool]) -> None:
        """Who publishes keeps all weights in one buffer, or leaves them where they are."""
        for segment in self.segments():
            segment.is_together = together.pop()

    def segments(self) -> list[Segment]:
        """The segments of all who publish."""
        return [shard.segment for shard in self.shards]

    def held(self, shard: int, flip: int) -> list[np.ndarray]:
        """What a reader of a flip copies."""
        return [w.copy() for w in held(self.shards[shard].segment, flip)]

    # -- delivering ----------------------------------------------------------

    def deliver(self, shard: int, *steps: Step, owner: Any = None) -> list[Ticket]:
        tickets = [Ticket(step, owner=owner) for step in steps]
        for ticket in tickets:
            self.outstanding[id(ticket)] = shard, ticket
        self.collect(shard, self.shards[shard].submit(tickets))
        return tickets

    def collect(self, shard: int, done: list[Ticket]) -> None:
        """Take tickets that are done: each once, each from the shard it went to."""
        for ticket in done:
            where, _ = self.outstanding.pop(id(ticket))
            assert where == shard
            assert ticket.outcome is not None
            step = ticket.step
            if ticket.owner == "cut":
                self.reach(shard, ticket)
            if isinstance(ticket.outcome, Ready) and step.wait == READ:
                self.check_read(shard, step, ticket.outcome)
        for where, ticket in self.outstanding.values():
            if where == shard and ticket.owner != "cut":
                assert any(t is ticket for t in self.shards[shard].waiting)

    def check_read(self, shard: int, step: Step, ready: Ready) -> None:
        found = self.held(shard, ready.flip)
        if not step.run:
            assert ready.version >= step.at_least
            return
        assert self.run is not None
        clock = step.clock + step.tick
        if isinstance(self.run.policy, BSP):
            self.same(found, self.after(shard, clock)[0])
        elif isinstance(self.run.policy, SSP):
            assert clock - self.slowest(shard, clock) <= self.run.policy.staleness

    def slowest(self, shard: int, default: int) -> int:
        """Smallest clock of the trainers this shard waits for."""
        run = self.run
        assert run is not None
        live = [r for r in range(len(run.trainers)) if shard not in run.told[r]]
        return min((run.ticks[shard, r] for r in live), default=default)

    # -- what trainers send --------------------------------------------------

    def values(self, shard: int, number: int) -> tuple[Item, ...]:
        """Gradients that depend on the push, not on who sends it again."""
        found = []
        for position, piece in enumerate(self.shards[shard].segment.pieces):
            if piece.parameter.index in RULED and (number + piece.start) % 3:
                data = np.zeros(piece.size)
                data[number % piece.size] = 1 + number % 7
                found.append(Item(position, 0, data))
        return tuple(found)

    def message(self, shard: int, rank: int, wait: str = "no") -> Step:
        run = self.run
        assert run is not None
        trainer = run.trainers[rank]
        n, weight = run.script(rank, trainer.clock)
        tick = trainer.nth == n - 1
        number = 100 * rank + 7 * trainer.clock + trainer.nth
        return Step(
            GRADIENT if weight else NOTHING,
            self.values(shard, number) if weight else (),
            run=run.id,
            rank=rank,
            clock=trainer.clock,
            tick=tick,
            sequence=trainer.sequence,
            weight=weight,
            wait=wait,
        )

    def after(self, shard: int, clock: int) -> tuple[list[np.ndarray], list[int]]:
        """Weights and steps after so many rounds: what the scripts say, no more."""
        run = self.run
        assert run is not None
        key = shard, clock
        if key not in run.rounds:
            run.rounds[key] = self.simulate(run, shard, clock)
        weights, steps = run.rounds[key]
        return [w.copy() for w in weights], list(steps)

    def simulate(
        self, run: Run, shard: int, clock: int
    ) -> tuple[list[np.ndarray], list[int]]:
        weights = [w.copy() for w in run.base[shard]]
        steps = list(run.base_steps[shard])
        for now in range(clock):
            total = [np.zeros(len(w)) for w in weights]
            share = [0.0] * len(weights)
            for rank, trainer in enumerate(run.trainers):
                n, weight = run.script(rank, now)
                if now >= trainer.length or not weight:
                    continue
                touched = set()
                for nth in range(n):
                    for item in self.values(shard, 100 * rank + 7 * now + nth):
                        scale = weight if run.reduce == "mean" else 1.0
                        total[item.position] += scale * item.data
                        touched.add(item.position)
                for position in touched:
                    share[position] += weight
            for position, w in enumerate(weights):
                if share[position]:
                    by = share[position] if run.reduce == "mean" else 1.0
                    w += (total[position] / by).astype(w.dtype)
                    steps[position] += 1
        return weights, steps

    # -- outside a run -------------------------------------------------------

    @rule(
        shard=shards_,
        producer=st.integers(1, 3),
        jump=st.sampled_from([0, 0, 0, 1, 5, 63, 64, 70, -1, -2, -63, -64, -70]),
        kind=st.sampled_from([GRADIENT, ADD, ASSIGN]),
        k=st.integers(1, 3),
    )
    def push(self, shard: int, producer: int, jump: int, kind: str, k: int) -> None:
        """Push new, repeated and much older messages, several in one batch."""
        key = shard, producer
        first = max(0, self.next[key] + jump)
        sequences = range(first, first + k)
        steps = [self.outside(shard, producer, s, kind) for s in sequences]
        self.deliver(shard, *steps, owner="push")

    def answered(self, shard: int, ticket: Ticket) -> None:
        """Take the answer to a push, which a cut may have held for a while."""
        if self.in_rounds(shard):
            assert isinstance(ticket.outcome, ConsistencyError)
        else:
            self.expect(shard, ticket.step.producer, ticket)

    def outside(self, shard: int, producer: int, sequence: int, kind: str) -> Step:
        found = []
        for position, piece in enumerate(self.shards[shard].segment.pieces):
            index = piece.parameter.index
            if kind == GRADIENT and index not in RULED:
                continue
            if sequence % 4 == position:
                continue
            data = np.zeros(piece.size, piece.parameter.dtype)
            data[sequence % piece.size] = sequence % 5 + producer
            found.append(Item(position, 0, data))
        # All that it has left out was given up.
        seen = self.seen[shard, producer]
        oldest = max(seen, default=0) - 64
        left_out = sorted({*range(max(0, oldest), sequence)} - seen)
        who: dict[str, Any] = {"producer": producer, "sequence": sequence}
        return Step(kind, found, **who, given_up=tuple(left_out))

    def expect(self, shard: int, producer: int, ticket: Ticket) -> None:
        """Do to the model what an acknowledged push must have done to the shard."""
        sequence, seen = ticket.step.sequence, self.seen[shard, producer]
        assert isinstance(ticket.outcome, Ready)
        assert ticket.outcome.duplicate == (sequence in seen)
        if sequence not in seen:
            self.do(shard, ticket)
        seen.add(sequence)
        self.next[shard, producer] = max(seen) + 1

    def do(self, shard: int, ticket: Ticket) -> None:
        kind = ticket.step.kind
        for item in ticket.step.items:
            weights = self.weights[shard][item.position]
            if kind == ASSIGN:
                weights[:] = item.data
            else:
                weights += item.data
            self.steps[shard][item.position] += kind == GRADIENT
        self.versions[shard] += bool(ticket.step.items)
        assert ticket.version == self.versions[shard]

    @rule(shard=shards_, producer=st.integers(1, 3))
    def refused(self, shard: int, producer: int) -> None:
        """A stale generation, a rule that raises, an array that does not fit."""
        if self.shards[shard].cut is not None:
            return
        sequence = self.next[shard, producer]
        good = self.outside(shard, producer, sequence, GRADIENT)
        kwargs: dict[str, Any] = {"producer": producer, "sequence": sequence}
        bad = Step(GRADIENT, [Item(0, 0, np.ones(99))], **kwargs)
        # They tell of what was given up: without arrays such a step is applied.
        raising, stale = good._replace(lr=0.25), good._replace(generation=2)
        found = self.deliver(shard, bad, raising, stale)
        assert isinstance(found[2].outcome, StaleGenerationError)
        assert isinstance(found[0].outcome, (ValueError, ConsistencyError))
        if raising.items:
            assert isinstance(found[1].outcome, (ArithmeticError, ConsistencyError))
        elif not self.in_rounds(shard):
            self.expect(shard, producer, found[1])

    @rule(shard=shards_, ahead=st.integers(-1, 3))
    def pull(self, shard: int, ahead: int) -> None:
        at_least = self.shards[shard].segment.current.version + ahead
        (ticket,) = self.deliver(shard, Step(wait=READ, at_least=at_least))
        assert (ticket.outcome is None) == (ahead > 0)

    @rule(shard=shards_)
    def cancel(self, shard: int) -> None:
        """Callers go away."""
        waiting = [t for where, t in self.outstanding.values() if where == shard]
        gone = [t for t in waiting if t.owner != "cut"][::2]
        self.shards[shard].cancel(gone)
        for ticket in gone:
            del self.outstanding[id(ticket)]

    @rule(shard=shards_, producer=st.integers(1, 3))
    def close_producer(self, shard: int, producer: int) -> None:
        producers.close_producers(self.shards[shard].segment, [producer, 99])

    @rule(seed=st.integers(0, 10**6))
    def killed(self, seed: int) -> None:
        """A process is killed in an update; what it left unfinished is worthless."""
        segment = self.shards[DURABLE].segment
        if self.in_rounds(DURABLE):
            return  # the round before the last one would go, which trainers may need
        rng = np.random.default_rng(seed)
        segment.writing = segment.flip + 1
        left, record = segment.record(segment.flip + 1), segment.current
        left.fixed[:] = rng.integers(-9, 2000, len(left.fixed))
        left.ranks[:], left.producers[:], left.expired[:] = rng.integers(-9, 99, 3)
        left.kept[:] = rng.integers(-9, 99)
        for position, side in enumerate(record.weight_sides):
            weights = segment.weights[1 - side][position]
            weights[:] = rng.integers(0, 99, len(weights))
        left.slot_sides[:] = 1 - record.slot_sides
        for position in range(len(segment.pieces)):
            for slot in segment.slots_of(left, position):
                slot[:] = np.nan
        left.slot_sides[:] = rng.integers(-9, 9)

    # -- cuts ----------------------------------------------------------------

    @rule(shard=shards_)
    def begin_cut(self, shard: int) -> None:
        """A shard begins the cut in progress, or a new one."""
        if self.cut is None:
            self.cuts += 1
            self.cut = Cut(f"cut {self.cuts}")
        if shard not in self.cut.reports and self.shards[shard].cut is None:
            report = cut_requests.begin_cut(self.shards[shard], self.cut.name, shard)
            self.cut.reports[shard] = report
            if report.rounds < 0:
                # A producer that has ended brings nothing more, wherever a push of
                # its own has not arrived.
                reported = set(report.rows[:, OWNER].tolist())
                pushed = {p for p in (1, 2, 3) if self.seen[shard, p]}
                self.cut.marked_lost |= pushed - reported

    @precondition(lambda self: self.cut is not None and len(self.cut.reports) > 1)
    @rule(shard=shards_)
    def take_cut(self, shard: int) -> None:
        """A shard hears what it lacks."""
        cut = self.cut
        assert cut is not None
        if cut.orders is None:
            try:
                cut.orders = agree([cut.reports[i] for i in range(N_SHARDS)])
            except ConsistencyError:
                self.end_cut(range(N_SHARDS))
                return
        if shard not in cut.tickets:
            ticket = cut.tickets[shard] = Ticket(Step(), owner="cut")
            self.outstanding[id(ticket)] = shard, ticket
            order = cut.orders[shard]
            done = cut_requests.follow_order(
                self.shards[shard], cut.name, order, ticket
            )
            self.collect(shard, done)

    @precondition(lambda self: self.cut is not None and self.cut.orders is not None)
    @rule(shard=shards_, give_up=st.booleans(), k=st.integers(1, 9))
    def bring(self, shard: int, give_up: bool, k: int) -> None:
        """Steps that a shard lacks come at last, or their producers give them up."""
        cut = self.cut
        assert cut is not None
        assert cut.orders is not None
        for owner, sequence in cut.orders[shard].missing[:k]:
            if owner < 0:
                # Nothing more comes of a run that has ended.
                if self.run is not None:
                    self.train_one(-1 - owner, shard, "no")
            elif give_up:
                cut.marked_lost.add(owner)
                mark_lost = cut_requests.mark_owners_lost(
                    self.shards[shard], cut.name, [owner]
                )
                self.collect(shard, mark_lost)
            else:
                step = self.outside(shard, owner, sequence, ADD)
                self.deliver(shard, step, owner="push")

    @precondition(lambda self: self.cut is not None)
    @rule(shards=st.sampled_from([[0], [1], [0, 1], [1, 0]]))
    def end_cut(self, shards: Any) -> None:
        """Shards are released, in time or too early."""
        cut = self.cut
        assert cut is not None
        for shard in shards:
            self.collect(shard, cut_requests.end_cut(self.shards[shard], cut.name))
        if all(s.cut is None for s in self.shards):
            self.cut = None

    def reach(self, shard: int, ticket: Ticket) -> None:
        """Compare the shards that have reached the cut, step by step."""
        cut = self.cut
        assert cut is not None
        assert cut.orders is not None
        if isinstance(ticket.outcome, Exception):
            assert isinstance(ticket.outcome, ConsistencyError)
            return
        assert isinstance(ticket.outcome, Ready)
        order, flip = cut.orders[shard], ticket.outcome.flip
        record = self.shards[shard].segment.record(flip)
        if order.run:
            found = self.held(shard, flip)
            self.same(found, self.after(shard, order.rounds)[0])
            return
        of = {p: set(self.seen[shard, p]) for p in (1, 2, 3)}
        ranks = record.ranks[: record.fixed[5], NEXT].tolist()
        cut.reached[shard] = of, ranks
        if len(cut.reached) < N_SHARDS:
            return
        (a, ranks_a), (b, ranks_b) = cut.reached.values()
        for producer in {1, 2, 3} - cut.marked_lost:
            # Older ones are no longer told from repeats: nobody waits for them.
            first = max([0, *a[producer], *b[producer]]) - 63
            assert {s for s in a[producer] ^ b[producer] if s >= first} == set()
        if self.run is not None:
            told = self.run.told
            both = enumerate(zip(ranks_a, ranks_b, strict=True))
            assert all(x == y for rank, (x, y) in both if not told[rank])

    # -- runs ----------------------------------------------------------------

    @precondition(lambda self: self.run is None)
    @rule(
        policy=st.sampled_from([BSP(), BSP(), SSP(0), SSP(2), ASP()]),
        lengths=st.lists(st.integers(0, 4), min_size=1, max_size=3),
        reduce=st.sampled_from(["sum", "mean"]),
        seed=st.integers(0, 10**6),
        reset=st.booleans(),
    )
    def begin(self, policy, lengths, reduce, seed, reset) -> None:
        @cache
        def script(rank: int, clock: int) -> tuple[int, float]:
            rng = np.random.default_rng([seed, rank, clock])
            return int(rng.integers(1, 3)), float(rng.choice([0.0, 1.0, 2.0, 4.0]))

        self.runs += 1
        self.run = Run(
            1000 + self.runs,
            policy,
            reduce,
            [Trainer(n) for n in lengths],
            script,
            [[w.copy() for w in of] for of in self.weights],
            [[0] * len(of) if reset else list(of) for of in self.steps],
            list(self.versions),
        )
        for i, shard in enumerate(self.shards):
            begin = self.run.id, policy, len(lengths), reduce
            done = shard.begin_run(*begin, reset=reset)
            if reset:
                self.steps[i] = [0] * len(self.steps[i])
            self.collect(i, done)
            assert shard.begin_run(*begin, reset=reset) == []

    def in_rounds(self, shard: int) -> bool:
        run = self.run
        return (
            run is not None and isinstance(run.policy, BSP) and shard not in run.ended
        )

    @precondition(lambda self: self.run is not None)
    @rule(
        sends=st.lists(
            st.tuples(ranks_, shards_, st.sampled_from(["no", READ, BARRIER])),
            min_size=1,
            max_size=12,
        )
    )
    def train(self, sends) -> None:
        """Trainers send their messages to some shards, for the first time or again."""
        for rank, shard, wait in sends:
            self.train_one(rank, shard, wait)
            self.holds()

    @precondition(lambda self: self.run is not None)
    @rule(ranks=st.permutations(range(3)))
    def train_all(self, ranks) -> None:
        """All trainers send to all shards: a round goes through."""
        for rank in ranks:
            for shard in range(N_SHARDS):
                self.train_one(rank, shard, READ)
        self.holds()

    def train_one(self, rank: int, shard: int, wait: str) -> None:
        run = self.run
        assert run is not None
        rank %= len(run.trainers)
        trainer = run.trainers[rank]
        everywhere = trainer.accepted >= set(range(N_SHARDS)) - run.ended
        # Where a cut holds a round back, one that reads waits for it.
        if everywhere and not (self.cut and self.reads(rank)):
            self.go_on(rank)
        if trainer.finished or trainer.clock >= trainer.length:
            trainer.finished = True
            return
        (ticket,) = self.deliver(shard, self.message(shard, rank, wait))
        if shard in run.ended:
            assert isinstance(ticket.outcome, RunCancelledError)

    def reads(self, rank: int) -> bool:
        """Return whether a trainer of the run waits for what it reads."""
        assert self.run is not None
        steps = [ticket.step for _, ticket in self.outstanding.values()]
        return any((s.run, s.rank, s.wait) == (self.run.id, rank, READ) for s in steps)

    def go_on(self, rank: int) -> None:
        """A trainer all shards have accepted a message of turns to the next."""
        run = self.run
        assert run is not None
        trainer = run.trainers[rank]
        if trainer.clock < trainer.length:
            n, _ = run.script(rank, trainer.clock)
            tick = trainer.nth == n - 1
            trainer.sequence += 1
            trainer.nth = 0 if tick else trainer.nth + 1
            trainer.clock += tick
            trainer.accepted = set()

    @precondition(lambda self: self.run is not None)
    @rule(rank=ranks_, shard=shards_)
    def finish(self, rank: int, shard: int) -> None:
        run = self.run
        assert run is not None
        rank %= len(run.trainers)
        if run.trainers[rank].finished and shard not in run.ended:
            run.told[rank].add(shard)
            self.collect(shard, self.shards[shard].finish_rank(run.id, rank))

    @precondition(lambda self: self.run is not None)
    @rule(shard=shards_, late=st.integers(0, 1))
    def hear(self, shard: int, late: int) -> None:
        """A shard hears how many trainers have finished on all, maybe of fewer."""
        run = self.run
        assert run is not None
        told = [rank for rank, of in run.told.items() if shard in of]
        heard = [r for r in told if run.told[r] | run.ended >= set(range(N_SHARDS))]
        n_ranks = max(0, len(heard) - late)
        if shard not in run.ended:
            done = self.shards[shard].hear_finished(run.id, n_ranks)
            self.collect(shard, done)
            if n_ranks == len(told) and self.shards[shard].cut is None:
                # Nothing is left behind of what waited for that.
                assert self.shards[shard].segment.limit is None
                waiting = [t for t in self.shards[shard].waiting if not t.applied]
                rounds = self.shards[shard].rounds_of(run.id)
                assert all(t.step.clock != rounds for t in waiting if t.step.tick)

    @precondition(lambda self: self.run is not None)
    @rule(rank=ranks_)
    def restart(self, rank: int) -> None:
        """A trainer dies and starts again where the shard furthest behind says."""
        run = self.run
        assert run is not None
        rank %= len(run.trainers)
        trainer = run.trainers[rank]
        if trainer.finished or run.ended:
            return
        attempt = trainer.attempt + 1
        places = [s.run_state.resume_rank(run.id, rank, attempt) for s in self.shards]
        assert places == [
            s.run_state.resume_rank(run.id, rank, attempt) for s in self.shards
        ]
        clock, sequence = min(places)
        assert clock in (trainer.clock, trainer.clock - 1, trainer.clock + 1)
        run.trainers[rank] = Trainer(trainer.length, clock, sequence, attempt)

    @precondition(lambda self: self.run is not None)
    @rule(shard=shards_, also=st.booleans())
    def fence(self, shard: int, also: bool) -> None:
        run = self.run
        assert run is not None
        for i in range(N_SHARDS) if also else [shard]:
            if i not in run.ended:
                run.ended.add(i)
                self.collect(i, self.shards[i].end_run(run.id, "cancelled"))
                assert self.shards[i].end_run(run.id, "cancelled") == []
                assert self.shards[i].rounds_of(run.id) == -1
        if len(run.ended) == N_SHARDS:
            assert not any(t.step.run for _, t in self.outstanding.values())
            self.run = None

    @precondition(lambda self: self.run is not None)
    @rule(
        order=st.permutations(range(N_SHARDS)),
        sends=st.lists(st.tuples(ranks_, shards_), max_size=8),
        stuck=st.sampled_from([None, None, *range(N_SHARDS)]),
        ahead=st.sampled_from([None, *range(N_SHARDS)]),
        inherited=st.booleans(),
    )
    def settle(self, order, sends, stuck, ahead, inherited) -> None:
        """All shards are held, one after the other, and end with the same round."""
        run = self.run
        assert run is not None
        if run.ended or not isinstance(run.policy, BSP):
            return
        if ahead is not None:
            self.get_ahead(run, ahead)
        if stuck is not None:
            self.shards[stuck].run_state.stop(run.id, MemoryError("a round fails here"))
        goes_on = [i for i in order if i != stuck]
        self.catch_up(run, order, goes_on)
        for rank, i in sends:
            if i in goes_on:
                self.train_one(rank, i, READ)
        found = self.standings(order)
        first = min(s.rounds for s in found)
        version = max(s.version for s in found)
        version += any(s.rounds != first for s in found)
        for i in order:
            position = self.shards[i].run_state.find_position(run.id)
            assert position.rounds == first or position.has_last
            if inherited:
                self.interrupted(i, position.rounds != first)
            told = {"rounds": first, "version": version}
            self.collect(i, self.shards[i].end_run(run.id, "fenced", **told))
            assert self.shards[i].end_run(run.id, "fenced", **told) == []
            self.weights[i], self.steps[i] = self.after(i, first)
            self.versions[i] = version
            run.ended.add(i)
        assert not any(t.step.run for _, t in self.outstanding.values())
        self.run = None

    def get_ahead(self, run: Run, shard: int) -> None:
        """The last steps of a round reach one shard and no other."""
        for rank, trainer in enumerate(run.trainers):
            for i in (0, 1, 0, 1):
                self.train_one(rank, i, "no")
                n, _ = run.script(rank, trainer.clock)
                if trainer.nth == n - 1 and not trainer.accepted:
                    break
            self.train_one(rank, shard, "no")

    def catch_up(self, run: Run, order: Sequence[int], goes_on: Sequence[int]) -> None:
        """Let shards that are behind complete what the others have."""
        found = self.standings(order)
        for rank, i in product({r for s in found for r in s.finished}, goes_on):
            run.told[rank].add(i)
            self.collect(i, self.shards[i].finish_rank(run.id, rank))
        last = max(s.rounds for s in found)
        for i in order:
            self.collect(i, self.shards[i].hold_run(run.id, last))

    def standings(self, order: Sequence[int]) -> list[Any]:
        run = self.run
        assert run is not None
        for i in order:
            self.collect(i, self.shards[i].hold_run(run.id))
        return [self.shards[i].run_state.find_position(run.id) for i in order]

    def interrupted(self, shard: int, goes_back: bool) -> None:
        """A process is killed in the withdrawal, and its successor does it again."""
        segment = self.shards[shard].segment
        if goes_back and segment.is_durable:
            segment.withdraws = segment.writing = segment.flip + 1
            segment.record(segment.flip + 1).fixed[[VERSION, RUN]] = 99, 0

    # -- what must hold ------------------------------------------------------

    def same(self, found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)

    def follow(self, shard: int) -> None:
        raise NotImplementedError

    @invariant()
    def apart(self) -> None:
        """No shard has a round that the others have not, and another one before it."""
        if self.run is not None and not self.run.ended:
            rounds = [shard.rounds_of(self.run.id) for shard in self.shards]
            assert max(rounds) - min(rounds) <= 1

    @invariant()
    def holds(self) -> None:
        for i, shard in enumerate(self.shards):
            self.follow(i)
            validate(shard)
            if isinstance(shard, Both):
                validate(shard.deputy)
            record = shard.segment.current
            flip = shard.segment.flip
            self.same(self.held(i, flip), self.weights[i])
            assert record.fixed[VERSION] == self.versions[i]
            assert record.steps.tolist() == self.steps[i]
            # A slot adds up the numbers of the steps since it was zeroed.
            for position, n in enumerate(self.steps[i]):
                for slot in shard.segment.slots_of(record, position):
                    assert (slot == n * (n + 1) / 2).all()


class Shards(Machine):
    """The machine, with what the acknowledgements of trainers mean."""

    @initialize()
    def start(self) -> None:
        self.acknowledged: set[int] = set()

    def collect(self, shard: int, done: list[Ticket]) -> None:
        waiting = [t for where, t in self.outstanding.values() if where == shard]
        accepted = [t for t in waiting if t.applied and t not in done]

        # In the order in which they were applied: a cut lets pushes from outside and
        # trainers' steps go together. A repeat may be done before the push itself,
        # which waits for something; what expired did so by others. What has no items
        # leaves the version as it found it.
        def order(t: Ticket) -> tuple[bool, int, bool]:
            failed = isinstance(t.outcome, Exception)
            return t.duplicate or failed, t.version, not t.step.items

        for ticket in sorted([*done, *accepted], key=order):
            if ticket.owner == "push":
                self.answered(shard, ticket)
            else:
                self.acknowledge(shard, ticket)
        super().collect(shard, done)

    def acknowledge(self, shard: int, ticket: Ticket) -> None:
        run, step = self.run, ticket.step
        if not step.run or run is None or isinstance(ticket.outcome, Exception):
            assert not isinstance(ticket.outcome, ClockError)
            return
        trainer, key = run.trainers[step.rank], (shard, (run.id, step.rank))
        if (trainer.clock, trainer.sequence) == (step.clock, step.sequence):
            trainer.accepted.add(shard)
        # Under BSP a trainer that starts again has other numbers for the same step.
        again = isinstance(run.policy, BSP) and step.clock < run.ticks[shard, step.rank]
        new = step.sequence not in self.seen[key] and not again
        if new:
            assert not ticket.duplicate
            self.seen[key].add(step.sequence)
            if step.tick:
                run.ticks[shard, step.rank] = step.clock + 1
            if not isinstance(run.policy, BSP):
                self.apply_now(shard, step)

    def apply_now(self, shard: int, step: Step) -> None:
        for item in step.items:
            self.weights[shard][item.position] += step.weight * item.data
            self.steps[shard][item.position] += 1
        self.versions[shard] += bool(step.items)

    def follow(self, shard: int) -> None:
        """Bring the model to the round that the acknowledged ticks imply."""
        run = self.run
        if run is None or shard in run.ended:
            return
        record = self.shards[shard].segment.current
        live = [r for r in range(len(run.trainers)) if shard not in run.told[r]]
        if not isinstance(run.policy, BSP):
            for r in range(len(run.trainers)):
                assert record.ranks[r, CLOCK] == run.ticks[shard, r]
                assert record.ranks[r, LIVE] == (r in live)
            return
        most = max(run.ticks[shard, r] for r in range(len(run.trainers)))
        rounds = self.slowest(shard, most)
        if self.shards[shard].cut is not None and self.cut is not None:
            rounds = min(rounds, self.cut.reports[shard].rounds)
        assert record.fixed[ROUNDS] == rounds
        self.weights[shard], self.steps[shard] = self.after(shard, rounds)
        self.versions[shard] = run.base_version[shard] + sum(
            any(
                run.script(r, now)[1] and now < trainer.length
                for r, trainer in enumerate(run.trainers)
            )
            for now in range(rounds)
        )


class Both(Shard):
    """An owner that leaves steps in rounds to a deputy whenever it likes."""

    def __init__(self, segment: Segment, deputy: Shard) -> None:
        super().__init__(segment, RULES)
        self.deputy = deputy
        self.likes = np.random.default_rng(0)

    def submit(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        done: list[Ticket] = []
        for ticket in tickets:
            # Some ordinary steps take the route of those that are not.
            judge_all(self, self.likes.random() < 0.5)
            if self.sits(ticket):
                done.append(ticket)
            elif self.leaves(ticket.step):
                done += self.handed_back(self.deputy.submit([ticket]))
            else:
                done += super().submit([ticket])
        return done + super().submit([]) + self.wake()

    def sits(self, ticket: Ticket) -> bool:
        """Take an ordinary step without a ticket, here or at the deputy."""
        step = ticket.step
        if step.generation != self.generation or not changes(step):
            return False
        if step.run and not step.tick:
            return False
        if step.wait != NO_WAIT or self.likes.random() < 0.5:
            return False
        shard = self if self.likes.random() < 0.5 else self.deputy
        header = shard.segment.header
        n_repeats, version = header[N_DUPLICATES], shard.step(step)
        if version == ASK:
            return False
        ticket.duplicate = header[N_DUPLICATES] > n_repeats
        ticket.outcome = Ready(self.segment.flip, version, ticket.duplicate)
        ticket.applied, ticket.version = True, version
        return True

    def leaves(self, step: Step) -> bool:
        """Not what follows pushes that the owner has and nobody else knows of."""
        if self.round is None or not step.run or self.likes.random() < 0.5:
            return False
        parked = {t.step.rank for t in self.parked.tickets if not t.applied}
        ticks = step.tick or step.kind == NOTHING
        return ticks and step.rank not in {*parked, *self.round._unticked}

    def handed_back(self, done: list[Ticket]) -> list[Ticket]:
        """Take what the deputy did not."""
        found = []
        for ticket in done:
            if isinstance(ticket.outcome, NotHereError):
                ticket.outcome, ticket.applied = None, False
                found += super().submit([ticket])
            else:
                found.append(ticket)
        return found

    def wake(self) -> list[Ticket]:
        done = self.handed_back(self.deputy.submit([]))
        return done + super().submit([]) if done else done

    @property
    def waiting(self) -> list[Ticket]:
        return [*super().waiting, *self.deputy.parked.tickets]

    def cancel(self, tickets: Iterable[Ticket]) -> None:
        tickets = list(tickets)
        super().cancel(tickets)
        self.deputy.cancel(tickets)

    def begin_run(self, run, policy, n_ranks, reduce="mean", *, memory=None, **more):
        begun = self.rounds_of(run) >= 0
        nbytes = Mailbox.nbytes_of(self.segment.pieces, n_ranks, reduce)
        memory = np.zeros(nbytes, np.uint8) if memory is None else memory
        start = run, policy, n_ranks, reduce
        done = super().begin_run(*start, memory=memory, **more)
        if isinstance(policy, BSP) and not begun:
            self.deputy.run_state.attach_rounds(run, n_ranks, reduce, memory)
        return done + self.wake()

    def end_run(self, run, reason, error=None, **told):
        return super().end_run(run, reason, error, **told) + self.wake()

    def hold_run(self, run, limit=None, error=None):
        return super().hold_run(run, limit, error) + self.wake()

    def finish_rank(self, run, rank):
        return super().finish_rank(run, rank) + self.wake()

    def hear_finished(self, run, n_ranks):
        return super().hear_finished(run, n_ranks) + self.wake()


class Pairs(Shards):
    """The same of shards over whose memory two processes take turns."""

    def new(self, i: int, durable: bool) -> Shard:
        segment = Segment(LAYOUT, i, SLOTS, durable=True)
        segment.words[GENERATION] = 1
        same = Segment(LAYOUT, i, SLOTS, segment.buffer, durable=True)
        return Both(segment, Shard.as_deputy(same, RULES))

    def segments(self) -> list[Segment]:
        deputies = [shard.deputy.segment for shard in self.shards]  # type: ignore[attr-defined]  # of this module's shards
        return super().segments() + deputies

    @initialize(seed=st.integers(0, 10**6))
    def route(self, seed: int) -> None:
        for i, shard in enumerate(self.shards):
            shard.likes = np.random.default_rng([seed, i])  # type: ignore[attr-defined]  # of this module's shards


TestShards = Shards.TestCase
TestPairs = Pairs.TestCase
TestShards.settings = TestPairs.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_a_fence_where_one_shard_has_heard_that_a_rank_finished():
    """The other waits for it and fails in that round; a rank that only pushes goes on.

    A shard that were two rounds ahead would have kept but one, and its run could not
    end with that of the others.
    """
    state = Shards()
    try:
        state.keep(together=[False] * 4)
        state.start()
        state.begin(lengths=[0, 4], policy=BSP(), reduce="sum", reset=False, seed=30017)
        state.train(sends=[(0, 0, "no"), (1, 0, "no"), (1, 1, "no")])
        state.finish(rank=0, shard=1)
        state.train(sends=[(1, 1, "no")])
        state.settle(ahead=0, inherited=False, order=[0, 1], sends=[], stuck=0)
    finally:
        state.teardown()
