"""Frames of calls with rows: what arrives of them, and what is no such frame."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps import codecs
from daskps.cluster.caller.routes import push, read, spanning
from daskps.cluster.caller.row_routes import IdSplit, RowBatch, slices_of
from daskps.cluster.caller.socket_route import SocketRoute, SocketRoutes, may_go
from daskps.cluster.caller.targets import Target
from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.hosted import HostedShard
from daskps.cluster.host.socket_calls import Parked, SocketCalls
from daskps.cluster.protocol import encoding
from daskps.cluster.protocol.messages import Call
from daskps.cluster.sockets.frames import (
    ANSWER,
    CALL,
    HAS_LEAST,
    HEAD_NBYTES,
    REFUSAL,
    TEMPLATE,
    Head,
    unpack_head,
    unpack_text,
)
from daskps.cluster.sockets.templates import LEAST, FrameTemplate, unpack_template
from daskps.codecs import BFloat16, TopK
from daskps.errors import ProtocolError, PushRejectedError
from daskps.init import constant
from daskps.kernels.row_moves import FixedGather
from daskps.layout.arrays import Layout
from daskps.layout.tables import UnboundedIds
from daskps.limits import MOST_PUSHED_ROWS
from daskps.shards import reader
from daskps.shards.arrays.row_operations import RowUpdate
from daskps.shards.memory import undo
from daskps.shards.memory.format import ROWS_SEQUENCE
from daskps.shards.reader import BUSY, RowsRead, ShardReader
from daskps.shards.steps import ADD, ASK, GRADIENT, Step
from tests.cluster.by_socket import hosted_shards
from tests.cluster.callers import map_of
from tests.cluster.hosted import bare_host

#: Widths that lie in one buffer only in the right order; a table without a row for all.
LAYOUT = Layout.build(
    {"h": ((3,), "float16"), "w": ((7,), "float32")},
    3,
    tables={
        "emb": (20, 3, "float16"),
        "n": (2, 1, "int64"),
        "f": (9, 2, "float32"),
        "any": (0, 1, "float16", UnboundedIds(constant(2.0), 5, 64)),
    },
)
STEP = Step(ADD, producer=4, sequence=2, floor=1, weight=2.0)


@pytest.fixture(scope="module")
def host() -> Iterator[ShardHost]:
    loop = asyncio.new_event_loop()

    async def made() -> ShardHost:
        return stack.__enter__()

    stack = bare_host(loop, *hosted_shards(LAYOUT, None))
    yield loop.run_until_complete(made())
    stack.__exit__(None, None, None)
    loop.close()


@pytest.fixture
def routes(host: ShardHost) -> SocketRoutes:
    return SocketRoutes(map_of(host.shards["s", 0], ["a", "b", "a"]))


def meta_of(routes: SocketRoutes) -> Any:
    return routes._meta


def brings(table: int, ids: Any) -> RowBatch:
    """Return rows of a table, all different, for ids in any order."""
    of = LAYOUT.tables[table]
    data = np.arange(len(ids) * of.dim).astype(of.dtype)
    return RowBatch(IdSplit.of(of, np.array(ids, "i8"), LAYOUT.n_shards), data)


def target_of(
    routes: SocketRoutes, asked: dict[int, Any], arrays: tuple[int, ...] = ()
) -> Target:
    """Return a read of rows of tables, and of whole arrays."""
    flats = {i: np.zeros(p.size, p.dtype) for i, p in enumerate(LAYOUT.parameters)}
    spans: Any = {i: (0, len(flats[i]), flats[i]) for i in arrays}
    target = spanning(meta_of(routes), spans, dict)
    rows: dict[int, tuple[Any, ...]] = {}
    outs = [*target.flats]
    for table, ids in asked.items():
        of = LAYOUT.tables[table]
        cut = IdSplit.of(of, np.array(ids, "i8"), LAYOUT.n_shards)
        number, marks = len(outs), None
        outs.append(np.zeros(len(ids) * of.dim, of.dtype))
        if not of.is_bounded:
            marks = len(outs)
            outs.append(np.zeros(len(ids), np.uint8))
        for shard, one in slices_of(LAYOUT, cut, number, 0, marks=marks).items():
            rows[shard] = (*rows.get(shard, ()), one)
    return target._replace(flats=outs, rows=rows)


def template_of(frame: Any) -> FrameTemplate:
    """Return a template as its host has it."""
    said = unpack_text(frame.template.text)
    return unpack_template(said, lambda *_: LAYOUT)


def body_of(route: SocketRoute, frame: Any) -> np.ndarray[Any, Any]:
    """Return what of a frame comes after its head, without versions to wait for."""
    assert route.arrays is not None
    arrays = [route.arrays.brings[name][a:b] for name, a, b in frame.slices]
    data = frame.counts + b"".join(array.tobytes() for array in arrays)
    assert len(data) == frame.nbytes
    return np.frombuffer(data, np.uint8)


def plain(call: Call) -> Any:
    """Return what parts of a call say, by shard, with lists for arrays."""

    def listed(array: Any) -> Any:
        return None if array is None else (array.dtype.name, array.tolist())

    return {
        p.shard: (
            [
                (i.position, i.start, listed(i.data), listed(i.ids))
                for i in p.step.items
            ],
            p.step._replace(items=(), owned=True, touched=None),
            p.ranges,
            [(r[0], r.ids.tolist(), *r[2:]) for r in p.rows],
        )
        for p in call.parts
    }


IDS = [st.lists(st.integers(0, t.rows - 1), max_size=6) for t in LAYOUT.tables[:3]]
IDS.append(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6))


@settings(max_examples=40)
@given(
    st.tuples(*IDS),
    st.sets(st.integers(0, 3)),
    st.tuples(*IDS),
    st.sets(st.integers(0, 3)),
    st.sets(st.integers(0, 1)),
    st.integers(0, 9),
)
def test_a_call_with_rows_arrives_as_a_message_does(
    host, given_ids, pushed, asked_ids, asked, arrays, least
):
    routes = SocketRoutes(map_of(host.shards["s", 0], ["a", "b", "a"]))
    meta = meta_of(routes)
    target = target_of(routes, {k: asked_ids[k] for k in asked}, tuple(arrays))
    rows = [brings(k, given_ids[k]) for k in pushed]
    dense = {
        i: np.arange(LAYOUT.parameters[i].size).astype(LAYOUT.parameters[i].dtype)
        for i in arrays
    }
    if rows:
        request = push(meta, dense, STEP, target=target, rows=rows)
    elif target.rows:
        request = read(meta, target, None, Step())
    else:
        return
    shards = tuple(request.route.slices)
    route = routes.find(request, shards)
    seen = []
    for frame in route.frames:
        template, body = template_of(frame), body_of(route, frame)
        said = request.step
        head = Head(
            CALL,
            len(body),
            1,
            0,
            0,
            said.clock,
            said.sequence,
            said.floor,
            said.weight,
            0.0,
            0,
        )
        if least:
            versions = np.full(len(frame.shards), least, LEAST)
            body = np.concatenate([versions.view(np.uint8), body])
            head = head._replace(nbytes=len(body), flags=HAS_LEAST)
            request = request._replace(min_version=least)
        [buffer] = template.wanted(head, np.empty)
        buffer[:] = body
        parts = template.parts(head, template.read_body(head, [buffer]))
        found = template.call._replace(parts=tuple(parts))
        expected = plain(request.call(meta, frame.asked, 0.0, ""))
        for shard, what in plain(found).items():
            if shard in frame.asked:
                assert what == expected[shard]
                seen.append(shard)
            else:
                assert not what[3]
        assert all(
            item.data.flags.aligned for p in found.parts for item in p.step.items
        )
    assert sorted(seen) == sorted(shards)


def served(host: ShardHost, frame: Any, body: Any, **said: Any) -> tuple[Any, Any]:
    """Return kind and text of what a host answers to a frame of a template it knows."""
    calls = SocketCalls(host)
    text = frame.template.text
    assert isinstance(calls.begin(Head(TEMPLATE, len(text), 1), [text], 1.0), list)
    head = Head(CALL, len(body), 2, **said)
    [buffer] = calls.wanted(head)
    buffer[:] = body
    found = calls.begin(head, [buffer], 1.0)
    assert isinstance(found, list)
    data = b"".join(bytes(memoryview(b).cast("B")) for b in found)
    return unpack_head(data[:HEAD_NBYTES]).kind, data[HEAD_NBYTES:]


def version_of(host: ShardHost) -> list[int]:
    return [h.shard.segment.current.version for h in host.shards.values()]


@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        (0, -1, "which takes 131,072"),
        (0, 2**62, "which takes 131,072"),
        (0, MOST_PUSHED_ROWS + 1, "which takes 131,072"),
        (0, 3, "whose numbers of ids make"),
        (2, 65_537, "which takes 65,536"),
        (2, 1, "whose numbers of ids make"),
        (4, 20, "PushRejectedError"),
        (4, -1, "PushRejectedError"),
        (7, 19, "do not fit shard"),
        (7, -(2**63), "do not fit shard"),
    ],
)
def test_numbers_and_ids_of_no_call_are_refused(host, routes, word, value, says):
    """Of two shards at host a: how many ids of each, two pushed, then those read."""
    request = push(
        meta_of(routes),
        {},
        STEP._replace(sequence=9 + abs(value) % 97),
        target=target_of(routes, {0: [0, 1, 19]}),
        rows=[brings(0, [0, 19, 3])],
    )
    route = routes.find(request, (0, 1, 2))
    [frame, _] = route.frames
    body = body_of(route, frame).copy()
    words = body[: 8 * 10].view(np.int64)
    assert words.tolist() == [2, 1, 2, 1, 0, 3, 19, 0, 1, 19]
    before = version_of(host)
    words[word] = value
    kind, text = served(host, frame, body, sequence=request.step.sequence)
    assert kind == REFUSAL
    assert says in unpack_text(text)
    assert version_of(host) == before


def test_a_body_that_no_numbers_can_make_takes_no_memory(routes):
    request = push(meta_of(routes), {}, STEP, rows=[brings(0, [0, 19, 3])])
    route = routes.find(request, (0, 1, 2))
    template = template_of(route.frames[0])
    most = template.most_nbytes
    assert most == 2 * (8 + MOST_PUSHED_ROWS * (8 + 6))
    template.check(Head(CALL, most))
    for nbytes in (0, 15, most + 1, 2**63):
        with pytest.raises(ProtocolError, match="of a template that has"):
            template.wanted(Head(CALL, nbytes), lambda *_: pytest.fail("memory"))


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ([[4], []], "table 4 of the 4"),
        ([[-1], []], "table -1"),
        ([[], ["0"]], "table '0'"),
        ([[0, 0], []], "twice"),
        ([[], [1, 1]], "twice"),
        ([[], [0], 1], "with 1 which rows"),
        ([[], [0], True], "with True which rows"),
    ],
)
def test_a_template_of_tables_that_are_none_is_refused(routes, tables, says):
    tables = [*tables, False][:3]
    request = push(meta_of(routes), {}, STEP, rows=[brings(0, [0])])
    route = routes.find(request, (0, 1, 2))
    said = {**json.loads(route.frames[0].template.text), "tables": tables}
    with pytest.raises(ProtocolError, match=says):
        unpack_template(said, lambda *_: LAYOUT)
    said = {**json.loads(route.frames[0].template.text)}
    said["head"] = ["nothing" if x == ADD else x for x in said["head"]]
    with pytest.raises(ProtocolError, match="a nothing of rows"):
        unpack_template(said, lambda *_: LAYOUT)


def test_reads_of_any_shards_are_of_one_template(routes):
    """Else a socket would be told of each set of shards that ids can fall on."""
    keys = set()
    for ids in ([0], [19], [0, 19], [10, 0]):
        request = read(meta_of(routes), target_of(routes, {0: ids}), None, Step())
        route = routes.find(request, tuple(request.route.slices))
        keys |= {(frame.template.worker, frame.key) for frame in route.frames}
    assert len(keys) == 2
    assert [frame.asked for frame in route.frames] == [(0,), (1,)]


def test_marks_come_behind_the_rows_of_all_tables():
    unbounded = (0, 1, "float32", UnboundedIds(constant(2.0), 5, 64))
    layout = Layout.build({}, 1, tables={"any": unbounded, "emb": (4, 2, "float32")})
    hosted: Any = SimpleNamespace(layout=layout, shard=SimpleNamespace(generation=1))
    routes = SocketRoutes(map_of(hosted, ["a"]))
    ids, rows = np.array([1, 3]), []
    for table, number, marks in zip(layout.tables, (0, 2), (1, None), strict=True):
        cut = IdSplit.of(table, ids, 1)
        rows.append(slices_of(layout, cut, number, 0, marks=marks)[0])
    outs = [np.zeros(2, "f4"), np.zeros(2, "u1"), np.zeros(4, "f4")]
    request = read(meta_of(routes), Target({}, outs, dict, {0: tuple(rows)}))
    route = routes.find(request, (0,))
    found = [(one.range, one.number) for one in route.frames[0].reads[0]]
    assert found == [
        (("float32", 0, 2), 0),
        (("float32", 0, 4), 2),
        (("uint8", 0, 2), 1),
    ]


def test_more_rows_than_a_socket_takes_go_by_message(routes):
    """They are of few ids: else the shards would refuse them."""
    request = push(
        meta_of(routes), {}, STEP, rows=[brings(1, [0] * (MOST_PUSHED_ROWS + 1))]
    )
    assert not may_go(meta_of(routes), request)


def test_a_push_of_rows_that_comes_again_counts_once(host, routes):
    request = push(
        meta_of(routes), {}, STEP._replace(sequence=1000), rows=[brings(1, [1, 1])]
    )
    route = routes.find(request, (0, 1, 2))
    before = version_of(host)
    for frame in route.frames:
        for _ in range(2):
            body = body_of(route, frame)
            kind, _ = served(host, frame, body, sequence=1000, floor=1000)
            assert kind == ANSWER
    assert [b - a for a, b in zip(before, version_of(host), strict=True)] == [1, 1, 1]
    assert host.shards["s", 1].shard.segment.tables[1].rows.tolist() == [[0 + 1]]


def answers(
    host: ShardHost, routes: SocketRoutes, number: int, arrays: tuple[int, ...]
) -> list[Any]:
    """Return what a host says to a push of rows, and to a read of some and of arrays."""
    found = []
    step = STEP._replace(sequence=number, floor=number)
    push_ = push(meta_of(routes), {}, step, rows=[brings(2, [8, 0, 8]), brings(0, [5])])
    asked = target_of(routes, {0: [5, 0, 19, 5], 2: [8]}, arrays)
    read_ = read(meta_of(routes), asked, None, Step())
    for request in (push_, read_):
        route = routes.find(request, tuple(request.route.slices))
        for frame in route.frames:
            said = request.step
            numbers = {"sequence": said.sequence, "floor": said.floor}
            found.append(served(host, frame, body_of(route, frame), **numbers))
            assert found[-1][0] == ANSWER
    return found


@pytest.mark.parametrize("arrays", [(), (0,), (0, 1)])
def test_what_is_done_at_once_is_what_tickets_do(host, routes, monkeypatch, arrays):
    number = 2000 + 2 * len(arrays)

    def no_ticket(*_: Any, **__: Any) -> None:
        pytest.fail("a ticket")

    monkeypatch.setattr(Parked, "offer", no_ticket)
    first = answers(host, routes, number, arrays)
    monkeypatch.undo()
    monkeypatch.setattr(ShardReader, "read", lambda *_: reader.REFER)
    again = answers(host, routes, number, arrays)  # the same push: it counts once
    assert first[-2:] == again[-2:]
    monkeypatch.setattr(HostedShard, "try_step", lambda *_, **__: ASK)
    later = answers(host, routes, number + 1, arrays)
    versions = [np.frombuffer(x[1][:32], "i8")[1] for x in (*first[:2], *later[:2])]
    assert versions[2] == versions[0] + 1
    assert versions[3] == versions[1] + 1


def test_a_read_that_an_update_runs_into_is_left_to_the_shard(host, monkeypatch):
    segment = host.shards["s", 0].shard.segment
    read_, out = ShardReader(segment), np.zeros(6, "f2")
    wanted = [RowsRead(len(segment.pieces), np.array([3, 0]), out)]

    def read(bound: int = 0) -> int:
        return read_.read(bound, (), wanted)

    version = segment.current.version
    assert read() == version
    assert out.tolist() == segment.tables[0].rows[[3, 0]].reshape(-1).tolist()
    assert read(version + 1) == reader.REFER
    header = segment.header
    before = out.copy()
    undo.begin(segment, segment.flip + 1, [0])
    buffers = segment.tables[0].buffers
    table = buffers.table
    update = RowUpdate(np.array([0]), np.ones((1, 3), table.w.dtype), replace=True)
    assert update.apply(buffers, segment.flip + 1, None)
    out[:] = 0
    assert read() == segment.current.version
    assert out.tobytes() == before.tobytes()  # as it was before that writer
    assert (table.w[0] == 1).all()
    header[ROWS_SEQUENCE] |= undo.UNTOLD
    try:
        assert read() == BUSY
    finally:
        undo.roll_back(segment)
    assert read() >= 0

    def gathered(*_: Any) -> bool:
        header[ROWS_SEQUENCE] += 8
        return True

    monkeypatch.setattr(FixedGather, "__call__", gathered)
    assert read() == BUSY


# -- words of any number ---------------------------------------------------------------


def in_words(routes: SocketRoutes, codec: Any, rows: bool) -> Any:
    """Return a push of words of "w", to which rows of "f" may come."""
    meta, name = meta_of(routes), codecs.name_of(codec, b"of these tests")
    codecs.keep(name, codec)
    arrays = {1: np.array([0, 0.5, 0, 0, -2, 3, 0], "f4")}
    words, _ = encoding.encoded(LAYOUT, arrays, codec, finite=True, empty=np.empty)
    given = [brings(2, [8, 1, 1, 4])] if rows else []
    given = [one.in_words(codec, finite=True, empty=np.empty) for one in given]
    step = Step(GRADIENT, run=7, tick=True)
    made = push(meta, arrays, step, everywhere=True, rows=given, words=words)
    return made._replace(codec=name)


@pytest.mark.parametrize(
    ("codec", "rows"), [(TopK(threshold=0.4), False), (BFloat16(), True)]
)
def test_words_arrive_as_a_message_brings_them(host, routes, codec, rows):
    request = in_words(routes, codec, rows)
    route = routes.find(request, (0, 1, 2))
    for frame in route.frames:
        template, body = template_of(frame), body_of(route, frame)
        head = Head(CALL, len(body))
        [buffer] = template.wanted(head, np.empty)
        buffer[:] = body
        parts = template.parts(head, template.read_body(head, [buffer]))
        found = template.call._replace(parts=tuple(parts))
        assert found.codec == request.codec
        expected = request.call(meta_of(routes), frame.asked, 0.0, "")
        assert plain(found) == plain(expected)
        if request.codec:
            encoding.widened(found, LAYOUT, np.empty)


@pytest.mark.parametrize(
    ("value", "says"),
    [(-1, "which takes"), (2**62, "which takes"), (1, "numbers of ids make")],
)
def test_numbers_of_words_of_no_call_are_refused(host, routes, value, says):
    """Host a has two shards: 0.5 is in one of them, 3 in the other."""
    request = in_words(routes, TopK(threshold=0.4), rows=False)
    route = routes.find(request, (0, 1, 2))
    frame = route.frames[0]
    body = body_of(route, frame).copy()
    words = body[: 8 * 2].view(np.int64)
    assert words.tolist() == [2, 2]
    before = version_of(host)
    words[0] = value
    kind, text = served(host, frame, body)
    assert kind == REFUSAL
    assert says in unpack_text(text)
    assert version_of(host) == before


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            {"sizes": -2},
            PushRejectedError,
            "-2 elements or words",
        ),
        ({8: True}, ProtocolError, "that is to be looked at"),
        ({1: "add"}, ProtocolError, "a add in words of a codec"),
        ({-2: "evil"}, ValueError, "codec='evil' is not known here"),
    ],
)
def test_a_template_of_words_of_no_call_is_refused(routes, change, error, says):
    request = in_words(routes, TopK(threshold=0.4), rows=False)
    route = routes.find(request, (0, 1, 2))
    said = json.loads(route.frames[0].template.text)
    for at, value in change.items():
        if isinstance(at, int):
            said["head"][at] = value
        else:
            said["parts"][0][2][0][2] = value
    with pytest.raises(error, match=says):
        unpack_template(said, lambda *_: LAYOUT)


def test_words_that_do_not_fit_are_refused(host, routes):
    """Four where three are as many as there can be of one number."""
    request = in_words(routes, TopK(threshold=0.4), rows=False)
    call = request.call(meta_of(routes), (0, 1, 2), 0.0, "")
    parts = call.parts
    step = parts[1].step
    [item] = step.items
    bad = parts[1]._replace(
        step=step._replace(items=(item._replace(data=np.zeros(10, "u4")),))
    )
    with pytest.raises(PushRejectedError, match="10 words of codec='topk' do not fit"):
        encoding.widened(call._replace(parts=(parts[0], bad)), LAYOUT, np.empty)


def test_a_host_refuses_words_that_do_not_fit(host, routes):
    """Of three numbers there are nine at most, and here are twelve."""
    request = in_words(routes, TopK(threshold=0.4), rows=False)
    route = routes.find(request, (0, 1, 2))
    said = [np.array([12, 0]).view(np.uint8), np.zeros(12 * 4, np.uint8)]
    kind, text = served(host, route.frames[0], np.concatenate(said))
    assert kind == REFUSAL
    assert "12 words of codec='topk' do not fit 3 elements of 'w'" in unpack_text(text)


def test_more_words_than_a_socket_takes_go_by_message(routes):
    """A user's codec may say any number."""

    class Long(codecs.Codec):
        def n_words(self, n):
            return 5000

        def encode(self, array, words):
            words[: array.nbytes] = array.view("u1")

        def decode(self, words, out):
            out[:] = words[: out.nbytes].view(out.dtype)

    assert not may_go(meta_of(routes), in_words(routes, Long(), rows=False))
