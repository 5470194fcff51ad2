"""The host's end of a socket without a cluster, and one who calls it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from daskps import optim
from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.hosted import HostedShard
from daskps.cluster.host.socket_calls import Parked, SocketCalls
from daskps.cluster.protocol.messages import PROTOCOL, Answer, Call
from daskps.cluster.protocol.packing import bytes_of, pack_array
from daskps.cluster.protocol.read_words import read_codec_of
from daskps.cluster.sockets.channel import Channel
from daskps.cluster.sockets.frames import (
    ANSWER,
    CALL,
    HAS_LEAST,
    HAS_LR,
    HEAD_NBYTES,
    MOST_TEMPLATES,
    REFUSAL,
    ROW_NBYTES,
    TEMPLATE,
    Head,
    Tail,
    pack_head,
    pack_text,
    unpack_head,
    unpack_rows,
    unpack_text,
)
from daskps.cluster.sockets.served import views_of
from daskps.cluster.sockets.templates import (
    LEAST,
    key_of,
    pack_template,
    unpack_template,
)
from daskps.config import cache_dir
from daskps.layout.arrays import Layout
from daskps.optim import Rule
from daskps.shards.memory.format import GENERATION
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard

#: Three shards of two dtypes.
LAYOUT = Layout.build({"w": ((90,), "float32"), "b": ((2, 3), "float64")}, 3)


#: Kept between tests: what is compiled once is compiled for all of them.
RULE = optim.Adam(0.1)


def hosted_shards(
    layout: Layout = LAYOUT, rule: Rule | None = RULE
) -> list[HostedShard]:
    """Return all shards of a store, in this process's own memory."""
    found = []
    for index in range(layout.n_shards):
        bound = {} if rule is None else bindings(layout, rule)
        slots = {i: [0.0] * len(b.rule.slots) for i, b in bound.items()}
        segment = Segment(layout, index, slots)
        shard = Shard(segment, bound, cache_dir=cache_dir())
        segment.words[GENERATION] = shard.generation
        found.append(HostedShard("s", layout, index, shard))
    return found


def bindings(layout: Layout, rule: Rule) -> dict[int, Any]:
    """Return a rule for all parameters and tables that can have one."""
    every: list[Any] = [*layout.parameters, *layout.tables]
    return {
        p.index: optim.bind(rule, p.dtype, cache_dir=cache_dir())
        for p in every
        if p.dtype[0] == "f"
    }


def pack_frame(call: Call, template: int, number: int) -> list[Any]:
    """Return a call as the buffers of its frame.

    Parameters
    ----------
    call : Call
        The call.
    template : int
        Number of its template.
    number : int
        Number of the frame.
    """
    step, flags, body = call.step, 0, list[Any]()
    if step.lr is not None:
        flags |= HAS_LR
    if any(p.step.at_least for p in call.parts):
        flags |= HAS_LEAST
        body.append(np.array([p.step.at_least for p in call.parts], LEAST))
    data = [item.data for part in call.parts for item in part.step.items]
    body += sorted(data, key=lambda array: -array.itemsize)
    body = [np.ascontiguousarray(array) for array in body if array.nbytes]
    head = Head(
        CALL,
        sum([array.nbytes for array in body]),
        number,
        template,
        flags,
        step.clock,
        step.sequence,
        step.floor,
        step.weight,
        step.lr or 0.0,
        min(int(1000 * call.wait_seconds), 2**32 - 1),
    )
    return [pack_head(head), *body]


def message_of(call: Call, layout: Layout = LAYOUT) -> dict[str, Any]:
    """Return a call with any rows as the message that a caller sends."""
    pushed, read, finds = dict[int, None](), dict[int, None](), False
    for part in call.parts:
        first = len(layout.pieces[part.shard])
        items = part.step.items
        pushed |= {i.position - first: None for i in items if i.ids is not None}
        read |= {asked.position - first: None for asked in part.rows}
        finds = finds or any(not asked.dim for asked in part.rows)
    arrays = [
        part._replace(
            step=part.step._replace(items=tuple(i for i in of if i.ids is None)),
            rows=(),
        )
        for part, of in ((part, part.step.items) for part in call.parts)
    ]
    plain = call._replace(parts=tuple(arrays))
    ids, words = list[Any](), list[int]()
    for part in call.parts:
        by_table = {i.position: i for i in part.step.items if i.ids is not None}
        for table in pushed:
            item = by_table[table + len(layout.pieces[part.shard])]
            ids.append(item.ids)
            words.append(len(item.data))
    for part in call.parts:
        of = {asked.position: asked.ids for asked in part.rows}
        first = len(layout.pieces[part.shard])
        ids += [of.get(table + first, ()) for table in read]
    counts = [*map(len, ids), *(words if call.codec else ())]
    step, flags, body = call.step, 0, list[Any]()
    if any(p.step.at_least for p in call.parts):
        flags |= HAS_LEAST
        body.append(np.array([p.step.at_least for p in call.parts], LEAST))
    body.append(np.array(counts, "i8"))
    body = [np.concatenate(body)] if sum(map(len, body)) else []
    data = [item.data for part in call.parts for item in part.step.items]
    body += [one for one in ids if len(one)]
    body += [one for one in sorted(data, key=lambda a: -a.itemsize) if len(one)]
    head = Head(
        CALL,
        sum(array.nbytes for array in body),
        0,
        0,
        flags | (HAS_LR if step.lr is not None else 0),
        step.clock,
        step.sequence,
        step.floor,
        step.weight,
        step.lr or 0.0,
        int(1000 * call.wait_seconds),
    )
    text = json.dumps(pack_template(plain, tables=([*pushed], [*read], finds))).encode()
    return {
        "protocol": PROTOCOL,
        "template": key_of(text),
        "text": text,
        "head": pack_head(head),
        "body": [pack_array(array) for array in body],
        "given_up": step.given_up,
        "token": call.token,
    }


