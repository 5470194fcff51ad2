"""Frames and templates of a socket: what is sent is what arrives, and nothing else is taken."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps.cluster.protocol.messages import Answer, Call, Part
from daskps.cluster.sockets.frames import (
    ANSWER,
    CALL,
    FETCH,
    HAS_LEAST,
    HEAD_NBYTES,
    MOST_TEMPLATES,
    MOST_TEXT,
    REFUSAL,
    ROW_NBYTES,
    TEMPLATE,
    Head,
    pack_answers,
    pack_head,
    pack_refusal,
    pack_text,
    unpack_head,
    unpack_rows,
    unpack_text,
)
from daskps.cluster.sockets.templates import pack_template, unpack_template
from daskps.errors import (
    ProtocolError,
    PushRejectedError,
    StaleGenerationError,
    UnknownParameterError,
)
from daskps.layout.arrays import Layout
from daskps.shards.steps import ASSIGN, BARRIER, GRADIENT, NOTHING, READ, Item, Step
from tests.cluster.by_socket import pack_frame

N_SHARDS = 3
LAYOUT = Layout.build(
    {"w": ((20,), "float32"), "h": ((7,), "float16"), "b": ((2, 3), "float64")},
    N_SHARDS,
)
WORDS = st.integers(-1, 2**62)


def layout_of(store: str, shard: int) -> Layout:
    if store != "store":
        raise StaleGenerationError("no such store")
    return LAYOUT


# -- heads ----------------------------------------------------------------------

HEADS = st.builds(
    Head,
    kind=st.sampled_from([CALL, ANSWER]),
    nbytes=st.integers(0, 2**64 - 1),
    number=st.integers(0, 2**32 - 1),
    template=st.integers(0, MOST_TEMPLATES - 1),
    flags=st.integers(0, 3),
    clock=WORDS,
    sequence=WORDS,
    floor=WORDS,
    weight=st.floats(allow_nan=False, allow_infinity=False),
    lr=st.floats(allow_nan=False),
    wait_ms=st.integers(0, 2**32 - 1),
)


@given(HEADS)
def test_a_head_arrives_as_it_was_sent(head):
    packed = pack_head(head)
    assert len(packed) == HEAD_NBYTES == 64
    assert unpack_head(packed) == head


@given(st.binary(min_size=64, max_size=64))
def test_bytes_are_no_head(data):
    with pytest.raises(ProtocolError, match="no frame of a socket"):
        unpack_head(b"GET " + data[4:])


@given(HEADS, st.integers(4, 63), st.integers(0, 255))
def test_a_damaged_head_is_refused_or_one_that_may_be(head, position, byte):
    packed = bytearray(pack_head(head))
    packed[position] = byte
    try:
        found = unpack_head(packed)
    except ProtocolError:
        return
    assert TEMPLATE <= found.kind <= FETCH
    assert 0 <= found.template < MOST_TEMPLATES
    assert min(found.clock, found.sequence, found.floor) >= -1
    assert max(found.clock, found.sequence, found.floor) <= 2**62
    assert np.isfinite(found.weight)
    if found.kind in (TEMPLATE, REFUSAL):
        assert found.nbytes <= MOST_TEXT


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": 0},
        {"kind": 6},
        {"flags": 4},
        {"template": MOST_TEMPLATES},
        {"clock": -2},
        {"sequence": -(2**63)},
        {"floor": -2},
        {"clock": 2**62 + 1},
        {"sequence": 2**63 - 1},
        {"floor": 2**63 - 1},
        {"weight": float("nan")},
        {"weight": float("inf")},
        {"kind": TEMPLATE, "nbytes": MOST_TEXT + 1},
        {"kind": REFUSAL, "nbytes": 2**63},
    ],
    ids=str,
)
def test_a_head_that_no_end_sends_is_refused(wrong):
    with pytest.raises(ProtocolError, match="no end of a socket"):
        unpack_head(pack_head(Head(CALL)._replace(**wrong)))


@pytest.mark.parametrize("name", ["run", "producer"])
def test_a_form_with_a_number_that_can_grow_no_more_is_refused_too(name):
    """Shards count on from what they are told, in words of 64 bits."""
    said: dict[str, Any] = {"run": 1, "rank": 0, name: 2**63 - 1}
    template = pack_template(Call("store", (Part(0, Step(GRADIENT, **said)),)))
    with pytest.raises(ProtocolError, match=f"a call with {name}=9223372036854775807"):
        unpack_template(template, layout_of)


# -- calls and their templates ---------------------------------------------------------


@st.composite
def parts(draw: Any, kind: str) -> Part:
    shard = draw(st.integers(0, N_SHARDS - 1))
    pieces = LAYOUT.pieces[shard]
    items = []
    if kind != NOTHING:
        for position in draw(st.sets(st.integers(0, len(pieces) - 1))):
            piece = pieces[position]
            start = draw(st.integers(0, piece.size))
            n = draw(st.integers(0, piece.size - start))
            dtype = piece.parameter.dtype
            if kind == GRADIENT and dtype == "float16":
                dtype = "float32"
            data = np.arange(start, start + n, dtype=dtype)
            items.append(Item(position, start, data))
    ranges = tuple(
        (d, 0, draw(st.integers(0, n)))
        for d, n in LAYOUT.n_elements[shard].items()
        if draw(st.booleans())
    )
    step = Step(
        items=tuple(items),
        generation=draw(st.integers(1, 5)),
        wait=draw(st.sampled_from(["no", READ, BARRIER])),
        at_least=draw(st.sampled_from([0, 0, 7])),
    )
    return Part(shard, step, ranges)


@st.composite
def calls(draw: Any) -> Call:
    kind = draw(st.sampled_from([NOTHING, GRADIENT, ASSIGN]))
    found = draw(
        st.lists(parts(kind), min_size=1, max_size=3, unique_by=lambda p: p.shard)
    )
    common = {
        "kind": kind,
        "run": draw(st.integers(0, 9)),
        "rank": draw(st.integers(-1, 9)),
        "clock": draw(WORDS),
        "tick": draw(st.booleans()),
        "producer": draw(st.integers(0, 9)),
        "sequence": draw(WORDS),
        "weight": draw(st.floats(0, 10)),
        "lr": draw(st.none() | st.floats(0, 1)),
        "floor": draw(WORDS),
        "touched": draw(st.none() | st.just(((0, 1), (2, 3)))),
        "whole": draw(st.booleans()),
        "owned": True,
    }
    found = [p._replace(step=p.step._replace(**common)) for p in found]
    return Call("store", tuple(found), draw(st.integers(0, 100)) / 4)


def arrived(call: Call, template: Any) -> Call:
    """Return a call as a host takes it out of its frame."""
    head, *body = pack_frame(call, 3, 4)
    found = unpack_head(head)
    assert (found.kind, found.template, found.number) == (CALL, 3, 4)
    template.check(found)
    stream = b"".join(bytes(memoryview(b).cast("B")) for b in body)
    assert found.nbytes == len(stream)

    body = [np.frombuffer(stream, np.uint8)] if stream else []
    parts = template.parts(found, template.read_body(found, body))
    assert [len(buffer) for buffer in template.wanted(found, np.empty)] == [
        *map(len, body)
    ]
    wait = found.wait_ms / 1000
    made: Call = template.call._replace(parts=tuple(parts), wait_seconds=wait)
    return made


def comparable(call: Call) -> Any:
    """Return a call with lists for arrays."""

    def plain(item: Item) -> Any:
        ids = None if item.ids is None else item.ids.tolist()
        return item.position, item.start, item.data.dtype, item.data.tolist(), ids

    parts = [
        p._replace(step=p.step._replace(items=[*map(plain, p.step.items)]))
        for p in call.parts
    ]
    return call._replace(parts=tuple(parts))


def said(call: Call) -> Any:
    """Return its template as it arrives."""
    _, text = pack_text(TEMPLATE, pack_template(call), 1, 3)
    return unpack_text(text)


@settings(max_examples=25)
@given(calls())
def test_a_call_arrives_as_it_was_sent(call):
    template = unpack_template(said(call), layout_of)
    assert comparable(arrived(call, template)) == comparable(call)


@settings(max_examples=25)
@given(calls(), st.integers(1, 2**40))
def test_later_calls_of_the_template_need_no_other(call, clock):
    template = unpack_template(said(call), layout_of)
    later = call._replace(
        parts=tuple(
            p._replace(
                step=p.step._replace(clock=clock, sequence=3, weight=2.5, lr=0.5)
            )
            for p in call.parts
        )
    )
    assert pack_template(later) == pack_template(call)
    assert comparable(arrived(later, template)) == comparable(later)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": ASSIGN},
        {"run": 3},
        {"rank": 3},
        {"tick": True},
        {"producer": 3},
        {"generation": 3},
        {"wait": READ},
        {"touched": ((0, 1),)},
        {"whole": True},
        {"items": (Item(0, 1, np.zeros(5, "f4")),)},
        {"items": (Item(0, 0, np.zeros(4, "f4")),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_no_head_says_makes_another_template(change):
    part = PUSH.parts[0]
    other = PUSH._replace(parts=(part._replace(step=part.step._replace(**change)),))
    assert pack_template(other) != pack_template(PUSH)
    assert pack_template(PUSH._replace(codec="bf16")) != pack_template(PUSH)
    read = PUSH._replace(parts=(part._replace(ranges=(("float32", 0, 1),)),))
    assert pack_template(read) != pack_template(PUSH)


def test_a_template_takes_no_memory_for_its_arrays():
    data = np.zeros(7, "f4")
    call = Call("store", (Part(0, Step(kind=GRADIENT, items=(Item(0, 0, data),))),))
    template = unpack_template(said(call), layout_of)
    [item] = template.call.parts[0].step.items
    assert item.data.nbytes == 0
    assert (template.least_nbytes, template.most_nbytes) == (28, 28)


PUSH = Call(
    "store", (Part(0, Step(kind=GRADIENT, items=(Item(0, 0, np.zeros(5, "f4")),))),)
)


@pytest.mark.parametrize("nbytes", [0, 19, 21, 28, 2**63])
@pytest.mark.parametrize("flags", [0, HAS_LEAST])
def test_a_body_of_another_length_is_refused(nbytes, flags):
    template = unpack_template(said(PUSH), layout_of)
    if nbytes == 28 and flags:
        template.check(Head(CALL, nbytes, flags=flags))
        return
    with pytest.raises(ProtocolError, match="of a template that has"):
        template.check(Head(CALL, nbytes, flags=flags))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda f: f.update(protocol=1), ProtocolError),
        (lambda f: f["head"].__setitem__(0, "other"), StaleGenerationError),
        (lambda f: f["head"].__setitem__(1, "evil"), ProtocolError),
        (lambda f: f["head"].__setitem__(-1, "evil"), (ValueError, KeyError)),
        (lambda f: f["head"].__setitem__(-2, "evil"), (ValueError, KeyError)),
        (lambda f: f["parts"][0].__setitem__(0, 3), (ProtocolError, IndexError)),
        (lambda f: f["parts"][0].__setitem__(3, [["float32", 0, 99]]), ProtocolError),
        (lambda f: f["parts"].append(f["parts"][0]), (ProtocolError, ValueError)),
        (lambda f: f["parts"][0][2][0].__setitem__(0, 99), PushRejectedError),
        (lambda f: f["parts"][0][2][0].__setitem__(0, -1), PushRejectedError),
        (lambda f: f["parts"][0][2][0].__setitem__(1, -1), PushRejectedError),
        (lambda f: f["parts"][0][2][0].__setitem__(1, 99), PushRejectedError),
        (lambda f: f["parts"][0][2][0].__setitem__(2, -1), PushRejectedError),
        (lambda f: f["parts"][0][2][0].__setitem__(2, 2**62), PushRejectedError),
        (lambda f: f["parts"][0][2][0].__setitem__(2, 2**47), PushRejectedError),
        (lambda f: f["parts"][0][2][0].__setitem__(2, 1.5), PushRejectedError),
        (lambda f: f["parts"][0][2][0].append(6), ValueError),
        (lambda f: f["parts"][0][2].append(f["parts"][0][2][0]), ProtocolError),
        (lambda f: f["parts"][0].pop(), ValueError),
        (lambda f: f.clear(), KeyError),
    ],
)
def test_a_template_of_no_call_is_refused(change, error):
    template = said(PUSH)
    unpack_template(json.loads(json.dumps(template)), layout_of)
    change(template)
    with pytest.raises(error):
        unpack_template(template, layout_of)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 200_000, b"1" * 10_000])
def test_a_text_that_is_none_is_refused(text):
    with pytest.raises(ProtocolError, match="no text of a socket"):
        unpack_text(text)


def test_a_template_too_long_for_a_socket_is_not_sent():
    with pytest.raises(ProtocolError, match="more than a socket takes"):
        pack_text(TEMPLATE, ["x" * MOST_TEXT], 1)


# -- answers ------------------------------------------------------------------------


@given(
    st.lists(
        st.builds(
            Answer,
            shard=st.just(0),
            parked=st.booleans(),
            applied=st.booleans(),
            version=WORDS,
            lag=st.integers(0, 2**40),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_answers_arrive_as_they_were_sent(answers):
    answers = [a._replace(shard=i) for i, a in enumerate(answers)]
    (frame,) = pack_answers(answers, 9)
    head = unpack_head(frame[:HEAD_NBYTES])
    assert (head.kind, head.number) == (ANSWER, 9)
    assert head.nbytes == len(frame) - HEAD_NBYTES == ROW_NBYTES * len(answers)
    assert unpack_rows(frame[HEAD_NBYTES:], range(len(answers))) == answers


def test_arrays_follow_the_rows():
    arrays = (np.arange(3, dtype="f4"), np.empty(0, "f8"), np.ones(2, "f8"))
    frame, *body = pack_answers([Answer(0, arrays=arrays)], 1)
    assert [b.tolist() for b in body] == [[0, 1, 2], [1, 1]]
    assert unpack_head(frame[:HEAD_NBYTES]).nbytes == ROW_NBYTES + 12 + 16


def test_an_error_of_one_shard_refuses_the_call():
    error = UnknownParameterError("half a character \ud800" + "x" * 10_000)
    head, text = pack_answers([Answer(0), Answer(1, error=error)], 5)
    assert unpack_head(head).kind == REFUSAL
    assert unpack_text(text).startswith("UnknownParameterError: ")
    assert len(text) < 2000
    assert pack_refusal(error, 5) == [head, text]


@pytest.mark.parametrize("row", [(1, 0, 0, 2), (0, 0, 0, 8), (0, 0, 0, -1)])
def test_rows_that_answer_another_call_are_refused(row):
    data = np.array(row, "<i8").tobytes()
    with pytest.raises(ProtocolError, match="answers no call"):
        unpack_rows(data, [0])
