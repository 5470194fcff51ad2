"""Rows of tables in a shard: what a push changes, what is refused, what readers see."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from daskps import optim
from daskps.consistency import ASP
from daskps.errors import NoOptimizerError, ProtocolError, PushRejectedError
from daskps.kernels import row_log
from daskps.kernels.row_moves import FixedGather
from daskps.layout.arrays import Layout
from daskps.layout.slots import PerRow
from daskps.layout.spans import ROWS, Span, slot_area
from daskps.shards.arrays.payload import NUMPY
from daskps.shards.arrays.row_operations import RowUpdate
from daskps.shards.memory import undo
from daskps.shards.memory.areas import RECORD
from daskps.shards.memory.format import ROWS_SEQUENCE, VERSION, Record
from daskps.shards.memory.segment import Segment
from daskps.shards.reader import RowsRead
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, ASSIGN, GRADIENT, MODEL, Item, Ready, Step, Ticket
from tests.kernels.compiling import kept
from tests.shards.making import copy_rows, copy_rows_locked
from tests.shards.rowing import (
    EMB,
    LAYOUT,
    NUM,
    SLOTS,
    AddingRows,
    contents,
    make,
    position,
    read,
    rows,
    send,
)


def first(index, ids, dim):
    return 100 * np.array(ids)[:, None] + np.arange(dim)


def said_of(ticket, message):
    """Whether a push was refused, and what was said of it."""
    assert isinstance(ticket.outcome, PushRejectedError), ticket.outcome
    assert re.search(message, str(ticket.outcome)), ticket.outcome


@pytest.mark.parametrize("durable", [False, True])
def test_only_named_rows_and_their_slots_change(durable):
    shard = make(durable=durable)
    send(shard, GRADIENT, rows(shard, EMB, [3, 39, 0], [1, 2, 3]))
    send(shard, GRADIENT, rows(shard, EMB, [39], 1))
    emb = first(EMB, range(40), 3)
    emb[[3, 39, 0]] += [[1], [2], [3]]
    emb[39] += 2  # the step count is the table's: this is its second
    np.testing.assert_array_equal(read(shard, EMB, range(40)), emb)
    slot = np.full((40, 3), 0.25)
    slot[[3, 0]], slot[39] = 1.25, 3.25
    np.testing.assert_array_equal(shard.segment.tables[0].slots[0], slot)
    np.testing.assert_array_equal(read(shard, NUM, range(7)), first(NUM, range(7), 2))


def test_add_and_assign():
    shard = make()
    send(shard, ADD, rows(shard, NUM, [6, 1], [10, 20]), rows(shard, EMB, [1], 0.5))
    send(shard, ASSIGN, rows(shard, NUM, [1], 7))
    num, emb = first(NUM, range(7), 2), first(EMB, range(40), 3) * 1.0
    num[6] += 10
    num[1], emb[1] = 7, emb[1] + 0.5
    np.testing.assert_array_equal(read(shard, NUM, range(7)), num)
    np.testing.assert_array_equal(read(shard, EMB, range(40)), emb)
    assert shard.segment.current.steps.tolist() == [0, 0, 0]


def test_repeats_are_one_update_and_in_assign_the_last_holds():
    shard = make()
    send(shard, GRADIENT, rows(shard, EMB, [5, 2, 5, 5], [1, 8, 2, 4]))
    expected = first(EMB, [5, 2], 3) + np.array([[7], [8]])
    np.testing.assert_array_equal(read(shard, EMB, [5, 2]), expected)
    slots = shard.segment.tables[0].slots[0]
    assert slots[[5, 2], 0].tolist() == [1.25, 1.25]
    send(shard, ADD, rows(shard, NUM, [1, 1, 0], [1, 2, 4]))
    np.testing.assert_array_equal(
        read(shard, NUM, [0, 1]), first(NUM, [0, 1], 2) + np.array([[4], [3]])
    )
    send(shard, ASSIGN, rows(shard, NUM, [1, 0, 1], [5, 6, 7]))
    assert read(shard, NUM, [0, 1]).tolist() == [[6, 6], [7, 7]]


def test_repeats_are_summed_in_order_of_appearance(rng):
    values = (10.0 ** rng.uniform(-6, 6, (9, 3))).astype("f4")
    shard = make(slots={}, rules={})
    shard.segment.tables[0].rows[:] = 0
    send(shard, ADD, rows(shard, EMB, [4] * 9, values))
    expected = np.zeros(3, "f4")
    for value in values:
        expected += value
    np.testing.assert_array_equal(read(shard, EMB, [4])[0], expected)


@pytest.mark.parametrize("kind", [GRADIENT, ADD, ASSIGN])
@pytest.mark.parametrize("ids", [[4, 9, 2], [4, 9, 4]])
def test_rows_of_an_array_that_others_share(kind, ids):
    """Who splits a push by shard leaves the data where they are."""
    shard, alike = make(), make()
    data = np.arange(15.0).reshape(5, 3)
    at = [4, 0, 3]
    send(shard, kind, rows(shard, EMB, ids, data, at))
    send(alike, kind, rows(alike, EMB, ids, data[at]))
    np.testing.assert_array_equal(
        read(shard, EMB, range(40)), read(alike, EMB, range(40))
    )


def test_a_push_of_no_rows_counts_as_a_step_of_the_table():
    shard = make()
    before = read(shard, EMB, range(40))
    ticket = send(shard, GRADIENT, rows(shard, EMB, [], np.empty((0, 3))))
    assert ticket.version == 1
    assert shard.segment.current.steps.tolist() == [0, 1, 0]
    np.testing.assert_array_equal(read(shard, EMB, range(40)), before)


def test_arrays_and_rows_of_one_push_are_one_publication():
    shard = make()
    flip = shard.segment.flip
    dense = Item(0, 0, np.ones(6, "f4"))
    ticket = send(shard, GRADIENT, dense, rows(shard, EMB, [1], 1))
    assert (shard.segment.flip, ticket.version) == (flip + 1, 1)
    assert shard.segment.current.steps.tolist() == [1, 1, 0]


def test_a_repeated_push_is_applied_once():
    shard = make()
    step = Step(GRADIENT, [rows(shard, EMB, [1, 2], 1)], producer=9, sequence=0)
    tickets = [Ticket(step), Ticket(step)]
    shard.submit(tickets[:1])
    state = contents(shard)
    shard.submit(tickets[1:])
    assert [t.duplicate for t in tickets] == [False, True]
    assert contents(shard) == state


def test_pushes_that_queue_up_share_a_publication_as_far_as_the_log_reaches(
    monkeypatch,
):
    alone = make()
    steps = [
        Step(GRADIENT, [rows(alone, EMB, range(i, i + 30), i)], producer=9, sequence=i)
        for i in range(4)
    ]
    for step in steps:
        alone.submit([Ticket(step)])
    # Two of them have 60 rows, the log room for 40.
    together = make()
    tickets = [Ticket(step) for step in steps]
    together.submit(tickets)
    assert together.segment.flip - make().segment.flip == 4
    assert [t.version for t in tickets] == [1, 2, 3, 4]
    np.testing.assert_array_equal(
        read(together, EMB, range(40)), read(alone, EMB, range(40))
    )
    few = make()
    few.submit(
        [
            Ticket(Step(ADD, [rows(few, EMB, range(20), i)], producer=9, sequence=i))
            for i in range(4)
        ]
    )
    assert few.segment.flip - make().segment.flip == 2


def bad(shard, **changes):
    return rows(shard, EMB, [1, 2], 1)._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ids": np.array([1, 40])}, "ids from 1 to 40 .*has 40 rows"),
        ({"ids": np.array([-1, 3])}, "ids from -1 to 3"),
        ({"ids": np.array([-(2**63), 3])}, "has 40 rows"),
        ({"ids": np.array([1, 2], "i4")}, "ids of int32"),
        ({"ids": np.array([[1, 2]])}, r"\(1, 2\) ids"),
        ({"ids": np.array([1, 2, 3])}, "do not fit"),
        ({"ids": np.array([1, 5, 2])[::2]}, "do not fit"),
        ({"ids": None}, "do not fit"),
        ({"start": 1}, "do not fit"),
        ({"data": np.zeros(6, "f8")}, "elements of float64"),
        ({"data": np.zeros((2, 3), "f4")}, "do not fit"),
        ({"data": np.zeros(7, "f4")}, "do not fit"),
        ({"at": np.array([0, 2])}, "do not fit"),
        ({"at": np.array([0, -1])}, "do not fit"),
        ({"at": np.array([0])}, "do not fit"),
        ({"at": np.array([0, 1], "i4")}, "do not fit"),
        ({"position": 0}, "which is no table"),
        ({"position": 3}, "piece 3 of a shard of 3"),
        ({"position": -1}, "piece -1"),
    ],
)
def test_rows_that_do_not_fit_are_refused(changes, said):
    shard = make()
    state = contents(shard)
    good = rows(shard, NUM, [], np.empty((0, 2)))
    for kind in (GRADIENT, ADD) if "data" not in changes else (GRADIENT,):
        items = [bad(shard, **changes), *[good] * (kind == ADD)]
        ticket = send(shard, kind, *items)
        said_of(ticket, said)
    assert contents(shard) == state


def test_what_a_table_does_not_take():
    shard = make()
    one = rows(shard, EMB, [1], 1)
    for error, kind, items in (
        (PushRejectedError, MODEL, [one]),
        (PushRejectedError, GRADIENT, [one, one]),
        (NoOptimizerError, GRADIENT, [rows(shard, NUM, [1], 1)]),
    ):
        state = contents(shard)
        ticket = send(shard, kind, *items)
        assert isinstance(ticket.outcome, error), ticket.outcome
        assert contents(shard) == state
    assert isinstance(send(shard, GRADIENT, one, lr=0.25).outcome, ArithmeticError)


def test_more_rows_than_the_log_holds_are_refused():
    layout = Layout.build({}, 1, {"emb": (2**17 + 1, 1, "int8")})
    shard = make(layout, slots={}, rules={})
    state = contents(shard)
    ids = np.arange(2**17 + 1)
    ticket = send(shard, ADD, Item(0, 0, np.ones(len(ids), "i1"), ids))
    said_of(ticket, r"131073 rows .*131072 at most")
    assert contents(shard) == state
    assert send(shard, ADD, Item(0, 0, np.ones(2**17, "i1"), ids[1:])).version == 1


@pytest.mark.parametrize("kind", [GRADIENT, ADD, ASSIGN])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("ids", [[*range(30)], [3] * 30])
def test_rows_that_are_not_finite_change_nothing(kind, dense, ids):
    shard = make()
    send(shard, GRADIENT, rows(shard, EMB, [0, 39], 1))
    state = contents(shard)
    data = np.ones((30, 3), "f4")
    data[25, 1] = np.nan
    items = [Item(0, 0, np.ones(6, "f4"))] * dense + [rows(shard, EMB, ids, data)]
    ticket = send(shard, kind, *items, check=True)
    said_of(ticket, "NaN or")
    assert contents(shard) == state
    # The log of the publication before is gone, and says so.
    segment = shard.segment
    assert segment.header[ROWS_SEQUENCE] % 2 == 0
    assert segment.header[ROWS_SEQUENCE] > 2 or len(set(ids)) == 1
    # It can be pushed again, in order.
    data[25, 1] = 1
    items[-1] = rows(shard, EMB, ids, data)
    assert send(shard, kind, *items, check=True).version == 2


def test_of_several_pushes_only_that_with_nan_is_refused():
    shard = make()
    steps = [
        Step(ADD, [rows(shard, EMB, [1, 2], v)], producer=9, sequence=i, check=True)
        for i, v in enumerate([1, np.nan, 2])
    ]
    tickets = [Ticket(step) for step in steps]
    shard.submit(tickets)
    assert isinstance(tickets[1].outcome, PushRejectedError)
    np.testing.assert_array_equal(read(shard, EMB, [1]), first(EMB, [1], 3) + 3)


def test_a_trainer_pushes_rows_without_rounds():
    shard = make()
    shard.begin_run(5, ASP(), 1, "mean")
    one = rows(shard, EMB, [1], 1)
    step = Step(GRADIENT, [one], run=5, rank=0, clock=0, sequence=0, tick=True)
    ticket, again = Ticket(step), Ticket(step)
    shard.submit([ticket, again])
    assert (ticket.version, ticket.duplicate, again.duplicate) == (1, False, True)


# -- reads -----------------------------------------------------------------------------


def test_reads_keep_order_and_repeats():
    shard = make()
    found = read(shard, EMB, [7, 0, 7, 39])
    np.testing.assert_array_equal(found, first(EMB, [7, 0, 7, 39], 3))
    assert read(shard, EMB, []).shape == (0, 3)


@pytest.mark.parametrize("copy", [copy_rows, copy_rows_locked])
@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ((1, np.array([40]), np.empty(3, "f4")), "id 40 at"),
        ((1, np.array([-1]), np.empty(3, "f4")), "id -1 at"),
        ((0, np.array([1]), np.empty(3, "f4")), "no table"),
        ((3, np.array([1]), np.empty(3, "f4")), "no table"),
        ((1, np.array([1]), np.empty(4, "f4")), "cannot give them"),
        ((1, np.array([1]), np.empty(3, "f8")), "cannot give them"),
        ((1, np.array([1]), np.empty(6, "f4")[::2]), "cannot give them"),
    ],
)
def test_reads_of_what_is_not_there(copy, wanted, said):
    shard = make()
    with pytest.raises(ProtocolError, match=said):
        copy(shard.segment, shard.segment.flip, [RowsRead(*wanted)])


def test_a_read_that_an_update_runs_into_is_told_so(monkeypatch):
    shard = make()
    wanted = [RowsRead(1, np.array([1, 2]), np.empty(6, "f4"))]
    flip = shard.segment.flip
    assert copy_rows(shard.segment, flip, wanted)
    send(shard, ADD, rows(shard, NUM, [1], 1))
    assert not copy_rows(shard.segment, flip, wanted)  # another flip by now
    flip = shard.segment.flip

    old, coming = read(shard, EMB, [1, 2]), list[int]()

    def gather(*args, **kwargs):
        """Other writers come while rows are gathered."""
        while coming:
            send(shard, GRADIENT, rows(shard, EMB, [coming.pop()], 1))
        return really(*args, **kwargs)

    really = FixedGather.__call__
    monkeypatch.setattr(FixedGather, "__call__", gather)
    coming[:] = [2, 30]  # the second one begins the log anew
    assert not copy_rows(shard.segment, flip, wanted)
    flip, now = shard.segment.flip, read(shard, EMB, [1, 2])
    assert (now[1] != old[1]).all()
    coming[:] = [2]  # what it replaces is in the log
    assert copy_rows(shard.segment, flip, wanted)
    np.testing.assert_array_equal(wanted[0].out.reshape(2, 3), now)
    assert (read(shard, EMB, [2]) != now[1]).all()


@pytest.mark.parametrize("refused", [False, True])
def test_what_a_writer_has_changed_is_read_as_it_was(refused):
    """Unless it is taken back meanwhile: then the log is empty, and the copy is torn."""
    shard = make()
    segment, flip = shard.segment, shard.segment.flip
    old, table = read(shard, EMB, range(40)), segment.tables[0]
    update = RowUpdate(np.array([3, 4]), np.full((2, 3), -1, "f4"))
    ids = np.array([4, 0, 3, 3])
    wanted = [RowsRead(1, ids, np.empty(12, "f4"), np.array([1, 0, 3, 2]))]
    undo.begin(segment, flip + 1, [0])
    assert copy_rows(segment, flip, wanted)
    assert update.apply(table.buffers, flip + 1, None)
    sequence = segment.header[ROWS_SEQUENCE]
    assert copy_rows(segment, flip, wanted)
    np.testing.assert_array_equal(wanted[0].out.reshape(4, 3), old[[0, 4, 3, 3]])
    if refused:
        undo.roll_back(segment)
    else:
        segment.flip = flip + 1
        undo.roll_back(segment)
    for began in (sequence & ~1, sequence):
        now = segment.header[ROWS_SEQUENCE]
        assert undo.is_logged(began, now) == (not refused)
    assert undo.is_logged(now, now)
    undo.begin(segment, segment.flip + 1, [0])
    assert not undo.is_logged(sequence, segment.header[ROWS_SEQUENCE])


def test_a_reader_is_told_of_a_writer_that_is_being_taken_back():
    def read_meanwhile(*args):
        seen.append(copy_rows(segment, flip, wanted))
        row_log.restore(*args)
        seen.append(copy_rows(segment, flip, wanted))

    shard = make(payload=NUMPY._replace(restore=read_meanwhile))
    segment, flip = shard.segment, shard.segment.flip
    table = segment.tables[0]
    update = RowUpdate(np.array([3, 4]), np.full((2, 3), -1, "f4"))
    wanted = [RowsRead(1, np.array([3]), np.empty(3, "f4"))]
    undo.begin(segment, flip + 1, [0])
    assert update.apply(table.buffers, flip + 1, None)
    seen = list[bool]()

    undo.roll_back(segment)
    assert seen == [False, False]
    assert copy_rows(segment, flip, wanted)


def test_an_update_of_arrays_alone_disturbs_no_reader_of_rows():
    shard = make()
    before = shard.segment.header[ROWS_SEQUENCE]
    send(shard, GRADIENT, Item(0, 0, np.ones(6, "f4")))
    assert shard.segment.header[ROWS_SEQUENCE] == before


@pytest.mark.parametrize("twice", [False, True])
def test_the_publication_before_is_there(twice):
    shard = make()
    old = read(shard, EMB, range(40))
    flip = shard.segment.flip
    tickets = [
        Ticket(Step(ADD, [rows(shard, EMB, ids, 1)], producer=9, sequence=i))
        for i, ids in enumerate([[3, 9], [9, 4]][: 1 + twice])
    ]
    shard.submit(tickets)
    assert shard.segment.flip == flip + 1
    asked = [9, 3, 0, 9, 4, 39]
    np.testing.assert_array_equal(read(shard, EMB, asked, flip), old[asked])
    new = read(shard, EMB, asked)
    # Of a publication that leaves the table alone the one before is what there is.
    send(shard, ADD, rows(shard, NUM, [1], 1))
    np.testing.assert_array_equal(read(shard, EMB, asked, flip + 1), new)
    assert read(shard, EMB, asked, flip) is None


def test_the_publication_before_is_gone_once_another_has_begun():
    shard = make()
    send(shard, ADD, rows(shard, EMB, [1], 1))
    flip = shard.segment.flip
    assert read(shard, EMB, [1], flip - 1) is not None
    nan = rows(shard, EMB, [1], np.nan)
    send(shard, ADD, nan, check=True)
    assert read(shard, EMB, [1], flip) is not None
    assert read(shard, EMB, [1], flip - 1) is None


# -- rules -----------------------------------------------------------------------------

RULES = [
    optim.SGD(0.1),
    optim.SGD(0.1, momentum=0.9, weight_decay=0.01),
    optim.Adagrad(0.1),
    optim.RMSprop(0.01),
    optim.Adam(0.01),
    optim.AdamW(0.01, weight_decay=0.1),
]


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [*((rule, "float32") for rule in RULES), (RULES[4], "float16")],
    ids=repr,
)
def test_a_rule_on_rows_is_the_dense_rule_on_what_they_have(rule, dtype, rng):
    """Each row gets the bits of an array that is fed the steps that name it."""
    bound = optim.bind(rule, dtype, cache_dir=kept())
    init = tuple(rule.slot_init.get(name, 0.0) for name in rule.slots)
    layout = Layout.build({}, 1, {"emb": (9, 4, dtype)})
    shard = Shard(Segment(layout, 0, {0: init}), {0: bound})
    table = shard.segment.tables[0].rows
    table[:] = rng.standard_normal(table.shape)
    dense = [table[i].copy() for i in range(9)]
    slots = [
        tuple(np.full(4, v, bound.kernel.compute_dtype) for v in init) for _ in dense
    ]
    for clock in range(1, 8):
        ids = rng.integers(0, 9, 5)
        g = rng.standard_normal((5, 4)).astype(bound.kernel.compute_dtype)
        step = Step(
            GRADIENT, [Item(0, 0, g.reshape(-1), ids)], producer=1, sequence=clock
        )
        ticket = Ticket(step)
        shard.submit([ticket])
        assert isinstance(ticket.outcome, Ready), ticket.outcome
        for row in set(ids.tolist()):
            total = np.zeros(4, g.dtype)
            for value in g[ids == row]:
                total += value
            bound.inplace(dense[row], total, slots[row], bound.scalars(clock))
    np.testing.assert_array_equal(table, np.array(dense))


@pytest.mark.parametrize("adaptive", [False, True])
def test_rules_on_rows_are_those_of_torch(adaptive, rng):
    torch = pytest.importorskip("torch")
    rule = optim.Adam(0.01) if adaptive else optim.SGD(0.1)
    bound = optim.bind(rule, "float32", cache_dir=kept())
    layout = Layout.build({}, 1, {"emb": (20, 4, "float32")})
    init = tuple(0.0 for _ in rule.slots)
    shard = Shard(Segment(layout, 0, {0: init}), {0: bound})
    table = shard.segment.tables[0].rows
    table[:] = rng.standard_normal(table.shape)
    embedding = torch.nn.Embedding(20, 4, sparse=True)
    with torch.no_grad():
        embedding.weight[:] = torch.from_numpy(table.copy())
    kind = torch.optim.SparseAdam if adaptive else torch.optim.SGD
    theirs = kind(embedding.parameters(), lr=rule.lr)
    for clock in range(20):
        ids = rng.integers(0, 20, 6)
        # No sum near zero: SparseAdam does not correct eps for bias, as torch's Adam
        # does.
        g = rng.uniform(0.5, 1.5, (6, 4)).astype("f4")
        theirs.zero_grad()
        (embedding(torch.from_numpy(ids)) * torch.from_numpy(g)).sum().backward()
        theirs.step()
        item = Item(0, 0, g.reshape(-1), ids)
        shard.submit([Ticket(Step(GRADIENT, [item], producer=1, sequence=clock))])
    np.testing.assert_allclose(table, embedding.weight.detach().numpy(), atol=1e-6)


# -- the memory ------------------------------------------------------------------------


@pytest.mark.parametrize("n_shards", [1, 2, 3, 5, 50])
@pytest.mark.parametrize("arrays", [{}, {"w": ((7,), "float32")}])
def test_a_table_on_any_number_of_shards(n_shards, arrays, rng):
    layout = Layout.build(arrays, n_shards, {"emb": (40, 3, "float32")})
    index = len(arrays)
    shards = [make(layout, i, slots={}, rules={}) for i in range(n_shards)]
    ids = rng.permutation(40)[:17]
    found = np.empty((40, 3))
    for shard in shards:
        piece = shard.segment.tables[0].piece
        mine = range(piece.first_row, piece.first_row + piece.n_rows)
        assert position(shard, index) == layout.table_position(piece.shard, index)
        send(shard, ADD, rows(shard, index, [i for i in ids if i in mine], 1))
        found[mine] = read(shard, index, mine)
    expected = first(EMB, range(40), 3)
    expected[ids] += 1
    np.testing.assert_array_equal(found, expected)


def test_bytes_are_those_of_rows_slots_log_and_feed():
    layout = Layout.build({}, 1, {"emb": (1000, 64, "float32")})
    rows_only = Segment.needed_nbytes(layout, 0, {})
    with_slot = Segment.needed_nbytes(layout, 0, {0: (0.0,)}, durable=True)
    one = 1000 * 64 * 4
    assert 0 <= with_slot - rows_only - 2 * one < 4096
    bare = Segment.needed_nbytes(Layout.build({}, 1), 0, {})
    feed = 8 * (250 + 16 * 5)
    assert 0 <= rows_only - bare - 2 * one - 8000 - feed < 2 * 4096
    many = Layout.build({}, 1, {"emb": (2**20, 64, "float32")})
    log = Segment.needed_nbytes(many, 0, {}) - many.nbytes - bare
    feed = 8 * (2**18 + 2**14 * 5)
    assert 0 <= log - 2**17 * (64 * 4 + 8) - feed < 2 * 4096


def test_bytes_of_a_slot_of_one_number_per_row():
    for layout, durable in [(LAYOUT, False), (LAYOUT, True)]:
        table = Segment(layout, 0, SLOTS, durable=durable).tables[0]
        assert [slot.shape for slot in table.slots] == [(40, 3), (40, 1)]
        log = table.buffers.log
        assert [slot.shape for slot in log.slots] == [(40, 3), (40, 1)]
    many = Layout.build({}, 1, {"emb": (2**20, 64, "float32")})
    need = [Segment.needed_nbytes(many, 0, s) for s in ({}, {0: (PerRow(0.0),)})]
    assert 0 <= need[1] - need[0] - 4 * (2**20 + 2**17) < 4096


def test_memory_of_another_number_of_tables_is_refused():
    segment = Segment(LAYOUT, 0, SLOTS)
    Segment(LAYOUT, 0, SLOTS, segment.buffer)
    other = Layout.build({"w": ((6,), "float32")}, 1, {"emb": (4, 3, "float32")})
    with pytest.raises(ProtocolError, match="2 tables, expected were 1"):
        Segment(other, 0, SLOTS, segment.buffer)


def test_a_writer_that_died_is_settled_by_who_comes_next():
    shard = make()
    state, old = contents(shard), read(shard, EMB, range(40))
    segment = shard.segment
    undo.begin(segment, segment.flip + 1, [0])
    table = segment.tables[0].buffers.table
    update = RowUpdate(np.array([3, 4]), np.full((2, 3), -1, "f4"))
    assert update.apply(segment.tables[0].buffers, segment.flip + 1, None)
    assert (table.w[[3, 4]] != old[[3, 4]]).all()
    for copy in (copy_rows, copy_rows_locked):
        wanted = [RowsRead(1, np.arange(40), np.empty(120, "f4"))]
        assert copy(segment, segment.flip, wanted)
        np.testing.assert_array_equal(wanted[0][2].reshape(40, 3), old)
    assert contents(shard) == state


@pytest.mark.parametrize("order", [[GRADIENT, ADD], [ADD, ASSIGN], [ASSIGN, GRADIENT]])
def test_slots_come_back_with_rows_whatever_has_changed_these(order, monkeypatch):
    """What `add` and `assign` leave alone is in the log all the same."""
    shard = make()
    send(shard, GRADIENT, rows(shard, EMB, range(40), 1))
    state = contents(shard)

    def fail(publication):
        raise ArithmeticError("no")

    monkeypatch.setattr(Record, "side", property(fail))
    tickets = [
        Ticket(Step(kind, [rows(shard, EMB, [3, i], 1)], producer=9, sequence=i))
        for i, kind in enumerate(order)
    ]
    shard.submit(tickets)
    assert all(isinstance(t.outcome, ArithmeticError) for t in tickets)
    assert contents(shard) == state


@pytest.mark.parametrize("arrays", [{}, {"w": ((6,), "float32")}])
def test_copies_of_spans_have_rows_as_they_are(arrays):
    index = len(arrays)
    layout = Layout.build(arrays, 1, {"emb": (8, 3, "float32")})
    shard = make(layout, slots={index: (0.25,)}, rules={index: AddingRows()})
    at, segment = position(shard, index), shard.segment
    send(shard, GRADIENT, rows(shard, index, [2], 1))
    out, slot = np.empty(6, "f4"), np.empty(24, "f4")
    version = np.empty(1, np.int64)
    parts: list[Any] = [
        (Span(ROWS, at, 6, 12), out),
        (Span(slot_area(0), at, 0, 24), slot),
        (Span(RECORD, 0, VERSION, VERSION + 1), version),
    ]
    assert segment.copy(segment.flip, parts)
    np.testing.assert_array_equal(out.reshape(2, 3), read(shard, index, [2, 3]))
    assert slot.reshape(8, 3)[:, 0].tolist() == [0.25, 0.25, 1.25, *[0.25] * 5]
    assert version == 1
    # What has one buffer is there at one flip only, and not while it is changed.
    assert not segment.copy(segment.flip - 1, parts)
    segment.header[ROWS_SEQUENCE] += 1
    assert not segment.copy(segment.flip, parts)
    undo.roll_back(segment)
    assert segment.copy(segment.flip, parts)
