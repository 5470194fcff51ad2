"""Rows in the rounds of a BSP run: brought by ranks at several processes, summed by id."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from daskps.consistency import BSP
from daskps.errors import (
    ClockError,
    ContributionLostError,
    NoOptimizerError,
    ProtocolError,
    PushRejectedError,
)
from daskps.layout.arrays import Layout
from daskps.reduction import Node, fold
from daskps.shards import cut_requests
from daskps.shards.deputy import NotHereError
from daskps.shards.memory.format import GENERATION
from daskps.shards.memory.segment import Segment
from daskps.shards.rounds import arena
from daskps.shards.rounds.mailbox import Mailbox, MailboxTable
from daskps.shards.rounds.round import Round
from daskps.shards.shard import Shard
from daskps.shards.steps import (
    ASK,
    GRADIENT,
    MODEL,
    READ,
    Item,
    Ready,
    Step,
    Ticket,
)
from tests.invariants import validate
from tests.kernels.compiling import kept
from tests.shards import storing, unbounded_rowing
from tests.shards.rowing import EMB, AddingRows, W, contents, position, read

RUN, ROWS, DIM = 7, 11, 2
TABLES = {"emb": (ROWS, DIM, "float32"), "num": (5, 1, "int8")}
SLOTS = {W: (0.5,), EMB: (0.25,)}


class Momentum(AddingRows):
    """A rule whose result depends on every bit of the gradient and on the step."""

    def inplace(self, w, g, slots, scalars):
        slots[0][:] = np.float32(0.7) * slots[0] + g
        w -= np.float32(0.3 / scalars[0]) * slots[0]


RULES: Any = {W: AddingRows(), EMB: Momentum()}


def layout_of(n_shards: int) -> Layout:
    return Layout.build({"w": ((6,), "float32")}, n_shards, TABLES)


class Store:
    """The shards of a store in a run, each with an owner and a deputy."""

    def __init__(self, size: int, reduce: Any = "mean", n_shards: int = 1) -> None:
        self.size, self.reduce, self.layout = size, reduce, layout_of(n_shards)
        self.memory, self.owners, self.deputies = [], list[Shard](), list[Shard]()
        for index in range(n_shards):
            tables = self.layout.table_pieces[index]
            pieces = self.layout.pieces[index], size, reduce, tables
            memory = np.zeros(Mailbox.nbytes_of(*pieces), np.uint8)
            owner = Shard(self.segment(index), RULES, cache_dir=kept())
            owner.segment.words[GENERATION] = 1
            owner.begin_run(RUN, BSP(), size, reduce, memory=memory)
            self.memory.append(memory)
            self.owners.append(owner)
            self.deputies.append(self.deputy(index))

    def segment(self, index: int, buffer: Any = None) -> Segment:
        return Segment(self.layout, index, SLOTS, buffer, durable=True)

    def deputy(self, index: int) -> Shard:
        buffer = self.owners[index].segment.buffer
        deputy = Shard.as_deputy(self.segment(index, buffer), RULES, cache_dir=kept())
        self.attach(deputy, self.memory[index])
        return deputy

    def attach(self, shard: Shard, memory: Any) -> None:
        shard.run_state.attach_rounds(RUN, self.size, self.reduce, memory)

    def items(self, shard: Shard, given: Any, at: bool = False) -> tuple[Item, ...]:
        """What of rows (ids, values) by table, and of "w", a shard gets."""
        found = []
        for index, what in given.items():
            if index == W:
                (piece,) = shard.segment.pieces
                found.append(Item(0, 0, what[piece.start : piece.stop].copy()))
                continue
            ids, values = what
            ordinal = position(shard, index) - len(shard.segment.pieces)
            of = shard.segment.tables[ordinal].piece
            mine = (ids >= of.first_row) & (ids < of.first_row + of.n_rows)
            where = np.flatnonzero(mine)
            data = values if at else values[where]
            found.append(
                Item(
                    position(shard, index),
                    0,
                    np.ascontiguousarray(data).reshape(-1),
                    ids[where],
                    where if at else None,
                )
            )
        return tuple(found)

    def tables(self) -> Any:
        """All rows of the first table, over all shards."""
        parts = []
        for shard in self.owners:
            piece = shard.segment.tables[0].piece
            ids = range(piece.first_row, piece.first_row + piece.n_rows)
            parts.append(read(shard, EMB, ids))
        return np.concatenate(parts)


def round_of(shard: Shard) -> Round:
    assert shard.round is not None
    return shard.round


def told(rank: int, clock: int = 0, **said: Any) -> dict[str, Any]:
    return {
        "run": RUN,
        "rank": rank,
        "clock": clock,
        "sequence": clock,
        "tick": True,
    } | said


def step(store: Store, shard: Shard, given: Any, rank: int, **said: Any) -> Step:
    at = said.pop("at", False)
    return Step(GRADIENT, store.items(shard, given, at), **told(rank, **said))


def send(shard: Shard, *steps: Step) -> list[Ticket]:
    tickets = [Ticket(one) for one in steps]
    shard.submit(tickets)
    validate(shard)
    return tickets


def some(*pairs: tuple[int, float]) -> tuple[Any, Any]:
    """Rows full of a number, by id."""
    ids = np.array([row for row, _ in pairs], np.int64)
    values = np.array([[v] * DIM for _, v in pairs], "f4").reshape(-1, DIM)
    return ids, values


def rough(rng: Any, n: int) -> Any:
    """Ids that repeat, and values whose sum depends on the order of its additions."""
    values = rng.normal(size=(n, DIM)) * 10.0 ** rng.integers(-4, 5, (n, DIM))
    return rng.integers(0, ROWS, n), values.astype("f4")


def folded(nodes: dict[int, Node], size: int) -> Node:
    total = fold({(rank, rank + 1): node for rank, node in nodes.items()}, 0, size)
    assert total is not None
    return total


def expected(given: dict[int, Any], size: int, reduce: str) -> dict[int, Any]:
    """The gradient of each row, row by row along the tree of arrays."""
    rows = {int(i) for (ids, _), _ in given.values() for i in ids}
    leaves = {r: ({0: np.zeros(1)}, {0: weight}) for r, (_, weight) in given.items()}
    total = folded(leaves, size)[1][0] if leaves else 0.0
    sums = {}
    for row in sorted(rows):
        nodes = dict[int, Node]()
        for rank, ((ids, values), weight) in given.items():
            mine = [values[k] for k in np.flatnonzero(ids == row)]
            if not mine:
                continue
            once = mine[0].copy()
            for other in mine[1:]:
                once += other
            scaled = once * np.float32(weight) if reduce == "mean" else once
            nodes[rank] = {0: scaled}, {0: weight}
        found = folded(nodes, size)[0][0]
        sums[row] = found / np.float32(total) if reduce == "mean" else found
    return sums


def push(
    store: Store, what: Any, rank: int, rng: Any, *, held: bool, weight: float
) -> None:
    """Push to each shard at one of its processes, twice."""
    at = bool(rng.integers(2))
    for pair in zip(store.owners, store.deputies, strict=True):
        # A cut lets deputies only read.
        shard = pair[0 if held else rng.integers(2)]
        one = step(store, shard, what, rank, weight=weight, at=at)
        (ticket,) = send(shard, one)
        assert isinstance(ticket.outcome, Ready), ticket.outcome
        assert send(shard, one)[0].duplicate


def drawn(rng: Any) -> dict[int, Any]:
    what: dict[int, Any] = {}
    if rng.random() < 0.8:
        what[EMB] = rough(rng, int(rng.integers(0, 9)))
    if rng.random() < 0.5:
        what[W] = np.ones(6, "f4")
    return what


def cut_off(store: Store) -> None:
    for owner in store.owners:
        cut_requests.begin_cut(owner, "cut", 0)


def go_on(store: Store) -> None:
    for owner in store.owners:
        assert owner.rounds_of(RUN) == 0
        cut_requests.end_cut(owner, "cut")


# -- bits -----------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    st.data(),
    st.integers(1, 9),
    st.sampled_from(["mean", "sum"]),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 2**32 - 1),
)
def test_any_order_at_any_of_two_gives_the_bits_of_the_tree(
    data, size, reduce, n_shards, seed
):
    rng = np.random.default_rng(seed)
    store = Store(size, reduce, n_shards)
    order = data.draw(st.permutations(range(size)))
    finished = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    # One rank alone waits outside until its round can be applied.
    held = size > 1 and data.draw(st.booleans())
    given: dict[int, Any] = {}
    n_finished = 0
    if held:
        cut_off(store)
    for rank in order:
        if rank in finished:
            for owner in store.owners:
                owner.finish_rank(RUN, rank)
            n_finished += 1
            for owner in store.owners:
                owner.hear_finished(RUN, n_finished)
            continue
        weight = float(rng.choice([0.0, 1.0, 0.3, 32.0]))
        what = drawn(rng)
        push(store, what, rank, rng, held=held, weight=weight)
        if weight and EMB in what:
            given[rank] = what[EMB], weight
    if held:
        go_on(store)
    rows, slots = np.zeros((2, ROWS, DIM), "f4") + np.array([[[0]], [[0.25]]], "f4")
    for row, g in expected(given, size, reduce).items():
        Momentum().inplace(rows[row], g, (slots[row],), (1.0,))
    assert store.tables().tobytes() == rows.tobytes()
    for shard in (*store.owners, *store.deputies):
        assert shard.rounds_of(RUN) == 1
        # Of the table: the same on all shards, wherever its rows are.
        assert shard.segment.current.steps[-2] == bool(given)
        validate(shard)


def test_the_mean_is_of_the_ranks_that_brought_the_table():
    """Not of those which brought the row, nor of those which brought only an array."""
    store = Store(3)
    (owner,) = store.owners
    send(
        owner,
        step(store, owner, {EMB: some((0, 6.0))}, 0, weight=1.0),
        step(store, owner, {EMB: some()}, 1, weight=2.0),
        step(store, owner, {W: np.ones(6, "f4")}, 2, weight=4.0),
    )
    # 0.3 * (0.7 * 0.25 + 6 / 3)
    assert read(owner, EMB, [0])[0] == pytest.approx([-0.6525] * 2)
    assert owner.segment.current.steps.tolist() == [1, 1, 0]


def test_rows_beside_arrays_of_all_pieces():
    """These are summed as they come, which must not leave the rows behind."""
    store = Store(2, "sum")
    (owner,), (deputy,) = store.owners, store.deputies
    both: dict[int, Any] = {W: np.ones(6, "f4"), EMB: some((3, 1.0))}
    send(owner, step(store, owner, both, 0))
    arrays = [Item(0, 0, np.ones(6, "f4"))]
    assert deputy.step(Step(GRADIENT, arrays, RUN, 1, tick=True)) == 1
    assert owner.segment.weights[owner.segment.current.side][0].tolist() == [2] * 6
    assert read(owner, EMB, [3])[0] == pytest.approx([-0.3 * 1.175] * 2)
    arrays = [Item(1, 0, np.ones(6, "f4"))]
    assert deputy.step(Step(GRADIENT, arrays, RUN, 1, 1, tick=True, sequence=1)) == ASK


@pytest.mark.parametrize("n_shards", [1, 2, 3])
def test_unbounded_rows(n_shards):
    """A round gives rows to ids that have none; a round that is withdrawn takes them."""
    layout, found = unbounded_rowing.layout_of(n_shards, room=4096), dict[int, Any]()
    adding: Any = {W: AddingRows(), EMB: AddingRows()}
    for index in range(n_shards):
        owner = unbounded_rowing.made(layout, index)
        pieces, tables = layout.pieces[index], layout.table_pieces[index]
        memory = np.zeros(Mailbox.nbytes_of(pieces, 3, "mean", tables), np.uint8)
        owner.begin_run(RUN, BSP(), 3, "mean", memory=memory)
        deputy = Shard.as_deputy(
            Segment(
                layout,
                index,
                unbounded_rowing.SLOTS,
                owner.segment.buffer,
                durable=True,
            ),
            adding,
            cache_dir=kept(),
        )
        deputy.run_state.attach_rounds(RUN, 3, "mean", memory)
        ids = [-5, 2**62, *range(900)]
        given = {0: [(i, 6) for i in ids[:500]], 1: [(-5, 3), (-5, 3), (9, 12)], 2: []}
        for clock in range(2):
            for rank, pairs in given.items():
                one = unbounded_rowing.item(
                    owner, EMB, pairs if not clock else pairs[:1]
                )
                step = Step(GRADIENT, (one,), **told(rank, clock), weight=1.0 + rank)
                (ticket,) = send(deputy, step)
                if isinstance(ticket.outcome, NotHereError):
                    # It needs memory, which the owner alone takes.
                    (ticket,) = send(owner, step)
                assert isinstance(ticket.outcome, Ready), ticket.outcome
            if not clock:
                found |= unbounded_rowing.read(owner, EMB, ids) or {}
                flip = owner.segment.flip
        assert owner.rounds_of(RUN) == 2
        before = unbounded_rowing.read(owner, EMB, ids, flip)
        owner.hold_run(RUN)
        owner.end_run(RUN, "over", rounds=1, version=9)
        validate(owner)
        assert unbounded_rowing.read(owner, EMB, ids) == before
    # First 3; from a third of the batch 6, from two thirds of it 6 and 12.
    wanted = {i: [4.0] * 2 for i in ids[:500]} | {-5: [6.0] * 2, 9: [8.0] * 2}
    assert found == wanted


def test_a_round_without_room_for_its_rows_changes_nothing():
    """All trainers hear of it, and what there was stays."""
    layout = unbounded_rowing.layout_of(1, room=20)
    owner = unbounded_rowing.made(layout)
    pieces, tables = layout.pieces[0], layout.table_pieces[0]
    memory = np.zeros(Mailbox.nbytes_of(pieces, 2, "mean", tables), np.uint8)
    owner.begin_run(RUN, BSP(), 2, "mean", memory=memory)
    for clock, n in enumerate((8, 30)):
        for rank in range(2):
            pairs = [(i, 2) for i in range(rank, n, 2)]
            one = unbounded_rowing.item(owner, EMB, pairs)
            said = told(rank, clock)
            (ticket,) = send(owner, Step(GRADIENT, (one,), **said, weight=1.0))
    assert isinstance(ticket.outcome, PushRejectedError)
    assert "no room for a push of 30 rows of table 'emb', 22 of" in str(ticket.outcome)
    assert owner.rounds_of(RUN) == 1
    assert unbounded_rowing.read(owner, EMB, range(30)) == {
        i: [4.0] * 2 for i in range(8)
    }
    validate(owner)
    (ticket,) = send(owner, Step(GRADIENT, (), **told(0, 2), weight=1.0))
    assert isinstance(ticket.outcome, PushRejectedError)


# -- pushes before the tick ------------------------------------------------------------


@pytest.mark.parametrize("owned", [False, True])
def test_pushes_of_a_clock_have_the_bits_of_one(owned):
    rng = np.random.default_rng(5)
    # The first as it came, without repeats.
    pushes = [(np.array([4, 1, 7]), rough(rng, 3)[1])]
    pushes += [rough(rng, 6) for _ in range(2)]
    whole = tuple(np.concatenate(of) for of in zip(*pushes, strict=True))
    found = []
    for parts in (pushes, [whole]):
        store = Store(2)
        (owner,) = store.owners
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            one = step(store, owner, {EMB: part}, 0, sequence=i, tick=last)
            send(owner, one._replace(owned=owned, whole=len(parts) == 1))
            for item in one.items if not owned else ():
                # The caller's memory is used for something else.
                item.data[:] = np.nan
        send(owner, step(store, owner, {EMB: some((1, 1.0))}, 1))
        assert owner.rounds_of(RUN) == 1
        found.append(store.tables().tobytes())
    assert found[0] == found[1]


def test_pushes_before_the_tick_go_with_their_process():
    store = Store(2)
    (owner,), (deputy,) = store.owners, store.deputies
    send(deputy, step(store, deputy, {EMB: some((1, 9.0))}, 0, tick=False))
    last = step(store, owner, {EMB: some((2, 1.0))}, 0, sequence=1)
    (lost,) = send(owner, last)
    assert isinstance(lost.outcome, ContributionLostError)
    all_of_it = step(store, owner, {EMB: some((1, 9.0), (2, 1.0))}, 0, sequence=1)
    (taken,) = send(owner, all_of_it._replace(whole=True))
    assert not taken.duplicate
    send(owner, step(store, owner, {}, 1))
    assert (read(owner, EMB, [1, 2]) < 0).all()


def test_trainer_that_starts_again_pushes_its_rows_anew():
    store = Store(2, "sum")
    (owner,) = store.owners
    send(owner, step(store, owner, {EMB: some((1, 9.0))}, 0, tick=False))
    clock, after = owner.run_state.resume_rank(RUN, 0, attempt=1)
    assert clock == 0
    given = {EMB: some((1, 1.0))}
    send(owner, step(store, owner, given, 0, sequence=after))
    send(owner, step(store, owner, {}, 1))
    assert read(owner, EMB, [1])[0] == pytest.approx([-0.3 * 1.175] * 2)


# -- what is refused -------------------------------------------------------------------


def unchanged(store: Store, one: Step, error: type[Exception], match: str) -> None:
    (owner,) = store.owners
    round_of(owner).find_table()
    before, memory = contents(owner), store.memory[0].copy()
    (ticket,) = send(owner, one)
    assert isinstance(ticket.outcome, error)
    assert match in str(ticket.outcome)
    assert contents(owner) == before
    assert (store.memory[0] == memory).all()


def test_rows_without_room_are_refused_before_anything_is_stored(monkeypatch):
    monkeypatch.setattr(arena, "MOST_PUSHED_ROWS", 5)
    store = Store(3, "sum")
    (owner,) = store.owners
    three = {EMB: some((0, 1), (1, 1), (2, 1))}
    send(owner, step(store, owner, three, 0))
    unchanged(store, step(store, owner, three, 1), PushRejectedError, "has 3 of other")
    six = {EMB: some(*((i, 1) for i in range(6)))}
    before_tick = step(store, owner, six, 2, tick=False)
    unchanged(store, before_tick, PushRejectedError, "it takes 5 of all")
    # Repeats take no room; a rank that sits out takes none either.
    two = {EMB: some((4, 1), (4, 1), (3, 1))}
    send(owner, step(store, owner, two, 1))
    send(owner, step(store, owner, six, 2, weight=0.0))
    assert owner.rounds_of(RUN) == 1
    # The next round begins with all of it.
    send(owner, step(store, owner, three, 0, clock=1))


def test_functions_models_and_tables_without_a_rule_are_refused():
    given = {EMB: some((0, 1.0))}
    for reduce in ("mean", np.median):
        store = Store(2, reduce)
        (owner,) = store.owners
        one = step(store, owner, given, 0)
        if callable(reduce):
            unchanged(store, one, PushRejectedError, "takes whole arrays")
            continue
        unchanged(store, one._replace(kind=MODEL), PushRejectedError, "averaged")
        num = Item(2, 0, np.ones(1, np.int8), np.zeros(1, np.int64))
        ruleless = one._replace(items=(num,))
        unchanged(store, ruleless, NoOptimizerError, "'num'")
        (item,) = one.items
        twice = one._replace(items=(item, item))
        unchanged(store, twice, PushRejectedError, "twice")
        nan = item._replace(data=np.full(DIM, np.nan, "f4"))
        unchecked = one._replace(items=(nan,), check=True)
        unchanged(store, unchecked, PushRejectedError, "NaN")
        outside = item._replace(ids=np.array([ROWS], np.int64))
        bad = one._replace(items=(outside,))
        unchanged(store, bad, PushRejectedError, f"ids from {ROWS} to {ROWS}")


def test_memory_is_that_of_slices_and_of_what_the_arenas_hold():
    layout = layout_of(1)
    pieces, tables = layout.pieces[0], layout.table_pieces[0]
    bare = Mailbox.nbytes_of(pieces, 2, "mean")
    of_rows = Mailbox.nbytes_of(pieces, 2, "mean", tables) - bare
    # 22 rows with their ids, none of whole numbers, and the tables of words.
    assert 192 + 192 <= of_rows <= 192 + 192 + 2 * 4096
    assert Mailbox.nbytes_of(pieces, 2, np.median, tables) - bare <= 4096
    store = Store(2)
    with pytest.raises(ProtocolError, match="arenas"):
        Mailbox(pieces, 2, "mean", store.memory[0]).check(RUN)


# -- faults ---------------------------------------------------------------------------


def test_round_that_is_held_is_applied_or_withdrawn_with_its_rows():
    store = Store(2, "sum")
    (owner,) = store.owners
    send(owner, *(step(store, owner, {EMB: some((r, 1.0))}, r) for r in (0, 1)))
    before, slots = store.tables(), owner.segment.tables[0].slots[0].copy()
    one = {EMB: some((0, 1.0), (5, 2.0))}
    send(owner, step(store, owner, one, 0, clock=1))
    owner.hold_run(RUN)
    owner.submit([Ticket(step(store, owner, one, 1, clock=1))])
    assert (store.tables() == before).all()
    owner.hold_run(RUN, 2)
    assert owner.rounds_of(RUN) == 2
    assert not (store.tables() == before).all()
    owner.end_run(RUN, "over", rounds=1, version=9)
    validate(owner)
    assert (store.tables() == before).all()
    assert (owner.segment.tables[0].slots[0] == slots).all()
    assert owner.segment.current.steps.tolist() == [0, 1, 0]


def test_round_that_cannot_be_applied_is_left_to_the_owner():
    class Raising(Momentum):
        def scalars(self, step, lr=None, epoch=None, factor=0):
            raise ArithmeticError("this schedule raises")

    store = Store(2)
    (owner,), (deputy,) = store.owners, store.deputies
    raising: Any = {EMB: Raising()}
    for shard in (owner, deputy):
        shard._planner._bindings = raising
    one = {EMB: some((0, 1.0))}
    send(owner, step(store, owner, one, 0))
    before, memory = contents(owner), store.memory[0].copy()
    (ticket,) = send(deputy, step(store, deputy, one, 1))
    assert isinstance(ticket.outcome, NotHereError)
    assert contents(owner) == before
    (ticket,) = send(owner, ticket.step)
    assert isinstance(ticket.outcome, ArithmeticError)
    words = round_of(owner).mailbox.tables[0].words.nbytes * 2 + 128
    assert (store.memory[0][:words] == memory[:words]).all()


def test_readers_get_the_round_of_their_clock_and_no_newer_one():
    """A trainer that starts again reads the round before the last one."""
    store = Store(2, "sum")
    (owner,) = store.owners
    seen = [store.tables()]
    for clock in range(3):
        for rank in (0, 1):
            given = {EMB: some((clock, 1.0), (rank, 2.0))}
            send(owner, step(store, owner, given, rank, clock=clock))
        seen.append(store.tables())
    for clock, wanted in enumerate(seen):
        (ticket,) = send(owner, Step(run=RUN, rank=0, clock=clock, wait=READ))
        if clock < 2:
            assert isinstance(ticket.outcome, ClockError)
            continue
        ready = ticket.outcome
        assert isinstance(ready, Ready)
        assert ready.exact
        found = read(owner, EMB, range(ROWS), ready.flip)
        assert found.tobytes() == wanted.tobytes()


# -- a process dies after any store ----------------------------------------------------


def states_of(store: Store, one: Step, index: int = 0) -> list[tuple[str, Any, Any]]:
    """Segment and mailboxes of a shard after each store of one step."""
    owner, memory = store.owners[index], store.memory[index]
    found: list[tuple[str, Any, Any]] = []

    class Both(storing.Stores):
        def note(self, label: str) -> None:
            found.append((label, self._buffer.copy(), memory.copy()))

    def noted(owner: Any, name: str, label: str, patch: Any) -> None:
        method = getattr(owner, name)

        def after(*args: Any) -> Any:
            result = method(*args)
            stores.note(label)
            return result

        patch.setattr(owner, name, after)

    def half(self: Any, taken: Any, came: Any, scale: float) -> Any:
        span = place(self, taken, came, scale)
        kept = self._rows[span.start : span.start + span.n].copy()
        self._rows[span.start : span.start + span.n] = np.nan
        stores.note("arena half")
        self._rows[span.start : span.start + span.n] = kept
        stores.note("arena")
        return span

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storing, "Stores", Both)
        with storing.watched(owner.segment) as stores:
            place = arena.Arena.place
            patch.setattr(arena.Arena, "place", half)
            noted(MailboxTable, "note_rows", "table", patch)
            shard = Shard(owner.segment, RULES, cache_dir=kept())
            store.attach(shard, memory)
            mailbox = round_of(shard).mailbox
            words: Any = storing.Words(mailbox.words, stores, "mailbox")
            mailbox.words = words
            shard.submit([Ticket(one)])
    return found


@pytest.mark.parametrize("last", [False, True])
def test_killed_after_any_store(last):
    """Who comes next has the rank in the round with its rows, or takes it again."""
    one = {EMB: some((1, 1.0), (4, 2.0), (1, 1.0))}
    both = {EMB: some((4, 4.0), (2, 8.0)), W: np.ones(6, "f4")}
    wanted = Store(2)
    (owner,) = wanted.owners
    opened = [step(wanted, owner, given, r) for r, given in ((0, both), (1, one))]
    steps = [
        *opened,
        step(wanted, owner, both, 1, clock=1, weight=3.0),
        step(wanted, owner, one, 0, clock=1),
    ]
    send(owner, *steps[: 3 + last])
    after = contents(owner), owner.segment.flip
    send(owner, *steps[3 + last :])
    store = Store(2)
    send(store.owners[0], *steps[: 2 + last])
    states = states_of(store, steps[2 + last])
    labels = {label.split(" ")[0] for label, *_ in states}
    assert labels >= ({"row", "undo", "header"} if last else {"mailbox", "table"})
    assert "arena" in labels
    seen = set[bytes]()
    for label, buffer, memory in states:
        if (both_of := buffer.tobytes() + memory.tobytes()) in seen:
            continue
        seen.add(both_of)
        heir = Shard(store.segment(0, buffer), RULES, cache_dir=kept())
        store.attach(heir, memory)
        heir.take_over()
        (ticket,) = send(heir, steps[2 + last])
        assert not isinstance(ticket.outcome, Exception), label
        assert heir.segment.flip == after[1], label
        if last:
            assert contents(heir) == after[0], label
            assert read(heir, EMB, [1], heir.segment.flip - 1) is not None
        send(heir, *steps[3 + last :])
        assert contents(heir) == contents(owner), label


def test_what_died_on_its_way_into_a_round_is_not_in_it():
    """Its trainer may never come again."""
    given = {EMB: some((1, 1.0), (4, 2.0))}
    store, others = Store(2, "sum"), {EMB: some((1, 8.0))}
    (owner,) = store.owners
    found = set()
    for label, buffer, memory in states_of(store, step(store, owner, given, 0)):
        heir = Shard(store.segment(0, buffer), RULES, cache_dir=kept())
        store.attach(heir, memory)
        heir.take_over()
        is_in = label.startswith("mailbox") and round_of(heir).next_sequences[0] > 0
        heir.finish_rank(RUN, 0)
        send(heir, step(store, heir, others, 1))
        assert heir.rounds_of(RUN) == 1
        wanted = Momentum(), np.zeros(DIM, "f4"), np.full(DIM, 0.25, "f4")
        wanted[0].inplace(
            wanted[1], np.float32(9.0 if is_in else 8.0), wanted[2:], (1.0,)
        )
        assert (read(heir, EMB, [1])[0] == wanted[1]).all(), label
        assert bool(read(heir, EMB, [4]).any()) == is_in, label
        found.add(is_in)
    assert found == {False, True}


# -- all of it, in any order -----------------------------------------------------------

SIZE, N_SHARDS = 3, 2
PAIRS = st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(-9, 9)), max_size=4)


class Rounds(RuleBasedStateMachine):
    """Trainers and owners that die, beside plain arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(SIZE, "mean", N_SHARDS)
        self.rows, self.slots = np.zeros((ROWS, DIM), "f4"), np.full((ROWS, DIM), 0.25)
        self.slots = self.slots.astype("f4")
        self.before, self.round, self.n_steps = self.rows.copy(), 0, 0
        self.numbers, self.attempts = [0] * SIZE, [1] * SIZE
        #: What each rank has pushed in the open round, and which of them ticked.
        self.pushed: list[list[Any]] = [[] for _ in range(SIZE)]
        self.ticked: set[int] = set()
        self.last: tuple[int, list[Step]] | None = None

    def steps(self, rank: int, what: Any, **said: Any) -> list[Step]:
        number, self.numbers[rank] = self.numbers[rank], self.numbers[rank] + 1
        given = {} if what is None else {EMB: what}
        told = {"clock": self.round, "sequence": number, "weight": 1.0 + rank, **said}
        owners = self.store.owners
        return [step(self.store, owner, given, rank, **told) for owner in owners]

    def free(self, rank: int) -> int | None:
        """A rank that has not ticked, from this one on."""
        ranks = [(rank + i) % SIZE for i in range(SIZE)]
        return next((r for r in ranks if r not in self.ticked), None)

    @rule(rank=st.integers(0, SIZE - 1), pairs=PAIRS)
    def push(self, rank: int, pairs: Any) -> None:
        one = self.free(rank)
        if one is not None:
            self.take(one, some(*pairs), tick=False)

    @rule(
        rank=st.integers(0, SIZE - 1),
        pairs=st.none() | PAIRS,
        owner=st.booleans(),
        moment=st.none() | st.integers(0, 400),
        which=st.integers(0, N_SHARDS - 1),
    )
    def tick(
        self, rank: int, pairs: Any, owner: bool, moment: int | None, which: int
    ) -> None:
        """A rank ticks, maybe in the last moment of the owner of one shard."""
        one = self.free(rank)
        if one is None:
            return
        what = None if pairs is None else some(*pairs)
        if moment is not None and not self.pushed[one]:
            self.die(one, what, moment, which)
        else:
            self.take(one, what, tick=True, owner=owner)
        self.ticked.add(one)
        if len(self.ticked) == SIZE:
            self.publish()

    def take(self, rank: int, what: Any, *, tick: bool, owner: bool = True) -> None:
        if what is not None:
            self.pushed[rank].append(what)
        steps = self.steps(rank, what, tick=tick)
        # Of what was pushed before the tick nobody but the owner knows.
        at_owner = owner or len(self.pushed[rank]) > (what is not None)
        shards = self.store.owners if at_owner else self.store.deputies
        outcomes = [
            send(shard, s)[0].outcome for shard, s in zip(shards, steps, strict=True)
        ]
        if any(isinstance(o, ContributionLostError) for o in outcomes):
            steps = self.steps(rank, self.all_of(rank), tick=tick, whole=True)
            for shard, s in zip(self.store.owners, steps, strict=True):
                outcome = send(shard, s)[0].outcome
                assert not isinstance(outcome, Exception), outcome
        else:
            assert not any(isinstance(o, Exception) for o in outcomes), outcomes
        self.last = rank, steps

    def all_of(self, rank: int) -> Any:
        pushed = self.pushed[rank]
        if not pushed:
            return None
        return tuple(np.concatenate(of) for of in zip(*pushed, strict=True))

    def die(self, rank: int, what: Any, moment: int, which: int) -> None:
        """The owner of a shard dies at any store; its heir is sent the step again."""
        if what is not None:
            self.pushed[rank].append(what)
        store, steps = self.store, self.steps(rank, what)
        for i, owner in enumerate(store.owners):
            if i == which:
                states = states_of(store, steps[i], i)
                _, buffer, memory = states[moment % len(states)]
                store.memory[i] = memory
                store.owners[i] = owner = Shard(
                    store.segment(i, buffer), RULES, cache_dir=kept()
                )
                store.attach(owner, memory)
                owner.take_over()
                store.deputies[i] = store.deputy(i)
            outcome = send(owner, steps[i])[0].outcome
            assert not isinstance(outcome, Exception), outcome
        self.last = rank, steps

    @rule()
    def send_again(self) -> None:
        if self.last is None:
            return
        rank, steps = self.last
        if steps[0].sequence >> 40 != self.attempts[rank] - 1:
            return
        for shard, one in zip(self.store.owners, steps, strict=True):
            assert send(shard, one)[0].duplicate

    @rule(rank=st.integers(0, SIZE - 1))
    def restart(self, rank: int) -> None:
        """A trainer dies; another one reads where its rank stands, and that round."""
        self.attempts[rank] += 1
        found = [
            owner.run_state.resume_rank(RUN, rank, self.attempts[rank] - 1)
            for owner in self.store.owners
        ]
        assert {clock for clock, _ in found} == {self.round + (rank in self.ticked)}
        self.numbers[rank] = max(number for _, number in found)
        if rank not in self.ticked:
            self.pushed[rank] = []

    @rule(back=st.integers(0, 1))
    def read_of_a_round(self, back: int) -> None:
        """Exactly that round, or an error where it is gone."""
        wanted = (self.rows, self.before)[back]
        for owner in self.store.owners:
            asked = Step(run=RUN, rank=0, clock=self.round - back, wait=READ)
            ready = send(owner, asked)[0].outcome
            if not isinstance(ready, Ready):
                assert back
                continue
            piece = owner.segment.tables[0].piece
            ids = range(piece.first_row, piece.first_row + piece.n_rows)
            found = read(owner, EMB, ids, ready.flip)
            if found is not None:
                assert (found == wanted[ids]).all()

    @rule()
    def withdraw(self) -> None:
        """The last round is taken back, and another run begins."""
        if not self.round:
            return
        store, version = self.store, 1000 * self.round
        for owner in store.owners:
            owner.hold_run(RUN)
            back = owner.run_state.find_position(RUN).has_last
            rounds = self.round - 1 if back else self.round
            owner.end_run(RUN, "over", rounds=rounds, version=version)
            validate(owner)
            piece = owner.segment.tables[0].piece
            ids = range(piece.first_row, piece.first_row + piece.n_rows)
            wanted = self.before if back else self.rows
            assert (read(owner, EMB, ids) == wanted[ids]).all()
        self.__init__()  # type: ignore[misc]  # another store, as good as new

    def publish(self) -> None:
        self.before = self.rows.copy()
        named = {r: self.all_of(r) for r in range(SIZE)}
        given = {r: (of, 1.0 + r) for r, of in named.items() if of is not None}
        if given:
            self.n_steps += 1
        for row, g in expected(given, SIZE, "mean").items():
            slots = (self.slots[row],)
            Momentum().inplace(self.rows[row], g, slots, (float(self.n_steps),))
        self.round, self.ticked = self.round + 1, set()
        self.pushed = [[] for _ in range(SIZE)]

    @invariant()
    def holds(self) -> None:
        assert self.store.tables().tobytes() == self.rows.tobytes()
        for owner in self.store.owners:
            assert owner.rounds_of(RUN) == self.round
            assert owner.segment.current.steps[-2] == self.n_steps


Rounds.TestCase.settings = settings(
    max_examples=10, stateful_step_count=25, deadline=None
)
TestRounds = Rounds.TestCase
