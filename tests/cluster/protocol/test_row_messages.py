"""Rows as they are in messages: what a shard does not have is refused on arrival."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from daskps import config
from daskps.cluster.protocol.messages import (
    Answer,
    Call,
    Part,
    pack_answers,
    unpack_answers,
)
from daskps.cluster.protocol.row_messages import RowRequest, asked_of, most_rows
from daskps.cluster.sockets.templates import unpack_template
from daskps.errors import ProtocolError, PushRejectedError
from daskps.init import constant
from daskps.kernels import id_hash
from daskps.layout.arrays import Layout
from daskps.layout.tables import UnboundedIds
from daskps.shards.steps import ADD, ASSIGN, GRADIENT, MODEL, Item, Step
from tests.cluster.by_socket import arrived, dtypes_of, message_of
from tests.kernels.compiling import kept

#: Two shards: rows 0 to 3 and 4 to 6 of one table, 0 and 1 of the other.
TABLES = {"emb": (7, 2, "float16"), "seen": (2, 1, "int64")}
LAYOUT = Layout.build({"w": ((5,), "float32")}, 2, TABLES)
EMB, SEEN = 1, 2


def ids(*some):
    return np.array(some, "i8")


def sent(call):
    """Return a call as it arrives."""
    return arrived(call, LAYOUT)


def push(shard, item, kind=GRADIENT):
    return Call("u", (Part(shard, Step(kind, (item,))),))


def read(shard, *asked):
    return Call("u", (Part(shard, Step(), (), asked),))


@pytest.mark.parametrize("n", [0, 1, 3, 10_000])
@pytest.mark.parametrize(("kind", "dtype"), [(GRADIENT, "f4"), (ADD, "f2")])
def test_rows_travel_with_their_ids(kind, dtype, n):
    """Small ones in the message, large ones as frames."""
    rows = np.arange(2 * n, dtype=dtype)
    which = np.resize(ids(6, 4, 6), n)
    found = sent(push(1, Item(EMB, 0, rows, which), kind)).step.items[0]
    np.testing.assert_array_equal(found.data, rows, strict=True)
    np.testing.assert_array_equal(found.ids, which, strict=True)
    assert (found.position, found.start, found.at) == (EMB, 0, None)


@pytest.mark.parametrize(
    ("shard", "item", "kind"),
    [
        (0, Item(EMB, 0, np.zeros(2, "f4"), ids(4)), GRADIENT),
        (1, Item(EMB, 0, np.zeros(2, "f4"), ids(3)), GRADIENT),
        (0, Item(EMB, 0, np.zeros(2, "f4"), ids(-1)), GRADIENT),
        (0, Item(EMB, 0, np.zeros(3, "f4"), ids(1)), GRADIENT),
        (0, Item(EMB, 0, np.zeros(2, "f4"), ids(1, 2)), GRADIENT),
        (0, Item(EMB, 0, np.zeros(2, "f4"), ids(1)), MODEL),
        (0, Item(EMB, 0, np.zeros(2, "f4")), GRADIENT),
        (0, Item(0, 0, np.zeros(2, "f4"), ids(1)), GRADIENT),
        (0, Item(3, 0, np.zeros(2, "f4"), ids(1)), GRADIENT),
        (1, Item(SEEN, 0, np.zeros(1, "i8"), ids(2)), ASSIGN),
    ],
)
def test_rows_that_fit_no_table_are_refused(shard, item, kind):
    with pytest.raises((PushRejectedError, ProtocolError)):
        sent(push(shard, item, kind))


@pytest.mark.parametrize("which", [0, 1])
def test_a_table_is_named_once(which):
    item = Item(EMB, 0, np.zeros(2, "f4"), ids(1))
    asked = RowRequest(EMB, ids(1), 2, "float16")
    call = Call("u", (Part(0, Step(GRADIENT, (item,)), (), (asked,)),))
    template = json.loads(message_of(call, LAYOUT)["text"])
    template["tables"][which] *= 2
    with pytest.raises(ProtocolError, match="twice"):
        unpack_template(template, lambda *_: LAYOUT)


def test_a_read_of_rows_travels_with_what_it_asks_for():
    asked = (
        RowRequest(EMB, ids(4, 6, 4), 2, "float16"),
        RowRequest(SEEN, ids(), 1, "i8"),
    )
    call = read(1, asked[0], asked[1]._replace(dtype="int64"))
    [part] = sent(call).parts
    assert [(r.position, r.ids.tolist(), r.dim, r.dtype) for r in part.rows] == [
        (EMB, [4, 6, 4], 2, "float16"),
    ]
    assert part.answer_nbytes == call.nbytes == 3 * 2 * 2
    assert part.reads
    rows = np.arange(6, dtype="f2"), np.empty(0, "i8")
    [answer] = unpack_answers(
        pack_answers([Answer(1, arrays=rows)]), "here", dtypes_of(call)
    )
    [found] = answer.arrays
    np.testing.assert_array_equal(found, rows[0], strict=True)


@pytest.mark.parametrize(
    ("shard", "asked"),
    [
        (0, RowRequest(EMB, ids(4), 2, "float16")),
        (1, RowRequest(EMB, ids(3), 2, "float16")),
        (1, RowRequest(SEEN, ids(0), 1, "int64")),
        (0, RowRequest(0, ids(0), 2, "float16")),
        (0, RowRequest(3, ids(0), 2, "float16")),
        (0, RowRequest(EMB, np.zeros(65_537, "i8"), 2, "float16")),
    ],
)
def test_a_read_of_rows_that_are_not_there_is_refused(shard, asked):
    with pytest.raises(ProtocolError, match=r"do not fit|which takes|of a store"):
        sent(read(shard, asked))


def test_a_look_for_rows_says_that_no_row_is_asked_for():
    of: Any = {
        "n": (4, 2, "float32"),
        "any": (0, 2, "float32", UnboundedIds(constant(0.0), 1)),
    }
    layout = Layout.build({}, 1, of)

    def come(asked):
        call = Call("u", (Part(0, Step(), (), (asked,)),))
        [part] = arrived(call, layout).parts
        return part.rows[0]

    table = layout.tables[1]
    for finds, nbytes in ((True, 3), (False, 3 * (8 + 1))):
        found = come(asked_of(table, 1, ids(-4, 6, 4), finds=finds))
        assert found.nbytes == nbytes
        assert found.is_marked
    with pytest.raises(ProtocolError, match="which rows there are"):
        come(RowRequest(0, ids(1), 0, "float32"))


def test_one_call_reads_rows_of_so_many_bytes_at_most():
    """A short message must not ask for an answer that no host has the memory for."""
    long = Layout.build({}, 1, {"t": (10, 2**22, "float64"), "s": (10, 2, "int8")})
    assert [most_rows(table) for table in long.tables] == [2, 65_536]


def test_ids_of_a_hash_are_looked_at_by_a_loop_that_is_kept(monkeypatch):
    """Compiled anew it takes a quarter of a second of each process, on its event loop."""
    where = []
    buckets = id_hash.buckets

    def seen(*args, cache_dir=None):
        where.append(cache_dir)
        return buckets(*args, cache_dir=cache_dir)

    of = {"any": (0, 1, "float32", UnboundedIds(constant(0.0), 1))}
    # Of two shards: one alone has all ids, and looks at none.
    layout = Layout.build({}, 2, of)
    piece = layout.tables[0].cut(2, 0)
    here = [i for i in range(40) if piece.holds(ids(i), cache_dir=kept())]
    monkeypatch.setattr(id_hash, "buckets", seen)
    pushed = Call(
        "u", (Part(0, Step(GRADIENT, (Item(0, 0, np.ones(2, "f4"), ids(*here[:2])),))),)
    )
    asked = Call(
        "u", (Part(0, Step(), (), (RowRequest(0, ids(here[2]), 1, "float32", True),)),)
    )
    for call in (pushed, asked):
        arrived(call, layout)
    assert where == [str(config.load().cache)] * 2