def arrived(call: Call, layout: Layout = LAYOUT) -> Call:
    """Return a call as a host has it that gets it by message."""
    sent = message_of(call, layout)
    template = unpack_template(unpack_text(sent["text"]), lambda *_: layout)
    body = [bytes_of(array) for array in sent["body"]]
    said = {name: sent[name] for name in ("given_up", "token")}
    return template.call_in(unpack_head(sent["head"]), body, **said)


def dtypes_of(call: Call) -> dict[int, list[str]]:
    """Return by shard the dtypes of the arrays that answer a call."""
    return {p.shard: [d for d, n in p.answered if n] for p in call.parts}


class RefusedError(Exception):
    """What a socket leaves to messages."""


class Caller:
    """Calls a host by a socket whose other end this thread serves too.

    Parameters
    ----------
    host : ShardHost
        Of the shards of store "s".
    """

    def __init__(self, host: ShardHost, here: socket.socket, there: socket.socket):
        self.socket = here
        #: How long the host's thread waits for locks.
        self.seconds = 1.0
        self.channel, self.there = Channel(here, 30.0), Channel(there, 30.0)
        self.calls = SocketCalls(host)
        self._templates: dict[Any, int] = {}
        self._number = 0

    def begin(self, call: Call) -> list[Any] | Parked:
        """Send a call and have the host begin it."""
        key = repr(pack_template(call))
        if key not in self._templates:
            if len(self._templates) == MOST_TEMPLATES:
                self._templates.clear()
            number = len(self._templates)
            frame = pack_text(TEMPLATE, pack_template(call), self._next(), number)
            answer = self.serve(frame)
            assert not isinstance(answer, Parked)
            self.answers(answer, call, is_template=True)
            self._templates[key] = number
        return self.serve(pack_frame(call, self._templates[key], self._next()))

    def serve(self, frame: Sequence[Any]) -> list[Any] | Parked:
        """Send a frame and have the host begin it."""
        self.channel.send(frame)
        head = self.there.receive_head()
        if (found := self.calls.read_now(pack_head(head))) is not None:
            return [bytes(found)]
        body = self.calls.wanted(head)
        for buffer in body:
            self.there.receive_into(buffer)
        return self.calls.begin(head, body, self.seconds)

    def call(self, call: Call) -> list[Answer]:
        """Return what a host answers to a call that need not wait."""
        found = self.begin(call)
        assert not isinstance(found, Parked)
        return self.answers(found, call)

    def answers(
        self, frame: Sequence[Any], call: Call, *, is_template: bool = False
    ) -> list[Answer]:
        """Return the answers of a frame, with their arrays."""
        views = views_of(frame)
        data = b"".join(v.made() if isinstance(v, Tail) else v for v in views)
        head, body = unpack_head(data[:HEAD_NBYTES]), data[HEAD_NBYTES:]
        assert head.number == self._number
        assert head.nbytes == len(body)
        if head.kind == REFUSAL:
            raise RefusedError(unpack_text(body))
        assert head.kind == ANSWER
        if is_template:
            assert not body
            return []
        at = ROW_NBYTES * len(call.parts)
        shards = [part.shard for part in call.parts]
        found, name = [], call.read_codec
        codec = read_codec_of(name) if name else None
        for row, part in zip(unpack_rows(body[:at], shards), call.parts, strict=True):
            arrays = []
            part = part.in_words(codec) if codec is not None else part
            sent = [(d, n) for d, n, _ in part.sent]
            for dtype, n in () if row.parked else sent:
                array = np.frombuffer(body, dtype, n, at)
                arrays.append(array)
                at += array.nbytes
            found.append(row._replace(arrays=tuple(arrays)))
        assert at == len(body)
        return found

    def _next(self) -> int:
        self._number += 1
        return self._number

    def head(self, **said: Any) -> Head:
        """Return the head of the next frame."""
        return Head(number=self._next(), **said)


@contextmanager
def calling(host: ShardHost) -> Iterator[Caller]:
    """Have a socket to a host."""
    here, there = socket.socketpair()
    with here, there:
        yield Caller(host, here, there)
